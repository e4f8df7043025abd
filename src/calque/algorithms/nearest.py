"""Products of matrices in the precision that a device multiplies fastest.

The highest of many scores, row by row or column by column, found through maxima of groups.

The k highest scores of a row lie in the k groups of it with the highest maxima. So a row is read
once for its maxima, which is as fast as memory, and only k groups of it are sorted: the result is
that of `torch.topk`, several times as fast.

Bounds of CSLS scores for groups of words: most words need neither an exact score nor a hubness.

r(y), the mean of a word's k highest similarities, is at least the mean of any k of them. So a few
queries give a floor under r(y), 2·sim(x, y) − floor(y) a ceiling over the score, and groups whose
ceiling is below the best score found need no further look. Bounds hold in low precision too,
with a slack for its rounding.

Nearest words of two spaces by cosine, CSLS or inverted softmax, block by block.

Rows are taken as they are: give unit rows (`normalize_rows`) for cosines. No more than a few
blocks of scores are in memory at a time, whatever the number of words; CPU and GPU.

Nearest words of two spaces in both directions, out of the same products, block by block.

Nearest sentences both ways: the one place that finds neighbors, exactly or through FAISS.

The exact search takes both directions out of the same products, block by block, from arrays that
may lie on disk. On two cores it took less time than FAISS's flat index, which must multiply twice
(`benchmarks/mining.py`); so FAISS is for approximate indexes, of millions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from calque.algorithms.margin import Neighbors
from calque.errors import InputError, MissingExtra

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    Best = tuple[Float[Tensor, "words k"], Int[Tensor, "words k"]]


class Multiplier:
    """Products of some rows with blocks of others, in memory that is used again and again.

    New memory for every block would take a CPU as long as a quarter of the multiplication. Low
    precision must be asked for by its type; see `fast_dtype`.
    """

    def __init__(self, rows: Float[Tensor, "rows hidden"], block: int, dtype: torch.dtype) -> None:
        self.rows, self.dtype = rows.to(dtype), dtype
        self.products = rows.new_empty(len(rows) * block)
        self.coarse = self.rows.new_empty(len(rows) * block) if dtype != rows.dtype else None

    @property
    def rounding(self) -> float:
        """The largest relative error of one rounding."""
        return torch.finfo(self.dtype).eps / 2

    def __call__(self, others: Float[Tensor, "others hidden"]) -> Float[Tensor, "rows others"]:
        """Multiply; the result is there until the next call."""
        shape = (len(self.rows), len(others))
        products = self.products[: shape[0] * shape[1]].view(shape)
        if self.coarse is None:
            return torch.mm(self.rows, others.mT, out=products)
        coarse = self.coarse[: shape[0] * shape[1]].view(shape)
        return products.copy_(torch.mm(self.rows, others.to(self.dtype).mT, out=coarse))


def fast_dtype(tensor: Tensor) -> torch.dtype:
    """Give bfloat16 for float32 on CPUs that multiply it in hardware, otherwise what there is.

    A GPU multiplies float32 fast enough for all that is done with words; other CPUs are slow
    with bfloat16.
    """
    is_cpu, is_single = tensor.device.type == "cpu", tensor.dtype == torch.float32
    return torch.bfloat16 if is_cpu and is_single and _cpu_has_it() else tensor.dtype


@cache
def _cpu_has_it() -> bool:
    # torch knows but does not tell in public; without the answer, float32 is right as well.
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, ask, bool)() for ask in asks)


VECTOR = 32


def topk_in_rows(
    scores: Float[Tensor, "rows columns"], k: int
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Find the k highest scores of each row and their columns, the highest first.

    >>> best_in_rows(torch.tensor([[0.1, 0.9, 0.5]]), 2)[1].tolist()
    [[1, 2]]
    """
    size = _group_size(scores.shape[1], k)
    if size == 1:
        return _unpack(scores.topk(k, dim=1))
    n_groups = scores.shape[1] // size
    whole = scores[:, : n_groups * size]
    if size < VECTOR:  # groups of members far apart, for maxima of neighbors all at once
        maxima = whole.view(-1, size, n_groups).amax(dim=1)
        return _best_of_groups(scores, maxima, k, size, step=n_groups)
    maxima = whole.view(-1, n_groups, size).amax(dim=2)
    return _best_of_groups(scores, maxima, k, size)


def topk_in_columns(
    scores: Float[Tensor, "rows columns"], k: int
) -> tuple[Float[Tensor, "columns k"], Int[Tensor, "columns k"]]:
    """Find the k highest scores of each column and their rows, the highest first."""
    size = _group_size(len(scores), k)
    if size == 1:
        return _unpack(scores.mT.contiguous().topk(k, dim=1))
    n_groups = len(scores) // size
    # Not of the transposed view, whose maxima would be taken against the order in memory.
    maxima = scores[: n_groups * size].view(n_groups, size, -1).amax(dim=1)
    return _best_of_groups(scores.mT, maxima.mT.contiguous(), k, size)


def merge_topk(
    old: tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]] | None,
    new: tuple[Float[Tensor, "rows more"], Int[Tensor, "rows more"]],
    k: int,
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Keep the k highest of two sets of scores, whose places count in one and the same order."""
    if old is None:
        return new
    values, places = (torch.cat(both, dim=1) for both in zip(old, new, strict=True))
    best, order = _unpack(values.topk(min(k, values.shape[1]), dim=1))
    return best, places.gather(1, order)


def _best_of_groups(
    scores: Float[Tensor, "rows columns"],
    maxima: Float[Tensor, "rows groups"],
    k: int,
    size: int,
    step: int = 1,
) -> tuple[Float[Tensor, "rows k"], Int[Tensor, "rows k"]]:
    """Sort the k groups of the highest maxima, whose members are `step` apart, and the rest."""
    groups = maxima.topk(k, dim=1, sorted=False).indices
    first = groups * size if step == 1 else groups
    members = torch.arange(size, device=scores.device) * step
    rest = torch.arange(maxima.shape[1] * size, scores.shape[1], device=scores.device)
    places = (first[:, :, None] + members).flatten(1)
    places = torch.cat([places, rest.expand(len(scores), -1)], dim=1)
    best, order = _unpack(scores.gather(1, places).topk(k, dim=1))
    return best, places.gather(1, order)


def _group_size(n_scores: int, k: int) -> int:
    """Choose a power of two near √(n/k), where maxima and members of k groups are equally many.

    >>> _group_size(20_000, 10), _group_size(60, 10)
    (32, 1)
    """
    size = 1 << round(math.log2(max(1.0, n_scores / k)) / 2)
    return size if size >= 4 and n_scores // size >= k else 1


def _unpack(found: torch.return_types.topk) -> tuple[Tensor, Tensor]:
    return found.values, found.indices


GROUP = 8
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class CslsBounds:
    """Ceilings of groups of keys for some queries; keys g, g + n, g + 2n … are group g of n.

    `similarities` are ceilings of the products alone, if asked for. All, and `floors`, may be
    wrong by the rounding of products: `slack` for each product they are made of.
    """

    scores: Float[Tensor, "queries groups"]
    similarities: Float[Tensor, "queries groups"] | None
    floors: Float[Tensor, "keys"]
    slack: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """Keys that were looked at, their exact products, and what no other key can exceed."""

    keys: Int[Tensor, "queries candidates"]
    similarities: Float[Tensor, "queries candidates"]
    ceiling: Float[Tensor, "queries"]


def bound_csls(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int,
    *,
    floors: Float[Tensor, "keys"] | None = None,
    similarities: bool = True,
) -> CslsBounds:
    """Bound 2·sim(x, y) − r(y) for groups of keys; floors under r may come from other queries."""
    n_groups = -(-len(keys) // GROUP)
    multiply = Multiplier(queries, min(BLOCK, n_groups), fast_dtype(queries))
    ceilings = queries.new_full((1 + similarities, len(queries), n_groups), -torch.inf)
    floor = queries.new_empty(len(keys)) if floors is None else floors
    for start, member in product(range(0, n_groups, BLOCK), range(GROUP)):
        first = member * n_groups + start
        part = keys[first : min(first + BLOCK, (member + 1) * n_groups)]
        if len(part) == 0:
            continue
        products, own = multiply(part), slice(first, first + len(part))
        here = ceilings[:, :, start : start + len(part)]
        if similarities:
            torch.maximum(here[1], products, out=here[1])
        if floors is None:
            floor[own] = _mean_of_many(products, k)
        torch.sub(products, floor[own], alpha=0.5, out=products)
        torch.maximum(here[0], products, out=here[0])
    slack = _find_slack(queries, keys, multiply.rounding)
    return CslsBounds(2 * ceilings[0], ceilings[1] if similarities else None, floor, slack)


def look_at(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    ceilings: Float[Tensor, "queries groups"],
    n_groups: int,
) -> Candidates:
    """Find the exact products with all keys of the groups of the highest ceilings."""
    total = ceilings.shape[1]
    ceiling = ceilings.new_full((len(queries),), -torch.inf)
    if n_groups < total:
        values, groups = topk_in_rows(ceilings, n_groups + 1)
        ceiling, groups = values[:, -1], groups[:, :-1]
    else:
        groups = torch.arange(total, device=ceilings.device).expand(len(queries), -1)
    steps = torch.arange(GROUP, device=groups.device) * total
    members = (groups[:, :, None] + steps).flatten(1)
    exists = members < len(keys)  # the last group members may not
    products = dot_products(queries, keys, torch.where(exists, members, 0))
    return Candidates(members, products.masked_fill_(~exists, -torch.inf), ceiling)


def dot_products(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    rows: Int[Tensor, "queries candidates"],
) -> Float[Tensor, "queries candidates"]:
    """Multiply each query with its own keys."""
    size = max(1, (1 << 22) // max(1, rows.shape[1] * queries.shape[1]))
    parts = [
        torch.bmm(keys[own], mine[:, :, None])[:, :, 0]
        for mine, own in zip(torch.split(queries, size), torch.split(rows, size), strict=True)
    ]
    return torch.cat(parts) if parts else queries.new_empty(rows.shape)


def _mean_of_many(products: Float[Tensor, "queries keys"], k: int) -> Float[Tensor, "keys"]:
    """Give the mean of k products of each key that are about its highest: maxima of k groups."""
    size = len(products) // k
    means: Tensor = products[: size * k].view(size, k, -1).amax(dim=0).mean(dim=0)
    return means


def _find_slack(
    queries: Float[Tensor, "queries hidden"], keys: Float[Tensor, "keys hidden"], rounding: float
) -> float:
    """Bound the error of a product: one rounding of it, and those of its terms.

    The terms' are independent, so that they add up like their squares, Σ x²y² ≤ |x|₄² |y|₄²: eight
    standard deviations are past what all words of all languages would ever meet.
    """

    def norms(p: int) -> float:
        return math.prod(
            float(torch.linalg.vector_norm(part, p, dim=1).amax()) for part in (queries, keys)
        )

    return rounding * (norms(2) + 8 * math.sqrt(2 / 3) * norms(4))


BLOCK_SIMILARITY = 4096
CSLS_BLOCK = 2048


def normalize_rows(matrix: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
    """Scale rows to length one; rows of zeros stay.

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
    block: int = BLOCK_SIMILARITY,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """Find each query's k keys of highest product, the highest first: scores and rows of `keys`.

    >>> words = normalize_rows(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    >>> nearest(words[:1], words, 2)[1].tolist()
    [[0, 1]]
    """
    return _nearest(queries, keys, k, None, block)


def compute_hubness(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int = 10,
    *,
    block: int = BLOCK_SIMILARITY,
) -> Float[Tensor, "queries"]:
    """Give each query's mean score with its k nearest keys: how much of a hub it is, CSLS's r."""
    return nearest_neighbors(queries, keys, k, block=block)[0].mean(dim=1)


def csls_scores(similarity: Float[Tensor, "src tgt"], k: int = 10) -> Float[Tensor, "src tgt"]:
    """Penalize hubs: 2·sim(x, y) − r(x) − r(y) (Conneau et al., 2018), all pairs at once.

    r is a word's mean similarity to its k nearest words of the other language.

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
    block: int = BLOCK_SIMILARITY,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """Find each query's k keys of highest 2·sim(x, y) − r(x) − r(y), the highest first.

    r(y) is the mean of a key's `k_neighbors` highest products with `sources`: all words of the
    queries' language, as in MUSE and VecMap. Without them the queries stand for their language,
    which is far less work, as most keys need no r(y) then, and corrects less. r(x) is that of a
    query with all keys; a query's order of keys does not depend on it: `order_only` leaves it out.
    """
    others = queries if sources is None else sources
    _check_k(k, len(keys))
    _check_k(k_neighbors, min(len(keys), len(others)))
    if sources is None:
        return _csls_among_queries(queries, keys, k_neighbors, k, order_only)
    hubness = compute_hubness(keys, sources, k_neighbors, block=block)
    scores, places = _nearest(2 * queries, keys, k, hubness, block)
    if not order_only:
        scores -= compute_hubness(queries, keys, k_neighbors, block=block)[:, None]
    return scores, places


def inverted_softmax_nearest(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int = 1,
    *,
    sources: Float[Tensor, "sources hidden"] | None = None,
    temperature: float = 1 / 30,
    block: int = BLOCK_SIMILARITY,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """Find the k keys that most likely choose the query: log softmax over sources (Smith et al.).

    The probability that key y, asked for one of `sources`, gives x: e^(xy/t) / Σ_x' e^(x'y/t). By
    default the sources are the queries. Smith et al., 2017, learn β = 1/t; it came near 30.
    """
    scaled = queries / temperature
    others = scaled if sources is None else sources / temperature
    totals = [
        torch.stack([rows.logsumexp(dim=1) for rows in parts]).logsumexp(dim=0)
        for parts in _score_rows(keys, others, block)
    ]
    return _nearest(scaled, keys, k, torch.cat(totals), block)


def _csls_among_queries(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k_neighbors: int,
    k: int,
    order_only: bool,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    floors, found = None, []
    # A last block of a few would have too few neighbors to tell hubs.
    n_blocks = max(1, round(len(queries) / CSLS_BLOCK))
    for rows in queries.tensor_split(n_blocks):
        bounds = bound_csls(rows, keys, k_neighbors, floors=floors, similarities=not order_only)
        floors = bounds.floors
        found.append(_csls_of_block(rows, keys, queries, bounds, k_neighbors, k))
    scores, places = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scores, places


def _csls_of_block(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    sources: Float[Tensor, "sources hidden"],
    bounds: CslsBounds,
    k_neighbors: int,
    k: int,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """Look at ever more keys until none of the others can be better."""
    scores = queries.new_empty(len(queries), k)
    places = torch.empty(scores.shape, dtype=torch.int64, device=queries.device)
    rows = torch.arange(len(queries), device=queries.device)
    n_seen = 2 * k + 2
    while len(rows):
        seen = look_at(queries[rows], keys, bounds.scores[rows], n_seen)
        weighed = _weigh(seen, keys, sources, bounds, k_neighbors, k, 2 * n_seen)
        best, own, ceiling = weighed
        scores[rows], places[rows] = best, own
        rows = rows[best[:, -1] < ceiling]
        n_seen *= 4
    if bounds.similarities is not None:
        scores -= _query_hubness(queries, keys, bounds.similarities, bounds.slack, k_neighbors)
    return scores, places


def _weigh(
    seen: Candidates,
    keys: Float[Tensor, "keys hidden"],
    sources: Float[Tensor, "sources hidden"],
    bounds: CslsBounds,
    k_neighbors: int,
    k: int,
    n_weighed: int,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"], Float[Tensor, "queries"]]:
    """Score the most promising candidates exactly; say what all others cannot exceed."""
    members = seen.keys.clamp(max=len(keys) - 1)
    upper = 2 * seen.similarities - (bounds.floors[members] - bounds.slack)
    ceiling = seen.ceiling + 3 * bounds.slack
    if n_weighed < upper.shape[1]:
        values, order = topk_in_rows(upper, n_weighed + 1)
        ceiling, order = torch.maximum(ceiling, values[:, -1]), order[:, :-1]
        members, similarities = members.gather(1, order), seen.similarities.gather(1, order)
    else:
        similarities = seen.similarities
    distinct, place = torch.unique(members, return_inverse=True)
    hubness = compute_hubness(keys[distinct], sources, k_neighbors)
    best, order = topk_in_rows(2 * similarities - hubness[place], k)
    return best, members.gather(1, order), ceiling


def _query_hubness(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    ceilings: Float[Tensor, "queries groups"],
    slack: float,
    k: int,
) -> Float[Tensor, "queries 1"]:
    """Give each query's mean of its k highest products, from groups that may hold them."""
    hubness = queries.new_empty(len(queries), 1)
    rows, n_seen = torch.arange(len(queries), device=queries.device), k + 6
    while len(rows):
        seen = look_at(queries[rows], keys, ceilings[rows], n_seen)
        best = topk_in_rows(seen.similarities, k)[0]
        hubness[rows] = best.mean(dim=1, keepdim=True)
        rows = rows[best[:, -1] < seen.ceiling + slack]
        n_seen *= 4
    return hubness


def _score_rows(
    queries: Float[Tensor, "queries hidden"], keys: Float[Tensor, "keys hidden"], block: int
) -> Iterator[Iterator[Float[Tensor, "rows columns"]]]:
    """Give the products of a block of queries with one block of keys after the other."""
    for rows in torch.split(queries, block):
        yield (rows @ columns.mT for columns in torch.split(keys, block))


def _nearest(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int,
    penalties: Float[Tensor, "keys"] | None,
    block: int,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    _check_k(k, len(keys))
    found = []
    for parts in _score_rows(queries, keys, block):
        best = None
        for number, scores in enumerate(parts):
            start = number * block
            if penalties is not None:
                scores -= penalties[start : start + block]
            values, places = topk_in_rows(scores, min(k, scores.shape[1]))
            best = merge_topk(best, (values, places + start), k)
        if best is not None:
            found.append(best)
    if not found:
        shape = (0, k)
        return queries.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=keys.device)
    scores, places = (torch.cat(parts) for parts in zip(*found, strict=True))
    return scores, places


def _check_k(k: int, n_words: int) -> None:
    if not 1 <= k <= n_words:
        raise InputError(f"k={k}, of {n_words:,} words", fix=f"choose k from 1 to {n_words:,}")


BLOCK_BOTH_WAYS = 4096


class Rows(Protocol):
    """Vectors that give some of their rows when asked: a tensor, or an array on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Tensor: ...


def nearest_neighbors_both_ways(
    src: Float[Tensor, "src hidden"] | Rows,
    tgt: Float[Tensor, "tgt hidden"] | Rows,
    k_src: int,
    k_tgt: int = 0,
    *,
    scale: float = 1.0,
    src_penalties: Float[Tensor, "src"] | None = None,
    tgt_penalties: Float[Tensor, "tgt"] | None = None,
    block: int = BLOCK_BOTH_WAYS,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[Best, Best]:
    """Find each source's `k_src` best targets and each target's `k_tgt` best sources.

    A source chooses by scale·xy − penalty(y), a target by scale·xy − penalty(x): a word that is
    near to everything can be made less attractive. `on_rows` hears of sources that are done.

    >>> src, tgt = torch.eye(2), torch.tensor([[1.0, 0.5], [0.8, 0.0]])
    >>> (_, forward), (_, backward) = nearest_both_ways(src, tgt, 1, 1)
    >>> forward.tolist(), backward.tolist()
    ([[0], [0]], [[0], [0]])
    """
    for k, n_words in ((k_src, len(tgt)), (k_tgt, len(src))):
        if k > n_words:
            raise InputError(f"k={k}, of {n_words:,} words", fix=f"choose k from 1 to {n_words:,}")
    columns: list[Best | None] = [None] * (-(-len(tgt) // block))
    rows: list[Best] = []
    for start, part in _blocks(src, block):
        best: Best | None = None
        for number, (first, other) in enumerate(_blocks(tgt, block)):
            scores = (scale * part) @ other.mT
            own = _subtract(scores, tgt_penalties, first, dim=1)
            values, places = topk_in_rows(own, min(k_src, len(other)))
            best = merge_topk(best, (values, places + first), k_src)
            if k_tgt:
                own = _subtract(scores, src_penalties, start, dim=0)
                values, places = topk_in_columns(own, min(k_tgt, len(part)))
                columns[number] = merge_topk(columns[number], (values, places + start), k_tgt)
        if best is not None:
            rows.append(best)
        if on_rows is not None:
            on_rows(len(part))
    return _join(rows, src, k_src), _join([best for best in columns if best], tgt, k_tgt)


def log_sum_exp_both_ways(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    scale: float = 1.0,
    *,
    block: int = BLOCK_BOTH_WAYS,
    on_rows: Callable[[int], None] | None = None,
) -> tuple[Float[Tensor, "src"], Float[Tensor, "tgt"]]:
    """Give log Σ e^(scale·xy): of each source over all targets, and of each target over sources."""
    rows, columns = src.new_full((len(src),), -torch.inf), tgt.new_full((len(tgt),), -torch.inf)
    for start, part in _blocks(src, block):
        own = rows[start : start + len(part)]
        for first, other in _blocks(tgt, block):
            scores = (scale * part) @ other.mT
            theirs = columns[first : first + len(other)]
            torch.logaddexp(own, scores.logsumexp(dim=1), out=own)
            torch.logaddexp(theirs, scores.logsumexp(dim=0), out=theirs)
        if on_rows is not None:
            on_rows(len(part))
    return rows, columns


def _blocks(rows: Rows, size: int) -> Iterator[tuple[int, Tensor]]:
    edges = [*range(0, len(rows), size), len(rows)]
    return ((start, rows[start:end]) for start, end in pairwise(edges))


def _subtract(
    scores: Float[Tensor, "rows columns"], penalties: Tensor | None, start: int, dim: int
) -> Float[Tensor, "rows columns"]:
    if penalties is None:
        return scores
    own = penalties[start : start + scores.shape[dim]]
    return scores - (own if dim == 1 else own[:, None])


def _join(parts: list[Best], words: Rows, k: int) -> Best:
    if not parts:
        shape, none = (len(words), k), words[:0]
        return none.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=none.device)
    scores, places = (torch.cat(both) for both in zip(*parts, strict=True))
    return scores, places


EXACT_INDEX = "exact"
# Products of two such blocks take 64 MiB; on a GPU larger ones keep it busy.
BLOCK_NEIGHBORS = {"cpu": 4096, "cuda": 16384}
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
    index: str = EXACT_INDEX,
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
    if index != EXACT_INDEX:
        forward = _search(src, tgt, k, index, probes, on_rows)
        backward = _search(tgt, src, k, index, probes, on_rows)
        return Neighbors(*forward, *backward)
    share = 1 + len(tgt) / len(src)
    tell = None if on_rows is None else lambda n_rows: on_rows(round(n_rows * share))
    block = BLOCK_NEIGHBORS.get(src.device.type, BLOCK_NEIGHBORS["cpu"])
    found = nearest_neighbors_both_ways(src, tgt, k, k, block=block, on_rows=tell)
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


def check_faiss_index(description: str, width: int) -> None:
    """Refuse an index that cannot be made for vectors of a width, or for want of FAISS."""
    if description != EXACT_INDEX:
        _make(description, width)


def _make(description: str, width: int) -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtra("faiss-cpu", "mine") from error
    try:
        return faiss.index_factory(width, description, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        fix = f"try {EXACT_INDEX}, or what FAISS's index_factory knows, such as IVF1024,Flat"
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
    size = BLOCK_NEIGHBORS["cpu"]
    return (rows[start : start + size].cpu().numpy() for start in range(0, len(rows), size))
