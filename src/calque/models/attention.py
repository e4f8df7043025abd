"""Attention over packed sequences: several sequences end to end, with no padding between them.

Only attention needs to know where a sequence ends; all other layers run on the flat tokens. There
are three implementations: dense rows that several short sequences share (training), the
variable-length flash kernel (CUDA, half precision), and padding to the longest sequence for the
attention alone. `plan_attention` and its siblings choose one and compute once what depends on the
sequence lengths only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor, nn

    from calque.types import TokenBatch

    # (query, key, value, dropout, scale, window) -> mixed values, all "tokens heads size".
    Attend = Callable[[Tensor, Tensor, Tensor, float, float, int | None], Tensor]

# The name under which transformers knows `attend_packed`.
ATTENTION_NAME = "calque"
# Rows up to this length attend as small dense matrices, longer ones through the flash kernel.
MAX_ROW_LENGTH = 256


def plan_attention(batch: TokenBatch, dtype: torch.dtype) -> Attend:
    """Return a function in which every token attends to all tokens of its own sequence."""
    if 0 < batch.row <= MAX_ROW_LENGTH:
        return plan_rows(batch, batch)
    return _plan_packed(batch, batch, dtype)


def plan_causal_attention(batch: TokenBatch, dtype: torch.dtype) -> Attend:
    """Return a function in which every token attends to its sequence up to itself.

    Batches with rows are not supported.
    """
    assert batch.row == 0
    return _plan_packed(batch, batch, dtype, causal=True)


def plan_cross_attention(queries: TokenBatch, keys: TokenBatch, dtype: torch.dtype) -> Attend:
    """Return a function in which sequence k of `queries` attends to sequence k of `keys`.

    The same sequences must be empty in both batches. In a layout with rows, each sequence must be
    in the same row of both batches.
    """
    if 0 < queries.row <= MAX_ROW_LENGTH and queries.row == keys.row:
        return plan_rows(queries, keys)
    assert queries.row == keys.row, "rows change the order of sequences"
    return _plan_packed(queries, keys, dtype)


def _plan_packed(
    queries: TokenBatch, keys: TokenBatch, dtype: torch.dtype, *, causal: bool = False
) -> Attend:
    if queries.ids.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return plan_flash(queries, keys, causal=causal)
    return plan_padded(queries, keys, causal=causal)


def plan_rows(queries: TokenBatch, keys: TokenBatch) -> Attend:
    """Return attention inside rows, each token to those of its own sequence number in `keys`.

    For short sentences this is faster than a flash kernel, which computes a tile of 128 × 128 for
    each sentence: here several sentences share one tile. It consists of plain matrix products,
    which compile and fuse.
    """
    row, same_sequence = queries.row, same_sequence_mask(queries, keys)

    def attend(
        query: Float[Tensor, "tokens heads size"],
        key: Float[Tensor, "tokens heads size"],
        value: Float[Tensor, "tokens heads size"],
        dropout: float,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "tokens heads size"]:
        mask = same_sequence if window is None else _add_window(same_sequence, row, window)
        shape = (-1, row, *query.shape[1:])
        q, k, v = (states.view(shape).transpose(1, 2) for states in (query, key, value))
        scores = (q @ k.transpose(-1, -2)) * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
        mixed = F.dropout(weights, dropout, training=dropout > 0) @ v
        return mixed.transpose(1, 2).reshape(query.shape)

    return attend


def plan_flash(queries: TokenBatch, keys: TokenBatch, *, causal: bool = False) -> Attend:
    """Return attention by the variable-length flash kernel of PyTorch.

    The kernel has no dropout: calls with dropout use the padded implementation.
    """
    from torch.nn.attention.varlen import varlen_attn

    padded: list[Attend] = []

    def attend(
        query: Float[Tensor, "tokens heads size"],
        key: Float[Tensor, "others heads size"],
        value: Float[Tensor, "others heads size"],
        dropout: float,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "tokens heads size"]:
        if dropout > 0:  # exact, but slower
            if not padded:
                padded.append(plan_padded(queries, keys, causal=causal))
            return padded[0](query, key, value, dropout, scale, window)
        # How many tokens are visible to the left and to the right; −1 means all of them.
        reach = -1 if window is None else window
        result = varlen_attn(
            query,
            key,
            value,
            queries.offsets,
            keys.offsets,
            queries.longest,
            keys.longest,
            scale=scale,
            window_size=(reach, 0 if causal else reach),
        )
        assert isinstance(result, torch.Tensor)  # a tuple is returned only on request
        return result

    return attend


def plan_padded(queries: TokenBatch, keys: TokenBatch, *, causal: bool = False) -> Attend:
    """Return attention over sequences that are padded to the longest one."""
    slots, is_real = padded_indices(queries.offsets, queries.longest)
    is_self = queries is keys
    key_slots, is_key = (slots, is_real) if is_self else padded_indices(keys.offsets, keys.longest)
    # Self-attention over sequences of equal length needs no mask and no padding.
    is_dense = is_self and not causal and bool(is_real.all())
    mask = None if is_dense else is_key[:, None, None, :]
    n_steps = slots.shape[1]
    if causal:
        earlier = torch.ones(n_steps, n_steps, dtype=torch.bool, device=slots.device).tril()
        mask = is_key[:, None, None, :] & earlier

    def pad(states: Tensor, index: Tensor) -> Tensor:
        padded = states.view(*index.shape, *states.shape[1:]) if is_dense else states[index]
        return padded.transpose(1, 2)

    def attend(
        query: Float[Tensor, "tokens heads size"],
        key: Float[Tensor, "others heads size"],
        value: Float[Tensor, "others heads size"],
        dropout: float,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "tokens heads size"]:
        visible = mask
        if window is not None:
            visible = _add_window(mask, n_steps, window, slots.device)
            # A padding query far from all keys would see none, and some kernels return NaN then.
            visible = visible if is_dense else visible | ~is_real[:, None, :, None]
        mixed = F.scaled_dot_product_attention(
            pad(query, slots),
            pad(key, key_slots),
            pad(value, key_slots),
            attn_mask=visible,
            dropout_p=dropout,
            scale=scale,
        ).transpose(1, 2)
        return mixed.reshape(query.shape) if is_dense else mixed[is_real]

    return attend


def _add_window(
    mask: Bool[Tensor, "sequences 1 _ longest"] | None,
    longest: int,
    window: int,
    device: torch.device | None = None,
) -> Bool[Tensor, "sequences 1 longest longest"]:
    """Restrict a mask to tokens at most `window` positions apart."""
    steps = torch.arange(longest, device=device if mask is None else mask.device)
    near = ((steps[:, None] - steps).abs() <= window)[None, None]
    return near if mask is None else mask & near


def same_sequence_mask(queries: TokenBatch, keys: TokenBatch) -> Bool[Tensor, "rows 1 row row"]:
    """Return which key tokens of a row have the sequence number of which query tokens."""
    steps = torch.arange(len(queries.ids), device=queries.ids.device, dtype=torch.int32)
    query_numbers = torch.bucketize(steps, queries.offsets[1:], right=True)
    key_numbers = query_numbers
    if keys is not queries:
        key_numbers = torch.bucketize(steps, keys.offsets[1:], right=True)
    shape = (-1, 1, queries.row)
    return query_numbers.view(shape)[..., :, None] == key_numbers.view(shape)[..., None, :]


def padded_indices(
    offsets: Int[Tensor, "boundaries"], longest: int
) -> tuple[Int[Tensor, "sequences longest"], Bool[Tensor, "sequences longest"]]:
    """Return the flat token index of every cell of the padded table, and which cells are real.

    Empty sequences get no row.

    >>> slots, is_real = padded_indices(torch.tensor([0, 2, 3]), longest=2)
    >>> slots.tolist(), is_real.tolist()
    ([[0, 1], [2, 2]], [[True, True], [True, False]])
    """
    starts, lengths = offsets[:-1].long(), offsets.diff().long()
    is_filled = lengths > 0
    starts, lengths = starts[is_filled], lengths[is_filled]
    steps = torch.arange(min(longest, int(lengths.max())), device=offsets.device)
    is_real = steps < lengths[:, None]
    return (starts[:, None] + steps).clamp(max=int(offsets[-1]) - 1), is_real


def scatter_rows(
    rows: Float[Tensor, "rows size"], cells: Int[Tensor, "rows"], shape: torch.Size
) -> Float[Tensor, "sentences words size"]:
    """Copy rows to their cells of a padded table of zeros; cell number n_cells means "nowhere".

    No two rows may share a cell of the table, so that the gradient is a plain copy.

    >>> import torch
    >>> rows, cells = torch.tensor([[5.0], [7.0]]), torch.tensor([2, 4])
    >>> scatter_rows(rows, cells, torch.Size([2, 2])).tolist()
    [[[0.0], [0.0]], [[5.0], [0.0]]]
    """
    n_cells = shape[0] * shape[1]
    table = rows.new_zeros(n_cells + 1, rows.shape[1]).index_copy(0, cells, rows)
    return table[:-1].view(*shape, -1)


def attend_packed(
    module: nn.Module,
    query: Float[Tensor, "1 heads tokens size"],
    key: Float[Tensor, "1 heads tokens size"],
    value: Float[Tensor, "1 heads tokens size"],
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    attend: Attend | None = None,
    attend_cross: Attend | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a Hugging Face layer; without a plan this is their SDPA function.

    A layer passes both plans to both of its attention modules: cross-attention modules use
    `attend_cross`, all others `attend`.
    """
    if attend_cross is not None and "CrossAttention" in type(module).__name__:
        attend = attend_cross
    if attend is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Hugging Face passes the number of visible tokens on each side plus one.
    window = None if sliding_window is None else sliding_window - 1
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(q, k, v, dropout, scale, window)[None], None


def register_attention() -> str:
    """Register `attend_packed` with transformers; return the name to load models with."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, attend_packed)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME
