"""Batches of sentence pairs for word alignment: masked, whole, and which token is on which side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from calque.objectives.masked_lm import IGNORED, join_sides, mark_sides, mask_batch, swap_sides
from calque.objectives.self_labels import LEFT, NEITHER, RIGHT
from calque.text.batching import BatchShape, Ragged, pack, ranges
from calque.types import MaskedBatch, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.objectives.base import Marks
    from calque.text.masking import MaskingRules

    IntArray = npt.NDArray[np.int64]

N_SIDES = 3  # neither counts as one


@dataclass(frozen=True, slots=True)
class AlignmentBatch:
    """Masked pairs, the pairs to label without masks, and where the tokens of both sides lie.

    The arrays are those of the clean tokens. `flat` are their places among the masked tokens, or
    None where all pairs are labelled. `edges` are the ends of a token's place in its sentence,
    as shares of the sentence; `chance` is a random number.
    """

    hidden: MaskedBatch
    clean: TokenBatch
    flat: Int[Tensor, "clean"] | None
    sides: Int[Tensor, "clean"]
    edges: Float[Tensor, "clean 2"]
    is_hidden: Bool[Tensor, "clean"]
    chance: Float[Tensor, "clean"]
    links: Bool[Tensor, "blocks width width"] | None = None

    @property
    def tokens(self) -> TokenBatch:
        """Give the masked pairs."""
        return self.hidden.tokens

    def pin_memory(self) -> AlignmentBatch:
        """Move the arrays to page-locked memory, from which copies to a GPU do not wait."""
        return self._with_each(self.hidden.pin_memory(), lambda array: array.pin_memory())

    def to(self, device: torch.device | str) -> AlignmentBatch:
        """Copy the arrays to a device, without waiting for the copy."""
        return self._with_each(
            self.hidden.to(device), lambda array: array.to(device, non_blocking=True)
        )

    def _with_each(self, hidden: MaskedBatch, act: Callable[[Tensor], Tensor]) -> AlignmentBatch:
        clean = replace(self.clean, **_map_arrays(self.clean, act))
        return replace(self, hidden=hidden, clean=clean, **_map_arrays(self, act))


def _map_arrays(record: Any, act: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: act(value) for name, value in values.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class AlignmentCollator:
    """Builds batches: TLM's pairs, what stood there before masking, and what labelling needs."""

    marks: Marks
    rules: MaskingRules
    shape: BatchShape | None
    reset: bool
    label_share: float

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> AlignmentBatch:
        """Build one batch."""
        left, right = swap_sides(sides[0], sides[1], generator)
        tokens, token_sides = self._pack(left, right)
        hidden = mask_batch(tokens, self.rules, generator, self.shape)
        is_hidden = torch.zeros(len(tokens.ids), dtype=torch.bool)
        is_hidden[hidden.masked[hidden.labels != IGNORED]] = True
        edges = torch.from_numpy(find_edges(token_sides.numpy()))
        clean, flat = choose_pairs(tokens, self.label_share, generator)
        if flat is not None:
            token_sides, edges, is_hidden = token_sides[flat], edges[flat], is_hidden[flat]
        chance = torch.rand(len(clean.ids), generator=generator)
        return AlignmentBatch(hidden, clean, flat, token_sides, edges, is_hidden, chance)

    def _pack(self, left: Ragged, right: Ragged) -> tuple[TokenBatch, Int[Tensor, "tokens"]]:
        """Join and pack the pairs; a token's side travels along with its position."""
        marked = mark_sides(left, right, self.marks)
        pairs, positions = join_sides(*marked, reset=self.reset)
        both = positions * N_SIDES + flag_sides(left, right, self.marks)
        tokens = pack(pairs, positions=both, shape=self.shape, pad_id=self.marks.pad)
        flat_sides = (tokens.positions % N_SIDES).to(torch.int8)
        return replace(tokens, positions=tokens.positions // N_SIDES), flat_sides


def flag_sides(left: Ragged, right: Ragged, marks: Marks) -> IntArray:
    """Tell the side of every token of joined pairs, marks on neither."""
    flags = Ragged(np.full(len(left.ids), LEFT), left.lengths)
    others = Ragged(np.full(len(right.ids), RIGHT), right.lengths)
    neither = replace(marks, first=NEITHER, last=NEITHER)
    return join_sides(*mark_sides(flags, others, neither), reset=True)[0].ids


def find_edges(sides: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    """Give the ends of every token's place in its sentence, as shares of the sentence.

    Sentences are what lies between marks.

    >>> find_edges(np.array([0, 1, 0, 2, 2, 0], dtype=np.int8))[[1, 3, 4]].tolist()
    [[0.0, 1.0], [0.0, 0.5], [0.5, 1.0]]
    """
    steps = np.diff(sides != NEITHER, prepend=False, append=False).nonzero()[0]
    starts, stops = steps[::2], steps[1::2]
    lengths = stops - starts
    index, n_tokens = ranges(np.zeros_like(lengths), lengths), np.repeat(lengths, lengths)
    edges = np.zeros((len(sides), 2), dtype=np.float32)
    edges[ranges(starts, lengths)] = np.stack([index, index + 1], axis=1) / n_tokens[:, None]
    return edges


def choose_pairs(
    tokens: TokenBatch, share: float, generator: torch.Generator
) -> tuple[TokenBatch, Int[Tensor, "chosen"] | None]:
    """Choose a share of the pairs, or of the rows that hold them; give their flat places too."""
    if share == 1:
        return tokens, None
    bounds = tokens.offsets.numpy().astype(np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    block_of = starts // tokens.row if tokens.row else np.arange(len(starts))
    n_blocks = int(block_of[-1]) + 1
    n_chosen = max(1, round(share * n_blocks))
    chosen = torch.randperm(n_blocks, generator=generator)[:n_chosen].numpy()
    kept = np.isin(block_of, chosen)
    starts, lengths = starts[kept], lengths[kept]
    offsets = np.full(len(bounds) if tokens.row else len(starts) + 1, lengths.sum())
    offsets[: len(starts)] = np.cumsum(lengths) - lengths
    flat = torch.from_numpy(ranges(starts, lengths))
    longest = tokens.row or int(lengths.max())
    clean = replace(
        tokens,
        ids=tokens.ids[flat],
        positions=tokens.positions[flat],
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        longest=longest,
        n_real=len(flat),
    )
    return clean, flat
