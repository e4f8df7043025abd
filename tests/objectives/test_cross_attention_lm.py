"""CA-MLM: the loss against Hugging Face's layers, the stop-gradient, and the batches."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.veco import Veco
from calque.objectives import build_objective
from calque.objectives.cross_attention_lm import (
    TERMS,
    CrossAttentionBatch,
    CrossAttentionLM,
    CrossAttentionLMSettings,
    cross_attention_lm_terms,
    encode_alone_and_paired,
)
from calque.objectives.masked_lm import NO_LABEL
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens, encode_sentences

DemoRows = list[tuple[str, str, str]]
SHAPE = BatchShape(tokens=1024, row=128, sequences=64, budget=900)
each_shape = pytest.mark.parametrize("shape", [None, SHAPE], ids=["loose", "rows"])


@pytest.fixture(scope="module")
def veco(tiny_encoder: Encoder) -> Veco:
    """A model whose cross-attention and head have an effect."""
    found = Veco.plug(tiny_encoder, "random", torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in found.model.named_parameters():
            if "LayerNorm" not in name and "layer_norm" not in name:
                parameter.normal_(0, 0.2, generator=generator)
    return found


@pytest.fixture(scope="module")
def sides(demo_rows: DemoRows, tiny_tokenizer: PreTrainedTokenizerFast) -> tuple[Ragged, Ragged]:
    pairs = [row[1:] for row in demo_rows if row[0] in ("de", "zh")][:16]
    src, tgt = (
        Ragged.of(encode_sentences(tiny_tokenizer, texts)) for texts in zip(*pairs, strict=True)
    )
    return src, tgt


def make_objective(**settings: Any) -> CrossAttentionLM:
    found = build_objective(CrossAttentionLMSettings(**settings))
    assert isinstance(found, CrossAttentionLM)
    return found


def make_batch(
    tokenizer: PreTrainedTokenizerFast, sides: tuple[Ragged, ...], shape: BatchShape | None = None
) -> CrossAttentionBatch:
    collate = make_objective().build_collator(SpecialTokens.of(tokenizer), shape)
    batch = collate(sides, torch.Generator().manual_seed(0))
    assert isinstance(batch, CrossAttentionBatch)
    return batch


def run_layers(veco: Veco, ids: Tensor, read: Tensor | None) -> Tensor:
    """Run Hugging Face's layers on one sentence without a mask."""
    body = veco.family.get_body(veco.model)
    hidden = body.embeddings(ids[None])
    for layer in veco.family.get_layers(veco.model):
        hidden = layer(hidden, encoder_hidden_states=read)
    found: Tensor = hidden
    return found


def compute_by_hand(veco: Veco, batch: CrossAttentionBatch) -> tuple[float, dict[str, float]]:
    """Encode every pair separately, and average cross-entropies in plain Python."""
    bounds = batch.tokens.offsets.tolist()
    labels = {
        int(place): int(label)
        for place, label in zip(batch.masked, batch.labels, strict=True)
        if label != NO_LABEL
    }
    head: Any = veco.model.lm_head
    losses: dict[str, list[float]] = {name: [] for name in TERMS}
    veco.model.set_attn_implementation("eager")
    for start, middle, end in zip(bounds[:-2:2], bounds[1:-1:2], bounds[2::2], strict=True):
        spans = range(start, middle), range(middle, end)
        if not (len(spans[0]) and len(spans[1])):
            continue
        ids = [batch.tokens.ids[span.start : span.stop] for span in spans]
        alone = [run_layers(veco, sequence, None) for sequence in ids]
        paired = [run_layers(veco, ids[0], alone[1]), run_layers(veco, ids[1], alone[0])]
        for name, span, states in zip(TERMS, spans * 2, alone + paired, strict=True):
            logits = head(states)[0]
            for place in span:
                if place in labels:
                    label = torch.tensor(labels[place])
                    loss = F.cross_entropy(logits[place - span.start], label)
                    losses[name].append(float(loss))
    veco.model.set_attn_implementation("calque")
    assert sum(map(len, losses.values())) == 2 * len(labels)
    total = sum(map(sum, losses.values())) / len(labels)
    return total, {name: sum(values) / len(values) for name, values in losses.items()}


@each_shape
@torch.no_grad()
def test_the_loss_equals_that_of_hugging_face_layers(
    veco: Veco,
    tiny_tokenizer: PreTrainedTokenizerFast,
    sides: tuple[Ragged, Ragged],
    shape: BatchShape | None,
) -> None:
    batch = make_batch(tiny_tokenizer, sides, shape)
    found = make_objective()(veco, batch)
    loss, terms = compute_by_hand(veco, batch)
    assert float(found.loss) == pytest.approx(loss, rel=1e-5)
    assert {name: float(value) for name, value in found.metrics.items()} == pytest.approx(
        terms, rel=1e-5
    )
    assert len({round(value, 3) for value in terms.values()}) == 4


@each_shape
def test_no_gradient_flows_through_the_states_of_the_pair(
    veco: Veco,
    tiny_tokenizer: PreTrainedTokenizerFast,
    sides: tuple[Ragged, Ragged],
    shape: BatchShape | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Terms that read a pair have no gradient in its H, unless the stop is removed."""
    batch = make_batch(tiny_tokenizer, sides, shape)

    def differentiate() -> Tensor:
        alone, paired = encode_alone_and_paired(veco, batch.pairs)
        features = veco.lm_features(paired[batch.masked])
        logits = F.linear(features, *veco.output_layer())
        loss = F.cross_entropy(logits, batch.labels, ignore_index=NO_LABEL)
        (gradient,) = torch.autograd.grad(loss + 0 * alone.sum(), alone)
        return gradient

    assert torch.equal(differentiate(), torch.zeros(len(batch.tokens.ids), veco.hidden_size))
    monkeypatch.setattr(Tensor, "detach", lambda tensor: tensor)
    assert differentiate().abs().max() > 1e-6


def test_every_weight_gets_a_gradient(
    veco: Veco, tiny_tokenizer: PreTrainedTokenizerFast, sides: tuple[Ragged, Ragged]
) -> None:
    veco.zero_grad()
    make_objective()(veco, make_batch(tiny_tokenizer, sides)).loss.backward()
    missing = [name for name, weight in veco.named_parameters() if weight.grad is None]
    veco.zero_grad()
    assert not missing


def test_the_gradient_is_correct() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.double, requires_grad=True)
    labels = torch.tensor([3, 0, NO_LABEL, 6, 1])
    is_right = torch.tensor([False, True, True, False, True])

    def loss(logits: Tensor) -> Tensor:
        losses = F.cross_entropy(
            logits.flatten(0, 1), labels.repeat(2), ignore_index=NO_LABEL, reduction="none"
        )
        return cross_attention_lm_terms(losses.view(2, -1), labels, is_right)[0]

    assert torch.autograd.gradcheck(loss, logits)


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.floats(0, 9), st.booleans(), st.booleans()),
        min_size=1,
        max_size=20,
    ).filter(lambda rows: any(row[3] for row in rows))
)
def test_the_terms_add_up(rows: list[tuple[float, float, bool, bool]]) -> None:
    """Weighted by their numbers of tokens; a side without masked tokens has no weight."""
    losses = torch.tensor([[row[0] for row in rows], [row[1] for row in rows]]).double()
    is_right = torch.tensor([row[2] for row in rows])
    labels = torch.tensor([7 if row[3] else NO_LABEL for row in rows])
    losses[:, labels == NO_LABEL] = 0.0
    loss, terms = cross_attention_lm_terms(losses, labels, is_right)
    kept = [row for row in rows if row[3]]
    counts = [sum(row[2] == right for row in kept) for right in (False, True)] * 2
    total = sum(n * float(term) for n, term in zip(counts, terms, strict=True))
    assert float(loss) == pytest.approx(total / len(kept), abs=1e-9)
    assert math.isfinite(float(loss))


@each_shape
def test_batches_contain_the_sentences_of_the_tokenizer(
    tiny_tokenizer: PreTrainedTokenizerFast,
    demo_rows: DemoRows,
    sides: tuple[Ragged, Ragged],
    shape: BatchShape | None,
) -> None:
    pairs = [row[1:] for row in demo_rows if row[0] in ("de", "zh")][:16]
    expected = sorted(tuple(map(tuple, tiny_tokenizer(list(pair))["input_ids"])) for pair in pairs)
    batch = make_batch(tiny_tokenizer, sides, shape)
    is_real = batch.labels != NO_LABEL
    clean = batch.tokens.ids.clone()
    clean[batch.masked[is_real]] = batch.labels[is_real]
    found = [tuple(clean[a:b].tolist()) for a, b in pairwise(batch.tokens.offsets.tolist())]
    both = [(a, b) for a, b in zip(found[::2], found[1::2], strict=True) if a and b]
    assert sorted(both) == expected
    n_ordinary = sum(len(side.ids) for side in sides)
    assert int(is_real.sum()) == round(0.25 * n_ordinary)
    assert batch.tokens.n_real == n_ordinary + 4 * len(pairs)
    if shape is not None:
        other = make_batch(tiny_tokenizer, tuple(Ragged.of([[5, 6], [7]]) for _ in range(2)), shape)
        assert other.tokens.offsets.shape == batch.tokens.offsets.shape
        assert other.masked.shape == batch.masked.shape


@torch.no_grad()
def test_a_step_compiles_as_one_graph_for_all_batches(
    veco: Veco, tiny_tokenizer: PreTrainedTokenizerFast, sides: tuple[Ragged, Ragged]
) -> None:
    """There are no graph breaks, and other lengths need no other graph."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compute = torch.compile(
        make_objective().forward, fullgraph=True, dynamic=False, backend=counter
    )
    others = tuple(Ragged.of([side.ids[:9]]) for side in sides)
    veco.use_fused_layers = True
    try:
        for batch in (make_batch(tiny_tokenizer, each, SHAPE) for each in (sides, others)):
            expected = make_objective()(veco, batch).loss
            torch.testing.assert_close(compute(veco, batch).loss, expected)
    finally:
        veco.use_fused_layers = False
    assert counter.frame_count == 1


def test_an_encoder_without_cross_attention_is_an_error(tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="needs an encoder with cross-attention"):
        make_objective().start(tiny_encoder, ["en-de"])


def test_all_tensors_of_a_batch_are_moved(
    tiny_tokenizer: PreTrainedTokenizerFast, sides: tuple[Ragged, Ragged]
) -> None:
    batch = make_batch(tiny_tokenizer, sides).to("meta")
    arrays = (batch.tokens.ids, batch.pairs.order, batch.pairs.read.offsets, batch.labels)
    assert all(array.is_meta for array in arrays)
