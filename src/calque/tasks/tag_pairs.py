"""Tagged sentences beside their translations, window by window, for a tagger that plugs VECO in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from calque.tasks.plugging import Paired, PairRows
from calque.tasks.tag_examples import TagBatch, TagExamples, lay_tags
from calque.text.batching import BatchShape, Ragged, ranges
from calque.text.tagged import NO_TAG, TaggedSentence

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TagPairs:
    """Pairs among the windows of sentences and of their translations.

    `own` are the sentences alone, which are scored; `both` has the translations after them.
    """

    own: TagExamples
    both: TagExamples
    rows: PairRows
    counts: Mapping[str, int]

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every pair."""
        return self.rows.count_tokens(self.both.windows)

    @property
    def tags(self) -> IntArray:
        """Give the tags of the sentences' words."""
        return self.own.tags

    @property
    def words(self) -> IntArray:
        """Say which word of the text each tagged one is."""
        return self.both.words

    @property
    def names(self) -> Sequence[str]:
        """Name the tags by number."""
        return self.own.names

    @property
    def n_words(self) -> IntArray:
        """Count the words of every sentence."""
        return self.own.n_words

    def find_words(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Number the tagged words of some pairs, and say how many each of their windows has."""
        windows, first = self.rows.sequences(rows), self.both.first_words
        n_words = np.where(self.rows.asked(rows), np.diff(first)[windows], 0)
        return ranges(first[:-1][windows], n_words), n_words

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> TagBatch:
        """Lay out some pairs, without padding or up to a fixed shape."""
        both = self.both
        tokens, placed = self.rows.place(both.windows, rows, pad_id=both.pad_id, shape=shape)
        words, n_words = self.find_words(rows)
        windows = self.rows.sequences(rows)
        lengths = np.where(windows < 0, 0, both.windows.lengths[windows])
        begins = np.repeat(np.cumsum(lengths) - lengths, n_words)
        slots = placed.slots[begins + both.places[words]]
        n_rows = 2 * (len(rows) if shape is None else max(len(rows), shape.sequences))
        n_most = n_words if shape is None else np.diff(both.first_words)
        size = n_rows, int(n_most.max(initial=1))
        return lay_tags(tokens, slots, both.tags[both.words[words]], n_words, size)


def encode_tag_pairs(
    encode: Callable[[Sequence[TaggedSentence], list[str]], TagExamples],
    pairs: Sequence[Paired[TaggedSentence]],
    names: list[str],
) -> TagPairs:
    """Encode sentences and translations; of two that are cut, window k reads window k.

    Where one has more windows, the rest of them read the last of the other.
    """
    own = encode([pair.example for pair in pairs], names)
    others = encode([_hide(pair) for pair in pairs if pair.other is not None], names)
    assert len(others.names) == len(names), "a translation has a tag that nobody knows"
    left, right = _split_windows(own), _split_windows(others)
    first, there = len(own.windows.lengths), iter(right)
    rows: list[tuple[int, int, bool, bool]] = []
    for pair, mine in zip(pairs, left, strict=True):
        theirs = [first + window for window in next(there)] if pair.other is not None else [-1]
        for place in range(max(len(mine), len(theirs))):
            here, other = mine[min(place, len(mine) - 1)], theirs[min(place, len(theirs) - 1)]
            asks = pair.learns_other and other >= 0 and place < len(theirs)
            rows.append((here, other, place < len(mine), asks))
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    counts = dict(own.counts)
    if others.counts.get("sentences_in_windows"):
        counts["translations_in_windows"] = others.counts["sentences_in_windows"]
    asked = table[:, 2:].astype(np.bool_)
    pair_rows = PairRows(table[:, 0], table[:, 1], asked[:, 0], asked[:, 1])
    return TagPairs(own, _join(own, others), pair_rows, counts)


def _hide(pair: Paired[TaggedSentence]) -> TaggedSentence:
    """Give a translation without the tags that are not to be learnt."""
    assert pair.other is not None
    if pair.learns_other:
        return pair.other
    return TaggedSentence(pair.other.words, (NO_TAG,) * len(pair.other.words))


def _split_windows(examples: TagExamples) -> list[list[int]]:
    """List the windows of every sentence."""
    found: list[list[int]] = [[] for _ in examples.n_words]
    for window, sentence in enumerate(examples.sentences.tolist()):
        found[sentence].append(window)
    return found


def _join(own: TagExamples, others: TagExamples) -> TagExamples:
    """Put two sets of sentences one after the other."""
    shift = own.first_words[-1]
    return replace(
        own,
        windows=Ragged(
            np.concatenate([own.windows.ids, others.windows.ids]),
            np.concatenate([own.windows.lengths, others.windows.lengths]),
        ),
        first_words=np.concatenate([own.first_words, shift + others.first_words[1:]]),
        places=np.concatenate([own.places, others.places]),
        words=np.concatenate([own.words, len(own.tags) + others.words]),
        tags=np.concatenate([own.tags, others.tags]),
        has_pieces=np.concatenate([own.has_pieces, others.has_pieces]),
        n_words=np.concatenate([own.n_words, others.n_words]),
        sentences=np.concatenate([own.sentences, len(own.n_words) + others.sentences]),
    )
