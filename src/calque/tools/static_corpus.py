"""The text that static vectors are learnt from: sentences of words, filtered as in the paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any

from calque.text.files import PathLike, SkipBad, read_lines
from calque.text.segmentation import CODES, SPACELESS, find_splitter, split_on_spaces
from calque.text.sentences import split_sentences
from calque.types import InputError

if TYPE_CHECKING:
    from calque.text.segmentation import Splitter

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
