"""Parsing and question answering on a GPU."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks import parsing, question_answering
from calque.models.encoder import Encoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DATA = Path(__file__).parents[1] / "data"


def on_gpu(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer).cuda()


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("setting", ["zero-shot", "features"])
def test_parser_memorizes_its_training_trees(
    tiny_encoder: Encoder, tmp_path: Path, graphs: bool, setting: str
) -> None:
    for part in ("train", "test"):
        shutil.copy(DATA / "ud/en_ewt-ud-test.conllu", tmp_path / f"en_ewt-ud-{part}.conllu")
    settings = TaskSettings(
        setting=setting,  # type: ignore[arg-type]
        epochs=40,
        batch_tokens=256,
        learning_rate=1e-3,
        head_learning_rate=3e-3,
        graphs=graphs,
    )
    found, again = (
        parsing.measure(on_gpu(tiny_encoder), tmp_path, settings=settings, seed=0)[0]
        for _ in range(2)
    )
    assert found.metrics["uas"] > 85
    assert again.metrics["uas"] == pytest.approx(found.metrics["uas"], abs=8)


def test_questions_run(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(epochs=2, batch_tokens=1024)
    outcomes = question_answering.measure(
        on_gpu(tiny_encoder), DATA / "questions", task="mlqa", settings=settings, seed=0
    )
    assert len(outcomes) == 7
    for outcome in outcomes:
        assert outcome.items is not None
        assert 0 <= outcome.metrics["f1"] <= 100
        assert outcome.items.score == pytest.approx(outcome.metrics["f1"], abs=1e-6)
