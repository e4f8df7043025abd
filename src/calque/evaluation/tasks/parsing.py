"""Dependency parsing: a biaffine parser is trained on treebanks and tested in every language.

The protocol is that of Wu and Dredze (2020) after Ahmad et al. (2019): labeled attachment on gold
words without punctuation and symbols, relations without subtypes, the first 128 words of a
sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.finetune import fine_tune, predict
from calque.evaluation.finetuning.head_model import (
    HeadModel,
    max_sequence_length,
    move_to_device_of,
)
from calque.evaluation.finetuning.optimizer_step import working_precision
from calque.evaluation.finetuning.transfer import (
    TransferRun,
    choose_tests,
    measure_runs,
    pick_languages,
    plan_runs,
)
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.settings import remember
from calque.io.conllu import ParsedSentence, read_trees, sample_evenly
from calque.io.xtreme import TaskFiles, find_treebanks
from calque.models.biaffine import IMPOSSIBLE_SCORE, BiaffineFeatures, BiaffineHead, decode_trees
from calque.models.heads import NO_LABEL, mean_cross_entropy
from calque.objectives.base import TensorBatch
from calque.tokens.layout import build_packed_layout
from calque.tokens.ragged import BatchShape, Ragged, add_special_tokens, ranges, reorder
from calque.tokens.sampling import derive_seed
from calque.tokens.tokenizer import boundary_ids
from calque.tokens.windows import split_encoded_words
from calque.tokens.words import EncodedWords, WordEncoder

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.evaluation.finetuning.transfer import OnProgress
    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

ROOT = "root"
# Gold parts of speech of words that are not scored (Ahmad et al., 2019).
IGNORED_TAGS = frozenset({"PUNCT", "SYM"})
# Relations that version 2 of Universal Dependencies renamed.
RENAMED_RELATIONS = {
    "dobj": "obj",
    "nsubjpass": "nsubj:pass",
    "csubjpass": "csubj:pass",
    "auxpass": "aux:pass",
    "mwe": "fixed",
    "name": "flat:name",
    "foreign": "flat:foreign",
}


def measure(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress = lambda done, total: None,
) -> list[LanguageScores]:
    """Train a parser and return LAS (the main metric) and UAS by language. Items are sentences."""
    files = find_files(data)
    tests = pick_languages(list_languages(data, settings), languages, data)
    runs = plan_runs(settings, list(files.train), tests)

    def measure_run(run: TransferRun, on_progress: OnProgress) -> list[LanguageScores]:
        return _measure_run(encoder, prepare(encoder, files, run, settings), seed, on_progress)

    return measure_runs(encoder, runs, measure_run, on_progress)


def list_languages(data: Path, settings: TaskSettings) -> list[str]:
    """List the languages that can be tested in this setting, the source first."""
    files = find_files(data)
    return choose_tests(settings, list(files.train), sorted(files.test))


def find_files(data: Path) -> TaskFiles:
    """Find treebanks by their names; two treebanks of the same language and split are an error."""
    files = find_treebanks(data)
    if files is None or not files.train or not files.test:
        problem = "the folder has no treebanks for training and testing"
        fix = "pass a folder with files such as en_ewt-ud-train.conllu and de_gsd-ud-test.conllu"
        raise InputError(problem, file=data, fix=fix)
    for split in (files.train, files.dev, files.test):
        for language, paths in split.items():
            if len(paths) > 1:
                problem = f"{paths[0].name} is a treebank of {language!r} too"
                raise InputError(problem, file=paths[1], fix="remove one of them")
    return files


def _measure_run(
    encoder: Encoder, data: ParseData, seed: int, on_progress: OnProgress
) -> list[LanguageScores]:
    settings, n_tests = data.settings, len(data.tests)
    root = data.relations.index(ROOT)
    generator = torch.Generator().manual_seed(derive_seed(seed, 1))
    parser = Parser(encoder, len(data.relations), root, settings, generator)

    def score_dev() -> float:
        scores = [
            data.score(treebank, parser.parse(treebank.encoded, settings)).las
            for treebank in data.dev.values()
        ]
        return float(np.mean(scores))

    tuned = fine_tune(
        parser,
        data.train,
        settings,
        seed=seed,
        score_dev=score_dev if data.dev else None,
        on_progress=lambda done, total: on_progress(done, total + n_tests),
    )
    train_counts = {
        "train_sentences": len(data.train.n_words),
        "train_words_cut": data.train.n_cut,
    }
    scores = []
    for number, (language, treebank) in enumerate(data.tests.items(), start=1):
        parser.language = language
        parses = parser.parse(treebank.encoded, settings)
        found = data.score(treebank, parses)
        counts = train_counts | treebank.count(data.relations)
        counts["sentences_searched_for_a_tree"] = parses.n_searched
        metrics = {"las": found.las, "uas": found.uas}
        n_items = len(treebank.sentences)
        scores.append(LanguageScores(language, metrics, n_items, found.items, counts=counts))
        on_progress(tuned.n_updates + number, tuned.n_updates + n_tests)
    return scores


@dataclass(frozen=True, slots=True)
class Treebank:
    """Sentences with their gold trees, and the same sentences encoded."""

    sentences: Sequence[ParsedSentence]
    encoded: ParseExamples

    def count(self, relations: Sequence[str]) -> dict[str, int]:
        """Count words that are not read, not scored, or that cannot be correct."""
        sentences, encoded = self.sentences, self.encoded
        tags = Counter(tag for sentence in sentences for tag in sentence.upos)
        names = Counter(name for sentence in sentences for name in sentence.deprels)
        n_words = np.array([len(sentence.words) for sentence in sentences])
        return {
            "words": int(n_words.sum()),
            "words_ignored": sum(tags[tag] for tag in IGNORED_TAGS),
            "words_of_unknown_relations": sum(
                n for name, n in names.items() if name not in relations
            ),
            "words_without_subword": encoded.n_without_subword,
            "words_cut": encoded.n_cut,
            "sentences_cut": int((n_words > encoded.n_words).sum()),
            "sentences_in_windows": int((encoded.n_windows > 1).sum()),
            "multiword_tokens": sum(sentence.n_ranges for sentence in sentences),
            "empty_nodes": sum(sentence.n_empty_nodes for sentence in sentences),
        }


@dataclass(frozen=True, slots=True)
class ParseData:
    """The data of one run: training, development and test sentences, and the relations."""

    settings: TaskSettings
    relations: list[str]
    train: ParseExamples
    dev: Mapping[str, Treebank]
    tests: Mapping[str, Treebank]

    def score(self, treebank: Treebank, parses: Parses) -> AttachmentScores:
        """Compare predicted trees with the gold trees of a treebank."""
        ends = np.cumsum(treebank.encoded.n_words)[:-1]
        heads = [part.tolist() for part in np.split(parses.heads, ends)]
        names = [[self.relations[k] for k in part] for part in np.split(parses.relations, ends)]
        return score_attachments(treebank.sentences, heads, names, subtypes=self.settings.subtypes)


def prepare(
    encoder: Encoder, files: TaskFiles, run: TransferRun, settings: TaskSettings
) -> ParseData:
    """Read and encode the data of a run, once for all seeds of a process."""
    dev = run.sources if settings.select == "best" else ()
    for name in dev:
        if name not in files.dev:
            fix = f"add {name}_*-ud-dev.conllu, or set select=last"
            raise InputError(f"select=best needs a development treebank of {name!r}", fix=fix)
    longest = max_sequence_length(encoder, settings)

    def read(path: Path, n_sentences: int | None) -> list[ParsedSentence]:
        return [
            replace(
                sentence,
                deprels=tuple(
                    normalize_relation(name, settings.subtypes) for name in sentence.deprels
                ),
            )
            for sentence in sample_evenly(read_trees(path), n_sentences)
        ]

    def read_all() -> ParseData:
        train: list[ParsedSentence] = []
        for name in run.sources:
            train += read(files.train[name][0], settings.train_examples)
        relations = sorted({name for sentence in train for name in sentence.deprels} | {ROOT})
        numbers = {name: number for number, name in enumerate(relations)}

        def encode(sentences: Sequence[ParsedSentence], one_window: bool = False) -> ParseExamples:
            return encode_trees(
                encoder.tokenizer,
                sentences,
                numbers,
                longest,
                max_words=settings.max_words,
                overlap=settings.overlap,
                one_window=one_window,
            )

        def read_treebank(path: Path) -> Treebank:
            sentences = read(path, settings.test_examples)
            return Treebank(sentences, encode(sentences))

        return ParseData(
            settings,
            relations,
            encode(train, one_window=True),
            {name: read_treebank(files.dev[name][0]) for name in dev},
            {name: read_treebank(files.test[name][0]) for name in run.tests},
        )

    paths = [files.train[name][0] for name in run.sources]
    paths += [files.dev[name][0] for name in dev] + [files.test[name][0] for name in run.tests]
    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in paths)
    key = ("parsing", run, stamps, settings.hash(), longest)
    return remember(encoder.tokenizer, key, read_all)


@dataclass(frozen=True, slots=True)
class ParseBatch(TensorBatch):
    """Tokens with the gold arcs of words, stored at the first token of every word.

    `cells` are the words' cells in a table of sentences × words, counted row by row; other tokens
    have the number after the last cell. `heads` count words within the sentence, 0 is the root.
    `head_rows` are tokens; the root is the number after the last token. `positions` are the tokens
    of the words, sentence by sentence.
    """

    tokens: TokenBatch
    cells: Int[Tensor, "tokens"]
    is_word: Bool[Tensor, "sentences longest"]
    heads: Int[Tensor, "sentences longest"]
    head_rows: Int[Tensor, "tokens"]
    relations: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]


@dataclass(frozen=True, slots=True)
class ParseExamples:
    """Encoded sentences: their windows, words and arcs.

    Word k is token `offsets[k]` of window `word_windows[k]`, special tokens included. A head that
    is not among the words of the window is `NO_LABEL` and not trained on.
    """

    windows: Ragged
    n_windows: IntArray  # per sentence
    n_words: IntArray  # per sentence
    word_windows: IntArray
    offsets: IntArray
    heads: IntArray
    relations: IntArray
    pad_id: int
    n_cut: int  # words that are not read
    n_without_subword: int  # words without a subword, which are read as the unknown token

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of every sentence, in all of its windows."""
        ends = np.concatenate([[0], np.cumsum(self.windows.lengths)])
        lengths: IntArray = np.diff(ends[np.concatenate([[0], np.cumsum(self.n_windows)])])
        return lengths

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> ParseBatch:
        """Return a batch of some sentences, without padding or padded to a fixed shape."""
        n_windows, n_words = self.n_windows[rows], self.n_words[rows]
        first_windows = (np.cumsum(self.n_windows) - self.n_windows)[rows]
        chosen = reorder(self.windows, ranges(first_windows, n_windows))
        layout = build_packed_layout(chosen, pad_id=self.pad_id, shape=shape)
        words = ranges((np.cumsum(self.n_words) - self.n_words)[rows], n_words)
        owners = np.repeat(np.arange(len(rows)), n_words)
        shift = np.cumsum(n_windows) - n_windows - first_windows
        positions = layout.starts[self.word_windows[words] + shift[owners]] + self.offsets[words]
        n_rows, n_tokens = len(rows), len(layout.tokens.ids)
        longest = int(n_words.max(initial=1))
        if shape is not None:
            n_rows, longest = max(shape.sequences, n_rows), shape.row
        first_words = np.cumsum(n_words) - n_words
        cells = owners * longest + np.arange(len(words)) - first_words[owners]
        heads, relations = self.heads[words], self.relations[words]
        head_table = np.full(n_rows * longest, NO_LABEL)
        head_table[cells] = heads
        is_word = np.zeros(n_rows * longest, dtype=bool)
        is_word[cells] = True
        head_words = np.where(heads > 0, first_words[owners] + heads - 1, 0)

        def fill(values: IntArray, indices: IntArray, filler: int) -> Tensor:
            filled = np.full(n_tokens, filler)
            filled[indices] = values
            return torch.from_numpy(filled)

        return ParseBatch(
            layout.tokens,
            fill(cells, positions, n_rows * longest),
            torch.from_numpy(is_word.reshape(n_rows, longest)),
            torch.from_numpy(head_table.reshape(n_rows, longest)),
            fill(np.where(heads > 0, positions[head_words], n_tokens), positions, n_tokens),
            fill(np.where(heads < 0, NO_LABEL, relations), positions, NO_LABEL),
            fill(positions, np.arange(len(words)), 0),
        )


def encode_trees(
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[ParsedSentence],
    relations: Mapping[str, int],
    longest: int,
    *,
    max_words: int | None,
    overlap: float,
    one_window: bool,
) -> ParseExamples:
    """Encode sentences; a sentence of more than `longest` tokens is read in several windows.

    With `one_window`, as batches of a fixed shape require, only the first window is read.
    Relations without a number are `NO_LABEL`: they are not trained on and never correct.
    """
    special = boundary_ids(tokenizer)
    n_before, room = int(special[0] is not None), longest - sum(m is not None for m in special)
    texts = [sentence.words[:max_words] for sentence in sentences]
    # Only the first subword of a word is used, so words need not be split.
    pieces, _ = WordEncoder(tokenizer).encode(texts).truncate_words(room)
    n_without_subword = int((pieces.n_pieces == 0).sum())
    pieces = _insert_unknown(pieces, tokenizer)
    spans, _ = split_encoded_words(pieces, room, overlap)
    owners = np.searchsorted(pieces.first_words, spans[:, 0], side="right") - 1
    if one_window:
        owners, rows = np.unique(owners, return_index=True)
        spans = spans[rows]
        spans[:, 3] = spans[:, 1]  # all words of the window are used
    start, stop, first, last = spans.T
    begins = pieces.first_pieces[start]
    lengths = pieces.first_pieces[stop] - begins
    words = ranges(first, last - first)
    word_windows = np.repeat(np.arange(len(spans)), last - first)
    n_words = np.bincount(owners[word_windows], minlength=len(sentences))
    heads: list[int] = []
    numbers: list[int] = []
    for sentence, n in zip(sentences, n_words.tolist(), strict=True):
        heads += [head if head <= n else NO_LABEL for head in sentence.heads[:n]]
        numbers += [relations.get(name, NO_LABEL) for name in sentence.deprels[:n]]
    return ParseExamples(
        windows=add_special_tokens(Ragged(pieces.ids[ranges(begins, lengths)], lengths), *special),
        n_windows=np.bincount(owners, minlength=len(sentences)),
        n_words=n_words,
        word_windows=word_windows,
        offsets=pieces.first_pieces[words] - begins[word_windows] + n_before,
        heads=np.array(heads, dtype=np.int64),
        relations=np.array(numbers, dtype=np.int64),
        pad_id=tokenizer.pad_token_id or 0,
        n_cut=sum(len(sentence.words) for sentence in sentences) - len(words),
        n_without_subword=n_without_subword,
    )


def _insert_unknown(pieces: EncodedWords, tokenizer: PreTrainedTokenizerFast) -> EncodedWords:
    """Insert the unknown token for words that the tokenizer deletes entirely."""
    known = (tokenizer.unk_token_id, tokenizer.mask_token_id, tokenizer.sep_token_id)
    unknown = next((int(number) for number in known if number is not None), 0)
    empty = np.flatnonzero(pieces.n_pieces == 0)
    ids = np.insert(pieces.ids, pieces.first_pieces[empty], unknown)
    return EncodedWords(ids, np.maximum(pieces.n_pieces, 1), pieces.n_words)


@dataclass(frozen=True, slots=True)
class Parses:
    """Heads and relations of all words, sentence by sentence; heads count from 1, 0 is the root.

    In `n_searched` sentences the best heads of the words did not form a tree with one root.
    """

    heads: IntArray
    relations: IntArray
    n_searched: int


class Parser(HeadModel):
    """Is trained on heads, and on relations given the gold heads; predicts trees, then relations.

    `root` is the number of the relation that only the root of a sentence has.
    """

    def __init__(
        self,
        encoder: Encoder,
        n_relations: int,
        root: int,
        settings: TaskSettings,
        generator: torch.Generator,
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.head, self.root = BiaffineHead(encoder.hidden_size, n_relations, generator), root
        move_to_device_of(self, encoder)

    def score(
        self, batch: ParseBatch
    ) -> tuple[BiaffineFeatures, Float[Tensor, "rows words heads"]]:
        """Return the features of all tokens, and the scores of all heads."""
        features: BiaffineFeatures = self.head.view(self.read(batch.tokens))
        return features, self.head.score_arcs(features, batch.cells, batch.is_word)

    def forward(self, batch: ParseBatch) -> Float[Tensor, ""]:
        """Return the mean loss of heads plus that of relations."""
        features, arcs = self.score(batch)
        relations = self.head.score_relations(features, batch.head_rows)
        head_loss = mean_cross_entropy(arcs.flatten(0, 1), batch.heads.flatten())
        return head_loss + mean_cross_entropy(relations, batch.relations)

    def parse(self, examples: ParseExamples, settings: TaskSettings) -> Parses:
        """Return the best tree of every sentence."""
        first_words = np.cumsum(examples.n_words) - examples.n_words
        heads = np.zeros(len(examples.heads), dtype=np.int64)
        relations = np.zeros_like(heads)
        n_searched = 0
        # All batches are queued on the device before the first scores are needed.
        for rows, batch, (features, arcs) in list(predict(self, examples, settings, self.score)):
            n_words = examples.n_words[rows]
            is_word = np.arange(arcs.shape[1]) < n_words[:, None]
            found, n_here = decode_trees(arcs.cpu().numpy(), n_words)
            n_searched += n_here
            words = (first_words[rows][:, None] + np.arange(arcs.shape[1]))[is_word]
            heads[words] = found[is_word]
            begins = np.repeat(np.cumsum(n_words) - n_words, n_words)
            head_words = np.where(heads[words] > 0, begins + heads[words] - 1, -1)
            with torch.no_grad(), working_precision(self, settings):
                best = self._choose_relations(
                    features, batch.positions[: len(words)], torch.from_numpy(head_words)
                )
            relations[words] = best.cpu().numpy()
        return Parses(heads, relations, n_searched)

    def _choose_relations(
        self, features: BiaffineFeatures, positions: Tensor, head_words: Tensor
    ) -> Tensor:
        """Return the best relations of words to their heads; −1 in `head_words` is the root."""
        head_words = head_words.to(positions.device)
        n_tokens = len(features.arc_heads) - 1
        head_rows = positions.new_full((n_tokens,), n_tokens)
        head_positions = positions[head_words.clamp(min=0)]
        head_rows[positions] = torch.where(head_words < 0, n_tokens, head_positions)
        scores = self.head.score_relations(features, head_rows)[positions].float()
        scores[:, self.root] = torch.where(head_words < 0, -IMPOSSIBLE_SCORE, IMPOSSIBLE_SCORE)
        return scores.argmax(dim=1)


@dataclass(frozen=True, slots=True)
class AttachmentScores:
    """Per sentence: scored words, words with the gold head, words with gold head and relation."""

    n_words: IntArray
    n_heads: IntArray
    n_relations: IntArray

    @property
    def uas(self) -> float:
        """The share of correct heads, in percent."""
        return 100 * int(self.n_heads.sum()) / max(1, int(self.n_words.sum()))

    @property
    def las(self) -> float:
        """The share of correct heads with the correct relation, in percent."""
        return 100 * int(self.n_relations.sum()) / max(1, int(self.n_words.sum()))

    @property
    def items(self) -> ItemScores:
        """The contributions of all sentences to LAS."""
        return ItemScores(self.n_relations.astype(np.float64), self.n_words.astype(np.float64))


def score_attachments(
    gold: Sequence[ParsedSentence],
    heads: Sequence[Sequence[int]],
    relations: Sequence[Sequence[str]],
    *,
    ignored: Collection[str] = IGNORED_TAGS,
    subtypes: bool = False,
) -> AttachmentScores:
    """Compare predicted arcs with gold arcs; words without a prediction are not scored.

    With no ignored tags these are the scores of the CoNLL 2018 shared task on gold words.
    """
    counts = np.zeros((len(gold), 3), dtype=np.int64)
    for row, (sentence, own_heads, names) in enumerate(zip(gold, heads, relations, strict=True)):
        for tag, gold_head, gold_name, head, name in zip(
            sentence.upos, sentence.heads, sentence.deprels, own_heads, names, strict=False
        ):
            if tag in ignored:
                continue
            same_head = gold_head == head
            same_name = normalize_relation(gold_name, subtypes) == normalize_relation(
                name, subtypes
            )
            counts[row] += (1, same_head, same_head and same_name)
    return AttachmentScores(*counts.T)


def normalize_relation(name: str, subtypes: bool = False) -> str:
    """Return the name of a relation in version 2, without its subtype unless `subtypes` is set.

    The CoNLL 2018 shared task and Wu and Dredze compare relations without subtypes.

    >>> normalize_relation("nsubjpass"), normalize_relation("acl:relcl")
    ('nsubj', 'acl')
    """
    full = RENAMED_RELATIONS.get(name, name)
    return full if subtypes else full.partition(":")[0]
