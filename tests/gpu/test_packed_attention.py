"""On a GPU: half precision against the CPU's single precision, and compiled against eager."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import ModernBertConfig, XLMRobertaConfig

from calque.models import attention
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.objectives.masked_lm import MaskedLM, MaskedLMSettings
from calque.tokens.ragged import BatchShape, Ragged, pack
from calque.tokens.tokenizer import SpecialTokens
from calque.types import MaskedBatch, TokenBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PAD, VOCABULARY = 1, 500
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 130,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MODERN: dict[str, Any] = {
    "cls_token_id": 0,
    "sep_token_id": 2,
    "global_attn_every_n_layers": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "xlm-roberta": lambda: XLMRobertaConfig(
        **SIZES, type_vocab_size=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    # Windows of 16 tokens in every second layer: shorter and longer than the sentences below.
    "modernbert": lambda: ModernBertConfig(**SIZES, **MODERN, local_attention=16),
}
LENGTHS = [60, 3, 17, 1, 40, 9, 128, 25]
SENTENCES = [
    np.random.default_rng(length).integers(4, VOCABULARY - 1, length).tolist() for length in LENGTHS
]
SHAPE = BatchShape.fit(512, np.array(LENGTHS), longest=128)
# The ways of attending, the batch that takes each, and the longest row that attends densely.
WAYS = {
    "flash": (pack(Ragged.of(SENTENCES), pad_id=PAD), 256),
    "flash, fixed shape": (pack(Ragged.of(SENTENCES), shape=SHAPE, pad_id=PAD), 0),
    "rows, fixed shape": (pack(Ragged.of(SENTENCES), shape=SHAPE, pad_id=PAD), 256),
}


@pytest.fixture(params=CONFIGS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    """An encoder whose attention is uneven enough that a wrong mask moves states by 3 % or more."""
    model = build_model(CONFIGS[request.param]())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.06, generator=generator)
    return Encoder(model, None).eval()  # type: ignore[arg-type]


@pytest.fixture(params=WAYS)
def batch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TokenBatch:
    """A batch, with a check of the attention implementation that the GPU uses."""
    batch, longest_row = WAYS[request.param]
    monkeypatch.setattr(attention, "MAX_ROW_LENGTH", longest_row)
    meant = "plan_flash" if request.param.startswith("flash") else "plan_rows"
    for way in {"plan_flash", "plan_rows", "plan_padded"} - {meant}:
        monkeypatch.setattr(attention, way, only_on_the_cpu(getattr(attention, way)))
    return batch


def only_on_the_cpu(plan: Callable[..., Any]) -> Callable[..., Any]:
    def checked(batch: TokenBatch, *others: Any, **options: Any) -> Any:
        assert not batch.ids.is_cuda, "this way of computing attention is for CPUs"
        return plan(batch, *others, **options)

    return checked


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = found.detach().float().cpu() - expected.detach()
    return float(difference.norm() / expected.detach().norm())


def run(encoder: Encoder, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the states of the real tokens, and the gradient of a loss on them in one vector."""
    (states,) = encoder(batch)
    real = states[batch.ids != PAD]
    body = encoder.family.get_body(encoder.model)
    parameters = [p for name, p in body.named_parameters() if "pooler" not in name]
    found = torch.autograd.grad(real.float().cos().sum(), parameters)
    return real, torch.cat([gradient.flatten().float() for gradient in found])


def assert_training_matches(encoder: Encoder, there: Encoder, batch: TokenBatch) -> None:
    states, gradient = run(encoder, batch)
    with torch.autocast("cuda", torch.bfloat16):
        half_states, half_gradient = run(there, batch.to("cuda"))
    assert half_states.isfinite().all()
    assert relative_error(half_states, states) < 2e-2
    assert relative_error(half_gradient, gradient) < 2e-2


def test_autocast_matches_single_precision_on_the_cpu(encoder: Encoder, batch: TokenBatch) -> None:
    assert_training_matches(encoder, deepcopy(encoder).cuda(), batch)


@pytest.mark.parametrize("encoder", ["xlm-roberta"], indirect=True)
def test_fused_layers_match_single_precision_on_the_cpu(
    encoder: Encoder, batch: TokenBatch
) -> None:
    there = deepcopy(encoder).cuda()
    there.use_fused_layers = True
    assert_training_matches(encoder, there, batch)


@torch.no_grad()
def test_half_precision_weights_match_single_on_the_cpu(
    encoder: Encoder, batch: TokenBatch
) -> None:
    (states,) = encoder(batch)
    (half,) = deepcopy(encoder).to("cuda", torch.bfloat16)(batch.to("cuda"))
    real = batch.ids != PAD
    assert half.dtype == torch.bfloat16
    assert relative_error(half.cpu()[real], states[real]) < 2e-2


def test_a_compiled_step_is_one_graph_with_the_same_loss(encoder: Encoder) -> None:
    mask_id = VOCABULARY - 1
    special_tokens = SpecialTokens(0, 2, 2, PAD, mask_id, (0, PAD, 2, mask_id), VOCABULARY)
    objective = MaskedLM(MaskedLMSettings())
    collate = objective.build_collator(special_tokens, SHAPE)
    batches: list[MaskedBatch] = [
        collate((Ragged.of(sentences),), torch.Generator().manual_seed(seed)).to("cuda")
        for seed, sentences in enumerate([SENTENCES[:-2], SENTENCES[1:6], SENTENCES[2:6]])
    ]
    there = deepcopy(encoder).cuda().train()
    compiled = torch.compile(objective, fullgraph=True, dynamic=False)
    for number, batch in enumerate(batches):
        # All batches have one shape, so that only the first compiles anything.
        with (
            torch.autocast("cuda", torch.bfloat16),
            torch._dynamo.config.patch(error_on_recompile=number > 0),
        ):
            eager, fast = objective(there, batch).loss, compiled(there, batch).loss
        assert float(fast.detach()) == pytest.approx(float(eager.detach()), rel=5e-3)
        weight: Any = there.model.get_input_embeddings().weight
        (expected,) = torch.autograd.grad(eager, weight)
        (found,) = torch.autograd.grad(fast, weight)
        assert relative_error(found, expected.float().cpu()) < 2e-2
