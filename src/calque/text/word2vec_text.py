"""Reading vectors in word2vec's text format, with its header line or, as GloVe has it, without.

A line is a word and its numbers. Words may hold blanks: the numbers are counted from the end.
Lines are read in blocks, and only what a block cannot settle is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from calque.text.decimals import MARGIN, Marks, parse_decimals, parse_number
from calque.text.files import BOM, BadLine, PathLike, SkipBad, refuse, shown
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]

BLOCK_BYTES = 1 << 18  # fits a processor's cache with what is computed from it
# Once as much has been freed at a time, glibc keeps what is freed; before, it gives every array of
# a block back to the system and asks for it again, which costs a third of the time.
STEADY_BYTES = 1 << 24
BLANK, TAB, NEWLINE = b" \t\n"
BLANKS = " \t\r\v\f"  # within a line; what Python splits bytes at
FENCE = b"0" * (MARGIN - 1) + b"\n"  # before every block, as if a line had ended there
MEND = "mend or remove the line, or fetch the file again"
UTF8 = "convert the file to UTF-8, for example with iconv"


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """Some words and their vectors, in the order of the file."""

    words: list[str]
    matrix: Matrix

    def select(self, rows: IntArray) -> VectorBlock:
        """Keep some of the words, in the order given."""
        return VectorBlock([self.words[row] for row in rows.tolist()], self.matrix[rows])


@dataclass(frozen=True, slots=True)
class Header:
    """What the first line says: how many words, and how many numbers each has."""

    n_words: int
    n_numbers: int

    @staticmethod
    def parse(line: bytes) -> Header | None:
        """Read a header; None if the line is none."""
        fields = line.split()
        if len(fields) != 2 or not all(field.isdigit() for field in fields):
            return None
        return Header(int(fields[0]), int(fields[1]))

    def check(self, n_words: int, path: PathLike) -> None:
        """Refuse a file that does not hold the words its header promises."""
        if n_words == self.n_words:
            return
        problem = f"the header promises {self.n_words} words but the file holds {n_words}"
        fix = "fetch the file again" if n_words < self.n_words else "correct the header"
        raise InputError(problem, file=shown(path), fix=fix)


def read_text(
    path: PathLike, chunks: Iterable[bytes], skip_bad: SkipBad | None = None
) -> Iterator[VectorBlock]:
    """Read the vectors of a file given in chunks; a bad line is an InputError or skipped."""
    blocks = cut_blocks(chunks)
    first = next(blocks, b"").removeprefix(BOM)
    line, _, rest = first.partition(b"\n")
    header = Header.parse(line)
    n_numbers = header.n_numbers if header else count_numbers(line)
    if n_numbers == 0:
        problem = "neither a header nor a word with its vector"
        raise InputError(problem, file=shown(path), line=1, fix="give vectors in word2vec format")
    np.empty(STEADY_BYTES, dtype=np.uint8)
    n_lines = n_above = int(header is not None)
    for block in filter(None, chain([rest if header else first], blocks)):
        vectors, bad = parse_block(block, n_numbers)
        for row, bad_line in bad.items():
            refuse(bad_line, path, n_lines + row + 1, skip_bad)
        n_lines += len(vectors.words) + len(bad)
        yield vectors
    if header is not None:
        header.check(n_lines - n_above, path)


def cut_blocks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut chunks anew into blocks of whole lines; blank lines may end the file."""
    pending: list[bytes] = []
    n_pending = 0
    for chunk in chunks:
        for start in range(0, len(chunk), BLOCK_BYTES):
            piece = chunk[start : start + BLOCK_BYTES]
            if n_pending + len(piece) >= BLOCK_BYTES and (end := piece.rfind(b"\n") + 1):
                yield b"".join([*pending, piece[:end]])
                pending, n_pending, piece = [], 0, piece[end:]
            pending.append(piece)
            n_pending += len(piece)
    if rest := b"".join(pending).rstrip():
        yield rest + b"\n"


def count_numbers(line: bytes) -> int:
    """Count the numbers that end a line, without what must be its word.

    >>> count_numbers(b"at home 0.5 -1"), count_numbers(b"7 0.5 -1"), count_numbers(b"word")
    (2, 2, 0)
    """
    fields = line.split()[1:]
    for n_numbers, field in enumerate(reversed(fields)):
        if parse_number(field) is None:
            return n_numbers
    return len(fields)


def parse_block(block: bytes, n_numbers: int) -> tuple[VectorBlock, dict[int, BadLine]]:
    """Read a block of whole lines: the good ones together, the bad ones by their places."""
    lines = _Lines.of(block)
    n_fields = np.diff(lines.ends)
    full = np.flatnonzero(n_fields > n_numbers)
    vectors, doubtful = _parse_full(lines, full, n_numbers)
    short = np.flatnonzero(n_fields <= n_numbers)
    bad: dict[int, BadLine] = {}
    for line in sorted([*short.tolist(), *full[sorted(doubtful)].tolist()]):
        entry = parse_line(lines.get(line), n_numbers)
        if isinstance(entry, BadLine):
            bad[line] = entry
        else:
            row = np.searchsorted(full, line)
            vectors.words[row], vectors.matrix[row] = entry
    if bad:
        vectors = vectors.select(np.flatnonzero(~np.isin(full, list(bad))))
    return vectors, bad


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines of a block: its marks, which of them are blanks, which of those end lines."""

    marks: Marks
    blanks: IntArray
    ends: IntArray

    @staticmethod
    def of(block: bytes) -> _Lines:
        marks = Marks.of(FENCE + block)
        is_blank = (marks.kinds == BLANK) | (marks.kinds - np.uint8(TAB) <= ord("\r") - TAB)
        blanks = np.flatnonzero(is_blank)
        ends = np.flatnonzero(marks.kinds[blanks] == NEWLINE)
        before, after = blanks[ends[1:] - 1], blanks[ends[1:]]
        is_trailing = marks.places[before] == marks.places[after] - 1
        if (is_trailing & (marks.kinds[before] != NEWLINE)).any():  # fastText's lines end so
            lines = [line.rstrip() for line in block.split(b"\n")]
            return _Lines.of(b"\n".join(lines))
        return _Lines(marks, blanks, ends)

    def get(self, line: int) -> bytes:
        start, end = self.marks.places[self.blanks[self.ends[line : line + 2]]].tolist()
        return self.marks.data[start + 1 : end]


def _parse_full(lines: _Lines, full: IntArray, n_numbers: int) -> tuple[VectorBlock, set[int]]:
    """Read lines that have fields enough, and name the rows that must be looked at one by one."""
    if not len(full):
        return VectorBlock([], np.zeros((0, n_numbers), dtype=np.float32)), set()
    marks, blanks, ends = lines.marks, lines.blanks, lines.ends
    is_spaced = ends[full + 1] - ends[full] > n_numbers + 1
    if len(full) * (n_numbers + 1) == len(blanks) - 1:  # nothing else, so no need to pick
        around = blanks[1:].reshape(-1, n_numbers + 1)
    else:
        around = blanks[ends[full + 1, None] + np.arange(-n_numbers, 1)]
    numbers, failed = parse_decimals(marks, around)
    stops, limits = marks.places[blanks[ends[full]]], marks.places[around[:, 0]]
    places = zip(stops.tolist(), limits.tolist(), strict=True)
    words, doubtful = _decode_words([marks.data[stop + 1 : limit] for stop, limit in places])
    doubtful.update((failed // n_numbers).tolist())
    for row in np.flatnonzero(is_spaced).tolist():
        words[row] = words[row].strip(BLANKS)  # it holds blanks, or they surround it
        if not words[row] or _ends_in_number(words[row].encode()):
            doubtful.add(row)
    return VectorBlock(words, numbers), doubtful


def _decode_words(words: list[bytes]) -> tuple[list[str], set[int]]:
    """Decode the words of a block, and name the rows of those that cannot be words."""
    joined = b"\n".join(words)
    try:
        texts = joined.decode().split("\n")
    except UnicodeDecodeError:
        texts = joined.decode(errors="replace").split("\n")
        doubtful = {row for row, text in enumerate(texts) if "\ufffd" in text}
    else:
        doubtful = set()
    if b"\0" in joined or b"" in words:
        doubtful |= {row for row, text in enumerate(texts) if not text or "\0" in text}
    return texts, doubtful


def _ends_in_number(word: bytes) -> bool:
    """Tell whether a word of several parts ends in a number: the line has one too many."""
    parts = word.split()
    return len(parts) > 1 and parse_number(parts[-1]) is not None


def parse_line(line: bytes, n_numbers: int) -> tuple[str, list[float]] | BadLine:
    """Read a line by itself: the word and its vector, or what is wrong with it.

    >>> parse_line(b"at  home 1 2", 2)
    ('at  home', [1.0, 2.0])
    >>> parse_line(b"home 1 2 x", 3).reason
    "'x' is not a finite number"
    """
    text = line.decode(errors="backslashreplace")
    word, *fields = line.strip().rsplit(None, n_numbers) or [b""]
    numbers = [value for value in map(parse_number, fields) if value is not None]
    if not word:
        return BadLine("empty line", "remove it", text)
    if b"\0" in word:
        return BadLine("NUL byte", "remove it, or convert the file from UTF-16 to UTF-8", text)
    if len(fields) < n_numbers or _ends_in_number(word):
        reason = f"{count_numbers(line)} numbers where {n_numbers} are due"
        return BadLine(reason, MEND, text)
    if len(numbers) < n_numbers:
        field = next(field for field in fields if parse_number(field) is None)
        shown_field = field.decode(errors="backslashreplace")[:40]
        return BadLine(f"{shown_field!r} is not a finite number", MEND, text)
    try:
        return word.decode(), numbers
    except UnicodeDecodeError as error:
        return BadLine(f"invalid UTF-8 at byte {error.start + 1}", UTF8, text)
