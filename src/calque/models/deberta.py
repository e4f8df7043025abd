"""Layers of the DeBERTa kind, whose attention knows how far apart tokens are: run on whole tables.

Hugging Face's modules compute. Here is how they get sequences that lie end to end, and how
distances are counted where positions begin anew inside a sequence, as in pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from calque.models.attention import find_same, pad_slots, spread_rows

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.types import TokenBatch


@dataclass(frozen=True, slots=True)
class Table:
    """Sequences as rows: which tokens see each other, and where each token has its cell.

    Rows that several sequences share need no cells: the tokens lie there as they are.
    """

    shape: torch.Size
    sees: Bool[Tensor, "rows 1 _ longest"]
    cells: Int[Tensor, "tokens"] | None = None

    def lay(self, flat: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "rows longest hidden"]:
        """Copy flat tokens to their cells; what is left over is 0."""
        if self.cells is None:
            return flat.view(*self.shape, -1)
        return spread_rows(flat, self.cells, self.shape)

    def flatten(self, table: Float[Tensor, "rows longest hidden"]) -> Float[Tensor, "tokens _"]:
        """Take the tokens out of their cells again."""
        flat = table.flatten(0, 1)
        return flat if self.cells is None else flat[self.cells]


def run_deberta(
    body: Any, hidden: Float[Tensor, "1 tokens hidden"], batch: TokenBatch, asked: Collection[int]
) -> dict[int, Float[Tensor, "1 tokens hidden"]]:
    """Give the states of the layers asked for, the embedding output being layer 0."""
    encoder = body.encoder
    table = _share_rows(batch) if batch.row else _pad(batch)
    states, found = table.lay(hidden[0]), {0: hidden}
    distances = find_distances(body, batch, table)
    embedded = encoder.get_rel_embedding()
    for number, layer in enumerate(encoder.layer[: max(asked)], start=1):
        states, _ = layer(states, table.sees, relative_pos=distances, rel_embeddings=embedded)
        if number == 1 and encoder.conv is not None:
            states = table.lay(convolve(encoder.conv, hidden[0], table.flatten(states), batch))
        if number in asked:
            found[number] = table.flatten(states)[None]
    return found


def convolve(
    conv: Any,
    embedded: Float[Tensor, "tokens hidden"],
    states: Float[Tensor, "tokens hidden"],
    batch: TokenBatch,
) -> Float[Tensor, "tokens hidden"]:
    """Mix neighbours into the first layer's states, as DeBERTa-v2 does, and no two sequences.

    All lie in one row for that, as many zeros between sequences as a token sees to one side.
    """
    steps = torch.arange(len(batch.ids), device=batch.ids.device)
    number = torch.bucketize(steps, batch.offsets[1:].long(), right=True)
    gap = conv.conv.padding[0]
    cells = steps + gap * number
    shape = torch.Size([1, len(steps) + gap * (len(batch.offsets) - 1)])
    valid = torch.zeros(shape, dtype=torch.long, device=steps.device).index_fill(1, cells, 1)
    rows = [spread_rows(flat, cells, shape) for flat in (embedded, states)]
    mixed: Tensor = conv(*rows, valid)
    return mixed[0, cells]


def read_attentions(body: Any, batch: TokenBatch) -> tuple[Float[Tensor, "1 heads _ _"], ...]:
    """Give every layer's attention inside a batch of one sequence."""
    embedded = body.embeddings(batch.ids[None], position_ids=batch.positions[None])
    distances = find_distances(body, batch, _pad(batch))
    all_see_all = torch.ones_like(batch.ids[None])
    read = body.encoder(embedded, all_see_all, output_attentions=True, relative_pos=distances)
    attentions: tuple[Tensor, ...] = read.attentions
    return attentions


def find_distances(body: Any, batch: TokenBatch, table: Table) -> Int[Tensor, "1 _ _ _"] | None:
    """Number the distances between tokens as the model does; None where it has no such thing.

    Where positions count on through every sequence, one square serves all. Else each has its own,
    for each head: so Hugging Face's modules take them.
    """
    encoder = body.encoder
    if not encoder.relative_attention:
        return None
    longest = table.shape[1]
    # Compiled, nobody can look at the numbers.
    if batch.counts_on or (not torch.compiler.is_compiling() and _counts_on(body, batch)):
        places = torch.arange(longest, device=batch.ids.device)[None]
        return _number(encoder, places)[:, None]
    places = table.lay(batch.positions[:, None])[..., 0]
    n_heads = body.config.num_attention_heads
    numbers = _number(encoder, places)[:, None].expand(-1, n_heads, -1, -1)
    return numbers.reshape(1, -1, longest, longest)


def _number(encoder: Any, places: Int[Tensor, "rows longest"]) -> Int[Tensor, "rows longest _"]:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

    apart = places[:, :, None] - places[:, None, :]
    n_buckets, most = encoder.position_buckets, encoder.max_relative_positions
    if n_buckets > 0 and most > 0:
        apart = make_log_bucket_position(apart, n_buckets, most)
    return apart.long()


def _counts_on(body: Any, batch: TokenBatch) -> bool:
    """Tell whether positions count from 0 to the end in every sequence that is not padding."""
    starts, lengths = batch.offsets[:-1].long(), batch.offsets.diff().long()
    steps = torch.arange(len(batch.ids), device=batch.ids.device)
    counted = steps - starts.repeat_interleave(lengths)
    is_padding = batch.ids == body.embeddings.word_embeddings.padding_idx
    return bool(((batch.positions == counted) | is_padding).all())


def _share_rows(batch: TokenBatch) -> Table:
    return Table(torch.Size([len(batch.ids) // batch.row, batch.row]), find_same(batch, batch))


def _pad(batch: TokenBatch) -> Table:
    slots, valid = pad_slots(batch.offsets, batch.longest)
    cells = valid.flatten().nonzero()[:, 0]
    return Table(slots.shape, valid[:, None, None, :], cells)
