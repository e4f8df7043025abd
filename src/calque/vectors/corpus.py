"""The corpus of static vectors: filtered sentences of words, numbered and stored on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.errors import InputError
from calque.io.checksums import check_files, describe_file, format_record, read_record
from calque.io.files import PathLike, SkipBad, read_lines, write_atomically
from calque.io.resumable import warn_of_damage
from calque.io.segmentation import (
    LANGUAGE_CODES,
    UNSPACED_LANGUAGES,
    get_word_splitter,
    split_on_spaces,
    split_sentences,
)
from calque.tokens.ragged import Ragged, ranges
from calque.tokens.store import TokenStore, write_store
from calque.tokens.tokenizer import disable_truncation_and_padding, keeps_leading_space
from calque.tokens.words import PieceTable

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    from calque.io.segmentation import WordSplitter

    IntArray = npt.NDArray[np.int64]

# Languages in which the lower case of I is ı, unlike in Python's `lower`.
TURKIC = {"az", "aze", "tr", "tur"}
TURKIC_LETTERS = str.maketrans({"I": "ı", "İ": "i"})


@dataclass(frozen=True, slots=True)
class CorpusFilter:
    """Which sentences are used (Hämmerl et al., 2022, appendix C); None means no limit.

    Paragraphs with fewer than `min_sentences` sentences are mostly headlines.
    """

    min_tokens: int = 7
    min_sentences: int = 2
    max_sentences: int | None = 1_000_000

    @staticmethod
    def off() -> CorpusFilter:
        """Return a filter that keeps all sentences."""
        return CorpusFilter(min_tokens=1, min_sentences=1, max_sentences=None)


@dataclass(slots=True)
class CorpusReport:
    """What was read, and what the filter left out.

    `n_short` sentences have too few words. `is_full` is True if the rest of the text was not read,
    since there were enough sentences.
    """

    n_lines: int = 0
    n_sentences: int = 0
    n_in_short_paragraphs: int = 0
    n_short: int = 0
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class CorpusReader:
    """Read files of one language into sentences of words.

    A line is a paragraph, which is split into sentences; with `sentence_lines`, a line is a
    sentence, and blank lines separate paragraphs. With `tokenized`, words are separated by spaces.
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
        """Read the sentences that pass the filter, and update the report."""
        split, convert_case = self._choose_splitter(), self._choose_case()
        report = CorpusReport() if report is None else report
        for sentence in self._drop_short_paragraphs(paths, report, skip_bad):
            words = split(convert_case(sentence))
            if len(words) < self.filter.min_tokens:
                report.n_short += 1
                continue
            if report.n_sentences == self.filter.max_sentences:
                report.is_full = True
                return
            report.n_sentences += 1
            yield words

    def _drop_short_paragraphs(
        self,
        paths: Sequence[PathLike],
        report: CorpusReport,
        skip_bad: Callable[[PathLike], SkipBad | None],
    ) -> Iterator[str]:
        """Return the sentences of paragraphs that have enough of them."""
        for path in paths:
            lines = _count_lines(read_lines(path, skip_bad(path)), report)
            for paragraph in self._split_paragraphs(lines):
                # No more are read ahead: a paragraph may be a whole file.
                first = list(islice(paragraph, self.filter.min_sentences))
                if len(first) < self.filter.min_sentences:
                    report.n_in_short_paragraphs += len(first)
                else:
                    yield from chain(first, paragraph)

    def _split_paragraphs(self, lines: Iterable[str]) -> Iterator[Iterator[str]]:
        if self.sentence_lines:
            groups = groupby(lines, key=lambda line: bool(line.strip()))
            return (group for is_text, group in groups if is_text)
        return (iter(split_sentences(line, self.language)) for line in lines if line.strip())

    def _choose_splitter(self) -> WordSplitter:
        if self.tokenized:
            return split_on_spaces
        base = self.language.partition("_")[0]
        code = LANGUAGE_CODES.get(base, base)
        if code in UNSPACED_LANGUAGES:
            raise InputError(
                f"{UNSPACED_LANGUAGES[code]} has no spaces between words, which Calque needs",
                fix="separate the words by spaces and add --tokenized",
            )
        return get_word_splitter(self.language)

    def _choose_case(self) -> Callable[[str], str]:
        if self.keep_case:
            return lambda text: text
        if self.language.partition("_")[0] in TURKIC:
            return lambda text: text.translate(TURKIC_LETTERS).lower()
        return str.lower


def _count_lines(lines: Iterable[str], report: CorpusReport) -> Iterator[str]:
    for line in lines:
        report.n_lines += 1
        yield line


BLOCK_SENTENCES = 4096
SENTENCES, PIECES, CONTENTS = "sentences", "pieces", "corpus.json"


@dataclass(frozen=True, slots=True)
class VocabularyLimits:
    """Which words get a vector: the `max_words` most frequent that occur `min_count` times."""

    max_words: int = 200_000
    min_count: int = 10


@dataclass(frozen=True, slots=True)
class TruncationCounts:
    """Sentences truncated to the length of the model, the words lost, and sentences left empty."""

    n_sentences: int = 0
    n_words: int = 0
    n_empty: int = 0

    def __add__(self, other: TruncationCounts) -> TruncationCounts:
        return TruncationCounts(
            self.n_sentences + other.n_sentences,
            self.n_words + other.n_words,
            self.n_empty + other.n_empty,
        )


@dataclass(frozen=True)
class WordCorpus:
    """Sentences as numbers of word forms, the subwords of every form, and its word.

    `rows[form]` is the number of its word, the most frequent first, or −1 for a rare word. Forms
    are words as the tokenizer sees them: a word at the start of a sentence may be another form.
    The arrays are memory-mapped, so that an interrupted run is resumed without reading the text.
    """

    sentences: TokenStore
    pieces: TokenStore
    rows: IntArray
    words: tuple[str, ...]
    counts: IntArray
    truncated: TruncationCounts
    counts_read: dict[str, Any]

    def __len__(self) -> int:
        return len(self.sentences)

    @cached_property
    def form_sizes(self) -> IntArray:
        """Number of subwords of every form."""
        return np.diff(self.pieces.offsets)

    def get_subwords(self, forms: IntArray) -> IntArray:
        """Return the subwords of forms, one form after the other."""
        starts = np.asarray(self.pieces.offsets).take(forms)
        positions = ranges(starts, self.form_sizes.take(forms))
        return np.asarray(self.pieces.ids).take(positions).astype(np.int64)

    @staticmethod
    def open(folder: Path) -> WordCorpus | None:
        """Open a complete corpus; return None if there is none, or it is damaged."""
        path = folder / CONTENTS
        if not path.exists():
            return None
        try:
            contents = read_record(path)
            check_files(folder, contents["files"])
        except InputError as error:
            warn_of_damage(error.file, f"{error.problem}; the text is read again")
            return None
        pieces = TokenStore.open(folder / PIECES)
        rows = np.full(len(pieces), -1, dtype=np.int64)
        rows[contents["forms"]] = contents["rows"]
        return WordCorpus(
            sentences=TokenStore.open(folder / SENTENCES),
            pieces=pieces,
            rows=rows,
            words=tuple(contents["words"]),
            counts=np.array(contents["counts"], dtype=np.int64),
            truncated=TruncationCounts(**contents["cut"]),
            counts_read=contents["figures"],
        )


def number_corpus(
    tokenizer: PreTrainedTokenizerFast,
    sentences: Iterable[Sequence[str]],
    folder: Path,
    *,
    max_subwords: int,
    limits: VocabularyLimits,
    get_counts: Callable[[], dict[str, Any]] = dict,
) -> WordCorpus:
    """Number the words of sentences, truncate sentences to `max_subwords`, and count the words.

    Words that are cut off are not counted, since the encoder does not see them. `get_counts` is
    called at the end, and its result is stored with the corpus.
    """
    forms, truncated = WordForms(tokenizer), TruncationCounts()
    counts = np.zeros(0, dtype=np.int64)
    stream = iter(sentences)
    with write_store(folder / SENTENCES, 1 << 32) as append:
        while block := list(islice(stream, BLOCK_SENTENCES)):
            numbered, lost = truncate_sentences(
                forms.number(block), forms.table.lengths, max_subwords
            )
            counts = np.pad(counts, (0, len(forms) - len(counts)))
            counts += np.bincount(numbered.ids, minlength=len(forms))
            append(numbered)
            truncated += lost
    table = forms.table
    with write_store(folder / PIECES, len(tokenizer)) as append:
        append(Ragged(table.ids.astype(np.int64), table.lengths))
    words = choose_words(forms.words(), np.where(table.lengths > 0, counts, 0), limits)
    is_learned = (words.rows >= 0) & (table.lengths > 0)
    contents = {
        "words": words.words,
        "counts": words.counts.tolist(),
        "forms": np.flatnonzero(is_learned).tolist(),
        "rows": words.rows[is_learned].tolist(),
        "cut": asdict(truncated),
        "figures": get_counts(),
        "files": {path.name: describe_file(path) for path in sorted(folder.glob("*.npy"))},
    }
    with write_atomically(folder / CONTENTS) as file:  # written last: the corpus is complete
        file.write(format_record(contents))
    corpus = WordCorpus.open(folder)
    assert corpus is not None
    return corpus


class WordForms(dict[str, int]):
    """Number word forms in the order of their first occurrence, and encode each of them once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self._backend = disable_truncation_and_padding(tokenizer.backend_tokenizer)
        self._spaced = keeps_leading_space(tokenizer)
        self._new: list[str] = []
        self.table = PieceTable.empty()

    def __missing__(self, form: str) -> int:
        self._new.append(form)
        self[form] = number = len(self)
        return number

    def number(self, sentences: Sequence[Sequence[str]]) -> Ragged:
        """Return sentences as numbers of forms."""
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        words: Iterable[str] = chain.from_iterable(sentences)
        if self._spaced:  # byte-level: the space before a word is part of its first subword
            words = (" " * (k > 0) + word for words in sentences for k, word in enumerate(words))
        ids = np.fromiter(map(self.__getitem__, words), np.int64, lengths.sum())
        encodings = self._backend.encode_batch_fast(
            [[form] for form in self._new], is_pretokenized=True, add_special_tokens=False
        )
        self.table = self.table.extend([encoding.ids for encoding in encodings])
        self._new = []
        return Ragged(ids, lengths)

    def words(self) -> list[str]:
        """Return the word of every form."""
        return [form.removeprefix(" ") for form in self] if self._spaced else list(self)


@dataclass(frozen=True, slots=True)
class WordVocabulary:
    """Words by frequency, their counts, and the row of every form or −1."""

    words: list[str]
    counts: IntArray
    rows: IntArray


def choose_words(
    words: Sequence[str], counts: IntArray, limits: VocabularyLimits
) -> WordVocabulary:
    """Choose the vocabulary; of equally frequent words, the one that occurs first comes first.

    >>> limits = VocabularyLimits(max_words=2, min_count=2)
    >>> found = choose_words(["the", "cat", "sat", "the"], np.array([1, 2, 1, 4]), limits)
    >>> found.words, found.counts.tolist(), found.rows.tolist()
    (['the', 'cat'], [5, 2], [0, 1, -1, 0])
    """
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    owners = np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))
    totals = np.bincount(owners, weights=counts, minlength=len(numbers)).astype(np.int64)
    order = np.argsort(-totals, kind="stable")[: limits.max_words]
    order = order[totals[order] >= max(1, limits.min_count)]
    if len(order) == 0:
        most = f"the most frequent one occurs {totals.max()} times" if len(totals) else "no words"
        raise InputError(
            f"no word occurs {limits.min_count} times or more: {most}",
            fix="use more text, filter less, or lower --min-count",
        )
    row_of = np.full(len(numbers), -1, dtype=np.int64)
    row_of[order] = np.arange(len(order))
    names = list(numbers)
    return WordVocabulary([names[k] for k in order.tolist()], totals[order], row_of[owners])


def truncate_sentences(
    sentences: Ragged, n_subwords: IntArray, max_subwords: int
) -> tuple[Ragged, TruncationCounts]:
    """End sentences before the word that exceeds `max_subwords`; drop sentences without words.

    >>> sentences, sizes = Ragged(np.array([0, 1, 0, 1, 1]), np.array([3, 2])), np.array([1, 2])
    >>> kept, counts = truncate_sentences(sentences, sizes, max_subwords=3)
    >>> kept.ids.tolist(), kept.lengths.tolist(), counts
    ([0, 1, 1], [2, 1], TruncationCounts(n_sentences=2, n_words=2, n_empty=0))
    """
    sizes = n_subwords[sentences.ids]
    ends = np.cumsum(sizes)
    starts = np.cumsum(sentences.lengths) - sentences.lengths
    before = np.concatenate([[0], ends])[starts]
    fits = ends - np.repeat(before, sentences.lengths) <= max_subwords
    owners = np.repeat(np.arange(len(starts)), sentences.lengths)
    n_kept = np.bincount(owners[fits], minlength=len(starts))
    n_seen = np.bincount(owners[fits], weights=sizes[fits], minlength=len(starts))
    n_kept[n_seen == 0] = 0  # the tokenizer deletes all of its words
    is_truncated = (n_kept > 0) & (n_kept < sentences.lengths)
    n_lost = int((sentences.lengths - n_kept)[is_truncated].sum())
    ids = sentences.ids[ranges(starts, n_kept)]
    report = TruncationCounts(int(is_truncated.sum()), n_lost, int((n_kept == 0).sum()))
    return Ragged(ids, n_kept[n_kept > 0]), report
