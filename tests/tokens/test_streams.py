"""Streams: limits, epochs, shares, sharding and resuming, all exact."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.tokens import streams
from calque.tokens.ragged import Ragged
from calque.tokens.sampling import derive_seed
from calque.tokens.store import TokenStore, write_store
from calque.tokens.streams import BatchLimits, BatchStream, Corpus, StreamPosition, load_batches

SIZES = (90, 25)
LIMITS = BatchLimits(max_tokens=60, max_sequences=5, n_special=2)
Sentences = tuple[tuple[int, ...], ...]


class Batch(NamedTuple):
    """The sentences of a batch by side, and numbers drawn with its generator."""

    sides: tuple[Sentences, ...]
    drawn: tuple[int, ...]


def collate(sides: tuple[Ragged, ...], generator: torch.Generator) -> Batch:
    drawn = torch.randint(1 << 40, (3,), generator=generator)
    return Batch(tuple(map(split, sides)), tuple(drawn.tolist()))


def split(side: Ragged) -> Sentences:
    parts = np.split(side.ids, np.cumsum(side.lengths)[:-1])
    return tuple(tuple(part.tolist()) for part in parts)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[TokenStore, ...]]:
    """Two corpora of pairs; every token encodes its corpus, example and side."""
    folder = tmp_path_factory.mktemp("stores")
    result = []
    for corpus, size in enumerate(SIZES):
        for side in (0, 1):
            with write_store(folder / f"{corpus}.{side}", 60_000) as append:
                for k in range(size):
                    length = 1 + (7 * k + 3 * side) % 11
                    append(Ragged.of([[corpus * 20_000 + k * 2 + side] * length]))
        result.append(tuple(TokenStore.open(Path(folder / f"{corpus}.{s}")) for s in (0, 1)))
    return result


@pytest.fixture(scope="module")
def stream(stores: list[tuple[TokenStore, ...]]) -> Iterator[BatchStream[Batch]]:
    """A stream with small blocks, so that tests cover several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "BLOCK_SIZE", 50)
        yield make_stream(stores)


def make_stream(stores: list[tuple[TokenStore, ...]], seed: int = 11) -> BatchStream[Batch]:
    corpora = [
        Corpus(name, sides, np.arange(len(sides[0])), share)
        for name, sides, share in zip(("en-de", "en-sw"), stores, (0.6, 0.4), strict=True)
    ]
    return BatchStream(corpora, LIMITS, collate, seed)


def examples_of(batch: Batch) -> list[tuple[int, int]]:
    """List (corpus, example) of the sentences."""
    return [(token // 20_000, token % 20_000 // 2) for token, *_ in batch.sides[0]]


def take(stream: BatchStream[Batch], n: int, position: StreamPosition | None = None) -> list[Any]:
    return list(islice(load_batches(stream, position=position), n))


def test_batches_keep_within_their_limits(stream: BatchStream[Batch]) -> None:
    batches = [batch for _, batch in take(stream, 120)]
    for batch in batches:
        n_sequences = len(batch.sides[0])
        n_tokens = sum(len(sentence) for side in batch.sides for sentence in side)
        n_tokens += LIMITS.n_special * n_sequences
        assert 0 < n_tokens <= LIMITS.max_tokens
        assert n_sequences <= LIMITS.max_sequences
    assert max(len(batch.sides[0]) for batch in batches) == LIMITS.max_sequences


def test_sides_stay_together(stream: BatchStream[Batch]) -> None:
    for _, batch in take(stream, 60):
        left, right = ([set(sentence) for sentence in side] for side in batch.sides)
        assert right == [{token + 1 for token in sentence} for sentence in left]


def test_every_example_comes_once_per_epoch_in_the_given_shares(stream: BatchStream[Batch]) -> None:
    seen: list[tuple[int, int]] = []
    for position, batch in load_batches(stream):
        if position.block == 15:
            break
        seen += examples_of(batch)
    assert len(seen) == 15 * 50
    for corpus, (size, share) in enumerate(zip(SIZES, (0.6, 0.4), strict=True)):
        counts = Counter(example for number, example in seen if number == corpus)
        assert counts.total() == round(share * 750)
        epochs = counts.total() / size
        assert {counts[k] for k in range(size)} <= {int(epochs), int(epochs) + 1}


def test_batches_follow_the_sampler(stream: BatchStream[Batch]) -> None:
    blocks = [stream.sampler.block(number) for number in range(3)]
    expected = [
        pair for block in blocks for pair in zip(*map(np.ndarray.tolist, block), strict=True)
    ]
    found = [example for _, batch in take(stream, 60) for example in examples_of(batch)]
    assert found[: len(expected)] == expected


def test_only_examples_of_the_index_are_drawn(stores: list[tuple[TokenStore, ...]]) -> None:
    some = np.array([3, 8, 20])
    corpora = [Corpus("en-de", stores[0], some, 1.0)]
    batches = take(BatchStream(corpora, LIMITS, collate, 0), 10)
    seen = {example for _, batch in batches for example in examples_of(batch)}
    assert seen == {(0, 3), (0, 8), (0, 20)}


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
def test_shards_partition_the_stream(
    stream: BatchStream[Batch], n_ranks: int, n_workers: int, start: int
) -> None:
    """With any number of processes and workers, the batches in turn are those of one process."""
    position = take(stream, start)[-1][0] if start else None
    expected = take(stream, 24, position)
    with pytest.MonkeyPatch.context() as patch:
        shards = []
        for rank in range(n_ranks):
            workers = []
            for worker in range(n_workers):
                info = SimpleNamespace(num_workers=n_workers, id=worker)
                patch.setattr(streams, "get_worker_info", lambda info=info: info)
                shard = streams._Shard(stream, position or StreamPosition(), rank, n_ranks)
                workers.append(list(islice(shard, 24 // n_workers + 1)))
            # A DataLoader takes from its workers in turn.
            shards.append([workers[k % n_workers][k // n_workers] for k in range(24)])
    found = [shards[k % n_ranks][k // n_ranks] for k in range(24)]
    assert found == expected


def test_resuming_from_any_position_is_exact(stream: BatchStream[Batch]) -> None:
    whole = take(stream, 60)
    assert {position.block for position, _ in whole} >= {0, 1, 2, 3}
    for k, (position, _) in enumerate(whole[:45]):
        saved = StreamPosition(**position.to_dict())
        assert saved.count == k + 1
        assert take(stream, 12, saved) == whole[k + 1 : k + 13]


def test_resuming_with_another_number_of_processes(stream: BatchStream[Batch]) -> None:
    whole = take(stream, 20)
    position = whole[6][0]  # 7 batches taken: no multiple of 2
    halves = [
        list(islice(load_batches(stream, position=position, rank=rank, n_ranks=2), 6))
        for rank in (0, 1)
    ]
    assert [item for pair in zip(*halves, strict=True) for item in pair] == whole[7:19]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_real_workers_give_the_same_batches(stream: BatchStream[Batch]) -> None:
    position = take(stream, 3)[-1][0]
    alone = list(islice(load_batches(stream, position=position, rank=1, n_ranks=2), 15))
    assert list(
        islice(load_batches(stream, position=position, rank=1, n_ranks=2, n_workers=2), 15)
    ) == (alone)


def test_a_position_beyond_its_block_continues_in_the_next(stream: BatchStream[Batch]) -> None:
    """Such a position occurs when a run resumes with larger batches."""
    calls = []

    class Watched:
        def block(self, number: int) -> Any:
            calls.append(number)
            assert len(calls) < 5, "the stream does not advance"
            return stream.sampler.block(number)

    watched = pickle.loads(pickle.dumps(stream))
    watched.sampler = Watched()
    position, _ = next(
        watched.iterate(StreamPosition(block=2, batch=1000, count=9), lambda count: True)
    )
    assert position == StreamPosition(block=3, batch=1, count=10)
    assert calls == [2, 3]


def test_batches_depend_only_on_the_seed(stores: list[tuple[TokenStore, ...]]) -> None:
    first, again, other = (take(make_stream(stores, seed), 5) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    draws = [batch.drawn for _, batch in first]
    assert len(set(draws)) == len(draws)  # every batch has a generator of its own
    assert derive_seed(1, 2) != derive_seed(2, 1) and 0 <= derive_seed(1, 2) < 2**63


def test_names_add_the_index_of_the_corpus(
    stores: list[tuple[TokenStore, ...]],
) -> None:
    plain = make_stream(stores)
    names = ["de-en", "en-sw", "xx", "en-de"]  # two corpora may have one name; some have none
    corpora = [*plain.corpora, replace(plain.corpora[0], share=0.2)]
    stream = BatchStream(corpora, LIMITS, collate, 11, names=names)
    for _, batch in take(stream, 30):
        *sides, numbers = batch.sides
        assert len(sides) == 2
        expected = [({0: 3, 1: 1}[corpus],) for corpus, _ in examples_of(batch)]
        assert list(numbers) == expected
    assert len(take(plain, 1)[0][1].sides) == 2


def test_names_change_nothing_else(stores: list[tuple[TokenStore, ...]]) -> None:
    plain = make_stream(stores)
    named = BatchStream(plain.corpora, LIMITS, collate, 11, names=["en-de", "en-sw"])
    for (position, batch), (other, more) in zip(take(plain, 20), take(named, 20), strict=True):
        assert (position, batch.sides, batch.drawn) == (other, more.sides[:2], more.drawn)


def test_the_global_generator_is_not_used(stream: BatchStream[Batch]) -> None:
    state = torch.get_rng_state()
    take(stream, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stream_can_be_pickled(stream: BatchStream[Batch]) -> None:
    assert take(pickle.loads(pickle.dumps(stream)), 5) == take(stream, 5)
