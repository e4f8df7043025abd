"""Batches of sentence pairs whose words are linked: side by side with masks, and each alone.

Tokens are packed as codes, places in tables of all that is known of a token: whatever row a pair
lands in, its ids, words and links are looked up there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from calque.objectives.masked_lm import join_sides, mark_sides, mask_batch, swap_sides
from calque.objectives.self_labels import LEFT, NEITHER, RIGHT
from calque.text.batching import BatchShape, Ragged, add_marks, pack
from calque.text.linked_bitext import FULL_WEIGHT, unpack_links
from calque.types import TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.objectives.base import Marks
    from calque.text.masking import MaskingRules

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LinkedPairs:
    """Pairs laid out for an encoder, and where their words and links lie.

    `tokens` are the sequences that attend, `pairs` the same tokens before masking, with the
    bounds of whole pairs. `sides` tell the side of a word at its first subword, and NEITHER
    elsewhere; `words` give the place of the first subword of a token's word. `cells` are places
    in the flattened blocks × width × width of `PairBlocks`, `weights` those of the links there:
    0 is no link.
    """

    tokens: TokenBatch
    pairs: TokenBatch
    sides: Int[Tensor, "tokens"]
    words: Int[Tensor, "tokens"]
    cells: Int[Tensor, "links"]
    weights: Float[Tensor, "links"]

    def map(self, act: Callable[[Tensor], Tensor]) -> LinkedPairs:
        """Do something to every array."""
        return LinkedPairs(
            _map_tokens(self.tokens, act),
            _map_tokens(self.pairs, act),
            act(self.sides),
            act(self.words),
            act(self.cells),
            act(self.weights),
        )


@dataclass(frozen=True, slots=True)
class LinkedBatch:
    """Masked pairs side by side, what the masks hide, and the sentences apart, if wanted."""

    joint: LinkedPairs
    masked: Int[Tensor, "masked"]
    labels: Int[Tensor, "masked"]
    separate: LinkedPairs | None

    @property
    def tokens(self) -> TokenBatch:
        """Give the masked pairs."""
        return self.joint.tokens

    def pin_memory(self) -> LinkedBatch:
        """Move the arrays to page-locked memory, from which copies to a GPU do not wait."""
        return self._map(lambda array: array.pin_memory())

    def to(self, device: torch.device | str) -> LinkedBatch:
        """Copy the arrays to a device, without waiting for the copy."""
        return self._map(lambda array: array.to(device, non_blocking=True))

    def _map(self, act: Callable[[Tensor], Tensor]) -> LinkedBatch:
        separate = None if self.separate is None else self.separate.map(act)
        return LinkedBatch(self.joint.map(act), act(self.masked), act(self.labels), separate)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What is known of every token of a batch by its code: source, target, then three marks.

    `first_codes` are the codes of the first subwords of the tokens' words; those of marks are
    their own. `links` are codes of first subwords of source and target words.
    """

    ids: IntArray
    sides: npt.NDArray[np.int8]
    first_codes: IntArray
    links: tuple[IntArray, IntArray]
    weights: npt.NDArray[np.float32]

    @classmethod
    def of(cls, arrays: tuple[Ragged, ...], marks: Marks) -> Self:
        """Read sides, subwords of their words, and links."""
        src, tgt, src_words, tgt_words, links = arrays
        ids = np.concatenate([src.ids, tgt.ids, [marks.first, marks.last, marks.pad]])
        n_pieces = np.concatenate([src_words.ids, tgt_words.ids])
        starts = np.cumsum(n_pieces) - n_pieces
        n_tokens, n_src_words = int(n_pieces.sum()), len(src_words.ids)
        sides = np.full(len(ids), NEITHER, dtype=np.int8)
        first = starts[n_pieces > 0]
        sides[first] = np.where(first < len(src.ids), LEFT, RIGHT)
        first_codes = np.concatenate([np.repeat(starts, n_pieces), n_tokens + np.arange(3)])
        i, j, levels = unpack_links(links.ids)
        i = i + np.repeat(_starts(src_words.lengths), links.lengths)
        j = j + np.repeat(_starts(tgt_words.lengths), links.lengths) + n_src_words
        # A word that the tokenizer takes for nothing has no state to compare.
        real = (n_pieces[i] > 0) & (n_pieces[j] > 0)
        weights = (levels[real] / FULL_WEIGHT).astype(np.float32)
        return cls(ids, sides, first_codes, (starts[i[real]], starts[j[real]]), weights)

    def encode_marks(self, marks: Marks) -> Marks:
        """Give the codes of the marks."""
        n_tokens = len(self.ids) - 3
        return replace(marks, first=n_tokens, last=n_tokens + 1, pad=n_tokens + 2)

    def find_slots(self, code: IntArray) -> tuple[IntArray, IntArray]:
        """Give the place of each code, and for each place that of its word's first subword."""
        slots = np.arange(len(code))
        slot_of = np.zeros(len(self.ids), dtype=np.int64)
        slot_of[code] = slots
        first = self.first_codes[code]
        return slot_of, np.where(first < len(self.ids) - 3, slot_of[first], slots)

    def decode(self, codes: TokenBatch, n_links: int) -> LinkedPairs:
        """Look up what has been packed as codes; fill the links up to a number of them."""
        code = codes.ids.numpy()
        sides = self.sides[code]
        slot_of, words = self.find_slots(code)
        cells = _find_cells(slot_of[self.links[0]], slot_of[self.links[1]], codes)
        n_fill = n_links - len(cells)
        tokens = replace(codes, ids=torch.from_numpy(self.ids[code]))
        return LinkedPairs(
            tokens,
            tokens,
            torch.from_numpy(sides),
            torch.from_numpy(words.astype(np.int32)),
            # Cell 0 is where the first mark meets itself: no link is there.
            torch.from_numpy(np.pad(cells, (0, n_fill))),
            torch.from_numpy(np.pad(self.weights, (0, n_fill))),
        )


@dataclass(frozen=True, slots=True)
class LinkedCollator:
    """Builds batches: each pair in either order by a coin, the same for both layouts."""

    marks: Marks
    rules: MaskingRules
    shape: BatchShape | None
    reset: bool
    separate: bool

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> LinkedBatch:
        """Build one batch."""
        table = TokenTable.of(arrays, self.marks)
        marks = table.encode_marks(self.marks)
        src, tgt = arrays[:2]
        n_src, n_tgt = len(src.ids), len(tgt.ids)
        left, right = swap_sides(
            Ragged(np.arange(n_src), src.lengths),
            Ragged(np.arange(n_src, n_src + n_tgt), tgt.lengths),
            generator,
        )
        n_links = self._count_links(len(table.weights))
        joined, positions = join_sides(*mark_sides(left, right, marks), reset=self.reset)
        codes = pack(joined, positions=positions, shape=self.shape, pad_id=marks.pad)
        joint = table.decode(codes, n_links)
        hidden = mask_batch(joint.tokens, self.rules, generator, self.shape)
        joint = replace(joint, tokens=hidden.tokens)
        separate = self._separate(table, left, right, marks, n_links) if self.separate else None
        return LinkedBatch(joint, hidden.masked, hidden.labels, separate)

    def _separate(
        self, table: TokenTable, left: Ragged, right: Ragged, marks: Marks, n_links: int
    ) -> LinkedPairs:
        """Pack both sentences of a pair as one, so that they share a row; then cut them apart."""
        sentences = (add_marks(side, marks.first, marks.last) for side in (left, right))
        joined, positions = join_sides(*sentences, reset=True)
        codes = pack(joined, positions=positions, shape=self.shape, pad_id=marks.pad)
        linked = table.decode(codes, n_links)
        firsts = np.flatnonzero(codes.ids.numpy() == marks.first)
        return replace(linked, tokens=cut_sequences(linked.tokens, firsts, self.shape))

    def _count_links(self, n_links: int) -> int:
        """Choose how many links a batch has room for: always as many, unless they do not fit."""
        if self.shape is None:
            return n_links
        room = self.shape.tokens
        while room < n_links:
            room *= 2
        return room


def cut_sequences(tokens: TokenBatch, starts: IntArray, shape: BatchShape | None) -> TokenBatch:
    """Cut sequences where others start; with a shape, the number of bounds stays the same."""
    bounds = np.union1d(tokens.offsets.numpy(), starts)
    longest = tokens.row or int(np.diff(bounds).max())
    if shape is not None:
        capacity = len(tokens.offsets) + shape.sequences
        bounds = np.pad(bounds, (0, max(0, capacity - len(bounds))), mode="edge")
    return replace(tokens, offsets=torch.from_numpy(bounds.astype(np.int32)), longest=longest)


def _find_cells(src: IntArray, tgt: IntArray, tokens: TokenBatch) -> IntArray:
    """Turn the flat places of linked words into flat places in the blocks of their pairs."""
    if tokens.row:
        return src * tokens.row + tgt % tokens.row
    bounds, width = tokens.offsets.numpy().astype(np.int64), tokens.longest
    block = np.searchsorted(bounds, src, side="right") - 1
    return (block * width + src - bounds[block]) * width + tgt - bounds[block]


def _map_tokens(tokens: TokenBatch, act: Callable[[Tensor], Tensor]) -> TokenBatch:
    ids, positions = act(tokens.ids), act(tokens.positions)
    return replace(tokens, ids=ids, positions=positions, offsets=act(tokens.offsets))


def _starts(lengths: IntArray) -> IntArray:
    starts: IntArray = np.cumsum(lengths) - lengths
    return starts
