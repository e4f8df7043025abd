"""Noise for training: masked tokens (BERT), infilled spans and permuted sentences (BART, mBART).

Devlin et al., 2019; Lewis et al., 2020; Liu et al., 2020. All functions are pure: the random
generator is an argument.
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
    """How many tokens are masked and what replaces them (Devlin et al., 2019).

    Of the chosen tokens, a fraction `keep` stays unchanged, a fraction `random` becomes a random
    token, and the rest becomes the mask token. BERT chooses 15 %, VECO 25 % of bilingual text.
    """

    mask_id: int
    vocab_size: int
    special_ids: Sequence[int]
    probability: float = 0.15
    keep: float = 0.1
    random: float = 0.1

    def replacements(self) -> Int[Tensor, "replacements"]:
        """Return the ids of random replacements: the vocabulary without special tokens."""
        ordinary = torch.ones(self.vocab_size, dtype=torch.bool)
        ordinary[list(self.special_ids)] = False
        return ordinary.nonzero().flatten()


def choose_masked(
    maskable: Bool[Tensor, "tokens"], probability: float, generator: torch.Generator
) -> Int[Tensor, "masked"]:
    """Choose exactly round(probability · n) of the n maskable indices, in ascending order.

    Paper: BERT decides for each token independently. A fixed number gives batches of one size one
    shape, which a compiled training step needs, and every batch has a masked token.
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
    """Return the corrupted ids, the masked indices, and the original ids at these."""
    masked = choose_masked(maskable, rules.probability, generator)
    labels = ids[masked]
    draws = torch.rand(len(masked), generator=generator)
    replacements = rules.replacements()
    random = torch.randint(len(replacements), (len(masked),), generator=generator)
    replaced = torch.where(draws < rules.keep + rules.random, replacements[random], rules.mask_id)
    corrupted = ids.clone()
    corrupted[masked] = torch.where(draws < rules.keep, labels, replaced)
    return corrupted, masked, labels


def find_maskable(ids: Int[Tensor, "tokens"], special_ids: Sequence[int]) -> Bool[Tensor, "tokens"]:
    """Return which tokens are not special.

    >>> find_maskable(torch.tensor([0, 7, 2]), [0, 2]).tolist()
    [False, True, False]
    """
    return ~torch.isin(ids, torch.tensor(list(special_ids), dtype=ids.dtype))


def infill_spans(
    text: Ragged, mask_id: int, generator: np.random.Generator, *, rate: float, mean_span: float
) -> Ragged:
    """Replace spans that make up a fraction `rate` of every sequence by a single mask each.

    Span lengths are drawn from Poisson(mean_span) until they cover the fraction; the last one is
    shortened to match it exactly. A span of length 0 inserts a mask between two tokens. Every order
    of the spans and the kept tokens is equally likely. Paper: mBART's spans begin at word starts,
    these anywhere.
    """
    n_masked = np.maximum(1, np.rint(rate * text.lengths)).astype(np.int64)
    n_masked = np.minimum(n_masked, text.lengths)
    spans = draw_spans(n_masked, mean_span, generator)
    lengths = text.lengths - n_masked + spans.lengths
    is_span = _choose(lengths, spans.lengths, generator)
    widths = np.ones(len(is_span), dtype=np.int64)
    widths[is_span] = spans.ids
    # The tokens of a slot begin where the previous slot ends.
    starts = np.cumsum(widths) - widths
    ids = np.full(len(is_span), mask_id, dtype=np.int64)
    ids[~is_span] = text.ids[starts[~is_span]]
    return Ragged(ids, lengths)


def mask_each(
    text: Ragged, mask_id: int, generator: np.random.Generator, *, rate: float
) -> tuple[Ragged, Ragged]:
    """Replace a fraction `rate` of the tokens of every sequence by a mask each, at least one.

    Also return the tokens that were replaced, in their order.
    """
    n_masked = np.maximum(1, np.rint(rate * text.lengths)).astype(np.int64)
    n_masked = np.minimum(n_masked, text.lengths)
    is_masked = _choose(text.lengths, n_masked, generator)
    ids = np.where(is_masked, mask_id, text.ids)
    return Ragged(ids, text.lengths), Ragged(text.ids[is_masked], n_masked)


def draw_spans(totals: IntArray, mean_span: float, generator: np.random.Generator) -> Ragged:
    """Draw at most `total` Poisson lengths that sum to each total; one of them is shortened."""
    n_columns = int(totals.max(initial=0) / mean_span * 1.5) + 8
    drawn = generator.poisson(mean_span, (len(totals), n_columns))
    while len(drawn) and (drawn.sum(axis=1) < totals).any():
        drawn = np.concatenate([drawn, generator.poisson(mean_span, drawn.shape)], axis=1)
    before = np.cumsum(drawn, axis=1) - drawn
    is_used = before < totals[:, None]
    cut = np.minimum(drawn, totals[:, None] - before)
    # Drop empty spans where there are more spans than tokens, so that a text never grows.
    is_empty = is_used & (cut == 0)
    n_free = totals - (is_used & (cut > 0)).sum(axis=1)
    is_used &= ~is_empty | (np.cumsum(is_empty, axis=1) <= n_free[:, None])
    spans = Ragged(cut[is_used].astype(np.int64), is_used.sum(axis=1))
    # Shuffle: the shortened span, which is never empty, must not always be the last.
    owners = np.repeat(np.arange(len(totals)), spans.lengths)
    return Ragged(spans.ids[np.lexsort((generator.random(len(owners)), owners))], spans.lengths)


def permute_sentences(text: Ragged, is_end: BoolArray, generator: np.random.Generator) -> Ragged:
    """Shuffle the sentences of every sequence; `is_end` marks the last token of a sentence.

    >>> text, last = Ragged.of([[7, 1, 8, 1]]), np.array([0, 1, 0, 1], dtype=bool)
    >>> permute_sentences(text, last, np.random.default_rng(4)).ids.tolist()
    [8, 1, 7, 1]
    """
    owners = np.repeat(np.arange(len(text.lengths)), text.lengths)
    positions = ranges(np.zeros_like(text.lengths), text.lengths)
    starts = (positions == 0) | np.concatenate([[False], is_end[:-1]]) if len(positions) else is_end
    sentences = np.cumsum(starts) - 1
    keys = generator.random(int(starts.sum()))
    return Ragged(text.ids[np.lexsort((positions, keys[sentences], owners))], text.lengths)


def _choose(lengths: IntArray, counts: IntArray, generator: np.random.Generator) -> BoolArray:
    """Return a random choice of `counts[k]` of the slots of every sequence k."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((generator.random(len(owners)), owners))
    ranks = ranges(np.zeros_like(lengths), lengths)
    chosen = np.zeros(len(owners), dtype=np.bool_)
    chosen[order[ranks < np.repeat(counts, lengths)]] = True
    return chosen
