"""Links found in windows of pairs, brought back to the pairs they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from calque.types import Links

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float
    from torch import Tensor

    from calque.tools.pair_windows import PairWindows, Side

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WindowLinks:
    """Links inside windows, words counted from the beginning of the window."""

    windows: IntArray
    src: IntArray
    tgt: IntArray
    scores: npt.NDArray[np.float32]

    @classmethod
    def of(
        cls,
        rows: IntArray,
        links: Bool[Tensor, "windows src tgt"],
        scores: Float[Tensor, "windows src tgt"],
    ) -> Self:
        """List the links of a batch of windows."""
        places = links.nonzero()
        found = scores[links].float().cpu().numpy()  # in the order of the places
        windows, src, tgt = places.cpu().numpy().T
        return cls(rows[windows], src, tgt, found)


def gather_links(windows: PairWindows, parts: Sequence[WindowLinks], n_pairs: int) -> Links:
    """Put the links of all windows together, each from the window that answers for its words."""
    number, src, tgt, scores = (
        np.concatenate([np.zeros(0, dtype=kind), *(getattr(part, name) for part in parts)])
        for name, kind in (
            ("windows", np.int64),
            ("src", np.int64),
            ("tgt", np.int64),
            ("scores", np.float32),
        )
    )
    src, tgt = src + windows.src.first[number], tgt + windows.tgt.first[number]
    mine = _answers(windows.src, number, src) & _answers(windows.tgt, number, tgt)
    number, src, tgt, scores = number[mine], src[mine], tgt[mine], scores[mine]
    pairs = windows.owners[number]
    src = src - windows.src.pieces.first_words[pairs]
    tgt = tgt - windows.tgt.pieces.first_words[pairs]
    order = np.lexsort((tgt, src, pairs))
    return Links(pairs[order], src[order], tgt[order], scores[order], n_pairs)


def _answers(side: Side, number: IntArray, words: IntArray) -> npt.NDArray[np.bool_]:
    """Tell whether a window answers for a word of this side."""
    answers: npt.NDArray[np.bool_] = (side.own_first[number] <= words) & (
        words < side.own_stop[number]
    )
    return answers
