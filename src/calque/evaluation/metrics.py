"""Metrics of retrieval and correlation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.algorithms.margin import margin_scores
from calque.algorithms.nearest import compute_hubness
from calque.errors import InputError
from calque.sentences.embed import normalize_vectors

if TYPE_CHECKING:
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]
    Floats = npt.NDArray[np.float64]

BLOCK_ROWS = 4096


def find_nearest(
    queries: Vectors, candidates: Vectors, neighbors: int | None = None
) -> npt.NDArray[np.int64]:
    """Return the index of the nearest candidate by cosine for every query; of ties, the first.

    With `neighbors`, cosines are divided by the mean of both sentences' cosines with so many
    nearest neighbors: the ratio margin of Artetxe and Schwenk (2019), as in mining.

    >>> find_nearest(np.float32([[2, 1], [0, 3]]), np.float32([[0, 1], [1, 0], [0, 2]])).tolist()
    [1, 0]
    """
    if len(candidates) == 0:
        raise InputError("there are no candidates to search", fix="pass at least one candidate")
    targets = normalize_vectors(candidates)
    if neighbors is not None:
        sides = torch.from_numpy(normalize_vectors(queries)), torch.from_numpy(targets)
        k = min(neighbors, len(queries), len(targets))
        query_means, target_means = (
            compute_hubness(*pair, k).numpy() for pair in (sides, sides[::-1])
        )
    blocks = []
    for start in range(0, len(queries), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        scores = normalize_vectors(queries[rows]) @ targets.T
        if neighbors is not None:
            scores = margin_scores(scores, (query_means[rows, None] + target_means) / 2)
        blocks.append(scores.argmax(axis=1))
    return np.concatenate([np.zeros(0, dtype=np.int64), *blocks])


def retrieval_hits(
    src: Vectors, tgt: Vectors, neighbors: int | None = None
) -> tuple[Floats, Floats]:
    """Return 1 for every row whose nearest row on the other side has the same number, else 0.

    The first array is for src → tgt, the second for tgt → src; their means are accuracies. For
    `neighbors` see `find_nearest`.

    >>> src, tgt = np.float32([[1, 0], [1, 1]]), np.float32([[1, 0.1], [1, 0.2]])
    >>> [hits.tolist() for hits in retrieval_hits(src, tgt)]
    [[1.0, 1.0], [1.0, 0.0]]
    """
    if len(src) != len(tgt) or len(src) == 0:
        problem = f"{len(src)} source vectors cannot be paired with {len(tgt)} target vectors"
        raise InputError(problem, fix="pass the same number of vectors for both sides")
    gold = np.arange(len(src))
    forward, backward = (
        find_nearest(*pair, neighbors) == gold for pair in ((src, tgt), (tgt, src))
    )
    return forward.astype(np.float64), backward.astype(np.float64)


def pearson_correlation(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Return the linear correlation of two lists of numbers; 0 if one of them is constant.

    >>> round(pearson_correlation([1, 2, 3], [1, 2, 6]), 3)
    0.945
    """
    sides = [np.asarray(side, dtype=np.float64) for side in (x, y)]
    if sides[0].shape != sides[1].shape or sides[0].ndim != 1:
        shapes = " and ".join(str(side.shape) for side in sides)
        problem = f"numbers of shapes {shapes} cannot be paired"
        raise InputError(problem, fix="pass two lists of the same length")
    if any(side.size < 2 or side.min() == side.max() for side in sides):
        return 0.0
    centered = [side - side.mean() for side in sides]
    lengths = [float(np.linalg.norm(side)) for side in centered]
    if not all(lengths):
        return 0.0
    product = (centered[0] / lengths[0]) @ (centered[1] / lengths[1])
    return float(np.clip(product, -1.0, 1.0))


def spearman_correlation(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Return the correlation of ranks; equal numbers have the mean of their ranks.

    >>> round(spearman_correlation([1, 2, 3, 4], [1, 2, 2, 100]), 3)
    0.949
    """
    ranks = []
    for side in (x, y):
        _, inverse, counts = np.unique(np.asarray(side), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    return pearson_correlation(*ranks)


def harmonic_mean(x: float, y: float) -> float:
    """Return 2xy / (x + y), or 0 unless both are positive.

    >>> harmonic_mean(0.6, 0.3), harmonic_mean(-0.1, 0.5)
    (0.4, 0.0)
    """
    return 2 * x * y / (x + y) if min(x, y) > 0 else 0.0
