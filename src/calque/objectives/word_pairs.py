"""Batches of linked words in sentences that are encoded apart, whatever is then made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from calque.models.pooling import pool_words
from calque.objectives.apart import BatchOfArrays, hash_sequences, lay_apart
from calque.objectives.linked_batches import TokenTable
from calque.objectives.self_labels import LEFT, NEITHER, RIGHT

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.objectives.base import Marks
    from calque.text.batching import BatchShape, Ragged
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

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
