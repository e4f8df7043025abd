"""Parsed word vectors on disk, so that a large text file is read once and mapped ever after.

An entry is two files: the matrix as .npy, and the words, one a line below a line about them. Their
names tell which file they came from and in which state it was, so that a changed file has none.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.text.files import PARTIAL, PathLike, write_atomically
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float32]

FORMAT = 1  # to be raised whenever the same file would be parsed to something else
MIN_BYTES = 64 << 20  # smaller files are parsed in a second or so
MATRIX, WORDS = ".npy", ".words"
DAY_SECONDS = 86_400
DIGITS = 16


def user_folder() -> Path | None:
    """Name the folder for the user's entries, calque/vectors among the caches; None without one."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "calque" / "vectors" if os.path.isabs(root) else None


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Where the vectors of one state of a file are, or would be."""

    folder: Path
    source: str
    state: str
    max_words: int | None

    @staticmethod
    def find(path: PathLike, cache: bool | PathLike, max_words: int | None) -> CacheEntry | None:
        """Name the entry of a file; None if it is not to be cached, or cannot be."""
        if cache is False or os.fspath(path) == "-":
            return None
        source = os.path.realpath(path)
        state = _read_state(source, MIN_BYTES if cache is True else 0)
        folder = user_folder() if cache is True else Path(cache)
        if state is None or folder is None:
            return None
        return CacheEntry(folder, source, state, max_words)

    def load(self) -> tuple[list[str], Matrix, int] | None:
        """Map the matrix and read the words; None if they are not there, or damaged."""
        try:
            matrix = np.load(self._name(MATRIX), mmap_mode="c", allow_pickle=False)
            n_duplicates = int(_read_about(self._name(WORDS))["n_duplicates"])
            words = self._name(WORDS).read_bytes().decode().split("\n")[1:]
        except (OSError, ValueError, EOFError, KeyError, TypeError):
            return None
        is_whole = matrix.dtype == np.float32 and matrix.ndim == 2 and len(matrix) == len(words)
        return (words, matrix, n_duplicates) if is_whole else None

    def save(self, words: Sequence[str], matrix: Matrix, n_duplicates: int) -> None:
        """Write the entry if the file is still what it was; a cache that cannot be is none."""
        if _read_state(self.source, 0) != self.state:
            return
        about = json.dumps({"source": self.source, "n_duplicates": n_duplicates})
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._clear_old()
            with write_atomically(self._name(MATRIX), binary=True) as stream:
                np.save(stream, matrix, allow_pickle=False)
            with write_atomically(self._name(WORDS), binary=True) as stream:
                stream.write("\n".join([about, *words]).encode())
        except (OSError, InputError):
            with suppress(OSError):
                self._name(MATRIX).unlink()

    def _name(self, suffix: str) -> Path:
        words = "all" if self.max_words is None else self.max_words
        return self.folder / f"{_digest(self.source)}-{self.state}-{words}{suffix}"

    def _clear_old(self) -> None:
        """Remove the entries of files that changed or are gone, and what was left half-written."""
        prefix = _digest(self.source)
        for file in self.folder.glob(f"{prefix}-*"):
            if not file.name.startswith(f"{prefix}-{self.state}-"):
                file.unlink(missing_ok=True)
        for file in self.folder.glob(f"{'?' * DIGITS}-{'?' * DIGITS}-*{WORDS}"):
            if not _has_source(file):
                file.with_suffix(MATRIX).unlink(missing_ok=True)
                file.unlink(missing_ok=True)
        for file in self.folder.glob(PARTIAL):
            if file.stat().st_mtime < time.time() - DAY_SECONDS:
                file.unlink(missing_ok=True)


def _read_about(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        about: dict[str, Any] = json.loads(stream.readline())
    return about


def _has_source(file: Path) -> bool:
    """Tell whether the file an entry came from is still there; a damaged entry came from none."""
    try:
        return os.path.exists(_read_about(file)["source"])
    except (ValueError, KeyError, TypeError):
        return False


def _read_state(path: str, min_bytes: int) -> str | None:
    """Tell one state of a file from another by all its times and its place on the disk."""
    try:
        status = os.stat(path)
    except OSError:  # the reader says what is wrong
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size < min_bytes:
        return None
    times = status.st_mtime_ns, status.st_ctime_ns
    return _digest(f"{FORMAT} {status.st_dev} {status.st_ino} {status.st_size} {times}")


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:DIGITS]
