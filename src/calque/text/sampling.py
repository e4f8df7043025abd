"""Which language, and which of its examples, comes next: reproducible and resumable.

The endless stream of examples is cut into blocks. Block b is a pure function of (seed, b): no
state has to be saved to go on from it, and every process computes the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def language_probabilities(sizes: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Rebalance languages: p_i ∝ N_i^α (Conneau and Lample, 2019).

    α = 1 keeps the data's own shares, α = 0 makes all languages equal.

    >>> language_probabilities({"en": 900, "sw": 100}, alpha=0.5)
    {'en': 0.75, 'sw': 0.25}
    """
    weights = {language: float(size) ** alpha for language, size in sizes.items() if size > 0}
    total = sum(weights.values())
    return {language: weight / total for language, weight in weights.items()}


def number_examples(n_examples: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Count 0, 1, 2, … in the smallest type that holds them: corpora have many millions."""
    return np.arange(n_examples, dtype=np.min_scalar_type(n_examples))


class BlockSampler:
    """Draws examples from several corpora in fixed shares, each corpus epoch by epoch.

    A corpus is gone through in a fresh random order every epoch, so none of its examples
    comes a second time before all have come once.
    """

    def __init__(
        self, sizes: Sequence[int], shares: Sequence[float], block_size: int, seed: int
    ) -> None:
        self.sizes, self.block_size, self.seed = list(sizes), block_size, seed
        self.shares = np.asarray(shares, dtype=np.float64) / np.sum(shares)
        self._orders: dict[tuple[int, int], npt.NDArray[np.unsignedinteger[Any]]] = {}

    def block(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (corpus, example) indices of a block, shuffled."""
        parts = [self._take(corpus, number) for corpus in range(len(self.sizes))]
        corpora = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        order = self._generator(0, number).permutation(len(corpora))
        return corpora[order], np.concatenate(parts)[order]

    def _take(self, corpus: int, number: int) -> npt.NDArray[np.int64]:
        """Examples of one corpus in a block: a stretch of its endless, reshuffled stream."""
        share, size = self.shares[corpus] * self.block_size, self.sizes[corpus]
        place, stop = int(share * number), int(share * (number + 1))
        pieces: list[npt.NDArray[Any]] = [np.zeros(0, dtype=np.int64)]
        while place < stop:
            epoch, offset = divmod(place, size)
            n_taken = min(stop - place, size - offset)
            pieces.append(self._order(corpus, epoch)[offset : offset + n_taken])
            place += n_taken
        return np.concatenate(pieces)

    def _order(self, corpus: int, epoch: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Give the order of a corpus in an epoch; only the latest is kept: streams go forward."""
        if (corpus, epoch) not in self._orders:
            others = {key: order for key, order in self._orders.items() if key[0] != corpus}
            everything = number_examples(self.sizes[corpus])
            drawn = self._generator(1, corpus, epoch).permutation(everything)
            self._orders = others | {(corpus, epoch): drawn}
        return self._orders[corpus, epoch]

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, *key))))
