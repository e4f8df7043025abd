"""Word vectors in the formats of word2vec, which Gensim, VecMap, MUSE and fastText share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from calque.text.files import PathLike, SkipBad, read_chunks, shown, write_atomically
from calque.text.six_digits import format_rows
from calque.text.word2vec_binary import FLOAT, is_binary, read_binary
from calque.text.word2vec_text import Header, VectorBlock, read_text
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]

HEAD_BYTES = 1 << 16
BLOCK_NUMBERS = 1 << 15  # fit a processor's cache with what is computed from them
SPACE, HARD_SPACE = " ", "\xa0"
FORBIDDEN = frozenset("\n\r\t\0")


def scan_vectors(path: PathLike, skip_bad: SkipBad | None = None) -> Iterator[VectorBlock]:
    """Read vectors, packed or not, text or binary; what cannot be used is refused or skipped."""
    chunks = read_chunks(path)
    head = b""
    while len(head) < HEAD_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    if not head.strip():
        raise InputError("is empty", file=shown(path), fix="give vectors in word2vec format")
    line, _, rest = head.partition(b"\n")
    header = Header.parse(line)
    if header is not None and is_binary(rest, header.n_numbers):
        return read_binary(path, header, chain([rest], chunks), skip_bad)
    return read_text(path, chain([head], chunks), skip_bad)


def write_word2vec(
    path: PathLike, names: Sequence[str], matrix: Matrix, *, binary: bool = False
) -> None:
    """Write vectors under names that `make_names` gave, whole or not at all."""
    n_rows = -(-BLOCK_NUMBERS // matrix.shape[1])
    with write_atomically(path, binary=True) as stream:
        stream.write(b"%d %d\n" % matrix.shape)
        for start in range(0, len(names), n_rows):
            rows, block = matrix[start : start + n_rows], names[start : start + n_rows]
            is_finite = np.isfinite(rows).all(axis=1)
            if not is_finite.all():
                problem = f"the vector of {block[int(np.argmin(is_finite))]!r} is not finite"
                raise InputError(problem, file=shown(path), fix="make the vectors again")
            lines = _format_binary(block, rows) if binary else _format_text(block, rows)
            stream.write(b"".join(lines))


def make_names(words: Sequence[str]) -> list[str]:
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
