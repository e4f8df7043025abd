"""A check whether the self-labels of a model are good enough to learn from.

A diagonal alignment links the words of any two sentences equally well. If the labels are better,
the words of a sentence have clearer links to its translation than to another sentence of similar
length. Equal tokens are excluded: matching them needs no knowledge of a language.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.objectives.self_labels import (
    LabelRules,
    PairBlocks,
    compare_states,
    mass_on_links,
    token_sides,
)
from calque.tokens.layout import add_pair_special_tokens, join_sides
from calque.tokens.ragged import Ragged, pack, reorder
from calque.tokens.tokenizer import SpecialTokens

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]

# Number of pairs that are checked, and the minimum for a result.
MAX_PAIRS, MIN_PAIRS = 256, 16
# The fraction of pairs that must be distinguished from mismatched ones; chance gives a half.
MIN_ACCURACY = 2 / 3


def self_label_accuracy(
    encoder: Encoder,
    src: Ragged,
    tgt: Ragged,
    special_tokens: SpecialTokens,
    layer: int,
    rules: LabelRules,
    *,
    reset: bool,
) -> tuple[float, int] | None:
    """Return the fraction of pairs with clearer links than mismatched pairs, and of how many.

    Return None if there are too few pairs. `reset` is how positions are counted in a pair.
    """
    others = reorder(tgt, pair_with_others(tgt.lengths))
    n_tokens = src.lengths + np.maximum(tgt.lengths, others.lengths) + special_tokens.n_between + 2
    kept = (n_tokens <= encoder.max_tokens).nonzero()[0][:MAX_PAIRS]
    if len(kept) < MIN_PAIRS:
        return None
    true, false = (
        link_clarity(
            encoder,
            reorder(src, kept),
            reorder(side, kept),
            special_tokens,
            layer,
            rules,
            reset=reset,
        )
        for side in (tgt, others)
    )
    is_clearer = (true > false).float() + 0.5 * (true == false)
    return float(is_clearer.mean()), len(kept)


def pair_with_others(lengths: IntArray) -> IntArray:
    """Return for every sentence another one: the next by length.

    >>> pair_with_others(np.array([5, 3, 9])).tolist()
    [2, 0, 1]
    """
    order = np.argsort(lengths, kind="stable")
    partners = np.empty_like(order)
    partners[order] = np.roll(order, -1)
    return partners


def link_clarity(
    encoder: Encoder,
    src: Ragged,
    tgt: Ragged,
    special_tokens: SpecialTokens,
    layer: int,
    rules: LabelRules,
    *,
    reset: bool,
) -> Float[Tensor, "pairs"]:
    """Return how much of the transport plan of each pair lies on its links."""
    sides = add_pair_special_tokens(src, tgt, special_tokens)
    pairs, positions = join_sides(*sides, reset=reset)
    device = next(encoder.parameters()).device
    tokens = pack(pairs, positions=positions, pad_id=special_tokens.pad_id).to(device)
    (hidden_states,) = encoder(tokens, [layer])
    flat_sides = torch.from_numpy(token_sides(src, tgt, special_tokens)).to(device)
    blocks = PairBlocks.of(tokens, flat_sides)
    ids = blocks.to_blocks(tokens.ids)
    cells = blocks.cells() & (ids[:, :, None] != ids[:, None, :])
    similarity = compare_states(blocks.to_blocks(hidden_states), rules.similarity)
    return mass_on_links(similarity, cells, rules)
