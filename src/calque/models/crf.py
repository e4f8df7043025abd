"""A linear-chain conditional random field: sequences of tags scored whole (Lafferty et al., 2001).

score(y) = start(y₁) + Σ emission(t, yₜ) + Σ transition(yₜ₋₁, yₜ) + end(yₙ).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from calque.io.conllu import OUTSIDE

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


# Low enough that no sequence takes it, high enough to be added up in single precision.
FORBIDDEN = -1e4


class LinearChain(nn.Module):
    """Scores of which tag follows which, begins and ends a sequence; all begin at 0.

    Words of a sequence come first in its row, `mask` tells them from what fills the row.
    """

    def __init__(self, n_tags: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(n_tags, n_tags))
        self.start = nn.Parameter(torch.zeros(n_tags))
        self.end = nn.Parameter(torch.zeros(n_tags))

    def forward(
        self,
        emissions: Float[Tensor, "sequences words tags"],
        tags: Int[Tensor, "sequences words"],
        mask: Bool[Tensor, "sequences words"],
    ) -> Float[Tensor, "sequences"]:
        """Give −log p of every sequence; 0 for one without words."""
        total = log_partition(emissions, mask, self.transitions, self.start, self.end)
        gold = score_tags(emissions, tags, mask, self.transitions, self.start, self.end)
        return torch.where(mask[:, 0], total - gold, 0.0)

    @torch.no_grad()
    def decode(
        self,
        emissions: Float[Tensor, "sequences words tags"],
        mask: Bool[Tensor, "sequences words"],
        allowed: tuple[Bool[Tensor, "tags tags"], Bool[Tensor, "tags"]] | None = None,
    ) -> Int[Tensor, "sequences words"]:
        """Give the best tags of every sequence, among those that `allowed` permits (Viterbi).

        `allowed` says which tag may follow which, and which may come first.
        """
        transitions: Tensor = self.transitions
        start: Tensor = self.start
        if allowed is not None:
            transitions = transitions.masked_fill(~allowed[0], FORBIDDEN)
            start = start.masked_fill(~allowed[1], FORBIDDEN)
        return find_best_tags(emissions, mask, transitions, start, self.end)


def log_partition(
    emissions: Float[Tensor, "sequences words tags"],
    mask: Bool[Tensor, "sequences words"],
    transitions: Float[Tensor, "tags tags"],
    start: Float[Tensor, "tags"],
    end: Float[Tensor, "tags"],
) -> Float[Tensor, "sequences"]:
    """Sum exp(score) over all sequences of tags, in logarithms: the forward algorithm."""
    alpha = start + emissions[:, 0]
    for t in range(1, emissions.shape[1]):
        after = (alpha[:, :, None] + transitions).logsumexp(1) + emissions[:, t]
        alpha = torch.where(mask[:, t, None], after, alpha)
    return (alpha + end).logsumexp(1)


def score_tags(
    emissions: Float[Tensor, "sequences words tags"],
    tags: Int[Tensor, "sequences words"],
    mask: Bool[Tensor, "sequences words"],
    transitions: Float[Tensor, "tags tags"],
    start: Float[Tensor, "tags"],
    end: Float[Tensor, "tags"],
) -> Float[Tensor, "sequences"]:
    """Score given tags; those outside the mask may be anything that is a tag."""
    inside = mask.to(emissions.dtype)
    words = emissions.gather(2, tags[..., None])[..., 0]
    steps = transitions[tags[:, :-1], tags[:, 1:]]
    last = tags.gather(1, (mask.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
    within = (words * inside).sum(1) + (steps * inside[:, 1:]).sum(1)
    return start[tags[:, 0]] + within + end[last]


def find_best_tags(
    emissions: Float[Tensor, "sequences words tags"],
    mask: Bool[Tensor, "sequences words"],
    transitions: Float[Tensor, "tags tags"],
    start: Float[Tensor, "tags"],
    end: Float[Tensor, "tags"],
) -> Int[Tensor, "sequences words"]:
    """Give the tags of the highest score; outside the mask they mean nothing."""
    n_tags = emissions.shape[2]
    stay = torch.arange(n_tags, device=emissions.device).expand(len(emissions), n_tags)
    best = start + emissions[:, 0]
    origins = []
    for t in range(1, emissions.shape[1]):
        scores, origin = (best[:, :, None] + transitions).max(1)
        inside = mask[:, t, None]
        best = torch.where(inside, scores + emissions[:, t], best)
        origins.append(torch.where(inside, origin, stay))
    tag = (best + end).argmax(1)
    path = [tag]
    for origin in reversed(origins):
        tag = origin.gather(1, tag[:, None])[:, 0]
        path.append(tag)
    return torch.stack(path[::-1], dim=1)


def allow_spans(
    names: Sequence[str],
) -> tuple[Bool[Tensor, "tags tags"], Bool[Tensor, "tags"]]:
    """Say which of B-, I- and O tags may follow which, and which may come first.

    >>> follows, begins = allow_spans(["B-LOC", "I-LOC", "I-PER", "O"])
    >>> follows.int().tolist(), begins.int().tolist()
    ([[1, 1, 0, 1], [1, 1, 0, 1], [1, 0, 1, 1], [1, 0, 0, 1]], [1, 0, 0, 1])
    """
    goes_on = [name.startswith("I-") for name in names]
    follows = [
        [not inside or (before != OUTSIDE and before[2:] == name[2:]) for name, inside in pairs]
        for before in names
        for pairs in [list(zip(names, goes_on, strict=True))]
    ]
    return torch.tensor(follows), ~torch.tensor(goes_on)
