"""Contrastive learning on given word links, within each sentence pair, plus TLM.

The vector of a word should be closer to the words it is linked with than to the other words of the
translation: in the masked pair side by side, and in the two sentences encoded separately. The links
come from a statistical aligner. Batches of linked words for other objectives are built here too.

Tokens are packed as codes, which index tables of all that is known about a token. Wherever a pair
is placed, its ids, words and links are looked up in these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field

from calque.models.pooling import pool_words
from calque.objectives.base import Objective, ObjectiveSettings, TensorBatch, choose_layer
from calque.objectives.masked_lm import mask_batch, masked_lm_loss, masking_rules, store_positions
from calque.objectives.self_labels import LEFT, NEITHER, RIGHT, PairBlocks, compare_states
from calque.tokens.layout import (
    add_pair_special_tokens,
    join_sides,
    pack_separately,
    swap_sides,
)
from calque.tokens.linked import FULL_WEIGHT, unpack_links
from calque.tokens.ragged import BatchShape, Ragged, add_special_tokens, hash_sequences, pack
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.masking import MaskingRules

    IntArray = npt.NDArray[np.int64]

# The default layer whose states are compared, as a fraction of the layers.
DEPTH = 7 / 8
# Special tokens at the end of a TokenTable: cls, sep and pad.
N_SPECIAL = 3
# The smallest capacity for links in a batch of fixed shape; larger ones are 2, 4, … times this.
MIN_CAPACITY = 256


class LinkedWordsSettings(ObjectiveSettings):
    """Settings of the three losses in a recipe: TLM, and links in joint and separate encoding."""

    kind: Literal["linked_words"] = "linked_words"
    probability: float = Field(0.15, gt=0, lt=1)
    positions: Literal["reset", "continue"] = "reset"
    # The layer whose states represent words. Default: 7/8 of the layers.
    layer: int | None = None
    temperature: float = Field(0.1, gt=0)
    # Weights of the losses; if `separate` is 0, sentences are not encoded separately.
    tlm: float = Field(1.0, ge=0)
    joint: float = Field(1.0, ge=0)
    separate: float = Field(1.0, ge=0)


def linked_words_loss(
    similarity: Float[Tensor, "blocks width width"],
    weights: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
) -> Float[Tensor, ""]:
    """Return ½ · (rows + columns), each the mean over linked words of −Σ w log softmax / Σ w.

    The softmax is over the cells of a word's row or column. Weights above 0 are links and must be
    in cells. Words without links are only negatives. Without any link the loss is 0.

    >>> cells = torch.ones(1, 1, 2, dtype=torch.bool)
    >>> loss = linked_words_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]), cells)
    >>> round(loss.item(), 4)  # half of ln 2: the column has no negative
    0.3466
    """
    # A finite value instead of −∞: a word without partners would otherwise give NaN.
    scores = similarity.masked_fill(~cells, torch.finfo(similarity.dtype).min)
    products = similarity * weights
    losses = []
    for side in (2, 1):
        total = weights.sum(dim=side)
        is_linked = total > 0
        linked = products.sum(dim=side) / torch.where(is_linked, total, 1.0)
        by_word = torch.where(is_linked, scores.logsumexp(dim=side) - linked, 0.0)
        losses.append(by_word.sum() / is_linked.sum().clamp(min=1))
    return (losses[0] + losses[1]) / 2


def linked_words_accuracy(
    similarity: Float[Tensor, "blocks width width"],
    weights: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
) -> Float[Tensor, ""]:
    """Return the fraction of linked words whose most similar partner is one of their links."""
    scores, links = similarity.masked_fill(~cells, -torch.inf), weights > 0
    n_found = n_linked = torch.zeros((), device=links.device)
    for side in (2, 1):
        best = scores.argmax(dim=side, keepdim=True)
        n_found = n_found + links.gather(side, best).sum()
        n_linked = n_linked + links.any(dim=side).sum()
    return n_found / n_linked.clamp(min=1)


def compare_words(
    states: Float[Tensor, "blocks width hidden"], words: Int[Tensor, "blocks width"]
) -> Float[Tensor, "blocks width width"]:
    """Return the cosines of the mean vectors of all words of a block, at each of their subwords."""
    with torch.autocast(states.device.type, enabled=False):
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        same_word = (words[:, :, None] == words[:, None, :]).to(wide.dtype)
        # Sums instead of means: the cosines are the same.
        return compare_states(same_word @ wide, "cosine")


class LinkedWords(Objective):
    """Predict masked tokens, and distinguish linked words from other words of the translation."""

    n_sides: ClassVar[int] = 2
    needs_links: ClassVar[bool] = True

    def count_special_tokens(self, special_tokens: SpecialTokens) -> int:
        """Return the larger number of special tokens of joint and separate encoding."""
        n_joint = 2 + special_tokens.n_between
        return max(n_joint, 4) if self.settings.separate > 0 else n_joint

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Store with the model how positions are counted in a pair."""
        store_positions(encoder, self.settings.positions)

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of sentence pairs with links."""
        settings = self.settings
        rules = masking_rules(special_tokens, settings.probability)
        reset = settings.positions == "reset"
        return LinkedCollator(special_tokens, rules, shape, reset, settings.separate > 0)

    def forward(self, encoder: Encoder, batch: LinkedBatch) -> LossTerms:
        """Return the losses: one pass over the masked pairs, one over separate sentences."""
        settings, layer = self.settings, choose_layer(encoder, self.settings.layer, DEPTH)
        last, middle = encoder(batch.joint.tokens, [encoder.n_layers, layer])
        features = encoder.lm_features(last[batch.masked])
        tlm = masked_lm_loss(features, *encoder.output_layer(), batch.labels)
        compared = self._compare(batch.joint, middle)
        joint = linked_words_loss(*compared)
        loss, metrics = settings.tlm * tlm + settings.joint * joint, {"tlm": tlm, "joint": joint}
        if batch.separate is not None:
            (states,) = encoder(batch.separate.tokens, [layer])
            separate = linked_words_loss(*self._compare(batch.separate, states))
            loss, metrics["separate"] = loss + settings.separate * separate, separate
        with torch.no_grad():
            metrics["accuracy"] = linked_words_accuracy(*compared)
        return LossTerms(loss, metrics)

    def _compare(
        self, linked: LinkedPairs, states: Float[Tensor, "tokens hidden"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scaled cosines of words, the weights of links, and the cells of pairs."""
        blocks = PairBlocks.of(linked.pairs, linked.sides)
        cosines = compare_words(blocks.to_blocks(states), blocks.to_blocks(linked.words))
        empty = cosines.new_zeros(cosines.numel())
        weights = empty.index_put((linked.cells,), linked.weights.to(cosines.dtype))
        return cosines / self.settings.temperature, weights.view_as(cosines), blocks.cells()


@dataclass(frozen=True, slots=True)
class LinkedPairs(TensorBatch):
    """Packed pairs with their words and links.

    `tokens` are the sequences that attend, `pairs` the same tokens before masking with the bounds
    of whole pairs. `sides` is the side of a word at its first subword, NEITHER elsewhere; `words`
    is the index of the first subword of a token's word. `cells` are flat indices into the
    blocks × width × width of `PairBlocks`, `weights` the weights of the links there (0: no link).
    """

    tokens: TokenBatch
    pairs: TokenBatch
    sides: Int[Tensor, "tokens"]
    words: Int[Tensor, "tokens"]
    cells: Int[Tensor, "links"]
    weights: Float[Tensor, "links"]


@dataclass(frozen=True, slots=True)
class LinkedBatch(TensorBatch):
    """Masked pairs side by side, their labels, and the separate sentences if they are needed."""

    joint: LinkedPairs
    masked: Int[Tensor, "masked"]
    labels: Int[Tensor, "masked"]
    separate: LinkedPairs | None

    @property
    def tokens(self) -> TokenBatch:
        """The masked pairs."""
        return self.joint.tokens


@dataclass(frozen=True, slots=True)
class WordPairBatch(TensorBatch):
    """Linked words of sentence pairs, each sentence a sequence of its own.

    Link k joins the words whose first subwords are tokens `src[k]` and `tgt[k]`; a weight of 0 only
    fills the shape. `words` is for every token the first token of its word, for special tokens
    themselves. `sides` is the sentence of a token, special tokens included; padding is NEITHER.
    `languages` are the numbers of language pairs as in the objective's `start`. Links with equal
    `src_keys` (`tgt_keys`) have equal source (target) words.
    """

    tokens: TokenBatch
    src: Int[Tensor, "links"]
    tgt: Int[Tensor, "links"]
    weights: Float[Tensor, "links"]
    words: Int[Tensor, "tokens"]
    sides: Int[Tensor, "tokens"]
    languages: Int[Tensor, "links"]
    src_keys: Int[Tensor, "links"]
    tgt_keys: Int[Tensor, "links"]

    def linked_states(
        self, states: Float[Tensor, "tokens hidden"], how: Literal["first", "mean"]
    ) -> tuple[Float[Tensor, "links hidden"], Float[Tensor, "links hidden"]]:
        """Return both words of every link: their first subwords (as in the paper) or means."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        if how == "mean":
            wide = pool_words(wide, self.words, len(wide))
        return wide[self.src], wide[self.tgt]


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What is known about every token of a batch, indexed by its code.

    Codes number the source tokens, then the target tokens, then three special tokens.
    `first_codes` are the codes of the first subwords of the tokens' words; special tokens are their
    own. `links` are the codes of the first subwords of linked source and target words.
    """

    ids: IntArray
    sides: npt.NDArray[np.int8]
    first_codes: IntArray
    links: tuple[IntArray, IntArray]
    weights: npt.NDArray[np.float32]

    @classmethod
    def of(cls, arrays: tuple[Ragged, ...], special_tokens: SpecialTokens) -> Self:
        """Build the table from sides, subword counts of their words, and links."""
        src, tgt, src_words, tgt_words, links = arrays
        special = [special_tokens.cls_id, special_tokens.sep_id, special_tokens.pad_id]
        ids = np.concatenate([src.ids, tgt.ids, special])
        n_pieces = np.concatenate([src_words.ids, tgt_words.ids])
        starts = np.cumsum(n_pieces) - n_pieces
        n_tokens, n_src_words = int(n_pieces.sum()), len(src_words.ids)
        sides = np.full(len(ids), NEITHER, dtype=np.int8)
        first = starts[n_pieces > 0]
        sides[first] = np.where(first < len(src.ids), LEFT, RIGHT)
        first_codes = np.concatenate([np.repeat(starts, n_pieces), n_tokens + np.arange(N_SPECIAL)])
        i, j, levels = unpack_links(links.ids)
        i = i + np.repeat(np.cumsum(src_words.lengths) - src_words.lengths, links.lengths)
        j = j + np.repeat(np.cumsum(tgt_words.lengths) - tgt_words.lengths, links.lengths)
        j = j + n_src_words
        # A word without subwords has no state to compare.
        is_real = (n_pieces[i] > 0) & (n_pieces[j] > 0)
        weights = (levels[is_real] / FULL_WEIGHT).astype(np.float32)
        return cls(ids, sides, first_codes, (starts[i[is_real]], starts[j[is_real]]), weights)

    def special_codes(self, special_tokens: SpecialTokens) -> SpecialTokens:
        """Return the special tokens with codes instead of ids."""
        n_tokens = len(self.ids) - N_SPECIAL
        return replace(special_tokens, cls_id=n_tokens, sep_id=n_tokens + 1, pad_id=n_tokens + 2)

    def find_slots(self, codes: IntArray) -> tuple[IntArray, IntArray]:
        """Return the slot of each code, and for each slot that of its word's first subword."""
        slots = np.arange(len(codes))
        slot_of = np.zeros(len(self.ids), dtype=np.int64)
        slot_of[codes] = slots
        first = self.first_codes[codes]
        return slot_of, np.where(first < len(self.ids) - N_SPECIAL, slot_of[first], slots)

    def decode(self, packed: TokenBatch, n_links: int) -> LinkedPairs:
        """Return the pairs of a batch that was packed as codes, with room for `n_links` links."""
        codes = packed.ids.numpy()
        slot_of, words = self.find_slots(codes)
        cells = _find_cells(slot_of[self.links[0]], slot_of[self.links[1]], packed)
        n_fill = n_links - len(cells)
        tokens = replace(packed, ids=torch.from_numpy(self.ids[codes]))
        return LinkedPairs(
            tokens,
            tokens,
            torch.from_numpy(self.sides[codes]),
            torch.from_numpy(words.astype(np.int32)),
            # Cell 0 is where the first special token meets itself: it is never a link.
            torch.from_numpy(np.pad(cells, (0, n_fill))),
            torch.from_numpy(np.pad(self.weights, (0, n_fill))),
        )


def _number_tokens(src: Ragged, tgt: Ragged) -> tuple[Ragged, Ragged]:
    """Return both sides with codes instead of ids."""
    n_src, n_tgt = len(src.ids), len(tgt.ids)
    return replace(src, ids=np.arange(n_src)), replace(tgt, ids=np.arange(n_src, n_src + n_tgt))


def _find_cells(src: IntArray, tgt: IntArray, tokens: TokenBatch) -> IntArray:
    """Return flat cells in the blocks of pairs from the flat token indices of linked words."""
    if tokens.row:
        return src * tokens.row + tgt % tokens.row
    bounds, width = tokens.offsets.numpy().astype(np.int64), tokens.longest
    block = np.searchsorted(bounds, src, side="right") - 1
    return (block * width + src - bounds[block]) * width + tgt - bounds[block]


def _round_capacity(n_links: int, shape: BatchShape | None, smallest: int) -> int:
    """Return the number of links that a batch has room for: with a shape, one of few values."""
    capacity = n_links if shape is None else smallest
    while capacity < n_links:
        capacity *= 2
    return capacity


@dataclass(frozen=True, slots=True)
class LinkedCollator:
    """Builds batches of pairs in random order, the same order in joint and separate encoding."""

    special_tokens: SpecialTokens
    rules: MaskingRules
    shape: BatchShape | None
    reset: bool
    separate: bool

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> LinkedBatch:
        """Return one batch."""
        table = TokenTable.of(arrays, self.special_tokens)
        special = table.special_codes(self.special_tokens)
        left, right = swap_sides(*_number_tokens(arrays[0], arrays[1]), generator)
        smallest = 0 if self.shape is None else self.shape.tokens
        n_links = _round_capacity(len(table.weights), self.shape, smallest)
        sides = add_pair_special_tokens(left, right, special)
        joined, positions = join_sides(*sides, reset=self.reset)
        packed = pack(joined, positions=positions, shape=self.shape, pad_id=special.pad_id)
        joint = table.decode(packed, n_links)
        masked = mask_batch(joint.tokens, self.rules, generator, self.shape)
        joint = replace(joint, tokens=masked.tokens)
        separate = self._separate(table, left, right, special, n_links) if self.separate else None
        return LinkedBatch(joint, masked.masked, masked.labels, separate)

    def _separate(
        self,
        table: TokenTable,
        left: Ragged,
        right: Ragged,
        special: SpecialTokens,
        n_links: int,
    ) -> LinkedPairs:
        """Pack both sentences of a pair together, so that they share a row; then split them."""
        sides = (add_special_tokens(side, special.cls_id, special.sep_id) for side in (left, right))
        joined, positions = join_sides(*sides, reset=True)
        packed = pack(joined, positions=positions, shape=self.shape, pad_id=special.pad_id)
        linked = table.decode(packed, n_links)
        firsts = np.flatnonzero(packed.ids.numpy() == special.cls_id)
        return replace(linked, tokens=split_sequences(linked.tokens, firsts, self.shape))


def split_sequences(tokens: TokenBatch, starts: IntArray, shape: BatchShape | None) -> TokenBatch:
    """Split sequences at the given starts; with a shape, the number of bounds is fixed."""
    bounds = np.union1d(tokens.offsets.numpy(), starts)
    longest = tokens.row or int(np.diff(bounds).max())
    if shape is not None:
        capacity = len(tokens.offsets) + shape.sequences
        bounds = np.pad(bounds, (0, max(0, capacity - len(bounds))), mode="edge")
    return replace(tokens, offsets=torch.from_numpy(bounds.astype(np.int32)), longest=longest)


@dataclass(frozen=True, slots=True)
class WordPairCollator:
    """Builds batches of linked words.

    Words are equal if they are the same word of the same sentence ("place") or have the same text.
    """

    special_tokens: SpecialTokens
    shape: BatchShape | None
    equal: Literal["place", "text"] = "place"

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> WordPairBatch:
        """Return one batch from sides, subword counts, links and, if known, languages."""
        table = TokenTable.of(arrays[:5], self.special_tokens)
        special = table.special_codes(self.special_tokens)
        packed, owners = pack_separately(_number_tokens(arrays[0], arrays[1]), special, self.shape)
        codes, n_pairs = packed.ids.numpy(), len(arrays[0].lengths)
        slot_of, words = table.find_slots(codes)
        src, tgt = slot_of[table.links[0]], slot_of[table.links[1]]
        src_keys, tgt_keys = (src, tgt) if self.equal == "place" else _hash_words(table)
        columns = (src, tgt, table.weights, owners[src], src_keys, tgt_keys)
        n_fill = _round_capacity(len(src), self.shape, MIN_CAPACITY) - len(src)
        filled = [torch.from_numpy(np.pad(column, (0, n_fill))) for column in columns]
        pairs = filled[3]
        has_languages = len(arrays) > 5
        languages = torch.from_numpy(arrays[5].ids)[pairs] if has_languages else 0 * pairs
        sides = np.where(owners < 2 * n_pairs, np.where(owners < n_pairs, LEFT, RIGHT), NEITHER)
        return WordPairBatch(
            tokens=replace(packed, ids=torch.from_numpy(table.ids[codes])),
            src=filled[0],
            tgt=filled[1],
            weights=filled[2],
            words=torch.from_numpy(words),
            sides=torch.from_numpy(sides),
            languages=languages,
            src_keys=filled[4],
            tgt_keys=filled[5],
        )


def _hash_words(table: TokenTable) -> tuple[IntArray, IntArray]:
    """Return equal numbers for linked words with equal subwords."""
    first = table.first_codes[:-N_SPECIAL]
    is_first = first == np.arange(len(first))
    lengths = np.diff(np.flatnonzero(np.append(is_first, True)))
    hashes = np.zeros(len(first), dtype=np.int64)
    hashes[is_first] = hash_sequences(table.ids[:-N_SPECIAL], lengths)
    return hashes[table.links[0]], hashes[table.links[1]]
