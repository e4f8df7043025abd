"""Nearest sentences both ways: the one place that finds neighbors, exactly or through FAISS.

The exact search takes both directions out of the same products, block by block, from arrays that
may lie on disk. On two cores it took less time than FAISS's flat index, which must multiply twice
(`benchmarks/mining.py`); so FAISS is for approximate indexes, of millions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calque.align.both_ways import nearest_both_ways
from calque.align.margin import Neighbors
from calque.align.similarity import normalize_rows
from calque.types import InputError, MissingExtra

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

EXACT = "exact"
# Products of two such blocks take 64 MiB; on a GPU larger ones keep it busy.
BLOCK = {"cpu": 4096, "cuda": 16384}
SAMPLES_A_CENTER, MAX_SAMPLES = 64, 1 << 20


class UnitRows:
    """Rows of an array as unit vectors, made when they are asked for; some of them, or all."""

    def __init__(
        self,
        array: npt.NDArray[Any],
        rows: npt.NDArray[np.int64] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.array, self.rows, self.device = array, rows, torch.device(device)

    def __len__(self) -> int:
        return len(self.array if self.rows is None else self.rows)

    @property
    def width(self) -> int:
        """The length of a vector."""
        return int(self.array.shape[1])

    def __getitem__(self, part: slice) -> Float[Tensor, "rows hidden"]:
        own = self.array[part if self.rows is None else self.rows[part]]
        vectors = torch.from_numpy(np.array(own, dtype=np.float32)).to(self.device)
        return normalize_rows(vectors)


def find_neighbors(
    src: UnitRows,
    tgt: UnitRows,
    k: int = 4,
    *,
    index: str = EXACT,
    probes: int = 16,
    on_rows: Callable[[int], None] | None = None,
) -> Neighbors:
    """Find the k nearest of the other language for every sentence, both ways, by cosine.

    `index` is "exact", or a description of a FAISS index such as "IVF1024,Flat", whose lists are
    searched `probes` at a time. `on_rows` hears of sentences that are done, of len(src) + len(tgt).
    """
    if not 1 <= k <= min(len(src), len(tgt)):
        raise InputError(
            f"k={k}, of {len(src):,} and {len(tgt):,} sentences",
            fix=f"choose k from 1 to {max(1, min(len(src), len(tgt))):,}",
        )
    if index != EXACT:
        forward = _search(src, tgt, k, index, probes, on_rows)
        backward = _search(tgt, src, k, index, probes, on_rows)
        return Neighbors(*forward, *backward)
    share = 1 + len(tgt) / len(src)
    tell = None if on_rows is None else lambda n_rows: on_rows(round(n_rows * share))
    block = BLOCK.get(src.device.type, BLOCK["cpu"])
    found = nearest_both_ways(src, tgt, k, k, block=block, on_rows=tell)
    (src_cosines, src_places), (tgt_cosines, tgt_places) = found
    arrays = (src_cosines, src_places, tgt_cosines, tgt_places)
    return Neighbors(*(array.cpu().numpy() for array in arrays))


def _search(
    queries: UnitRows,
    keys: UnitRows,
    k: int,
    description: str,
    probes: int,
    on_rows: Callable[[int], None] | None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Build an index of the keys and ask it for every query."""
    index = _build(keys, description, probes)
    cosines, places = [], []
    for part in _parts(queries):
        found, rows = index.search(part, k)
        cosines.append(np.where(rows < 0, np.float32(-1), found))
        places.append(np.maximum(rows, 0))  # fewer than k found: a far one stands in
        if on_rows is not None:
            on_rows(len(part))
    return np.concatenate(cosines), np.concatenate(places)


def check_index(description: str, width: int) -> None:
    """Refuse an index that cannot be made for vectors of a width, or for want of FAISS."""
    if description != EXACT:
        _make(description, width)


def _make(description: str, width: int) -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtra("faiss-cpu", "mine") from error
    try:
        return faiss.index_factory(width, description, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        fix = f"try {EXACT}, or what FAISS's index_factory knows, such as IVF1024,Flat"
        problem = f"no index is called {description!r}, or not for vectors of {width} numbers"
        raise InputError(problem, fix=fix) from error


def _build(keys: UnitRows, description: str, probes: int) -> Any:
    index = _make(description, keys.width)
    import faiss  # which is there, then

    if not index.is_trained:
        index.train(_sample(keys, index))
    for part in _parts(keys):
        index.add(part)
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None:
        lists.nprobe = probes
    return index


def _sample(keys: UnitRows, index: Any) -> npt.NDArray[np.float32]:
    """Take keys at even distances to learn the index from, enough for each of its centers."""
    n_wanted = min(MAX_SAMPLES, SAMPLES_A_CENTER * max(256, getattr(index, "nlist", 256)))
    step = max(1, len(keys) // n_wanted)
    array = keys.array[::step] if keys.rows is None else keys.array[keys.rows[::step]]
    return UnitRows(array)[:].numpy()


def _parts(rows: UnitRows) -> Iterator[npt.NDArray[np.float32]]:
    size = BLOCK["cpu"]
    return (rows[start : start + size].cpu().numpy() for start in range(0, len(rows), size))
