"""How often words were seen, beside their vectors: `de.vec.counts`, lines of word TAB count."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.text.files import PathLike, read_lines, write_atomically
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

MAX_DIGITS = 18  # more would not fit 64 bits


def counts_path(path: PathLike) -> Path:
    """Name the file with the counts of the words of a file.

    >>> counts_path("vectors/de.vec").name
    'de.vec.counts'
    """
    return Path(f"{os.fspath(path)}.counts")


def read_counts(path: PathLike, words: Sequence[str]) -> IntArray | None:
    """Read how often words were seen from the file beside their vectors; None without one."""
    file = counts_path(path)
    if not file.exists():
        return None
    counts: dict[str, int] = {}
    for number, line in enumerate(read_lines(file), start=1):
        word, _, count = line.rpartition("\t")
        if not (word and count.isascii() and count.isdigit() and len(count) <= MAX_DIGITS):
            fix = "write word TAB count, or remove the file"
            raise InputError("not a word and its count", file=file, line=number, fix=fix)
        counts.setdefault(word, int(count))
    if (missing := next((word for word in words if word not in counts), None)) is not None:
        fix = "write the vectors again, or remove the file"
        raise InputError(f"has no count for {missing!r}", file=file, fix=fix)
    return np.array([counts[word] for word in words], dtype=np.int64)


@contextmanager
def write_counts(path: PathLike, words: Sequence[str], counts: IntArray | None) -> Iterator[None]:
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
