"""A fair division of examples that share texts: what was learnt from is in no test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split_rows(texts: Sequence[Sequence[str]], share: float) -> tuple[list[int], list[int]]:
    """Divide rows so that rows with a text in common are on the same side, always the same way.

    XNLI has three hypotheses a premise, PAWS-X pairs that share a sentence. Groups are drawn until
    the first side has its share of the rows; both come in the order of the file.

    >>> split_rows([["a", "b"], ["c", "d"], ["b", "e"]], share=0.6)
    ([0, 2], [1])
    """
    groups = _group(texts)
    drawn = np.random.default_rng(0).permutation(len(groups)).tolist()
    first: list[int] = []
    for number in drawn[:-1]:  # one is always left
        if len(first) >= share * len(texts):
            break
        first += groups[number]
    rest = set(range(len(texts))) - set(first)
    return sorted(first), sorted(rest)


def _group(texts: Sequence[Sequence[str]]) -> list[list[int]]:
    """Join rows that share a text, directly or through others."""
    root: dict[str, str] = {}

    def find(text: str) -> str:
        while root.setdefault(text, text) != text:
            root[text] = root[root[text]]
            text = root[text]
        return text

    for row in texts:
        for text in row[1:]:
            root[find(text)] = find(row[0])
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(texts):
        groups.setdefault(find(row[0]), []).append(number)
    return list(groups.values())
