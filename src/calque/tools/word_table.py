"""A table of word vectors learnt by negative sampling, with Adam on the rows touched alone."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

CLAMP = 20.0
BETAS, EPSILON = (0.9, 0.999), 1e-8


def negative_sampling(
    scores: Float[Tensor, "targets words"],
) -> tuple[Float[Tensor, ""], Float[Tensor, "targets words"]]:
    """Give the clamped logistic loss of scores, and its gradient.

    The first column holds the score s of a target with its context, the others those n of its
    negatives: the mean over targets of log(1 + e^−s) + Σ log(1 + e^n), with scores clamped to
    ±20 (Gupta and Jaggi, 2021). A clamped score has no gradient.

    >>> loss, gradient = negative_sampling(torch.tensor([[0.0, 0.0, -30.0]]))
    >>> round(loss.item(), 4), gradient.tolist()
    (1.3863, [[-0.5, 0.5, 0.0]])
    """
    signs = torch.ones_like(scores)
    signs[:, 0] = -1
    signed = signs * scores.clamp(-CLAMP, CLAMP)
    is_free = scores.abs() <= CLAMP
    gradient = signs * signed.sigmoid() * is_free / len(scores)
    return torch.nn.functional.softplus(signed).sum() / len(scores), gradient


class WordTable:
    """Vectors and their Adam moments; rows that a step does not touch stay as they are.

    The steps are those of `torch.optim.SparseAdam`, which would wait for the device every time,
    to sort the rows and find those that occur twice.
    """

    def __init__(
        self,
        vectors: Float[Tensor, "words hidden"],
        moments: tuple[Float[Tensor, "words hidden"], Float[Tensor, "words hidden"]] | None = None,
        n_steps: int = 0,
    ) -> None:
        self.vectors, self.n_steps = vectors, n_steps
        self.means, self.squares = moments or (
            torch.zeros_like(vectors),
            torch.zeros_like(vectors),
        )
        self._places = torch.zeros(len(vectors), dtype=torch.long, device=vectors.device)

    @classmethod
    def create(cls, n_words: int, n_dims: int, seed: int, device: torch.device) -> WordTable:
        """Make a table of vectors drawn from U(−1/d, 1/d), the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.rand(n_words, n_dims, generator=generator).mul_(2).sub_(1).div_(n_dims)
        return cls(vectors.to(device))

    def step(
        self,
        contexts: Float[Tensor, "targets hidden"],
        words: Int[Tensor, "targets words"],
        learning_rate: float,
    ) -> Float[Tensor, ""]:
        """Move targets, the first column of `words`, towards their contexts, negatives away."""
        vectors = self.vectors[words]
        loss, gradient = negative_sampling((vectors * contexts[:, None]).sum(-1))
        rows, gradients = words.flatten(), (gradient[..., None] * contexts[:, None]).flatten(0, 1)
        change = self._advance(rows, self._add_equals(rows, gradients), learning_rate)
        self.vectors[rows] = vectors.flatten(0, 1).sub_(change)
        return loss

    def _add_equals(
        self, rows: Int[Tensor, "places"], gradients: Float[Tensor, "places hidden"]
    ) -> Float[Tensor, "places hidden"]:
        """Give every place the sum of the gradients of its row."""
        places = torch.arange(len(rows), device=rows.device)
        self._places.scatter_reduce_(0, rows, places, "amin", include_self=False)
        first = self._places[rows]
        return torch.zeros_like(gradients).index_add_(0, first, gradients)[first]

    def _advance(
        self,
        rows: Int[Tensor, "places"],
        gradients: Float[Tensor, "places hidden"],
        learning_rate: float,
    ) -> Float[Tensor, "places hidden"]:
        """Take an Adam step; places of the same row compute and write the same numbers."""
        self.n_steps += 1
        mean = self.means[rows].lerp_(gradients, 1 - BETAS[0])
        square = self.squares[rows].lerp_(gradients.square_(), 1 - BETAS[1])
        self.means[rows], self.squares[rows] = mean, square
        first, second = (1 - beta**self.n_steps for beta in BETAS)
        rate = learning_rate * second**0.5 / first
        return mean.mul_(rate).div_(square.sqrt_().add_(EPSILON))
