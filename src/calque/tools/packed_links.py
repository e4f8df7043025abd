"""Word links of many sentence pairs in little memory, and two directions of them made one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.tools.aligning import AlignedBlock, AlignReport
from calque.tools.long_pairs import Seams
from calque.tools.model_folder import read_array
from calque.tools.word_ids import starts_of
from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    Ends = npt.NDArray[np.uint16]  # parts are short

CHUNK_BYTES = 1 << 24
# Links are symmetrized in padded batches of so many cells.
BATCH_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedLinks:
    """Row k of `ends` is a link (source, target); those of pair p are at offsets p and p + 1."""

    ends: Ends
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @staticmethod
    def of(tables: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> PackedLinks:
        """Pack tables of links, each given with how many of them its pairs have."""
        ends, counts = [np.zeros((0, 2), dtype=np.uint16)], [np.zeros(0, dtype=np.int64)]
        for table, some in tables:
            ends.append(table.reshape(-1, 2).astype(np.uint16))
            counts.append(some)
        return PackedLinks(np.concatenate(ends), starts_of(np.concatenate(counts)))

    def select(self, start: int, stop: int) -> Links:
        """Unpack the links of some pairs, in the order of pair, source and target."""
        counts = np.diff(self.offsets[start : stop + 1])
        ends = self.ends[int(self.offsets[start]) : int(self.offsets[stop])].astype(np.int64)
        pairs = np.repeat(np.arange(stop - start), counts)
        order = np.lexsort((ends[:, 1], ends[:, 0], pairs))
        scores = np.ones(len(ends), dtype=np.float32)
        return Links(pairs[order], ends[order, 0], ends[order, 1], scores, stop - start)


@dataclass(frozen=True, slots=True)
class FoundLinks:
    """What an aligner found: forward and backward links, or one set of both made one already.

    They are those of the parts that sentence pairs were cut into, which are most often whole.
    """

    packed: tuple[PackedLinks, ...]
    seams: Seams

    def __len__(self) -> int:
        return len(self.seams)

    def directions(self, start: int, stop: int) -> tuple[Links, Links] | None:
        """Give the links of some pairs by direction, if they are known."""
        if len(self.packed) == 1:
            return None
        forward, backward = (
            self.seams.sew(links, start, stop) for links in self._select(start, stop)
        )
        return forward, backward

    def join(self, start: int, stop: int, symmetrize: str) -> AlignedBlock:
        """Give one set of links for some pairs, and what was met."""
        first, *others = self._select(start, stop)
        links = symmetrize_links(first, others[0], symmetrize) if others else first
        links = self.seams.sew(links, start, stop)
        n_parts = self.seams.count_parts(start, stop)
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
        self.seams.write(folder)
        for number, links in enumerate(self.packed):
            np.save(folder / f"links.{number}.ends.npy", links.ends)
            np.save(folder / f"links.{number}.offsets.npy", links.offsets)

    @classmethod
    def read(cls, folder: Path, n_sets: int) -> FoundLinks:
        """Map the links in a folder, without reading them all."""
        packed = (
            PackedLinks(
                read_array(folder / f"links.{number}.ends.npy", mapped=True),
                read_array(folder / f"links.{number}.offsets.npy", mapped=True),
            )
            for number in range(n_sets)
        )
        return cls(tuple(packed), Seams.read(folder))

    def _select(self, start: int, stop: int) -> list[Links]:
        first, last = self.seams.starts[[start, stop]].tolist()
        return [links.select(first, last) for links in self.packed]


def read_pharaoh(path: Path) -> PackedLinks:
    """Read a file of `i-j` links, a line a pair, as aligners write them by the million."""
    return PackedLinks.of(map(_parse_pharaoh, _read_whole_lines(path)))


def symmetrize_links(forward: Links, backward: Links, method: str) -> Links:
    """Make two directions one; a link of one direction only scores ½, one of both scores 1."""
    rows = [_symmetrize_batch(*batch, method) for batch in _batch_by_size(forward, backward)]
    empty = np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.float32)
    cells = np.concatenate([empty[0], *(found for found, _ in rows)])
    scores = np.concatenate([empty[1], *(found for _, found in rows)])
    order = np.lexsort(cells.T[::-1])
    pairs, src, tgt = cells[order].T
    return Links(pairs, src, tgt, scores[order], forward.n_pairs)


def _batch_by_size(forward: Links, backward: Links) -> Iterator[tuple[IntArray, list[IntArray]]]:
    """Group pairs of like size: their numbers, and a table (row, src, tgt) for each direction."""
    sizes = np.zeros(forward.n_pairs, dtype=np.int64)
    for links in (forward, backward):
        np.maximum.at(sizes, links.pairs, np.maximum(links.src, links.tgt) + 1)
    order = np.argsort(-sizes, kind="stable")
    order = order[: np.count_nonzero(sizes)]
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
    import torch

    from calque.align.symmetrize import SYMMETRIZATIONS

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


def _parse_pharaoh(text: bytes) -> tuple[IntArray, IntArray]:
    """Give the links of some lines, and how many each line has."""
    codes = np.frombuffer(text, dtype=np.uint8)
    dashes, line_ends = (np.flatnonzero(codes == ord(sign)) for sign in "-\n")
    # NumPy finds a number in a text of line ends alone.
    numbers = text.replace(b"-", b" ") if len(dashes) else b""
    links = np.fromstring(numbers, dtype=np.int64, sep=" ")
    return links, np.diff(np.searchsorted(dashes, line_ends), prepend=0)


def _read_whole_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk + stream.readline()
