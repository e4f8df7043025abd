"""Reading vectors in word2vec's binary format: a header line, then word, blank, 32-bit floats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from calque.text.decimals import parse_number
from calque.text.files import PathLike, SkipBad, shown
from calque.text.word2vec_text import BLANK, Header, VectorBlock
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

FLOAT = np.dtype("<f4")
BLOCK_BYTES = 1 << 22
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
    for data in _gather(chunks, max(BLOCK_BYTES, n_bytes)):
        data = pending + data
        words, rows, end = cut_entries(data, n_bytes)
        pending = data[end:]
        matrix = np.frombuffer(b"".join(rows), FLOAT).reshape(len(rows), header.n_numbers)
        yield _keep_good(path, words, matrix.astype(np.float32, copy=False), n_read, skip_bad)
        n_read += len(words)
    if n_read < header.n_words and pending.strip(b"\n"):
        problem = f"ends within word {n_read + 1} of {header.n_words}"
        raise InputError(problem, file=shown(path), fix=AGAIN)
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
            raise InputError(f"word {n_above + row + 1}: {reason}", file=shown(path), fix=fix)
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
