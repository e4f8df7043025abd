"""Windows of sentence pairs as batches for the encoder: both sides in one sequence, or apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch

from calque.objectives.base import Marks
from calque.objectives.masked_lm import join_sides, mark_sides
from calque.text.batching import Ragged, add_marks, interleave, pack, ranges
from calque.tools.pair_windows import PairWindows, Room
from calque.types import TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Int
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PairLayout:
    """How pairs are put before the model, and how much of them it can read."""

    marks: Marks
    joint: bool
    reset: bool
    room: Room

    @classmethod
    def of(
        cls,
        encoder: Encoder,
        encode: Literal["joint", "separate"],
        positions: Literal["reset", "continue"],
    ) -> Self:
        """Read the marks off the tokenizer; joint pairs that count on share the positions."""
        marks, most = Marks.of(encoder.tokenizer), encoder.max_tokens
        joint, reset = encode == "joint", positions == "reset"
        if joint and not reset:
            return cls(
                marks, joint, reset, Room(most - 2 - marks.between, most - 2 - marks.between)
            )
        return cls(marks, joint, reset, Room(most - 2, 2 * (most - 2)))

    def n_tokens(self, windows: PairWindows) -> IntArray:
        """Count the tokens of every window, marks included; of the longer side if apart."""
        n_src, n_tgt = windows.src.n_pieces(), windows.tgt.n_pieces()
        return n_src + n_tgt + 2 + self.marks.between if self.joint else n_src + n_tgt + 4


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Some windows, packed: where the subwords of both sides lie, and the slots of their words.

    Word k of window n has slot n · width + k on its side; `src_words` and `tgt_words` count.
    """

    tokens: TokenBatch
    src_places: Int[Tensor, "src_pieces"]
    tgt_places: Int[Tensor, "tgt_pieces"]
    src_slots: Int[Tensor, "src_pieces"]
    tgt_slots: Int[Tensor, "tgt_pieces"]
    n_windows: int
    src_width: int
    tgt_width: int

    def to(self, device: torch.device) -> PairBatch:
        """Copy the arrays to a device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            src_places=self.src_places.to(device, non_blocking=True),
            tgt_places=self.tgt_places.to(device, non_blocking=True),
            src_slots=self.src_slots.to(device, non_blocking=True),
            tgt_slots=self.tgt_slots.to(device, non_blocking=True),
        )


def build_pair_batch(windows: PairWindows, rows: IntArray, layout: PairLayout) -> PairBatch:
    """Lay some windows end to end."""
    src_width = int(windows.src.n_words[rows].max())
    tgt_width = int(windows.tgt.n_words[rows].max())
    src, src_slots = windows.src.gather(rows, src_width)
    tgt, tgt_slots = windows.tgt.gather(rows, tgt_width)
    tokens, src_places, tgt_places = (_join if layout.joint else _set_apart)(src, tgt, layout)
    return PairBatch(
        tokens,
        torch.from_numpy(src_places),
        torch.from_numpy(tgt_places),
        torch.from_numpy(src_slots),
        torch.from_numpy(tgt_slots),
        len(rows),
        src_width,
        tgt_width,
    )


def _join(src: Ragged, tgt: Ragged, layout: PairLayout) -> tuple[TokenBatch, IntArray, IntArray]:
    """Make one sequence of each pair."""
    left, right = mark_sides(src, tgt, layout.marks)
    pairs, positions = join_sides(left, right, reset=layout.reset)
    starts = np.cumsum(pairs.lengths) - pairs.lengths
    n_opening = right.lengths - tgt.lengths - 1
    return (
        pack(pairs, positions=positions, pad_id=layout.marks.pad),
        ranges(starts + 1, src.lengths),
        ranges(starts + left.lengths + n_opening, tgt.lengths),
    )


def _set_apart(
    src: Ragged, tgt: Ragged, layout: PairLayout
) -> tuple[TokenBatch, IntArray, IntArray]:
    """Make two sequences of each pair, one after the other."""
    marks = layout.marks
    left, right = (add_marks(side, marks.first, marks.last) for side in (src, tgt))
    both, n_left = interleave(left, right)
    lengths = np.stack([left.lengths, right.lengths], axis=1).ravel()
    starts = np.cumsum(both.lengths) - both.lengths
    return (
        pack(Ragged(both.ids, lengths), pad_id=marks.pad),
        ranges(starts + 1, src.lengths),
        ranges(starts + n_left + 1, tgt.lengths),
    )
