"""Frozen records that several packages of Calque share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch and jaxtyping stay out of `calque --help`
    import numpy as np
    import numpy.typing as npt
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor


class Progress(Protocol):
    """A function that long work calls to report how far it is."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report that `done` of `total` items of a stage are finished; the total may be unknown."""
        ...


def count_progress(
    progress: Progress | None, stage: str, total: int | None
) -> Callable[[int], None]:
    """Return a function that adds to the items done in a stage and reports their number.

    >>> advance = count_progress(print, "embedding", 10)
    >>> advance(4), advance(6)
    embedding 4 10
    embedding 10 10
    (None, None)
    """
    n_done = 0

    def advance(n_items: int) -> None:
        nonlocal n_done
        n_done += n_items
        if progress is not None:
            progress(stage, n_done, total)

    return advance


@dataclass(frozen=True, slots=True)
class SentencePair:
    """One line of bitext: two sentences that translate each other, and where they came from."""

    src: str
    tgt: str
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Sequences stored one after the other, without padding between them.

    `offsets[k]:offsets[k + 1]` are the tokens of sequence k. Trailing empty sequences and
    a final sequence of padding ids may fill a batch up to a fixed shape (see `tokens.ragged`).
    `positions` start at 0 in every sequence unless an objective sets them differently; `n_real`
    is the number of tokens that are not padding. With `row` above 0 no sequence crosses a multiple
    of it, so that attention can work on rows of that many tokens. `has_default_positions` is true
    if positions are known to be 0, 1, 2, … in every sequence that is not padding.
    """

    ids: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    offsets: Int[Tensor, "boundaries"]
    longest: int
    n_real: int
    row: int = 0
    has_default_positions: bool = False

    def to(self, device: torch.device | str) -> TokenBatch:
        """Copy the arrays to a device, without waiting for the copy."""
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            offsets=self.offsets.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class MaskedBatch:
    """A batch with masked tokens, and the original tokens as labels.

    `masked` indexes the flat token axis; a label of −100 marks an entry that only fills the shape.
    """

    tokens: TokenBatch
    masked: Int[Tensor, "masked"]
    labels: Int[Tensor, "masked"]

    def pin_memory(self) -> MaskedBatch:
        """Move the arrays to page-locked memory, from which copies to a GPU do not wait."""
        tokens = replace(
            self.tokens,
            ids=self.tokens.ids.pin_memory(),
            positions=self.tokens.positions.pin_memory(),
            offsets=self.tokens.offsets.pin_memory(),
        )
        return MaskedBatch(tokens, self.masked.pin_memory(), self.labels.pin_memory())

    def to(self, device: torch.device | str) -> MaskedBatch:
        """Copy the arrays to a device, without waiting for the copy."""
        return MaskedBatch(
            self.tokens.to(device),
            self.masked.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True)
class Links:
    """Word links of consecutive sentence pairs, in the order of pair, source and target.

    Link k says that in pair `pairs[k]` word `src[k]` translates word `tgt[k]`, counted from 0.
    """

    pairs: npt.NDArray[np.int64]
    src: npt.NDArray[np.int64]
    tgt: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    n_pairs: int

    def to_lists(self) -> list[list[tuple[int, int]]]:
        """Return the links of every pair as a list of (source, target)."""
        lists: list[list[tuple[int, int]]] = [[] for _ in range(self.n_pairs)]
        for pair, i, j in zip(
            self.pairs.tolist(), self.src.tolist(), self.tgt.tolist(), strict=True
        ):
            lists[pair].append((i, j))
        return lists


@dataclass(frozen=True, slots=True)
class Reliability:
    """Probabilities compared with what is right, in bins of equal width from 0 to 1.

    A bin has `n_items`, whose mean probability is `probability`; the share `right` of them is
    right. Both are 0 in an empty bin.
    """

    n_items: npt.NDArray[np.int64]
    probability: npt.NDArray[np.float64]
    right: npt.NDArray[np.float64]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean of |probability − right| over all items."""
        gaps = abs(self.probability - self.right)
        return float((self.n_items * gaps).sum() / max(1, self.n_items.sum()))


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The result of one objective: the loss to minimize, and metrics to log."""

    loss: Float[Tensor, ""]
    metrics: dict[str, Float[Tensor, ""]]


@dataclass(frozen=True, slots=True)
class PairAttention:
    """Attention of two sentences to each other, by layer, of one head or the mean of all heads.

    `src_to_tgt[l, i, j]` is the share of the attention of source token i that goes to target token
    j at layer l + 1. `uniform` is the share of the other sentence if attention were uniform.
    Special tokens belong to neither sentence.

    `kind` is "self-attention" (both sentences in one sequence) or "cross-attention".
    """

    model: str
    kind: str
    src: tuple[str, ...]
    tgt: tuple[str, ...]
    src_to_tgt: npt.NDArray[np.float32]
    tgt_to_src: npt.NDArray[np.float32]
    uniform: float

    @property
    def shares(self) -> list[float]:
        """Return the share of attention to the other sentence at each layer, over all tokens."""
        given = self.src_to_tgt.sum(axis=(1, 2)) + self.tgt_to_src.sum(axis=(1, 2))
        return [float(share) for share in given / (len(self.src) + len(self.tgt))]
