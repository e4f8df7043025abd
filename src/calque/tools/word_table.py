"""A table of word vectors learnt by negative sampling, with Adam on the rows touched alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

CLAMP = 20.0
BETAS, EPSILON = (0.9, 0.999), 1e-8


def signs_of(n_words: int, device: torch.device) -> Float[Tensor, "words"]:
    """Give −1 for a target and 1 for its negatives: the signs of scores in the exponents."""
    signs = torch.ones(n_words, device=device)
    signs[0].neg_()  # a list of numbers would wait for the device
    return signs


def negative_sampling(
    scores: Float[Tensor, "targets words"], signs: Float[Tensor, "words"]
) -> tuple[Float[Tensor, "targets words"], Float[Tensor, "targets words"]]:
    """Give the exponents of the clamped logistic loss of scores, and its gradient.

    The first column holds the score s of a target with its context, the others those n of its
    negatives. The loss is the mean over targets of log(1 + e^−s) + Σ log(1 + e^n), with scores
    clamped to ±20 (Gupta and Jaggi, 2021); its exponents are −s and n. A clamped score has no
    gradient.

    >>> signs = signs_of(3, torch.device("cpu"))
    >>> exponents, gradient = negative_sampling(torch.tensor([[0.0, 0.0, -30.0]]), signs)
    >>> round(loss_of(exponents).item(), 4), gradient.tolist()
    (1.3863, [[-0.5, 0.5, 0.0]])
    """
    signed = scores * signs
    exponents = signed.clamp(-CLAMP, CLAMP)
    slopes = exponents.sigmoid() * (exponents == signed)
    return exponents, slopes / (signs * len(scores))


def loss_of(exponents: Float[Tensor, "targets words"]) -> Float[Tensor, ""]:
    """Give the sum of the targets' losses, in double precision."""
    return torch.nn.functional.softplus(exponents).sum(dtype=torch.float64)


class WordTable:
    """Vectors and their Adam moments; rows that a step does not touch stay as they are.

    The steps are those of `torch.optim.SparseAdam`, which would wait for the device every time,
    to sort the rows and find those that occur twice. Many steps are so small that a GPU is kept
    waiting by what starts its work: so a row's vector and moments lie together, to be read and
    written at once, and what steps have in common is computed for many of them.
    """

    def __init__(self, rows: Float[Tensor, "words three hidden"], n_steps: int = 0) -> None:
        self.rows, self.n_steps = rows, n_steps
        # Gradients are added up here; between steps it is zero.
        self._sums = torch.zeros_like(rows[:, 0])

    @classmethod
    def create(cls, n_words: int, n_dims: int, seed: int, device: torch.device) -> WordTable:
        """Make a table of vectors drawn from U(−1/d, 1/d), the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.rand(n_words, n_dims, generator=generator).mul_(2).sub_(1).div_(n_dims)
        rows = torch.zeros(n_words, 3, n_dims, device=device)
        rows[:, 0] = vectors.to(device)
        return cls(rows)

    @property
    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Give the vectors, which the table goes on changing."""
        return self.rows[:, 0]

    @torch.inference_mode()
    def take_steps(
        self,
        contexts: Float[Tensor, "targets hidden"],
        words: Int[Tensor, "targets words"],
        n_targets: Sequence[int],
        learning_rate: float,
    ) -> Float[Tensor, ""]:
        """Move targets, the first column of `words`, towards their contexts, negatives away.

        Steps have so many targets each, none of them zero. The sum of the losses is returned.
        """
        signs = signs_of(words.shape[1], words.device)
        sizes = list(n_targets)
        steps = zip(contexts.split_with_sizes(sizes), words.split_with_sizes(sizes), strict=True)
        exponents = [self._step(*step, signs, learning_rate) for step in steps]
        return loss_of(torch.cat(exponents))

    def _step(
        self,
        contexts: Float[Tensor, "targets hidden"],
        words: Int[Tensor, "targets words"],
        signs: Float[Tensor, "words"],
        learning_rate: float,
    ) -> Float[Tensor, "targets words"]:
        places, contexts = words.flatten(), contexts[:, None]
        rows = self.rows.index_select(0, places)
        vectors, mean, square = rows.unbind(1)
        scores = (vectors.view(*words.shape, -1) * contexts).sum(-1)
        exponents, slopes = negative_sampling(scores, signs)
        gradients = self._add_equals(places, (slopes[..., None] * contexts).flatten(0, 1))
        mean.lerp_(gradients, 1 - BETAS[0])
        square.lerp_(gradients.square_(), 1 - BETAS[1])
        self.n_steps += 1
        first, second = (1 - beta**self.n_steps for beta in BETAS)
        rate = learning_rate * second**0.5 / first
        roots = torch.sqrt(square, out=gradients)
        vectors.addcdiv_(mean, roots.add_(EPSILON), value=-rate)
        self.rows.index_copy_(0, places, rows)  # places of the same word write the same numbers
        return exponents

    def _add_equals(
        self, places: Int[Tensor, "places"], gradients: Float[Tensor, "places hidden"]
    ) -> Float[Tensor, "places hidden"]:
        """Give every place the sum of the gradients of its word."""
        total = self._sums.index_add_(0, places, gradients).index_select(0, places)
        self._sums.index_fill_(0, places, 0)
        return total
