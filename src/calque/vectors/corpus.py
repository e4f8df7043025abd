"""The text that static vectors are learnt from: sentences of words, filtered as in the paper.

A corpus in numbers: its sentences, the subwords of its word forms, and the words to learn.

It lies in files that are memory-mapped, so that learning can go on where it was killed without
the text being read again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.errors import InputError, first_line
from calque.io.files import PathLike, SkipBad, read_lines, write_atomically
from calque.io.segmentation import CODES, SPACELESS, find_splitter, split_on_spaces, split_sentences
from calque.tokens.ragged import Ragged, ranges
from calque.tokens.store import TokenStore, write_store
from calque.tokens.tokenizer import keeps_spaces, lift_limits
from calque.tokens.words import PieceTable

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    from calque.io.segmentation import Splitter

    IntArray = npt.NDArray[np.int64]

# Languages whose small I has no dot: Python's `lower` follows English there.
TURKIC = {"az", "aze", "tr", "tur"}
TURKIC_LETTERS = str.maketrans({"I": "ı", "İ": "i"})


@dataclass(frozen=True, slots=True)
class CorpusFilter:
    """Which sentences are learnt from (Hämmerl et al., 2022, appendix C); None is no bound.

    Paragraphs of fewer than `min_sentences` are most often headlines.
    """

    min_tokens: int = 7
    min_sentences: int = 2
    max_sentences: int | None = 1_000_000

    @staticmethod
    def off() -> CorpusFilter:
        """Keep all."""
        return CorpusFilter(min_tokens=1, min_sentences=1, max_sentences=None)


@dataclass(slots=True)
class CorpusReport:
    """What was read, and what the filter left out; `is_full` if there was more than wanted."""

    n_lines: int = 0
    n_sentences: int = 0
    n_lone: int = 0
    n_short: int = 0
    is_full: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Give the figures that a file keeps."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CorpusReader:
    """Reads files of one language into sentences of words.

    A line is a paragraph, which is split into sentences; with `sentence_lines` a line is a
    sentence, and blank lines separate paragraphs. With `tokenized` words stand between spaces.
    """

    language: str
    filter: CorpusFilter = field(default_factory=CorpusFilter)
    sentence_lines: bool = False
    tokenized: bool = False
    keep_case: bool = False

    def read(
        self,
        paths: Sequence[PathLike],
        report: CorpusReport | None = None,
        skip_bad: Callable[[PathLike], SkipBad | None] = lambda path: None,
    ) -> Iterator[list[str]]:
        """Read the sentences that pass the filter; the report grows as they are read."""
        split, tidy = self._find_splitter(), self._find_case()
        report = CorpusReport() if report is None else report
        for sentence in self._drop_lone(paths, report, skip_bad):
            words = split(tidy(sentence))
            if len(words) < self.filter.min_tokens:
                report.n_short += 1
                continue
            if report.n_sentences == self.filter.max_sentences:
                report.is_full = True
                return
            report.n_sentences += 1
            yield words

    def _drop_lone(
        self,
        paths: Sequence[PathLike],
        report: CorpusReport,
        skip_bad: Callable[[PathLike], SkipBad | None],
    ) -> Iterator[str]:
        """Give the sentences of paragraphs that have enough of them."""
        for path in paths:
            lines = _count(read_lines(path, skip_bad(path)), report)
            for paragraph in self._cut_paragraphs(lines):
                # Only so many are looked at: a paragraph may be a whole file.
                first = list(islice(paragraph, self.filter.min_sentences))
                if len(first) < self.filter.min_sentences:
                    report.n_lone += len(first)
                else:
                    yield from chain(first, paragraph)

    def _cut_paragraphs(self, lines: Iterable[str]) -> Iterator[Iterator[str]]:
        if self.sentence_lines:
            groups = groupby(lines, key=lambda line: bool(line.strip()))
            return (group for is_text, group in groups if is_text)
        return (iter(split_sentences(line, self.language)) for line in lines if line.strip())

    def _find_splitter(self) -> Splitter:
        if self.tokenized:
            return split_on_spaces
        base = self.language.partition("_")[0]
        code = CODES.get(base, base)
        if code in SPACELESS:
            raise InputError(
                f"{SPACELESS[code]} puts no spaces between words, and Calque cannot find them",
                fix="put spaces between the words and add --tokenized",
            )
        return find_splitter(self.language)

    def _find_case(self) -> Callable[[str], str]:
        if self.keep_case:
            return lambda text: text
        if self.language.partition("_")[0] in TURKIC:
            return lambda text: text.translate(TURKIC_LETTERS).lower()
        return str.lower


def _count(lines: Iterable[str], report: CorpusReport) -> Iterator[str]:
    for line in lines:
        report.n_lines += 1
        yield line


BLOCK_SENTENCES = 4096
SENTENCES, PIECES, CONTENTS = "sentences", "pieces", "corpus.json"


@dataclass(frozen=True, slots=True)
class VocabularyLimits:
    """Which words get a vector: the most frequent ones that are frequent enough."""

    max_words: int = 200_000
    min_count: int = 10


@dataclass(frozen=True, slots=True)
class CutReport:
    """What the model's length made of the text: `n_words` words of `n_sentences` were cut off."""

    n_sentences: int = 0
    n_words: int = 0
    n_empty: int = 0

    def __add__(self, other: CutReport) -> CutReport:
        return CutReport(
            self.n_sentences + other.n_sentences,
            self.n_words + other.n_words,
            self.n_empty + other.n_empty,
        )


@dataclass(frozen=True)
class WordCorpus:
    """Sentences of form numbers, subwords by form, and which word each form is.

    `rows[form]` is the number of its word, the most frequent first, or −1 for a rare one. Forms
    are words as the tokenizer sees them: one at the start of a sentence may be a form of its own.
    """

    sentences: TokenStore
    pieces: TokenStore
    rows: IntArray
    words: tuple[str, ...]
    counts: IntArray
    cut: CutReport
    figures: dict[str, Any]

    def __len__(self) -> int:
        return len(self.sentences)

    @cached_property
    def form_sizes(self) -> IntArray:
        """Count the subwords of every form."""
        return np.diff(self.pieces.offsets)

    def spell(self, forms: IntArray) -> IntArray:
        """Give the subwords of forms, one form after the other."""
        starts = np.asarray(self.pieces.offsets).take(forms)
        places = ranges(starts, self.form_sizes.take(forms))
        return np.asarray(self.pieces.ids).take(places).astype(np.int64)

    @staticmethod
    def open(folder: Path) -> WordCorpus | None:
        """Open a corpus that is whole, if there is one."""
        path = folder / CONTENTS
        if not path.exists():
            return None
        try:
            contents = json.loads(path.read_text("utf-8"))
            pieces = TokenStore.open(folder / PIECES)
            rows = np.full(len(pieces), -1, dtype=np.int64)
            rows[contents["forms"]] = contents["rows"]
            return WordCorpus(
                sentences=TokenStore.open(folder / SENTENCES),
                pieces=pieces,
                rows=rows,
                words=tuple(contents["words"]),
                counts=np.array(contents["counts"], dtype=np.int64),
                cut=CutReport(**contents["cut"]),
                figures=contents["figures"],
            )
        except (LookupError, TypeError, ValueError, OSError) as error:
            fix = "remove its folder to begin anew"
            raise InputError(f"damaged: {first_line(error)}", file=path, fix=fix) from error


def number_corpus(
    tokenizer: PreTrainedTokenizerFast,
    sentences: Iterable[Sequence[str]],
    folder: Path,
    *,
    room: int,
    limits: VocabularyLimits,
    figures: Callable[[], dict[str, Any]] = dict,
) -> WordCorpus:
    """Number a corpus and count its words; sentences end before the word that exceeds the room.

    What is cut off is not counted: no word is learnt from where the encoder does not see it.
    `figures` is asked when all is read, and its answer kept with the corpus.
    """
    forms, cut = WordForms(tokenizer), CutReport()
    counts = np.zeros(0, dtype=np.int64)
    stream = iter(sentences)
    with write_store(folder / SENTENCES, 1 << 32) as append:
        while block := list(islice(stream, BLOCK_SENTENCES)):
            numbered, lost = cut_sentences(forms.number(block), forms.table.lengths, room)
            counts = _pad(counts, len(forms)) + np.bincount(numbered.ids, minlength=len(forms))
            append(numbered)
            cut += lost
    table = forms.table
    with write_store(folder / PIECES, len(tokenizer)) as append:
        append(Ragged(table.ids.astype(np.int64), table.lengths))
    words = count_words(forms.words(), np.where(table.lengths > 0, counts, 0), limits)
    is_learnt = (words.rows >= 0) & (table.lengths > 0)
    contents = {
        "words": words.words,
        "counts": words.counts.tolist(),
        "forms": np.flatnonzero(is_learnt).tolist(),
        "rows": words.rows[is_learnt].tolist(),
        "cut": {"n_sentences": cut.n_sentences, "n_words": cut.n_words, "n_empty": cut.n_empty},
        "figures": figures(),
    }
    with write_atomically(folder / CONTENTS) as file:  # last: it says that all is there
        json.dump(contents, file)
    corpus = WordCorpus.open(folder)
    assert corpus is not None
    return corpus


class WordForms(dict[str, int]):
    """Numbers word forms as they are met, and encodes each of them once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self._backend = lift_limits(tokenizer.backend_tokenizer)
        self._spaced = keeps_spaces(tokenizer)
        self._new: list[str] = []
        self.table = PieceTable.of_nothing()

    def __missing__(self, form: str) -> int:
        self._new.append(form)
        self[form] = number = len(self)
        return number

    def number(self, sentences: Sequence[Sequence[str]]) -> Ragged:
        """Give sentences as form numbers."""
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        words: Iterable[str] = chain.from_iterable(sentences)
        if self._spaced:  # byte-level: the space before a word is in its first piece
            words = (" " * (k > 0) + word for words in sentences for k, word in enumerate(words))
        ids = np.fromiter(map(self.__getitem__, words), np.int64, lengths.sum())
        encodings = self._backend.encode_batch_fast(
            [[form] for form in self._new], is_pretokenized=True, add_special_tokens=False
        )
        self.table = self.table.extend([encoding.ids for encoding in encodings])
        self._new = []
        return Ragged(ids, lengths)

    def words(self) -> list[str]:
        """Give the word of every form."""
        return [form.removeprefix(" ") for form in self] if self._spaced else list(self)


@dataclass(frozen=True, slots=True)
class CountedWords:
    """The words of a vocabulary by frequency, and the row of every form or −1."""

    words: list[str]
    counts: IntArray
    rows: IntArray


def count_words(words: Sequence[str], counts: IntArray, limits: VocabularyLimits) -> CountedWords:
    """Choose the vocabulary; among words that are equally frequent the one met first comes first.

    >>> limits = VocabularyLimits(max_words=2, min_count=2)
    >>> found = count_words(["the", "cat", "sat", "the"], np.array([1, 2, 1, 4]), limits)
    >>> found.words, found.counts.tolist(), found.rows.tolist()
    (['the', 'cat'], [5, 2], [0, 1, -1, 0])
    """
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    owners = np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))
    totals = np.bincount(owners, weights=counts, minlength=len(numbers)).astype(np.int64)
    order = np.argsort(-totals, kind="stable")[: limits.max_words]
    order = order[totals[order] >= max(1, limits.min_count)]
    if len(order) == 0:
        most = f"the most frequent one {totals.max()}" if len(totals) else "there is none"
        raise InputError(
            f"no word occurs {limits.min_count} times or more: {most}",
            fix="give more text, filter less, or lower --min-count",
        )
    row_of = np.full(len(numbers), -1, dtype=np.int64)
    row_of[order] = np.arange(len(order))
    names = list(numbers)
    return CountedWords([names[k] for k in order.tolist()], totals[order], row_of[owners])


def cut_sentences(sentences: Ragged, n_pieces: IntArray, room: int) -> tuple[Ragged, CutReport]:
    """End sentences before the word whose subwords exceed the room; drop those left with none.

    >>> sentences, n_pieces = Ragged(np.array([0, 1, 0, 1, 1]), np.array([3, 2])), np.array([1, 2])
    >>> kept, cut = cut_sentences(sentences, n_pieces, room=3)
    >>> kept.ids.tolist(), kept.lengths.tolist(), cut
    ([0, 1, 1], [2, 1], CutReport(n_sentences=2, n_words=2, n_empty=0))
    """
    sizes = n_pieces[sentences.ids]
    ends = np.cumsum(sizes)
    starts = np.cumsum(sentences.lengths) - sentences.lengths
    before = np.concatenate([[0], ends])[starts]
    fits = ends - np.repeat(before, sentences.lengths) <= room
    owners = np.repeat(np.arange(len(starts)), sentences.lengths)
    n_kept = np.bincount(owners[fits], minlength=len(starts))
    n_seen = np.bincount(owners[fits], weights=sizes[fits], minlength=len(starts))
    n_kept[n_seen == 0] = 0  # words that the tokenizer deletes are nothing to learn from
    is_cut = (n_kept > 0) & (n_kept < sentences.lengths)
    n_lost = int((sentences.lengths - n_kept)[is_cut].sum())
    ids = sentences.ids[ranges(starts, n_kept)]
    report = CutReport(int(is_cut.sum()), n_lost, int((n_kept == 0).sum()))
    return Ragged(ids, n_kept[n_kept > 0]), report


def _pad(counts: IntArray, length: int) -> IntArray:
    return np.concatenate([counts, np.zeros(length - len(counts), dtype=np.int64)])
