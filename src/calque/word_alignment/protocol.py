"""What every word aligner takes and gives, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from calque.types import Links

WordPair: TypeAlias = tuple[Sequence[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class AlignReport:
    """What was aligned: `n_long` pairs exceeded the model and took `n_windows` windows.

    `n_empty` pairs had a side without words, and so no links; `n_cut` words were too long for
    the model and are known by their beginnings.
    """

    n_pairs: int = 0
    n_links: int = 0
    n_empty: int = 0
    n_long: int = 0
    n_windows: int = 0
    n_cut: int = 0

    def __add__(self, other: AlignReport) -> AlignReport:
        return AlignReport(
            self.n_pairs + other.n_pairs,
            self.n_links + other.n_links,
            self.n_empty + other.n_empty,
            self.n_long + other.n_long,
            self.n_windows + other.n_windows,
            self.n_cut + other.n_cut,
        )


@dataclass(frozen=True, slots=True)
class AlignedBlock:
    """The links of some consecutive sentence pairs, and what was met on the way."""

    links: Links
    report: AlignReport


class Aligner(Protocol):
    """Links the words of sentence pairs.

    What a pair's links are depends on that pair alone, but for aligners that say otherwise.
    """

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        """Align some pairs, in their order; they begin with pair `first` of a longer text."""
        ...
