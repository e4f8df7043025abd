"""Sentence pairs in which linked words have the same color."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from calque.tools.aligning import WordPair

COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red")
UNLINKED = "dim"


def color_links(pair: WordPair, links: Sequence[tuple[int, int]]) -> tuple[Text, Text]:
    """Give both sentences; words that links join, directly or through others, share a color.

    Where there is no color, a number says the same: das₁ Haus₂ – the₁ house₂.
    """
    from rich.text import Text

    groups = group_words(len(pair[0]), len(pair[1]), links)
    sentences = []
    for words, numbers in zip(pair, groups, strict=True):
        text = Text()
        for k, (word, number) in enumerate(zip(words, numbers, strict=True)):
            style = UNLINKED if number is None else COLORS[number % len(COLORS)]
            text.append(" " if k else "").append(word, style)
            if number is not None:
                text.append(_lower(number + 1), style)
        sentences.append(text)
    return sentences[0], sentences[1]


def group_words(
    n_src: int, n_tgt: int, links: Sequence[tuple[int, int]]
) -> tuple[list[int | None], list[int | None]]:
    """Number the groups of linked words in the order of the source; None for a word without links.

    >>> group_words(3, 2, [(2, 0), (0, 1), (1, 1)])
    ([0, 0, 1], [1, 0])
    """
    groups: list[set[tuple[int, int]]] = []
    for i, j in sorted(links):
        members = {(0, i), (1, j)}
        joined = [group for group in groups if group & members]
        groups = [group for group in groups if not group & members]
        groups.append(members.union(*joined))
    groups.sort(key=min)
    owner = {word: number for number, group in enumerate(groups) for word in group}
    return [owner.get((0, i)) for i in range(n_src)], [owner.get((1, j)) for j in range(n_tgt)]


def _lower(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))
