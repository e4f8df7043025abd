"""Attention of a decoder over packed sequences: to what came before, and to another sequence.

As in `models.attention`, all other layers run on flat tokens. Sequences share rows only where the
batches are laid out for it: sequence k of the one must find sequence k of the other in its row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from calque.models.attention import LONGEST_ROW, pad_slots, plan_flash, plan_rows

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.attention import Attend
    from calque.types import TokenBatch

# What the flash kernel takes for "all that came before" and for "everything".
BEFORE, ALL = (-1, 0), (-1, -1)


def plan_causal(batch: TokenBatch, dtype: torch.dtype) -> Attend:
    """Let every token attend to its sequence up to itself; rows are not known here."""
    assert batch.row == 0
    return _plan(batch, batch, dtype, causal=True)


def plan_cross(queries: TokenBatch, keys: TokenBatch, dtype: torch.dtype) -> Attend:
    """Let the tokens of sequence k attend to sequence k of another batch.

    Both batches have the same sequences empty. In rows, both have each sequence in the same row.
    """
    if 0 < queries.row <= LONGEST_ROW and queries.row == keys.row:
        return plan_rows(queries, keys)
    return _plan(queries, keys, dtype, causal=False)


def _plan(queries: TokenBatch, keys: TokenBatch, dtype: torch.dtype, *, causal: bool) -> Attend:
    assert queries.row == keys.row, "rows change the order of sequences"
    if queries.ids.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return _flash_attention(queries, keys, causal=causal)
    return _padded_attention(queries, keys, causal=causal)


def _flash_attention(queries: TokenBatch, keys: TokenBatch, *, causal: bool) -> Attend:
    padded = partial(_padded_attention, queries, keys, causal=causal)
    return plan_flash(queries, keys, padded, reach=BEFORE if causal else ALL)


def _padded_attention(queries: TokenBatch, keys: TokenBatch, *, causal: bool) -> Attend:
    slots, valid = pad_slots(queries.offsets, queries.longest)
    key_slots, seen = pad_slots(keys.offsets, keys.longest)
    mask = seen[:, None, None, :]
    if causal:
        n_steps = slots.shape[1]
        earlier = torch.ones(n_steps, n_steps, dtype=torch.bool, device=slots.device).tril()
        mask = mask & earlier

    def attend(
        query: Float[Tensor, "tokens heads size"],
        key: Float[Tensor, "others heads size"],
        value: Float[Tensor, "others heads size"],
        dropout: float,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "tokens heads size"]:
        q = query[slots].transpose(1, 2)
        k, v = (states[key_slots].transpose(1, 2) for states in (key, value))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale
        )
        return mixed.transpose(1, 2)[valid]

    return attend
