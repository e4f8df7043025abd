"""On a GPU: CA-MLM compiled in rows, and by the flash kernel, against the same on the CPU."""

from __future__ import annotations

from copy import deepcopy
from importlib import resources
from typing import Any

import pytest
import torch
from transformers import XLMRobertaConfig

from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.models.veco import Veco
from calque.objectives.cross_attention_lm import (
    CrossAttentionLM,
    CrossAttentionLMSettings,
    encode_alone_and_paired,
)
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens, encode_sentences, train_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = {
    "loose": None,
    "rows": BatchShape(tokens=4096, row=128, sequences=256, budget=4096),
    "long rows": BatchShape(tokens=8 * 512, row=512, sequences=256, budget=8 * 512),
}


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    return [line.split("\t") for line in table.splitlines()[1:61]]


@pytest.fixture(scope="module")
def veco(rows: list[list[str]]) -> Veco:
    """Large weights make attention uneven; the vocabulary size is slow for matrix units."""
    tokenizer = train_tokenizer([row[k] for row in rows for k in (1, 2)], 1203)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=130,
        type_vocab_size=1,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(1)
    encoder = Encoder(build_model(config), tokenizer).eval()
    return Veco.plug(encoder, "random", torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_compiled_step_does_as_the_cpu(
    name: str, frozen: bool, veco: Veco, rows: list[list[str]]
) -> None:
    ids = [encode_sentences(veco.tokenizer, [row[k] for row in rows]) for k in (1, 2)]
    sides = tuple(Ragged.of(side) for side in ids)
    objective = CrossAttentionLM(CrossAttentionLMSettings())
    collate = objective.build_collator(SpecialTokens.of(veco.tokenizer), SHAPES[name])
    batch = collate(sides, torch.Generator().manual_seed(4))
    found: list[dict[str, Any]] = []
    for device in ("cpu", "cuda"):
        model = deepcopy(veco).to(device)
        for parameter, weight in model.named_parameters():
            weight.requires_grad_(not frozen or ".crossattention." in parameter)
        compute = CrossAttentionLM(CrossAttentionLMSettings())
        if device == "cuda":
            model.use_fused_layers = True
            if SHAPES[name] is not None:
                compute.compile(dynamic=False)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            terms = compute(model, batch.to(device))
        terms.loss.backward()
        weights = dict(model.named_parameters())
        key = weights["model.roberta.encoder.layer.1.crossattention.self.key.weight"].grad
        body = weights["model.roberta.encoder.layer.1.attention.self.key.weight"].grad
        assert key is not None
        assert (body is None) == frozen
        found.append(terms.metrics | {"loss": terms.loss, "gradient": key.norm()})
    for term, value in found[0].items():
        torch.testing.assert_close(found[1][term].cpu(), value.cpu(), rtol=5e-2, atol=1e-3)


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_states_in_half_precision_are_near(name: str, veco: Veco, rows: list[list[str]]) -> None:
    ids = [encode_sentences(veco.tokenizer, [row[k] for row in rows]) for k in (1, 2)]
    sides = tuple(Ragged.of(side) for side in ids)
    objective = CrossAttentionLM(CrossAttentionLMSettings())
    collate = objective.build_collator(SpecialTokens.of(veco.tokenizer), SHAPES[name])
    batch = collate(sides, torch.Generator().manual_seed(4))
    expected = encode_alone_and_paired(veco, batch.pairs)
    model = deepcopy(veco).to("cuda")
    for use_fused_layers in (False, True):
        model.use_fused_layers = use_fused_layers
        with torch.autocast("cuda", torch.bfloat16):
            found = encode_alone_and_paired(model, batch.to("cuda").pairs)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.isfinite().all()
            is_real = batch.tokens.ids != veco.tokenizer.pad_token_id
            far = (mine.cpu().float() - theirs)[is_real].norm() / theirs[is_real].norm()
            assert far < 0.03
