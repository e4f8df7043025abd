"""Self-labeled word links: the model's own states align the tokens of a pair.

Chi et al., 2021 (XLM-Align), section 3.1. Several short pairs may share a block of tokens; a cell
of a block belongs to one pair or to none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch
from torch.nn import functional as F

from calque.algorithms.matching import mutual_argmax
from calque.algorithms.transport import (
    MIN_PRODUCT,
    exponential_log_kernel,
    log_sinkhorn,
    product_log_kernel,
)
from calque.models.attention import padded_indices
from calque.tokens.layout import add_pair_special_tokens, join_sides
from calque.tokens.ragged import Ragged
from calque.tokens.tokenizer import SpecialTokens

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]


# The side of a token: left sentence, right sentence, or neither (special token or padding).
NEITHER, LEFT, RIGHT = 0, 1, 2


@dataclass(frozen=True, slots=True)
class LabelRules:
    """How hidden states become links.

    The kernel of the optimal transport is max(ε, hᵢᵀhⱼ)^sharpness for dot products (Paper: the
    sharpness 1/μ is 1), and exp(sharpness · cos) for cosines. `scale_first` is "rows" in the paper
    and "columns" in the authors' code.
    """

    similarity: Literal["dot", "cosine"] = "dot"
    sharpness: float = 1.0
    labels: Literal["transport", "argmax"] = "transport"
    filter: Literal["itermax", "argmax", "union"] = "itermax"
    n_iterations: int = 2
    n_rounds: int = 2
    alpha: float = 0.9
    scale_first: Literal["columns", "rows"] = "columns"


@dataclass(frozen=True, slots=True)
class PairBlocks:
    """Packed pairs as blocks of equal width: the rows of a batch, otherwise one block per pair.

    `pairs` is the pair number of a cell, `sides` its side; cells beyond a pair are on no side.
    `slots` are flat token indices if the batch has no rows.
    """

    pairs: Int[Tensor, "blocks width"]
    sides: Int[Tensor, "blocks width"]
    slots: Int[Tensor, "blocks width"] | None

    @classmethod
    def of(cls, tokens: TokenBatch, sides: Int[Tensor, "tokens"]) -> Self:
        """Return the blocks of a batch."""
        if tokens.row:
            steps = torch.arange(len(sides), device=sides.device, dtype=tokens.offsets.dtype)
            pairs = torch.bucketize(steps, tokens.offsets[1:], right=True)
            return cls(pairs.view(-1, tokens.row), sides.view(-1, tokens.row), None)
        slots, is_real = padded_indices(tokens.offsets, tokens.longest)
        pairs = torch.arange(len(slots), device=sides.device)[:, None].expand_as(slots)
        return cls(pairs, torch.where(is_real, sides[slots], NEITHER), slots)

    def to_blocks(
        self, values: Float[Tensor, "tokens *rest"]
    ) -> Float[Tensor, "blocks width *rest"]:
        """Return the values of flat tokens as blocks."""
        if self.slots is None:
            return values.view(*self.pairs.shape, *values.shape[1:])
        return values[self.slots]

    def cells(self) -> Bool[Tensor, "blocks width width"]:
        """Return the cells in which a left token meets a right token of the same pair."""
        same_pair = self.pairs[:, :, None] == self.pairs[:, None, :]
        left, right = self.sides == LEFT, self.sides == RIGHT
        return same_pair & left[:, :, None] & right[:, None, :]


def token_sides(left: Ragged, right: Ragged, special_tokens: SpecialTokens) -> IntArray:
    """Return the side of every token of joined pairs; special tokens are on neither."""
    left = Ragged(np.full(len(left.ids), LEFT), left.lengths)
    right = Ragged(np.full(len(right.ids), RIGHT), right.lengths)
    neither = replace(special_tokens, cls_id=NEITHER, sep_id=NEITHER)
    return join_sides(*add_pair_special_tokens(left, right, neither), reset=True)[0].ids


def compare_states(
    states: Float[Tensor, "blocks width hidden"], similarity: Literal["dot", "cosine"]
) -> Float[Tensor, "blocks width width"]:
    """Return the similarities of all tokens of a block, in single precision at least.

    In bfloat16 close scores would become equal.
    """
    with torch.autocast(states.device.type, enabled=False):
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        wide = F.normalize(wide, dim=-1) if similarity == "cosine" else wide
        return wide @ wide.mT


def transport_plan(
    similarity: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
    rules: LabelRules,
) -> Float[Tensor, "blocks width width"]:
    """Return the optimal transport plan of every pair (XLM-Align, Eq. 1–6).

    Rows and columns of a pair have mass 1, as in the paper; uniform masses would scale all entries
    of a pair equally.
    """
    log_kernel = product_log_kernel if rules.similarity == "dot" else exponential_log_kernel
    kernel = log_kernel(similarity, cells, rules.sharpness)
    src_mass, tgt_mass = (cells.any(dim=side).to(kernel.dtype) for side in (2, 1))
    plan = log_sinkhorn(kernel, src_mass, tgt_mass, rules.n_iterations, rules.scale_first)
    return plan.exp()


def find_links(
    similarity: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
    rules: LabelRules,
) -> Bool[Tensor, "blocks width width"]:
    """Return the links between left tokens (rows) and right tokens (columns) of the pairs."""
    if rules.labels == "transport":
        scores = transport_plan(similarity, cells, rules)
    elif rules.similarity == "cosine":
        scores = (1 + similarity) / 2
    else:
        scores = similarity.clamp(min=MIN_PRODUCT)
    scores = scores.masked_fill(~cells, -torch.inf)
    if rules.filter == "union":
        return either_argmax(scores) & cells
    return iterate_argmax(scores, rules.n_rounds if rules.filter == "itermax" else 1, rules.alpha)


def either_argmax(
    scores: Float[Tensor, "blocks width width"],
) -> Bool[Tensor, "blocks width width"]:
    """Link every token with its best partner, without a filter (XLM-Align, Table 6)."""
    steps = torch.arange(scores.shape[1], device=scores.device)
    return (scores.argmax(dim=2, keepdim=True) == steps) | (
        scores.argmax(dim=1, keepdim=True) == steps[:, None]
    )


def iterate_argmax(
    scores: Float[Tensor, "blocks width width"], n_rounds: int, alpha: float
) -> Bool[Tensor, "blocks width width"]:
    """Return the links of `matching.itermax` for scores ≥ 0 if several pairs may share a block.

    XLM-Align, Eq. 7–9. Whether a pair has free words on both sides and more than two words in each
    is determined per row and column instead of per block.
    """
    is_cell = scores > -torch.inf
    is_large = (is_cell.sum(dim=2) > 2)[:, :, None] & (is_cell.sum(dim=1) > 2)[:, None, :]
    links = mutual_argmax(scores)
    for _ in range(n_rounds - 1):
        free_src, free_tgt = ~links.any(dim=2)[:, :, None], ~links.any(dim=1)[:, None, :]
        has_free_tgt = (is_cell & free_tgt).any(dim=2)[:, :, None]
        has_free_src = (is_cell & free_src).any(dim=1)[:, None, :]
        weight = (alpha * (free_src.to(scores.dtype) + free_tgt)).clamp(max=1.0)
        found = mutual_argmax(torch.where(is_cell, scores * weight, -torch.inf))
        is_open = (free_src & has_free_tgt) | (free_tgt & has_free_src)
        links = links | (found & is_open & is_large)
    return links


def mass_on_links(
    similarity: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
    rules: LabelRules,
) -> Float[Tensor, "blocks"]:
    """Return the fraction of the transportable mass that lies on links, for one pair per block.

    If words find their translations, few cells carry the plan; otherwise all cells do.
    """
    plan, links = transport_plan(similarity, cells, rules), find_links(similarity, cells, rules)
    n_src, n_tgt = cells.any(dim=2).sum(dim=1), cells.any(dim=1).sum(dim=1)
    return (plan * links).sum(dim=(1, 2)) / torch.minimum(n_src, n_tgt).clamp(min=1)
