"""Which language, and which of its examples, comes next: reproducible and resumable.

The endless stream of examples is cut into blocks. Block b is a pure function of (seed, b): no
state has to be saved to go on from it, and every process computes the same one.

Endless, reproducible streams of batches out of tokenised corpora.

Every batch is the same whatever the number of processes: from a place on, process r of n builds
batches r, r + n, r + 2n, … The place is three integers, so a run goes on at the exact batch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from calque.tokens.ragged import Ragged, fill_batches, reorder

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.tokens.store import PreviousSentences, TokenStore, VectorStore


def language_probabilities(sizes: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Rebalance languages: p_i ∝ N_i^α (Conneau and Lample, 2019).

    α = 1 keeps the data's own shares, α = 0 makes all languages equal.

    >>> language_probabilities({"en": 900, "sw": 100}, alpha=0.5)
    {'en': 0.75, 'sw': 0.25}
    """
    weights = {language: float(size) ** alpha for language, size in sizes.items() if size > 0}
    total = sum(weights.values())
    return {language: weight / total for language, weight in weights.items()}


def number_examples(n_examples: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Count 0, 1, 2, … in the smallest type that holds them: corpora have many millions."""
    return np.arange(n_examples, dtype=np.min_scalar_type(n_examples))


class BlockSampler:
    """Draws examples from several corpora in fixed shares, each corpus epoch by epoch.

    A corpus is gone through in a fresh random order every epoch, so none of its examples
    comes a second time before all have come once.
    """

    def __init__(
        self, sizes: Sequence[int], shares: Sequence[float], block_size: int, seed: int
    ) -> None:
        self.sizes, self.block_size, self.seed = list(sizes), block_size, seed
        self.shares = np.asarray(shares, dtype=np.float64) / np.sum(shares)
        self._orders: dict[tuple[int, int], npt.NDArray[np.unsignedinteger[Any]]] = {}

    def block(self, number: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (corpus, example) indices of a block, shuffled."""
        parts = [self._take(corpus, number) for corpus in range(len(self.sizes))]
        corpora = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        order = self._generator(0, number).permutation(len(corpora))
        return corpora[order], np.concatenate(parts)[order]

    def _take(self, corpus: int, number: int) -> npt.NDArray[np.int64]:
        """Examples of one corpus in a block: a stretch of its endless, reshuffled stream."""
        share, size = self.shares[corpus] * self.block_size, self.sizes[corpus]
        place, stop = int(share * number), int(share * (number + 1))
        pieces: list[npt.NDArray[Any]] = [np.zeros(0, dtype=np.int64)]
        while place < stop:
            epoch, offset = divmod(place, size)
            n_taken = min(stop - place, size - offset)
            pieces.append(self._order(corpus, epoch)[offset : offset + n_taken])
            place += n_taken
        return np.concatenate(pieces)

    def _order(self, corpus: int, epoch: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """Give the order of a corpus in an epoch; only the latest is kept: streams go forward."""
        if (corpus, epoch) not in self._orders:
            others = {key: order for key, order in self._orders.items() if key[0] != corpus}
            everything = number_examples(self.sizes[corpus])
            drawn = self._generator(1, corpus, epoch).permutation(everything)
            self._orders = others | {(corpus, epoch): drawn}
        return self._orders[corpus, epoch]

    def _generator(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self.seed, *key))))


BatchT = TypeVar("BatchT")
BLOCK_SIZE = 1 << 16


@dataclass(frozen=True, slots=True)
class Corpus:
    """One language's sentences (one store) or one language pair's bitext (two stores).

    `index` lists the examples in use; the others are too long or kept for validation. What
    `extras` store comes along after the sides, and counts for no length.
    """

    name: str
    sides: tuple[TokenStore | PreviousSentences, ...]
    index: npt.NDArray[np.integer[Any]]
    share: float
    extras: tuple[TokenStore | VectorStore, ...] = ()

    @property
    def stores(self) -> tuple[TokenStore | PreviousSentences | VectorStore, ...]:
        """Give all that a collator receives of an example."""
        return self.sides + self.extras

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True, slots=True)
class Place:
    """How far a stream has come: a block, a batch inside it, and all batches before."""

    block: int = 0
    batch: int = 0
    count: int = 0

    def to_dict(self) -> dict[str, int]:
        """Give the three integers a checkpoint keeps."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """When a batch is full, in tokens (`n_marks` special ones an example) and in sequences."""

    max_tokens: int
    max_sequences: int
    n_marks: int


class BatchStream(Generic[BatchT]):
    """Draws examples by language, packs them within a budget and collates them."""

    def __init__(
        self,
        corpora: Sequence[Corpus],
        plan: BatchPlan,
        collate: Callable[[tuple[Ragged, ...], torch.Generator], BatchT],
        seed: int,
        block_size: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """With `names`, examples also come with the number of their corpus's name among these."""
        self.corpora, self.plan, self.collate, self.seed = list(corpora), plan, collate, seed
        self.numbers = None
        if names is not None:
            self.numbers = np.array([names.index(corpus.name) for corpus in corpora])
        sizes, shares = [len(corpus) for corpus in corpora], [corpus.share for corpus in corpora]
        self.sampler = BlockSampler(sizes, shares, block_size or BLOCK_SIZE, seed)

    def walk(
        self, place: Place, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[Place, BatchT | None]]:
        """Go through all batches from a place on; build those whose number is wanted."""
        while True:
            corpora, examples = self.sampler.block(place.block)
            lengths = self._lengths(corpora, examples) + self.plan.n_marks
            cuts = list(fill_batches(lengths, self.plan.max_tokens, self.plan.max_sequences))
            for number in range(place.batch, len(cuts)):
                chosen = cuts[number]
                batch = None
                if wanted(place.count):
                    batch = self._build(corpora[chosen], examples[chosen], place.count)
                place = Place(place.block, number + 1, place.count + 1)
                yield place, batch
            place = Place(place.block + 1, 0, place.count)

    def _build(
        self, corpora: npt.NDArray[np.int64], examples: npt.NDArray[np.int64], number: int
    ) -> BatchT:
        generator = torch.Generator().manual_seed(seed_of(self.seed, number))
        n_stores = len(self.corpora[0].stores)
        arrays = tuple(self._gather(corpora, examples, store) for store in range(n_stores))
        if self.numbers is not None:
            arrays += (Ragged(self.numbers[corpora], np.ones_like(corpora)),)
        return self.collate(arrays, generator)

    def _lengths(
        self, corpora: npt.NDArray[np.int64], examples: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        lengths = np.zeros(len(corpora), dtype=np.int64)
        for number in np.unique(corpora):
            here = np.flatnonzero(corpora == number)
            chosen = self.corpora[number].index[examples[here]]
            for store in self.corpora[number].sides:
                lengths[here] += store.lengths(chosen)
        return lengths

    def _gather(
        self, corpora: npt.NDArray[np.int64], examples: npt.NDArray[np.int64], store: int
    ) -> Ragged:
        """Read one store's part of the examples, corpus by corpus, back in batch order."""
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


def seed_of(*key: int) -> int:
    """Mix integers into one 63-bit seed, the same on every machine."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


class _Shard(IterableDataset[tuple[Place, Any]]):
    """The batches of one process, shared out among its loading workers."""

    def __init__(self, stream: BatchStream[Any], place: Place, rank: int, n_ranks: int) -> None:
        self.stream, self.place, self.rank, self.n_ranks = stream, place, rank, n_ranks

    def __iter__(self) -> Iterator[tuple[Place, Any]]:
        worker = get_worker_info()
        n_workers, me = (worker.num_workers, worker.id) if worker else (1, 0)
        start, stride = self.place.count, self.n_ranks * n_workers
        mine = (start + self.rank + me * self.n_ranks) % stride

        def is_mine(count: int) -> bool:
            return count % stride == mine

        for place, batch in self.stream.walk(self.place, is_mine):
            if batch is not None:
                yield place, batch


def _outlast_signals(worker: int) -> None:
    """Ignore what asks the main process to stop: it may need another batch before it does."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_IGN)


def _as_is(item: BatchT) -> BatchT:
    return item


def load_batches(
    stream: BatchStream[BatchT],
    *,
    place: Place | None = None,
    rank: int = 0,
    n_ranks: int = 1,
    n_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[tuple[Place, BatchT]]:
    """Iterate over this process's batches from a place on, built ahead by worker processes.

    Each comes with the place just after it in the whole stream.
    """
    shard = _Shard(stream, place or Place(), rank, n_ranks)
    loader = DataLoader(
        shard,
        batch_size=None,
        num_workers=n_workers,
        pin_memory=pin_memory,
        prefetch_factor=4 if n_workers else None,
        collate_fn=_as_is,
        worker_init_fn=_outlast_signals,
        generator=torch.Generator(),  # the loader draws a seed: not from the global generator
    )
    return iter(loader)
