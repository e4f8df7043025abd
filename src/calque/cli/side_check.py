"""Notices a bitext whose sides come in another order than those of the text beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calque.tools.aligning import WordPair

MARGIN = 2  # so many times as many words on the other side as on their own


class SideCheck:
    """Passes pairs of words on, and counts on which side of the bitext the text's words stand."""

    def __init__(self) -> None:
        self._words: tuple[set[str], set[str]] = set(), set()
        self.n_straight, self.n_crossed = 0, 0

    @property
    def is_crossed(self) -> bool:
        """Whether the sides of the bitext seem to be the other way round."""
        return self.n_crossed > MARGIN * self.n_straight

    def pass_text(self, pairs: Iterable[WordPair]) -> Iterator[WordPair]:
        """Take note of the words of either side; words of both sides tell nothing."""
        for pair in pairs:
            for known, words in zip(self._words, pair, strict=True):
                known.update(words)
            yield pair

    def pass_bitext(self, pairs: Iterable[WordPair]) -> Iterator[WordPair]:
        """Count the words that stand where the text has them, and on the other side."""
        first, second = self._words[0] - self._words[1], self._words[1] - self._words[0]
        for pair in pairs:
            src, tgt = map(frozenset, pair)
            self.n_straight += len(first & src) + len(second & tgt)
            self.n_crossed += len(first & tgt) + len(second & src)
            yield pair
