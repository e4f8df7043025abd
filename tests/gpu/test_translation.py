"""On a GPU: half precision against single, compiled against eager, and beam search."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import XLMRobertaConfig

from calque.models.seq2seq import DecoderPlan, Seq2Seq, build_seq2seq, random_weights
from calque.objectives.generation import (
    DenoisingSeq2Seq,
    DenoisingSeq2SeqSettings,
    Translation,
    TranslationSettings,
)
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens, train_tokenizer
from calque.translation.translate import Translator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPE = BatchShape(tokens=1024, row=64, sequences=64, budget=1024)
LINES = [f"sentence number {n} has {n % 7} words and {n % 5} more" for n in range(200)]


@pytest.fixture(scope="module")
def model() -> Seq2Seq:
    tokenizer = train_tokenizer(LINES, 120)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=66,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    plan = DecoderPlan(layers=2, tie="all", languages=("de", "en"))
    return build_seq2seq(plan, random_weights(config), tokenizer).train()


def make_batch(kind: str, model: Seq2Seq, shape: BatchShape | None) -> tuple[Any, Any]:
    draw, n_ids = np.random.default_rng(0), len(model.tokenizer)
    sides = [
        Ragged.of([draw.integers(4, n_ids, n).tolist() for n in draw.integers(1, 30, 16)])
        for _ in range(2)
    ]
    numbers = Ragged(np.zeros(16, dtype=np.int64), np.ones(16, dtype=np.int64))
    if kind == "translation":
        objective: Any = Translation(TranslationSettings(direction="both"))
        arrays, languages = (*sides, numbers), ["en-de"]
    else:
        objective = DenoisingSeq2Seq(DenoisingSeq2SeqSettings())
        arrays, languages = (sides[0], numbers), ["de", "en"]
    collate = objective.build_collator(SpecialTokens.of(model.tokenizer), shape)
    objective.start(model, languages)
    return objective, collate(arrays, torch.Generator().manual_seed(1))


def compute(objective: Any, model: Seq2Seq, batch: Any, device: str) -> tuple[float, Tensor]:
    model.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        terms = objective(model, batch.to(device))
    terms.loss.backward()
    gradients = [p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None]
    return float(terms.loss.detach()), torch.cat(gradients)


@pytest.mark.parametrize("kind", ["translation", "denoising"])
@pytest.mark.parametrize("way", ["eager", "fixed shape", "fused", "compiled"])
def test_half_precision_on_a_gpu_is_the_cpu_s_single(kind: str, way: str, model: Seq2Seq) -> None:
    plain, batch = make_batch(kind, model, None)
    wanted, slope = compute(plain, model, batch, "cpu")
    there = deepcopy(model).cuda()
    objective, batch = make_batch(kind, there, None if way == "eager" else SHAPE)
    there.use_fused_layers = way in ("fused", "compiled")
    if way == "compiled":
        objective.compile(dynamic=False)
    loss, found = compute(objective, there, batch, "cuda")
    assert loss == pytest.approx(wanted, rel=0.01)
    assert found.isfinite().all()
    assert torch.cosine_similarity(found, slope, dim=0) > 0.99


@pytest.mark.filterwarnings("ignore:.*ynchronization debug mode")
def test_a_step_waits_for_nothing(model: Seq2Seq) -> None:
    there = deepcopy(model).cuda()
    objective, batch = make_batch("translation", there, SHAPE)
    batch = batch.to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        objective(there, batch).loss.backward()
        try:
            torch.cuda.set_sync_debug_mode("error")
            objective(there, batch).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_beam_search_writes_what_the_cpu_writes(model: Seq2Seq) -> None:
    """In single precision; batches of other sizes, so that only rounding could differ."""
    here = list(Translator(model.eval(), tgt_lang="de").translate(LINES[:20]))
    there = Translator(deepcopy(model).cuda(), tgt_lang="de")
    found = list(there.translate(LINES[:20]))
    assert sum(a == b for a, b in zip(here, found, strict=True)) >= 18
