"""Batches of sentence pairs whose words are linked: side by side with masks, and each alone.

Tokens are packed as codes, places in tables of all that is known of a token: whatever row a pair
lands in, its ids, words and links are looked up there.

Batches of linked words in sentences that are encoded apart, whatever is then made of them.

Linked words find each other: contrastive learning on given word links, beside TLM.

A word's vector is to be closer to those of the words it is linked with than to the others of the
translation, in the masked pair side by side and in the two sentences apart. The links come from a
statistical aligner, whose mistakes a model that reads sentences need not repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field

from calque.models.pooling import pool_words
from calque.objectives.base import (
    BatchOfArrays,
    Marks,
    Objective,
    ObjectiveSettings,
    hash_sequences,
    lay_apart,
)
from calque.objectives.masked_lm import (
    join_sides,
    mark_sides,
    mask_batch,
    masked_lm_loss,
    masking_rules,
    note_positions,
    swap_sides,
)
from calque.objectives.self_labels import LEFT, NEITHER, RIGHT, PairBlocks, compare_states
from calque.tokens.linked import FULL_WEIGHT, unpack_links
from calque.tokens.ragged import BatchShape, Ragged, add_marks, pack
from calque.types import LossTerms, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.masking import MaskingRules

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


# The fewest links a batch of fixed shape has room for; more are powers of two times as many.
LEAST_ROOM = 256


@dataclass(frozen=True, slots=True)
class WordPairBatch(BatchOfArrays):
    """Linked words of sentence pairs, each sentence a sequence of its own.

    Link k joins the word whose first subword is token `src[k]` with that of `tgt[k]`; one of
    weight 0 only fills the shape. `words` tell for every token the first of its word, for a mark
    itself. `sides` tell which sentence of its pair a token is of, marks included; padding is of
    NEITHER. `languages` number the language pairs of links as the objective's `start` lists them.
    Links with equal `src_keys` have equal source words, and so on.
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
        """Give both words of every link: by their first subwords (as in the paper), or means."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        if how == "mean":
            wide = pool_words(wide, self.words, len(wide))
        return wide[self.src], wide[self.tgt]


@dataclass(frozen=True, slots=True)
class WordPairCollator:
    """Builds batches of linked words.

    Words are equal if they are the same `place` of the same sentence, or have the same `text`.
    """

    marks: Marks
    shape: BatchShape | None
    equal: Literal["place", "text"] = "place"

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> WordPairBatch:
        """Build one batch from sides, subwords of words, links and, if known, languages."""
        table = TokenTable.of(arrays[:5], self.marks)
        marks = table.encode_marks(self.marks)
        codes, owners = lay_apart(_number(arrays[0], arrays[1]), marks, self.shape)
        code, n_pairs = codes.ids.numpy(), len(arrays[0].lengths)
        slot_of, words = table.find_slots(code)
        src, tgt = slot_of[table.links[0]], slot_of[table.links[1]]
        src_keys, tgt_keys = (src, tgt) if self.equal == "place" else _hash_words(table)
        columns = (src, tgt, table.weights, owners[src], src_keys, tgt_keys)
        n_fill = self._count_links(len(src)) - len(src)
        filled = [torch.from_numpy(np.pad(column, (0, n_fill))) for column in columns]
        sides = np.where(owners < 2 * n_pairs, np.where(owners < n_pairs, LEFT, RIGHT), NEITHER)
        return WordPairBatch(
            tokens=replace(codes, ids=torch.from_numpy(table.ids[code])),
            src=filled[0],
            tgt=filled[1],
            weights=filled[2],
            words=torch.from_numpy(words),
            sides=torch.from_numpy(sides),
            languages=_name_languages(filled[3], arrays[5:]),
            src_keys=filled[4],
            tgt_keys=filled[5],
        )

    def _count_links(self, n_links: int) -> int:
        """Choose how many links a batch has room for: one of few numbers, if shapes are fixed."""
        room = n_links if self.shape is None else LEAST_ROOM
        while room < n_links:
            room *= 2
        return room


def _number(src: Ragged, tgt: Ragged) -> tuple[Ragged, Ragged]:
    """Put codes in the place of ids."""
    n_src, n_tgt = len(src.ids), len(tgt.ids)
    return replace(src, ids=np.arange(n_src)), replace(tgt, ids=np.arange(n_src, n_src + n_tgt))


def _hash_words(table: TokenTable) -> tuple[IntArray, IntArray]:
    """Give equal numbers to linked words of equal subwords."""
    first = table.first_codes[:-3]  # without the marks
    is_first = first == np.arange(len(first))
    lengths = np.diff(np.flatnonzero(np.append(is_first, True)))
    hashes = np.zeros(len(first), dtype=np.int64)
    hashes[is_first] = hash_sequences(table.ids[:-3], lengths)
    return hashes[table.links[0]], hashes[table.links[1]]


def _name_languages(
    pairs: Int[Tensor, "links"], languages: tuple[Ragged, ...]
) -> Int[Tensor, "links"]:
    """Give the languages of links by the numbers of their pairs; all are 0 if none is known."""
    if not languages:
        return torch.zeros_like(pairs)
    return torch.from_numpy(languages[0].ids)[pairs]


# How far up the layer lies whose words are compared, unless a recipe says so.
DEPTH = 7 / 8


class LinkedWordsSettings(ObjectiveSettings):
    """The three losses as the recipe describes them: TLM, linked words side by side and apart."""

    kind: Literal["linked_words"] = "linked_words"
    probability: float = Field(0.15, gt=0, lt=1)
    positions: Literal["reset", "continue"] = "reset"
    # The layer whose states make the words; by default seven eighths of the way up.
    layer: int | None = None
    temperature: float = Field(0.1, gt=0)
    # Weights of the losses; without `separate` the sentences are not encoded apart.
    tlm: float = Field(1.0, ge=0)
    joint: float = Field(1.0, ge=0)
    separate: float = Field(1.0, ge=0)


def linked_words_loss(
    similarity: Float[Tensor, "blocks width width"],
    weights: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
) -> Float[Tensor, ""]:
    """Give ½ · (rows + columns), each the mean over linked words of −Σ w log softmax / Σ w.

    The softmax is over the cells of a word's row or column; weights above 0 are links and lie in
    cells. Words without links ask nothing, but are there to be told apart. Without any link the
    loss is 0.

    >>> cells = torch.ones(1, 1, 2, dtype=torch.bool)
    >>> loss = linked_words_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]), cells)
    >>> round(loss.item(), 4)  # half of ln 2: the column has no rival
    0.3466
    """
    # A finite stand-in for −∞: a word without partners would otherwise give NaN.
    scores = similarity.masked_fill(~cells, torch.finfo(similarity.dtype).min)
    products = similarity * weights
    losses = []
    for side in (2, 1):
        total = weights.sum(dim=side)
        is_linked = total > 0
        linked = products.sum(dim=side) / torch.where(is_linked, total, 1.0)
        lost = torch.where(is_linked, scores.logsumexp(dim=side) - linked, 0.0)
        losses.append(lost.sum() / is_linked.sum().clamp(min=1))
    return (losses[0] + losses[1]) / 2


def linked_words_accuracy(
    similarity: Float[Tensor, "blocks width width"],
    weights: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
) -> Float[Tensor, ""]:
    """Give the share of the linked words whose best partner is one they are linked with."""
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
    """Give the cosines of all words of a block, at every subword those of its word's mean."""
    with torch.autocast(states.device.type, enabled=False):
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        same = (words[:, :, None] == words[:, None, :]).to(wide.dtype)
        return compare_states(same @ wide, "cosine")  # of sums: the cosines of means are no others


class LinkedWords(Objective):
    """Guess hidden tokens, and tell linked words from the others of the translation."""

    n_sides: ClassVar[int] = 2
    needs_links: ClassVar[bool] = True

    def n_marks(self, marks: Marks) -> int:
        """Count the marks of a pair, or of two sentences apart, whichever are more."""
        n_joint = 2 + marks.between
        return max(n_joint, 4) if self.settings.separate > 0 else n_joint

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Let the model say how positions count in a pair."""
        note_positions(encoder, self.settings.positions)

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of sentence pairs with links."""
        settings = self.settings
        rules, reset = masking_rules(marks, settings.probability), settings.positions == "reset"
        return LinkedCollator(marks, rules, shape, reset, settings.separate > 0)

    def forward(self, encoder: Encoder, batch: LinkedBatch) -> LossTerms:
        """Encode the masked pairs once for two losses, and the sentences apart for the third."""
        settings, layer = self.settings, self._layer(encoder)
        last, middle = encoder(batch.joint.tokens, [encoder.n_layers, layer])
        features = encoder.predict_features(last[batch.masked])
        tlm = masked_lm_loss(features, *encoder.output_layer(), batch.labels)
        compared = self._compare(batch.joint, middle)
        joint = linked_words_loss(*compared)
        loss, figures = settings.tlm * tlm + settings.joint * joint, {"tlm": tlm, "joint": joint}
        if batch.separate is not None:
            (apart,) = encoder(batch.separate.tokens, [layer])
            separate = linked_words_loss(*self._compare(batch.separate, apart))
            loss, figures["separate"] = loss + settings.separate * separate, separate
        with torch.no_grad():
            figures["accuracy"] = linked_words_accuracy(*compared)
        return LossTerms(loss, figures)

    def _layer(self, encoder: Encoder) -> int:
        if self.settings.layer is None:
            return round(DEPTH * encoder.n_layers)
        return encoder.check_layer(self.settings.layer)

    def _compare(
        self, linked: LinkedPairs, states: Float[Tensor, "tokens hidden"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give the scaled cosines of words, the weights of the links, and the cells of pairs."""
        blocks = PairBlocks.of(linked.pairs, linked.sides)
        cosines = compare_words(blocks.lay(states), blocks.lay(linked.words))
        empty = cosines.new_zeros(cosines.numel())
        weights = empty.index_put((linked.cells,), linked.weights.to(cosines.dtype))
        return cosines / self.settings.temperature, weights.view_as(cosines), blocks.cells()
