"""Numbers out of predictions; nothing here formats or prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.sentences.embed import normalize_vectors

if TYPE_CHECKING:
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]

BLOCK_ROWS = 4096


def find_nearest(queries: Vectors, candidates: Vectors) -> npt.NDArray[np.int64]:
    """Find for every query its nearest candidate by cosine; of equals, the first.

    >>> find_nearest(np.float32([[2, 1], [0, 3]]), np.float32([[0, 1], [1, 0], [0, 2]])).tolist()
    [1, 0]
    """
    if len(candidates) == 0:
        raise InputError("there is nothing to search among", fix="give at least one candidate")
    targets = normalize_vectors(candidates).T
    blocks = [
        (normalize_vectors(queries[start : start + BLOCK_ROWS]) @ targets).argmax(axis=1)
        for start in range(0, len(queries), BLOCK_ROWS)
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *blocks])


def retrieval_accuracy(src: Vectors, tgt: Vectors) -> tuple[float, float]:
    """Return how often row k's nearest row on the other side is k: src → tgt, tgt → src.

    >>> retrieval_accuracy(np.float32([[1, 0], [1, 1]]), np.float32([[1, 0.1], [1, 0.2]]))
    (1.0, 0.5)
    """
    if len(src) != len(tgt) or len(src) == 0:
        raise InputError(
            f"{len(src)} vectors cannot be paired with {len(tgt)}", fix="give pairs, row by row"
        )
    gold = np.arange(len(src))
    forward, backward = find_nearest(src, tgt) == gold, find_nearest(tgt, src) == gold
    return float(forward.mean()), float(backward.mean())


def pearson_correlation(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Give the linear correlation of two sets of numbers; 0 where one of them is constant.

    >>> round(pearson_correlation([1, 2, 3], [1, 2, 6]), 3)
    0.945
    """
    sides = [np.asarray(side, dtype=np.float64) for side in (x, y)]
    if sides[0].shape != sides[1].shape or sides[0].ndim != 1:
        shapes = " and ".join(str(side.shape) for side in sides)
        raise InputError(f"numbers of shapes {shapes} cannot be paired", fix="give pairs")
    if any(side.size < 2 or side.min() == side.max() for side in sides):
        return 0.0
    centered = [side - side.mean() for side in sides]
    lengths = [float(np.linalg.norm(side)) for side in centered]
    if not all(lengths):
        return 0.0
    product = (centered[0] / lengths[0]) @ (centered[1] / lengths[1])
    return float(np.clip(product, -1.0, 1.0))


def spearman_correlation(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Give the correlation of ranks, where equal numbers share the mean of theirs.

    >>> round(spearman_correlation([1, 2, 3, 4], [1, 2, 2, 100]), 3)
    0.949
    """
    return pearson_correlation(*(_rank(np.asarray(side)) for side in (x, y)))


def harmonic_mean(x: float, y: float) -> float:
    """Give 2xy / (x + y), and 0 unless both are above it.

    >>> harmonic_mean(0.6, 0.3), harmonic_mean(-0.1, 0.5)
    (0.4, 0.0)
    """
    return 2 * x * y / (x + y) if min(x, y) > 0 else 0.0


def _rank(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks
