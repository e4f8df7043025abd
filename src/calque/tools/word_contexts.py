"""Where words occur, and what an encoder makes of these places: the word itself or its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from calque.text.batching import Ragged, add_marks, bucket_batches, pack, ranges, reorder
from calque.tools.embedder import BATCH_TOKENS, device_of, run_batches
from calque.tools.windows import marks_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.tools.static_vocabulary import WordCorpus
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    # The word numbers of all words of some sentences, and how many other subwords stand around.
    Choose = Callable[[IntArray, IntArray], BoolArray]

# What stands for a place: the mean of the word's own subwords, of all the others, or of all
# tokens of the sentence, its marks included.
View: TypeAlias = Literal["word", "others", "all"]
TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Words chosen out of some sentences, in the order of the text.

    `n_found` counts them for each sentence asked for; `pieces` are the subwords of those that
    have any. An occurrence is subwords `starts[k]` to `starts[k] + sizes[k]` of its sentence.
    """

    n_found: IntArray
    pieces: Ragged
    rows: IntArray
    starts: IntArray
    sizes: IntArray


@dataclass(frozen=True, slots=True)
class OccurrenceBatch:
    """What the encoder reads at once, and which of its tokens make up what.

    `places` are the numbers of the occurrences; `spans` lists their subwords, each with its
    `owners`; `text` the tokens of sentences that count as context, each with its `sentences`.
    """

    tokens: TokenBatch
    places: Int[Tensor, "places"]
    sentence_of: Int[Tensor, "places"]
    sizes: Int[Tensor, "places"]
    spans: Int[Tensor, "pieces"]
    owners: Int[Tensor, "pieces"]
    text: Int[Tensor, "text"]
    sentences: Int[Tensor, "text"]
    lengths: Int[Tensor, "sentences"]

    def to(self, device: torch.device) -> OccurrenceBatch:
        """Copy the arrays to a device, without waiting for the copy."""
        return self._change(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> OccurrenceBatch:
        """Move the arrays to page-locked memory, from which copies to a GPU do not wait."""
        return self._change(lambda tensor: tensor.pin_memory())

    def _change(self, change: Callable[[Tensor], Tensor]) -> OccurrenceBatch:
        tokens, names = self.tokens, [field.name for field in fields(self) if field.name != TOKENS]
        return replace(
            self,
            **{name: change(getattr(self, name)) for name in names},
            tokens=replace(
                tokens,
                ids=change(tokens.ids),
                positions=change(tokens.positions),
                offsets=change(tokens.offsets),
            ),
        )


def find_occurrences(corpus: WordCorpus, index: IntArray, choose: Choose) -> Occurrences:
    """Choose words of the sentences asked for; sentences without any need no encoder."""
    words = corpus.sentences.gather(index)
    sizes = corpus.pieces.lengths(words.ids)
    ends = np.cumsum(sizes)
    before = np.concatenate([[0], ends])[np.cumsum(words.lengths) - words.lengths]
    n_pieces = np.diff(np.append(before, ends[-1:]))
    owners = np.repeat(np.arange(len(index)), words.lengths)
    chosen = np.flatnonzero(choose(corpus.rows[words.ids], n_pieces[owners] - sizes))
    n_found = np.bincount(owners[chosen], minlength=len(index))
    used = n_found > 0
    pieces = corpus.pieces.gather(words.ids[used[owners]])
    return Occurrences(
        n_found=n_found,
        pieces=Ragged(pieces.ids, n_pieces[used]),
        rows=corpus.rows[words.ids[chosen]],
        starts=(ends - sizes - before[owners])[chosen],
        sizes=sizes[chosen],
    )


def plan_batches(
    encoder: Encoder, found: Occurrences, view: View, batch_tokens: int | None = None
) -> list[OccurrenceBatch]:
    """Lay sentences of similar length out as batches within a budget of tokens."""
    device = device_of(encoder)
    budget = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    n_found = found.n_found[found.n_found > 0]
    firsts = np.cumsum(n_found) - n_found
    marks, pad_id = marks_of(encoder), encoder.tokenizer.pad_token_id or 0
    batches = []
    for rows in bucket_batches(found.pieces.lengths, budget):
        pieces = reorder(found.pieces, rows)
        marked = add_marks(pieces, *marks)
        begins = np.cumsum(marked.lengths) - marked.lengths
        places = ranges(firsts[rows], n_found[rows])
        sentence_of = np.repeat(np.arange(len(rows)), n_found[rows])
        sizes, head = found.sizes[places], int(marks[0] is not None)
        context, skipped = (marked, 0) if view == "all" else (pieces, head)
        arrays = (
            places,
            sentence_of,
            sizes,
            ranges(begins[sentence_of] + head + found.starts[places], sizes),
            np.repeat(np.arange(len(places)), sizes),
            ranges(begins + skipped, context.lengths),
            np.repeat(np.arange(len(rows)), context.lengths),
            context.lengths,
        )
        batch = OccurrenceBatch(pack(marked, pad_id=pad_id), *map(torch.from_numpy, arrays))
        batches.append(batch.pin_memory() if device.type == "cuda" else batch)
    return batches


def view_states(
    states: Float[Tensor, "tokens hidden"], batch: OccurrenceBatch, view: View
) -> Float[Tensor, "places hidden"]:
    """Average what stands for every place, in single precision at least."""
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    if view == "all":
        total = _sum_rows(states[batch.text], batch.sentences, len(batch.lengths))
        return (total / batch.lengths[:, None])[batch.sentence_of]
    own = _sum_rows(states[batch.spans], batch.owners, len(batch.places))
    if view == "word":
        return own / batch.sizes[:, None]
    total = _sum_rows(states[batch.text], batch.sentences, len(batch.lengths))
    n_others = batch.lengths[batch.sentence_of] - batch.sizes
    return (total[batch.sentence_of] - own) / n_others[:, None]


def embed_occurrences(
    encoder: Encoder, batches: Sequence[OccurrenceBatch], n_places: int, layer: int, view: View
) -> Float[Tensor, "places hidden"]:
    """Run the encoder up to a layer, and give every place its vector."""
    device = device_of(encoder)
    vectors = torch.empty((n_places, encoder.hidden_size), device=device)

    @torch.inference_mode()
    def embed_batch(batch: OccurrenceBatch) -> None:
        batch = batch.to(device)
        (states,) = encoder(batch.tokens, [layer])
        vectors[batch.places] = view_states(states, batch, view)

    run_batches(embed_batch, batches, torch.get_num_threads() if device.type == "cpu" else 1)
    return vectors


def _sum_rows(
    rows: Float[Tensor, "rows hidden"], owners: Int[Tensor, "rows"], n_owners: int
) -> Float[Tensor, "owners hidden"]:
    return rows.new_zeros((n_owners, rows.shape[1])).index_add_(0, owners, rows)
