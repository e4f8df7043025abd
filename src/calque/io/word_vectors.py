"""Word vectors in the text and binary formats of word2vec.

Gensim, VecMap, MUSE and fastText use the same formats.

A text file has a header line, or none as in GloVe's files, and then one word with its numbers per
line. Words may contain blanks: the numbers are counted from the end. A binary file has a header
line, then word, blank and 32-bit floats for each word. How often the words occurred is in a file
beside the vectors, such as `de.vec.counts`, with lines of word TAB count.

Text is parsed in blocks with NumPy: a few hundred thousand numbers at a time (`parse_decimals`).
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
    NUL_BYTE,
    NUL_BYTE_FIX,
    UTF8_FIX,
    BadLine,
    PathLike,
    SkipBad,
    check_line_ends,
    describe_long_line,
    display_name,
    max_line_bytes,
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

HEAD_BYTES = 1 << 16
BLOCK_BYTES = 1 << 18  # the block and its intermediate results fit into the cache of a CPU
BINARY_BLOCK_BYTES = 1 << 22
BLOCK_NUMBERS = 1 << 15
# After one allocation of this size has been freed, glibc keeps freed memory. Without it, every
# array of a block is returned to the system, which costs a third of the time.
WARM_UP_BYTES = 1 << 24
FLOAT = np.dtype("<f4")
NUMBER = b"%.6g"
BLANK, TAB, NEWLINE = b" \t\n"
BLANKS = " \t\r\v\f"  # within a line; where Python splits bytes
SPACE, NO_BREAK_SPACE = " ", "\xa0"
FORBIDDEN = frozenset("\n\r\t\0")
MAX_COUNT_DIGITS = 18  # more would not fit into 64 bits
MAX_DIMENSIONS = 1 << 20  # a row of a binary file must fit into memory
FIX_LINE = "correct or remove the line, or download the file again"
DOWNLOAD = "download the file again"
FORMAT_FIX = "use vectors in word2vec format"


@dataclass(frozen=True, slots=True)
class VectorBlock:
    """Some words and their vectors, in the order of the file."""

    words: list[str]
    matrix: Matrix

    def select(self, rows: IntArray) -> VectorBlock:
        """Return some of the words, in the order given."""
        return VectorBlock([self.words[row] for row in rows.tolist()], self.matrix[rows])


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a file: the number of words and the dimension of the vectors."""

    n_words: int
    n_numbers: int

    @staticmethod
    def parse(line: bytes, path: PathLike) -> Header | None:
        """Return the header, or None if the line is not a header."""
        fields = line.split()
        if len(fields) != 2 or not all(field.isdigit() for field in fields):
            return None
        if max(map(len, fields)) > MAX_COUNT_DIGITS or int(fields[1]) > MAX_DIMENSIONS:
            problem = f"the header announces vectors of more than {MAX_DIMENSIONS:,} dimensions"
            if len(fields[0]) > MAX_COUNT_DIGITS:
                problem = "the header announces more words than any file can have"
            raise InputError(problem, file=display_name(path), line=1, fix=DOWNLOAD)
        return Header(int(fields[0]), int(fields[1]))

    def check(self, n_words: int, path: PathLike) -> None:
        """Raise InputError if the file does not have the number of words of its header."""
        if n_words == self.n_words:
            return
        problem = f"the header announces {self.n_words} words, but the file has {n_words}"
        fix = DOWNLOAD if n_words < self.n_words else "correct the header"
        raise InputError(problem, file=display_name(path), fix=fix)


def iterate_vectors(path: PathLike, skip_bad: SkipBad | None = None) -> Iterator[VectorBlock]:
    """Yield the vectors of a text or binary file block by block.

    A bad line is an InputError or is passed to `skip_bad`.
    """
    chunks = read_chunks(path)
    head = b""
    while len(head) < HEAD_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    if not head.strip():
        raise InputError("the file is empty", file=display_name(path), fix=FORMAT_FIX)
    line, _, rest = head.partition(b"\n")
    header = Header.parse(line, path)
    if header is not None and is_binary(rest, header.n_numbers):
        return _read_binary(path, header, chain([rest], chunks), skip_bad)
    return _read_text(path, chain([head], chunks), skip_bad)


def write_word2vec(
    path: PathLike, names: Sequence[str], matrix: Matrix, *, binary: bool = False
) -> None:
    """Write vectors under names from `format_words`; the file appears complete or not at all.

    Text has six significant digits per number, so a file that was read is written byte for byte.
    """
    n_rows = -(-BLOCK_NUMBERS // matrix.shape[1])
    row_format = b" ".join([NUMBER] * matrix.shape[1])
    with write_atomically(path, binary=True) as stream:
        stream.write(b"%d %d\n" % matrix.shape)
        for start in range(0, len(names), n_rows):
            rows, block = matrix[start : start + n_rows], names[start : start + n_rows]
            is_finite = np.isfinite(rows).all(axis=1)
            if not is_finite.all():
                problem = f"the vector of {block[int(np.argmin(is_finite))]!r} is not finite"
                raise InputError(problem, file=display_name(path), fix="compute the vectors again")
            if binary:
                values = [row.tobytes() for row in rows.astype(FLOAT, copy=False)]
            else:
                values = [row_format % tuple(row) for row in rows.tolist()]
            lines = (b"%s %s\n" % (n.encode(), v) for n, v in zip(block, values, strict=True))
            stream.write(b"".join(lines))


def format_words(words: Sequence[str]) -> list[str]:
    """Return words as they can be written, with no-break spaces instead of spaces, as in fastText.

    For most readers a plain space would end the word.
    """
    for word in words:
        if not word or not FORBIDDEN.isdisjoint(word) or not _is_encodable(word):
            fix = "remove it, or its tabs, line ends, NUL characters and surrogates"
            raise InputError(f"the word {word!r} cannot be written", fix=fix)
    names = [word.replace(SPACE, NO_BREAK_SPACE) for word in words]
    if len(set(names)) != len(names):
        name, _ = Counter(names).most_common(1)[0]
        problem = f"the word {name!r} occurs twice, perhaps with different kinds of spaces"
        raise InputError(problem, fix="remove one of the two")
    return names


def _is_encodable(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def counts_path(path: PathLike) -> Path:
    """Return the path of the file with the counts of the words of a file.

    >>> counts_path("vectors/de.vec").name
    'de.vec.counts'
    """
    return Path(f"{os.fspath(path)}.counts")


def read_word_counts(path: PathLike, words: Sequence[str]) -> IntArray | None:
    """Return the counts of words from the file beside their vectors; None if there is none."""
    file = counts_path(path)
    if not file.exists():
        return None
    counts: dict[str, int] = {}
    for number, line in enumerate(read_lines(file), start=1):
        word, _, count = line.rpartition("\t")
        is_number = count.isascii() and count.isdigit() and len(count) <= MAX_COUNT_DIGITS
        if not (word and is_number):
            problem = "the line is not a word and its count"
            fix = "write word TAB count, or remove the file"
            raise InputError(problem, file=file, line=number, fix=fix)
        counts.setdefault(word, int(count))
    if (missing := next((word for word in words if word not in counts), None)) is not None:
        fix = "write the vectors again, or remove the file"
        raise InputError(f"the file has no count for {missing!r}", file=file, fix=fix)
    return np.array([counts[word] for word in words], dtype=np.int64)


@contextmanager
def write_word_counts(
    path: PathLike, words: Sequence[str], counts: IntArray | None
) -> Iterator[None]:
    """Write counts beside the vectors that the block writes, if it ends without an error.

    Without counts, an older file of counts is removed. Beside standard output nothing is written.
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


# Text format.


def _read_text(
    path: PathLike, chunks: Iterable[bytes], skip_bad: SkipBad | None
) -> Iterator[VectorBlock]:
    limit = max_line_bytes()
    blocks = cut_blocks(chunks, limit)
    first = next(blocks, b"").removeprefix(BOM)
    line, _, rest = first.partition(b"\n")
    if not rest:
        check_line_ends(line, path)
    header = Header.parse(line, path)
    n_numbers = header.n_numbers if header else count_numbers(line)
    if n_numbers == 0:
        problem = "the line is neither a header nor a word with its vector"
        raise InputError(problem, file=display_name(path), line=1, fix=FORMAT_FIX)
    np.empty(WARM_UP_BYTES, dtype=np.uint8)
    n_lines = n_header_lines = int(header is not None)
    for block in filter(None, chain([rest if header else first], blocks)):
        vectors, bad = parse_block(block, n_numbers, limit)
        for row, bad_line in sorted(bad.items()):
            report_bad_line(bad_line, path, n_lines + row + 1, skip_bad)
        n_lines += len(vectors.words) + len(bad)
        yield vectors
    if header is not None:
        header.check(n_lines - n_header_lines, path)


def cut_blocks(chunks: Iterable[bytes], limit: int) -> Iterator[bytes]:
    """Yield blocks of whole lines; blank lines at the end of the file are dropped.

    A part of a line may be missing if it is longer than `limit` bytes, and stays so.
    """
    pending: list[bytes] = []
    n_pending = 0
    for chunk in chunks:
        for start in range(0, len(chunk), BLOCK_BYTES):
            piece = chunk[start : start + BLOCK_BYTES]
            if n_pending + len(piece) >= BLOCK_BYTES and (end := piece.rfind(b"\n") + 1):
                yield b"".join([*pending, piece[:end]])
                pending, n_pending, piece = [], 0, piece[end:]
            elif n_pending > BLOCK_BYTES + limit:
                continue
            pending.append(piece)
            n_pending += len(piece)
    if rest := b"".join(pending).rstrip():
        yield rest + b"\n"


def count_numbers(line: bytes) -> int:
    """Return how many numbers end a line; the first field is always the word.

    >>> count_numbers(b"at home 0.5 -1"), count_numbers(b"7 0.5 -1"), count_numbers(b"word")
    (2, 2, 0)
    """
    fields = line.split()[1:]
    for n_numbers, field in enumerate(reversed(fields)):
        if parse_number(field) is None:
            return n_numbers
    return len(fields)


def parse_block(block: bytes, n_numbers: int, limit: int) -> tuple[VectorBlock, dict[int, BadLine]]:
    """Parse a block of whole lines; return the good ones, and the bad ones by line number."""
    lines = _Lines.of(block)
    is_long = lines.lengths > limit
    n_fields = np.diff(lines.ends)
    complete = np.flatnonzero((n_fields > n_numbers) & ~is_long)
    vectors, doubtful = _parse_complete(lines, complete, n_numbers)
    bad = {
        line: describe_long_line(lines.get(line), limit)
        for line in np.flatnonzero(is_long).tolist()
    }
    short = np.flatnonzero((n_fields <= n_numbers) & ~is_long)
    for line in sorted([*short.tolist(), *complete[sorted(doubtful)].tolist()]):
        entry = parse_line(lines.get(line), n_numbers)
        if isinstance(entry, BadLine):
            bad[line] = entry
        else:
            row = np.searchsorted(complete, line)
            vectors.words[row], vectors.matrix[row] = entry
    if bad:
        vectors = vectors.select(np.flatnonzero(~np.isin(complete, list(bad))))
    return vectors, bad


@dataclass(frozen=True, slots=True)
class _Lines:
    """The delimiters of a block, the indices of its blanks, and which blanks are line ends."""

    delimiters: Delimiters
    blanks: IntArray
    ends: IntArray

    @staticmethod
    def of(block: bytes) -> _Lines:
        # A margin before the block that looks like the end of a line.
        found = Delimiters.of(b"0" * (MARGIN - 1) + b"\n" + block)
        is_blank = (found.codes == BLANK) | (found.codes - np.uint8(TAB) <= ord("\r") - TAB)
        blanks = np.flatnonzero(is_blank)
        ends = np.flatnonzero(found.codes[blanks] == NEWLINE)
        before, after = blanks[ends[1:] - 1], blanks[ends[1:]]
        is_trailing = found.positions[before] == found.positions[after] - 1
        if (is_trailing & (found.codes[before] != NEWLINE)).any():  # as in files of fastText
            lines = [line.rstrip() for line in block.split(b"\n")]
            return _Lines.of(b"\n".join(lines))
        return _Lines(found, blanks, ends)

    @property
    def lengths(self) -> IntArray:
        lengths: IntArray = np.diff(self.delimiters.positions[self.blanks[self.ends]]) - 1
        return lengths

    def get(self, line: int) -> bytes:
        start, end = self.delimiters.positions[self.blanks[self.ends[line : line + 2]]].tolist()
        return self.delimiters.data[start + 1 : end]


def _parse_complete(
    lines: _Lines, complete: IntArray, n_numbers: int
) -> tuple[VectorBlock, set[int]]:
    """Parse lines that have enough fields; also return the rows that need a closer look."""
    if not len(complete):
        return VectorBlock([], np.zeros((0, n_numbers), dtype=np.float32)), set()
    delimiters, blanks, ends = lines.delimiters, lines.blanks, lines.ends
    has_more_fields = ends[complete + 1] - ends[complete] > n_numbers + 1
    if len(complete) * (n_numbers + 1) == len(blanks) - 1:  # all lines are complete
        around = blanks[1:].reshape(-1, n_numbers + 1)
    else:
        around = blanks[ends[complete + 1, None] + np.arange(-n_numbers, 1)]
    numbers, failed = parse_decimals(delimiters, around)
    starts = delimiters.positions[blanks[ends[complete]]] + 1
    stops = delimiters.positions[around[:, 0]]
    places = zip(starts.tolist(), stops.tolist(), strict=True)
    words, doubtful = _decode_words([delimiters.data[start:stop] for start, stop in places])
    doubtful.update((failed // n_numbers).tolist())
    for row in np.flatnonzero(has_more_fields).tolist():
        words[row] = words[row].strip(BLANKS)  # blanks in the word or around it
        if not words[row] or _ends_in_number(words[row].encode()):
            doubtful.add(row)
    return VectorBlock(words, numbers), doubtful


def _decode_words(words: list[bytes]) -> tuple[list[str], set[int]]:
    """Decode the words of a block; also return the rows of those that may be invalid."""
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
    """Return whether a word of several parts ends in a number: the line has one too many."""
    parts = word.split()
    return len(parts) > 1 and parse_number(parts[-1]) is not None


def parse_line(line: bytes, n_numbers: int) -> tuple[str, list[float]] | BadLine:
    """Return the word and vector of one line, or what is wrong with it.

    >>> parse_line(b"at  home 1 2", 2)
    ('at  home', [1.0, 2.0])
    >>> parse_line(b"home 1 2 x", 3).reason
    "'x' is not a finite number"
    """
    text = line.decode(errors="backslashreplace")
    word, *fields = line.strip().rsplit(None, n_numbers) or [b""]
    numbers = [value for value in map(parse_number, fields) if value is not None]
    if not word:
        return BadLine("the line is empty", "remove it", text)
    if b"\0" in word:
        return BadLine(NUL_BYTE, NUL_BYTE_FIX, text)
    if len(fields) < n_numbers or _ends_in_number(word):
        reason = f"the line has {count_numbers(line)} numbers instead of {n_numbers}"
        return BadLine(reason, FIX_LINE, text)
    if len(numbers) < n_numbers:
        field = next(field for field in fields if parse_number(field) is None)
        shown = field.decode(errors="backslashreplace")[:40]
        return BadLine(f"{shown!r} is not a finite number", FIX_LINE, text)
    try:
        return word.decode(), numbers
    except UnicodeDecodeError as error:
        return BadLine(f"invalid UTF-8 at byte {error.start + 1}", UTF8_FIX, text)


# Binary format.


def is_binary(head: bytes, n_numbers: int) -> bool:
    """Return whether the numbers after the header are bytes instead of digits."""
    vector = head.partition(b" ")[2][: n_numbers * FLOAT.itemsize]
    # Several, because the first bytes of a number may be a digit and a blank.
    fields = vector.split(None, 3)[:3]
    if fields and all(parse_number(field) is not None for field in fields):
        return False
    if any(byte < BLANK and byte not in b"\t\r\n" for byte in vector):
        return True
    try:
        vector.decode()
    except UnicodeDecodeError as error:
        return error.start < len(vector) - 3  # otherwise the last character is incomplete
    return False


def _read_binary(
    path: PathLike, header: Header, chunks: Iterable[bytes], skip_bad: SkipBad | None
) -> Iterator[VectorBlock]:
    n_read, n_bytes, pending = 0, header.n_numbers * FLOAT.itemsize, b""
    limit = max_line_bytes()
    for data in _gather(chunks, max(BINARY_BLOCK_BYTES, n_bytes)):
        data = pending + data
        words, rows, end = cut_entries(data, n_bytes)
        pending = data[end:]
        for row, n_word in enumerate([*map(len, words), len(pending) - n_bytes - 1]):
            if n_word > limit:
                problem = f"word {n_read + row + 1} is longer than {limit:,} bytes"
                raise InputError(problem, file=display_name(path), fix=DOWNLOAD)
        matrix = np.frombuffer(b"".join(rows), FLOAT).reshape(len(rows), header.n_numbers)
        yield _keep_good(path, words, matrix.astype(np.float32, copy=False), n_read, skip_bad)
        n_read += len(words)
    if n_read < header.n_words and pending.strip(b"\n"):
        problem = f"the file ends within word {n_read + 1} of {header.n_words}"
        raise InputError(problem, file=display_name(path), fix=DOWNLOAD)
    header.check(n_read + bool(pending.strip(b"\n")), path)


def _gather(chunks: Iterable[bytes], n_bytes: int) -> Iterator[bytes]:
    """Join small chunks to larger ones."""
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
    r"""Return the words and vectors of the complete entries, and where the rest begins.

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
    path: PathLike, words: list[bytes], matrix: Matrix, n_before: int, skip_bad: SkipBad | None
) -> VectorBlock:
    """Decode words; report invalid ones and those whose vectors are not finite."""
    is_finite = np.asarray(np.isfinite(matrix).all(axis=1))
    texts = [word.decode(errors="replace") for word in words]
    doubtful = {row for row, text in enumerate(texts) if not text or "\ufffd" in text}
    doubtful |= {row for row, word in enumerate(words) if b"\n" in word or b"\0" in word}
    bad = []
    for row in sorted(doubtful | set(np.flatnonzero(~is_finite).tolist())):
        if (problem := _find_problem(words[row], bool(is_finite[row]))) is None:
            continue
        bad.append(row)
        number, (reason, fix) = n_before + row + 1, problem
        if skip_bad is None:
            raise InputError(f"word {number}: {reason}", file=display_name(path), fix=fix)
        skip_bad(number, reason, words[row].decode(errors="backslashreplace"))
    block = VectorBlock(texts, matrix)
    return block.select(np.delete(np.arange(len(texts)), bad)) if bad else block


def _find_problem(word: bytes, is_finite: bool) -> tuple[str, str] | None:
    """Return what is wrong with a word or its vector and how to fix it, or None."""
    if not word or b"\n" in word or b"\0" in word:
        return "this is not a word, so the vector before it has a wrong length", DOWNLOAD
    if not is_finite:
        return "its vector is not finite", "remove it, or compute the vectors again"
    try:
        word.decode()
    except UnicodeDecodeError as error:
        fix = "convert the words to UTF-8, or correct the header if it is wrong"
        return f"invalid UTF-8 at byte {error.start + 1}", fix
    return None


# Decimal numbers from text. Eight digits are read at a time: eight bytes are one 64-bit integer,
# and three multiplications compute the number they spell (Lemire, 2021). Other notations, such as
# 1.5e-07, and numbers with more digits than a double holds exactly are parsed by `float`; the
# result is always that of `float`. benchmarks/text_reading.py compares it with plain NumPy.

MARGIN = 16  # digits are loaded from up to this many bytes before their end
MAX_DIGITS = 15  # a double holds all such integers, and one division by a power of ten is exact
FLOAT_OVERFLOW = 2.0**128 - 2.0**103  # rounds to infinity in 32 bits; anything smaller does not
_MINUS, _POINT, _ZERO = b"-.0"
# Masks that keep the last k of eight bytes: in little-endian order, the highest.
_LAST_BYTES = np.array([(1 << 64) - (1 << 8 * (8 - k)) for k in range(9)], dtype=np.uint64)
_POWERS = 10 ** np.arange(MAX_DIGITS + 1, dtype=np.uint64)
_SIGNED_POWERS = np.concatenate([_POWERS, -_POWERS.astype(np.float64)])


@dataclass(frozen=True, slots=True)
class Delimiters:
    """The bytes of a text below "0" and their positions: blanks, signs, points, punctuation."""

    data: bytes
    positions: IntArray
    codes: ByteArray

    @staticmethod
    def of(data: bytes) -> Delimiters:
        """Return the delimiters of a text, whose first `MARGIN` bytes are not parsed."""
        codes = np.frombuffer(data, np.uint8)
        positions = np.flatnonzero(codes < _ZERO)
        return Delimiters(data, positions, codes[positions])


def parse_decimals(
    delimiters: Delimiters, around: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], IntArray]:
    """Parse the numbers between consecutive delimiters, whose indices are the rows of `around`.

    Also return which numbers, counted row by row, are invalid or not finite; they are set to 0.

    >>> found = Delimiters.of(b"_" * MARGIN + b" 0.25 -3 1e-2 x ")
    >>> numbers, failed = parse_decimals(found, np.flatnonzero(found.codes == ord(" "))[None])
    >>> numbers.tolist(), failed.tolist()
    ([[0.25, -3.0, 0.009999999776482582, 0.0]], [3])
    """
    positions = delimiters.positions[around]
    starts, ends = (positions[:, :-1] + 1).ravel(), positions[:, 1:].ravel()
    last = (around[:, 1:] - 1).ravel()
    has_point = delimiters.codes[last] == _POINT
    is_negative = delimiters.codes[(around[:, :-1] + 1).ravel()] == _MINUS
    points = np.where(has_point, delimiters.positions[last], ends)
    n_whole, n_decimals = points - starts - is_negative, ends - points - has_point
    is_other = np.diff(around).ravel() != 1 + has_point.view(np.int8) + is_negative
    is_other |= (n_whole + n_decimals - 1).view(np.uint64) >= MAX_DIGITS
    mantissas = _read_decimals(delimiters.data, ends, n_decimals, is_other)
    _add_whole(mantissas, delimiters.data, points, n_whole, n_decimals, is_other)
    powers = np.minimum(n_decimals, MAX_DIGITS) + (MAX_DIGITS + 1) * is_negative.view(np.int8)
    values = mantissas.view(np.int64) / _SIGNED_POWERS[powers]
    others = np.flatnonzero(is_other)
    places = zip(starts[others].tolist(), ends[others].tolist(), strict=True)
    parsed = [parse_number(delimiters.data[start:end]) for start, end in places]
    values[others] = [0.0 if value is None else value for value in parsed]
    failed = others[[value is None for value in parsed]]
    return values.astype(np.float32).reshape(len(around), -1), failed


def _add_whole(
    mantissas: WordArray,
    data: bytes,
    points: IntArray,
    n_whole: IntArray,
    n_decimals: IntArray,
    is_other: BoolArray,
) -> None:
    """Add the digits before the points, and mark numbers with other characters there."""
    digits = np.frombuffer(data, np.uint8)[points - 1] - np.uint8(_ZERO)
    wrong, some = digits > 9, np.flatnonzero((digits > 0) | (n_whole != 1))
    if len(some):  # usually few: most numbers of vectors are like 0.1234
        whole, not_digits = _read_digits(data, points[some], n_whole[some])
        mantissas[some] += whole * _POWERS.take(n_decimals[some], mode="clip")
        wrong[some] = not_digits | (n_whole[some] > 8)
    is_other |= wrong


def _read_decimals(
    data: bytes, ends: IntArray, n_decimals: IntArray, is_other: BoolArray
) -> WordArray:
    """Return the digits after the points, and mark numbers with other characters there."""
    decimals, wrong = _read_digits(data, ends, n_decimals)
    is_other |= wrong
    rest = np.flatnonzero(n_decimals > 8)
    if len(rest):
        high, wrong = _read_digits(data, ends[rest] - 8, n_decimals[rest] - 8)
        decimals[rest] += high * np.uint64(10**8)
        is_other[rest] |= wrong
    return decimals


def _read_digits(data: bytes, ends: IntArray, n_digits: IntArray) -> tuple[WordArray, BoolArray]:
    """Return the number of the last, at most eight, digits before each end, and which are none."""
    eights: WordArray = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    digits = eights[ends - 8]
    digits ^= np.uint64(0x3030303030303030)
    digits &= _LAST_BYTES.take(n_digits, mode="clip")
    wrong = digits + np.uint64(0x0606060606060606)
    wrong |= digits
    wrong &= np.uint64(0xF0F0F0F0F0F0F0F0)
    # Neighboring digits are combined to pairs, pairs to fours, fours to eights.
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


def parse_number(text: bytes) -> float | None:
    """Return a number that a 32-bit float can hold, or None for anything else.

    >>> parse_number(b"-1e-3"), parse_number(b"nan"), parse_number(b"1_0"), parse_number(b"1e99")
    (-0.001, None, None, None)
    """
    try:
        value = float(text) if b"_" not in text else math.nan
    except ValueError:
        return None
    return value if abs(value) < FLOAT_OVERFLOW else None
