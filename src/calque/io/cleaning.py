"""Drop what is of no use to training, tidy the rest, and tell what was dropped and why.

Text is judged in blocks: NumPy looks at the code points of a whole block at once.
"""

from __future__ import annotations

import operator
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from calque.errors import InputError
from calque.types import SentencePair

if TYPE_CHECKING:
    import numpy.typing as npt

    Counts: TypeAlias = npt.NDArray[np.int64]
    Flags: TypeAlias = npt.NDArray[np.bool_]
    Table: TypeAlias = npt.NDArray[np.uint8]  # a small number for every code point

ItemT = TypeVar("ItemT")

BLOCK_ITEMS = 1 << 14
BLOCK_CHARS = 1 << 22  # a block ends here too, so that long lines do not fill the memory
N_CODES = 0x32400  # code points beyond count like the last one, which is unassigned
N_EXAMPLES = 3
EXAMPLE_CHARS = 200
RATIO_SLACK = 10  # characters added to either side: "Go!" and "Gehen Sie!" are a fair pair

# Control and direction marks. U+200C and U+200D stay: they change words in Persian and Hindi.
INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)

# Code points of a script, and the languages that must show some of it. A language that is absent
# (sr, kk and uz use two scripts) is not checked; one that stands twice may use either.
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
WIDTHS = {"Han": 3, "Kana": 2, "Hangul": 2}  # letters of an alphabet that one character is worth


@dataclass(frozen=True, slots=True)
class CleaningRules:
    """What to drop and what to tidy; None switches a bound off.

    Empty sides always go. Words are what white space separates. The ratio compares characters,
    those of Chinese, Japanese and Korean weighted by `WIDTHS`. `max_nonletters` bounds the share
    of characters that are neither letters nor spaces. `normalize` applies `normalize_text`.
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
                raise InputError(f"min_{unit}={least} exceeds max_{unit}={most}", fix="lower it")
            if least < 0:
                raise InputError(f"min_{unit}={least}", fix="give 0 or more")
        if self.max_ratio is not None and not self.max_ratio >= 1:
            raise InputError(f"max_ratio={self.max_ratio} drops all", fix="give 1 or more")
        if self.max_nonletters is not None and not 0 <= self.max_nonletters <= 1:
            problem = f"max_nonletters={self.max_nonletters} is no share"
            raise InputError(problem, fix="give 0 to 1")


@dataclass(slots=True)
class CleaningReport:
    """What came in, what stayed, and what went for which reason, with a few examples."""

    n_read: int = 0
    n_kept: int = 0
    n_normalized: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)

    def note_drops(self, reason: str, n_drops: int, drops: Iterable[Iterable[str]]) -> None:
        """Count drops of one kind, and remember the first few."""
        if n_drops:
            self.dropped[reason] += n_drops
            examples = self.examples.setdefault(reason, [])
            for sides in islice(drops, N_EXAMPLES - len(examples)):
                examples.append(tuple(side[:EXAMPLE_CHARS] for side in sides))

    def rows(self) -> list[tuple[str, int, float]]:
        """List each reason with its count and its share of what was read, largest first."""
        return [(name, n, n / self.n_read) for name, n in self.dropped.most_common()]

    def summary(self) -> str:
        """Tell it all in one line."""
        share = self.n_kept / max(self.n_read, 1)
        reasons = ", ".join(f"{name} {n:,}" for name, n, _ in self.rows()) or "none"
        return f"kept {self.n_kept:,} of {self.n_read:,} ({share:.1%}); dropped: {reasons}"

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, ready for JSON."""
        return {
            "n_read": self.n_read,
            "n_kept": self.n_kept,
            "n_normalized": self.n_normalized,
            "dropped": dict(self.dropped),
            "examples": {reason: list(map(list, sides)) for reason, sides in self.examples.items()},
        }


def clean_pairs(
    pairs: Iterable[SentencePair],
    rules: CleaningRules,
    report: CleaningReport,
    languages: tuple[str, str] | None = None,
) -> Iterator[SentencePair]:
    """Yield the pairs worth keeping, tidied, in order; `report` counts along."""
    sieve = _Sieve(rules, report, languages or ())
    for block in _cut_blocks(pairs, lambda pair: len(pair.src) + len(pair.tgt)):
        (srcs, tgts), kept = sieve.sift(
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
    """Yield the sentences worth keeping, tidied, in order; `report` counts along."""
    sieve = _Sieve(rules, report, (language,) if language else ())
    for block in _cut_blocks(sentences, len):
        (texts,), kept = sieve.sift((block,))
        yield from map(texts.__getitem__, kept)


def normalize_text(text: str) -> str:
    r"""Compose letters (NFC), remove control characters, squeeze and trim white space.

    >>> normalize_text(" Cafe\u0301\t\xa0 noir\x07 ")
    'Café noir'
    """
    is_plain = text.isprintable()  # no control characters, and no white space but " "
    if not is_plain:
        text = INVISIBLE.sub("", text)
    if not is_plain or "  " in text or text[:1] == " " or text[-1:] == " ":
        text = " ".join(text.split())
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _cut_blocks(items: Iterable[ItemT], length_of: Callable[[ItemT], int]) -> Iterator[list[ItemT]]:
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


class _Sieve:
    """Rules at work on a stream: remembers which texts have passed."""

    def __init__(
        self, rules: CleaningRules, report: CleaningReport, languages: Sequence[str]
    ) -> None:
        self.rules, self.report, self.seen = rules, report, _HashSet()
        self.scripts = [_script_table(code) if rules.check_scripts else None for code in languages]

    def sift(self, raw: Sequence[list[str]]) -> tuple[list[list[str]], list[int]]:
        """Tidy the sides of a block and give the places of the items to keep."""
        normalize = self.rules.normalize
        sides = [[normalize_text(text) for text in side] if normalize else side for side in raw]
        alive = np.ones(len(sides[0]), dtype=bool)
        for reason, faulty in self._find_faults(sides, alive):
            places = np.flatnonzero(faulty & alive).tolist()
            self.report.note_drops(reason, len(places), ([side[i] for side in raw] for i in places))
            alive &= ~faulty
        changed = np.zeros(len(alive), dtype=bool)
        for before, after in zip(raw, sides, strict=True):
            changed |= np.fromiter(map(operator.ne, before, after), bool)
        self.report.n_read += len(alive)
        self.report.n_kept += int(alive.sum())
        self.report.n_normalized += int((changed & alive).sum())
        return sides, np.flatnonzero(alive).tolist()

    def _find_faults(self, sides: list[list[str]], alive: Flags) -> Iterator[tuple[str, Flags]]:
        yield from _find_length_faults(sides, self.rules)
        if self.rules.drop_identical and len(sides) == 2:
            yield "identical sides", np.fromiter(map(operator.eq, *sides), bool)
        yield from _find_letter_faults([_Codes(side) for side in sides], self.scripts, self.rules)
        if self.rules.drop_duplicates:
            yield "duplicate", self._find_duplicates(sides, alive)

    def _find_duplicates(self, sides: list[list[str]], alive: Flags) -> Flags:
        """Mark what has passed before; only what is still alive counts as passing."""
        hashes = np.fromiter(map(hash, zip(*sides, strict=True)), np.int64)
        repeated = np.zeros(len(hashes), dtype=bool)
        repeated[alive] = ~self.seen.add(hashes[alive])
        return repeated


class _HashSet:
    """A growing set of 64-bit hashes in sorted runs, each at most an eighth of the one before.

    It costs 8 bytes a hash, twice that while runs merge. Python salts its hashes in every
    process; among 10 million texts, two share one with a probability of 3 in a million.
    """

    def __init__(self) -> None:
        self.runs: list[Counts] = []

    def add(self, hashes: Counts) -> Flags:
        """Take hashes in, and mark the first of each that was not there."""
        unique, first = np.unique(hashes, return_index=True)
        is_new = np.ones(len(unique), dtype=bool)
        for run in self.runs:
            places = np.searchsorted(run, unique)
            is_new &= run.take(places, mode="clip") != unique
        self._store(unique[is_new])
        marks = np.zeros(len(hashes), dtype=bool)
        marks[first[is_new]] = True
        return marks

    def _store(self, run: Counts) -> None:
        while self.runs and len(self.runs[-1]) < 8 * len(run):
            run = np.concatenate([self.runs.pop(), run])
            run.sort(kind="stable")  # merges two sorted halves in one pass
        if len(run):
            self.runs.append(run)


class _Codes:
    """The code points of many texts in one array, each text followed by a line end."""

    def __init__(self, texts: Sequence[str]) -> None:
        joined = "\n".join(texts) + "\n"
        self.codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        self.n_chars = np.fromiter(map(len, texts), np.int64)
        self.starts = np.cumsum(self.n_chars + 1) - self.n_chars - 1

    def add_up(self, table: Table) -> Counts:
        """Sum a table's numbers over the characters of each text."""
        return np.add.reduceat(table.take(self.codes, mode="clip"), self.starts, dtype=np.int64)


def _find_length_faults(
    sides: list[list[str]], rules: CleaningRules
) -> Iterator[tuple[str, Flags]]:
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


def _find_letter_faults(
    sides: list[_Codes], scripts: Sequence[Table | None], rules: CleaningRules
) -> Iterator[tuple[str, Flags]]:
    if rules.max_ratio is not None and len(sides) == 2:
        widths = np.sort([side.add_up(_width_table()) + RATIO_SLACK for side in sides], axis=0)
        yield "length ratio", widths[1] > rules.max_ratio * widths[0]
    if rules.max_nonletters is not None:
        for side in sides:
            n_nonletters = side.add_up(_nonletter_table())
            yield "non-letters", n_nonletters > rules.max_nonletters * side.n_chars
    for side, table in zip(sides, scripts, strict=False):  # no scripts: nothing to check
        if table is not None:
            yield "wrong script", side.add_up(table) == 0


@cache
def _width_table() -> Table:
    """Give every character its weight in the length ratio; the line end after a text has none."""
    table = np.ones(N_CODES, dtype=np.uint8)
    table[ord("\n")] = 0
    for script, width in WIDTHS.items():
        _fill(table, script, width)
    return table


@cache
def _nonletter_table() -> Table:
    """Mark digits, punctuation and symbols: neither letters, marks, spaces nor joiners."""
    categories = (unicodedata.category(chr(code)) for code in range(N_CODES))
    return np.fromiter((name[0] in "NPS" for name in categories), np.uint8, N_CODES)


@cache
def _script_table(language: str) -> Table | None:
    """Mark the letters of a language's script, or give None if any script will do."""
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
