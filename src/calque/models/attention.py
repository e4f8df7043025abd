"""Self-attention over sequences laid end to end, for every encoder of the BERT kind.

On CUDA in half precision the sequences go to the variable-length flash kernel: no padding is
computed. Elsewhere they are padded to the longest of the batch for the attention alone; all
other layers still run on real tokens only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor, nn

    from calque.types import TokenBatch

    Attend = Callable[[Tensor, Tensor, Tensor, float, float, int | None], Tensor]

NAME = "calque"


def plan_attention(batch: TokenBatch, dtype: torch.dtype) -> Attend:
    """Choose how the batch attends; what depends on the lengths alone is computed once."""
    if batch.ids.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return _flash_attention(batch)
    return _padded_attention(batch)


def _flash_attention(batch: TokenBatch) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    padded: list[Attend] = []

    def attend(
        query: Float[Tensor, "tokens heads size"],
        key: Float[Tensor, "tokens heads size"],
        value: Float[Tensor, "tokens heads size"],
        dropout: float,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "tokens heads size"]:
        if dropout > 0:  # the kernel has no dropout: exact, but slower
            if not padded:
                padded.append(_padded_attention(batch))
            return padded[0](query, key, value, dropout, scale, window)
        reach = (-1, -1) if window is None else (window, window)
        result: Tensor = varlen_attn(
            query,
            key,
            value,
            batch.offsets,
            batch.offsets,
            batch.longest,
            batch.longest,
            scale=scale,
            window_size=reach,
        )
        return result

    return attend


def _padded_attention(batch: TokenBatch) -> Attend:
    slots, valid = pad_slots(batch.offsets, batch.longest)
    n_sequences, longest = slots.shape
    even = bool(valid.all())

    def attend(
        query: Float[Tensor, "tokens heads size"],
        key: Float[Tensor, "tokens heads size"],
        value: Float[Tensor, "tokens heads size"],
        dropout: float,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "tokens heads size"]:
        mask = None if even else valid[:, None, None, :]
        if window is not None:
            mask = _add_window(mask, longest, window, slots.device)
        padded = [_pad(states, slots, even).transpose(1, 2) for states in (query, key, value)]
        mixed = F.scaled_dot_product_attention(
            *padded, attn_mask=mask, dropout_p=dropout, scale=scale
        )
        mixed = mixed.transpose(1, 2)
        return mixed.reshape(query.shape) if even else mixed[valid]

    return attend


def pad_slots(
    offsets: Int[Tensor, "boundaries"], longest: int
) -> tuple[Int[Tensor, "sequences longest"], Bool[Tensor, "sequences longest"]]:
    """Lay a packed batch out as rows: for every slot its flat index, and whether it is real.

    >>> slots, valid = pad_slots(torch.tensor([0, 2, 3]), longest=2)
    >>> slots.tolist(), valid.tolist()
    ([[0, 1], [2, 2]], [[True, True], [True, False]])
    """
    starts, lengths = offsets[:-1].long(), offsets.diff().long()
    real = lengths > 0
    starts, lengths = starts[real], lengths[real]
    steps = torch.arange(min(longest, int(lengths.max())), device=offsets.device)
    valid = steps < lengths[:, None]
    return (starts[:, None] + steps).clamp(max=int(offsets[-1]) - 1), valid


def attend_packed(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens size"],
    key: Float[Tensor, "1 heads tokens size"],
    value: Float[Tensor, "1 heads tokens size"],
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    attend: Attend | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for a Hugging Face attention function; without a plan, it is their SDPA."""
    if attend is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Hugging Face passes one more than the reach to each side.
    window = None if sliding_window is None else sliding_window - 1
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]
    return attend(*flat, dropout, scale, window)[None], None


def register() -> str:
    """Make `attend_packed` known to transformers; returns the name to load models with."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attend_packed)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _pad(
    states: Float[Tensor, "tokens heads size"], slots: Int[Tensor, "sequences longest"], even: bool
) -> Float[Tensor, "sequences longest heads size"]:
    return states.view(*slots.shape, *states.shape[1:]) if even else states[slots]


def _add_window(
    mask: Bool[Tensor, "sequences 1 1 longest"] | None,
    longest: int,
    window: int,
    device: torch.device,
) -> Bool[Tensor, "sequences 1 longest longest"]:
    steps = torch.arange(longest, device=device)
    near = ((steps[:, None] - steps).abs() <= window)[None, None]
    return near if mask is None else mask & near
