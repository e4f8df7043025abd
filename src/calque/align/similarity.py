"""Nearest words of two spaces by cosine, CSLS or inverted softmax, block by block.

Rows are taken as they are: give unit rows (`normalize_rows`) for cosines. No more than a few
blocks of scores are in memory at a time, whatever the number of words; CPU and GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from calque.align.csls_bounds import Candidates, CslsBounds, bound_csls, look_at
from calque.align.top_scores import best_in_columns, best_in_rows, merge_best
from calque.types import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float, Int
    from torch import Tensor

BLOCK = 4096
CSLS_BLOCK = 2048


def normalize_rows(matrix: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
    """Scale rows to length one; rows of zeros stay.

    >>> normalize_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    lengths = torch.linalg.vector_norm(matrix, dim=1, keepdim=True)
    return matrix / torch.where(lengths > 0, lengths, 1.0)


def nearest(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int,
    *,
    block: int = BLOCK,
) -> tuple[Float[Tensor, "queries k"], Int[Tensor, "queries k"]]:
    """Find each query's k keys of highest product, the highest first: scores and rows of `keys`.

    >>> words = normalize_rows(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]))
    >>> nearest(words[:1], words, 2)[1].tolist()
    [[0, 1]]
    """
    return _nearest(queries, keys, k, None, block)


def mean_of_nearest(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int = 10,
    *,
    block: int = BLOCK,
) -> Float[Tensor, "queries"]:
    """Give each query's mean score with its k nearest keys: how much of a hub it is, CSLS's r."""
    return nearest(queries, keys, k, block=block)[0].mean(dim=1)


def csls_scores(similarity: Float[Tensor, "src tgt"], k: int = 10) -> Float[Tensor, "src tgt"]:
    """Penalize hubs: 2·sim(x, y) − r(x) − r(y) (Conneau et al., 2018), all pairs at once.

    r is a word's mean similarity to its k nearest words of the other language.

    >>> csls_scores(torch.eye(2), k=1).tolist()
    [[0.0, -2.0], [-2.0, 0.0]]
    """
    _check_k(k, min(similarity.shape))
    src_hubness = best_in_rows(similarity, k)[0].mean(dim=1)
    tgt_hubness = best_in_columns(similarity, k)[0].mean(dim=1)
    return 2 * similarity - src_hubness[:, None] - tgt_hubness


def csls_nearest(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k_neighbors: int = 10,
    k: int = 1,
    *,
    sources: Float[Tensor, "sources hidden"] | None = None,
    order_only: bool = False,
    block: int = BLOCK,
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
    hubness = mean_of_nearest(keys, sources, k_neighbors, block=block)
    scores, places = _nearest(2 * queries, keys, k, hubness, block)
    if not order_only:
        scores -= mean_of_nearest(queries, keys, k_neighbors, block=block)[:, None]
    return scores, places


def inverted_softmax_nearest(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int = 1,
    *,
    sources: Float[Tensor, "sources hidden"] | None = None,
    temperature: float = 1 / 30,
    block: int = BLOCK,
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
        values, order = best_in_rows(upper, n_weighed + 1)
        ceiling, order = torch.maximum(ceiling, values[:, -1]), order[:, :-1]
        members, similarities = members.gather(1, order), seen.similarities.gather(1, order)
    else:
        similarities = seen.similarities
    distinct, place = torch.unique(members, return_inverse=True)
    hubness = mean_of_nearest(keys[distinct], sources, k_neighbors)
    best, order = best_in_rows(2 * similarities - hubness[place], k)
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
        best = best_in_rows(seen.similarities, k)[0]
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
            values, places = best_in_rows(scores, min(k, scores.shape[1]))
            best = merge_best(best, (values, places + start), k)
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
