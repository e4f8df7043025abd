"""The sentences of a file, each once, on disk: streamed in order, or read one by one."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.text.files import BadLine, PathLike, SkipBad, refuse, scan_lines
from calque.text.identified import has_ids, split_id

if TYPE_CHECKING:
    import numpy.typing as npt


class SentenceStore:
    """Distinct sentences in the order of a file; blank lines and repetitions are only counted.

    It takes 16 bytes of memory a line, and as much disk as the file unpacked. Sentences are the
    same if they are so without the space around them.
    """

    def __init__(
        self,
        file: PathLike,
        spool: Path,
        *,
        ids: bool | None = None,
        skip_bad: SkipBad | None = None,
    ) -> None:
        """Read the file into `spool`; `ids` says that lines are `id ⇥ sentence`, None to look.

        A line that cannot be decoded is an error, or goes to `skip_bad` and is blank.
        """
        self.file, self.spool, self.skip_bad = file, spool, skip_bad
        self.ids = has_ids(file) if ids is None else ids
        offsets, hashes, is_blank, self.digest = self._copy()
        self.n_lines, self.n_empty = len(hashes), int(is_blank.sum())
        filled = np.flatnonzero(~is_blank)
        _, first, self._groups = np.unique(hashes[filled], return_index=True, return_inverse=True)
        order = np.argsort(first)
        self._rank = np.empty(len(order), dtype=np.int64)  # of a group, its row among the kept
        self._rank[order] = np.arange(len(order))
        self._filled = filled
        self.lines: npt.NDArray[np.int64] = filled[first[order]]  # of a row, its line from 0
        self.n_duplicates = len(filled) - len(self.lines)
        self._starts, self._stops = offsets[self.lines], offsets[self.lines + 1]
        self._handle: int | None = None

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[str]:
        """Give the distinct sentences."""
        return (self[row][1] for row in range(len(self)))

    def __getitem__(self, row: int) -> tuple[str, str]:
        """Give the name, if it has one, and the sentence of a row."""
        if self._handle is None:
            self._handle = os.open(self.spool, os.O_RDONLY)
        start, stop = int(self._starts[row]), int(self._stops[row])
        line = os.pread(self._handle, stop - start, start).decode().removesuffix("\n")
        return self._split(line)

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def find(self, wanted: Collection[str]) -> dict[str, int]:
        """Find the rows of names, or of sentences where they have none; one absent is left out.

        A repeated sentence has the row of its first occurrence, whichever of its names is asked.
        """
        found: dict[str, int] = {}
        groups = iter(self._groups.tolist())
        with open(self.spool, encoding="utf-8", newline="\n") as stream:
            for line in stream:
                name, sentence = self._split(line.removesuffix("\n"))
                if not sentence:
                    continue
                row = int(self._rank[next(groups)])
                key = name if self.ids else sentence
                if key in wanted:
                    found[key] = row
        return found

    def _read(self, line: str | BadLine, number: int) -> tuple[str, str]:
        if not isinstance(line, str):
            refuse(line, self.file, number, self.skip_bad)
            return "", ""
        return split_id(line, self.file, number) if self.ids else ("", line.strip())

    def _split(self, line: str) -> tuple[str, str]:
        if not self.ids:
            return "", line
        name, _, sentence = line.partition("\t")
        return name, sentence

    def _copy(
        self,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_], str]:
        """Write the file out plainly; give where lines begin, their hashes and which are blank."""
        offsets, hashes, blank = array("q", [0]), array("q"), bytearray()
        digest, place = hashlib.blake2b(digest_size=16), 0
        with open(self.spool, "wb") as stream:
            for number, line in enumerate(scan_lines(self.file), start=1):
                name, sentence = self._read(line, number)
                content = (f"{name}\t{sentence}\n" if self.ids else f"{sentence}\n").encode()
                stream.write(content)
                digest.update(content)
                place += len(content)
                offsets.append(place)
                hashes.append(hash(sentence))  # 64 bits: two of 10 million agree once in 10⁵ runs
                blank.append(not sentence)
        kinds = np.frombuffer(blank, dtype=np.bool_)
        places, keys = (np.frombuffer(part, dtype=np.int64) for part in (offsets, hashes))
        return places, keys, kinds, digest.hexdigest()
