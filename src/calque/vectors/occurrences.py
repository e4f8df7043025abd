"""Occurrences of words in a corpus, and their vectors: of the word itself or of its context.

Occurrences are planned in blocks of batches whose index arrays are copied to the device at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from calque.models.inference import BATCH_TOKENS, device_of, run_batches
from calque.tokens.ragged import Ragged, add_special_tokens, batch_by_length, ranges, reorder
from calque.tokens.tokenizer import boundary_ids
from calque.types import TokenBatch
from calque.vectors.corpus import WordCorpus

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    # Given the rows of words and the number of other subwords in their sentences: which to use.
    ChooseWords = Callable[[IntArray, IntArray], BoolArray]

# The vector of an occurrence is the mean of the word's own subwords, of all other subwords of its
# sentence, or of all its tokens including special tokens.
View: TypeAlias = Literal["word", "others", "all"]


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Words chosen from some sentences, in the order of the text.

    `n_found` counts them in each sentence, `n_subwords` its subwords; `forms` are all its words.
    Occurrence k consists of subwords `starts[k]` to `starts[k] + sizes[k]` of its sentence.
    """

    n_found: IntArray
    n_subwords: IntArray
    forms: Ragged
    rows: IntArray
    starts: IntArray
    sizes: IntArray


@dataclass(frozen=True, slots=True)
class OccurrenceBatch:
    """One batch for the encoder, and the tokens that make up the vector of each occurrence.

    `numbers` are the occurrences of the batch, and `n_tokens` counts the tokens of each. `spans`
    lists their own subwords, those of occurrence k from `span_starts[k]` on; `text` lists the
    tokens of each sentence that are context. Arrays that a view does not need are empty.
    """

    tokens: TokenBatch
    numbers: Int[Tensor, "occurrences"]
    n_tokens: Int[Tensor, "occurrences"]
    span_starts: Int[Tensor, "_occurrences"]
    spans: Int[Tensor, "subwords"]
    sentence_of: Int[Tensor, "_occurrences"]
    text_starts: Int[Tensor, "_sentences"]
    text: Int[Tensor, "text"]


@dataclass(frozen=True, slots=True)
class OccurrenceBlock:
    """Batches of occurrences in one array, so that they are copied to a GPU at once.

    `data` has the word rows of the occurrences, in the order of the text, then the fields of all
    batches: all token ids, all positions and so on. `sizes` are the lengths of these parts, and
    `splits` the lengths of each part's batches. The sentences of batch k have at most `longest[k]`
    tokens.
    """

    n_found: IntArray
    data: Int[Tensor, "data"]
    sizes: list[int]
    splits: list[list[int]]
    longest: list[int]

    def to(self, device: torch.device) -> OccurrenceBlock:
        """Copy the data to a device without waiting for the copy."""
        return replace(self, data=self.data.to(device, non_blocking=True))

    @property
    def rows(self) -> Int[Tensor, "occurrences"]:
        """Word row of every occurrence."""
        return self.data[: self.sizes[0]]

    def batches(self) -> list[OccurrenceBatch]:
        """Return the batches, which share the memory of the block."""
        if not self.longest:
            return []
        _, ids, positions, offsets, *others = self.data.split_with_sizes(self.sizes)
        arrays = (ids, positions, offsets.int(), *others)
        parts = [a.split_with_sizes(split) for a, split in zip(arrays, self.splits, strict=True)]
        tokens = zip(self.longest, *parts[:3], strict=True)
        return [
            OccurrenceBatch(TokenBatch(ids, positions, offsets, longest, len(ids)), *lists)
            for (longest, ids, positions, offsets), *lists in zip(tokens, *parts[3:], strict=True)
        ]


def find_occurrences(corpus: WordCorpus, index: IntArray, choose: ChooseWords) -> Occurrences:
    """Choose words from the given sentences of a corpus."""
    words = corpus.sentences.gather(index)
    sizes, rows = corpus.form_sizes.take(words.ids), corpus.rows.take(words.ids)
    ends = np.cumsum(sizes)
    before = np.concatenate([[0], ends])[np.cumsum(words.lengths) - words.lengths]
    n_subwords = np.diff(np.append(before, ends[-1:]))
    chosen = np.flatnonzero(choose(rows, np.repeat(n_subwords, words.lengths) - sizes))
    owners = np.repeat(np.arange(len(index)), words.lengths).take(chosen)
    return Occurrences(
        n_found=np.bincount(owners, minlength=len(index)),
        n_subwords=n_subwords,
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
    """Arrange sentences with occurrences in batches of similar length."""
    device, special_tokens = device_of(encoder), boundary_ids(encoder.tokenizer)
    budget = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    used = np.flatnonzero(found.n_found)
    batches = [used[rows] for rows in batch_by_length(found.n_subwords[used], budget)]
    fields = _build_fields(corpus, found, batches, view, special_tokens) if batches else []
    arrays = [found.rows, *(array for array, _ in fields)]
    sizes = [len(array) for array in arrays]
    data = torch.empty(sum(sizes), dtype=torch.long, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=data.numpy())
    splits = [grouping.sizes.tolist() for _, grouping in fields]
    n_special = sum(token is not None for token in special_tokens)
    longest = [int(found.n_subwords[rows[0]]) + n_special for rows in batches]  # it comes first
    return OccurrenceBlock(found.n_found, data, sizes, splits, longest)


@dataclass(frozen=True, slots=True)
class _Grouping:
    """Number of items of a list in each batch."""

    sizes: IntArray

    def starts(self, lengths: IntArray) -> IntArray:
        """Return where items with the given lengths start in their batch."""
        starts: IntArray = np.cumsum(lengths) - lengths
        return starts - np.repeat(starts[self._firsts()], self.sizes)

    def widen(self, lengths: IntArray) -> _Grouping:
        """Return the grouping of a list that has the given number of items for each item."""
        return _Grouping(np.add.reduceat(lengths, self._firsts()))

    def _firsts(self) -> IntArray:
        firsts: IntArray = np.cumsum(self.sizes) - self.sizes
        return firsts


def _build_fields(
    corpus: WordCorpus,
    found: Occurrences,
    batches: list[IntArray],
    view: View,
    special_tokens: tuple[int | None, int | None],
) -> list[tuple[IntArray, _Grouping]]:
    """Return the fields of all batches, in the order of TokenBatch and OccurrenceBatch."""
    order = np.concatenate(batches)
    subwords = corpus.get_subwords(reorder(found.forms, order).ids)
    sequences = add_special_tokens(Ragged(subwords, found.n_subwords[order]), *special_tokens)
    lengths = sequences.lengths
    sentences = _Grouping(np.array([len(rows) for rows in batches]))
    tokens, begins = sentences.widen(lengths), sentences.starts(lengths)
    offsets = np.insert(begins, np.cumsum(sentences.sizes), tokens.sizes)

    n_found, firsts = found.n_found[order], np.cumsum(found.n_found) - found.n_found
    numbers, occurrences = ranges(firsts[order], n_found), sentences.widen(n_found)
    sizes, n_before = found.sizes[numbers], int(special_tokens[0] is not None)
    n_tokens = np.zeros_like(sizes)
    nothing = np.zeros(0, dtype=np.int64), _Grouping(np.zeros_like(sentences.sizes))
    own, context = [nothing] * 2, [nothing] * 3
    if view != "all":
        spans = ranges(np.repeat(begins + n_before, n_found) + found.starts[numbers], sizes)
        own = [(occurrences.starts(sizes), occurrences), (spans, occurrences.widen(sizes))]
        n_tokens = sizes
    if view != "word":
        skipped, n_text = (0, lengths) if view == "all" else (n_before, found.n_subwords[order])
        sentence_of = np.repeat(sentences.starts(np.ones_like(order)), n_found)
        text = ranges(begins + skipped, n_text), sentences.widen(n_text)
        context = [(sentence_of, occurrences), (sentences.starts(n_text), sentences), text]
        n_tokens = np.repeat(n_text, n_found) - n_tokens
    return [
        (sequences.ids, tokens),
        (ranges(np.zeros_like(lengths), lengths), tokens),
        (offsets, _Grouping(sentences.sizes + 1)),
        (numbers, occurrences),
        (n_tokens, occurrences),
        *own,
        *context,
    ]


def embed_occurrences(
    encoder: Encoder, block: OccurrenceBlock, layer: int, view: View
) -> Float[Tensor, "occurrences hidden"]:
    """Return the vectors of a block's occurrences; the encoder runs up to the given layer."""
    device = device_of(encoder)
    vectors = torch.empty((len(block.rows), encoder.hidden_size), device=device)

    @torch.inference_mode()
    def embed_batch(batch: OccurrenceBatch) -> None:
        (states,) = encoder(batch.tokens, [layer])
        pooled = pool_occurrences(states, batch, view)
        vectors.index_copy_(0, batch.numbers, pooled.to(vectors.dtype))

    n_workers = torch.get_num_threads() if device.type == "cpu" else 1
    run_batches(embed_batch, block.batches(), n_workers)
    encoder.check_finite(vectors, layer)
    return vectors


def pool_occurrences(
    states: Float[Tensor, "tokens hidden"], batch: OccurrenceBatch, view: View
) -> Float[Tensor, "occurrences hidden"]:
    """Average the states of every occurrence, at least in single precision."""
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    if view == "word":
        total = _sum_lists(states, batch.spans, batch.span_starts)
    else:
        total = _sum_lists(states, batch.text, batch.text_starts)[batch.sentence_of]
    if view == "others":
        total -= _sum_lists(states, batch.spans, batch.span_starts)
    return total.div_(batch.n_tokens[:, None])


def _sum_lists(
    states: Float[Tensor, "tokens hidden"],
    index: Int[Tensor, "items"],
    starts: Int[Tensor, "lists"],
) -> Float[Tensor, "lists hidden"]:
    """Sum the states of each list, always in the same order (unlike `index_add_`)."""
    return functional.embedding_bag(index, states, starts, mode="sum")
