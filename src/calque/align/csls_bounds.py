"""Bounds of CSLS scores for groups of words: most words need neither an exact score nor a hubness.

r(y), the mean of a word's k highest similarities, is at least the mean of any k of them. So a few
queries give a floor under r(y), 2·sim(x, y) − floor(y) a ceiling over the score, and groups whose
ceiling is below the best score found need no further look. Bounds hold in low precision too,
with a slack for its rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch

from calque.align.precision import Multiplier, fast_dtype
from calque.align.top_scores import best_in_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

GROUP = 8
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class CslsBounds:
    """Ceilings of groups of keys for some queries; keys g, g + n, g + 2n … are group g of n.

    `similarities` are ceilings of the products alone, if asked for. All, and `floors`, may be
    wrong by the rounding of products: `slack` for each product they are made of.
    """

    scores: Float[Tensor, "queries groups"]
    similarities: Float[Tensor, "queries groups"] | None
    floors: Float[Tensor, "keys"]
    slack: float


@dataclass(frozen=True, slots=True)
class Candidates:
    """Keys that were looked at, their exact products, and what no other key can exceed."""

    keys: Int[Tensor, "queries candidates"]
    similarities: Float[Tensor, "queries candidates"]
    ceiling: Float[Tensor, "queries"]


def bound_csls(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    k: int,
    *,
    floors: Float[Tensor, "keys"] | None = None,
    similarities: bool = True,
) -> CslsBounds:
    """Bound 2·sim(x, y) − r(y) for groups of keys; floors under r may come from other queries."""
    n_groups = -(-len(keys) // GROUP)
    multiply = Multiplier(queries, min(BLOCK, n_groups), fast_dtype(queries))
    ceilings = queries.new_full((1 + similarities, len(queries), n_groups), -torch.inf)
    floor = queries.new_empty(len(keys)) if floors is None else floors
    for start, member in product(range(0, n_groups, BLOCK), range(GROUP)):
        first = member * n_groups + start
        part = keys[first : min(first + BLOCK, (member + 1) * n_groups)]
        if len(part) == 0:
            continue
        products, own = multiply(part), slice(first, first + len(part))
        here = ceilings[:, :, start : start + len(part)]
        if similarities:
            torch.maximum(here[1], products, out=here[1])
        if floors is None:
            floor[own] = _mean_of_many(products, k)
        torch.sub(products, floor[own], alpha=0.5, out=products)
        torch.maximum(here[0], products, out=here[0])
    slack = _find_slack(queries, keys, multiply.rounding)
    return CslsBounds(2 * ceilings[0], ceilings[1] if similarities else None, floor, slack)


def look_at(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    ceilings: Float[Tensor, "queries groups"],
    n_groups: int,
) -> Candidates:
    """Find the exact products with all keys of the groups of the highest ceilings."""
    total = ceilings.shape[1]
    ceiling = ceilings.new_full((len(queries),), -torch.inf)
    if n_groups < total:
        values, groups = best_in_rows(ceilings, n_groups + 1)
        ceiling, groups = values[:, -1], groups[:, :-1]
    else:
        groups = torch.arange(total, device=ceilings.device).expand(len(queries), -1)
    steps = torch.arange(GROUP, device=groups.device) * total
    members = (groups[:, :, None] + steps).flatten(1)
    exists = members < len(keys)  # the last group members may not
    products = dot_products(queries, keys, torch.where(exists, members, 0))
    return Candidates(members, products.masked_fill_(~exists, -torch.inf), ceiling)


def dot_products(
    queries: Float[Tensor, "queries hidden"],
    keys: Float[Tensor, "keys hidden"],
    rows: Int[Tensor, "queries candidates"],
) -> Float[Tensor, "queries candidates"]:
    """Multiply each query with its own keys."""
    size = max(1, (1 << 22) // max(1, rows.shape[1] * queries.shape[1]))
    parts = [
        torch.bmm(keys[own], mine[:, :, None])[:, :, 0]
        for mine, own in zip(torch.split(queries, size), torch.split(rows, size), strict=True)
    ]
    return torch.cat(parts) if parts else queries.new_empty(rows.shape)


def _mean_of_many(products: Float[Tensor, "queries keys"], k: int) -> Float[Tensor, "keys"]:
    """Give the mean of k products of each key that are about its highest: maxima of k groups."""
    size = len(products) // k
    means: Tensor = products[: size * k].view(size, k, -1).amax(dim=0).mean(dim=0)
    return means


def _find_slack(
    queries: Float[Tensor, "queries hidden"], keys: Float[Tensor, "keys hidden"], rounding: float
) -> float:
    """Bound the error of a product: one rounding of it, and those of its terms.

    The terms' are independent, so that they add up like their squares, Σ x²y² ≤ |x|₄² |y|₄²: eight
    standard deviations are past what all words of all languages would ever meet.
    """

    def norms(p: int) -> float:
        return math.prod(
            float(torch.linalg.vector_norm(part, p, dim=1).amax()) for part in (queries, keys)
        )

    return rounding * (norms(2) + 8 * math.sqrt(2 / 3) * norms(4))
