"""Clean bitext and text: drop unusable sentences, normalize the rest, and count what was dropped.

The rules are applied to blocks of text: NumPy checks the code points of a whole block at once.
"""

from __future__ import annotations

import json
import operator
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from calque.errors import InputError
from calque.io.bitext import (
    BitextFormat,
    infer_languages,
    parse_language_pair,
    read_bitext,
    write_bitext,
)
from calque.io.files import PathLike, check_output_file, open_skip_list, write_atomically
from calque.types import Progress, SentencePair

if TYPE_CHECKING:
    import numpy.typing as npt

    Counts: TypeAlias = npt.NDArray[np.int64]
    Flags: TypeAlias = npt.NDArray[np.bool_]
    Table: TypeAlias = npt.NDArray[np.uint8]  # a small number for every code point

ItemT = TypeVar("ItemT")

BLOCK_ITEMS = 1 << 14
BLOCK_CHARS = 1 << 22  # a block also ends here, so that long lines do not fill the memory
N_CODES = 0x32400  # higher code points count like the last one, which is unassigned
N_EXAMPLES = 3
EXAMPLE_CHARS = 200
RATIO_SLACK = 10  # characters added to both sides: "Go!" and "Gehen Sie!" are a valid pair

# Control characters and direction marks, without U+200C and U+200D, which matter in many scripts.
INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)

# Code points of a script, and the languages whose text must contain some of them. Languages that
# are not listed (sr, kk and uz use two scripts) are not checked; those listed twice may use either.
SCRIPTS = {
    "Latin": (
        "0041-005A 0061-007A 00C0-00D6 00D8-00F6 00F8-024F 1E00-1EFF",
        "af ca cs cy da de en es et eu fi fr ga gl hr hu id is it lt lv ms mt nb nl nn no pl pt ro"
        " sk sl sq sv sw tl tr vi",
    ),
    "Greek": ("0370-03FF 1F00-1FFF", "el"),
    "Cyrillic": ("0400-052F", "be bg mk ru uk"),
    "Armenian": ("0530-058F", "hy"),
    "Hebrew": ("0590-05FF FB1D-FB4F", "he yi"),
    "Arabic": ("0600-06FF 0750-077F 08A0-08FF FB50-FDFF FE70-FEFC", "ar fa ps ur"),
    "Devanagari": ("0900-097F", "hi mr ne"),
    "Bengali": ("0980-09FF", "as bn"),
    "Gujarati": ("0A80-0AFF", "gu"),
    "Tamil": ("0B80-0BFF", "ta"),
    "Telugu": ("0C00-0C7F", "te"),
    "Kannada": ("0C80-0CFF", "kn"),
    "Malayalam": ("0D00-0D7F", "ml"),
    "Sinhala": ("0D80-0DFF", "si"),
    "Thai": ("0E00-0E7F", "th"),
    "Lao": ("0E80-0EFF", "lo"),
    "Burmese": ("1000-109F", "my"),
    "Georgian": ("10A0-10FF 1C90-1CBF", "ka"),
    "Hangul": ("1100-11FF 3130-318F AC00-D7AF", "ko"),
    "Ethiopic": ("1200-139F", "am ti"),
    "Khmer": ("1780-17FF", "km"),
    "Kana": ("3041-30FF 31F0-31FF FF66-FF9D", "ja"),
    "Han": ("3005-3007 3400-4DBF 4E00-9FFF F900-FAFF 20000-323AF", "ja yue zh"),
}
WIDTHS = {"Han": 3, "Kana": 2, "Hangul": 2}  # length of one character in letters of an alphabet


@dataclass(frozen=True, slots=True)
class CleaningRules:
    """Rules for dropping and normalizing sentences; None disables a limit.

    Attributes:
        min_chars: Minimum number of characters of each side; empty sides are always dropped.
        max_chars: Maximum number of characters of each side.
        min_words: Minimum number of words, separated by white space, of each side.
        max_words: Maximum number of words of each side.
        max_ratio: Maximum ratio of the lengths of the two sides, in characters; those of Chinese,
            Japanese and Korean count more than once.
        max_nonletters: Maximum share of characters that are neither letters nor spaces.
        drop_identical: Drop pairs with two identical sides.
        drop_duplicates: Drop repeated pairs.
        check_scripts: Drop text without a letter of the script of its language.
        normalize: Compose characters (NFC), remove control characters, normalize white space.
    """

    min_chars: int = 1
    max_chars: int | None = 1000
    min_words: int = 1
    max_words: int | None = None
    max_ratio: float | None = 3.0
    max_nonletters: float | None = 0.6
    drop_identical: bool = True
    drop_duplicates: bool = True
    check_scripts: bool = True
    normalize: bool = True

    def __post_init__(self) -> None:
        for unit in ("chars", "words"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if most is not None and least > most:
                problem = f"min_{unit} is {least}, but max_{unit} is {most}"
                raise InputError(problem, fix=f"choose a lower min_{unit}")
            if least < 0:
                raise InputError(f"min_{unit} is {least}", fix="choose 0 or more")
        if self.max_ratio is not None and not self.max_ratio >= 1:
            raise InputError(f"max_ratio is {self.max_ratio}", fix="choose 1 or more")
        if self.max_nonletters is not None and not 0 <= self.max_nonletters <= 1:
            problem = f"max_nonletters is {self.max_nonletters}"
            raise InputError(problem, fix="choose a share from 0 to 1")


@dataclass(slots=True)
class CleaningReport:
    """Running counts of sentences read, kept, normalized and dropped, with examples per reason."""

    n_read: int = 0
    n_kept: int = 0
    n_normalized: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)

    def add_dropped(self, reason: str, n_drops: int, drops: Iterable[Iterable[str]]) -> None:
        """Count sentences dropped for one reason, and keep the first few as examples."""
        if n_drops:
            self.dropped[reason] += n_drops
            examples = self.examples.setdefault(reason, [])
            for sides in islice(drops, N_EXAMPLES - len(examples)):
                examples.append(tuple(side[:EXAMPLE_CHARS] for side in sides))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "n_read": self.n_read,
            "n_kept": self.n_kept,
            "n_normalized": self.n_normalized,
            "dropped": dict(self.dropped),
            "examples": {reason: list(map(list, sides)) for reason, sides in self.examples.items()},
        }


@dataclass(frozen=True, slots=True)
class CleaningResult:
    """What `clean_bitext` wrote and dropped.

    `dropped` has the number of pairs per reason and `examples` a few pairs of each. `n_bad` counts
    skipped invalid lines, `n_extra_columns` lines whose columns after the third were left out, and
    `first_extra_columns` is the first of those. `languages` is None if they are unknown, and then
    scripts were not checked.
    """

    outputs: tuple[str, ...]
    languages: tuple[str, str] | None
    n_read: int
    n_kept: int
    n_normalized: int
    dropped: Mapping[str, int]
    examples: Mapping[str, Sequence[tuple[str, ...]]]
    n_bad: int = 0
    n_extra_columns: int = 0
    first_extra_columns: int | None = None


def clean_bitext(
    src: PathLike,
    tgt: PathLike | None = None,
    *,
    output: PathLike | Sequence[PathLike],
    languages: str | tuple[str, str] | None = None,
    input_format: BitextFormat = "auto",
    rules: CleaningRules | None = None,
    report: PathLike | None = None,
    skip_bad: PathLike | None = None,
    progress: Progress | None = None,
) -> CleaningResult:
    """Drop unusable sentence pairs of a bitext, normalize the rest, and write them.

    Args:
        src: File with tab-separated or `source ||| target` lines, or the source side.
        tgt: File with the target side, one sentence per line.
        output: A TSV file, or two files, one per side.
        languages: Languages such as "de-en". Default: inferred from the file names.
        input_format: "auto", "tsv", "pipes" or "moses" (two files).
        rules: What to drop. Default: `CleaningRules()`.
        report: JSON file for the counts, with a few examples of each reason.
        skip_bad: File that lists invalid lines, which are then skipped instead of an error.
        progress: Called with the number of pairs read.

    Examples:
        >>> import calque
        >>> result = calque.clean_bitext("en-de.tsv", output="clean.tsv")  # doctest: +SKIP
        >>> result.n_kept, result.dropped                                  # doctest: +SKIP
        (9120, {'duplicate': 311, 'length ratio': 42})
    """
    inputs = [os.fspath(path) for path in (src, tgt) if path is not None]
    outputs = [output] if isinstance(output, str | os.PathLike) else list(output)
    _check_outputs(inputs, outputs, [path for path in (report, skip_bad) if path is not None])
    paths = src if tgt is None else (src, tgt)
    if isinstance(languages, str):
        languages = parse_language_pair(languages)
    pair = languages or infer_languages(paths)
    counts, n_extra = CleaningReport(), 0
    first_extra: int | None = None

    def count_extra(number: int) -> None:
        nonlocal n_extra, first_extra
        n_extra, first_extra = n_extra + 1, first_extra or number

    with ExitStack() as stack:
        skipped = open_skip_list(None if skip_bad is None else Path(skip_bad), stack)
        pairs = read_bitext(paths, input_format, skip_bad=skipped, on_extra_columns=count_extra)
        if progress is not None:
            pairs = _report_progress(pairs, progress)
        write_bitext(outputs, clean_pairs(pairs, rules or CleaningRules(), counts, pair))
        if report is not None:
            stream = stack.enter_context(write_atomically(report))
            stream.write(json.dumps(counts.to_dict(), ensure_ascii=False, indent=1) + "\n")
    return CleaningResult(
        outputs=tuple(os.fspath(path) for path in outputs),
        languages=pair,
        n_read=counts.n_read,
        n_kept=counts.n_kept,
        n_normalized=counts.n_normalized,
        dropped=dict(counts.dropped.most_common()),
        examples=counts.examples,
        n_bad=0 if skipped is None else skipped.n_lines,
        n_extra_columns=n_extra,
        first_extra_columns=first_extra,
    )


def _check_outputs(
    inputs: Sequence[str], outputs: Sequence[PathLike], lists: Sequence[PathLike]
) -> None:
    if len(outputs) not in (1, 2):
        problem = f"{len(outputs)} output files were given"
        raise InputError(problem, fix="choose one TSV file, or two files, one per side")
    for path in (*outputs, *lists):
        check_output_file(Path(path), inputs)
    files = [*{os.fspath(path) for path in outputs}, *lists]
    if len(set(map(os.path.realpath, files))) < len(files):
        problem = "the output, the report and the list of bad lines need different files"
        raise InputError(problem, fix="choose other file names")


def _report_progress(pairs: Iterator[SentencePair], progress: Progress) -> Iterator[SentencePair]:
    n_pairs = 0
    for n_pairs, pair in enumerate(pairs, start=1):
        yield pair
        if n_pairs % BLOCK_ITEMS == 0:
            progress("cleaning", n_pairs, None)
    progress("cleaning", n_pairs, None)


def clean_pairs(
    pairs: Iterable[SentencePair],
    rules: CleaningRules,
    report: CleaningReport,
    languages: tuple[str, str] | None = None,
) -> Iterator[SentencePair]:
    """Yield the pairs to keep, normalized and in order, and add up the counts in `report`."""
    filters = _Filters(rules, report, languages or ())
    for block in _blocks(pairs, lambda pair: len(pair.src) + len(pair.tgt)):
        (srcs, tgts), kept = filters.apply(
            ([pair.src for pair in block], [pair.tgt for pair in block])
        )
        for i in kept:
            pair, src, tgt = block[i], srcs[i], tgts[i]
            is_same = src is pair.src and tgt is pair.tgt
            yield pair if is_same else SentencePair(src, tgt, pair.tag)


def clean_sentences(
    sentences: Iterable[str],
    rules: CleaningRules,
    report: CleaningReport,
    language: str | None = None,
) -> Iterator[str]:
    """Yield the sentences to keep, normalized and in order, and add up the counts in `report`."""
    filters = _Filters(rules, report, (language,) if language else ())
    for block in _blocks(sentences, len):
        (texts,), kept = filters.apply((block,))
        yield from map(texts.__getitem__, kept)


def normalize_text(text: str) -> str:
    r"""Return text composed (NFC), without control characters, with single spaces between words.

    >>> normalize_text(" Cafe\u0301\t\xa0 noir\x07 ")
    'Café noir'
    """
    is_plain = text.isprintable()  # no control characters, and " " is the only white space
    if not is_plain:
        text = INVISIBLE.sub("", text)
    if not is_plain or "  " in text or text[:1] == " " or text[-1:] == " ":
        text = " ".join(text.split())
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _blocks(items: Iterable[ItemT], length_of: Callable[[ItemT], int]) -> Iterator[list[ItemT]]:
    block: list[ItemT] = []
    n_chars = 0
    for item in items:
        block.append(item)
        n_chars += length_of(item)
        if n_chars >= BLOCK_CHARS or len(block) == BLOCK_ITEMS:
            yield block
            block, n_chars = [], 0
    if block:
        yield block


class _Filters:
    """The rules applied to a stream of blocks; remembers the texts that were kept."""

    def __init__(
        self, rules: CleaningRules, report: CleaningReport, languages: Sequence[str]
    ) -> None:
        self.rules, self.report, self.seen = rules, report, _HashSet()
        self.script_tables = [
            _script_table(code) if rules.check_scripts else None for code in languages
        ]

    def apply(self, raw: Sequence[list[str]]) -> tuple[list[list[str]], list[int]]:
        """Return the normalized sides of a block and the indices of the items to keep."""
        normalize = self.rules.normalize
        sides = [[normalize_text(text) for text in side] if normalize else side for side in raw]
        kept = np.ones(len(sides[0]), dtype=bool)
        for reason, is_bad in self._find_bad(sides, kept):
            dropped = np.flatnonzero(is_bad & kept).tolist()
            examples = ([side[i] for side in raw] for i in dropped)
            self.report.add_dropped(reason, len(dropped), examples)
            kept &= ~is_bad
        changed = np.zeros(len(kept), dtype=bool)
        for before, after in zip(raw, sides, strict=True):
            changed |= np.fromiter(map(operator.ne, before, after), bool)
        self.report.n_read += len(kept)
        self.report.n_kept += int(kept.sum())
        self.report.n_normalized += int((changed & kept).sum())
        return sides, np.flatnonzero(kept).tolist()

    def _find_bad(self, sides: list[list[str]], kept: Flags) -> Iterator[tuple[str, Flags]]:
        yield from _find_bad_lengths(sides, self.rules)
        if self.rules.drop_identical and len(sides) == 2:
            yield "identical sides", np.fromiter(map(operator.eq, *sides), bool)
        yield from _find_bad_letters(
            [_Codes(side) for side in sides], self.script_tables, self.rules
        )
        if self.rules.drop_duplicates:
            yield "duplicate", self._find_duplicates(sides, kept)

    def _find_duplicates(self, sides: list[list[str]], kept: Flags) -> Flags:
        """Return which items repeat an earlier one that was kept."""
        hashes = np.fromiter(map(hash, zip(*sides, strict=True)), np.int64)
        repeated = np.zeros(len(hashes), dtype=bool)
        repeated[kept] = ~self.seen.add(hashes[kept])
        return repeated


class _HashSet:
    """A growing set of 64-bit hashes, stored as sorted runs of decreasing length.

    It takes 8 bytes per hash (16 while runs are merged), where a Python set would take about 60.
    Among 10 million texts, the probability that two share a hash is 3 in a million.
    """

    def __init__(self) -> None:
        self.runs: list[Counts] = []

    def add(self, hashes: Counts) -> Flags:
        """Add hashes and return which of them are new; repeated ones are new once."""
        unique, first = np.unique(hashes, return_index=True)
        is_new = np.ones(len(unique), dtype=bool)
        for run in self.runs:
            positions = np.searchsorted(run, unique)
            is_new &= run.take(positions, mode="clip") != unique
        self._store(unique[is_new])
        are_new = np.zeros(len(hashes), dtype=bool)
        are_new[first[is_new]] = True
        return are_new

    def _store(self, run: Counts) -> None:
        while self.runs and len(self.runs[-1]) < 8 * len(run):
            run = np.concatenate([self.runs.pop(), run])
            run.sort(kind="stable")  # merges two sorted halves in one pass
        if len(run):
            self.runs.append(run)


class _Codes:
    """The code points of many texts in one array, each text followed by a newline."""

    def __init__(self, texts: Sequence[str]) -> None:
        joined = "\n".join(texts) + "\n"
        self.codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        self.n_chars = np.fromiter(map(len, texts), np.int64)
        self.starts = np.cumsum(self.n_chars + 1) - self.n_chars - 1

    def sum_over(self, table: Table) -> Counts:
        """Return for each text the sum of the table values of its characters."""
        return np.add.reduceat(table.take(self.codes, mode="clip"), self.starts, dtype=np.int64)


def _find_bad_lengths(sides: list[list[str]], rules: CleaningRules) -> Iterator[tuple[str, Flags]]:
    n_chars = [np.fromiter(map(len, side), np.int64) for side in sides]
    shortest, longest = np.min(n_chars, axis=0), np.max(n_chars, axis=0)
    yield "empty", shortest == 0
    yield "too short", shortest < rules.min_chars
    if rules.max_chars is not None:
        yield "too long", longest > rules.max_chars
    if rules.min_words > 1 or rules.max_words is not None:
        n_words = [[len(text.split()) for text in side] for side in sides]
        yield "too short", np.min(n_words, axis=0) < rules.min_words
        if rules.max_words is not None:
            yield "too long", np.max(n_words, axis=0) > rules.max_words


def _find_bad_letters(
    sides: list[_Codes], scripts: Sequence[Table | None], rules: CleaningRules
) -> Iterator[tuple[str, Flags]]:
    if rules.max_ratio is not None and len(sides) == 2:
        widths = np.sort([side.sum_over(_width_table()) + RATIO_SLACK for side in sides], axis=0)
        yield "length ratio", widths[1] > rules.max_ratio * widths[0]
    if rules.max_nonletters is not None:
        for side in sides:
            n_nonletters = side.sum_over(_nonletter_table())
            yield "non-letters", n_nonletters > rules.max_nonletters * side.n_chars
    for side, table in zip(sides, scripts, strict=False):  # empty if the languages are unknown
        if table is not None:
            yield "wrong script", side.sum_over(table) == 0


@cache
def _width_table() -> Table:
    """Return the length of every character in the length ratio; the final newline has none."""
    table = np.ones(N_CODES, dtype=np.uint8)
    table[ord("\n")] = 0
    for script, width in WIDTHS.items():
        _fill(table, script, width)
    return table


@cache
def _nonletter_table() -> Table:
    """Return 1 for digits, punctuation and symbols, 0 for letters, marks, spaces and joiners."""
    categories = (unicodedata.category(chr(code)) for code in range(N_CODES))
    return np.fromiter((name[0] in "NPS" for name in categories), np.uint8, N_CODES)


@cache
def _script_table(language: str) -> Table | None:
    """Return 1 for letters of a language's script; None if the language is not checked."""
    code = re.split("[-_]", language)[0].lower()
    scripts = [name for name, (_, languages) in SCRIPTS.items() if code in languages.split()]
    table = np.zeros(N_CODES, dtype=np.uint8)
    for script in scripts:
        _fill(table, script, 1)
    return table if scripts else None


def _fill(table: Table, script: str, value: int) -> None:
    for span in SCRIPTS[script][0].split():
        first, last = (int(code, 16) for code in span.split("-"))
        table[first : last + 1] = value
