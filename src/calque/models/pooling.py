"""From subword states to one vector a word or a sentence, over packed sequences.

States of words in sentences that are split already: that of a word's first subword.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calque.tokens.ragged import Ragged, add_marks, bucket_batches, pack, ranges, reorder
from calque.tokens.words import PieceCounts, WordEncoder

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]


def pool_sentences(
    states: Float[Tensor, "tokens hidden"],
    offsets: Int[Tensor, "boundaries"],
    keep: Bool[Tensor, "tokens"],
) -> Float[Tensor, "sequences hidden"]:
    """Average the kept tokens of every packed sequence, in single precision at least.

    A sequence with no kept token is the mean of all its tokens; one without tokens is zero.

    >>> states = torch.tensor([[9.0], [1.0], [3.0], [7.0]])
    >>> keep = torch.tensor([False, True, True, False])
    >>> pool_sentences(states, torch.tensor([0, 3, 4]), keep).tolist()
    [[2.0], [7.0]]
    """
    lengths = offsets.diff().long()
    numbers = torch.arange(len(lengths), device=lengths.device)
    owners = numbers.repeat_interleave(lengths, output_size=len(states))
    n_kept = _sum_rows(keep.float(), owners, len(lengths))
    weights = torch.where(n_kept[owners] > 0, keep.float(), 1.0)
    n_pooled = torch.where(n_kept > 0, n_kept, lengths.float()).clamp(min=1)
    return _sum_rows(_widen(states) * weights[:, None], owners, len(lengths)) / n_pooled[:, None]


def pool_words(
    states: Float[Tensor, "tokens hidden"],
    words: Int[Tensor, "tokens"],
    n_words: int,
    how: Literal["mean", "first"] = "mean",
) -> Float[Tensor, "words hidden"]:
    """Give every word the mean of its subwords, or its first; a word without any is zero.

    `words` holds the word each token belongs to, −1 for a token that belongs to none.

    >>> states, words = torch.tensor([[5.0], [1.0], [3.0], [7.0]]), torch.tensor([-1, 0, 0, 2])
    >>> pool_words(states, words, 3).tolist(), pool_words(states, words, 3, "first").tolist()
    ([[2.0], [0.0], [7.0]], [[1.0], [0.0], [7.0]])
    """
    belongs = (words >= 0).float()
    weights = belongs if how == "mean" else belongs * _is_first(words, n_words)
    owners = words.clamp(min=0).long()
    n_pooled = _sum_rows(weights, owners, n_words).clamp(min=1)
    return _sum_rows(_widen(states) * weights[:, None], owners, n_words) / n_pooled[:, None]


def _is_first(words: Int[Tensor, "tokens"], n_words: int) -> Bool[Tensor, "tokens"]:
    """Tell whether a token is the first of its word."""
    places = torch.arange(len(words), device=words.device)
    slots = words.long() + 1  # slot 0 gathers the tokens of no word
    first = places.new_full((n_words + 1,), len(words)).scatter_reduce(0, slots, places, "amin")
    return first[slots] == places


def _sum_rows(
    rows: Float[Tensor, "rows *rest"], owners: Int[Tensor, "rows"], n_owners: int
) -> Float[Tensor, "owners *rest"]:
    return rows.new_zeros((n_owners, *rows.shape[1:])).index_add(0, owners, rows)


def _widen(states: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
    return states.to(torch.promote_types(states.dtype, torch.float32))


# On a CPU a batch should fit one core's cache, on a GPU fill the machine.
BATCH_TOKENS = {"cpu": 1024, "cuda": 1 << 15}


@dataclass(frozen=True, slots=True)
class WordBatch:
    """Sentences to read at once: `places` are the first subwords of the words `words`."""

    tokens: TokenBatch
    places: Int[Tensor, "words"]
    words: Int[Tensor, "words"]


@dataclass(frozen=True, slots=True)
class WordLayout:
    """All words of some sentences, laid out for an encoder; `has_pieces` of each of them.

    A sentence longer than the model is read in windows that break between words.
    """

    batches: list[WordBatch]
    n_words: int
    has_pieces: npt.NDArray[np.bool_]
    n_windows: int


def lay_out_words(encoder: Encoder, sentences: Sequence[Sequence[str]]) -> WordLayout:
    """Encode words and pack their sentences, those of similar length together."""
    tokenizer, device = encoder.tokenizer, next(encoder.parameters()).device
    batch_tokens = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    marks = tokenizer.cls_token_id, tokenizer.sep_token_id
    head = int(marks[0] is not None)
    room = encoder.max_tokens - head - int(marks[1] is not None)
    # A word's first subword is all that is used of it, so that no word need be cut in two.
    pieces, _ = WordEncoder(tokenizer).encode(sentences).shorten(room)
    firsts = _cut_windows(pieces, room)
    n_words = np.diff(firsts)
    begins = pieces.first_pieces[firsts]
    windows = Ragged(pieces.ids, np.diff(begins))
    # Where a word's first subword stands in its window, the mark before it counted.
    offsets = pieces.first_pieces[:-1] - np.repeat(begins[:-1], n_words) + head
    batches = []
    for rows in bucket_batches(windows.lengths, batch_tokens):
        text = add_marks(reorder(windows, rows), *marks)
        words = ranges(firsts[:-1][rows], n_words[rows])
        starts = np.repeat(np.cumsum(text.lengths) - text.lengths, n_words[rows])
        kept = pieces.n_pieces[words] > 0
        batches.append(
            WordBatch(
                pack(text, pad_id=tokenizer.pad_token_id or 0),
                torch.from_numpy((starts + offsets[words])[kept]),
                torch.from_numpy(words[kept]),
            )
        )
    return WordLayout(batches, len(pieces.n_pieces), pieces.n_pieces > 0, len(n_words))


@torch.no_grad()
def encode_words(
    encoder: Encoder, layout: WordLayout, layers: Sequence[int]
) -> list[Float[Tensor, "words hidden"]]:
    """Give the states of all words at some layers; a word without subwords is zero.

    Nothing is drawn and nothing added up, so that the same weights give the same states.
    """
    device = next(encoder.parameters()).device
    size = (layout.n_words, encoder.hidden_size)
    found = [torch.zeros(size, device=device) for _ in layers]
    for batch in layout.batches:
        places, words = batch.places.to(device), batch.words.to(device)
        for result, states in zip(found, encoder(batch.tokens.to(device), layers), strict=True):
            result[words] = states[places].float()
    return found


def _cut_windows(pieces: PieceCounts, room: int) -> IntArray:
    """Say with which word every window begins, and where the last ends; none is empty of words."""
    first_words, first_pieces = pieces.first_words, pieces.first_pieces
    lengths = np.diff(first_pieces[first_words])
    cuts = [first_words[:-1][np.diff(first_words) > 0], first_words[-1:]]
    for row in np.flatnonzero(lengths > room).tolist():
        start, stop = int(first_words[row]), int(first_words[row + 1])
        inside = []
        while first_pieces[stop] - first_pieces[start] > room:
            start = int(np.searchsorted(first_pieces, first_pieces[start] + room, "right")) - 1
            inside.append(start)
        cuts.append(np.array(inside, dtype=np.int64))
    return np.unique(np.concatenate(cuts))
