"""A table of word vectors learnt by negative sampling, with Adam on the rows touched alone.

Where words occur, and what an encoder makes of these places: the word itself or its context.

Two ways to learn a vector a word from its occurrences: X2Static, and the mean of its states.

The unfinished work of an extraction, kept beside its output until that is written.

Static word vectors out of a frozen encoder: X2Static, or the mean of a word's states.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from calque.errors import InputError, first_line
from calque.io.files import PathLike, SkipBad, SkippedLines, check_target, shown, write_atomically
from calque.io.outputs import working_folder
from calque.models.inference import BATCH_TOKENS, device_of, run_batches
from calque.tokens.ragged import Ragged, add_special_tokens, bucket_batches, ranges, reorder
from calque.tokens.streams import seed_of
from calque.tokens.tokenizer import boundary_ids
from calque.types import TokenBatch
from calque.vectors.corpus import (
    CONTENTS,
    PIECES,
    SENTENCES,
    CorpusReader,
    CorpusReport,
    VocabularyLimits,
    WordCorpus,
    number_corpus,
)
from calque.vectors.static import WordVectors, write_vectors

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
    Choose = Callable[[IntArray, IntArray], BoolArray]
    FloatArray = npt.NDArray[np.float64]

CLAMP = 20.0
BETAS, EPSILON = (0.9, 0.999), 1e-8


def signs_of(n_words: int, device: torch.device) -> Float[Tensor, "words"]:
    """Give −1 for a target and 1 for its negatives: the signs of scores in the exponents."""
    signs = torch.ones(n_words, device=device)
    signs[0].neg_()  # a list of numbers would wait for the device
    return signs


def negative_sampling(
    scores: Float[Tensor, "targets words"], signs: Float[Tensor, "words"]
) -> tuple[Float[Tensor, "targets words"], Float[Tensor, "targets words"]]:
    """Give the exponents of the clamped logistic loss of scores, and its gradient.

    The first column holds the score s of a target with its context, the others those n of its
    negatives. The loss is the mean over targets of log(1 + e^−s) + Σ log(1 + e^n), with scores
    clamped to ±20 (Gupta and Jaggi, 2021); its exponents are −s and n. A clamped score has no
    gradient.

    >>> signs = signs_of(3, torch.device("cpu"))
    >>> exponents, gradient = negative_sampling(torch.tensor([[0.0, 0.0, -30.0]]), signs)
    >>> round(loss_of(exponents).item(), 4), gradient.tolist()
    (1.3863, [[-0.5, 0.5, 0.0]])
    """
    signed = scores * signs
    exponents = signed.clamp(-CLAMP, CLAMP)
    slopes = exponents.sigmoid() * (exponents == signed)
    return exponents, slopes / (signs * len(scores))


def loss_of(exponents: Float[Tensor, "targets words"]) -> Float[Tensor, ""]:
    """Give the sum of the targets' losses, in double precision."""
    return torch.nn.functional.softplus(exponents).sum(dtype=torch.float64)


class WordTable:
    """Vectors and their Adam moments; rows that a step does not touch stay as they are.

    The steps are those of `torch.optim.SparseAdam`, which would wait for the device every time,
    to sort the rows and find those that occur twice. Many steps are so small that a GPU is kept
    waiting by what starts its work: so a row's vector and moments lie together, to be read and
    written at once, and what steps have in common is computed for many of them.
    """

    def __init__(self, rows: Float[Tensor, "words three hidden"], n_steps: int = 0) -> None:
        self.rows, self.n_steps = rows, n_steps
        # Gradients are added up here; between steps it is zero.
        self._sums = torch.zeros_like(rows[:, 0])

    @classmethod
    def create(cls, n_words: int, n_dims: int, seed: int, device: torch.device) -> WordTable:
        """Make a table of vectors drawn from U(−1/d, 1/d), the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.rand(n_words, n_dims, generator=generator).mul_(2).sub_(1).div_(n_dims)
        rows = torch.zeros(n_words, 3, n_dims, device=device)
        rows[:, 0] = vectors.to(device)
        return cls(rows)

    @property
    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Give the vectors, which the table goes on changing."""
        return self.rows[:, 0]

    @torch.inference_mode()
    def take_steps(
        self,
        contexts: Float[Tensor, "targets hidden"],
        words: Int[Tensor, "targets words"],
        n_targets: Sequence[int],
        learning_rate: float,
    ) -> Float[Tensor, ""]:
        """Move targets, the first column of `words`, towards their contexts, negatives away.

        Steps have so many targets each, none of them zero. The sum of the losses is returned.
        """
        signs = signs_of(words.shape[1], words.device)
        sizes = list(n_targets)
        steps = zip(contexts.split_with_sizes(sizes), words.split_with_sizes(sizes), strict=True)
        exponents = [self._step(*step, signs, learning_rate) for step in steps]
        return loss_of(torch.cat(exponents))

    def _step(
        self,
        contexts: Float[Tensor, "targets hidden"],
        words: Int[Tensor, "targets words"],
        signs: Float[Tensor, "words"],
        learning_rate: float,
    ) -> Float[Tensor, "targets words"]:
        places, contexts = words.flatten(), contexts[:, None]
        rows = self.rows.index_select(0, places)
        vectors, mean, square = rows.unbind(1)
        scores = (vectors.view(*words.shape, -1) * contexts).sum(-1)
        exponents, slopes = negative_sampling(scores, signs)
        gradients = self._add_equals(places, (slopes[..., None] * contexts).flatten(0, 1))
        mean.lerp_(gradients, 1 - BETAS[0])
        square.lerp_(gradients.square_(), 1 - BETAS[1])
        self.n_steps += 1
        first, second = (1 - beta**self.n_steps for beta in BETAS)
        rate = learning_rate * second**0.5 / first
        roots = torch.sqrt(square, out=gradients)
        vectors.addcdiv_(mean, roots.add_(EPSILON), value=-rate)
        self.rows.index_copy_(0, places, rows)  # places of the same word write the same numbers
        return exponents

    def _add_equals(
        self, places: Int[Tensor, "places"], gradients: Float[Tensor, "places hidden"]
    ) -> Float[Tensor, "places hidden"]:
        """Give every place the sum of the gradients of its word."""
        total = self._sums.index_add_(0, places, gradients).index_select(0, places)
        self._sums.index_fill_(0, places, 0)
        return total


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
    device, marks = device_of(encoder), boundary_ids(encoder.tokenizer)
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
    marked = add_special_tokens(Ragged(pieces, found.n_pieces[order]), *marks)
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


# Sentences are encoded, sorted by length, in blocks of about so many.
BLOCK_SENTENCES = 4096
# What a seed is for, so that no two draws are the same.
START, ORDER, TARGETS, NEGATIVES = range(4)


@dataclass(frozen=True, slots=True)
class X2StaticSettings:
    """How to learn by X2Static; the numbers are those of Gupta and Jaggi's (2021) release.

    Paper: the context of a word is all other tokens of its sentence. Release: all tokens, the
    word itself and the marks of the sentence included (`context="all"`).
    """

    context: Literal["others", "all"] = "others"
    n_negatives: int = 10
    subsample: float = 5e-6
    learning_rate: float = 1e-3
    batch_sentences: int = 128
    n_epochs: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context not in ("others", "all"):
            raise InputError(f"context {self.context!r} is not known", fix="try others or all")
        for name in ("n_negatives", "subsample", "learning_rate", "batch_sentences", "n_epochs"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}={getattr(self, name)}", fix="choose more than 0")
        if self.seed < 0:
            raise InputError(f"seed={self.seed}", fix="choose 0 or more")


@dataclass(frozen=True, slots=True)
class PoolingSettings:
    """Take the mean of a word's states (Bommasani et al., 2020): there is nothing to choose."""


class Learner(Protocol):
    """Takes the occurrences of words block by block, so that each block can be the last.

    What it does with a block depends on the block's number and the seed alone, not on the run.
    """

    view: View
    n_epochs: int
    block_sentences: int

    def order(self, epoch: int) -> IntArray:
        """Give the order of the sentences."""

    def choose(self, block: int) -> Choose:
        """Give what chooses words out of a block."""

    def absorb(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Learn from occurrences and what the encoder made of them."""

    def state(self) -> dict[str, Tensor]:
        """Give all that was learnt."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what was learnt."""

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Give the vectors of the words."""


class X2StaticLearner:
    """Learns vectors that tell a word from others by its context (Gupta and Jaggi, 2021)."""

    def __init__(
        self, corpus: WordCorpus, n_dims: int, settings: X2StaticSettings, device: torch.device
    ) -> None:
        self.settings, self.n_epochs = settings, settings.n_epochs
        self.view: View = settings.context
        self.n_sentences, self.device = len(corpus), device
        n_steps = max(1, BLOCK_SENTENCES // settings.batch_sentences)
        self.block_sentences = n_steps * settings.batch_sentences
        self._n_blocks = -(-self.n_sentences // self.block_sentences)
        self._keep = keep_probabilities(corpus.counts, settings.subsample)
        self._cumulated = torch.from_numpy(np.cumsum(np.sqrt(corpus.counts))).to(device)
        seed = seed_of(settings.seed, START)
        self.table = WordTable.create(len(corpus.words), n_dims, seed, device)
        # Of this epoch: the number of targets, and the sum of their losses.
        self.figures = torch.zeros(2, dtype=torch.float64, device=device)
        # Which words were a target at least once: the others are as they were drawn.
        self.is_learnt = torch.zeros(len(corpus.words), dtype=torch.bool, device=device)

    def order(self, epoch: int) -> IntArray:
        """Shuffle the sentences anew in every epoch."""
        seed = seed_of(self.settings.seed, ORDER, epoch)
        return np.random.default_rng(seed).permutation(self.n_sentences)

    def choose(self, block: int) -> Choose:
        """Choose targets: words of the vocabulary with a context, frequent ones less often."""
        random = np.random.default_rng(seed_of(self.settings.seed, TARGETS, block))

        def is_target(rows: IntArray, n_others: IntArray) -> npt.NDArray[np.bool_]:
            kept: npt.NDArray[np.bool_] = random.random(len(rows)) < self._keep[rows]
            return kept & (rows >= 0) & ((n_others > 0) | (self.view == "all"))

        return is_target

    def absorb(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Take a step for every batch of sentences, in the order of the text."""
        if number % self._n_blocks == 0:
            self.figures.zero_()
        if len(vectors) == 0:
            return
        negatives = self._draw_negatives(number, len(vectors))
        words = torch.cat([block.rows[:, None], negatives], dim=1)
        firsts = np.arange(0, len(block.n_found), self.settings.batch_sentences)
        n_targets = np.add.reduceat(block.n_found, firsts)
        steps, rate = n_targets[n_targets > 0].tolist(), self.settings.learning_rate
        self.is_learnt[block.rows] = True
        self.figures[0] += len(vectors)
        self.figures[1] += self.table.take_steps(vectors, words, steps, rate)

    def state(self) -> dict[str, Tensor]:
        """Give the table with its moments."""
        steps = torch.tensor(self.table.n_steps)
        return {
            "table": self.table.rows,
            "steps": steps,
            "figures": self.figures,
            "is_learnt": self.is_learnt,
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put a table with its moments back."""
        self.table = WordTable(state["table"].to(self.device), int(state["steps"]))
        self.figures = state["figures"].to(self.device)
        # A state that was kept by an earlier version does not say it.
        self.is_learnt = state.get("is_learnt", ~self.is_learnt).to(self.device)

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Give the vectors of the words."""
        return self.table.vectors.contiguous()

    def _draw_negatives(self, block: int, n_targets: int) -> Int[Tensor, "targets negatives"]:
        """Draw words with a probability that grows with the square root of their count."""
        seed = seed_of(self.settings.seed, NEGATIVES, block)
        generator = torch.Generator(self.device).manual_seed(seed)
        size = (n_targets, self.settings.n_negatives)
        draws = torch.rand(size, generator=generator, dtype=torch.float64, device=self.device)
        places = torch.searchsorted(self._cumulated, draws * self._cumulated[-1], right=True)
        return places.clamp_(max=len(self._cumulated) - 1)


class PoolingLearner:
    """Averages, over a word's occurrences, the mean of its subwords (Bommasani et al., 2020)."""

    view: View = "word"
    n_epochs = 1
    block_sentences = BLOCK_SENTENCES

    def __init__(self, corpus: WordCorpus, n_dims: int, device: torch.device) -> None:
        self.n_sentences, self.device = len(corpus), device
        self._counts = torch.from_numpy(corpus.counts).to(device)
        # A frequent word occurs so often that its sum would outgrow single precision.
        self.total = torch.zeros(len(corpus.words), n_dims, dtype=torch.float64, device=device)

    def order(self, epoch: int) -> IntArray:
        """Leave the sentences in their order."""
        return np.arange(self.n_sentences)

    def choose(self, block: int) -> Choose:
        """Choose all words of the vocabulary."""
        return lambda rows, n_others: rows >= 0

    def absorb(self, number: int, block: OccurrenceBlock, vectors: Tensor) -> None:
        """Add the occurrences up."""
        self.total.index_add_(0, block.rows, vectors.double())

    def state(self) -> dict[str, Tensor]:
        """Give the sums."""
        return {"total": self.total}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put the sums back."""
        self.total = state["total"].to(self.device)

    def vectors(self) -> Float[Tensor, "words hidden"]:
        """Give the means."""
        return (self.total / self._counts[:, None]).float()


def keep_probabilities(counts: IntArray, subsample: float) -> FloatArray:
    """Give the probability min(1, √(t/f) + t/f) by which a word of frequency f is a target.

    >>> keep_probabilities(np.array([96, 4]), subsample=0.01).round(4).tolist()
    [0.1125, 0.75]
    """
    frequencies = counts / counts.sum()
    ratios = subsample / frequencies
    kept: FloatArray = np.minimum(1, np.sqrt(ratios) + ratios)
    return kept


SETTINGS, STATE, DRAFT = "settings.json", "state.safetensors", "state.draft"
OURS = re.compile(
    rf"({SENTENCES}|{PIECES})\.(ids|offsets)\.npy|\.calque-\w+\.partial"
    rf"|{re.escape(CONTENTS)}|{re.escape(SETTINGS)}|{re.escape(STATE)}|{re.escape(DRAFT)}"
)
ANEW = "or remove this folder to begin anew"
# A state of 200,000 words of 768 dimensions takes 1.8 GB.
SECONDS_BETWEEN = 300.0


class ExtractionFolder:
    """`FILE.partial/`: the corpus in numbers, and now and then what was learnt so far.

    It goes when the work is done, or has hardly begun.
    """

    def __init__(
        self,
        target: Path,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
        seconds_between: float = SECONDS_BETWEEN,
    ) -> None:
        self.path, self.settings = working_folder(target), dict(settings)
        self.seconds_between, self._saved_at = seconds_between, time.monotonic()
        self.is_resumed = self._claim(resume)

    def __enter__(self) -> ExtractionFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        is_begun = self.is_resumed or (self.path / STATE).exists()
        is_halted = (self.path / CONTENTS).exists() and not isinstance(error, InputError)
        if error is None or not (is_begun or is_halted):
            # Without its contents the rest is of no use, should this be killed.
            (self.path / CONTENTS).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)

    def save_if_due(self, state: Callable[[], Mapping[str, Tensor]], n_blocks: int) -> None:
        """Keep what was learnt from so many blocks, unless that was done a short time ago."""
        if time.monotonic() - self._saved_at < self.seconds_between:
            return
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state().items()}
        try:
            save_file(tensors, self.path / DRAFT, metadata={"blocks": str(n_blocks)})
            with open(self.path / DRAFT, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(self.path / DRAFT, self.path / STATE)
        except (OSError, SafetensorError) as error:
            fix = "make room, then go on with --resume"
            raise InputError(first_line(error), file=self.path / STATE, fix=fix) from error
        self._saved_at = time.monotonic()

    def read_state(self) -> tuple[dict[str, Tensor], int] | None:
        """Read what was learnt, and from how many blocks, if that was kept."""
        path = self.path / STATE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors, int(file.metadata()["blocks"])
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            problem = f"damaged: {first_line(error)}"
            raise InputError(problem, file=path, fix="remove its folder to begin anew") from error

    def _claim(self, resume: bool) -> bool:
        """Take the folder: new, or with the work of an earlier run."""
        found = self._read_settings()
        if found is not None:
            if not resume:
                problem = "an unfinished run is here"
                raise InputError(problem, file=self.path, fix=f"go on with --resume, {ANEW}")
            self._compare(found)
            return True
        try:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise InputError(problem, file=self.path, fix="write elsewhere") from error
        with write_atomically(self.path / SETTINGS) as stream:
            json.dump(self.settings, stream)
        return False

    def _read_settings(self) -> dict[str, Any] | None:
        """Read the settings of a run that can be gone on with; refuse what is not ours."""
        if not self.path.exists():
            return None
        if not (self.path.is_dir() and all(map(OURS.fullmatch, os.listdir(self.path)))):
            problem = "something else is where unfinished work would be kept"
            raise InputError(problem, file=self.path, fix="move it, or write elsewhere")
        if not (self.path / CONTENTS).exists():
            return None
        try:
            found: dict[str, Any] = json.loads((self.path / SETTINGS).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found

    def _compare(self, found: Mapping[str, Any]) -> None:
        for name in {**found, **self.settings}:
            before, now = found.get(name), self.settings.get(name)
            if before != now:
                problem = f"this run began with {name} {before}, not {now}"
                fix = f"give the same input and options, {ANEW}"
                raise InputError(problem, file=self.path, fix=fix)


Method: TypeAlias = X2StaticSettings | PoolingSettings
Advance: TypeAlias = Callable[[int], None]
# Opens what shows how far a phase is: its name, and how many sentences it has if that is known.
ShowPhase: TypeAlias = Callable[[str, int | None], AbstractContextManager[Advance]]
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Subwords a sentence, its marks included, unless the model reads fewer: as in the release.
MAX_LENGTH = 200


@dataclass(frozen=True, slots=True)
class ExtractJob:
    """What is learnt from which text; without a layer, the middle one."""

    reader: CorpusReader
    method: Method = field(default_factory=X2StaticSettings)
    limits: VocabularyLimits = field(default_factory=VocabularyLimits)
    layer: int | None = None
    max_length: int = MAX_LENGTH

    def layer_of(self, encoder: Encoder) -> int:
        """Give the layer asked for, or the middle one."""
        middle = round(encoder.n_layers / 2)
        return encoder.check_layer(middle if self.layer is None else self.layer)

    def room_of(self, encoder: Encoder) -> int:
        """Count the subwords of the text that fit between the marks."""
        n_marks = sum(mark is not None for mark in boundary_ids(encoder.tokenizer))
        room = min(self.max_length, encoder.max_tokens) - n_marks
        if room < 1:
            problem = f"max_length={self.max_length} leaves no room for text"
            raise InputError(problem, fix=f"choose more than {n_marks}")
        return room

    def describe(self, encoder: Encoder, paths: Sequence[str]) -> dict[str, Any]:
        """List all that the vectors depend on, for a run that goes on with another's work."""
        reader, method = asdict(self.reader), type(self.method).__name__.removesuffix("Settings")
        sizes = [os.path.getsize(path) if os.path.isfile(path) else None for path in paths]
        return {
            "input": [shown(path) for path in paths],
            "bytes": sizes,
            "model": str(encoder.folder),
            **reader.pop("filter"),
            **reader,
            "method": method.lower(),
            **asdict(self.method),
            **asdict(self.limits),
            "layer": self.layer_of(encoder),
            "max_length": self.max_length,
        }


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """What was read and learnt: `loss` is the mean of the last epoch over its `n_targets`.

    `n_unlearnt` words were never a target: their vectors are as they were drawn.
    """

    corpus: CorpusReport
    n_bad: int
    n_empty: int
    n_cut: int
    n_lost_words: int
    n_words: int
    n_running_words: int
    layer: int
    is_resumed: bool
    n_spaced: int
    n_targets: int = 0
    n_unlearnt: int = 0
    loss: float | None = None


def extract_vectors(
    encoder: Encoder,
    paths: Sequence[str],
    output: Path,
    job: ExtractJob,
    *,
    binary: bool = False,
    resume: bool = False,
    skip_bad: Path | None = None,
    show_phase: ShowPhase = lambda name, total: nullcontext(lambda n_done: None),
    seconds_between: float = SECONDS_BETWEEN,
) -> ExtractReport:
    """Learn the vectors of a text's words and write them, the most frequent first.

    Until they are written, the work lies in `OUTPUT.partial`, and can be gone on with.
    """
    check_output(output, paths)
    layer, room = job.layer_of(encoder), job.room_of(encoder)
    settings = job.describe(encoder, paths)
    with ExtractionFolder(
        output, settings, resume=resume, seconds_between=seconds_between
    ) as folder:
        corpus = WordCorpus.open(folder.path)
        if corpus is None:
            with show_phase("reading", None) as advance:
                corpus = _read_corpus(encoder, paths, job, room, folder.path, skip_bad, advance)
        learner = make_learner(corpus, encoder, job.method)
        with show_phase("extracting", learner.n_epochs * len(corpus)) as advance:
            learn(encoder, corpus, learner, layer, folder=folder, on_sentences=advance)
        check_learnt(learner)
        matrix = learner.vectors().cpu().numpy()
        vectors = WordVectors(corpus.words, matrix, corpus.counts)
        n_spaced = write_vectors(vectors, output, binary=binary)
    return _report(corpus, learner, layer, folder.is_resumed, n_spaced)


def make_learner(corpus: WordCorpus, encoder: Encoder, method: Method) -> Learner:
    """Prepare to learn the words of a corpus."""
    device, n_dims = device_of(encoder), encoder.hidden_size
    if isinstance(method, PoolingSettings):
        return PoolingLearner(corpus, n_dims, device)
    return X2StaticLearner(corpus, n_dims, method, device)


def learn(
    encoder: Encoder,
    corpus: WordCorpus,
    learner: Learner,
    layer: int,
    *,
    folder: ExtractionFolder | None = None,
    on_sentences: Advance = lambda n_done: None,
) -> None:
    """Go through a corpus block by block; the encoder runs no further than the layer."""
    size = learner.block_sentences
    n_blocks = -(-len(corpus) // size)
    order = lru_cache(maxsize=1)(learner.order)
    start = 0
    if folder is not None and (kept := folder.read_state()) is not None:
        learner.restore(kept[0])
        start = kept[1]
        on_sentences(start // n_blocks * len(corpus) + start % n_blocks * size)

    def plan(number: int) -> tuple[int, OccurrenceBlock]:
        index = order(number // n_blocks)[number % n_blocks * size :][:size]
        found = find_occurrences(corpus, index, learner.choose(number))
        return number, plan_block(encoder, corpus, found, learner.view)

    for number, planned in _run_ahead(plan, range(start, learner.n_epochs * n_blocks)):
        block = planned.to(device_of(encoder))
        learner.absorb(number, block, embed_occurrences(encoder, block, layer, learner.view))
        if folder is not None:
            folder.save_if_due(learner.state, number + 1)
        on_sentences(len(block.n_found))


def check_learnt(learner: Learner) -> None:
    """Refuse vectors that are all as they were drawn."""
    if isinstance(learner, X2StaticLearner) and not learner.is_learnt.any():
        raise InputError(
            "no word was ever learnt: each is alone in its sentences, or was left out by chance",
            fix="give more text, raise --subsample, or take --method pooling",
        )


def check_output(path: Path, paths: Sequence[str]) -> None:
    """Refuse an output that cannot be written, before the work begins."""
    if str(path) == "-":
        raise InputError("vectors go to a file", fix="name it with -o")
    check_target(path, paths)


def _read_corpus(
    encoder: Encoder,
    paths: Sequence[str],
    job: ExtractJob,
    room: int,
    folder: Path,
    skip_bad: Path | None,
    advance: Advance,
) -> WordCorpus:
    report = CorpusReport()
    with ExitStack() as stack:
        skipped = SkippedLines(
            None if skip_bad is None else stack.enter_context(write_atomically(skip_bad))
        )

        def choose(path: PathLike) -> SkipBad | None:
            if skip_bad is None:
                return None
            return skipped if len(paths) == 1 else skipped.of(path)

        sentences = job.reader.read(paths, report, choose)
        return number_corpus(
            encoder.tokenizer,
            _tell(sentences, advance),
            folder,
            room=room,
            limits=job.limits,
            figures=lambda: {**report.to_dict(), "n_bad": skipped.n_lines},
        )


def _report(
    corpus: WordCorpus, learner: Learner, layer: int, is_resumed: bool, n_spaced: int
) -> ExtractReport:
    figures = dict(corpus.figures)
    n_bad = figures.pop("n_bad")
    n_targets, n_unlearnt, loss = 0, 0, None
    if isinstance(learner, X2StaticLearner):
        n_targets, total = int(learner.figures[0]), float(learner.figures[1])
        n_unlearnt, loss = int((~learner.is_learnt).sum()), total / max(1, n_targets)
    return ExtractReport(
        corpus=CorpusReport(**figures),
        n_bad=n_bad,
        n_empty=corpus.cut.n_empty,
        n_cut=corpus.cut.n_sentences,
        n_lost_words=corpus.cut.n_words,
        n_words=len(corpus.words),
        n_running_words=int(corpus.counts.sum()),
        layer=layer,
        is_resumed=is_resumed,
        n_spaced=n_spaced,
        n_targets=n_targets,
        n_unlearnt=n_unlearnt,
        loss=loss,
    )


def _run_ahead(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """Work on one item in another thread while the result before it is used."""
    with ThreadPoolExecutor(1) as pool:
        pending: Future[ResultT] | None = None
        for item in items:
            coming = pool.submit(work, item)
            if pending is not None:
                yield pending.result()
            pending = coming
        if pending is not None:
            yield pending.result()


def _tell(sentences: Iterable[ItemT], advance: Advance) -> Iterator[ItemT]:
    for sentence in sentences:
        yield sentence
        advance(1)
