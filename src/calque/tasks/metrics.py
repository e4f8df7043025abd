"""Numbers out of predictions; nothing here formats or prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from calque.tools.embedder import normalize_rows
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]

BLOCK_ROWS = 4096


def find_nearest(queries: Vectors, candidates: Vectors) -> npt.NDArray[np.int64]:
    """Find for every query its nearest candidate by cosine; of equals, the first.

    >>> find_nearest(np.float32([[2, 1], [0, 3]]), np.float32([[0, 1], [1, 0], [0, 2]])).tolist()
    [1, 0]
    """
    if len(candidates) == 0:
        raise InputError("there is nothing to search among", fix="give at least one candidate")
    targets = normalize_rows(candidates).T
    blocks = [
        (normalize_rows(queries[start : start + BLOCK_ROWS]) @ targets).argmax(axis=1)
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
