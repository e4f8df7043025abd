"""Hiding tokens for masked language modelling, as a pure function of its arguments.

Noise for denoising: spans that shrink to one mask, and sentences in another order.

Lewis et al., 2020 (BART); Liu et al., 2020 (mBART).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from calque.tokens.ragged import Ragged, ranges

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MaskingRules:
    """How many tokens to hide and what to put in their place (Devlin et al., 2019).

    Of the hidden tokens, `keep` stay as they are, `random` become another token and the rest
    become the mask. Paper: BERT hides 15 %, VECO 25 % of bilingual text.
    """

    mask_id: int
    vocab_size: int
    special_ids: Sequence[int]
    probability: float = 0.15
    keep: float = 0.1
    random: float = 0.1

    def replacements(self) -> Int[Tensor, "replacements"]:
        """Every id a hidden token may be replaced by: the vocabulary without special tokens."""
        ordinary = torch.ones(self.vocab_size, dtype=torch.bool)
        ordinary[list(self.special_ids)] = False
        return ordinary.nonzero().flatten()


def choose_masked(
    maskable: Bool[Tensor, "tokens"], probability: float, generator: torch.Generator
) -> Int[Tensor, "masked"]:
    """Choose exactly round(probability · n) of the n maskable places, in ascending order.

    A fixed share instead of a coin per token: batches of one size then have one shape, which
    a compiled training step needs, and no batch is ever without a hidden token.
    """
    candidates = maskable.nonzero().flatten()
    n_masked = max(1, round(probability * len(candidates))) if len(candidates) else 0
    shuffled = torch.rand(len(candidates), generator=generator)
    return candidates[shuffled.topk(n_masked).indices].sort().values


def mask_tokens(
    ids: Int[Tensor, "tokens"],
    maskable: Bool[Tensor, "tokens"],
    rules: MaskingRules,
    generator: torch.Generator,
) -> tuple[Int[Tensor, "tokens"], Int[Tensor, "masked"], Int[Tensor, "masked"]]:
    """Return the corrupted ids, the places hidden, and the ids that stood there."""
    masked = choose_masked(maskable, rules.probability, generator)
    labels = ids[masked]
    fate = torch.rand(len(masked), generator=generator)
    replacements = rules.replacements()
    drawn = torch.randint(len(replacements), (len(masked),), generator=generator)
    replaced = torch.where(fate < rules.keep + rules.random, replacements[drawn], rules.mask_id)
    corrupted = ids.clone()
    corrupted[masked] = torch.where(fate < rules.keep, labels, replaced)
    return corrupted, masked, labels


def find_maskable(ids: Int[Tensor, "tokens"], special_ids: Sequence[int]) -> Bool[Tensor, "tokens"]:
    """Mark the tokens that are not special.

    >>> find_maskable(torch.tensor([0, 7, 2]), [0, 2]).tolist()
    [False, True, False]
    """
    return ~torch.isin(ids, torch.tensor(list(special_ids), dtype=ids.dtype))


def infill_spans(
    text: Ragged, mask_id: int, generator: np.random.Generator, *, rate: float, mean_span: float
) -> Ragged:
    """Hide a share of every sequence's tokens in spans, each of which becomes a single mask.

    Span lengths are drawn from Poisson(mean_span) until they cover the share, the last one cut to
    fit it exactly; a span of length 0 is a mask put between two tokens. Every order of these spans
    and the kept tokens is equally likely. Paper: mBART's spans begin at words, these anywhere.
    """
    n_hidden = np.maximum(1, np.rint(rate * text.lengths)).astype(np.int64)
    n_hidden = np.minimum(n_hidden, text.lengths)
    spans = draw_spans(n_hidden, mean_span, generator)
    lengths = text.lengths - n_hidden + spans.lengths
    is_span = _choose(lengths, spans.lengths, generator)
    widths = np.ones(len(is_span), dtype=np.int64)
    widths[is_span] = spans.ids
    # What a slot holds begins where those before it end; sequences are covered exactly.
    starts = np.cumsum(widths) - widths
    ids = np.full(len(is_span), mask_id, dtype=np.int64)
    ids[~is_span] = text.ids[starts[~is_span]]
    return Ragged(ids, lengths)


def draw_spans(totals: IntArray, mean_span: float, generator: np.random.Generator) -> Ragged:
    """Draw lengths from a Poisson distribution until they sum to each total, one of them cut.

    There are at most as many as the total says.
    """
    n_columns = int(totals.max(initial=0) / mean_span * 1.5) + 8
    drawn = generator.poisson(mean_span, (len(totals), n_columns))
    while len(drawn) and (drawn.sum(axis=1) < totals).any():
        drawn = np.concatenate([drawn, generator.poisson(mean_span, drawn.shape)], axis=1)
    before = np.cumsum(drawn, axis=1) - drawn
    is_used = before < totals[:, None]
    cut = np.minimum(drawn, totals[:, None] - before)
    # No more of them than tokens, so that a text never grows: of the empty ones, some are too many.
    is_empty = is_used & (cut == 0)
    n_free = totals - (is_used & (cut > 0)).sum(axis=1)
    is_used &= ~is_empty | (np.cumsum(is_empty, axis=1) <= n_free[:, None])
    spans = Ragged(cut[is_used].astype(np.int64), is_used.sum(axis=1))
    # The one that was cut is the last, and never empty: it must not always come last.
    owners = np.repeat(np.arange(len(totals)), spans.lengths)
    return Ragged(spans.ids[np.lexsort((generator.random(len(owners)), owners))], spans.lengths)


def permute_sentences(text: Ragged, is_end: BoolArray, generator: np.random.Generator) -> Ragged:
    """Put the sentences of every sequence into a random order; `is_end` marks the last tokens.

    >>> text, last = Ragged.of([[7, 1, 8, 1]]), np.array([0, 1, 0, 1], dtype=bool)
    >>> permute_sentences(text, last, np.random.default_rng(4)).ids.tolist()
    [8, 1, 7, 1]
    """
    owners = np.repeat(np.arange(len(text.lengths)), text.lengths)
    places = ranges(np.zeros_like(text.lengths), text.lengths)
    begins = (places == 0) | np.concatenate([[False], is_end[:-1]]) if len(places) else is_end
    sentences = np.cumsum(begins) - 1
    keys = generator.random(int(begins.sum()))
    return Ragged(text.ids[np.lexsort((places, keys[sentences], owners))], text.lengths)


def _choose(lengths: IntArray, counts: IntArray, generator: np.random.Generator) -> BoolArray:
    """Choose so many of every sequence's slots."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((generator.random(len(owners)), owners))
    ranks = ranges(np.zeros_like(lengths), lengths)
    chosen = np.zeros(len(owners), dtype=np.bool_)
    chosen[order[ranks < np.repeat(counts, lengths)]] = True
    return chosen
