"""A linear-chain conditional random field, which scores whole tag sequences.

Lafferty et al., 2001:

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


# Low enough that no best sequence contains it, high enough to be summed in single precision.
FORBIDDEN = -1e4


class ConditionalRandomField(nn.Module):
    """Learned scores of transitions between tags and of first and last tags, initialized to 0.

    In all methods, `mask` is true for the words of a sequence, which come before its padding.
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
        """Return −log p of the tags of every sequence; 0 for one without words."""
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
        """Return the best tags of every sequence (Viterbi).

        `allowed` restricts which tag may follow which, and which may come first; see
        `allowed_span_transitions`.
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
    """Return log Σ exp(score) over all tag sequences (forward algorithm)."""
    alpha = start + emissions[:, 0]
    for t in range(1, emissions.shape[1]):
        extended = (alpha[:, :, None] + transitions).logsumexp(1) + emissions[:, t]
        alpha = torch.where(mask[:, t, None], extended, alpha)
    return (alpha + end).logsumexp(1)


def score_tags(
    emissions: Float[Tensor, "sequences words tags"],
    tags: Int[Tensor, "sequences words"],
    mask: Bool[Tensor, "sequences words"],
    transitions: Float[Tensor, "tags tags"],
    start: Float[Tensor, "tags"],
    end: Float[Tensor, "tags"],
) -> Float[Tensor, "sequences"]:
    """Return the scores of given tag sequences; tags outside the mask have no effect."""
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
    """Return the tag sequences with the highest scores; ignore the tags outside the mask."""
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


def allowed_span_transitions(
    names: Sequence[str],
) -> tuple[Bool[Tensor, "tags tags"], Bool[Tensor, "tags"]]:
    """Return which of B-, I- and O tags may follow which, and which may come first.

    An I- tag must follow a B- or I- tag of the same type.

    >>> follows, first = allowed_span_transitions(["B-LOC", "I-LOC", "I-PER", "O"])
    >>> follows.int().tolist(), first.int().tolist()
    ([[1, 1, 0, 1], [1, 1, 0, 1], [1, 0, 1, 1], [1, 0, 0, 1]], [1, 0, 0, 1])
    """
    is_inside = [name.startswith("I-") for name in names]
    follows = [
        [
            not inside or (before != OUTSIDE and before[2:] == name[2:])
            for name, inside in zip(names, is_inside, strict=True)
        ]
        for before in names
    ]
    return torch.tensor(follows), ~torch.tensor(is_inside)
