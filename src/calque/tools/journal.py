"""A file of whole blocks and a journal of them, so that work goes on after a kill where it was.

A block counts once its line is in the journal, which is written after the block has reached the
disk. What a kill has left behind that line is cut off.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from calque.types import InputError


@dataclass(frozen=True, slots=True)
class Record:
    """One block in the journal: its number, where it ends, what was read so far, and figures."""

    block: int
    end: int
    digest: str
    figures: tuple[int, ...]

    def to_line(self) -> bytes:
        """Give the journal's line."""
        return json.dumps([self.block, self.end, self.digest, *self.figures]).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """Read the journal's line; ValueError if it is not whole."""
        block, end, digest, *figures = json.loads(line)
        if not line.endswith(b"\n"):
            raise ValueError("a line without an end")
        return cls(block, end, digest, tuple(figures))


class JournaledFile:
    """Blocks appended to a file, each of them noted in `NAME.journal` beside it.

    `last` is the newest block that is safe. Only one process at a time can have it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: BinaryIO = open(path, "ab")  # noqa: SIM115
        lock_file(self.data, path)
        self.journal: BinaryIO = open(journal_of(path), "ab")  # noqa: SIM115
        self.last: Record | None = None
        self._recover()

    def append(self, block: int, content: bytes, digest: str, figures: tuple[int, ...]) -> None:
        """Write a block, wait until it is on the disk, and note it."""
        self.data.write(content)
        _sync(self.data)
        record = Record(block, self.data.tell(), digest, figures)
        self.journal.write(record.to_line())
        self.last = record  # before the wait, in which Ctrl-C may come: the block is noted
        _sync(self.journal)

    def clear(self) -> None:
        """Forget all blocks."""
        for stream in (self.data, self.journal):
            stream.truncate(0)
        self.last = None

    def close(self) -> None:
        """Close both files; the lock goes with them."""
        self.data.close()
        self.journal.close()

    def _recover(self) -> None:
        """Cut off what is not in the journal, and from the journal what is not in the file."""
        n_bytes, n_journal = os.fstat(self.data.fileno()).st_size, 0
        for record in read_records(self.path):
            if record.end > n_bytes:
                break
            self.last, n_journal = record, n_journal + len(record.to_line())
        self.data.truncate(0 if self.last is None else self.last.end)
        self.journal.truncate(n_journal)
        for stream in (self.data, self.journal):
            stream.seek(0, os.SEEK_END)


def journal_of(path: Path) -> Path:
    """Give the name of a file's journal."""
    return path.with_name(path.name + ".journal")


def read_records(path: Path) -> Iterator[Record]:
    """Read the journal of a file up to a line that a kill has cut short."""
    if not journal_of(path).exists():
        return
    with open(journal_of(path), "rb") as lines:
        for line in lines:
            try:
                yield Record.from_line(line)
            except (ValueError, TypeError):
                return


def lock_file(stream: BinaryIO, path: Path) -> None:
    """Refuse to share an open file with another process that locked it; `path` is for messages."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        problem = "another process is writing it"
        raise InputError(problem, file=path, fix="wait for it, or end it") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise  # else a file system without locks


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
