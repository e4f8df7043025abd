"""Word links of many sentence pairs in little memory, and two directions of links combined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calque.algorithms.symmetrize import SYMMETRIZATIONS
from calque.io.links import parse_links
from calque.io.structured import read_array
from calque.types import Links
from calque.word_alignment.numbered_text import SplitPairs, to_offsets
from calque.word_alignment.protocol import AlignedBlock, AlignReport

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

CHUNK_BYTES = 1 << 24
# Cells of a padded batch of link matrices.
BATCH_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedLinks:
    """Links as rows (source, target); those of pair p are `offsets[p]` to `offsets[p + 1]`."""

    ends: npt.NDArray[np.uint16]  # the sentences are short
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @staticmethod
    def of(tables: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> PackedLinks:
        """Pack tables of links, each with the number of links of every pair."""
        ends, counts = [np.zeros((0, 2), dtype=np.uint16)], [np.zeros(0, dtype=np.int64)]
        for table, n_links in tables:
            ends.append(table.reshape(-1, 2).astype(np.uint16))
            counts.append(n_links)
        return PackedLinks(np.concatenate(ends), to_offsets(np.concatenate(counts)))

    def select(self, start: int, stop: int) -> Links:
        """Return the links of some pairs, sorted by pair, source and target."""
        counts = np.diff(self.offsets[start : stop + 1])
        ends = self.ends[int(self.offsets[start]) : int(self.offsets[stop])].astype(np.int64)
        pairs = np.repeat(np.arange(stop - start), counts)
        order = np.lexsort((ends[:, 1], ends[:, 0], pairs))
        scores = np.ones(len(ends), dtype=np.float32)
        return Links(pairs[order], ends[order, 0], ends[order, 1], scores, stop - start)


@dataclass(frozen=True, slots=True)
class FoundLinks:
    """Links found by an aligner: forward and backward, or one set that combines both already.

    They are links of the parts into which long pairs were split.
    """

    directions: tuple[PackedLinks, ...]
    split: SplitPairs

    def __len__(self) -> int:
        return len(self.split)

    def select_directions(self, start: int, stop: int) -> tuple[Links, Links] | None:
        """Return the forward and backward links of some pairs, if they are known."""
        if len(self.directions) == 1:
            return None
        forward, backward = (
            self.split.merge(links, start, stop) for links in self._select(start, stop)
        )
        return forward, backward

    def combine(self, start: int, stop: int, symmetrize: str) -> AlignedBlock:
        """Return one set of links for some pairs, and counts."""
        first, *others = self._select(start, stop)
        links = symmetrize_links(first, others[0], symmetrize) if others else first
        links = self.split.merge(links, start, stop)
        n_parts = self.split.count_parts(start, stop)
        is_long = n_parts > 1
        report = AlignReport(
            n_pairs=len(n_parts),
            n_links=len(links.pairs),
            n_empty=int((n_parts == 0).sum()),
            n_long=int(is_long.sum()),
            n_windows=int(n_parts[is_long].sum()),
        )
        return AlignedBlock(links, report)

    def write(self, folder: Path) -> None:
        """Write the links into a folder."""
        self.split.write(folder)
        for number, links in enumerate(self.directions):
            np.save(folder / f"links.{number}.ends.npy", links.ends)
            np.save(folder / f"links.{number}.offsets.npy", links.offsets)

    @classmethod
    def read(cls, folder: Path, n_directions: int) -> FoundLinks:
        """Memory-map the links in a folder."""
        directions = (
            PackedLinks(
                read_array(folder / f"links.{number}.ends.npy", mapped=True),
                read_array(folder / f"links.{number}.offsets.npy", mapped=True),
            )
            for number in range(n_directions)
        )
        return cls(tuple(directions), SplitPairs.read(folder))

    def _select(self, start: int, stop: int) -> list[Links]:
        first, last = self.split.starts[[start, stop]].tolist()
        return [links.select(first, last) for links in self.directions]


def read_pharaoh(path: Path) -> PackedLinks:
    """Read the `i-j` links that an aligner wrote, one line per pair, a large chunk at a time."""

    def parse(text: bytes) -> tuple[IntArray, IntArray]:
        lines = text.decode("ascii").removesuffix("\n").split("\n")
        found = parse_links(lines, path)
        ends = np.stack([found.src, found.tgt], axis=1).ravel()
        return ends, np.bincount(found.lines, minlength=len(lines))

    return PackedLinks.of(map(parse, _read_whole_lines(path)))


def symmetrize_links(forward: Links, backward: Links, method: str) -> Links:
    """Combine two directions; a link found in both scores 1, a link found in one scores ½."""
    rows = [_symmetrize_batch(*batch, method) for batch in _batch_by_size(forward, backward)]
    empty = np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.float32)
    cells = np.concatenate([empty[0], *(found for found, _ in rows)])
    scores = np.concatenate([empty[1], *(found for _, found in rows)])
    order = np.lexsort(cells.T[::-1])
    pairs, src, tgt = cells[order].T
    return Links(pairs, src, tgt, scores[order], forward.n_pairs)


def _batch_by_size(forward: Links, backward: Links) -> Iterator[tuple[IntArray, list[IntArray]]]:
    """Yield pairs of similar size: their numbers, and a table (row, src, tgt) per direction."""
    sizes = np.zeros(forward.n_pairs, dtype=np.int64)
    for links in (forward, backward):
        np.maximum.at(sizes, links.pairs, np.maximum(links.src, links.tgt) + 1)
    order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    rank = np.empty(forward.n_pairs, dtype=np.int64)
    rank[order] = np.arange(len(order))
    tables = []
    for links in (forward, backward):
        table = np.stack([rank[links.pairs], links.src, links.tgt], axis=1)
        tables.append(table[np.argsort(table[:, 0], kind="stable")])
    start = 0
    while start < len(order):
        stop = min(len(order), start + max(1, BATCH_CELLS // int(sizes[order[start]]) ** 2))
        bounds = (np.searchsorted(table[:, 0], [start, stop]) for table in tables)
        taken = [table[slice(*bound)] for table, bound in zip(tables, bounds, strict=True)]
        yield order[start:stop], [table - [start, 0, 0] for table in taken]
        start = stop


def _symmetrize_batch(
    pairs: IntArray, tables: list[IntArray], method: str
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Return the combined links of a batch as rows (pair, src, tgt), and their scores."""
    shape = np.max([table.max(axis=0, initial=-1) for table in tables], axis=0) + 1
    matrices = []
    for table in tables:
        matrix = torch.zeros(len(pairs), *shape[1:].tolist(), dtype=torch.bool)
        matrix[tuple(torch.from_numpy(column) for column in table.T)] = True
        matrices.append(matrix)
    forward, backward = matrices
    cells = SYMMETRIZATIONS[method](forward, backward).nonzero()
    where = tuple(cells.T)
    scores = (forward[where].float() + backward[where].float()) / 2
    found = cells.numpy()
    found[:, 0] = pairs[found[:, 0]]
    return found, scores.numpy()


def _read_whole_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk + stream.readline()
