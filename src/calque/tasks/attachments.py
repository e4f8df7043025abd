"""Attachment scores: how many words got their head, and how many their head and relation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calque.tasks.outcome import Items

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.text.treebanks import ParsedSentence

    IntArray = npt.NDArray[np.int64]

# The gold parts of speech of words that are not scored (Ahmad et al., 2019).
IGNORED = frozenset({"PUNCT", "SYM"})
# Relations that version 2 of Universal Dependencies renamed; treebanks of version 1 are about.
RENAMED = {
    "dobj": "obj",
    "nsubjpass": "nsubj:pass",
    "csubjpass": "csubj:pass",
    "auxpass": "aux:pass",
    "mwe": "fixed",
    "name": "flat:name",
    "foreign": "flat:foreign",
}


@dataclass(frozen=True, slots=True)
class Attachments:
    """Of every sentence: words scored, with the right head, with the right head and relation."""

    n_words: IntArray
    n_heads: IntArray
    n_relations: IntArray

    @property
    def uas(self) -> float:
        """Give the share of right heads, in percent."""
        return 100 * int(self.n_heads.sum()) / max(1, int(self.n_words.sum()))

    @property
    def las(self) -> float:
        """Give the share of right heads with the right relation, in percent."""
        return 100 * int(self.n_relations.sum()) / max(1, int(self.n_words.sum()))

    @property
    def items(self) -> Items:
        """Give the labelled score's items: the sentences."""
        return Items(self.n_relations.astype(np.float64), self.n_words.astype(np.float64))


def name_relation(name: str, subtypes: bool = False) -> str:
    """Give a relation the name of version 2 and, unless asked for, drop its subtype.

    The first is what the CoNLL 2018 shared task and Wu and Dredze compare.

    >>> name_relation("nsubjpass"), name_relation("acl:relcl"), name_relation("dobj", subtypes=True)
    ('nsubj', 'acl', 'obj')
    """
    full = RENAMED.get(name, name)
    return full if subtypes else full.partition(":")[0]


def count_attachments(
    gold: Sequence[ParsedSentence],
    heads: Sequence[Sequence[int]],
    relations: Sequence[Sequence[str]],
    *,
    ignored: Collection[str] = IGNORED,
    subtypes: bool = False,
) -> Attachments:
    """Compare predicted arcs with gold ones; words beyond those predicted are not scored.

    With nothing ignored these are the CoNLL 2018 shared task's scores on gold words.
    """
    counts = np.zeros((len(gold), 3), dtype=np.int64)
    for row, (sentence, above, names) in enumerate(zip(gold, heads, relations, strict=True)):
        for tag, head, name, found, found_name in zip(
            sentence.upos, sentence.heads, sentence.deprels, above, names, strict=False
        ):
            if tag in ignored:
                continue
            has_head = head == found
            same = name_relation(name, subtypes) == name_relation(found_name, subtypes)
            counts[row] += (1, has_head, has_head and same)
    return Attachments(*counts.T)
