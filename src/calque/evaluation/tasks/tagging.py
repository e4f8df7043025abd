"""Scores of taggings, sentence by sentence: right words, and whole spans of B-, I- and O tags.

Sentences with tags, laid out for an encoder in windows, each word's tag at its first subword.

Tagged sentences beside their translations, window by window, for a tagger that plugs VECO in.

A tagger of words on top of an encoder: each word for itself, or whole sequences.

Labels for translated sentences: a tagger that learnt from the source alone tags them.

Words change places in a translation, and so tags cannot be copied. As in FILTER (Fang et al.,
2020) and VECO, the model fine-tuned on English labels the translated training set.

Tagging by fine-tuning: parts of speech (UD POS) and names (PAN-X).
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
from calque.evaluation.finetuning.plug_in import PairRows, TranslatedExample
from calque.evaluation.finetuning.transfer import (
    LabeledCorpus,
    OnProgress,
    TransferRun,
    TranslatedPairs,
    choose_tests,
    report_part,
)
from calque.evaluation.records import ItemScores
from calque.evaluation.settings import remember
from calque.io.conllu import (
    NO_TAG,
    OUTSIDE,
    TaggedSentence,
    check_bio_tags,
    find_spans,
    read_entity_tags,
    read_tagged,
    read_untagged,
)
from calque.io.xtreme import TaskFiles, find_treebanks, find_xtreme_files
from calque.models.crf import ConditionalRandomField, allowed_span_transitions
from calque.models.heads import NO_LABEL, make_linear, mean_cross_entropy
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


def score_words(gold: IntArray, found: IntArray, lengths: IntArray) -> ItemScores:
    """Count right words by sentence; words without a gold tag are left out."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    asked = gold != NO_LABEL
    right = asked & (gold == found)
    return ItemScores(
        np.bincount(owners[right], minlength=len(lengths)).astype(np.float64),
        np.bincount(owners[asked], minlength=len(lengths)).astype(np.float64),
    )


def score_spans(
    gold: IntArray, found: IntArray, names: Sequence[str], lengths: IntArray
) -> tuple[ItemScores, dict[str, float]]:
    """Count spans with the right bounds and kind by sentence; give precision and recall as well.

    F1 is twice the right ones over those there are and those found.
    """
    outside = names.index(OUTSIDE)
    sides = [np.where(tags == NO_LABEL, outside, tags) for tags in (gold, found)]
    there, mine = (find_spans(tags, names, lengths) for tags in sides)
    return _compare(there, mine, lengths)


def score_runs(
    gold: IntArray, found: IntArray, names: Sequence[str], lengths: IntArray
) -> tuple[ItemScores, dict[str, float]]:
    """Count runs of words with the same part of speech, as XTREME's F1 of UDPOS does.

    That comes of seqeval, meant for spans: it joins neighbours of one tag, except tags that begin
    with S, which it takes for spans of a single word.
    """
    keep = gold != NO_LABEL
    owners = np.repeat(np.arange(len(lengths)), lengths)[keep]
    kept = np.bincount(owners, minlength=len(lengths))
    single = np.array([name.startswith("S") for name in [*names, ""]], dtype=np.bool_)
    # A word that was not answered is of a kind of its own.
    sides = [np.where(tags == NO_LABEL, len(names), tags)[keep] for tags in (gold, found)]
    there, mine = (_find_runs(tags, single, kept) for tags in sides)
    return _compare(there, mine, kept)


def repair_spans(tags: IntArray, names: Sequence[str], lengths: IntArray) -> tuple[list[str], int]:
    """Make every I- that continues no span of its kind a B-, and count how many there were.

    >>> names = ["B-LOC", "I-LOC", "O"]
    >>> repair_spans(np.array([1, 1, 2, 0, 1]), names, np.array([2, 3]))
    (['B-LOC', 'I-LOC', 'O', 'B-LOC', 'I-LOC'], 1)
    """
    starts = {int(start) for start in find_spans(tags, names, lengths)[:, 0]}
    mended, n_mended = [], 0
    for place, number in enumerate(tags.tolist()):
        name = names[number]
        if place in starts and name.startswith("I-"):
            name, n_mended = "B-" + name[2:], n_mended + 1
        mended.append(name)
    return mended, n_mended


def _find_runs(tags: IntArray, single: npt.NDArray[np.bool_], lengths: IntArray) -> IntArray:
    breaks = np.ones(len(tags) + 1, dtype=np.bool_)
    breaks[1:-1] = (tags[1:] != tags[:-1]) | single[tags[1:]]
    breaks[np.cumsum(lengths)] = True
    bounds = np.flatnonzero(breaks)
    return np.stack([bounds[:-1], bounds[1:], tags[bounds[:-1]]], axis=1)


def _compare(
    gold: IntArray, found: IntArray, lengths: IntArray
) -> tuple[ItemScores, dict[str, float]]:
    known = set(map(tuple, gold.tolist()))
    is_right = np.array([tuple(span) in known for span in found.tolist()], dtype=np.bool_)
    ends = np.cumsum(lengths)
    n_gold, n_found, n_right = (
        np.bincount(np.searchsorted(ends, firsts, "right"), minlength=len(lengths))
        for firsts in (gold[:, 0], found[:, 0], found[is_right, 0])
    )
    items = ItemScores((2 * n_right).astype(np.float64), (n_gold + n_found).astype(np.float64))
    shares = {
        "precision": 100 * float(n_right.sum() / max(1, n_found.sum())),
        "recall": 100 * float(n_right.sum() / max(1, n_gold.sum())),
    }
    return items, shares


@dataclass(frozen=True, slots=True)
class TagBatch:
    """Windows and the tag of every token: `NO_LABEL` but at first subwords of tagged words.

    For whole sequences, `grid` holds the places of a window's tagged words, one window a row.
    """

    tokens: TokenBatch | PlugInTokens
    labels: Int[Tensor, "tokens"]
    grid: Int[Tensor, "windows words"]
    inside: Bool[Tensor, "windows words"]

    def to(self, device: torch.device | str) -> TagBatch:
        """Copy the tensors to a device, without waiting for the copy."""
        return TagBatch(
            self.tokens.to(device),
            self.labels.to(device, non_blocking=True),
            self.grid.to(device, non_blocking=True),
            self.inside.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class TagExamples:
    """Windows of subwords; words `first_words[k]:first_words[k + 1]` are tagged in window k.

    `places` say where in its window such a word's first subword is, `words` which word of the
    text it is. `tags` and `has_pieces` are of all words of the text, sentence by sentence.
    """

    windows: Ragged
    first_words: IntArray
    places: IntArray
    words: IntArray
    tags: IntArray
    has_pieces: npt.NDArray[np.bool_]
    n_words: IntArray  # of every sentence
    sentences: IntArray  # of which a window is, by number
    names: Sequence[str]  # of the tags by number, those that a tagger knows first
    pad_id: int
    counts: Mapping[str, int]

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every window."""
        return self.windows.lengths

    def find_words(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Number the tagged words of some windows, and say how many each window has."""
        n_words = np.diff(self.first_words)[rows]
        return ranges(self.first_words[:-1][rows], n_words), n_words

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> TagBatch:
        """Lay out some windows, without padding or up to a fixed shape."""
        text = reorder(self.windows, rows)
        placed = build_packed_layout(text, pad_id=self.pad_id, shape=shape)
        words, n_words = self.find_words(rows)
        begins = np.repeat(np.cumsum(text.lengths) - text.lengths, n_words)
        slots = placed.slots[begins + self.places[words]]
        n_rows = len(rows) if shape is None else max(len(rows), shape.sequences)
        n_most = n_words if shape is None else np.diff(self.first_words)
        size = n_rows, int(n_most.max(initial=1))
        return lay_tags(placed.tokens, slots, self.tags[self.words[words]], n_words, size)


def lay_tags(
    tokens: TokenBatch | PlugInTokens,
    slots: IntArray,
    tags: IntArray,
    n_words: IntArray,
    size: tuple[int, int],
) -> TagBatch:
    """Put the tags of words where their first subwords stand, window by window."""
    labels = np.full(len(tokens.ids), NO_LABEL, dtype=np.int64)
    labels[slots] = tags
    grid, inside = np.zeros(size, np.int64), np.zeros(size, np.bool_)
    where = np.repeat(np.arange(len(n_words)), n_words), ranges(np.zeros_like(n_words), n_words)
    grid[where], inside[where] = slots, True
    return TagBatch(tokens, *map(torch.from_numpy, (labels, grid, inside)))


def encode_tagged(
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[TaggedSentence],
    names: Sequence[str],
    *,
    longest: int,
    overlap: float,
) -> TagExamples:
    """Encode the words of sentences apart, and cut sentences that are too long into windows.

    A window has words around those it is asked about, so that each is seen in its context. Tags
    that are not among the `names` a tagger knows get numbers after those, words without a tag
    `NO_LABEL`; `counts` says how many there are.
    """
    marks = boundary_ids(tokenizer)
    head = int(marks[0] is not None)
    room = longest - head - int(marks[1] is not None)
    # A word's first subword is all that is used of it, so that no word need be cut in two.
    pieces, n_shortened = (
        WordEncoder(tokenizer).encode([s.words for s in sentences]).truncate_words(room)
    )
    spans, n_long = split_encoded_words(pieces, room, overlap)
    start, stop, first, last = spans.T
    begins = pieces.first_pieces[start]
    lengths = pieces.first_pieces[stop] - begins
    windows = Ragged(pieces.ids[ranges(begins, lengths)], lengths)
    given = list(chain.from_iterable(sentence.tags for sentence in sentences))
    every = [*names, *sorted({*given} - {*names, NO_TAG})]
    numbers = {NO_TAG: NO_LABEL} | {name: number for number, name in enumerate(every)}
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
        add_special_tokens(windows, *marks),
        np.concatenate([[0], np.cumsum(n_tagged)]),
        pieces.first_pieces[:-1][words] - begins[owners] + head,
        words,
        tags,
        has_pieces,
        pieces.n_words,
        np.searchsorted(pieces.first_words, start, side="right") - 1,
        every,
        tokenizer.pad_token_id or 0,
        {name: count for name, count in counts.items() if count},
    )


@dataclass(frozen=True, slots=True)
class TagPairs:
    """Pairs among the windows of sentences and of their translations.

    `own` are the sentences alone, which are scored; `both` has the translations after them.
    """

    own: TagExamples
    both: TagExamples
    rows: PairRows
    counts: Mapping[str, int]

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every pair."""
        return self.rows.count_tokens(self.both.windows)

    @property
    def tags(self) -> IntArray:
        """Give the tags of the sentences' words."""
        return self.own.tags

    @property
    def words(self) -> IntArray:
        """Say which word of the text each tagged one is."""
        return self.both.words

    @property
    def names(self) -> Sequence[str]:
        """Name the tags by number."""
        return self.own.names

    @property
    def n_words(self) -> IntArray:
        """Count the words of every sentence."""
        return self.own.n_words

    def find_words(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Number the tagged words of some pairs, and say how many each of their windows has."""
        windows, first = self.rows.sequences(rows), self.both.first_words
        n_words = np.where(self.rows.counted(rows), np.diff(first)[windows], 0)
        return ranges(first[:-1][windows], n_words), n_words

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> TagBatch:
        """Lay out some pairs, without padding or up to a fixed shape."""
        both = self.both
        tokens, placed = self.rows.collate(both.windows, rows, pad_id=both.pad_id, shape=shape)
        words, n_words = self.find_words(rows)
        windows = self.rows.sequences(rows)
        lengths = np.where(windows < 0, 0, both.windows.lengths[windows])
        begins = np.repeat(np.cumsum(lengths) - lengths, n_words)
        slots = placed.slots[begins + both.places[words]]
        n_rows = 2 * (len(rows) if shape is None else max(len(rows), shape.sequences))
        n_most = n_words if shape is None else np.diff(both.first_words)
        size = n_rows, int(n_most.max(initial=1))
        return lay_tags(tokens, slots, both.tags[both.words[words]], n_words, size)


def encode_tag_pairs(
    encode: Callable[[Sequence[TaggedSentence], list[str]], TagExamples],
    pairs: Sequence[TranslatedExample[TaggedSentence]],
    names: list[str],
) -> TagPairs:
    """Encode sentences and translations; of two that are cut, window k reads window k.

    Where one has more windows, the rest of them read the last of the other.
    """
    own = encode([pair.example for pair in pairs], names)
    others = encode([_hide(pair) for pair in pairs if pair.other is not None], names)
    assert len(others.names) == len(names), "a translation has a tag that nobody knows"
    left, right = _split_windows(own), _split_windows(others)
    first, there = len(own.windows.lengths), iter(right)
    rows: list[tuple[int, int, bool, bool]] = []
    for pair, mine in zip(pairs, left, strict=True):
        theirs = [first + window for window in next(there)] if pair.other is not None else [-1]
        for place in range(max(len(mine), len(theirs))):
            here, other = mine[min(place, len(mine) - 1)], theirs[min(place, len(theirs) - 1)]
            asks = pair.learns_other and other >= 0 and place < len(theirs)
            rows.append((here, other, place < len(mine), asks))
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    counts = dict(own.counts)
    if others.counts.get("sentences_in_windows"):
        counts["translations_in_windows"] = others.counts["sentences_in_windows"]
    asked = table[:, 2:].astype(np.bool_)
    pair_rows = PairRows(table[:, 0], table[:, 1], asked[:, 0], asked[:, 1])
    return TagPairs(own, _join(own, others), pair_rows, counts)


def _hide(pair: TranslatedExample[TaggedSentence]) -> TaggedSentence:
    """Give a translation without the tags that are not to be learnt."""
    assert pair.other is not None
    if pair.learns_other:
        return pair.other
    return TaggedSentence(pair.other.words, (NO_TAG,) * len(pair.other.words))


def _split_windows(examples: TagExamples) -> list[list[int]]:
    """List the windows of every sentence."""
    found: list[list[int]] = [[] for _ in examples.n_words]
    for window, sentence in enumerate(examples.sentences.tolist()):
        found[sentence].append(window)
    return found


def _join(own: TagExamples, others: TagExamples) -> TagExamples:
    """Put two sets of sentences one after the other."""
    shift = own.first_words[-1]
    return replace(
        own,
        windows=Ragged(
            np.concatenate([own.windows.ids, others.windows.ids]),
            np.concatenate([own.windows.lengths, others.windows.lengths]),
        ),
        first_words=np.concatenate([own.first_words, shift + others.first_words[1:]]),
        places=np.concatenate([own.places, others.places]),
        words=np.concatenate([own.words, len(own.tags) + others.words]),
        tags=np.concatenate([own.tags, others.tags]),
        has_pieces=np.concatenate([own.has_pieces, others.has_pieces]),
        n_words=np.concatenate([own.n_words, others.n_words]),
        sentences=np.concatenate([own.sentences, len(own.n_words) + others.sentences]),
    )


class Tagger(HeadModel):
    """Scores tags linearly from a word's first subword; with a CRF, whole sequences of them.

    With `spans`, a CRF only gives sequences in which every I- continues a span of its kind.
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
        self.chain = ConditionalRandomField(len(names)) if settings.head == "crf" else None
        self.allowed = allowed_span_transitions(names) if spans else None
        move_to_device_of(self, encoder)

    def forward(self, batch: TagBatch) -> Float[Tensor, ""]:
        """Give the mean loss of a word."""
        scores = self.head(self.read(batch.tokens))
        if self.chain is None:
            return mean_cross_entropy(scores, batch.labels)
        # In single precision: the forward algorithm adds up over a whole sentence.
        tags = batch.labels[batch.grid].clamp(min=0)
        losses = self.chain(scores[batch.grid].float(), tags, batch.inside)
        total: Tensor = losses.sum() / batch.inside.sum().clamp(min=1)
        return total

    def answer(self, batch: TagBatch) -> Int[Tensor, "windows words"]:
        """Give the best tags, in the places of the batch's grid."""
        scores: Tensor = self.head(self.read(batch.tokens))[batch.grid].float()
        if self.chain is None:
            return scores.argmax(-1)
        allowed = None
        if self.allowed is not None:
            allowed = self.allowed[0].to(scores.device), self.allowed[1].to(scores.device)
        return self.chain.decode(scores, batch.inside, allowed)

    def tag(self, examples: TagExamples | TagPairs, settings: TaskSettings) -> IntArray:
        """Give every word of the text its tag; `NO_LABEL` for one that was not asked about."""
        found = np.full(len(examples.tags), NO_LABEL, dtype=np.int64)
        for rows, batch, best in list(predict(self, examples, settings, self.answer)):
            words, _ = examples.find_words(rows)
            found[examples.words[words]] = best[batch.inside].cpu().numpy()
        return found


# By language, translations with their new tags, each with the number of what it translates.
Taught: TypeAlias = Mapping[str, Sequence[tuple[TaggedSentence, int]]]


def teacher_settings(settings: TaskSettings) -> TaskSettings:
    """Let the teacher learn as its pupil does, but from the source alone."""
    return replace(settings, setting="zero-shot", plug="out")


def label_translations(
    encoder: Encoder,
    lesson: FinetuneExperiment[TaggedSentence],
    seed: int,
    spans: bool,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[Taught, dict[str, int]]:
    """Train a tagger on the source, and tag all translations; the encoder stays as it was.

    Line k of a translation belongs to sentence k of the source's training files; empty lines are
    left out and counted. With `spans`, tags are made valid as they are when tests are scored.
    """
    source, files = lesson.corpus.settings.source, lesson.corpus.files
    texts = {name: read_untagged(path) for name, path in files.untagged.items() if name != source}
    n_all = len(lesson.corpus.load(files.train.get(source, ())))
    for name, sentences in texts.items():
        if len(sentences) != n_all:
            problem = f"{len(sentences):,} lines for {n_all:,} sentences of {source!r}"
            fix = "give a line for every sentence of the training file"
            raise InputError(problem, file=files.untagged[name], fix=fix)
    kept = {name: value.clone() for name, value in encoder.state_dict().items()}
    model, names, _ = lesson.train(encoder, seed, TransferRun((source,), ()), on_progress)
    assert isinstance(model, Tagger)
    teacher_labeled, n_empty = {}, 0
    for language, sentences in texts.items():
        full = [number for number, sentence in enumerate(sentences) if sentence.words]
        n_empty += n_all - len(full)
        tagged = tag_sentences(model, lesson, [sentences[k] for k in full], names, spans)
        teacher_labeled[language] = list(zip(tagged, full, strict=True))
    with torch.no_grad():
        encoder.load_state_dict(kept)
    counts = {
        "labelled_by_teacher": sum(map(len, teacher_labeled.values())),
        "translations_empty": n_empty,
    }
    return teacher_labeled, {name: count for name, count in counts.items() if count}


def tag_sentences(
    tagger: Tagger,
    lesson: FinetuneExperiment[TaggedSentence],
    sentences: Sequence[TaggedSentence],
    names: list[str],
    spans: bool,
) -> list[TaggedSentence]:
    """Give sentences the tags that a tagger finds; a word it cannot read has none."""
    asked = [TaggedSentence(s.words, (names[0],) * len(s.words)) for s in sentences]
    examples = lesson.encode(asked, names)
    found = tagger.tag(examples, lesson.corpus.settings)
    if spans:
        known = np.where(found == NO_LABEL, names.index(OUTSIDE), found)
        tags, _ = repair_spans(known, names, examples.n_words)
    else:
        tags = [NO_TAG if number == NO_LABEL else names[number] for number in found.tolist()]
    ends = np.cumsum(examples.n_words).tolist()
    return [
        TaggedSentence(sentence.words, tuple(tags[end - len(sentence.words) : end]))
        for sentence, end in zip(sentences, ends, strict=True)
    ]


TaskName = Literal["pos", "ner"]
POS: TaskName = "pos"
NER: TaskName = "ner"
FOLDERS = {POS: "udpos", NER: "panx"}
METRICS = {POS: "accuracy", NER: "f1"}
READERS: dict[TaskName, Callable[[Path], list[TaggedSentence]]] = {
    POS: read_tagged,
    NER: read_entity_tags,
}


def measure_tagging(
    encoder: Encoder,
    data: Path,
    *,
    task: TaskName,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Train a tagger on first subwords as the setting says, and score it language by language.

    POS: accuracy of words, and XTREME's F1. NER: F1 of whole spans. An item is a sentence.
    """
    tests = list_languages(data, settings, task) if languages is None else list(languages)
    key = (task, str(data), settings.hash())
    lesson = remember(encoder.tokenizer, key, lambda: _prepare(encoder, data, task, settings))
    if settings.setting == "translate-train-all" and lesson.corpus.files.untagged:
        lesson, on_progress = _teach(encoder, data, task, lesson, seed, on_progress)
    return lesson.measure(encoder, tests, seed, on_progress)


def list_languages(data: Path, settings: TaskSettings, task: TaskName) -> list[str]:
    """List the languages that the files allow to test in this setting, the source first."""
    files = find_files(data, task)
    trainable = {*LabeledCorpus(files, READERS[task], settings).trainable}
    if settings.setting == "translate-train-all":
        trainable |= files.untagged.keys()  # a teacher will tag them
    return choose_tests(settings, sorted(trainable), files.test_languages)


def find_files(data: Path, task: TaskName) -> TaskFiles:
    """Find XTREME's files of a task or, of parts of speech, treebanks."""
    files = find_xtreme_files(data, FOLDERS[task], n_columns=2)
    if files is None and task == POS:
        files = find_treebanks(data)
    if files is None:
        shown = f"{FOLDERS[task]}/train-en.tsv and dev-XX.tsv"
        also = " or ud/*.conllu" if task == POS else ""
        raise InputError(f"no files of {task} here", file=data, fix=f"give {shown}{also}")
    return files


def _teach(
    encoder: Encoder,
    data: Path,
    task: TaskName,
    lesson: FinetuneExperiment[TaggedSentence],
    seed: int,
    on_progress: OnProgress,
) -> tuple[FinetuneExperiment[TaggedSentence], OnProgress]:
    """Let a tagger that learnt from the source alone label translations; half of the progress."""
    settings = teacher_settings(lesson.corpus.settings)
    key = (task, str(data), settings.hash())
    teacher = remember(encoder.tokenizer, key, lambda: _prepare(encoder, data, task, settings))
    teacher_labeled, counts = label_translations(
        encoder, teacher, seed, task == NER, partial(report_part, on_progress, 0, 2)
    )
    taught_lesson = _prepare(encoder, data, task, lesson.corpus.settings, teacher_labeled)
    return replace(taught_lesson, counts=counts), partial(report_part, on_progress, 1, 2)


def _prepare(
    encoder: Encoder,
    data: Path,
    task: TaskName,
    settings: TaskSettings,
    teacher_labeled: Taught | None = None,
) -> FinetuneExperiment[TaggedSentence]:
    """Find the files of a task; what is read and encoded of them serves the next seed, too."""
    longest, tokenizer = max_sequence_length(encoder, settings), encoder.tokenizer

    def encode(sentences: Sequence[TaggedSentence], names: list[str]) -> TagExamples:
        return encode_tagged(tokenizer, sentences, names, longest=longest, overlap=settings.overlap)

    def make_model(encoder: Encoder, names: list[str], generator: torch.Generator) -> Tagger:
        return Tagger(encoder, names, settings, generator, spans=task == NER)

    read = READERS[task]
    corpus = LabeledCorpus(find_files(data, task), read, settings, teacher_labeled=teacher_labeled)
    plug = None
    if settings.plug == "in":
        translated = partial(_read_translation, read)
        partners = TranslatedPairs(corpus, translated, is_empty=lambda line: not line.words)
        plug = PlugInSetup(partners, partial(encode_tag_pairs, encode))
    return FinetuneExperiment(
        corpus,
        labels_of=lambda sentence: sentence.tags,
        check_labels=partial(_check_tags, task),
        encode=encode,
        make_model=make_model,
        score=partial(_score, task, settings),
        plug=plug,
    )


def _read_translation(
    read: Callable[[Path], list[TaggedSentence]], path: Path
) -> list[TaggedSentence]:
    return read_untagged(path) if ".txt" in path.suffixes else read(path)


def _check_tags(task: TaskName, names: list[str]) -> list[str]:
    known = set(names) - {NO_TAG}
    if task == NER:
        known.add(OUTSIDE)
        check_bio_tags(sorted(known))
    return sorted(known)


def _score(
    task: TaskName, settings: TaskSettings, tagger: Tagger, test: TagExamples | TagPairs
) -> TestScores:
    found = tagger.tag(test, settings)
    gold, names, lengths = test.tags, list(test.names), test.n_words
    if task == POS:
        items = score_words(gold, found, lengths)
        runs, _ = score_runs(gold, found, names, lengths)
        return TestScores({"accuracy": items.score, "f1": runs.score}, items)
    items, shares = score_spans(gold, found, names, lengths)
    known = np.where(found < 0, names.index(OUTSIDE), found)
    _, n_repaired = repair_spans(known, names, lengths)
    return TestScores({"f1": items.score, **shares}, items, {"tags_repaired": n_repaired})
