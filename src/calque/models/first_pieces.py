"""States of words in sentences that are split already: that of a word's first subword."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.text.batching import Ragged, add_marks, bucket_batches, pack, ranges, reorder
from calque.text.word_pieces import PieceCounts, WordEncoder

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

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
