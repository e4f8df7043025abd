"""Whether a model's self-labels are worth learning from: it must tell translations from others.

A diagonal links the words of any two sentences equally well. Labels that are better than that
follow what words mean, and then a sentence's words find clearer partners in its translation than
in another sentence of that length. Equal tokens do not count: to match them needs no knowledge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.objectives.alignment_batches import flag_sides
from calque.objectives.masked_lm import join_sides, mark_sides
from calque.objectives.self_labels import LabelRules, PairBlocks, compare_states, share_on_links
from calque.text.batching import Ragged, pack, reorder

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Marks

    IntArray = npt.NDArray[np.int64]

# Pairs looked at, the fewest that allow a verdict, and the share of them to be told from
# mismatched ones. Chance gives a half.
N_CHECKED, FEWEST_CHECKED, LEAST_TOLD = 256, 16, 2 / 3


def tell_translations(
    encoder: Encoder,
    src: Ragged,
    tgt: Ragged,
    marks: Marks,
    layer: int,
    rules: LabelRules,
    *,
    reset: bool,
) -> tuple[float, int] | None:
    """Give the share of pairs whose links are clearer than with another sentence, and of how many.

    None if there are too few pairs to say. `reset` tells how positions are counted.
    """
    others = reorder(tgt, pair_with_others(tgt.lengths))
    n_tokens = src.lengths + np.maximum(tgt.lengths, others.lengths) + marks.between + 2
    kept = (n_tokens <= encoder.max_tokens).nonzero()[0][:N_CHECKED]
    if len(kept) < FEWEST_CHECKED:
        return None
    true, false = (
        measure_clarity(
            encoder, reorder(src, kept), reorder(side, kept), marks, layer, rules, reset=reset
        )
        for side in (tgt, others)
    )
    told = (true > false).float() + 0.5 * (true == false)
    return float(told.mean()), len(kept)


def pair_with_others(lengths: IntArray) -> IntArray:
    """Give every sentence another one, the next by length.

    >>> pair_with_others(np.array([5, 3, 9])).tolist()
    [2, 0, 1]
    """
    order = np.argsort(lengths, kind="stable")
    partners = np.empty_like(order)
    partners[order] = np.roll(order, -1)
    return partners


def measure_clarity(
    encoder: Encoder,
    src: Ragged,
    tgt: Ragged,
    marks: Marks,
    layer: int,
    rules: LabelRules,
    *,
    reset: bool,
) -> Float[Tensor, "pairs"]:
    """Encode pairs, and tell how clearly the tokens of each are linked."""
    pairs, positions = join_sides(*mark_sides(src, tgt, marks), reset=reset)
    device = next(encoder.parameters()).device
    tokens = pack(pairs, positions=positions, pad_id=marks.pad).to(device)
    (states,) = encoder(tokens, [layer])
    sides = torch.from_numpy(flag_sides(src, tgt, marks)).to(device)
    blocks = PairBlocks.of(tokens, sides)
    ids = blocks.lay(tokens.ids)
    cells = blocks.cells() & (ids[:, :, None] != ids[:, None, :])
    return share_on_links(compare_states(blocks.lay(states), rules.similarity), cells, rules)
