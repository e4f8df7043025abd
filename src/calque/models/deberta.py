"""DeBERTa layers on packed sequences. Their attention depends on distances between tokens.

Hugging Face's modules do the computation. This module puts packed sequences into a table of rows
for them, and computes the distances where positions restart inside a sequence, as they do in
sentence pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from calque.models.attention import padded_indices, same_sequence_mask, scatter_rows

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.types import TokenBatch


@dataclass(frozen=True, slots=True)
class RowTable:
    """Sequences as rows of a table: which tokens may attend, and in which cell each token is.

    `cells` is None for a batch with rows, whose tokens already form the table.
    """

    shape: torch.Size
    mask: Bool[Tensor, "rows 1 _ longest"]
    cells: Int[Tensor, "tokens"] | None = None

    @classmethod
    def build(cls, batch: TokenBatch) -> RowTable:
        """Return the table of a batch: its rows if it has any, one row per sequence otherwise."""
        if batch.row:
            shape = torch.Size([len(batch.ids) // batch.row, batch.row])
            return cls(shape, same_sequence_mask(batch, batch))
        slots, is_real = padded_indices(batch.offsets, batch.longest)
        cells = is_real.flatten().nonzero()[:, 0]
        return cls(slots.shape, is_real[:, None, None, :], cells)

    def fill(self, flat: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "rows longest hidden"]:
        """Copy flat tokens to their cells; all other cells are 0."""
        if self.cells is None:
            return flat.view(*self.shape, -1)
        return scatter_rows(flat, self.cells, self.shape)

    def flatten(self, table: Float[Tensor, "rows longest hidden"]) -> Float[Tensor, "tokens _"]:
        """Return the flat tokens of a filled table."""
        flat = table.flatten(0, 1)
        return flat if self.cells is None else flat[self.cells]


def run_deberta(
    body: Any, hidden: Float[Tensor, "1 tokens hidden"], batch: TokenBatch, layers: Collection[int]
) -> dict[int, Float[Tensor, "1 tokens hidden"]]:
    """Return the states of the given layers; layer 0 is the embedding output."""
    encoder, table = body.encoder, RowTable.build(batch)
    states, by_layer = table.fill(hidden[0]), {0: hidden}
    relative_positions = find_relative_positions(body, batch, table)
    embedded = encoder.get_rel_embedding()
    for number, layer in enumerate(encoder.layer[: max(layers)], start=1):
        states, _ = layer(
            states, table.mask, relative_pos=relative_positions, rel_embeddings=embedded
        )
        if number == 1 and encoder.conv is not None:
            states = table.fill(convolve(encoder.conv, hidden[0], table.flatten(states), batch))
        if number in layers:
            by_layer[number] = table.flatten(states)[None]
    return by_layer


def convolve(
    conv: Any,
    embedded: Float[Tensor, "tokens hidden"],
    states: Float[Tensor, "tokens hidden"],
    batch: TokenBatch,
) -> Float[Tensor, "tokens hidden"]:
    """Return DeBERTa-v2's convolution of the first layer's states, without mixing sequences.

    All sequences form one row, with as many zeros between them as the kernel reaches to one side.
    """
    steps = torch.arange(len(batch.ids), device=batch.ids.device)
    number = torch.bucketize(steps, batch.offsets[1:].long(), right=True)
    gap = conv.conv.padding[0]
    cells = steps + gap * number
    shape = torch.Size([1, len(steps) + gap * (len(batch.offsets) - 1)])
    is_real = torch.zeros(shape, dtype=torch.long, device=steps.device).index_fill(1, cells, 1)
    rows = [scatter_rows(flat, cells, shape) for flat in (embedded, states)]
    mixed: Tensor = conv(*rows, is_real)
    return mixed[0, cells]


def read_deberta_attentions(
    body: Any, batch: TokenBatch
) -> tuple[Float[Tensor, "1 heads _ _"], ...]:
    """Return every layer's attention weights for a batch of one sequence."""
    embedded = body.embeddings(batch.ids[None], position_ids=batch.positions[None])
    relative_positions = find_relative_positions(body, batch, RowTable.build(batch))
    mask = torch.ones_like(batch.ids[None])
    output = body.encoder(embedded, mask, output_attentions=True, relative_pos=relative_positions)
    attentions: tuple[Tensor, ...] = output.attentions
    return attentions


def find_relative_positions(
    body: Any, batch: TokenBatch, table: RowTable
) -> Int[Tensor, "1 _ _ _"] | None:
    """Return the (bucketed) distances between tokens; None if the model does not use them.

    One square serves all sequences if positions count from 0 to the end in each of them. Otherwise
    each sequence has its own square, repeated per head: the format of Hugging Face's modules.
    """
    encoder = body.encoder
    if not encoder.relative_attention:
        return None
    longest = table.shape[1]
    # Values cannot be inspected while compiling.
    if batch.has_default_positions or (
        not torch.compiler.is_compiling() and _is_consecutive(body, batch)
    ):
        positions = torch.arange(longest, device=batch.ids.device)[None]
        return _bucket_distances(encoder, positions)[:, None]
    positions = table.fill(batch.positions[:, None])[..., 0]
    n_heads = body.config.num_attention_heads
    distances = _bucket_distances(encoder, positions)[:, None].expand(-1, n_heads, -1, -1)
    return distances.reshape(1, -1, longest, longest)


def _bucket_distances(
    encoder: Any, positions: Int[Tensor, "rows longest"]
) -> Int[Tensor, "rows longest _"]:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    distances = positions[:, :, None] - positions[:, None, :]
    n_buckets, most = encoder.position_buckets, encoder.max_relative_positions
    if n_buckets > 0 and most > 0:
        distances = make_log_bucket_position(distances, n_buckets, most)
    return distances.long()


def _is_consecutive(body: Any, batch: TokenBatch) -> bool:
    """Return whether positions count from 0 to the end in every sequence that is not padding."""
    starts, lengths = batch.offsets[:-1].long(), batch.offsets.diff().long()
    steps = torch.arange(len(batch.ids), device=batch.ids.device)
    counted = steps - starts.repeat_interleave(lengths)
    is_padding = batch.ids == body.embeddings.word_embeddings.padding_idx
    return bool(((batch.positions == counted) | is_padding).all())
