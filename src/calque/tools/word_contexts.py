"""Where words occur, and what an encoder makes of these places: the word itself or its context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from calque.text.batching import Ragged, add_marks, bucket_batches, ranges, reorder
from calque.tools.embedder import BATCH_TOKENS, device_of, run_batches
from calque.tools.windows import marks_of
from calque.types import TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.tools.static_vocabulary import WordCorpus

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    # The word numbers of all words of some sentences, and how many other subwords stand around.
    Choose = Callable[[IntArray, IntArray], BoolArray]

# What stands for a place: the mean of the word's own subwords, of all the others, or of all
# tokens of the sentence, its marks included.
View: TypeAlias = Literal["word", "others", "all"]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Words chosen out of some sentences, in the order of the text.

    `n_found` counts them for each sentence, `n_pieces` its subwords; `forms` are all its words.
    An occurrence is subwords `starts[k]` to `starts[k] + sizes[k]` of its sentence.
    """

    n_found: IntArray
    n_pieces: IntArray
    forms: Ragged
    rows: IntArray
    starts: IntArray
    sizes: IntArray


@dataclass(frozen=True, slots=True)
class OccurrenceBatch:
    """What the encoder reads at once, and which of its tokens make up what.

    `places` are the numbers of the occurrences, and `n_tokens` counts what stands for each.
    `spans` lists their own subwords, those of place k from `span_starts[k]` on; `text` likewise
    the tokens of each sentence that count as context. What a view does not need is empty.
    """

    tokens: TokenBatch
    places: Int[Tensor, "places"]
    n_tokens: Int[Tensor, "places"]
    span_starts: Int[Tensor, "_places"]
    spans: Int[Tensor, "pieces"]
    sentence_of: Int[Tensor, "_places"]
    text_starts: Int[Tensor, "_sentences"]
    text: Int[Tensor, "text"]


@dataclass(frozen=True, slots=True)
class OccurrenceBlock:
    """Occurrences laid out as batches, all in one array, so that one copy takes it to a GPU.

    `numbers` holds the word numbers of the occurrences, in the order of the text, then what the
    batches are made of: all their ids, all their positions and so on. `sizes` and `cuts` tell
    these apart. The sentences of batch k have `longest[k]` tokens at most.
    """

    n_found: IntArray
    numbers: Int[Tensor, "numbers"]
    sizes: list[int]
    cuts: list[list[int]]
    longest: list[int]

    def to(self, device: torch.device) -> OccurrenceBlock:
        """Copy the numbers to a device, without waiting for the copy."""
        return replace(self, numbers=self.numbers.to(device, non_blocking=True))

    @property
    def rows(self) -> Int[Tensor, "places"]:
        """Give the word number of every occurrence."""
        return self.numbers[: self.sizes[0]]

    def batches(self) -> list[OccurrenceBatch]:
        """Give the batches; they share the memory of the block."""
        if not self.longest:
            return []
        _, ids, positions, offsets, *others = self.numbers.split_with_sizes(self.sizes)
        arrays = (ids, positions, offsets.int(), *others)
        parts = [a.split_with_sizes(cut) for a, cut in zip(arrays, self.cuts, strict=True)]
        tokens = zip(self.longest, *parts[:3], strict=True)
        return [
            OccurrenceBatch(TokenBatch(ids, positions, offsets, longest, len(ids)), *lists)
            for (longest, ids, positions, offsets), *lists in zip(tokens, *parts[3:], strict=True)
        ]


def find_occurrences(corpus: WordCorpus, index: IntArray, choose: Choose) -> Occurrences:
    """Choose words of the sentences asked for; sentences without any need no encoder."""
    words = corpus.sentences.gather(index)
    sizes, rows = corpus.form_sizes.take(words.ids), corpus.rows.take(words.ids)
    ends = np.cumsum(sizes)
    before = np.concatenate([[0], ends])[np.cumsum(words.lengths) - words.lengths]
    n_pieces = np.diff(np.append(before, ends[-1:]))
    chosen = np.flatnonzero(choose(rows, np.repeat(n_pieces, words.lengths) - sizes))
    owners = np.repeat(np.arange(len(index)), words.lengths).take(chosen)
    return Occurrences(
        n_found=np.bincount(owners, minlength=len(index)),
        n_pieces=n_pieces,
        forms=words,
        rows=rows.take(chosen),
        starts=(ends - sizes).take(chosen) - before.take(owners),
        sizes=sizes.take(chosen),
    )


def plan_block(
    encoder: Encoder,
    corpus: WordCorpus,
    found: Occurrences,
    view: View,
    batch_tokens: int | None = None,
) -> OccurrenceBlock:
    """Lay sentences of similar length out as batches within a budget of tokens.

    Sentences without occurrences are left out.
    """
    device, marks = device_of(encoder), marks_of(encoder)
    budget = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    used = np.flatnonzero(found.n_found)
    buckets = [used[rows] for rows in bucket_batches(found.n_pieces[used], budget)]
    lists = _lay_out(corpus, found, buckets, view, marks) if buckets else []
    arrays = [found.rows, *(array for array, _ in lists)]
    sizes = [len(array) for array in arrays]
    numbers = torch.empty(sum(sizes), dtype=torch.long, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=numbers.numpy())
    cuts = [cut.sizes.tolist() for _, cut in lists]
    n_marks = sum(mark is not None for mark in marks)
    longest = [int(found.n_pieces[rows[0]]) + n_marks for rows in buckets]  # it comes first
    return OccurrenceBlock(found.n_found, numbers, sizes, cuts, longest)


def view_states(
    states: Float[Tensor, "tokens hidden"], batch: OccurrenceBatch, view: View
) -> Float[Tensor, "places hidden"]:
    """Average what stands for every place, in single precision at least."""
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    if view == "word":
        total = _sum_lists(states, batch.spans, batch.span_starts)
    else:
        total = _sum_lists(states, batch.text, batch.text_starts)[batch.sentence_of]
    if view == "others":
        total -= _sum_lists(states, batch.spans, batch.span_starts)
    return total.div_(batch.n_tokens[:, None])


def embed_occurrences(
    encoder: Encoder, block: OccurrenceBlock, layer: int, view: View
) -> Float[Tensor, "places hidden"]:
    """Run the encoder up to a layer on a block that is where it is; give every place its vector."""
    device = device_of(encoder)
    vectors = torch.empty((len(block.rows), encoder.hidden_size), device=device)

    @torch.inference_mode()
    def embed_batch(batch: OccurrenceBatch) -> None:
        (states,) = encoder(batch.tokens, [layer])
        vectors.index_copy_(0, batch.places, view_states(states, batch, view).to(vectors.dtype))

    n_workers = torch.get_num_threads() if device.type == "cpu" else 1
    run_batches(embed_batch, block.batches(), n_workers)
    return vectors


@dataclass(frozen=True, slots=True)
class _Cut:
    """How many items of a list are in each batch."""

    sizes: IntArray

    def starts(self, lengths: IntArray) -> IntArray:
        """Tell where the items start that lie end to end in their batch."""
        starts: IntArray = np.cumsum(lengths) - lengths
        return starts - np.repeat(starts[self._firsts()], self.sizes)

    def widen(self, lengths: IntArray) -> _Cut:
        """Cut a list that has so many items for each item of this one."""
        return _Cut(np.add.reduceat(lengths, self._firsts()))

    def _firsts(self) -> IntArray:
        firsts: IntArray = np.cumsum(self.sizes) - self.sizes
        return firsts


def _lay_out(
    corpus: WordCorpus,
    found: Occurrences,
    buckets: list[IntArray],
    view: View,
    marks: tuple[int | None, int | None],
) -> list[tuple[IntArray, _Cut]]:
    """List what batches are made of, from the ids of their tokens on; all count from 0."""
    order = np.concatenate(buckets)
    pieces = corpus.spell(reorder(found.forms, order).ids)
    marked = add_marks(Ragged(pieces, found.n_pieces[order]), *marks)
    sentences = _Cut(np.array([len(rows) for rows in buckets]))
    tokens, begins = sentences.widen(marked.lengths), sentences.starts(marked.lengths)
    offsets = np.insert(begins, np.cumsum(sentences.sizes), tokens.sizes)
    return [
        (marked.ids, tokens),
        (ranges(np.zeros_like(marked.lengths), marked.lengths), tokens),
        (offsets, _Cut(sentences.sizes + 1)),
        *_lay_out_places(found, order, sentences, marked.lengths, view, marks),
    ]


def _lay_out_places(
    found: Occurrences,
    order: IntArray,
    sentences: _Cut,
    lengths: IntArray,
    view: View,
    marks: tuple[int | None, int | None],
) -> list[tuple[IntArray, _Cut]]:
    """List the places of batches of so many tokens a sentence, and what stands for each."""
    n_places, firsts = found.n_found[order], np.cumsum(found.n_found) - found.n_found
    places, cut = ranges(firsts[order], n_places), sentences.widen(n_places)
    sizes, begins, head = found.sizes[places], sentences.starts(lengths), int(marks[0] is not None)
    n_tokens = np.zeros_like(sizes)
    nothing = np.zeros(0, dtype=np.int64), _Cut(np.zeros_like(sentences.sizes))
    own, context = [nothing] * 2, [nothing] * 3
    if view != "all":
        spans = ranges(np.repeat(begins + head, n_places) + found.starts[places], sizes)
        own = [(cut.starts(sizes), cut), (spans, cut.widen(sizes))]
        n_tokens = sizes
    if view != "word":
        skipped, n_text = (0, lengths) if view == "all" else (head, found.n_pieces[order])
        numbers = np.repeat(sentences.starts(np.ones_like(order)), n_places)
        text = ranges(begins + skipped, n_text), sentences.widen(n_text)
        context = [(numbers, cut), (sentences.starts(n_text), sentences), text]
        n_tokens = np.repeat(n_text, n_places) - n_tokens
    return [(places, cut), (n_tokens, cut), *own, *context]


def _sum_lists(
    states: Float[Tensor, "tokens hidden"],
    index: Int[Tensor, "items"],
    starts: Int[Tensor, "lists"],
) -> Float[Tensor, "lists hidden"]:
    """Sum the states of each list: unlike `index_add_`, in one go, and always in the same order."""
    return functional.embedding_bag(index, states, starts, mode="sum")
