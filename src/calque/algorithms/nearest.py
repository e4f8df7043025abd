"""Nearest neighbors between two sets of vectors: by dot product, CSLS, or FAISS.

Scores are dot products: pass unit rows (`normalize_rows`) for cosines. They are computed block by
block, so that memory stays small for any number of vectors, on CPU and GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from calque.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    TopK = tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]  # scores and indices

BLOCK = 4096
# On a GPU, larger blocks keep it busy. Products of two CPU blocks take 64 MiB.
DEVICE_BLOCK = {"cpu": BLOCK, "cuda": 16384}
CSLS_BLOCK_SCORES = 1 << 24
SIMD_WIDTH = 32
EXACT_INDEX = "exact"
FAISS_SAMPLES_PER_CENTROID, FAISS_MAX_SAMPLES = 64, 1 << 20


class Rows(Protocol):
    """Vectors of which slices can be read: a tensor, or an array on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Neighbors:
    """The k nearest targets of every source and the k nearest sources of every target."""

    src_cosines: npt.NDArray[np.float32]  # sources × k
    src_indices: npt.NDArray[np.int64]
    tgt_cosines: npt.NDArray[np.float32]  # targets × k
    tgt_indices: npt.NDArray[np.int64]


def normalize_rows(matrix: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
    """Return rows scaled to length one; rows of zeros are not changed.

    >>> normalize_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    lengths = torch.linalg.vector_norm(matrix, dim=1, keepdim=True)
    return matrix / torch.where(lengths > 0, lengths, 1.0)


def nearest_neighbors(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int,
    *,
    block: int = BLOCK,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """Return the scores and rows of the k keys with the highest dot products, best first.

    >>> words = normalize_rows(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    >>> nearest_neighbors(words[:1], words, 2)[1].tolist()
    [[0, 1]]
    """
    return nearest_neighbors_both_ways(queries, keys, k, block=block)[0]


def compute_hubness(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int = 10,
    *,
    block: int = BLOCK,
) -> Float[Tensor, "queries"]:
    """Return r(x), each query's mean score with its k nearest keys (Conneau et al., 2018, §2.3)."""
    return nearest_neighbors(queries, keys, k, block=block)[0].mean(dim=1)


def csls_scores(similarity: Float[Tensor, "src tgt"], k: int = 10) -> Float[Tensor, "src tgt"]:
    """Return CSLS scores, which penalize hubs: 2·sim(x, y) − r(x) − r(y) (Conneau et al., 2018).

    r is a word's mean similarity to its k nearest neighbors in the other language.

    >>> csls_scores(torch.eye(2), k=1).tolist()
    [[0.0, -2.0], [-2.0, 0.0]]
    """
    _check_k(k, min(similarity.shape))
    src_hubness = topk_in_rows(similarity, k)[0].mean(dim=1)
    tgt_hubness = topk_in_columns(similarity, k)[0].mean(dim=1)
    return 2 * similarity - src_hubness[:, None] - tgt_hubness


def csls_nearest_neighbors(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k_neighbors: int = 10,
    k: int = 1,
    *,
    sources: Float[Tensor, "sources hidden"] | None = None,
    order_only: bool = False,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """Return the scores and rows of the k keys with the highest 2·sim(x, y) − r(x) − r(y).

    r(y) is the mean of a key's `k_neighbors` highest similarities with `sources`, all words of the
    queries' language, as in MUSE and VecMap. By default the queries stand for their language: less
    work, but a weaker correction. r(x) does not change the order of a query's keys: `order_only`
    leaves it out.
    """
    others = queries if sources is None else sources
    _check_k(k, len(keys))
    _check_k(k_neighbors, min(len(keys), len(others)))
    best: TopK | None = None
    nearest: TopK | None = None
    for start, columns in _blocks(keys, max(1, CSLS_BLOCK_SCORES // len(others))):
        similarity = others @ columns.mT
        hubness = topk_in_columns(similarity, k_neighbors)[0].mean(dim=1)
        if sources is not None:
            similarity = queries @ columns.mT
        if not order_only:
            found = topk_in_rows(similarity, min(k_neighbors, len(columns)))
            nearest = merge_topk(nearest, found, k_neighbors)
        scores = similarity.mul_(2).sub_(hubness)
        if k == 1:  # several times faster than a top-k of one
            scores, indices = scores.max(dim=1, keepdim=True)
        else:
            scores, indices = topk_in_rows(scores, min(k, len(columns)))
        best = merge_topk(best, (scores, indices + start), k)
    assert best is not None
    if nearest is not None:
        return best[0] - nearest[0].mean(dim=1, keepdim=True), best[1]
    return best


def nearest_neighbors_both_ways(
    src: Float[Tensor, "src hidden"] | Rows,
    tgt: Float[Tensor, "tgt hidden"] | Rows,
    k_src: int,
    k_tgt: int = 0,
    *,
    scale: float = 1.0,
    src_penalties: Float[Tensor, "src"] | None = None,
    tgt_penalties: Float[Tensor, "tgt"] | None = None,
    block: int = BLOCK,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[TopK, TopK]:
    """Return each source's `k_src` best targets and each target's `k_tgt` best sources.

    Both directions share the dot products. A source ranks targets by scale·xy − penalty(y), a
    target ranks sources by scale·xy − penalty(x). `on_rows` is called with the number of sources
    finished by each block.

    >>> src, tgt = torch.eye(2), torch.tensor([[1.0, 0.5], [0.8, 0.0]])
    >>> (_, forward), (_, backward) = nearest_neighbors_both_ways(src, tgt, 1, 1)
    >>> forward.tolist(), backward.tolist()
    ([[0], [0]], [[0], [0]])
    """
    _check_k(k_src, len(tgt))
    if k_tgt:
        _check_k(k_tgt, len(src))
    columns: list[TopK | None] = [None] * (-(-len(tgt) // block))
    rows: list[TopK] = []
    for start, part in _blocks(src, block):
        best: TopK | None = None
        for number, (first, other) in enumerate(_blocks(tgt, block)):
            products = (scale * part) @ other.mT
            scores = products
            if tgt_penalties is not None:
                scores = products - tgt_penalties[first : first + len(other)]
            values, indices = topk_in_rows(scores, min(k_src, len(other)))
            best = merge_topk(best, (values, indices + first), k_src)
            if k_tgt:
                scores = products
                if src_penalties is not None:
                    scores = products - src_penalties[start : start + len(part), None]
                values, indices = topk_in_columns(scores, min(k_tgt, len(part)))
                columns[number] = merge_topk(columns[number], (values, indices + start), k_tgt)
        if best is not None:
            rows.append(best)
        if on_rows is not None:
            on_rows(len(part))
    return _concatenate(rows, src, k_src), _concatenate([c for c in columns if c], tgt, k_tgt)


def log_sum_exp_both_ways(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    scale: float = 1.0,
    *,
    block: int = BLOCK,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[Float[Tensor, "src"], Float[Tensor, "tgt"]]:
    """Return log Σ e^(scale·xy) of each source over all targets and of each target over sources.

    Subtracted from scale·xy, the second gives the inverted softmax (Smith et al., 2017).
    """
    rows, columns = src.new_full((len(src),), -torch.inf), tgt.new_full((len(tgt),), -torch.inf)
    for start, part in _blocks(src, block):
        src_sums = rows[start : start + len(part)]
        for first, other in _blocks(tgt, block):
            scores = (scale * part) @ other.mT
            tgt_sums = columns[first : first + len(other)]
            torch.logaddexp(src_sums, scores.logsumexp(dim=1), out=src_sums)
            torch.logaddexp(tgt_sums, scores.logsumexp(dim=0), out=tgt_sums)
        if on_rows is not None:
            on_rows(len(part))
    return rows, columns


def _check_k(k: int, n_vectors: int) -> None:
    if not 1 <= k <= n_vectors:
        raise InputError(
            f"k is {k}, but there are {n_vectors:,} vectors",
            fix=f"choose k from 1 to {n_vectors:,}",
        )


def _blocks(rows: Rows, size: int) -> Iterator[tuple[int, Tensor]]:
    edges = [*range(0, len(rows), size), len(rows)]
    return ((start, rows[start:end]) for start, end in pairwise(edges))


def _concatenate(parts: list[TopK], rows: Rows, k: int) -> TopK:
    if not parts:
        shape, none = (len(rows), k), rows[:0]
        return none.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=none.device)
    scores, indices = (torch.cat(both) for both in zip(*parts, strict=True))
    return scores, indices


# Top-k through the maxima of groups. The k highest scores of a row lie in the k groups with the
# highest maxima, so only those are sorted: the values are those of `torch.topk`, faster.
# benchmarks/mapping.py compares the two.


def topk_in_rows(
    scores: Float[Tensor, "rows columns"], k: int
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Return the k highest scores of each row and their columns, highest first.

    >>> topk_in_rows(torch.tensor([[0.1, 0.9, 0.5]]), 2)[1].tolist()
    [[1, 2]]
    """
    size = _group_size(scores.shape[1], k)
    if size == 1:
        return _unpack(scores.topk(k, dim=1))
    n_groups = scores.shape[1] // size
    whole = scores[:, : n_groups * size]
    if size < SIMD_WIDTH:  # members far apart, so that maxima of neighboring groups vectorize
        maxima = whole.view(-1, size, n_groups).amax(dim=1)
        return _topk_of_groups(scores, maxima, k, size, step=n_groups)
    maxima = whole.view(-1, n_groups, size).amax(dim=2)
    return _topk_of_groups(scores, maxima, k, size)


def topk_in_columns(
    scores: Float[Tensor, "rows columns"], k: int
) -> tuple[Float[Tensor, "columns k"], Int[Tensor, "columns k"]]:
    """Return the k highest scores of each column and their rows, highest first."""
    size = _group_size(len(scores), k)
    if size == 1:
        return _unpack(scores.mT.contiguous().topk(k, dim=1))
    n_groups = len(scores) // size
    # Maxima of the transposed view would be taken against the order in memory.
    maxima = scores[: n_groups * size].view(n_groups, size, -1).amax(dim=1)
    return _topk_of_groups(scores.mT, maxima.mT.contiguous(), k, size)


def merge_topk(
    old: tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]] | None,
    new: tuple[Float[Tensor, "rows more"], Int[Tensor, "rows more"]],
    k: int,
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Return the k highest of two sets of scores per row, with their indices."""
    if old is None:
        return new
    values, indices = (torch.cat(both, dim=1) for both in zip(old, new, strict=True))
    best, order = _unpack(values.topk(min(k, values.shape[1]), dim=1))
    return best, indices.gather(1, order)


def _topk_of_groups(
    scores: Float[Tensor, "rows columns"],
    maxima: Float[Tensor, "rows groups"],
    k: int,
    size: int,
    step: int = 1,
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Sort the k groups with the highest maxima and the columns that belong to no group.

    The members of a group are `step` columns apart.
    """
    groups = maxima.topk(k, dim=1, sorted=False).indices
    first = groups * size if step == 1 else groups
    members = torch.arange(size, device=scores.device) * step
    rest = torch.arange(maxima.shape[1] * size, scores.shape[1], device=scores.device)
    candidates = (first[:, :, None] + members).flatten(1)
    candidates = torch.cat([candidates, rest.expand(len(scores), -1)], dim=1)
    best, order = _unpack(scores.gather(1, candidates).topk(k, dim=1))
    return best, candidates.gather(1, order)


def _group_size(n_scores: int, k: int) -> int:
    """Return a power of two near √(n/k): then there are as many maxima as members of k groups.

    >>> _group_size(20_000, 10), _group_size(60, 10)
    (32, 1)
    """
    size = 1 << round(math.log2(max(1.0, n_scores / k)) / 2)
    return size if size >= 4 and n_scores // size >= k else 1


def _unpack(found: torch.return_types.topk) -> tuple[Tensor, Tensor]:
    return found.values, found.indices


def fast_dtype(tensor: Tensor) -> torch.dtype:
    """Return bfloat16 for float32 tensors on CPUs that multiply it in hardware, else their type.

    GPUs multiply float32 fast enough, and other CPUs are slow with bfloat16.
    """
    is_cpu, is_single = tensor.device.type == "cpu", tensor.dtype == torch.float32
    return torch.bfloat16 if is_cpu and is_single and _cpu_has_bfloat16() else tensor.dtype


@cache
def _cpu_has_bfloat16() -> bool:
    # These functions of torch are not public; without them float32 is used, which is also correct.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


class UnitRows:
    """Rows of an array as unit vectors, computed when a slice is read; all rows or a selection."""

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
        """The dimension of the vectors."""
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
    index: str = EXACT_INDEX,
    probes: int = 16,
    on_rows: Callable[[int], None] | None = None,
) -> Neighbors:
    """Return the k nearest sentences of the other language, in both directions, by cosine.

    `index` is "exact" or the description of a FAISS index such as "IVF1024,Flat", of which
    `probes` lists are searched. The exact search is faster than FAISS's flat index, because both
    directions share the products (`benchmarks/mining.py`). `on_rows` is called with numbers of
    finished sentences, which sum to len(src) + len(tgt).
    """
    most = min(len(src), len(tgt))
    if not 1 <= k <= most:
        raise InputError(
            f"k is {k}, but there are {len(src):,} and {len(tgt):,} sentences",
            fix=f"choose k from 1 to {max(1, most):,}",
        )
    if index != EXACT_INDEX:
        forward = _search_faiss(src, tgt, k, index, probes, on_rows)
        backward = _search_faiss(tgt, src, k, index, probes, on_rows)
        return Neighbors(*forward, *backward)
    share = 1 + len(tgt) / len(src)
    report = None if on_rows is None else lambda n_rows: on_rows(round(n_rows * share))
    block = DEVICE_BLOCK.get(src.device.type, BLOCK)
    found = nearest_neighbors_both_ways(src, tgt, k, k, block=block, on_rows=report)
    return Neighbors(*(array.cpu().numpy() for direction in found for array in direction))


def check_faiss_index(description: str, width: int) -> None:
    """Raise InputError if FAISS is missing or has no such index for vectors of this width."""
    if description != EXACT_INDEX:
        _create_faiss_index(description, width)


def _search_faiss(
    queries: UnitRows,
    keys: UnitRows,
    k: int,
    description: str,
    probes: int,
    on_rows: Callable[[int], None] | None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Build an index of the keys and search it for every query."""
    index = _create_faiss_index(description, keys.width)
    import faiss

    lists = faiss.try_extract_index_ivf(index)
    if lists is not None and lists.nlist > len(keys):
        problem = f"the index {description} has more clusters than there are sentences"
        fix = f"use --index exact, or at most IVF{max(1, len(keys) // 39)}"
        raise InputError(f"{problem} ({len(keys):,})", fix=fix)
    if not index.is_trained:
        index.train(_sample_rows(keys, index))
    for _, part in _blocks(keys, BLOCK):
        index.add(part.cpu().numpy())
    if lists is not None:
        lists.nprobe = probes
    cosines, indices = [], []
    for _, part in _blocks(queries, BLOCK):
        found, rows = index.search(part.cpu().numpy(), k)
        # Row −1 means that fewer than k were found: any row with the lowest cosine stands in.
        cosines.append(np.where(rows < 0, np.float32(-1), found))
        indices.append(np.maximum(rows, 0))
        if on_rows is not None:
            on_rows(len(part))
    return np.concatenate(cosines), np.concatenate(indices)


def _create_faiss_index(description: str, width: int) -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtra("faiss-cpu", "mine") from error
    try:
        return faiss.index_factory(width, description, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise InputError(
            f"FAISS has no index {description!r} for vectors of {width} dimensions",
            fix=f"use {EXACT_INDEX}, or a name that index_factory knows, such as IVF1024,Flat",
        ) from error


def _sample_rows(keys: UnitRows, index: Any) -> npt.NDArray[np.float32]:
    """Return evenly spaced keys to train the index with, enough for each of its centroids."""
    n_centroids = max(256, getattr(index, "nlist", 256))
    n_samples = min(FAISS_MAX_SAMPLES, FAISS_SAMPLES_PER_CENTROID * n_centroids)
    step = max(1, len(keys) // n_samples)
    array = keys.array[::step] if keys.rows is None else keys.array[keys.rows[::step]]
    return UnitRows(array)[:].numpy()
