"""Decimal numbers out of text, a few hundred thousand at a time: four times `numpy.loadtxt`.

Digits are read eight at a time: eight bytes are one 64-bit integer, and three multiplications
make the number they spell (Lemire, 2021). What is not plain decimals, such as 1.5e-07, is left
to Python, and so are numbers of more digits than a double holds exactly; the result is always
that of `float`.

Numbers as text with six significant digits, as `%.6g` writes them, at three times its speed.

Eight digits are worked out at a time within one 64-bit integer, a byte for each. A number takes
sixteen bytes at first; those it does not need are NUL, and removed from all of them at once.

Reading vectors in word2vec's text format, with its header line or, as GloVe has it, without.

A line is a word and its numbers. Words may hold blanks: the numbers are counted from the end.
Lines are read in blocks, and only what a block cannot settle is looked at one by one.

Reading vectors in word2vec's binary format: a header line, then word, blank, 32-bit floats.

Word vectors in the formats of word2vec, which Gensim, VecMap, MUSE and fastText share.

How often words were seen, beside their vectors: `de.vec.counts`, lines of word TAB count.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.io.files import (
    BOM,
    BadLine,
    PathLike,
    SkipBad,
    display_name,
    read_chunks,
    read_lines,
    report_bad_line,
    write_atomically,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    ByteArray = npt.NDArray[np.uint8]
    WordArray = npt.NDArray[np.uint64]
    BoolArray = npt.NDArray[np.bool_]
    Matrix = npt.NDArray[np.float32]

# Digits are loaded from up to this many bytes before their end, so text needs that many before.
MARGIN = 16
MAX_DIGITS = 15  # a double holds all such integers, and one division by a power of ten is exact
BEYOND = 2.0**128 - 2.0**103  # rounds to infinity in 32 bits, what is below does not

_MINUS, _POINT, _ZERO = b"-.0"
# Keeps the last k of eight bytes: in little-endian order they are the highest.
_LAST = np.array([(1 << 64) - (1 << 8 * (8 - k)) for k in range(9)], dtype=np.uint64)
_POWERS = 10 ** np.arange(MAX_DIGITS + 1, dtype=np.uint64)
_SIGNED_POWERS = np.concatenate([_POWERS, -_POWERS.astype(np.float64)])


@dataclass(frozen=True, slots=True)
class Marks:
    """The bytes below "0" of a text and where they are: blanks, signs, points, punctuation."""

    data: bytes
    places: IntArray
    kinds: ByteArray

    @staticmethod
    def of(data: bytes) -> Marks:
        """Find the marks of a text that begins with `MARGIN` bytes of no interest."""
        codes = np.frombuffer(data, np.uint8)
        places = np.flatnonzero(codes < _ZERO)
        return Marks(data, places, codes[places])


def parse_decimals(
    marks: Marks, around: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], IntArray]:
    """Read the numbers between marks that follow one another in a row.

    Says too which of them, counted row by row, are no numbers or not finite; they are read as 0.

    >>> marks = Marks.of(b"_" * MARGIN + b" 0.25 -3 1e-2 x ")
    >>> numbers, failed = parse_decimals(marks, np.flatnonzero(marks.kinds == ord(" "))[None])
    >>> numbers.tolist(), failed.tolist()
    ([[0.25, -3.0, 0.009999999776482582, 0.0]], [3])
    """
    places = marks.places[around]
    starts, ends = (places[:, :-1] + 1).ravel(), places[:, 1:].ravel()
    last = (around[:, 1:] - 1).ravel()
    has_point = marks.kinds[last] == _POINT
    is_negative = marks.kinds[(around[:, :-1] + 1).ravel()] == _MINUS
    points = np.where(has_point, marks.places[last], ends)
    n_whole, n_decimals = points - starts - is_negative, ends - points - has_point
    is_odd = np.diff(around).ravel() != 1 + has_point.view(np.int8) + is_negative
    is_odd |= (n_whole + n_decimals - 1).view(np.uint64) >= MAX_DIGITS
    mantissas = _read_decimals(marks.data, ends, n_decimals, is_odd)
    _add_whole(mantissas, marks.data, points, n_whole, n_decimals, is_odd)
    powers = np.minimum(n_decimals, MAX_DIGITS) + (MAX_DIGITS + 1) * is_negative.view(np.int8)
    values = mantissas.view(np.int64) / _SIGNED_POWERS[powers]
    failed = _parse_slowly(marks.data, starts, ends, np.flatnonzero(is_odd), values)
    return values.astype(np.float32).reshape(len(around), -1), failed


def _add_whole(
    mantissas: WordArray,
    data: bytes,
    points: IntArray,
    n_whole: IntArray,
    n_decimals: IntArray,
    is_odd: BoolArray,
) -> None:
    """Add the digits before the points; marks as odd what has other characters there."""
    digits = np.frombuffer(data, np.uint8)[points - 1] - np.uint8(_ZERO)
    wrong, some = digits > 9, np.flatnonzero((digits > 0) | (n_whole != 1))
    if len(some):  # seldom many: most vectors have numbers like 0.1234
        whole, not_digits = _read_digits(data, points[some], n_whole[some])
        mantissas[some] += whole * _POWERS.take(n_decimals[some], mode="clip")
        wrong[some] = not_digits | (n_whole[some] > 8)
    is_odd |= wrong


def _read_decimals(
    data: bytes, ends: IntArray, n_decimals: IntArray, is_odd: BoolArray
) -> WordArray:
    """Read the digits after the points; marks as odd what has other characters there."""
    decimals, wrong = _read_digits(data, ends, n_decimals)
    is_odd |= wrong
    rest = np.flatnonzero(n_decimals > 8)
    if len(rest):
        high, wrong = _read_digits(data, ends[rest] - 8, n_decimals[rest] - 8)
        decimals[rest] += high * np.uint64(10**8)
        is_odd[rest] |= wrong
    return decimals


def _read_digits(data: bytes, ends: IntArray, n_digits: IntArray) -> tuple[WordArray, BoolArray]:
    """Read the last digits before each end, at most eight, and tell where others stand there."""
    eights: WordArray = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    digits = eights[ends - 8]
    digits ^= np.uint64(0x3030303030303030)
    digits &= _LAST.take(n_digits, mode="clip")
    wrong = digits + np.uint64(0x0606060606060606)
    wrong |= digits
    wrong &= np.uint64(0xF0F0F0F0F0F0F0F0)
    # Neighbors are added up to pairs, pairs to fours, fours to eights.
    pairs = digits >> np.uint64(8)
    digits *= np.uint64(10)
    digits += pairs
    mask = np.uint64(0x000000FF000000FF)
    np.right_shift(digits, np.uint64(16), out=pairs)
    pairs &= mask
    pairs *= np.uint64(1 + (10**4 << 32))
    digits &= mask
    digits *= np.uint64(100 + (10**6 << 32))
    digits += pairs
    digits >>= np.uint64(32)
    return digits, wrong != 0


def _parse_slowly(
    data: bytes,
    starts: IntArray,
    ends: IntArray,
    odd: IntArray,
    values: npt.NDArray[np.float64],
) -> IntArray:
    """Fill in the values of odd fields, 0 for what is no number, and say which those are."""
    places = zip(starts[odd].tolist(), ends[odd].tolist(), strict=True)
    parsed = [parse_number(data[start:end]) for start, end in places]
    values[odd] = [0.0 if value is None else value for value in parsed]
    return odd[[value is None for value in parsed]]


def parse_number(text: bytes) -> float | None:
    """Read one number that a 32-bit float can hold; None for anything else.

    >>> parse_number(b"-1e-3"), parse_number(b"nan"), parse_number(b"1_0"), parse_number(b"1e99")
    (-0.001, None, None, None)
    """
    try:
        value = float(text) if b"_" not in text else math.nan
    except ValueError:
        return None
    return value if abs(value) < BEYOND else None


NUMBER = "%.6g"
# What the fast way can write; for the rest `%.6g` changes its notation or needs two digits before
# the point.
SMALLEST, BEYOND_SIX_DIGITS = 1e-4, 9.99999

_POWERS_SIX_DIGITS = 10.0 ** np.arange(10)
# Keeps the first k of eight bytes: in little-endian order they are the lowest.
_FIRST = np.array([(1 << 8 * k) - 1 for k in range(9)], dtype=np.uint64)
_CELL = 16
_BEGIN = 3  # where text begins in a cell: a blank and "-1.23457e-05" are 13 bytes, the most


def format_rows(matrix: npt.NDArray[np.float32]) -> list[bytes]:
    """Write every row of finite numbers, with blanks between them.

    >>> format_rows(np.array([[0.5, -2, 1e-7], [1 / 3, 1234567, 0]], dtype=np.float32))
    [b'0.5 -2 1e-07', b'0.333333 1.23457e+06 0']
    """
    values = matrix.astype(np.float64).ravel()
    sizes = np.abs(values)
    cells = _fill_cells(sizes, np.signbit(values))
    odd = np.flatnonzero(((sizes < SMALLEST) & (sizes > 0)) | (sizes >= BEYOND_SIX_DIGITS))
    if len(odd):
        texts = [b" " + (NUMBER % value).encode() for value in values[odd].tolist()]
        letters = np.array(texts, dtype=f"S{_CELL - _BEGIN}").view(np.uint8)
        cells[odd, _BEGIN:] = letters.reshape(len(odd), -1)
    cells.reshape(len(matrix), -1)[:, _BEGIN] = ord("\n")
    return cells.tobytes().translate(None, b"\0").split(b"\n")[1:]


def _fill_cells(
    sizes: npt.NDArray[np.float64], is_negative: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """Write numbers in cells: blank, sign, digit, point, nine digits; what is not needed is NUL.

    The products are exact, as a 32-bit float has 24 bits and 10⁹ = 2⁹ · 5⁹ adds 21: the digits
    are those of the number itself, rounded to even.
    """
    n_decimals = 5 + sum((sizes < limit).view(np.int8) for limit in (1, 0.1, 0.01, 0.001))
    scaled = (
        np.rint(np.minimum(sizes, BEYOND_SIX_DIGITS) * _POWERS_SIX_DIGITS[n_decimals])
        * _POWERS_SIX_DIGITS[9 - n_decimals]
    )
    whole, rest = np.divmod(scaled.astype(np.uint64), np.uint64(10**9))
    tenths, rest = np.divmod(rest, np.uint64(10**8))
    digits = _spread_digits(rest)
    # The exponent of a float tells the highest bit that is set, and so the last digit but zeros.
    last_bit = (digits.astype(np.float64).view(np.uint64) >> np.uint64(52)).view(np.int64) - 1023
    n_kept = np.maximum(last_bit >> 3, -1) + 1
    cells = np.empty((len(sizes), 2), dtype="<u8")
    cells[:, 1] = (digits | np.uint64(0x3030303030303030)) & _FIRST[n_kept]
    has_point = ((tenths > 0) | (n_kept > 0)).astype(np.uint64)
    text = has_point * np.uint64(0x302E << 48) + (tenths << np.uint64(56))
    text += (whole << np.uint64(40)) + np.uint64(ord("0") << 40 | ord(" ") << 24)
    cells[:, 0] = text + is_negative.astype(np.uint64) * np.uint64(ord("-") << 32)
    return cells.view(np.uint8)


def _spread_digits(numbers: WordArray) -> WordArray:
    """Give the eight digits of numbers below 10⁸ a byte each, the first digit the lowest byte."""
    high, low = np.divmod(numbers, np.uint64(10**4))
    fours = high + (low << np.uint64(32))
    hundreds = (fours * np.uint64(5243) >> np.uint64(19)) & np.uint64(0x7F0000007F)
    pairs = hundreds + (fours - hundreds * np.uint64(100) << np.uint64(16))
    tens = (pairs * np.uint64(103) >> np.uint64(10)) & np.uint64(0x000F000F000F000F)
    digits: WordArray = tens + (pairs - tens * np.uint64(10) << np.uint64(8))
    return digits


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
        raise InputError(problem, file=display_name(path), fix=fix)


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
        raise InputError(
            problem, file=display_name(path), line=1, fix="give vectors in word2vec format"
        )
    np.empty(STEADY_BYTES, dtype=np.uint8)
    n_lines = n_above = int(header is not None)
    for block in filter(None, chain([rest if header else first], blocks)):
        vectors, bad = parse_block(block, n_numbers)
        for row, bad_line in bad.items():
            report_bad_line(bad_line, path, n_lines + row + 1, skip_bad)
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


FLOAT = np.dtype("<f4")
BLOCK_BYTES_WORD2VEC_BINARY = 1 << 22
AGAIN = "fetch the file again"


def is_binary(head: bytes, n_numbers: int) -> bool:
    """Tell by what follows the header whether numbers are bytes rather than digits."""
    vector = head.partition(b" ")[2][: n_numbers * FLOAT.itemsize]
    if parse_number(b"".join(vector.split(None, 1)[:1])) is not None:
        return False
    if any(byte < BLANK and byte not in b"\t\r\n" for byte in vector):
        return True
    try:
        vector.decode()
    except UnicodeDecodeError as error:
        return error.start < len(vector) - 3  # else a character cut in two
    return False


def read_binary(
    path: PathLike, header: Header, chunks: Iterable[bytes], skip_bad: SkipBad | None = None
) -> Iterator[VectorBlock]:
    """Read the vectors that follow the header; bad ones are InputErrors or skipped."""
    n_read, n_bytes, pending = 0, header.n_numbers * FLOAT.itemsize, b""
    for data in _gather(chunks, max(BLOCK_BYTES_WORD2VEC_BINARY, n_bytes)):
        data = pending + data
        words, rows, end = cut_entries(data, n_bytes)
        pending = data[end:]
        matrix = np.frombuffer(b"".join(rows), FLOAT).reshape(len(rows), header.n_numbers)
        yield _keep_good(path, words, matrix.astype(np.float32, copy=False), n_read, skip_bad)
        n_read += len(words)
    if n_read < header.n_words and pending.strip(b"\n"):
        problem = f"ends within word {n_read + 1} of {header.n_words}"
        raise InputError(problem, file=display_name(path), fix=AGAIN)
    header.check(n_read + bool(pending.strip(b"\n")), path)


def _gather(chunks: Iterable[bytes], n_bytes: int) -> Iterator[bytes]:
    """Join small chunks to pieces worth the work on each."""
    pending: list[bytes] = []
    n_pending = 0
    for chunk in chunks:
        pending.append(chunk)
        n_pending += len(chunk)
        if n_pending >= n_bytes:
            yield b"".join(pending)
            pending, n_pending = [], 0
    yield b"".join(pending)


def cut_entries(data: bytes, n_bytes: int) -> tuple[list[bytes], list[bytes], int]:
    r"""Cut whole entries off the front: words, vectors of `n_bytes`, and where the rest begins.

    >>> cut_entries(b"cat ABCD\ndog EFGH\nbird IJ", 4)
    ([b'cat', b'dog'], [b'ABCD', b'EFGH'], 17)
    """
    words, rows, end = [], [], 0
    while (blank := data.find(b" ", end)) >= 0 and blank + n_bytes < len(data):
        words.append(data[end:blank].lstrip(b"\n"))  # word2vec ends a vector so, Gensim does not
        end = blank + 1 + n_bytes
        rows.append(data[blank + 1 : end])
    return words, rows, end


def _keep_good(
    path: PathLike,
    words: list[bytes],
    matrix: npt.NDArray[np.float32],
    n_above: int,
    skip_bad: SkipBad | None,
) -> VectorBlock:
    """Decode the words and refuse those that are none, or whose vectors are not finite."""
    is_finite = np.asarray(np.isfinite(matrix).all(axis=1))
    texts = [word.decode(errors="replace") for word in words]
    suspects = {row for row, text in enumerate(texts) if not text or "\ufffd" in text}
    suspects |= {row for row, word in enumerate(words) if b"\n" in word or b"\0" in word}
    bad = []
    for row in sorted(suspects | set(np.flatnonzero(~is_finite).tolist())):
        if (problem := _find_problem(words[row], bool(is_finite[row]))) is None:
            continue
        bad.append(row)
        reason, fix = problem
        if skip_bad is None:
            raise InputError(
                f"word {n_above + row + 1}: {reason}", file=display_name(path), fix=fix
            )
        skip_bad(n_above + row + 1, reason, words[row].decode(errors="backslashreplace"))
    block = VectorBlock(texts, matrix)
    return block.select(np.delete(np.arange(len(texts)), bad)) if bad else block


def _find_problem(word: bytes, is_finite: bool) -> tuple[str, str] | None:
    """Say what is wrong with a word or its vector, and what would help."""
    if not word or b"\n" in word or b"\0" in word:
        return "not a word, so the numbers before it are too many or too few", AGAIN
    if not is_finite:
        return "its vector is not finite", "remove it, or make the vectors again"
    try:
        word.decode()
    except UnicodeDecodeError as error:
        fix = "convert the words to UTF-8, or correct the header if it is wrong"
        return f"invalid UTF-8 at byte {error.start + 1}", fix
    return None


HEAD_BYTES = 1 << 16
BLOCK_NUMBERS = 1 << 15  # fit a processor's cache with what is computed from them
SPACE, HARD_SPACE = " ", "\xa0"
FORBIDDEN = frozenset("\n\r\t\0")


def iterate_vectors(path: PathLike, skip_bad: SkipBad | None = None) -> Iterator[VectorBlock]:
    """Read vectors, packed or not, text or binary; what cannot be used is refused or skipped."""
    chunks = read_chunks(path)
    head = b""
    while len(head) < HEAD_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    if not head.strip():
        raise InputError("is empty", file=display_name(path), fix="give vectors in word2vec format")
    line, _, rest = head.partition(b"\n")
    header = Header.parse(line)
    if header is not None and is_binary(rest, header.n_numbers):
        return read_binary(path, header, chain([rest], chunks), skip_bad)
    return read_text(path, chain([head], chunks), skip_bad)


def write_word2vec(
    path: PathLike, names: Sequence[str], matrix: Matrix, *, binary: bool = False
) -> None:
    """Write vectors under names that `format_words` gave, whole or not at all."""
    n_rows = -(-BLOCK_NUMBERS // matrix.shape[1])
    with write_atomically(path, binary=True) as stream:
        stream.write(b"%d %d\n" % matrix.shape)
        for start in range(0, len(names), n_rows):
            rows, block = matrix[start : start + n_rows], names[start : start + n_rows]
            is_finite = np.isfinite(rows).all(axis=1)
            if not is_finite.all():
                problem = f"the vector of {block[int(np.argmin(is_finite))]!r} is not finite"
                raise InputError(problem, file=display_name(path), fix="make the vectors again")
            lines = _format_binary(block, rows) if binary else _format_text(block, rows)
            stream.write(b"".join(lines))


def format_words(words: Sequence[str]) -> list[str]:
    """Give words as they can be written: spaces become no-break spaces, which fastText has too.

    A plain space would end the word for most readers.
    """
    for word in words:
        if not word or not FORBIDDEN.isdisjoint(word) or not _is_encodable(word):
            fix = "remove it, or the tabs, line ends, NULs and surrogates in it"
            raise InputError(f"the word {word!r} cannot be written", fix=fix)
    names = [word.replace(SPACE, HARD_SPACE) for word in words]
    if len(set(names)) != len(names):
        name, _ = Counter(names).most_common(1)[0]
        problem = f"the word {name!r} comes twice, or once with another kind of space"
        raise InputError(problem, fix="remove one of the two")
    return names


def _is_encodable(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _format_text(names: Sequence[str], rows: Matrix) -> Iterator[bytes]:
    """Make lines of six digits a number: text that was read comes out again byte for byte."""
    for name, row in zip(names, format_rows(rows), strict=True):
        yield b"%s %s\n" % (name.encode(), row)


def _format_binary(names: Sequence[str], rows: Matrix) -> Iterator[bytes]:
    for name, row in zip(names, rows.astype(FLOAT, copy=False), strict=True):
        yield b"%s %s\n" % (name.encode(), row.tobytes())


MAX_DIGITS_WORD_COUNTS = 18  # more would not fit 64 bits


def counts_path(path: PathLike) -> Path:
    """Name the file with the counts of the words of a file.

    >>> counts_path("vectors/de.vec").name
    'de.vec.counts'
    """
    return Path(f"{os.fspath(path)}.counts")


def read_word_counts(path: PathLike, words: Sequence[str]) -> IntArray | None:
    """Read how often words were seen from the file beside their vectors; None without one."""
    file = counts_path(path)
    if not file.exists():
        return None
    counts: dict[str, int] = {}
    for number, line in enumerate(read_lines(file), start=1):
        word, _, count = line.rpartition("\t")
        if not (
            word and count.isascii() and count.isdigit() and len(count) <= MAX_DIGITS_WORD_COUNTS
        ):
            fix = "write word TAB count, or remove the file"
            raise InputError("not a word and its count", file=file, line=number, fix=fix)
        counts.setdefault(word, int(count))
    if (missing := next((word for word in words if word not in counts), None)) is not None:
        fix = "write the vectors again, or remove the file"
        raise InputError(f"has no count for {missing!r}", file=file, fix=fix)
    return np.array([counts[word] for word in words], dtype=np.int64)


@contextmanager
def write_word_counts(
    path: PathLike, words: Sequence[str], counts: IntArray | None
) -> Iterator[None]:
    """Write the counts beside a file that the block writes, and only if it ends well.

    Without counts, those of what stood there before go. Standard output has nothing beside it.
    """
    if os.fspath(path) == "-":
        yield
    elif counts is None:
        yield
        counts_path(path).unlink(missing_ok=True)
    else:
        with write_atomically(counts_path(path)) as stream:
            entries = zip(words, counts.tolist(), strict=True)
            stream.writelines(f"{word}\t{count}\n" for word, count in entries)
            yield
