"""Losses on linked words and their batches against loops."""

from __future__ import annotations

import copy
import math
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from calque.objectives.linked_words import (
    MIN_CAPACITY,
    LinkedBatch,
    LinkedPairs,
    LinkedWords,
    LinkedWordsSettings,
    WordPairBatch,
    WordPairCollator,
    compare_words,
    linked_words_accuracy,
    linked_words_loss,
)
from calque.objectives.masked_lm import NO_LABEL
from calque.objectives.self_labels import LEFT, NEITHER, RIGHT
from calque.tokens.layout import pack_separately
from calque.tokens.ragged import BatchShape, Ragged, add_special_tokens, hash_sequences, pack
from calque.tokens.tokenizer import SpecialTokens

if TYPE_CHECKING:
    from torch import Tensor

    from calque.models.encoder import Encoder

Pair = tuple[list[list[int]], list[list[int]], list[tuple[int, int, int]]]
# Words as lists of subwords, and links with weights of 255. The second pair has none, the third
# a word without subwords (which is linked), the fourth one word a side.
PAIRS: list[Pair] = [
    (
        [[10, 11], [12], [13]],
        [[20], [21, 22, 23], [24], [25]],
        [(0, 1, 255), (1, 0, 128), (1, 2, 64)],
    ),
    ([[14]], [[26], [27]], []),
    ([[15], [], [16, 17]], [[28], [29, 30]], [(1, 0, 255), (2, 1, 255), (0, 0, 51)]),
    ([[18]], [[31, 32]], [(0, 0, 255)]),
]


def arrays_of(pairs: list[Pair]) -> tuple[Ragged, ...]:
    """The arrays of a linked corpus."""
    sides = [Ragged.of([list(chain(*pair[side])) for pair in pairs]) for side in (0, 1)]
    words = [Ragged.of([[len(word) for word in pair[side]] for pair in pairs]) for side in (0, 1)]
    links = [[i << 20 | j << 8 | level for i, j, level in pair[2]] for pair in pairs]
    return (*sides, *words, Ragged.of(links))


def shape_for(pairs: list[Pair], row: int = 32, n_rows: int = 3) -> BatchShape:
    return BatchShape(n_rows * row, row, len(pairs) + 2, n_rows * row)


def make_objective(**changes: Any) -> LinkedWords:
    return LinkedWords(LinkedWordsSettings(**changes))


def collate(
    encoder: Encoder,
    shape: BatchShape | None,
    seed: int = 0,
    pairs: list[Pair] = PAIRS,
    **changes: Any,
) -> LinkedBatch:
    special_tokens = SpecialTokens.of(encoder.tokenizer)
    build = make_objective(**changes).build_collator(special_tokens, shape)
    batch = build(arrays_of(pairs), torch.Generator().manual_seed(seed))
    assert isinstance(batch, LinkedBatch)
    return batch


def loop_loss(words: list[tuple[Tensor, Tensor]], pairs: list[Pair], temperature: float) -> float:
    """The loss pair by pair and word by word; words without subwords have no vector."""
    losses: list[list[float]] = [[], []]
    for (src, tgt), (src_words, tgt_words, links) in zip(words, pairs, strict=True):
        rows = [i for i, word in enumerate(src_words) if word]
        columns = [j for j, word in enumerate(tgt_words) if word]
        similarity = F.cosine_similarity(src[:, None], tgt[None], dim=-1) / temperature
        weights = torch.zeros(len(rows), len(columns))
        for i, j, level in links:
            if i in rows and j in columns:
                weights[rows.index(i), columns.index(j)] = level / 255
        for side, (sim, w) in enumerate([(similarity, weights), (similarity.T, weights.T)]):
            for asked, given_ in zip(sim, w, strict=True):
                if given_.sum() > 0:
                    log_p = asked.log_softmax(0)
                    losses[side].append(float(-(given_ * log_p).sum() / given_.sum()))
    return sum(sum(side) / len(side) for side in losses) / 2


def find_words(
    linked: LinkedPairs, states: Tensor, pairs: list[Pair]
) -> list[tuple[Tensor, Tensor]]:
    """Mean states of the words of every pair, found by their ids before masking: all differ."""
    place = {int(token): k for k, token in enumerate(linked.pairs.ids.tolist())}
    return [
        tuple(  # type: ignore[misc]
            torch.stack([states[[place[t] for t in word]].mean(0) for word in side if word])
            for side in pair[:2]
        )
        for pair in pairs
    ]


def test_a_loss_by_hand() -> None:
    """Two words on each side, and one that is in no cell."""
    similarity = torch.tensor([[[1.0, 0.0, 9.0], [0.0, 2.0, 9.0], [9.0, 9.0, 9.0]]])
    weights = torch.tensor([[[1.0, 0.5, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    cells = torch.zeros(1, 3, 3, dtype=torch.bool)
    cells[:, :2, :2] = True
    total = math.log(math.e + 1)
    row = total - 2 / 3 * 1  # the only linked row: 2/3 of its links on 1, 1/3 on 0
    columns = (total - 1 + math.log(1 + math.e**2)) / 2  # linked with 1 against 0, 0 against 2
    loss = linked_words_loss(similarity, weights, cells)
    assert loss.item() == pytest.approx((row + columns) / 2)
    # Row 0 finds 1, as does column 0; column 1 finds row 1, which it is not linked with.
    assert linked_words_accuracy(similarity, weights, cells).item() == pytest.approx(2 / 3)


def test_without_links_the_loss_is_zero_and_not_nan() -> None:
    similarity = torch.randn(2, 3, 3, requires_grad=True)
    for cells in (torch.ones(2, 3, 3, dtype=torch.bool), torch.zeros(2, 3, 3, dtype=torch.bool)):
        loss = linked_words_loss(similarity, torch.zeros(2, 3, 3), cells)
        (gradient,) = torch.autograd.grad(loss, similarity)
        assert loss.item() == 0
        assert (gradient == 0).all()
        assert linked_words_accuracy(similarity, torch.zeros(2, 3, 3), cells).item() == 0


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_gradients_are_correct(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    cells = torch.rand(2, 4, 4, generator=generator) < 0.7
    weights = torch.rand(2, 4, 4, generator=generator, dtype=torch.float64)
    weights = weights * cells * (torch.rand(2, 4, 4, generator=generator) < 0.5)
    assert torch.autograd.gradcheck(
        lambda given_: linked_words_loss(given_, weights, cells), similarity.requires_grad_()
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_one_link_per_word_is_cross_entropy(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    similarity = torch.randn(1, 5, 5, generator=generator)
    partner = torch.randperm(5, generator=generator)
    weights = F.one_hot(partner, 5)[None].float()
    loss = linked_words_loss(similarity, weights, torch.ones(1, 5, 5, dtype=torch.bool))
    rows = F.cross_entropy(similarity[0], partner)
    columns = F.cross_entropy(similarity[0].T, partner.argsort())
    torch.testing.assert_close(loss, (rows + columns) / 2)
    scaled = linked_words_loss(similarity, 0.3 * weights, torch.ones(1, 5, 5, dtype=torch.bool))
    torch.testing.assert_close(scaled, loss)


def test_words_are_compared_by_the_means_of_their_subwords() -> None:
    states = torch.randn(1, 4, 8)
    found = compare_words(states, torch.tensor([[0, 0, 2, 3]]))
    mean = states[0, :2].mean(0)
    expected = F.cosine_similarity(mean, states[0, 2], dim=0)
    torch.testing.assert_close(found[0, :2, 2], expected.expand(2))


@pytest.mark.parametrize("with_rows", [False, True])
def test_words_and_links_of_batches(tiny_encoder: Encoder, with_rows: bool) -> None:
    special_tokens = SpecialTokens.of(tiny_encoder.tokenizer)
    batch = collate(tiny_encoder, shape_for(PAIRS) if with_rows else None, probability=0.01)
    assert batch.separate is not None
    for linked in (batch.joint, batch.separate):
        ids, sides = linked.pairs.ids.tolist(), linked.sides.tolist()
        place = {token: k for k, token in enumerate(ids)}
        for pair in PAIRS:
            for side, words in zip((LEFT, RIGHT), pair[:2], strict=True):
                for word in filter(None, words):
                    assert [sides[place[t]] for t in word] == [side] + [NEITHER] * (len(word) - 1)
                    assert {int(linked.words[place[t]]) for t in word} == {place[word[0]]}
        own = [
            k
            for k, token in enumerate(ids)
            if token in (special_tokens.cls_id, special_tokens.sep_id, special_tokens.pad_id)
        ]
        assert linked.words[own].tolist() == own
        # All real tokens are there once.
        real = [token for pair in PAIRS for word in pair[0] + pair[1] for token in word]
        assert sorted(token for token in ids if token >= 10) == sorted(real)
    if with_rows:
        assert len(batch.joint.cells) == len(batch.separate.cells) == shape_for(PAIRS).tokens


@pytest.mark.parametrize("with_rows", [False, True])
def test_separate_sentences_are_independent_sequences(
    tiny_encoder: Encoder, with_rows: bool
) -> None:
    """Each is encoded as if it were alone, without influence of the other sentence."""
    from calque.tokens.ragged import add_special_tokens, pack

    special_tokens = SpecialTokens.of(tiny_encoder.tokenizer)
    batch = collate(tiny_encoder, shape_for(PAIRS) if with_rows else None)
    assert batch.separate is not None
    with torch.no_grad():
        (states,) = tiny_encoder(batch.separate.tokens, [3])
        place = {t: k for k, t in enumerate(batch.separate.tokens.ids.tolist())}
        for pair in PAIRS:
            for side in pair[:2]:
                tokens = [t for word in side for t in word]
                alone = pack(
                    add_special_tokens(
                        Ragged.of([tokens]), special_tokens.cls_id, special_tokens.sep_id
                    ),
                    pad_id=special_tokens.pad_id,
                )
                (expected,) = tiny_encoder(alone, [3])
                torch.testing.assert_close(
                    states[[place[t] for t in tokens]], expected[1:-1], atol=1e-5, rtol=1e-4
                )


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_losses_equal_a_loop_over_pairs(tiny_encoder: Encoder, with_rows: bool, seed: int) -> None:
    objective = make_objective(layer=2, temperature=0.2)
    batch = collate(tiny_encoder, shape_for(PAIRS) if with_rows else None, seed)
    assert batch.separate is not None
    with torch.no_grad():
        terms = objective(tiny_encoder, batch)
        for name, linked in (("joint", batch.joint), ("separate", batch.separate)):
            (states,) = tiny_encoder(linked.tokens, [2])
            words = find_words(linked, states, PAIRS)
            assert terms.metrics[name].item() == pytest.approx(
                loop_loss(words, PAIRS, 0.2), rel=1e-4
            )
    total = sum(terms.metrics[name] for name in ("tlm", "joint", "separate"))
    torch.testing.assert_close(terms.loss, total)


def test_rows_and_single_pairs_give_the_same_loss(tiny_encoder: Encoder) -> None:
    losses = []
    for shape in (None, shape_for(PAIRS), shape_for(PAIRS, row=16, n_rows=5)):
        batch = collate(tiny_encoder, shape, probability=0.01)
        with torch.no_grad():
            metrics = make_objective(layer=0)(tiny_encoder, batch).metrics
        losses.append([metrics["separate"].item(), metrics["accuracy"].item()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)


def test_positions_and_special_tokens(tiny_encoder: Encoder) -> None:
    special_tokens = SpecialTokens.of(tiny_encoder.tokenizer)
    batch = collate(tiny_encoder, None, positions="continue")
    first = int(batch.joint.tokens.offsets[1])
    assert batch.joint.tokens.positions[:first].tolist() == list(range(first))
    assert batch.separate is not None
    offsets = batch.separate.tokens.offsets.tolist()
    assert len(offsets) == 2 * len(PAIRS) + 1
    for start, stop in pairwise(offsets):
        assert batch.separate.tokens.positions[start:stop].tolist() == list(range(stop - start))
        assert batch.separate.tokens.ids[[start, stop - 1]].tolist() == [
            special_tokens.cls_id,
            special_tokens.sep_id,
        ]
    assert make_objective().count_special_tokens(special_tokens) == 4
    one_mark = SpecialTokens(0, 2, 1, 1, 3, (0, 1, 2, 3), 50)
    assert make_objective().count_special_tokens(one_mark) == 4
    assert make_objective(separate=0.0).count_special_tokens(one_mark) == 3


def test_pairs_come_in_either_order(tiny_encoder: Encoder) -> None:
    batch = collate(tiny_encoder, None, pairs=PAIRS[:1] * 40)
    firsts = batch.joint.pairs.ids[batch.joint.pairs.offsets[:-1].long() + 1].tolist()
    assert set(firsts) == {10, 20}
    assert 8 < firsts.count(10) < 32


def test_more_links_than_the_capacity_raise_it(tiny_encoder: Encoder) -> None:
    dense: Pair = (
        [[10 + k] for k in range(12)],
        [[30 + k] for k in range(12)],
        [(i, j, 255) for i in range(12) for j in range(12)],
    )
    shape = shape_for([dense], row=32, n_rows=1)
    batch = collate(tiny_encoder, shape, pairs=[dense])
    assert len(batch.joint.cells) == 256  # 144 links in 32 tokens: doubled three times
    assert int((batch.joint.weights > 0).sum()) == 144


def test_a_batch_without_links_trains_on_tlm_alone(tiny_encoder: Encoder) -> None:
    batch = collate(tiny_encoder, None, pairs=[PAIRS[1]])
    with torch.no_grad():
        terms = make_objective()(tiny_encoder, batch)
    assert terms.metrics["joint"].item() == terms.metrics["separate"].item() == 0
    torch.testing.assert_close(terms.loss, terms.metrics["tlm"])


def test_the_default_layer_is_seven_eighths_of_the_depth(tiny_encoder: Encoder) -> None:
    batch = collate(tiny_encoder, None)
    with torch.no_grad():
        default, named, other = (
            make_objective(layer=layer)(tiny_encoder, batch).metrics["joint"].item()
            for layer in (None, 4, 1)
        )
    assert default == named != other  # round(7/8 · 4) = 4
    assert collate(tiny_encoder, None, separate=0.0).separate is None


def test_batches_of_a_shape_have_one_shape(tiny_encoder: Encoder) -> None:
    def sizes(batch: LinkedBatch) -> list[int]:
        arrays = [batch.masked, batch.labels]
        for linked in (batch.joint, batch.separate):
            assert linked is not None
            arrays += [linked.tokens.ids, linked.tokens.offsets, linked.pairs.offsets]
            arrays += [linked.sides, linked.words, linked.cells, linked.weights]
        return [len(array) for array in arrays]

    shape = shape_for(PAIRS)
    full, less = (collate(tiny_encoder, shape, pairs=pairs) for pairs in (PAIRS, PAIRS[:2]))
    assert sizes(full) == sizes(less)
    assert (less.labels == NO_LABEL).any()
    moved = full.to("cpu")
    assert moved.tokens.ids.equal(full.tokens.ids)
    assert moved.joint.pairs.offsets.equal(full.joint.pairs.offsets)


@pytest.mark.slow
def test_one_graph_serves_all_batches(tiny_encoder: Encoder, compilable_encoder: Encoder) -> None:
    torch._dynamo.reset()
    encoder, shape = compilable_encoder, shape_for(PAIRS)
    objective = make_objective()
    objective.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pairs in (PAIRS, PAIRS[:2], PAIRS[2:]):
            batch = collate(tiny_encoder, shape, pairs=pairs)
            compiled = objective(encoder, batch).loss
            torch.testing.assert_close(compiled, objective.forward(encoder, batch).loss)
            compiled.backward()


def test_training_links_words(tiny_encoder: Encoder) -> None:
    encoder = copy.deepcopy(tiny_encoder)
    objective, batch = make_objective(), collate(tiny_encoder, None)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    history = []
    for _ in range(25):
        terms = objective(encoder, batch)
        history.append({name: value.item() for name, value in terms.metrics.items()})
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
    for name in ("tlm", "joint", "separate"):
        assert history[-1][name] < history[0][name] - 0.2, name
    assert history[-1]["accuracy"] > history[0]["accuracy"] or history[-1]["accuracy"] == 1


def test_invalid_settings_are_errors() -> None:
    for wrong in ({"temperature": 0.0}, {"joint": -1.0}, {"positions": "none"}, {"layers": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LinkedWordsSettings.model_validate(wrong)


WordPair = tuple[list[list[int]], list[list[int]], list[tuple[int, int, int]]]
MARKS = SpecialTokens(0, 2, 2, 1, 3, (0, 1, 2, 3), 100)
# Words as lists of subwords, and links with weights of 255. The last pair has a word without
# subwords, and a link to it.
WORD_PAIRS: list[WordPair] = [
    ([[10, 11], [12]], [[20], [21, 22]], [(0, 1, 255), (1, 0, 51)]),
    ([[13], [], [14]], [[23]], [(1, 0, 255), (2, 0, 255)]),
]
# 0 10 11 12 2 | 0 13 14 2 | 0 20 21 22 2 | 0 23 2
IDS = [0, 10, 11, 12, 2, 0, 13, 14, 2, 0, 20, 21, 22, 2, 0, 23, 2]
ROOMY = BatchShape(tokens=48, row=16, sequences=6, budget=48)


def word_pair_arrays(
    pairs: list[WordPair], languages: list[int] | None = None
) -> tuple[Ragged, ...]:
    """The arrays of a linked corpus, and the numbers of the languages of the pairs."""
    sides = [Ragged.of([list(chain(*pair[side])) for pair in pairs]) for side in (0, 1)]
    words = [Ragged.of([[len(word) for word in pair[side]] for pair in pairs]) for side in (0, 1)]
    links = [[i << 20 | j << 8 | level for i, j, level in pair[2]] for pair in pairs]
    numbers = () if languages is None else (Ragged.of([[number] for number in languages]),)
    return (*sides, *words, Ragged.of(links), *numbers)


def collate_words(
    pairs: list[WordPair] = WORD_PAIRS,
    shape: BatchShape | None = None,
    languages: list[int] | None = None,
    **changes: Any,
) -> WordPairBatch:
    build = WordPairCollator(MARKS, shape, **changes)
    return build(word_pair_arrays(pairs, languages), torch.Generator())


def test_positions_by_hand() -> None:
    batch = collate_words(languages=[5, 3])
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
    assert collate_words().languages.tolist() == [0, 0, 0]


@pytest.mark.parametrize("pairs", [WORD_PAIRS, WORD_PAIRS[:1], WORD_PAIRS[1:]])
def test_a_shape_only_changes_positions(pairs: list[WordPair]) -> None:
    plain, batch = collate_words(pairs), collate_words(pairs, ROOMY)
    assert batch.tokens.row == 16
    n_links = len(plain.src)
    for place, expected in ((batch.src, plain.src), (batch.tgt, plain.tgt)):
        assert len(place) == MIN_CAPACITY
        assert batch.tokens.ids[place[:n_links]].equal(plain.tokens.ids[expected])
    assert batch.weights[:n_links].equal(plain.weights)
    assert (batch.weights[n_links:] == 0).all()
    is_padding = batch.tokens.ids == MARKS.pad_id
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

    batches = [
        collate_words(pairs, ROOMY, [1] * len(pairs))
        for pairs in (WORD_PAIRS, WORD_PAIRS[:1], WORD_PAIRS[1:])
    ]
    assert sizes(batches[0]) == sizes(batches[1]) == sizes(batches[2])
    # More links than there is room for double the room, as often as need be.
    dense: WordPair = (
        [[10 + k] for k in range(25)],
        [[40 + k] for k in range(25)],
        [(i, j, 255) for i in range(25) for j in range(25)],
    )
    many = collate_words([dense], BatchShape(64, 32, 4, 64))
    assert len(many.src) == len(many.src_keys) == 4 * MIN_CAPACITY
    assert int((many.weights > 0).sum()) == 625


@pytest.mark.parametrize("shape", [None, ROOMY])
def test_words_are_first_subwords_or_means(shape: BatchShape | None) -> None:
    batch = collate_words(shape=shape)
    states = torch.randn(len(batch.tokens.ids), 8, generator=torch.Generator().manual_seed(0))
    place = {token: k for k, token in enumerate(batch.tokens.ids.tolist())}
    firsts, means = [], []
    for src_words, tgt_words, links in WORD_PAIRS:
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
def test_each_sentence_is_encoded_independently(
    tiny_encoder: Encoder, shape: BatchShape | None
) -> None:
    batch = collate_words(shape=shape)
    place = {token: k for k, token in enumerate(batch.tokens.ids.tolist())}
    with torch.no_grad():
        (states,) = tiny_encoder(batch.tokens, [3])
        for pair in WORD_PAIRS:
            for side in pair[:2]:
                tokens = list(chain(*side))
                alone = pack(add_special_tokens(Ragged.of([tokens]), 0, 2), pad_id=1)
                (expected,) = tiny_encoder(alone, [3])
                found = states[[place[t] for t in tokens]]
                torch.testing.assert_close(found, expected[1:-1], atol=1e-5, rtol=1e-4)


def test_sentences_own_their_tokens() -> None:
    tokens, owners = pack_separately(word_pair_arrays(WORD_PAIRS)[:2], MARKS, None)  # type: ignore[arg-type]
    assert tokens.ids.tolist() == IDS
    assert owners.tolist() == [0] * 5 + [1] * 4 + [2] * 5 + [3] * 3
    tokens, owners = pack_separately(word_pair_arrays(WORD_PAIRS)[:2], MARKS, ROOMY)  # type: ignore[arg-type]
    assert ((owners == 4) == (tokens.ids.numpy() == MARKS.pad_id)).all()


REPEATED: list[WordPair] = [
    ([[10, 11], [10], [11]], [[20], [20, 20], [20]], [(0, 0, 255), (1, 1, 255), (2, 2, 255)]),
    ([[10, 11], [11, 10]], [[20]], [(0, 0, 255), (1, 0, 255)]),
]


def test_equal_words_have_equal_keys() -> None:
    def groups(keys: torch.Tensor) -> list[int]:
        return [keys.tolist().index(key) for key in keys.tolist()]

    for shape in (None, ROOMY):
        by_text = collate_words(REPEATED, shape, equal="text")
        assert groups(by_text.src_keys[:5]) == [0, 1, 2, 0, 4]
        assert groups(by_text.tgt_keys[:5]) == [0, 1, 0, 0, 0]
        by_place = collate_words(REPEATED, shape, equal="place")
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


def test_all_tensors_of_a_batch_are_moved() -> None:
    moved = collate_words(shape=ROOMY).to("meta")
    arrays = (moved.tokens.ids, moved.tokens.offsets, moved.src, moved.weights, moved.sides)
    assert {array.device.type for array in arrays} == {"meta"}
    assert moved.tokens.row == 16
    assert moved.tokens.n_real == len(IDS)


def test_a_batch_without_links_is_valid() -> None:
    unlinked: WordPair = ([[10]], [[20]], [])
    assert collate_words([unlinked]).src.shape == (0,)
    filled = collate_words([unlinked], ROOMY, equal="text")
    assert filled.weights.sum() == 0
    assert filled.linked_states(torch.randn(48, 4), "mean")[0].shape == (MIN_CAPACITY, 4)
