"""Learn static word vectors from an encoder: X2Static (Gupta and Jaggi, 2021), or mean pooling.

A learner receives blocks of word occurrences (see `occurrences`). What it does with a block depends
only on the number of the block and the seed, so that a run can be resumed after any block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from calque.errors import InputError
from calque.tokens.sampling import derive_seed
from calque.vectors.corpus import WordCorpus
from calque.vectors.occurrences import OccurrenceBlock, View

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.vectors.occurrences import ChooseWords

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    FloatArray = npt.NDArray[np.float64]

# Sentences are sorted by length and encoded in blocks of about this many.
BLOCK_SENTENCES = 4096
# Purposes of the seed, so that no two random streams are equal.
INITIAL_VECTORS, ORDER, TARGETS, NEGATIVES = range(4)
MAX_SCORE = 20.0
BETAS, EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True, slots=True)
class X2StaticSettings:
    """Settings of X2Static; the defaults are those of Gupta and Jaggi's (2021) release.

    Paper: the context of a word is all other tokens of its sentence. Release: all tokens, including
    the word itself and the special tokens (`context="all"`).
    """

    context: Literal["others", "all"] = "others"
    n_negatives: int = 10
    subsample: float = 5e-6
    learning_rate: float = 1e-3
    batch_sentences: int = 128
    n_epochs: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context not in ("others", "all"):
            raise InputError(f"there is no context {self.context!r}", fix="choose others or all")
        for name in ("n_negatives", "subsample", "learning_rate", "batch_sentences", "n_epochs"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}", fix="choose more than 0")
        if self.seed < 0:
            raise InputError(f"the seed is {self.seed}", fix="choose 0 or more")


class StaticLearner(Protocol):
    """Learns word vectors from blocks of occurrences."""

    view: View
    n_epochs: int
    block_sentences: int

    def order(self, epoch: int) -> IntArray:
        """Return the order of the sentences in an epoch."""

    def choose(self, block: int) -> ChooseWords:
        """Return the function that chooses words from a block."""

    def update(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Learn from the occurrences of a block and their vectors."""

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that are needed to resume."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the state of an earlier run."""

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Return the word vectors."""


class X2StaticLearner:
    """Learns vectors that predict a word from the vector of its context."""

    def __init__(
        self, corpus: WordCorpus, n_dims: int, settings: X2StaticSettings, device: torch.device
    ) -> None:
        self.settings, self.n_epochs = settings, settings.n_epochs
        self.view: View = settings.context
        self.n_sentences, self.device = len(corpus), device
        n_steps = max(1, BLOCK_SENTENCES // settings.batch_sentences)
        self.block_sentences = n_steps * settings.batch_sentences
        self._n_blocks = -(-self.n_sentences // self.block_sentences)
        self._keep = keep_probabilities(corpus.counts, settings.subsample)
        self._cumulative = torch.from_numpy(np.cumsum(np.sqrt(corpus.counts))).to(device)
        seed = derive_seed(settings.seed, INITIAL_VECTORS)
        self.table = WordTable.create(len(corpus.words), n_dims, seed, device)
        # Number of targets in this epoch, and the sum of their losses.
        self.totals = torch.zeros(2, dtype=torch.float64, device=device)
        # Words that were a target at least once; the others still have their initial vectors.
        self.is_learned = torch.zeros(len(corpus.words), dtype=torch.bool, device=device)

    def order(self, epoch: int) -> IntArray:
        """Return a random order of the sentences."""
        seed = derive_seed(self.settings.seed, ORDER, epoch)
        return np.random.default_rng(seed).permutation(self.n_sentences)

    def choose(self, block: int) -> ChooseWords:
        """Choose targets: words of the vocabulary that have a context, frequent ones less often."""
        random = np.random.default_rng(derive_seed(self.settings.seed, TARGETS, block))

        def is_target(rows: IntArray, n_others: IntArray) -> BoolArray:
            kept: BoolArray = random.random(len(rows)) < self._keep[rows]
            return kept & (rows >= 0) & ((n_others > 0) | (self.view == "all"))

        return is_target

    def update(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Take one step per batch of sentences, in the order of the text."""
        if number % self._n_blocks == 0:
            self.totals.zero_()
        if len(vectors) == 0:
            return
        negatives = self._draw_negatives(number, len(vectors))
        words = torch.cat([block.rows[:, None], negatives], dim=1)
        firsts = np.arange(0, len(block.n_found), self.settings.batch_sentences)
        n_targets = np.add.reduceat(block.n_found, firsts)
        steps, rate = n_targets[n_targets > 0].tolist(), self.settings.learning_rate
        self.is_learned[block.rows] = True
        self.totals[0] += len(vectors)
        self.totals[1] += self.table.take_steps(vectors, words, steps, rate)

    def state(self) -> dict[str, Tensor]:
        """Return the table with its moments, and the totals of the epoch."""
        return {
            "table": self.table.rows,
            "steps": torch.tensor(self.table.n_steps),
            "totals": self.totals,
            "is_learned": self.is_learned,
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the table with its moments, and the totals of the epoch."""
        self.table = WordTable(state["table"].to(self.device), int(state["steps"]))
        self.totals = state["totals"].to(self.device)
        self.is_learned = state["is_learned"].to(self.device)

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Return the word vectors."""
        return self.table.vectors.contiguous()

    def _draw_negatives(self, block: int, n_targets: int) -> Int[Tensor, "targets negatives"]:
        """Draw words with probabilities proportional to the square root of their counts."""
        seed = derive_seed(self.settings.seed, NEGATIVES, block)
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (n_targets, self.settings.n_negatives)
        draws = torch.rand(size, generator=generator, dtype=torch.float64, device=self.device)
        words = torch.searchsorted(self._cumulative, draws * self._cumulative[-1], right=True)
        return words.clamp_(max=len(self._cumulative) - 1)


class PoolingLearner:
    """Averages the states of a word over its occurrences (Bommasani et al., 2020)."""

    view: View = "word"
    n_epochs = 1
    block_sentences = BLOCK_SENTENCES

    def __init__(self, corpus: WordCorpus, n_dims: int, device: torch.device) -> None:
        self.n_sentences, self.device = len(corpus), device
        self._counts = torch.from_numpy(corpus.counts).to(device)
        # In double precision, since frequent words have very many occurrences.
        self.total = torch.zeros(len(corpus.words), n_dims, dtype=torch.float64, device=device)

    def order(self, epoch: int) -> IntArray:
        """Return the order of the text."""
        return np.arange(self.n_sentences)

    def choose(self, block: int) -> ChooseWords:
        """Choose all words of the vocabulary."""
        return lambda rows, n_others: rows >= 0

    def update(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Add up the vectors of each word."""
        self.total.index_add_(0, block.rows, vectors.double())

    def state(self) -> dict[str, Tensor]:
        """Return the sums."""
        return {"total": self.total}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore the sums."""
        self.total = state["total"].to(self.device)

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Return the means."""
        return (self.total / self._counts[:, None]).float()


def keep_probabilities(counts: IntArray, subsample: float) -> FloatArray:
    """Return the probability min(1, √(t/f) + t/f) that a word of frequency f is a target.

    >>> keep_probabilities(np.array([96, 4]), subsample=0.01).round(4).tolist()
    [0.1125, 0.75]
    """
    frequencies = counts / counts.sum()
    ratios = subsample / frequencies
    kept: FloatArray = np.minimum(1, np.sqrt(ratios) + ratios)
    return kept


class WordTable:
    """Word vectors and their Adam moments; a step changes only the rows of its words.

    The steps are those of `torch.optim.SparseAdam`, which would wait for the device at every step
    to sort the rows and find repeated ones. Since the steps are small, launching the operations
    dominates on a GPU: so the vector and the moments of a word are adjacent, to be read and written
    at once, and what the steps have in common is computed for many of them.
    """

    def __init__(self, rows: Float[Tensor, "words three hidden"], n_steps: int = 0) -> None:
        self.rows, self.n_steps = rows, n_steps
        # Gradients of repeated words are summed here; it is zero between steps.
        self._sums = torch.zeros_like(rows[:, 0])

    @classmethod
    def create(cls, n_words: int, n_dims: int, seed: int, device: torch.device) -> WordTable:
        """Return a table of vectors drawn from U(−1/d, 1/d), the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.rand(n_words, n_dims, generator=generator).mul_(2).sub_(1).div_(n_dims)
        rows = torch.zeros(n_words, 3, n_dims, device=device)
        rows[:, 0] = vectors.to(device)
        return cls(rows)

    @property
    def vectors(self) -> Float[Tensor, "words hidden"]:
        """The vectors, a view that later steps change."""
        return self.rows[:, 0]

    @torch.inference_mode()
    def take_steps(
        self,
        contexts: Float[Tensor, "targets hidden"],
        words: Int[Tensor, "targets words"],
        n_targets: Sequence[int],
        learning_rate: float,
    ) -> Float[Tensor, ""]:
        """Move targets, the first column of `words`, toward their contexts, and negatives away.

        `n_targets` is the number of targets of each step, never 0. Return the sum of the losses.
        """
        signs = negative_sampling_signs(words.shape[1], words.device)
        sizes = list(n_targets)
        steps = zip(contexts.split_with_sizes(sizes), words.split_with_sizes(sizes), strict=True)
        exponents = [self._step(*step, signs, learning_rate) for step in steps]
        return negative_sampling_loss(torch.cat(exponents))

    def _step(
        self,
        contexts: Float[Tensor, "targets hidden"],
        words: Int[Tensor, "targets words"],
        signs: Float[Tensor, "words"],
        learning_rate: float,
    ) -> Float[Tensor, "targets words"]:
        index, contexts = words.flatten(), contexts[:, None]
        rows = self.rows.index_select(0, index)
        vectors, mean, square = rows.unbind(1)
        scores = (vectors.view(*words.shape, -1) * contexts).sum(-1)
        exponents, slopes = negative_sampling(scores, signs)
        gradients = self._sum_repeated(index, (slopes[..., None] * contexts).flatten(0, 1))
        mean.lerp_(gradients, 1 - BETAS[0])
        square.lerp_(gradients.square_(), 1 - BETAS[1])
        self.n_steps += 1
        first, second = (1 - beta**self.n_steps for beta in BETAS)
        rate = learning_rate * second**0.5 / first
        roots = torch.sqrt(square, out=gradients)
        vectors.addcdiv_(mean, roots.add_(EPSILON), value=-rate)
        self.rows.index_copy_(0, index, rows)  # repeated words write the same numbers
        return exponents

    def _sum_repeated(
        self, index: Int[Tensor, "items"], gradients: Float[Tensor, "items hidden"]
    ) -> Float[Tensor, "items hidden"]:
        """Replace each gradient by the sum of the gradients of its word."""
        total = self._sums.index_add_(0, index, gradients).index_select(0, index)
        self._sums.index_fill_(0, index, 0)
        return total


def negative_sampling_signs(n_words: int, device: torch.device) -> Float[Tensor, "words"]:
    """Return the signs of scores in the exponents of the loss: −1 for a target, 1 for negatives."""
    signs = torch.ones(n_words, device=device)
    signs[0].neg_()  # a tensor from a list would wait for the device
    return signs


def negative_sampling(
    scores: Float[Tensor, "targets words"], signs: Float[Tensor, "words"]
) -> tuple[Float[Tensor, "targets words"], Float[Tensor, "targets words"]]:
    """Return the exponents of the clamped logistic loss, and the gradient of the mean loss.

    The first column is the score s of a target with its context, the others are the scores n of its
    negative samples. The loss is the mean over targets of log(1 + e^−s) + Σ log(1 + e^n), with
    scores clamped to ±20 (Gupta and Jaggi, 2021); the exponents are −s and n. The gradient of a
    clamped score is zero.

    >>> signs = negative_sampling_signs(3, torch.device("cpu"))
    >>> exponents, gradient = negative_sampling(torch.tensor([[0.0, 0.0, -30.0]]), signs)
    >>> round(negative_sampling_loss(exponents).item(), 4), gradient.tolist()
    (1.3863, [[-0.5, 0.5, 0.0]])
    """
    signed = scores * signs
    exponents = signed.clamp(-MAX_SCORE, MAX_SCORE)
    slopes = exponents.sigmoid() * (exponents == signed)
    return exponents, slopes / (signs * len(scores))


def negative_sampling_loss(exponents: Float[Tensor, "targets words"]) -> Float[Tensor, ""]:
    """Return the sum of the targets' losses in double precision."""
    return functional.softplus(exponents).sum(dtype=torch.float64)
