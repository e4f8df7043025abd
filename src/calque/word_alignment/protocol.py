"""The interface of all word aligners: what they take and what they return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from calque.errors import InputError
from calque.types import Links

WordPair: TypeAlias = tuple[Sequence[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class AlignReport:
    """Counts of what was aligned.

    `n_empty` pairs had a side without words, and so no links. `n_long` pairs were too long for the
    model and were split into `n_windows` windows. `n_cut` words were too long for the model, which
    read only their first subwords.
    """

    n_pairs: int = 0
    n_links: int = 0
    n_empty: int = 0
    n_long: int = 0
    n_windows: int = 0
    n_cut: int = 0


@dataclass(frozen=True, slots=True)
class AlignedBlock:
    """The links of some consecutive sentence pairs, and counts."""

    links: Links
    report: AlignReport


class AlignWarning(UserWarning):
    """Something that makes word links worse than they could be, but does not stop the work."""


class Aligner(Protocol):
    """Links the words of sentence pairs.

    The links of a pair depend on that pair alone, unless an aligner documents otherwise.
    """

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        """Align some pairs in their order; the first one is pair `first` of a longer text."""
        ...


def check_pairs(pairs: Iterable[WordPair]) -> list[WordPair]:
    """Raise InputError if strings are passed where lists of words belong; return a list."""
    everything = list(pairs)
    for number, pair in enumerate(everything):
        if len(tuple(pair)) != 2 or any(isinstance(side, str) for side in pair):
            raise InputError(
                f"pair {number} is not two lists of words",
                fix='pass (["das", "Haus"], ["the", "house"]); split strings into words first',
            )
    return everything
