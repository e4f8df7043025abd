"""Tagging by fine-tuning: parts of speech (UD POS) and named entities (PAN-X).

Every word is tagged at its first subword, by a linear layer or with a CRF on top of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.experiment import FinetuneExperiment, PlugInSetup, TestScores
from calque.evaluation.finetuning.finetune import predict
from calque.evaluation.finetuning.head_model import (
    HeadModel,
    max_sequence_length,
    move_to_device_of,
)
from calque.evaluation.finetuning.labeled_corpus import LabeledCorpus
from calque.evaluation.finetuning.plug_in import (
    PairRows,
    TranslatedExample,
    TranslatedPairs,
    pair_windows,
)
from calque.evaluation.finetuning.transfer import OnProgress, TransferRun, choose_tests, report_part
from calque.evaluation.records import ItemScores
from calque.evaluation.settings import remember
from calque.io.conllu import (
    NO_TAG,
    OUTSIDE,
    TaggedSentence,
    check_bio_tags,
    find_spans,
    join_characters,
    read_entity_tags,
    read_tagged,
    read_untagged,
)
from calque.io.segmentation import get_word_splitter
from calque.io.xtreme import TaskFiles, find_treebanks, find_xtreme_files
from calque.models.crf import ConditionalRandomField, allowed_span_transitions
from calque.models.heads import NO_LABEL, make_linear, mean_cross_entropy
from calque.objectives.base import TensorBatch
from calque.tokens.layout import build_packed_layout
from calque.tokens.ragged import BatchShape, Ragged, add_special_tokens, ranges, reorder
from calque.tokens.tokenizer import boundary_ids
from calque.tokens.windows import split_encoded_words
from calque.tokens.words import WordEncoder

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.evaluation.finetuning.plug_in import PlugInTokens
    from calque.evaluation.records import LanguageScores
    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

TaskName = Literal["pos", "ner"]
POS: TaskName = "pos"
NER: TaskName = "ner"
CHINESE = "zh"
FOLDERS = {POS: "udpos", NER: "panx"}
READERS: dict[TaskName, Callable[[Path], list[TaggedSentence]]] = {
    POS: read_tagged,
    NER: read_entity_tags,
}
# Tagged translations by language, each with the number of the sentence that it translates.
TeacherLabels: TypeAlias = Mapping[str, Sequence[tuple[TaggedSentence, int]]]


def measure(
    encoder: Encoder,
    data: Path,
    *,
    task: TaskName,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress = lambda done, total: None,
) -> list[LanguageScores]:
    """Train a tagger as the setting requires and return its scores by language.

    POS: accuracy over words, and F1 as XTREME computes it. NER: F1 of whole spans. An item is a
    sentence.
    """
    tests = list_languages(data, settings, task) if languages is None else list(languages)
    key = (task, str(data), settings.hash())
    experiment = remember(
        encoder.tokenizer, key, lambda: build_experiment(encoder, data, task, settings)
    )
    if settings.setting == "translate-train-all" and experiment.corpus.files.untagged:
        experiment = _add_teacher_labels(
            encoder, data, task, experiment, seed, partial(report_part, on_progress, 0, 2)
        )
        on_progress = partial(report_part, on_progress, 1, 2)
    return experiment.measure(encoder, tests, seed, on_progress)


def list_languages(data: Path, settings: TaskSettings, task: TaskName) -> list[str]:
    """List the languages that can be tested in this setting, the source first."""
    files = find_files(data, task)
    trainable = {*LabeledCorpus(files, READERS[task], settings).trainable}
    if settings.setting == "translate-train-all":
        trainable |= files.untagged.keys()  # a teacher will tag them
    return choose_tests(settings, sorted(trainable), files.test_languages)


def find_files(data: Path, task: TaskName) -> TaskFiles:
    """Find the files of a task in XTREME's format or, for parts of speech, treebanks."""
    files = find_xtreme_files(data, FOLDERS[task], n_columns=2)
    if files is None and task == POS:
        files = find_treebanks(data)
    if files is None:
        names = f"{FOLDERS[task]}/train-en.tsv and dev-XX.tsv"
        treebanks = " or ud/*.conllu" if task == POS else ""
        problem = f"the folder has no files of {task}"
        raise InputError(problem, file=data, fix=f"pass a folder with {names}{treebanks}")
    return files


def build_experiment(
    encoder: Encoder,
    data: Path,
    task: TaskName,
    settings: TaskSettings,
    teacher_labeled: TeacherLabels | None = None,
) -> FinetuneExperiment[TaggedSentence]:
    """Return the experiment of a task; what it reads and encodes can be used for several seeds."""
    longest, tokenizer = max_sequence_length(encoder, settings), encoder.tokenizer
    files = find_files(data, task)
    joins_characters = task == NER and settings.chinese_words
    dropped: dict[Path, dict[str, int]] = {}

    def read(path: Path) -> list[TaggedSentence]:
        sentences = READERS[task](path)
        if joins_characters and path in files.labeled_files(CHINESE):
            # Paper: Wu and Dredze use the Stanford segmenter; this is that of `calque links`.
            split_words = get_word_splitter(CHINESE)
            joined = [join_characters(sentence, split_words) for sentence in sentences]
            sentences = [sentence for sentence, _ in joined]
            dropped[path] = {"words_across_entities": sum(count for _, count in joined)}
        return sentences

    def encode(sentences: Sequence[TaggedSentence], names: list[str]) -> TagExamples:
        return encode_tagged(tokenizer, sentences, names, longest=longest, overlap=settings.overlap)

    def make_model(encoder: Encoder, names: list[str], generator: torch.Generator) -> Tagger:
        return Tagger(encoder, names, settings, generator, spans=task == NER)

    def read_translation(path: Path) -> list[TaggedSentence]:
        return read_untagged(path) if ".txt" in path.suffixes else read(path)

    corpus = LabeledCorpus(files, read, settings, dropped=dropped, teacher_labeled=teacher_labeled)
    plug = None
    if settings.plug == "in":
        pairs = TranslatedPairs(corpus, read_translation, is_empty=lambda line: not line.words)
        plug = PlugInSetup(pairs, partial(encode_tag_pairs, encode))
    return FinetuneExperiment(
        corpus,
        labels_of=lambda sentence: sentence.tags,
        check_labels=partial(_check_tags, task),
        encode=encode,
        make_model=make_model,
        score=partial(_score_tagger, task, settings),
        plug=plug,
    )


def _check_tags(task: TaskName, names: list[str]) -> list[str]:
    known = set(names) - {NO_TAG}
    if task == NER:
        known.add(OUTSIDE)
        check_bio_tags(sorted(known))
    return sorted(known)


def _score_tagger(
    task: TaskName, settings: TaskSettings, tagger: Tagger, test: TagExamples | TagPairs
) -> TestScores:
    predicted = tagger.tag(test, settings)
    gold, names, lengths = test.tags, list(test.names), test.n_words
    if task == POS:
        items = score_words(gold, predicted, lengths)
        runs, _ = score_runs(gold, predicted, names, lengths)
        return TestScores({"accuracy": items.score, "f1": runs.score}, items)
    items, rates = score_spans(gold, predicted, names, lengths)
    known = np.where(predicted < 0, names.index(OUTSIDE), predicted)
    _, n_repaired = repair_spans(known, names, lengths)
    return TestScores({"f1": items.score, **rates}, items, {"tags_repaired": n_repaired})


# Labels of translations. The order of words changes in a translation, so tags cannot be copied. As
# in FILTER (Fang et al., 2020) and VECO, a model fine-tuned on the source tags the translations.


def teacher_settings(settings: TaskSettings) -> TaskSettings:
    """Return the settings of the teacher, which is trained in the source language only."""
    return replace(settings, setting="zero-shot", plug="out")


def label_translations(
    encoder: Encoder,
    experiment: FinetuneExperiment[TaggedSentence],
    seed: int,
    spans: bool,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[TeacherLabels, dict[str, int]]:
    """Train a tagger in the source language and tag all translations with it.

    The encoder has its original weights afterwards. Line k of a translation belongs to sentence k
    of the source's training files; empty lines are left out and counted. With `spans`, invalid
    tags are repaired in the same way as for scoring.
    """
    source, files = experiment.corpus.settings.source, experiment.corpus.files
    texts = {name: read_untagged(path) for name, path in files.untagged.items() if name != source}
    n_train = len(experiment.corpus.load(files.train.get(source, ())))
    for name, sentences in texts.items():
        if len(sentences) != n_train:
            problem = f"the file has {len(sentences):,} lines, but {source!r} {n_train:,} sentences"
            fix = "write one line for every sentence of the training file"
            raise InputError(problem, file=files.untagged[name], fix=fix)
    weights = {name: value.clone() for name, value in encoder.state_dict().items()}
    model, names, _ = experiment.train(encoder, seed, TransferRun((source,), ()), on_progress)
    assert isinstance(model, Tagger)
    labeled, n_empty = {}, 0
    for language, sentences in texts.items():
        numbers = [number for number, sentence in enumerate(sentences) if sentence.words]
        n_empty += n_train - len(numbers)
        tagged = tag_sentences(model, experiment, [sentences[k] for k in numbers], names, spans)
        labeled[language] = list(zip(tagged, numbers, strict=True))
    with torch.no_grad():
        encoder.load_state_dict(weights)
    counts = {
        "labelled_by_teacher": sum(map(len, labeled.values())),
        "translations_empty": n_empty,
    }
    return labeled, {name: count for name, count in counts.items() if count}


def tag_sentences(
    tagger: Tagger,
    experiment: FinetuneExperiment[TaggedSentence],
    sentences: Sequence[TaggedSentence],
    names: list[str],
    spans: bool,
) -> list[TaggedSentence]:
    """Return sentences with predicted tags; a word without subwords has none."""
    # Words without a tag are not predicted, so every word gets some tag first.
    tagged = [TaggedSentence(s.words, (names[0],) * len(s.words)) for s in sentences]
    examples = experiment.encode(tagged, names)
    predicted = tagger.tag(examples, experiment.corpus.settings)
    if spans:
        known = np.where(predicted == NO_LABEL, names.index(OUTSIDE), predicted)
        tags, _ = repair_spans(known, names, examples.n_words)
    else:
        tags = [NO_TAG if number == NO_LABEL else names[number] for number in predicted.tolist()]
    ends = np.cumsum(examples.n_words).tolist()
    return [
        TaggedSentence(sentence.words, tuple(tags[end - len(sentence.words) : end]))
        for sentence, end in zip(sentences, ends, strict=True)
    ]


def _add_teacher_labels(
    encoder: Encoder,
    data: Path,
    task: TaskName,
    experiment: FinetuneExperiment[TaggedSentence],
    seed: int,
    on_progress: OnProgress,
) -> FinetuneExperiment[TaggedSentence]:
    """Return the experiment with translations that a teacher has labeled as training examples."""
    settings = teacher_settings(experiment.corpus.settings)
    key = (task, str(data), settings.hash())
    teacher = remember(
        encoder.tokenizer, key, lambda: build_experiment(encoder, data, task, settings)
    )
    labeled, counts = label_translations(encoder, teacher, seed, task == NER, on_progress)
    student = build_experiment(encoder, data, task, experiment.corpus.settings, labeled)
    return replace(student, counts=counts)


@dataclass(frozen=True, slots=True)
class TagBatch(TensorBatch):
    """Windows with the label of every token: `NO_LABEL` except at first subwords of tagged words.

    For a CRF, `grid` has the tokens of a window's tagged words, one window per row, and `inside`
    marks the cells of the grid that are used.
    """

    tokens: TokenBatch | PlugInTokens
    labels: Int[Tensor, "tokens"]
    grid: Int[Tensor, "windows words"]
    inside: Bool[Tensor, "windows words"]


@dataclass(frozen=True, slots=True)
class TagExamples:
    """Windows of subwords; words `first_words[k]:first_words[k + 1]` are tagged in window k.

    `offsets` are the positions of these words' first subwords in their windows, and `words` their
    numbers in the text. `tags` has the tags of all words of the text, sentence by sentence.
    """

    windows: Ragged
    first_words: IntArray
    offsets: IntArray
    words: IntArray
    tags: IntArray
    n_words: IntArray  # per sentence
    sentences: IntArray  # number of the sentence of every window
    names: Sequence[str]  # of the tags by number, those that a tagger knows first
    pad_id: int
    counts: Mapping[str, int]

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of every window."""
        return self.windows.lengths

    def find_words(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the indices of the tagged words of some windows, and their number per window."""
        n_words = np.diff(self.first_words)[rows]
        return ranges(self.first_words[:-1][rows], n_words), n_words

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> TagBatch:
        """Return a batch of some windows, without padding or padded to a fixed shape."""
        text = reorder(self.windows, rows)
        layout = build_packed_layout(text, pad_id=self.pad_id, shape=shape)
        n_rows = len(rows) if shape is None else max(len(rows), shape.sequences)
        found = self.find_words(rows)
        return self.build_batch(layout.tokens, layout.slots, text.lengths, found, n_rows, shape)

    def build_batch(
        self,
        tokens: TokenBatch | PlugInTokens,
        slots: IntArray,
        lengths: IntArray,
        tagged: tuple[IntArray, IntArray],
        n_rows: int,
        shape: BatchShape | None,
    ) -> TagBatch:
        """Return a batch with the labels of tagged words, as `find_words` returns them.

        `slots` are the positions in the batch of the tokens of windows with these `lengths`.
        """
        words, n_words = tagged
        starts = np.repeat(np.cumsum(lengths) - lengths, n_words)
        firsts = slots[starts + self.offsets[words]]
        labels = np.full(len(tokens.ids), NO_LABEL, dtype=np.int64)
        labels[firsts] = self.tags[self.words[words]]
        n_columns = n_words if shape is None else np.diff(self.first_words)
        size = n_rows, int(n_columns.max(initial=1))
        grid, inside = np.zeros(size, np.int64), np.zeros(size, np.bool_)
        cells = np.repeat(np.arange(len(n_words)), n_words), ranges(np.zeros_like(n_words), n_words)
        grid[cells], inside[cells] = firsts, True
        return TagBatch(tokens, *map(torch.from_numpy, (labels, grid, inside)))


def encode_tagged(
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[TaggedSentence],
    names: Sequence[str],
    *,
    longest: int,
    overlap: float,
) -> TagExamples:
    """Tokenize sentences word by word and split sentences that are too long into windows.

    Windows overlap, so that every word is tagged in its context. Tags other than the `names` that
    a tagger knows have numbers after those; words without a tag have `NO_LABEL`. `counts` has the
    numbers of such words.
    """
    special = boundary_ids(tokenizer)
    n_before = int(special[0] is not None)
    room = longest - n_before - int(special[1] is not None)
    # Only the first subword of a word is used, so words need not be split.
    pieces, n_shortened = (
        WordEncoder(tokenizer).encode([s.words for s in sentences]).truncate_words(room)
    )
    spans, n_long = split_encoded_words(pieces, room, overlap)
    start, stop, first, last = spans.T
    begins = pieces.first_pieces[start]
    lengths = pieces.first_pieces[stop] - begins
    windows = Ragged(pieces.ids[ranges(begins, lengths)], lengths)
    given = list(chain.from_iterable(sentence.tags for sentence in sentences))
    all_names = [*names, *sorted({*given} - {*names, NO_TAG})]
    numbers = {NO_TAG: NO_LABEL} | {name: number for number, name in enumerate(all_names)}
    tags = np.fromiter(map(numbers.__getitem__, given), np.int64, len(given))
    has_pieces = pieces.n_pieces > 0
    words = ranges(first, last - first)
    owners = np.repeat(np.arange(len(spans)), last - first)
    kept = has_pieces[words] & (tags[words] != NO_LABEL)
    words, owners = words[kept], owners[kept]
    n_tagged = np.bincount(owners, minlength=len(spans))
    counts = {
        "sentences_in_windows": n_long,
        "words_shortened": n_shortened,
        "words_without_subwords": int((~has_pieces).sum()),
        "words_without_tag": int((tags == NO_LABEL).sum()),
        "words_of_unknown_tag": int((tags >= len(names)).sum()),
    }
    return TagExamples(
        windows=add_special_tokens(windows, *special),
        first_words=np.concatenate([[0], np.cumsum(n_tagged)]),
        offsets=pieces.first_pieces[:-1][words] - begins[owners] + n_before,
        words=words,
        tags=tags,
        n_words=pieces.n_words,
        sentences=np.searchsorted(pieces.first_words, start, side="right") - 1,
        names=all_names,
        pad_id=tokenizer.pad_token_id or 0,
        counts={name: count for name, count in counts.items() if count},
    )


@dataclass(frozen=True, slots=True)
class TagPairs:
    """Pairs of windows of sentences and of their translations, for plug-in fine-tuning.

    `own` are the sentences, which are scored; `both` has their translations after them.
    """

    own: TagExamples
    both: TagExamples
    rows: PairRows
    counts: Mapping[str, int]

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of every pair."""
        return self.rows.count_tokens(self.both.windows)

    @property
    def tags(self) -> IntArray:
        """The tags of the words of the sentences."""
        return self.own.tags

    @property
    def words(self) -> IntArray:
        """The numbers of tagged words in the text."""
        return self.both.words

    @property
    def names(self) -> Sequence[str]:
        """The names of the tags by number."""
        return self.own.names

    @property
    def n_words(self) -> IntArray:
        """The number of words of every sentence."""
        return self.own.n_words

    def find_words(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the indices of the tagged words of some pairs, and their number per window."""
        windows, first = self.rows.sequences(rows), self.both.first_words
        n_words = np.where(self.rows.counted(rows), np.diff(first)[windows], 0)
        return ranges(first[:-1][windows], n_words), n_words

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> TagBatch:
        """Return a batch of some pairs, without padding or padded to a fixed shape."""
        text, windows = self.both.windows, self.rows.sequences(rows)
        tokens, layout = self.rows.collate(text, rows, pad_id=self.both.pad_id, shape=shape)
        lengths = np.where(windows < 0, 0, text.lengths[windows])
        n_rows = 2 * (len(rows) if shape is None else max(len(rows), shape.sequences))
        found = self.find_words(rows)
        return self.both.build_batch(tokens, layout.slots, lengths, found, n_rows, shape)


def encode_tag_pairs(
    encode: Callable[[Sequence[TaggedSentence], list[str]], TagExamples],
    pairs: Sequence[TranslatedExample[TaggedSentence]],
    names: list[str],
) -> TagPairs:
    """Encode sentences and translations, whose windows are paired in order."""
    own = encode([pair.example for pair in pairs], names)
    others = encode([_prepare_translation(pair) for pair in pairs if pair.other is not None], names)
    assert len(others.names) == len(names), "a translation has an unknown tag"
    n_own, translated = len(own.windows.lengths), iter(_list_windows(others))
    right = [[] if pair.other is None else [n_own + k for k in next(translated)] for pair in pairs]
    rows = pair_windows(_list_windows(own), right, [pair.learns_other for pair in pairs])
    counts = dict(own.counts)
    if others.counts.get("sentences_in_windows"):
        counts["translations_in_windows"] = others.counts["sentences_in_windows"]
    return TagPairs(own, _concatenate(own, others), rows, counts)


def _prepare_translation(pair: TranslatedExample[TaggedSentence]) -> TaggedSentence:
    """Return the translation, without its tags if it is not trained on."""
    assert pair.other is not None
    if pair.learns_other:
        return pair.other
    return TaggedSentence(pair.other.words, (NO_TAG,) * len(pair.other.words))


def _list_windows(examples: TagExamples) -> list[list[int]]:
    """Return the numbers of the windows of every sentence."""
    windows: list[list[int]] = [[] for _ in examples.n_words]
    for window, sentence in enumerate(examples.sentences.tolist()):
        windows[sentence].append(window)
    return windows


def _concatenate(own: TagExamples, others: TagExamples) -> TagExamples:
    n_tagged = own.first_words[-1]
    return replace(
        own,
        windows=Ragged(
            np.concatenate([own.windows.ids, others.windows.ids]),
            np.concatenate([own.windows.lengths, others.windows.lengths]),
        ),
        first_words=np.concatenate([own.first_words, n_tagged + others.first_words[1:]]),
        offsets=np.concatenate([own.offsets, others.offsets]),
        words=np.concatenate([own.words, len(own.tags) + others.words]),
        tags=np.concatenate([own.tags, others.tags]),
        n_words=np.concatenate([own.n_words, others.n_words]),
        sentences=np.concatenate([own.sentences, len(own.n_words) + others.sentences]),
    )


class Tagger(HeadModel):
    """Scores the tags of a word by a linear layer on its first subword, optionally with a CRF.

    With `spans`, the CRF predicts only sequences in which every I- continues a span of its type.
    """

    supports_plug_in = True

    def __init__(
        self,
        encoder: Encoder,
        names: Sequence[str],
        settings: TaskSettings,
        generator: torch.Generator,
        *,
        spans: bool = False,
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.head = make_linear(self.width, len(names), generator)
        self.crf = ConditionalRandomField(len(names)) if settings.head == "crf" else None
        self.allowed = allowed_span_transitions(names) if spans else None
        move_to_device_of(self, encoder)

    def forward(self, batch: TagBatch) -> Float[Tensor, ""]:
        """Return the mean loss of a word."""
        scores = self.head(self.read(batch.tokens))
        if self.crf is None:
            return mean_cross_entropy(scores, batch.labels)
        # In single precision: the forward algorithm sums over a whole sentence.
        tags = batch.labels[batch.grid].clamp(min=0)
        losses = self.crf(scores[batch.grid].float(), tags, batch.inside)
        mean: Tensor = losses.sum() / batch.inside.sum().clamp(min=1)
        return mean

    def predict_tags(self, batch: TagBatch) -> Int[Tensor, "windows words"]:
        """Return the best tags in the cells of the batch's grid."""
        scores: Tensor = self.head(self.read(batch.tokens))[batch.grid].float()
        if self.crf is None:
            return scores.argmax(-1)
        allowed = None
        if self.allowed is not None:
            allowed = self.allowed[0].to(scores.device), self.allowed[1].to(scores.device)
        return self.crf.decode(scores, batch.inside, allowed)

    def tag(self, examples: TagExamples | TagPairs, settings: TaskSettings) -> IntArray:
        """Return the tags of all words of the text; `NO_LABEL` for words without a gold tag."""
        tags = np.full(len(examples.tags), NO_LABEL, dtype=np.int64)
        for rows, batch, best in list(predict(self, examples, settings, self.predict_tags)):
            words, _ = examples.find_words(rows)
            tags[examples.words[words]] = best[batch.inside].cpu().numpy()
        return tags


def score_words(gold: IntArray, predicted: IntArray, lengths: IntArray) -> ItemScores:
    """Return the accuracy over words by sentence; words without a gold tag do not count."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    is_counted = gold != NO_LABEL
    is_correct = is_counted & (gold == predicted)
    return ItemScores(
        np.bincount(owners[is_correct], minlength=len(lengths)).astype(np.float64),
        np.bincount(owners[is_counted], minlength=len(lengths)).astype(np.float64),
    )


def score_spans(
    gold: IntArray, predicted: IntArray, names: Sequence[str], lengths: IntArray
) -> tuple[ItemScores, dict[str, float]]:
    """Return F1 of spans by sentence, and precision and recall.

    A span is correct if its boundaries and its type are.
    """
    outside = names.index(OUTSIDE)
    sides = [np.where(tags == NO_LABEL, outside, tags) for tags in (gold, predicted)]
    gold_spans, predicted_spans = (find_spans(tags, names, lengths) for tags in sides)
    return _compare_spans(gold_spans, predicted_spans, lengths)


def score_runs(
    gold: IntArray, predicted: IntArray, names: Sequence[str], lengths: IntArray
) -> tuple[ItemScores, dict[str, float]]:
    """Return F1 over runs of words with the same tag, which XTREME reports for UDPOS.

    XTREME uses seqeval, which is meant for spans: it joins neighbors with the same tag, except
    tags that start with S, which it takes for spans of a single word.
    """
    keep = gold != NO_LABEL
    owners = np.repeat(np.arange(len(lengths)), lengths)[keep]
    n_kept = np.bincount(owners, minlength=len(lengths))
    single = np.array([name.startswith("S") for name in [*names, ""]], dtype=np.bool_)
    # A word without a prediction has a tag of its own.
    sides = [np.where(tags == NO_LABEL, len(names), tags)[keep] for tags in (gold, predicted)]
    gold_runs, predicted_runs = (_find_runs(tags, single, n_kept) for tags in sides)
    return _compare_spans(gold_runs, predicted_runs, n_kept)


def repair_spans(tags: IntArray, names: Sequence[str], lengths: IntArray) -> tuple[list[str], int]:
    """Replace every I- that continues no span of its type by B-; also return their number.

    >>> names = ["B-LOC", "I-LOC", "O"]
    >>> repair_spans(np.array([1, 1, 2, 0, 1]), names, np.array([2, 3]))
    (['B-LOC', 'I-LOC', 'O', 'B-LOC', 'I-LOC'], 1)
    """
    repaired, n_repaired = [names[number] for number in tags.tolist()], 0
    for start in find_spans(tags, names, lengths)[:, 0].tolist():
        if repaired[start].startswith("I-"):
            repaired[start], n_repaired = "B-" + repaired[start][2:], n_repaired + 1
    return repaired, n_repaired


def _find_runs(tags: IntArray, single: npt.NDArray[np.bool_], lengths: IntArray) -> IntArray:
    breaks = np.ones(len(tags) + 1, dtype=np.bool_)
    breaks[1:-1] = (tags[1:] != tags[:-1]) | single[tags[1:]]
    breaks[np.cumsum(lengths)] = True
    bounds = np.flatnonzero(breaks)
    return np.stack([bounds[:-1], bounds[1:], tags[bounds[:-1]]], axis=1)


def _compare_spans(
    gold: IntArray, predicted: IntArray, lengths: IntArray
) -> tuple[ItemScores, dict[str, float]]:
    gold_set = set(map(tuple, gold.tolist()))
    is_correct = np.array([tuple(span) in gold_set for span in predicted.tolist()], dtype=np.bool_)
    ends = np.cumsum(lengths)
    n_gold, n_predicted, n_correct = (
        np.bincount(np.searchsorted(ends, starts, "right"), minlength=len(lengths))
        for starts in (gold[:, 0], predicted[:, 0], predicted[is_correct, 0])
    )
    items = ItemScores(
        (2 * n_correct).astype(np.float64), (n_gold + n_predicted).astype(np.float64)
    )
    rates = {
        "precision": 100 * float(n_correct.sum() / max(1, n_predicted.sum())),
        "recall": 100 * float(n_correct.sum() / max(1, n_gold.sum())),
    }
    return items, rates
