"""Sentences of running text with the sentence before each: pairs without a translation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.text.batching import Ragged
    from calque.text.store import TokenStore


@dataclass(frozen=True)
class PreviousSentences:
    """A store whose sentence k is the one before sentence k of another; the first is empty.

    The sentence before rather than after: so the last sentences, which are kept for validation,
    are in no pair but their own.
    """

    store: TokenStore

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, index: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Count the tokens of the sentences before those asked for."""
        before = index.astype(np.int64) - 1
        return np.where(before >= 0, self.store.lengths(np.maximum(before, 0)), 0)

    def gather(self, index: npt.NDArray[np.integer[Any]]) -> Ragged:
        """Read the sentences before those asked for, in that order; none may be the first."""
        assert len(index) == 0 or index.min() > 0, "nothing comes before the first sentence"
        return self.store.gather(index.astype(np.int64) - 1)
