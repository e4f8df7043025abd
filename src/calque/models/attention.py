"""From rows laid end to end to padded tables, for what compares the tokens of a sequence.

Self-attention over sequences laid end to end, for every encoder of the BERT kind.

Three ways: inside short rows that several sequences share (training), by the variable-length
flash kernel (CUDA, half precision), or padded to the longest of the batch for the attention
alone. All other layers run on the flat tokens, without padding between sequences.

Attention of a decoder over packed sequences: to what came before, and to another sequence.

As in `models.attention`, all other layers run on flat tokens. Sequences share rows only where the
batches are laid out for it: sequence k of the one must find sequence k of the other in its row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor, nn

    from calque.types import TokenBatch

    Attend = Callable[[Tensor, Tensor, Tensor, float, float, int | None], Tensor]


def spread_rows(
    rows: Float[Tensor, "rows size"], cells: Int[Tensor, "rows"], shape: torch.Size
) -> Float[Tensor, "sentences words size"]:
    """Copy rows to their cells of a padded table of zeros; one cell beyond its end is dropped.

    Every cell has one row at most, so that the gradient is a plain copy back.

    >>> import torch
    >>> spread_rows(torch.tensor([[5.0], [7.0]]), torch.tensor([2, 4]), torch.Size([2, 2])).tolist()
    [[[0.0], [0.0]], [[5.0], [0.0]]]
    """
    n_cells = shape[0] * shape[1]
    table = rows.new_zeros(n_cells + 1, rows.shape[1]).index_copy(0, cells, rows)
    return table[:-1].view(*shape, -1)


NAME = "calque"
# Rows up to this long attend as small dense matrices, longer ones through the flash kernel.
LONGEST_ROW = 256


def plan_attention(batch: TokenBatch, dtype: torch.dtype) -> Attend:
    """Choose how the batch attends; what depends on the lengths alone is computed once."""
    if 0 < batch.row <= LONGEST_ROW:
        return plan_rows(batch, batch)
    if batch.ids.is_cuda and dtype in (torch.bfloat16, torch.float16):
        return plan_flash(batch, batch, lambda: _padded_attention(batch))
    return _padded_attention(batch)


def plan_flash(
    queries: TokenBatch,
    keys: TokenBatch,
    plan_padded: Callable[[], Attend],
    reach: tuple[int, int] | None = None,
) -> Attend:
    """Let sequence k of one batch attend to sequence k of another through the flash kernel.

    It has no dropout: with some, the padded plan is made and used. `reach` is how far a token sees
    back and ahead, −1 for all the way, whatever the layer's window is.
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
                padded.append(plan_padded())
            return padded[0](query, key, value, dropout, scale, window)
        sides = (-1, -1) if window is None else (window, window)
        result = varlen_attn(
            query,
            key,
            value,
            queries.offsets,
            keys.offsets,
            queries.longest,
            keys.longest,
            scale=scale,
            window_size=reach or sides,
        )
        assert isinstance(result, torch.Tensor)  # a tuple only if more was asked for
        return result

    return attend


def plan_rows(batch: TokenBatch, read: TokenBatch) -> Attend:
    """Attend inside rows, each token to those of its own sequence, or of that number in `read`.

    Sentences are short: a flash kernel computes a tile of 128 × 128 for each of them, rows
    share one tile among several. Being plain products, all of it compiles and fuses.
    """
    row, same = batch.row, find_same(batch, read)

    def attend(
        query: Float[Tensor, "tokens heads size"],
        key: Float[Tensor, "tokens heads size"],
        value: Float[Tensor, "tokens heads size"],
        dropout: float,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "tokens heads size"]:
        mask = same if window is None else _add_window(same, row, window, same.device)
        shape = (-1, row, *query.shape[1:])
        q, k, v = (states.view(shape).transpose(1, 2) for states in (query, key, value))
        scores = (q @ k.transpose(-1, -2)) * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
        mixed = F.dropout(weights, dropout, training=dropout > 0) @ v
        return mixed.transpose(1, 2).reshape(query.shape)

    return attend


def find_same(batch: TokenBatch, read: TokenBatch) -> Bool[Tensor, "rows 1 row row"]:
    """Tell which tokens of a row belong to one sequence, or to that number of it in `read`."""
    n_tokens, row = len(batch.ids), batch.row
    steps = torch.arange(n_tokens, device=batch.ids.device, dtype=torch.int32)
    asking = torch.bucketize(steps, batch.offsets[1:], right=True).view(-1, 1, row)
    asked = asking
    if read is not batch:
        asked = torch.bucketize(steps, read.offsets[1:], right=True).view(-1, 1, row)
    return asking[..., :, None] == asked[..., None, :]


def _padded_attention(batch: TokenBatch) -> Attend:
    slots, valid = pad_slots(batch.offsets, batch.longest)
    longest = slots.shape[1]
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
            # A padding query far from all keys would see none, and some kernels return NaN then.
            mask = mask if even else mask | ~valid[:, None, :, None]
        q, k, v = (_pad(states, slots, even).transpose(1, 2) for states in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale
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
    attend_cross: Attend | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for a Hugging Face attention function; without a plan, it is their SDPA.

    A layer hands both plans to both of its attentions: those across sequences take `attend_cross`.
    """
    if attend_cross is not None and "CrossAttention" in type(module).__name__:
        attend = attend_cross
    if attend is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Hugging Face passes one more than the reach to each side.
    window = None if sliding_window is None else sliding_window - 1
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    return attend(q, k, v, dropout, scale, window)[None], None


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
    mask: Bool[Tensor, "sequences 1 _ longest"] | None,
    longest: int,
    window: int,
    device: torch.device,
) -> Bool[Tensor, "sequences 1 longest longest"]:
    steps = torch.arange(longest, device=device)
    near = ((steps[:, None] - steps).abs() <= window)[None, None]
    return near if mask is None else mask & near


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
    return _padded_attention_pair_attention(queries, keys, causal=causal)


def _flash_attention(queries: TokenBatch, keys: TokenBatch, *, causal: bool) -> Attend:
    padded = partial(_padded_attention_pair_attention, queries, keys, causal=causal)
    return plan_flash(queries, keys, padded, reach=BEFORE if causal else ALL)


def _padded_attention_pair_attention(
    queries: TokenBatch, keys: TokenBatch, *, causal: bool
) -> Attend:
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
