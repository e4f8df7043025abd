"""On a GPU: contrastive steps in half precision against single, and compiled against eager."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import XLMRobertaConfig

from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.objectives import Objective
from calque.objectives.contrastive import (
    SentenceContrastive,
    SentenceContrastiveSettings,
    WordContrastive,
    WordContrastiveSettings,
)
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
PAD, VOCABULARY, HIDDEN = 1, 500, 128
MARKS = SpecialTokens(0, 2, 2, PAD, VOCABULARY - 1, (0, PAD, 2, VOCABULARY - 1), VOCABULARY)
SHAPE = BatchShape(tokens=1024, row=64, sequences=64, budget=1024)
CHANGES: dict[str, Any] = {"negatives": "strong", "features": 32, "queue": 40}


@pytest.fixture
def encoder() -> Encoder:
    config = XLMRobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=66,
        pad_token_id=PAD,
        bos_token_id=0,
        eos_token_id=2,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(build_model(config), None).train()  # type: ignore[arg-type]


@pytest.fixture(params=["word", "sentence"])
def objective(request: pytest.FixtureRequest, encoder: Encoder) -> Objective:
    made: Objective = (
        WordContrastive(WordContrastiveSettings(**CHANGES))
        if request.param == "word"
        else SentenceContrastive(SentenceContrastiveSettings(**CHANGES, parameter_weight=1.0))
    )
    made.add_weights(HIDDEN, torch.Generator().manual_seed(1))
    return made


def draw_arrays(seed: int, n_pairs: int) -> tuple[Ragged, ...]:
    """Random sentences of words of one to three subwords, linked at equal positions."""
    draw = np.random.default_rng(seed)
    pairs = [
        [
            [draw.integers(4, VOCABULARY - 1, draw.integers(1, 4)).tolist() for _ in range(n)]
            for n in draw.integers(2, 9, 2)
        ]
        for _ in range(n_pairs)
    ]
    sides = [Ragged.of([list(chain(*pair[side])) for pair in pairs]) for side in (0, 1)]
    words = [Ragged.of([[len(word) for word in pair[side]] for pair in pairs]) for side in (0, 1)]
    links = [[k << 20 | k << 8 | 255 for k in range(min(map(len, pair)))] for pair in pairs]
    return (*sides, *words, Ragged.of(links))


def make_batches(objective: Objective) -> list[Any]:
    collate = objective.build_collator(MARKS, SHAPE)
    return [collate(draw_arrays(k, 20 - k), torch.Generator()) for k in range(3)]


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = found.detach().float().cpu() - expected.detach().cpu()
    return float(difference.norm() / expected.detach().norm())


def follow(objective: Any, encoder: Encoder, batch: Any) -> tuple[float, Tensor]:
    """Return a loss and its gradient for all weights that have one, in one vector."""
    terms = objective(encoder, batch)
    parameters = [*encoder.parameters(), *objective.parameters()]
    found = torch.autograd.grad(terms.loss, parameters, allow_unused=True)
    return float(terms.loss.detach()), torch.cat([g.flatten() for g in found if g is not None])


def move(encoder: Encoder, objective: Objective) -> tuple[Encoder, Objective]:
    encoder, objective = deepcopy(encoder).to(DEVICE), deepcopy(objective).to(DEVICE)
    objective.start(encoder, ["en-de"])
    return encoder, objective


def test_autocast_is_finite_and_close_to_single_precision(
    encoder: Encoder, objective: Objective
) -> None:
    """Three steps: the queue also has features computed in half precision."""
    there, fast = move(encoder, objective)
    objective.start(encoder, ["en-de"])
    for batch in make_batches(objective):
        expected, gradient = follow(objective, encoder, batch)
        with torch.autocast(DEVICE, torch.bfloat16):
            found, half = follow(fast, there, batch.to(DEVICE))
        assert half.isfinite().all()
        assert found == pytest.approx(expected, rel=2e-2)
        assert relative_error(half, gradient) < 5e-2


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # by inductor
@pytest.mark.parametrize("precision", ["single", "half"])
def test_a_compiled_step_is_one_graph_with_the_same_loss(
    encoder: Encoder, objective: Objective, precision: str
) -> None:
    """Half precision rounds: gradients are compared with those in single precision."""
    torch._dynamo.reset()
    there, plain = move(encoder, objective)
    there.use_fused_layers = True
    _, fast = move(encoder, objective)
    fast.compile(fullgraph=True, dynamic=False)
    objective.start(encoder, ["en-de"])
    for number, batch in enumerate(make_batches(objective)):
        with (
            torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "half"),
            torch._dynamo.config.patch(error_on_recompile=number > 0),
        ):
            expected, gradient = follow(plain, there, batch.to(DEVICE))
            found, compiled = follow(fast, there, batch.to(DEVICE))
        assert found == pytest.approx(expected, rel=5e-3)
        loss, single = follow(objective, encoder, batch)
        assert [found, expected] == pytest.approx([loss, loss], rel=5e-3)
        if precision == "single":
            assert relative_error(compiled, gradient.cpu()) < 2e-2
        assert relative_error(gradient, single) < 0.1
        assert relative_error(compiled, single) < 0.1
