"""Pooling of subword states into vectors of words and sentences, over packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from calque.tokens.ragged import Ragged, add_special_tokens, batch_by_length, pack, ranges, reorder
from calque.tokens.tokenizer import boundary_ids
from calque.tokens.windows import split_encoded_words
from calque.tokens.words import WordEncoder

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.types import TokenBatch


def pool_sentences(
    states: Float[Tensor, "tokens hidden"],
    offsets: Int[Tensor, "boundaries"],
    keep: Bool[Tensor, "tokens"],
) -> Float[Tensor, "sequences hidden"]:
    """Return the mean of the kept tokens of every sequence, in single precision at least.

    Without a kept token it is the mean of all tokens; an empty sequence is zero.

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
    """Return the mean of the subwords of every word, or its first subword; zero without subwords.

    `words` is the word number of each token, −1 for a token that belongs to no word.

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
    """Return whether each token is the first of its word."""
    tokens = torch.arange(len(words), device=words.device)
    slots = words.long() + 1  # slot 0 is for tokens without a word
    first = tokens.new_full((n_words + 1,), len(words)).scatter_reduce(0, slots, tokens, "amin")
    return first[slots] == tokens


def _sum_rows(
    rows: Float[Tensor, "rows *rest"], owners: Int[Tensor, "rows"], n_owners: int
) -> Float[Tensor, "owners *rest"]:
    return rows.new_zeros((n_owners, *rows.shape[1:])).index_add(0, owners, rows)


def _widen(states: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
    return states.to(torch.promote_types(states.dtype, torch.float32))


# On a CPU a batch should fit into one core's cache, on a GPU it should fill the machine.
BATCH_TOKENS = {"cpu": 1024, "cuda": 1 << 15}


@dataclass(frozen=True, slots=True)
class WordBatch:
    """A batch of sentences; `first_subwords` are token indices, `words` their word numbers."""

    tokens: TokenBatch
    first_subwords: Int[Tensor, "words"]
    words: Int[Tensor, "words"]


@dataclass(frozen=True, slots=True)
class WordBatches:
    """All words of some sentences in batches; `has_pieces` is false for words without subwords.

    A sentence that is longer than the model allows is split into windows between words.
    """

    batches: list[WordBatch]
    n_words: int
    has_pieces: npt.NDArray[np.bool_]
    n_windows: int


def batch_words(encoder: Encoder, sentences: Sequence[Sequence[str]]) -> WordBatches:
    """Tokenize sentences of words and pack them into batches of similar length."""
    tokenizer, device = encoder.tokenizer, next(encoder.parameters()).device
    batch_tokens = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    boundaries = boundary_ids(tokenizer)
    n_before = int(boundaries[0] is not None)
    room = encoder.max_tokens - n_before - int(boundaries[1] is not None)
    # Only the first subword of a word is used, so that a very long word can be shortened.
    pieces, _ = WordEncoder(tokenizer).encode(sentences).truncate_words(room)
    windows_of_words, _ = split_encoded_words(pieces, room, overlap=0)
    firsts = np.unique(np.append(windows_of_words[:, 2], len(pieces.n_pieces)))
    n_words = np.diff(firsts)
    begins = pieces.first_pieces[firsts]
    windows = Ragged(pieces.ids, np.diff(begins))
    # The position of a word's first subword in its window, including the special token before.
    offsets = pieces.first_pieces[:-1] - np.repeat(begins[:-1], n_words) + n_before
    batches = []
    for rows in batch_by_length(windows.lengths, batch_tokens):
        text = add_special_tokens(reorder(windows, rows), *boundaries)
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
    return WordBatches(batches, len(pieces.n_pieces), pieces.n_pieces > 0, len(n_words))


@torch.no_grad()
def encode_first_subwords(
    encoder: Encoder, batches: WordBatches, layers: Sequence[int]
) -> list[Float[Tensor, "words hidden"]]:
    """Return the first-subword states of all words at some layers; zero without subwords."""
    device = next(encoder.parameters()).device
    size = (batches.n_words, encoder.hidden_size)
    by_layer = [torch.zeros(size, device=device) for _ in layers]
    for batch in batches.batches:
        tokens, words = batch.first_subwords.to(device), batch.words.to(device)
        for result, states in zip(by_layer, encoder(batch.tokens.to(device), layers), strict=True):
            result[words] = states[tokens].float()
    for layer, states in zip(layers, by_layer, strict=True):
        encoder.check_finite(states, layer)
    return by_layer
