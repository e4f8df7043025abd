"""On a GPU: a compiled step with a teacher against the same on the CPU, in half precision."""

from __future__ import annotations

from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import RobertaConfig

from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.objectives.distillation import Distillation, DistillationSettings
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens, encode_sentences, train_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPE = BatchShape(tokens=4096, row=128, sequences=256, budget=4096)


def make_encoder(sentences: list[str], size: int, hidden: int, seed: int) -> Encoder:
    """Large weights make predictions differ; the vocabulary size is slow for matrix units."""
    tokenizer = train_tokenizer(sentences, size)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=130,
        type_vocab_size=1,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(seed)
    return Encoder(build_model(config), tokenizer).eval()


@pytest.mark.parametrize("target", ["tokens", "states"])
@pytest.mark.parametrize("is_same", [True, False])
def test_a_compiled_step_does_as_the_cpu(target: str, is_same: bool, tmp_path: Path) -> None:
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines()[1:121]]
    student = make_encoder([row[k] for row in rows for k in (1, 2)], 1203, 128, 1)
    if is_same:
        Encoder(build_model(student.model.config), student.tokenizer).save(tmp_path)
    else:
        make_encoder([row[1] for row in rows], 501, 64, 2).save(tmp_path)
    ids = encode_sentences(student.tokenizer, [row[k] for row in rows for k in (1, 2)])
    sides = (Ragged.of(ids), Ragged.of([[0], [1]] * len(rows)))
    found: list[dict[str, Any]] = []
    for device in ("cpu", "cuda"):
        encoder = deepcopy(student).to(device)
        settings = DistillationSettings(teacher=str(tmp_path), languages=["en"], target=target)
        objective = Distillation(settings)
        objective.add_weights(encoder.hidden_size, torch.Generator().manual_seed(3))
        objective.to(device)
        objective.start(encoder, ["en", "xx"])
        if device == "cuda":
            encoder.use_fused_layers = True
            objective.compile(dynamic=False)
        build = objective.build_collator(SpecialTokens.of(encoder.tokenizer), SHAPE)
        batch = build(sides, torch.Generator().manual_seed(4)).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            terms = objective(encoder, objective.prepare(encoder, batch))
        terms.loss.backward()
        weight: Any = encoder.model.get_input_embeddings()
        found.append(terms.metrics | {"loss": terms.loss, "gradient": weight.weight.grad.norm()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name].cpu(), value.cpu(), rtol=5e-2, atol=1e-3)
    assert found[0]["share"] > 0.2
    assert found[0]["teacher"] > 0.01
