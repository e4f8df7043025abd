"""Streams: budgets, epochs, shares, sharding and resuming, to the last bit."""

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
from calque.tokens.store import TokenStore, write_store
from calque.tokens.streams import BatchPlan, BatchStream, Corpus, Place, load_batches, seed_of

SIZES = (90, 25)
PLAN = BatchPlan(max_tokens=60, max_sequences=5, n_marks=2)
Sentences = tuple[tuple[int, ...], ...]


class Batch(NamedTuple):
    """Everything a batch is made of: its sentences by side, and what its generator draws."""

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
    """Two corpora of pairs; a token names its corpus, its example and its side."""
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
    """A stream whose blocks are small, so that a test goes through many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "BLOCK_SIZE", 50)
        yield make_stream(stores)


def make_stream(stores: list[tuple[TokenStore, ...]], seed: int = 11) -> BatchStream[Batch]:
    corpora = [
        Corpus(name, sides, np.arange(len(sides[0])), share)
        for name, sides, share in zip(("en-de", "en-sw"), stores, (0.6, 0.4), strict=True)
    ]
    return BatchStream(corpora, PLAN, collate, seed)


def examples_of(batch: Batch) -> list[tuple[int, int]]:
    """List (corpus, example) of the sentences."""
    return [(token // 20_000, token % 20_000 // 2) for token, *_ in batch.sides[0]]


def take(stream: BatchStream[Batch], n: int, place: Place | None = None) -> list[Any]:
    return list(islice(load_batches(stream, place=place), n))


def test_every_batch_keeps_within_the_budget(stream: BatchStream[Batch]) -> None:
    batches = [batch for _, batch in take(stream, 120)]
    for batch in batches:
        n_sequences = len(batch.sides[0])
        n_tokens = sum(len(sentence) for side in batch.sides for sentence in side)
        n_tokens += PLAN.n_marks * n_sequences
        assert 0 < n_tokens <= PLAN.max_tokens
        assert n_sequences <= PLAN.max_sequences
    assert max(len(batch.sides[0]) for batch in batches) == PLAN.max_sequences


def test_sides_stay_together(stream: BatchStream[Batch]) -> None:
    for _, batch in take(stream, 60):
        left, right = ([set(sentence) for sentence in side] for side in batch.sides)
        assert right == [{token + 1 for token in sentence} for sentence in left]


def test_every_example_once_an_epoch_and_shares_as_asked(stream: BatchStream[Batch]) -> None:
    seen: list[tuple[int, int]] = []
    for place, batch in load_batches(stream):
        if place.block == 15:
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


def test_an_index_leaves_examples_out(stores: list[tuple[TokenStore, ...]]) -> None:
    some = np.array([3, 8, 20])
    corpora = [Corpus("en-de", stores[0], some, 1.0)]
    batches = take(BatchStream(corpora, PLAN, collate, 0), 10)
    seen = {example for _, batch in batches for example in examples_of(batch)}
    assert seen == {(0, 3), (0, 8), (0, 20)}


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 40))
def test_shards_neither_overlap_nor_lose_anything(
    stream: BatchStream[Batch], n_ranks: int, n_workers: int, start: int
) -> None:
    """Whatever the processes and their workers, the batches in turn are those of one process."""
    place = take(stream, start)[-1][0] if start else None
    expected = take(stream, 24, place)
    with pytest.MonkeyPatch.context() as patch:
        shards = []
        for rank in range(n_ranks):
            workers = []
            for worker in range(n_workers):
                info = SimpleNamespace(num_workers=n_workers, id=worker)
                patch.setattr(streams, "get_worker_info", lambda info=info: info)
                shard = streams._Shard(stream, place or Place(), rank, n_ranks)
                workers.append(list(islice(shard, 24 // n_workers + 1)))
            # A DataLoader takes from its workers in turn.
            shards.append([workers[k % n_workers][k // n_workers] for k in range(24)])
    found = [shards[k % n_ranks][k // n_ranks] for k in range(24)]
    assert found == expected


def test_resumes_from_any_place_bit_for_bit(stream: BatchStream[Batch]) -> None:
    whole = take(stream, 60)
    assert {place.block for place, _ in whole} >= {0, 1, 2, 3}
    for k, (place, _) in enumerate(whole[:45]):
        saved = Place(**place.to_dict())
        assert saved.count == k + 1
        assert take(stream, 12, saved) == whole[k + 1 : k + 13]


def test_another_number_of_processes_goes_on_where_one_stopped(stream: BatchStream[Batch]) -> None:
    whole = take(stream, 20)
    place = whole[6][0]  # 7 batches taken: no multiple of 2
    halves = [
        list(islice(load_batches(stream, place=place, rank=rank, n_ranks=2), 6)) for rank in (0, 1)
    ]
    assert [item for pair in zip(*halves, strict=True) for item in pair] == whole[7:19]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_real_workers_give_the_same_batches(stream: BatchStream[Batch]) -> None:
    place = take(stream, 3)[-1][0]
    alone = list(islice(load_batches(stream, place=place, rank=1, n_ranks=2), 15))
    assert list(islice(load_batches(stream, place=place, rank=1, n_ranks=2, n_workers=2), 15)) == (
        alone
    )


def test_a_place_beyond_its_block_goes_on_in_the_next(stream: BatchStream[Batch]) -> None:
    """Such a place is left behind when a run goes on with larger batches."""
    calls = []

    class Watched:
        def block(self, number: int) -> Any:
            calls.append(number)
            assert len(calls) < 5, "the stream does not advance"
            return stream.sampler.block(number)

    watched = pickle.loads(pickle.dumps(stream))
    watched.sampler = Watched()
    place, _ = next(watched.walk(Place(block=2, batch=1000, count=9), lambda count: True))
    assert place == Place(block=3, batch=1, count=10)
    assert calls == [2, 3]


def test_batches_depend_on_the_seed_alone(stores: list[tuple[TokenStore, ...]]) -> None:
    first, again, other = (take(make_stream(stores, seed), 5) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    draws = [batch.drawn for _, batch in first]
    assert len(set(draws)) == len(draws)  # every batch has a generator of its own
    assert seed_of(1, 2) != seed_of(2, 1) and 0 <= seed_of(1, 2) < 2**63


def test_examples_come_with_the_numbers_of_their_names(
    stores: list[tuple[TokenStore, ...]],
) -> None:
    plain = make_stream(stores)
    names = ["de-en", "en-sw", "xx", "en-de"]  # two corpora may have one name; some have none
    corpora = [*plain.corpora, replace(plain.corpora[0], share=0.2)]
    stream = BatchStream(corpora, PLAN, collate, 11, names=names)
    for _, batch in take(stream, 30):
        *sides, numbers = batch.sides
        assert len(sides) == 2
        expected = [({0: 3, 1: 1}[corpus],) for corpus, _ in examples_of(batch)]
        assert list(numbers) == expected
    assert len(take(plain, 1)[0][1].sides) == 2


def test_names_change_nothing_else(stores: list[tuple[TokenStore, ...]]) -> None:
    plain = make_stream(stores)
    named = BatchStream(plain.corpora, PLAN, collate, 11, names=["en-de", "en-sw"])
    for (place, batch), (other, more) in zip(take(plain, 20), take(named, 20), strict=True):
        assert (place, batch.sides, batch.drawn) == (other, more.sides[:2], more.drawn)


def test_the_global_generator_is_left_alone(stream: BatchStream[Batch]) -> None:
    state = torch.get_rng_state()
    take(stream, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stream_travels_to_another_process(stream: BatchStream[Batch]) -> None:
    assert take(pickle.loads(pickle.dumps(stream)), 5) == take(stream, 5)
