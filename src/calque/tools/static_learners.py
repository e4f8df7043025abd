"""Two ways to learn a vector a word from its occurrences: X2Static, and the mean of its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from calque.text.streams import seed_of
from calque.tools.word_table import WordTable
from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.tools.static_vocabulary import WordCorpus
    from calque.tools.word_contexts import Choose, OccurrenceBlock, View

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float64]

# Sentences are encoded, sorted by length, in blocks of about so many.
BLOCK_SENTENCES = 4096
# What a seed is for, so that no two draws are the same.
START, ORDER, TARGETS, NEGATIVES = range(4)


@dataclass(frozen=True, slots=True)
class X2StaticSettings:
    """How to learn by X2Static; the numbers are those of Gupta and Jaggi's (2021) release.

    Paper: the context of a word is all other tokens of its sentence. Release: all tokens, the
    word itself and the marks of the sentence included (`context="all"`).
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
            raise InputError(f"context {self.context!r} is not known", fix="try others or all")
        for name in ("n_negatives", "subsample", "learning_rate", "batch_sentences", "n_epochs"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}={getattr(self, name)}", fix="choose more than 0")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}", fix="choose 0 or more")


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """Take the mean of a word's states (Bommasani et al., 2020): there is nothing to choose."""


class Learner(Protocol):
    """Takes the occurrences of words block by block, so that each block can be the last.

    What it does with a block depends on the block's number and the seed alone, not on the run.
    """

    view: View
    n_epochs: int
    block_sentences: int

    def order(self, epoch: int) -> IntArray:
        """Give the order of the sentences."""

    def choose(self, block: int) -> Choose:
        """Give what chooses words out of a block."""

    def absorb(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Learn from occurrences and what the encoder made of them."""

    def state(self) -> dict[str, Tensor]:
        """Give all that was learnt."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what was learnt."""

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Give the vectors of the words."""


class X2StaticLearner:
    """Learns vectors that tell a word from others by its context (Gupta and Jaggi, 2021)."""

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
        self._cumulated = torch.from_numpy(np.cumsum(np.sqrt(corpus.counts))).to(device)
        seed = seed_of(settings.seed, START)
        self.table = WordTable.create(len(corpus.words), n_dims, seed, device)
        # Of this epoch: the number of targets, and the sum of their losses.
        self.figures = torch.zeros(2, dtype=torch.float64, device=device)
        # Which words were a target at least once: the others are as they were drawn.
        self.is_learnt = torch.zeros(len(corpus.words), dtype=torch.bool, device=device)

    def order(self, epoch: int) -> IntArray:
        """Shuffle the sentences anew in every epoch."""
        seed = seed_of(self.settings.seed, ORDER, epoch)
        return np.random.default_rng(seed).permutation(self.n_sentences)

    def choose(self, block: int) -> Choose:
        """Choose targets: words of the vocabulary with a context, frequent ones less often."""
        random = np.random.default_rng(seed_of(self.settings.seed, TARGETS, block))

        def is_target(rows: IntArray, n_others: IntArray) -> npt.NDArray[np.bool_]:
            kept: npt.NDArray[np.bool_] = random.random(len(rows)) < self._keep[rows]
            return kept & (rows >= 0) & ((n_others > 0) | (self.view == "all"))

        return is_target

    def absorb(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Take a step for every batch of sentences, in the order of the text."""
        if number % self._n_blocks == 0:
            self.figures.zero_()
        if len(vectors) == 0:
            return
        negatives = self._draw_negatives(number, len(vectors))
        words = torch.cat([block.rows[:, None], negatives], dim=1)
        firsts = np.arange(0, len(block.n_found), self.settings.batch_sentences)
        n_targets = np.add.reduceat(block.n_found, firsts)
        steps, rate = n_targets[n_targets > 0].tolist(), self.settings.learning_rate
        self.is_learnt[block.rows] = True
        self.figures[0] += len(vectors)
        self.figures[1] += self.table.take_steps(vectors, words, steps, rate)

    def state(self) -> dict[str, Tensor]:
        """Give the table with its moments."""
        steps = torch.tensor(self.table.n_steps)
        return {
            "table": self.table.rows,
            "steps": steps,
            "figures": self.figures,
            "is_learnt": self.is_learnt,
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put a table with its moments back."""
        self.table = WordTable(state["table"].to(self.device), int(state["steps"]))
        self.figures = state["figures"].to(self.device)
        # A state that was kept by an earlier version does not say it.
        self.is_learnt = state.get("is_learnt", ~self.is_learnt).to(self.device)

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Give the vectors of the words."""
        return self.table.vectors.contiguous()

    def _draw_negatives(self, block: int, n_targets: int) -> Int[Tensor, "targets negatives"]:
        """Draw words with a probability that grows with the square root of their count."""
        seed = seed_of(self.settings.seed, NEGATIVES, block)
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (n_targets, self.settings.n_negatives)
        draws = torch.rand(size, generator=generator, dtype=torch.float64, device=self.device)
        places = torch.searchsorted(self._cumulated, draws * self._cumulated[-1], right=True)
        return places.clamp_(max=len(self._cumulated) - 1)


class PoolingLearner:
    """Averages, over a word's occurrences, the mean of its subwords (Bommasani et al., 2020)."""

    view: View = "word"
    n_epochs = 1
    block_sentences = BLOCK_SENTENCES

    def __init__(self, corpus: WordCorpus, n_dims: int, device: torch.device) -> None:
        self.n_sentences, self.device = len(corpus), device
        self._counts = torch.from_numpy(corpus.counts).to(device)
        # A frequent word occurs so often that its sum would outgrow single precision.
        self.total = torch.zeros(len(corpus.words), n_dims, dtype=torch.float64, device=device)

    def order(self, epoch: int) -> IntArray:
        """Leave the sentences in their order."""
        return np.arange(self.n_sentences)

    def choose(self, block: int) -> Choose:
        """Choose all words of the vocabulary."""
        return lambda rows, n_others: rows >= 0

    def absorb(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Add the occurrences up."""
        self.total.index_add_(0, block.rows, vectors.double())

    def state(self) -> dict[str, Tensor]:
        """Give the sums."""
        return {"total": self.total}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put the sums back."""
        self.total = state["total"].to(self.device)

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Give the means."""
        return (self.total / self._counts[:, None]).float()


def keep_probabilities(counts: IntArray, subsample: float) -> FloatArray:
    """Give the probability min(1, √(t/f) + t/f) by which a word of frequency f is a target.

    >>> keep_probabilities(np.array([96, 4]), subsample=0.01).round(4).tolist()
    [0.1125, 0.75]
    """
    frequencies = counts / counts.sum()
    ratios = subsample / frequencies
    kept: FloatArray = np.minimum(1, np.sqrt(ratios) + ratios)
    return kept
