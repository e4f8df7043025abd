"""Linked words: the loss by hand and by a loop over pairs, and the layouts that feed it."""

from __future__ import annotations

import copy
import math
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from calque.objectives.base import Marks
from calque.objectives.linked_words import (
    LinkedBatch,
    LinkedPairs,
    LinkedWords,
    LinkedWordsSettings,
    compare_words,
    linked_words_accuracy,
    linked_words_loss,
)
from calque.objectives.masked_lm import IGNORED
from calque.objectives.self_labels import LEFT, NEITHER, RIGHT
from calque.tokens.ragged import BatchShape, Ragged

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
    """What the stores of a linked corpus hold."""
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
    marks = Marks.of(encoder.tokenizer)
    build = make_objective(**changes).make_collate(marks, shape)
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
    """Two words, two words, and one that is in no cell."""
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


def test_without_links_the_loss_is_nothing_and_never_nan() -> None:
    similarity = torch.randn(2, 3, 3, requires_grad=True)
    for cells in (torch.ones(2, 3, 3, dtype=torch.bool), torch.zeros(2, 3, 3, dtype=torch.bool)):
        loss = linked_words_loss(similarity, torch.zeros(2, 3, 3), cells)
        (gradient,) = torch.autograd.grad(loss, similarity)
        assert loss.item() == 0
        assert (gradient == 0).all()
        assert linked_words_accuracy(similarity, torch.zeros(2, 3, 3), cells).item() == 0


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_gradients_are_right(seed: int) -> None:
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
def test_one_link_a_word_is_cross_entropy(seed: int) -> None:
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
def test_batches_know_their_words(tiny_encoder: Encoder, with_rows: bool) -> None:
    marks = Marks.of(tiny_encoder.tokenizer)
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
        own = [k for k, token in enumerate(ids) if token in (marks.first, marks.last, marks.pad)]
        assert linked.words[own].tolist() == own
        # All real tokens are there once.
        real = [token for pair in PAIRS for word in pair[0] + pair[1] for token in word]
        assert sorted(token for token in ids if token >= 10) == sorted(real)
    if with_rows:
        assert len(batch.joint.cells) == len(batch.separate.cells) == shape_for(PAIRS).tokens


@pytest.mark.parametrize("with_rows", [False, True])
def test_sentences_apart_are_sequences_of_their_own(tiny_encoder: Encoder, with_rows: bool) -> None:
    """Each is as the encoder alone reads it: no word of the other sentence shines through."""
    from calque.tokens.ragged import add_marks, pack

    marks = Marks.of(tiny_encoder.tokenizer)
    batch = collate(tiny_encoder, shape_for(PAIRS) if with_rows else None)
    assert batch.separate is not None
    with torch.no_grad():
        (states,) = tiny_encoder(batch.separate.tokens, [3])
        place = {t: k for k, t in enumerate(batch.separate.tokens.ids.tolist())}
        for pair in PAIRS:
            for side in pair[:2]:
                tokens = [t for word in side for t in word]
                alone = pack(
                    add_marks(Ragged.of([tokens]), marks.first, marks.last), pad_id=marks.pad
                )
                (expected,) = tiny_encoder(alone, [3])
                torch.testing.assert_close(
                    states[[place[t] for t in tokens]], expected[1:-1], atol=1e-5, rtol=1e-4
                )


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_losses_are_those_of_a_loop_over_pairs(
    tiny_encoder: Encoder, with_rows: bool, seed: int
) -> None:
    objective = make_objective(layer=2, temperature=0.2)
    batch = collate(tiny_encoder, shape_for(PAIRS) if with_rows else None, seed)
    assert batch.separate is not None
    with torch.no_grad():
        terms = objective(tiny_encoder, batch)
        for name, linked in (("joint", batch.joint), ("separate", batch.separate)):
            (states,) = tiny_encoder(linked.tokens, [2])
            words = find_words(linked, states, PAIRS)
            assert terms.figures[name].item() == pytest.approx(
                loop_loss(words, PAIRS, 0.2), rel=1e-4
            )
    total = sum(terms.figures[name] for name in ("tlm", "joint", "separate"))
    torch.testing.assert_close(terms.loss, total)


def test_rows_and_pairs_of_their_own_give_one_loss(tiny_encoder: Encoder) -> None:
    losses = []
    for shape in (None, shape_for(PAIRS), shape_for(PAIRS, row=16, n_rows=5)):
        batch = collate(tiny_encoder, shape, probability=0.01)
        with torch.no_grad():
            figures = make_objective(layer=0)(tiny_encoder, batch).figures
        losses.append([figures["separate"].item(), figures["accuracy"].item()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)


def test_positions_and_marks(tiny_encoder: Encoder) -> None:
    marks = Marks.of(tiny_encoder.tokenizer)
    batch = collate(tiny_encoder, None, positions="continue")
    first = int(batch.joint.tokens.offsets[1])
    assert batch.joint.tokens.positions[:first].tolist() == list(range(first))
    assert batch.separate is not None
    offsets = batch.separate.tokens.offsets.tolist()
    assert len(offsets) == 2 * len(PAIRS) + 1
    for start, stop in pairwise(offsets):
        assert batch.separate.tokens.positions[start:stop].tolist() == list(range(stop - start))
        assert batch.separate.tokens.ids[[start, stop - 1]].tolist() == [marks.first, marks.last]
    assert make_objective().n_marks(marks) == 4
    one_mark = Marks(0, 2, 1, 1, 3, (0, 1, 2, 3), 50)
    assert make_objective().n_marks(one_mark) == 4
    assert make_objective(separate=0.0).n_marks(one_mark) == 3


def test_pairs_come_in_either_order(tiny_encoder: Encoder) -> None:
    batch = collate(tiny_encoder, None, pairs=PAIRS[:1] * 40)
    firsts = batch.joint.pairs.ids[batch.joint.pairs.offsets[:-1].long() + 1].tolist()
    assert set(firsts) == {10, 20}
    assert 8 < firsts.count(10) < 32


def test_links_beyond_the_room_make_more_room(tiny_encoder: Encoder) -> None:
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
    assert terms.figures["joint"].item() == terms.figures["separate"].item() == 0
    torch.testing.assert_close(terms.loss, terms.figures["tlm"])


def test_the_layer_is_seven_eighths_up_unless_named(tiny_encoder: Encoder) -> None:
    batch = collate(tiny_encoder, None)
    with torch.no_grad():
        default, named, other = (
            make_objective(layer=layer)(tiny_encoder, batch).figures["joint"].item()
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
    assert (less.labels == IGNORED).any()
    moved = full.to("cpu")
    assert moved.tokens.ids.equal(full.tokens.ids)
    assert moved.joint.pairs.offsets.equal(full.joint.pairs.offsets)


@pytest.mark.slow
def test_one_graph_serves_all_batches(tiny_encoder: Encoder) -> None:
    torch._dynamo.reset()
    encoder, shape = copy.deepcopy(tiny_encoder), shape_for(PAIRS)
    encoder.fuses = True  # as a compiled run does; Hugging Face's own layers may not be traceable
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
        history.append({name: value.item() for name, value in terms.figures.items()})
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
    for name in ("tlm", "joint", "separate"):
        assert history[-1][name] < history[0][name] - 0.2, name
    assert history[-1]["accuracy"] > history[0]["accuracy"] or history[-1]["accuracy"] == 1


def test_mistakes_in_settings_are_refused() -> None:
    for wrong in ({"temperature": 0.0}, {"joint": -1.0}, {"positions": "none"}, {"layers": 2}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LinkedWordsSettings.model_validate(wrong)
