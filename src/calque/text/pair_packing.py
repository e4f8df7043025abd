"""Pairs of sequences laid out so that each can read the other: side by side, in one row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from calque.text.batching import BatchShape, Ragged, interleave, pack, ranges
from calque.types import TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Bool, Int
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairedTokens:
    """A batch whose sequences 2k and 2k + 1 are a pair, left and right.

    `order` lists its tokens with left and right exchanged, and `read_offsets` bound the sequences
    in that order: sequence j there is the partner of sequence j here. Padding is its own partner.
    """

    tokens: TokenBatch
    order: Int[Tensor, "tokens"]
    read_offsets: Int[Tensor, "boundaries"]
    is_right: Bool[Tensor, "tokens"]

    @property
    def read(self) -> TokenBatch:
        """Describe the exchanged order as a batch; its ids are not to be used."""
        return replace(self.tokens, offsets=self.read_offsets)


def pack_pairs(
    left: Ragged, right: Ragged, *, shape: BatchShape | None = None, pad_id: int
) -> PairedTokens:
    """Lay pairs end to end, each of their sequences counting positions from 0.

    >>> pairs = pack_pairs(Ragged.of([[5, 6], [7]]), Ragged.of([[8], [9, 4]]), pad_id=1)
    >>> pairs.tokens.ids.tolist(), pairs.tokens.offsets.tolist()
    ([5, 6, 8, 7, 9, 4], [0, 2, 3, 4, 6])
    >>> pairs.tokens.ids[pairs.order].tolist(), pairs.read_offsets.tolist()
    ([8, 5, 6, 9, 4, 7], [0, 1, 3, 5, 6])
    """
    import torch  # here, for those who read and write text without it

    pairs, n_left = interleave(left, right)
    lengths = np.stack([n_left, pairs.lengths - n_left], axis=1).ravel()
    sides = np.repeat(np.arange(len(lengths)) % 2, lengths)
    # A token's side travels along with its position; padding is on the left.
    both = 2 * ranges(np.zeros_like(lengths), lengths) + sides
    laid = pack(pairs, positions=both, shape=shape, pad_id=pad_id)
    is_right = laid.positions % 2 == 1
    bounds = laid.offsets.numpy().astype(np.int64)
    starts, ends = bounds[:-1], bounds[1:]
    counts = np.concatenate([[0], np.cumsum(is_right.numpy())])
    n_right = counts[ends] - counts[starts]
    n_left = ends - starts - n_right
    order = ranges(_weave(ends - n_right, starts), _weave(n_right, n_left))
    offsets = np.append(_weave(starts, ends - n_right), bounds[-1])
    read = np.append(_weave(starts, np.where(n_right > 0, starts + n_right, ends)), bounds[-1])
    tokens = replace(
        laid,
        positions=laid.positions // 2,
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        longest=shape.row if shape else int(lengths.max(initial=1)),
    )
    read_offsets = torch.from_numpy(read.astype(np.int32))
    return PairedTokens(tokens, torch.from_numpy(order), read_offsets, is_right)


def _weave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Take from two arrays in turns."""
    return np.stack([first, second], axis=1).ravel()
