"""Linked words of sentences read apart: places by hand, pooling by a loop, keys of equal words."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.objectives.base import Marks, hash_sequences, lay_apart
from calque.objectives.linked_words import LEAST_ROOM, WordPairBatch, WordPairCollator
from calque.objectives.self_labels import LEFT, NEITHER, RIGHT
from calque.tokens.ragged import BatchShape, Ragged, add_marks, pack

if TYPE_CHECKING:
    from calque.models.encoder import Encoder

Pair = tuple[list[list[int]], list[list[int]], list[tuple[int, int, int]]]
MARKS = Marks(first=0, last=2, between=2, pad=1, mask=3, special=(0, 1, 2, 3), vocab_size=100)
# Words as lists of subwords, and links with weights of 255. The last pair has a word without
# subwords, and a link to it.
PAIRS: list[Pair] = [
    ([[10, 11], [12]], [[20], [21, 22]], [(0, 1, 255), (1, 0, 51)]),
    ([[13], [], [14]], [[23]], [(1, 0, 255), (2, 0, 255)]),
]
# 0 10 11 12 2 | 0 13 14 2 | 0 20 21 22 2 | 0 23 2
IDS = [0, 10, 11, 12, 2, 0, 13, 14, 2, 0, 20, 21, 22, 2, 0, 23, 2]
ROOMY = BatchShape(tokens=48, row=16, sequences=6, budget=48)


def arrays_of(pairs: list[Pair], languages: list[int] | None = None) -> tuple[Ragged, ...]:
    """What the stores of a linked corpus hold, and the numbers of the pairs' languages."""
    sides = [Ragged.of([list(chain(*pair[side])) for pair in pairs]) for side in (0, 1)]
    words = [Ragged.of([[len(word) for word in pair[side]] for pair in pairs]) for side in (0, 1)]
    links = [[i << 20 | j << 8 | level for i, j, level in pair[2]] for pair in pairs]
    numbers = () if languages is None else (Ragged.of([[number] for number in languages]),)
    return (*sides, *words, Ragged.of(links), *numbers)


def collate(
    pairs: list[Pair] = PAIRS,
    shape: BatchShape | None = None,
    languages: list[int] | None = None,
    **changes: Any,
) -> WordPairBatch:
    build = WordPairCollator(MARKS, shape, **changes)
    return build(arrays_of(pairs, languages), torch.Generator())


def test_places_by_hand() -> None:
    batch = collate(languages=[5, 3])
    assert batch.tokens.ids.tolist() == IDS
    assert batch.tokens.offsets.tolist() == [0, 5, 9, 14, 17]
    assert batch.tokens.positions.tolist() == [*range(5), *range(4), *range(5), *range(3)]
    # The link to the word without subwords is not there: it has no state.
    assert batch.src.tolist() == [1, 3, 7]
    assert batch.tgt.tolist() == [11, 10, 15]
    assert batch.weights.tolist() == pytest.approx([1, 0.2, 1])
    assert batch.words.tolist() == [0, 1, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11, 13, 14, 15, 16]
    assert batch.sides.tolist() == [LEFT] * 9 + [RIGHT] * 8
    assert batch.languages.tolist() == [5, 5, 3]
    assert collate().languages.tolist() == [0, 0, 0]


@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[:1], PAIRS[1:]])
def test_a_shape_moves_places_and_nothing_else(pairs: list[Pair]) -> None:
    plain, batch = collate(pairs), collate(pairs, ROOMY)
    assert batch.tokens.row == 16
    n_links = len(plain.src)
    for place, expected in ((batch.src, plain.src), (batch.tgt, plain.tgt)):
        assert len(place) == LEAST_ROOM
        assert batch.tokens.ids[place[:n_links]].equal(plain.tokens.ids[expected])
    assert batch.weights[:n_links].equal(plain.weights)
    assert (batch.weights[n_links:] == 0).all()
    is_padding = batch.tokens.ids == MARKS.pad
    assert ((batch.sides == NEITHER) == is_padding).all()
    assert batch.sides.bincount()[[LEFT, RIGHT]].equal(plain.sides.bincount()[[LEFT, RIGHT]])
    # Words of several subwords stay together, all others are of their own.
    apart = batch.words != torch.arange(48)
    assert batch.tokens.ids[apart].tolist() == [
        t for t in plain.tokens.ids.tolist() if t in (11, 22)
    ]
    assert (batch.tokens.ids[batch.words[apart]] == batch.tokens.ids[apart] - 1).all()


def test_all_batches_of_a_shape_have_one_shape() -> None:
    def sizes(batch: WordPairBatch) -> list[int]:
        tokens = (batch.tokens.ids, batch.tokens.offsets, batch.tokens.positions)
        links = (batch.src, batch.tgt, batch.weights, batch.languages)
        own = (batch.words, batch.sides, batch.src_keys, batch.tgt_keys)
        return [len(array) for array in (*tokens, *links, *own)]

    batches = [collate(pairs, ROOMY, [1] * len(pairs)) for pairs in (PAIRS, PAIRS[:1], PAIRS[1:])]
    assert sizes(batches[0]) == sizes(batches[1]) == sizes(batches[2])
    # More links than there is room for double the room, as often as need be.
    dense: Pair = (
        [[10 + k] for k in range(25)],
        [[40 + k] for k in range(25)],
        [(i, j, 255) for i in range(25) for j in range(25)],
    )
    many = collate([dense], BatchShape(64, 32, 4, 64))
    assert len(many.src) == len(many.src_keys) == 4 * LEAST_ROOM
    assert int((many.weights > 0).sum()) == 625


@pytest.mark.parametrize("shape", [None, ROOMY])
def test_words_are_first_subwords_or_means(shape: BatchShape | None) -> None:
    batch = collate(shape=shape)
    states = torch.randn(len(batch.tokens.ids), 8, generator=torch.Generator().manual_seed(0))
    place = {token: k for k, token in enumerate(batch.tokens.ids.tolist())}
    firsts, means = [], []
    for src_words, tgt_words, links in PAIRS:
        for i, j, _ in links:
            if src_words[i] and tgt_words[j]:
                words = [[states[place[t]] for t in word] for word in (src_words[i], tgt_words[j])]
                firsts.append(torch.stack([word[0] for word in words]))
                means.append(torch.stack([torch.stack(word).mean(dim=0) for word in words]))
    for how, expected in (("first", firsts), ("mean", means)):
        found = torch.stack(batch.linked_states(states, how), dim=1)  # type: ignore[arg-type]
        torch.testing.assert_close(found[:3], torch.stack(expected))
    half = batch.linked_states(states.bfloat16(), "mean")
    assert half[0].dtype == torch.float32


@pytest.mark.parametrize("shape", [None, ROOMY])
def test_each_sentence_is_as_the_encoder_alone_reads_it(
    tiny_encoder: Encoder, shape: BatchShape | None
) -> None:
    batch = collate(shape=shape)
    place = {token: k for k, token in enumerate(batch.tokens.ids.tolist())}
    with torch.no_grad():
        (states,) = tiny_encoder(batch.tokens, [3])
        for pair in PAIRS:
            for side in pair[:2]:
                tokens = list(chain(*side))
                alone = pack(add_marks(Ragged.of([tokens]), 0, 2), pad_id=1)
                (expected,) = tiny_encoder(alone, [3])
                found = states[[place[t] for t in tokens]]
                torch.testing.assert_close(found, expected[1:-1], atol=1e-5, rtol=1e-4)


def test_sentences_own_their_tokens() -> None:
    tokens, owners = lay_apart(arrays_of(PAIRS)[:2], MARKS, None)  # type: ignore[arg-type]
    assert tokens.ids.tolist() == IDS
    assert owners.tolist() == [0] * 5 + [1] * 4 + [2] * 5 + [3] * 3
    tokens, owners = lay_apart(arrays_of(PAIRS)[:2], MARKS, ROOMY)  # type: ignore[arg-type]
    assert ((owners == 4) == (tokens.ids.numpy() == MARKS.pad)).all()


REPEATED: list[Pair] = [
    ([[10, 11], [10], [11]], [[20], [20, 20], [20]], [(0, 0, 255), (1, 1, 255), (2, 2, 255)]),
    ([[10, 11], [11, 10]], [[20]], [(0, 0, 255), (1, 0, 255)]),
]


def test_keys_are_equal_where_words_are() -> None:
    def groups(keys: torch.Tensor) -> list[int]:
        return [keys.tolist().index(key) for key in keys.tolist()]

    for shape in (None, ROOMY):
        by_text = collate(REPEATED, shape, equal="text")
        assert groups(by_text.src_keys[:5]) == [0, 1, 2, 0, 4]
        assert groups(by_text.tgt_keys[:5]) == [0, 1, 0, 0, 0]
        by_place = collate(REPEATED, shape, equal="place")
        assert groups(by_place.src_keys[:5]) == [0, 1, 2, 3, 4]
        assert groups(by_place.tgt_keys[:5]) == [0, 1, 2, 3, 3]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=40))
def test_hashes_are_equal_iff_sequences_are(sequences: list[list[int]]) -> None:
    ragged = Ragged.of(sequences)
    hashes = hash_sequences(ragged.ids, ragged.lengths).tolist()
    numbers: dict[tuple[int, ...], int] = {}
    for sequence, found in zip(sequences, hashes, strict=True):
        assert numbers.setdefault(tuple(sequence), found) == found
    assert len(set(numbers.values())) == len(numbers)


def test_hashes_of_many_words_differ() -> None:
    pairs = np.stack(np.meshgrid(np.arange(300), np.arange(300)), axis=-1).reshape(-1)
    hashes = hash_sequences(pairs, np.full(90_000, 2))
    assert len(np.unique(hashes)) == 90_000
    # Tables that keep few bits of a hash shall see them differ too.
    assert np.bincount(hashes & 1023, minlength=1024).max() < 300


def test_a_batch_travels_as_one() -> None:
    moved = collate(shape=ROOMY).to("meta")
    arrays = (moved.tokens.ids, moved.tokens.offsets, moved.src, moved.weights, moved.sides)
    assert {array.device.type for array in arrays} == {"meta"}
    assert moved.tokens.row == 16
    assert moved.tokens.n_real == len(IDS)


def test_a_batch_without_links_is_one_still() -> None:
    unlinked: Pair = ([[10]], [[20]], [])
    assert collate([unlinked]).src.shape == (0,)
    filled = collate([unlinked], ROOMY, equal="text")
    assert filled.weights.sum() == 0
    assert filled.linked_states(torch.randn(48, 4), "mean")[0].shape == (LEAST_ROOM, 4)
