"""Reproducible choice of the next training examples: languages by their shares, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]


def language_probabilities(sizes: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Return rebalanced probabilities of languages: p_i ∝ N_i^α (Conneau and Lample, 2019).

    α = 1 keeps the proportions of the data, α = 0 makes all languages equal.

    >>> language_probabilities({"en": 900, "sw": 100}, alpha=0.5)
    {'en': 0.75, 'sw': 0.25}
    """
    weights = {language: float(size) ** alpha for language, size in sizes.items() if size > 0}
    total = sum(weights.values())
    return {language: weight / total for language, weight in weights.items()}


def derive_seed(*key: int) -> int:
    """Combine integers into one 63-bit seed, the same on every machine."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def compact_arange(n_examples: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return 0, 1, 2, … in the smallest integer type: corpora have many millions of examples."""
    return np.arange(n_examples, dtype=np.min_scalar_type(n_examples))


class BlockSampler:
    """Draws examples from several corpora in fixed proportions.

    The endless stream of examples is divided into blocks. Block b is a pure function of (seed, b),
    so that no state has to be saved and every process computes the same block. The examples of a
    corpus come in a new random order every epoch: none is repeated before all were drawn.
    """

    def __init__(
        self, sizes: Sequence[int], shares: Sequence[float], block_size: int, seed: int
    ) -> None:
        self.sizes, self.block_size, self.seed = list(sizes), block_size, seed
        self.shares = np.asarray(shares, dtype=np.float64) / np.sum(shares)
        self._orders: dict[tuple[int, int], npt.NDArray[np.unsignedinteger[Any]]] = {}

    def block(self, number: int) -> tuple[IntArray, IntArray]:
        """Return the (corpus, example) indices of a block, shuffled."""
        parts = [self._take(corpus, number) for corpus in range(len(self.sizes))]
        corpora = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        order = self._generator(0, number).permutation(len(corpora))
        return corpora[order], np.concatenate(parts)[order]

    def _take(self, corpus: int, number: int) -> IntArray:
        """Return the examples of one corpus in a block, which may span several epochs."""
        share, size = self.shares[corpus] * self.block_size, self.sizes[corpus]
        start, stop = int(share * number), int(share * (number + 1))
        parts: list[npt.NDArray[Any]] = [np.zeros(0, dtype=np.int64)]
        while start < stop:
            epoch, offset = divmod(start, size)
            n_taken = min(stop - start, size - offset)
            parts.append(self._order(corpus, epoch)[offset : offset + n_taken])
            start += n_taken
        return np.concatenate(parts)

    def _order(self, corpus: int, epoch: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Return the order of a corpus in an epoch; only the latest is kept in memory."""
        if (corpus, epoch) not in self._orders:
            others = {key: order for key, order in self._orders.items() if key[0] != corpus}
            examples = compact_arange(self.sizes[corpus])
            shuffled = self._generator(1, corpus, epoch).permutation(examples)
            self._orders = others | {(corpus, epoch): shuffled}
        return self._orders[corpus, epoch]

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, *key))))
