"""Endless, reproducible streams of batches from tokenized corpora.

The batches do not depend on the number of processes: from a position on, process r of n builds
batches r, r + n, r + 2n, … A position is three integers, so that a run resumes at the exact batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from calque.io.processes import block_stop_signals, start_worker
from calque.tokens.ragged import Ragged, batch_in_order, reorder
from calque.tokens.sampling import BlockSampler, derive_seed

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.tokens.store import JoinedSentences, PreviousSentences, TokenStore, VectorStore

    IntArray = npt.NDArray[np.int64]

BatchT = TypeVar("BatchT")
BLOCK_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text of one language (one side) or the bitext of one language pair (two sides).

    `index` lists the examples in use; the others are too long or reserved for validation.
    `extras` are stores that a batch also receives, but that do not count toward its length.
    """

    name: str
    sides: tuple[TokenStore | PreviousSentences | JoinedSentences, ...]
    index: npt.NDArray[np.integer[Any]]
    share: float
    extras: tuple[TokenStore | VectorStore, ...] = ()

    @property
    def stores(self) -> tuple[TokenStore | PreviousSentences | JoinedSentences | VectorStore, ...]:
        """Return all stores that a batch reads, sides first."""
        return self.sides + self.extras

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in a stream: a block, a batch inside it, and the number of all batches before."""

    block: int = 0
    batch: int = 0
    count: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the three integers that a checkpoint stores."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The size of a batch in tokens (with `n_special` special tokens per example) and examples."""

    max_tokens: int
    max_sequences: int
    n_special: int


class BatchStream(Generic[BatchT]):
    """Draws examples of several corpora and builds batches of limited size with `collate`.

    With `names`, examples also come with the index of their corpus's name among these.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        limits: BatchLimits,
        collate: Callable[[tuple[Ragged, ...], torch.Generator], BatchT],
        seed: int,
        block_size: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.corpora, self.limits, self.collate, self.seed = list(corpora), limits, collate, seed
        self.numbers = None
        if names is not None:
            self.numbers = np.array([names.index(corpus.name) for corpus in corpora])
        sizes, shares = [len(corpus) for corpus in corpora], [corpus.share for corpus in corpora]
        self.sampler = BlockSampler(sizes, shares, block_size or BLOCK_SIZE, seed)

    def iterate(
        self, position: StreamPosition, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[StreamPosition, BatchT | None]]:
        """Iterate over all batches from a position on, building only those that are wanted.

        Yields the position after each batch, and the batch or None. `wanted` receives the number
        of the batch in the whole stream.
        """
        while True:
            corpora, examples = self.sampler.block(position.block)
            lengths = self._lengths(corpora, examples) + self.limits.n_special
            batches = list(
                batch_in_order(lengths, self.limits.max_tokens, self.limits.max_sequences)
            )
            for number in range(position.batch, len(batches)):
                chosen = batches[number]
                batch = None
                if wanted(position.count):
                    batch = self._build(corpora[chosen], examples[chosen], position.count)
                position = StreamPosition(position.block, number + 1, position.count + 1)
                yield position, batch
            position = StreamPosition(position.block + 1, 0, position.count)

    def _build(self, corpora: IntArray, examples: IntArray, number: int) -> BatchT:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, number))
        n_stores = len(self.corpora[0].stores)
        arrays = tuple(self._gather(corpora, examples, store) for store in range(n_stores))
        if self.numbers is not None:
            arrays += (Ragged(self.numbers[corpora], np.ones_like(corpora)),)
        return self.collate(arrays, generator)

    def _lengths(self, corpora: IntArray, examples: IntArray) -> IntArray:
        lengths = np.zeros(len(corpora), dtype=np.int64)
        for number in np.unique(corpora):
            here = np.flatnonzero(corpora == number)
            chosen = self.corpora[number].index[examples[here]]
            for store in self.corpora[number].sides:
                lengths[here] += store.lengths(chosen)
        return lengths

    def _gather(self, corpora: IntArray, examples: IntArray, store: int) -> Ragged:
        """Read one store's part of the examples corpus by corpus and return it in batch order."""
        order = np.argsort(corpora, kind="stable")
        parts = []
        for number in np.unique(corpora):
            corpus = self.corpora[number]
            chosen = corpus.index[examples[corpora == number]]
            parts.append(corpus.stores[store].gather(chosen))
        joined = Ragged(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )
        return reorder(joined, np.argsort(order, kind="stable"))


def load_batches(
    stream: BatchStream[BatchT],
    *,
    position: StreamPosition | None = None,
    rank: int = 0,
    n_ranks: int = 1,
    n_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[tuple[StreamPosition, BatchT]]:
    """Iterate over the batches of one process from a position on, built ahead by worker processes.

    Each batch comes with the position after it in the whole stream.
    """
    shard = _Shard(stream, position or StreamPosition(), rank, n_ranks)
    loader = DataLoader(
        shard,
        batch_size=None,
        num_workers=n_workers,
        pin_memory=pin_memory,
        prefetch_factor=4 if n_workers else None,
        collate_fn=_identity,
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # the loader draws a seed: not from the global generator
    )
    with block_stop_signals() if n_workers else nullcontext():
        return iter(loader)


class _Shard(IterableDataset[tuple[StreamPosition, Any]]):
    """The batches of one process, divided among its loading workers."""

    def __init__(
        self, stream: BatchStream[Any], position: StreamPosition, rank: int, n_ranks: int
    ) -> None:
        self.stream, self.position, self.rank, self.n_ranks = stream, position, rank, n_ranks

    def __iter__(self) -> Iterator[tuple[StreamPosition, Any]]:
        worker = get_worker_info()
        n_workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        start, stride = self.position.count, self.n_ranks * n_workers
        remainder = (start + self.rank + worker_id * self.n_ranks) % stride
        for position, batch in self.stream.iterate(
            self.position, lambda k: k % stride == remainder
        ):
            if batch is not None:
                yield position, batch


def _start_worker(worker: int) -> None:
    start_worker()


def _identity(item: BatchT) -> BatchT:
    return item
