"""XLM-Align's losses: by hand, against torch and transformers, and the effect of settings."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calque.algorithms.matching import itermax
from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.objectives import build_objective
from calque.objectives.denoising_alignment import (
    AlignmentBatch,
    DenoisingAlignment,
    DenoisingAlignmentSettings,
    describe_links,
    find_relative_spans,
    pointer_loss,
)
from calque.objectives.masked_lm import NO_LABEL, TranslationLM, TranslationLMSettings
from calque.objectives.self_labels import LEFT, RIGHT, PairBlocks
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens, encode_sentences
from calque.types import MaskedBatch

DemoRows = list[tuple[str, str, str]]
SHAPE = BatchShape.fit(2048, np.full(50, 40), 128)
both_shapes = pytest.mark.parametrize("shape", [None, SHAPE], ids=["bare", "rows"])


PAPER = {"similarity": "dot", "labels": "transport", "filter": "itermax"}


def make_objective(**settings: Any) -> DenoisingAlignment:
    objective = DenoisingAlignment(DenoisingAlignmentSettings(**PAPER | settings))
    objective.add_weights(64, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in objective.pointer.parameters():
            parameter.mul_(20)  # far from even, so that a wrong mask or a wrong link is seen
    return objective


def read_sides(encoder: Encoder, rows: DemoRows) -> tuple[Ragged, Ragged]:
    src, tgt = (
        Ragged.of(encode_sentences(encoder.tokenizer, [row[k] for row in rows])) for k in (1, 2)
    )
    return src, tgt


def make_batch(
    objective: Any,
    encoder: Encoder,
    rows: DemoRows,
    shape: BatchShape | None = None,
    seed: int = 0,
) -> Any:
    collate = objective.build_collator(SpecialTokens.of(encoder.tokenizer), shape)
    return collate(read_sides(encoder, rows), torch.Generator().manual_seed(seed))


# The loss


def test_pointer_loss_of_two_words_by_hand() -> None:
    """The first word has probability ¾ for its partner; the second is linked with both."""
    logits = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0]]])
    links, allowed = torch.tensor([[[True, False], [True, True]]]), torch.ones(1, 2, 2).bool()
    loss, n_queries = pointer_loss(logits, links, allowed)
    assert loss.item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2)
    assert n_queries.item() == 2


def test_pointer_loss_is_torchs_cross_entropy_with_shares() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 6, 9, generator=generator)
    allowed = torch.rand(4, 6, 9, generator=generator) < 0.6
    links = allowed & (torch.rand(4, 6, 9, generator=generator) < 0.2)
    asks = links.any(dim=-1)
    assert 0 < asks.sum() < asks.numel()
    assert links.sum(dim=-1).max() > 1
    shares = links[asks] / links[asks].sum(dim=-1, keepdim=True)
    least = torch.finfo(logits.dtype).min
    expected = F.cross_entropy(logits[asks].masked_fill(~allowed[asks], least), shares)
    loss, n_queries = pointer_loss(logits, links, allowed)
    torch.testing.assert_close(loss, expected)
    assert n_queries == asks.sum()


def test_gradient_is_correct() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    allowed = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]]).bool().expand(2, 3, 4)
    links = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]).bool().expand(2, 3, 4)

    def loss_alone(logits: Tensor) -> Tensor:
        return pointer_loss(logits, links, allowed)[0]

    assert torch.autograd.gradcheck(loss_alone, (logits,))
    (gradient,) = torch.autograd.grad(loss_alone(logits), logits)
    assert gradient[:, 0, :3].ne(0).all()
    assert gradient[:, 0, 3].eq(0).all()
    assert gradient[:, 1:].eq(0).all()


def test_no_query_gives_no_loss_and_no_gradient() -> None:
    logits = torch.randn(1, 2, 3, requires_grad=True)
    none = torch.zeros(1, 2, 3, dtype=torch.bool)
    for allowed in (none, ~none):
        loss, n_queries = pointer_loss(logits, none, allowed)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert (loss.item(), n_queries.item()) == (0.0, 0)
        assert gradient.eq(0).all()


def test_half_precision_is_summed_in_single() -> None:
    logits, all_of_them = torch.zeros(1, 1, 300).bfloat16(), torch.ones(1, 1, 300).bool()
    loss, _ = pointer_loss(logits, all_of_them, all_of_them)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(300), abs=1e-5)


# The whole objective, pair by pair in Hugging Face's own forward


def run_alone(encoder: Encoder, ids: Tensor, positions: Tensor, layer: int) -> Tensor:
    """States of one pair, without packing."""
    model: Any = encoder.model
    first = int(model.config.pad_token_id) + 1
    output = model(
        input_ids=ids[None], position_ids=positions[None] + first, output_hidden_states=True
    )
    states: Tensor = output.hidden_states[layer][0]
    return states


def label_alone(left: Tensor, right: Tensor, settings: DenoisingAlignmentSettings) -> Tensor:
    """Label one pair by the paper's equations, or by mutual argmax."""
    if settings.labels == "argmax":
        cosines = torch.cosine_similarity(left[:, None], right[None], dim=-1)
        best_tgt, best_src = cosines.argmax(dim=1), cosines.argmax(dim=0)
        links = torch.zeros_like(cosines, dtype=torch.bool)
        for i, j in enumerate(best_tgt.tolist()):
            links[i, j] = best_src[j] == i
        return links
    if settings.similarity == "dot":
        plan = (left @ right.mT).clamp(min=1e-6)
    else:
        plan = (10 * torch.cosine_similarity(left[:, None], right[None], dim=-1)).exp()
    for _ in range(2):
        plan = plan / plan.sum(dim=0)
        plan = plan / plan.sum(dim=1, keepdim=True)
    return itermax(plan[None])[0]


def point_alone(objective: DenoisingAlignment, asking: Tensor, answering: Tensor) -> Tensor:
    queries, keys = objective.pointer.query(asking), objective.pointer.key(answering)
    return (queries @ keys.mT / math.sqrt(asking.shape[1])).log_softmax(dim=1)


def may_follow(objective: DenoisingAlignment, batch: AlignmentBatch, i: Tensor, j: Tensor) -> Any:
    """Whether clean token i may point along its link with j."""
    settings = objective.settings
    if settings.queries == "masked":
        return batch.is_masked[i]
    if settings.queries == "unmasked":
        return not batch.is_masked[i] and batch.chance[i] < settings.probability
    return batch.chance[i] > batch.chance[j]


def losses_alone(objective: DenoisingAlignment, encoder: Encoder, batch: AlignmentBatch) -> Tensor:
    """The pointer's loss of every query, with a loop over pairs, directions and tokens."""
    settings, last = objective.settings, encoder.n_layers
    flat = torch.arange(len(batch.tokens.ids)) if batch.flat is None else batch.flat
    losses = []
    for start, stop in pairwise(batch.clean.offsets.tolist()):
        places = torch.arange(start, stop)
        left, right = (places[batch.sides[start:stop] == side] for side in (LEFT, RIGHT))
        if not len(left):
            continue  # padding
        positions = batch.clean.positions[start:stop]
        clean = run_alone(encoder, batch.clean.ids[start:stop], positions, settings.label_layer)
        masked_ids = batch.tokens.ids[flat[start:stop]]
        states = run_alone(encoder, masked_ids, positions, settings.pointer_layer or last)
        links = label_alone(clean[left - start], clean[right - start], settings)
        for asking, answering, table in ((left, right, links), (right, left, links.mT)):
            scores = point_alone(objective, states[asking - start], states[answering - start])
            for i, row, score in zip(asking, table, scores, strict=True):
                linked = row.nonzero().flatten().tolist()
                followed = [k for k in linked if may_follow(objective, batch, i, answering[k])]
                if followed:
                    losses.append(-score[followed].mean())
    return torch.stack(losses)


SWITCHES: dict[str, dict[str, Any]] = {
    "paper": {},
    "cosine": {"similarity": "cosine"},
    "default": {"similarity": "cosine", "labels": "argmax", "filter": "argmax"},
    "positions": {"positions": "reset"},
    "unmasked": {"queries": "unmasked", "probability": 0.3},
    "all": {"queries": "all"},
    "layers": {"label_layer": 1, "pointer_layer": 2},
    "share": {"label_share": 0.5},
}


@both_shapes
@pytest.mark.parametrize("name", SWITCHES)
def test_pointer_loss_equals_that_of_single_pairs(
    name: str, shape: BatchShape | None, tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    objective = make_objective(**{"label_layer": 3, **SWITCHES[name]})
    batch = make_batch(objective, tiny_encoder, demo_rows[:12] + demo_rows[100:112], shape)
    terms = objective(tiny_encoder, batch)
    with torch.no_grad():
        expected = losses_alone(objective, tiny_encoder, batch)
    assert len(expected) > 20
    torch.testing.assert_close(terms.metrics["pointer"], expected.mean(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(terms.loss, terms.metrics["tlm"] + terms.metrics["pointer"])


@both_shapes
@pytest.mark.parametrize("positions", ["reset", "continue"])
def test_the_other_loss_is_tlm(
    positions: Any, shape: BatchShape | None, tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    """The same random numbers give the batch of TLM: one forward pass serves both losses."""
    ours = make_objective(positions=positions, label_share=0.5)
    theirs = TranslationLM(TranslationLMSettings(positions=positions))
    batch = make_batch(ours, tiny_encoder, demo_rows[:20], shape)
    plain: MaskedBatch = make_batch(theirs, tiny_encoder, demo_rows[:20], shape)
    assert torch.equal(batch.tokens.ids, plain.tokens.ids)
    assert torch.equal(batch.tokens.positions, plain.tokens.positions)
    found = ours(tiny_encoder, batch).metrics["tlm"]
    torch.testing.assert_close(found, theirs(tiny_encoder, plain).loss)


def test_weights_and_reductions(tiny_encoder: Encoder, demo_rows: DemoRows) -> None:
    def run(**settings: Any) -> tuple[float, float, float, AlignmentBatch]:
        objective = make_objective(**settings)
        batch = make_batch(objective, tiny_encoder, demo_rows[:20])
        terms = objective(tiny_encoder, batch)
        return (
            terms.loss.item(),
            terms.metrics["tlm"].item(),
            terms.metrics["pointer"].item(),
            objective.prepare(tiny_encoder, batch),
        )

    loss, tlm, pointer, batch = run(tlm_weight=0.5, pointer_weight=3.0)
    assert loss == pytest.approx(0.5 * tlm + 3 * pointer)
    assert batch.links is not None
    labeled = PairBlocks.of(batch.clean, batch.sides).to_blocks(batch.is_masked) & (
        batch.links.any(dim=1) | batch.links.any(dim=2)
    )
    n_hidden, n_queries = len(batch.masked.labels), int(labeled.sum())
    assert n_queries < n_hidden
    loss, tlm, pointer, _ = run(tlm_weight=2.0, reduction="token")
    expected = (2 * tlm * n_hidden + pointer * n_queries) / (n_hidden + n_queries)
    assert loss == pytest.approx(expected)


@both_shapes
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_sum_over_the_queries_of_a_pair(
    share: float, shape: BatchShape | None, tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    """Eq. 15, with a loop over pairs and queries; the batch is the mean of its pairs."""
    settings: dict[str, Any] = {"label_layer": 3, "label_share": share, "pointer_weight": 2.0}
    objective = make_objective(**settings, reduction="sum")
    batch = make_batch(objective, tiny_encoder, demo_rows[:12], shape)
    terms = objective(tiny_encoder, batch)
    with torch.no_grad():
        queries = losses_alone(objective, tiny_encoder, batch)
    n_labeled = sum(
        bool((batch.sides[start:stop] == LEFT).any())
        for start, stop in pairwise(batch.clean.offsets.tolist())
    )
    n_masked = int((batch.masked.labels != NO_LABEL).sum())
    expected = terms.metrics["tlm"] * n_masked / 12 + 2 * queries.sum() / n_labeled
    torch.testing.assert_close(terms.loss, expected)
    assert n_labeled == 12 if share == 1 else 0 < n_labeled < 12


# Self-labelling inside training


def test_labels_come_from_the_model_without_dropout(
    tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    objective = make_objective()
    encoder = deepcopy(tiny_encoder)
    batch = make_batch(objective, encoder, demo_rows[:20])
    expected = objective.prepare(encoder.eval(), batch).links
    for module in encoder.train().modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    prepared = objective.prepare(encoder, batch)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert prepared.links is not None and expected is not None
    assert torch.equal(prepared.links, expected)
    assert all(module.training for module in encoder.modules())
    losses = {objective(encoder, prepared).loss.item() for _ in range(3)}
    assert len(losses) == 3


@pytest.mark.parametrize("half", [False, True])
def test_every_weight_that_takes_part_gets_a_gradient(
    half: bool, tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    """Also under autocast, which might reuse weights that were cast without gradients."""
    objective, encoder = make_objective(), deepcopy(tiny_encoder).train()
    batch = make_batch(objective, encoder, demo_rows[:20])
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = objective(encoder, objective.prepare(encoder, batch)).loss
    torch.autograd.backward(loss)
    named = [*encoder.named_parameters(), *objective.named_parameters()]
    without = [name for name, p in named if p.grad is None or p.grad.eq(0).all()]
    assert without == []


def test_without_labels_only_tlm_remains(tiny_encoder: Encoder, demo_rows: DemoRows) -> None:
    objective, encoder = make_objective(), deepcopy(tiny_encoder)
    batch = objective.prepare(encoder, make_batch(objective, encoder, demo_rows[:20]))
    assert batch.links is not None
    terms = objective(encoder, replace(batch, links=torch.zeros_like(batch.links)))
    assert terms.metrics["pointer"].item() == 0.0
    assert terms.metrics["labelled"].item() == terms.metrics["diagonal"].item() == 0.0
    torch.autograd.backward(terms.loss)
    assert all(p.grad is not None and p.grad.eq(0).all() for p in objective.parameters())


def test_the_default_layer_is_ten_twelfths_of_the_depth(
    tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    links = []
    for layer in (None, 3, -2, 1):  # 10/12 of 4 layers is 3.3; −2 is the last but one
        objective = make_objective(label_layer=layer)
        batch = make_batch(objective, tiny_encoder, demo_rows[:20])
        links.append(objective.prepare(tiny_encoder, batch).links)
    assert torch.equal(links[0], links[1])
    assert torch.equal(links[0], links[2])
    assert not torch.equal(links[0], links[3])


@pytest.mark.parametrize("key", ["label_layer", "pointer_layer"])
def test_an_impossible_layer_is_an_error(
    key: str, tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    objective = make_objective(**{key: 7})
    batch = make_batch(objective, tiny_encoder, demo_rows[:20])
    problem = r"layer 7 does not exist \(choose 0 to 4\)"
    with pytest.raises(InputError, match=problem):
        objective(tiny_encoder, batch)
    examples, special_tokens = (
        iter([read_sides(tiny_encoder, demo_rows)]),
        SpecialTokens.of(tiny_encoder.tokenizer),
    )
    with pytest.raises(InputError, match=problem):
        objective.find_problem(tiny_encoder, special_tokens, examples)


def test_a_pointer_learns_the_labels(tiny_encoder: Encoder, demo_rows: DemoRows) -> None:
    objective = make_objective(pointer_weight=1.0, tlm_weight=0.0, queries="all")
    batch = make_batch(objective, tiny_encoder, demo_rows[:40])
    batch = objective.prepare(tiny_encoder, batch)
    optimizer = torch.optim.Adam(objective.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = objective(tiny_encoder, batch).loss
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


# Batches


@both_shapes
def test_sides_are_the_two_sentences(
    shape: BatchShape | None, tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    batch = make_batch(make_objective(), tiny_encoder, demo_rows[:20], shape)
    src, tgt = read_sides(tiny_encoder, demo_rows[:20])
    expected = {
        frozenset((tuple(a), tuple(b)))
        for a, b in zip(
            np.split(src.ids, np.cumsum(src.lengths)[:-1]),
            np.split(tgt.ids, np.cumsum(tgt.lengths)[:-1]),
            strict=True,
        )
    }
    found = set()
    for start, stop in pairwise(batch.clean.offsets.tolist()):
        ids, sides = batch.clean.ids[start:stop], batch.sides[start:stop]
        pair = frozenset(tuple(ids[sides == side].tolist()) for side in (LEFT, RIGHT))
        found |= {pair} - {frozenset([()])}
        if pair != frozenset([()]):
            ends = batch.spans[start:stop][sides == LEFT]
            assert ends[0, 0] == 0.0 and ends[-1, 1] == 1.0
    assert found == expected
    real = batch.masked.labels != NO_LABEL
    hidden = batch.masked.masked[real]
    assert torch.equal(batch.is_masked.nonzero().flatten(), hidden)
    assert torch.equal(batch.clean.ids[hidden], batch.masked.labels[real])


def test_edges_by_hand() -> None:
    sides = np.array([0, LEFT, LEFT, 0, 0, RIGHT, 0, 0, LEFT, 0, RIGHT, RIGHT, RIGHT, RIGHT, 0])
    spans = find_relative_spans(sides.astype(np.int8))
    expected = [[0, 0.5], [0.5, 1], [0, 1], [0, 1], [0, 0.25], [0.25, 0.5], [0.5, 0.75], [0.75, 1]]
    assert spans[sides > 0].tolist() == expected
    assert (spans[sides == 0] == 0).all()


def test_metrics_by_hand(tiny_encoder: Encoder, demo_rows: DemoRows) -> None:
    """Two words against four: the diagonal runs through cells 0-0, 0-1, 1-2 and 1-3."""
    batch = make_batch(make_objective(), tiny_encoder, demo_rows[:1])
    sides = torch.tensor([0, LEFT, LEFT, 0, 0, RIGHT, RIGHT, RIGHT, RIGHT, 0], dtype=torch.int8)
    spans = torch.from_numpy(find_relative_spans(sides.numpy()))
    links = torch.zeros(1, 10, 10, dtype=torch.bool)
    for i, j in ((0, 0), (0, 1), (1, 1)):
        links[0, 1 + i, 5 + j] = True
    blocks = PairBlocks(torch.zeros(1, 10), sides[None], None)
    metrics = describe_links(replace(batch, sides=sides, spans=spans, links=links), blocks)
    assert metrics["labelled"].item() == pytest.approx(4 / 6)
    assert metrics["diagonal"].item() == pytest.approx(2 / 3)


@both_shapes
def test_a_share_of_the_pairs_is_labeled(
    shape: BatchShape | None, tiny_encoder: Encoder, demo_rows: DemoRows
) -> None:
    objective = make_objective(label_share=0.25)
    sizes, starts = set(), set()
    for seed in range(4):
        batch = make_batch(objective, tiny_encoder, demo_rows[:40], shape, seed)
        assert batch.flat is not None
        assert torch.equal(batch.tokens.positions[batch.flat], batch.clean.positions)
        lengths = batch.clean.offsets.diff()
        n_blocks = 40 if shape is None else 16
        n_chosen = int((lengths > 0).sum()) if shape is None else len(batch.clean.ids) // 128
        assert n_chosen == n_blocks // 4
        starts.add(int(batch.flat[0]))
        prepared = objective.prepare(tiny_encoder, batch)
        sizes.add((len(batch.flat), len(batch.clean.offsets), prepared.links.shape))
    assert len(starts) > 1
    assert shape is None or len(sizes) == 1


def test_all_tensors_of_a_batch_are_moved(tiny_encoder: Encoder, demo_rows: DemoRows) -> None:
    for share in (0.5, 1.0):
        batch = make_batch(make_objective(label_share=share), tiny_encoder, demo_rows[:9])
        there = batch.to("meta")
        arrays = [there.tokens.ids, there.masked.labels, there.clean.ids, there.clean.offsets]
        arrays += [there.sides, there.spans, there.is_masked, there.chance]
        arrays += [] if there.flat is None else [there.flat]
        assert {array.device.type for array in arrays} == {"meta"}
        assert there.tokens.n_real == batch.tokens.n_real


def test_batches_repeat_with_their_generator(tiny_encoder: Encoder, demo_rows: DemoRows) -> None:
    objective = make_objective(label_share=0.5)
    one, again, other = (
        make_batch(objective, tiny_encoder, demo_rows[:30], seed=seed) for seed in (1, 1, 2)
    )
    for name in ("flat", "sides", "chance", "is_masked"):
        assert torch.equal(getattr(one, name), getattr(again, name))
        assert not torch.equal(getattr(one, name), getattr(other, name))


# Compiling


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_compiled_step_is_two_graphs_with_the_same_loss(
    share: float, compilable_encoder: Encoder, demo_rows: DemoRows
) -> None:
    """One graph labels and one learns, with no recompilation; dropout only in the latter."""
    objective, encoder = make_objective(label_share=share), compilable_encoder.train()
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batches = [
        make_batch(objective, encoder, demo_rows[20 * k : 20 * k + 20], SHAPE, k) for k in range(3)
    ]
    eager = [objective(encoder, objective.prepare(encoder, batch)) for batch in batches]
    torch._dynamo.reset()
    objective.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    for number, (batch, expected) in enumerate(zip(batches, eager, strict=True)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found = objective(encoder, objective.prepare(encoder, batch))
        torch.testing.assert_close(found.loss, expected.loss)
        assert found.metrics.keys() == expected.metrics.keys()
    torch._dynamo.reset()


def test_the_default_labels_are_the_most_precise() -> None:
    settings = DenoisingAlignmentSettings()
    assert {key: getattr(settings, key) for key in PAPER} == SWITCHES["default"]


def test_the_kind_is_known() -> None:
    objective = build_objective(DenoisingAlignmentSettings())
    assert isinstance(objective, DenoisingAlignment)
    assert not list(objective.parameters())
    objective.add_weights(8, torch.Generator().manual_seed(0))
    assert {name for name, _ in objective.named_parameters()} == {
        "pointer.query.weight",
        "pointer.query.bias",
        "pointer.key.weight",
    }
