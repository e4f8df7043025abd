"""From subword states to one vector a word or a sentence, over packed sequences."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
