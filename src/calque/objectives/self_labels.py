"""Word links that a model finds for itself between the two sentences of a pair.

Chi et al., 2021 (XLM-Align), section 3.1. Several short pairs may share a block of tokens: a cell
of the block belongs to a pair or to none, and pairs never mix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch.nn import functional as F

from calque.algorithms.matching import mutual_argmax
from calque.algorithms.transport import exponential_log_kernel, log_sinkhorn
from calque.models.attention import pad_slots

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.types import TokenBatch


# Sides of a token: it belongs to the left sentence, the right one, or is a mark or padding.
NEITHER, LEFT, RIGHT = 0, 1, 2
# Paper: the ε that keeps the logarithm of a product from falling without end.
LEAST_PRODUCT = 1e-6


@dataclass(frozen=True, slots=True)
class LabelRules:
    """How states become links.

    The kernel of the transport is max(ε, hᵢᵀhⱼ)^sharpness for products (Paper: 1/μ = 1), and
    exp(sharpness · cos) for cosines.
    """

    similarity: Literal["dot", "cosine"] = "dot"
    sharpness: float = 1.0
    labels: Literal["transport", "argmax"] = "transport"
    filter: Literal["itermax", "argmax", "union"] = "itermax"
    n_iterations: int = 2
    n_rounds: int = 2
    alpha: float = 0.9


@dataclass(frozen=True, slots=True)
class PairBlocks:
    """Packed pairs as blocks of one width: the rows of a batch, or else a block for each pair.

    `slots` are flat places where the batch has no rows; a place beyond a pair is on no side.
    """

    pairs: Int[Tensor, "blocks width"]
    sides: Int[Tensor, "blocks width"]
    slots: Int[Tensor, "blocks width"] | None

    @classmethod
    def of(cls, tokens: TokenBatch, sides: Int[Tensor, "tokens"]) -> Self:
        """Lay a batch out."""
        if tokens.row:
            steps = torch.arange(len(sides), device=sides.device, dtype=tokens.offsets.dtype)
            pairs = torch.bucketize(steps, tokens.offsets[1:], right=True)
            return cls(pairs.view(-1, tokens.row), sides.view(-1, tokens.row), None)
        slots, valid = pad_slots(tokens.offsets, tokens.longest)
        pairs = torch.arange(len(slots), device=sides.device)[:, None].expand_as(slots)
        return cls(pairs, torch.where(valid, sides[slots], NEITHER), slots)

    def lay(self, values: Float[Tensor, "tokens *rest"]) -> Float[Tensor, "blocks width *rest"]:
        """Bring the values of flat tokens into the blocks."""
        if self.slots is None:
            return values.view(*self.pairs.shape, *values.shape[1:])
        return values[self.slots]

    def cells(self) -> Bool[Tensor, "blocks width width"]:
        """Mark where a left token meets a right token of its pair."""
        together = self.pairs[:, :, None] == self.pairs[:, None, :]
        left, right = self.sides == LEFT, self.sides == RIGHT
        return together & left[:, :, None] & right[:, None, :]


def compare_states(
    states: Float[Tensor, "blocks width hidden"], similarity: Literal["dot", "cosine"]
) -> Float[Tensor, "blocks width width"]:
    """Compare all tokens of a block, in single precision: bfloat16 would tie close rivals."""
    with torch.autocast(states.device.type, enabled=False):
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        wide = F.normalize(wide, dim=-1) if similarity == "cosine" else wide
        return wide @ wide.mT


def plan_transport(
    similarity: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
    rules: LabelRules,
) -> Float[Tensor, "blocks width width"]:
    """Give the transport plan of every pair; rows and columns of a pair aim at a sum of 1.

    Paper: so they do there, and uniform masses would change every entry of a pair alike.
    """
    if rules.similarity == "dot":
        similarity = similarity.clamp(min=LEAST_PRODUCT).log()
    kernel = exponential_log_kernel(similarity, cells, rules.sharpness)
    src_mass, tgt_mass = (cells.any(dim=side).to(kernel.dtype) for side in (2, 1))
    return log_sinkhorn(kernel, src_mass, tgt_mass, rules.n_iterations).exp()


def find_links(
    similarity: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
    rules: LabelRules,
) -> Bool[Tensor, "blocks width width"]:
    """Link left tokens (rows) with right tokens (columns) of their pairs."""
    if rules.labels == "transport":
        scores = plan_transport(similarity, cells, rules)
    elif rules.similarity == "cosine":
        scores = (1 + similarity) / 2
    else:
        scores = similarity.clamp(min=LEAST_PRODUCT)
    scores = scores.masked_fill(~cells, -torch.inf)
    if rules.filter == "union":
        return either_argmax(scores) & cells
    return iterate_argmax(scores, rules.n_rounds if rules.filter == "itermax" else 1, rules.alpha)


def either_argmax(
    scores: Float[Tensor, "blocks width width"],
) -> Bool[Tensor, "blocks width width"]:
    """Link every token with its best, from either side: no filter at all (Table 6)."""
    steps = torch.arange(scores.shape[1], device=scores.device)
    return (scores.argmax(dim=2, keepdim=True) == steps) | (
        scores.argmax(dim=1, keepdim=True) == steps[:, None]
    )


def iterate_argmax(
    scores: Float[Tensor, "blocks width width"], n_rounds: int, alpha: float
) -> Bool[Tensor, "blocks width width"]:
    """Do what `matching.itermax` does to scores ≥ 0, where several pairs may share a block.

    Whether a pair goes on, with free words on both sides and more than two in each, is asked of
    its rows and columns rather than of its block.
    """
    real = scores > -torch.inf
    roomy = (real.sum(dim=2) > 2)[:, :, None] & (real.sum(dim=1) > 2)[:, None, :]
    links = mutual_argmax(scores)
    for _ in range(n_rounds - 1):
        free_src, free_tgt = ~links.any(dim=2)[:, :, None], ~links.any(dim=1)[:, None, :]
        more_tgt = (real & free_tgt).any(dim=2)[:, :, None]
        more_src = (real & free_src).any(dim=1)[:, None, :]
        weight = (alpha * (free_src.to(scores.dtype) + free_tgt)).clamp(max=1.0)
        found = mutual_argmax(torch.where(real, scores * weight, -torch.inf))
        is_open = (free_src & more_tgt) | (free_tgt & more_src)
        links = links | (found & is_open & roomy)
    return links


def share_on_links(
    similarity: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
    rules: LabelRules,
) -> Float[Tensor, "blocks"]:
    """Tell how much of what the transport plan could carry lies on links, a pair a block.

    Where words find their translations, few cells carry the plan; where they find none, all do.
    """
    plan, links = plan_transport(similarity, cells, rules), find_links(similarity, cells, rules)
    n_src, n_tgt = cells.any(dim=2).sum(dim=1), cells.any(dim=1).sum(dim=1)
    return (plan * links).sum(dim=(1, 2)) / torch.minimum(n_src, n_tgt).clamp(min=1)
