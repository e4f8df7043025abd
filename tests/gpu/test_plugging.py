"""Plug-in fine-tuning on a GPU, with and without CUDA graphs, compared with a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from calque.evaluation.finetuning.finetune import FinetuneResult, fine_tune
from calque.evaluation.finetuning.plug_in import TranslatedExample
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.classification import (
    ClassExamples,
    ClassPairs,
    TextClassifier,
    encode_class_pairs,
    encode_texts,
)
from calque.io.labeled import LabeledText, read_labeled_pairs
from calque.models.encoder import Encoder
from calque.models.veco import Veco

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DATA = Path(__file__).parents[1] / "data" / "xtreme" / "xnli"
CLASSES = ["contradiction", "entailment", "neutral"]
PLAIN = TaskSettings(
    plug="in", epochs=3, learning_rate=5e-4, batch_tokens=512, dropout=0.0, body_dropout=0.0
)


@pytest.fixture(scope="module")
def pairs(tiny_encoder: Encoder) -> ClassPairs:
    """German examples with English translations, except every fourth."""

    def encode(examples: Sequence[LabeledText], classes: list[str]) -> ClassExamples:
        return encode_texts(tiny_encoder.tokenizer, examples, classes, longest=64)

    sides = [read_labeled_pairs(DATA / f"dev-{name}.tsv") for name in ("de", "en")]
    rows = enumerate(zip(*sides, strict=True))
    found = [TranslatedExample(x, y, True) if k % 4 else TranslatedExample(x) for k, (x, y) in rows]
    return encode_class_pairs(encode, found, CLASSES)


def tune(
    encoder: Encoder, pairs: ClassPairs, device: str, settings: TaskSettings
) -> tuple[FinetuneResult, TextClassifier]:
    plain = Encoder(deepcopy(encoder.model), encoder.tokenizer)
    veco = Veco.plug(plain, "random", torch.Generator().manual_seed(1)).to(device)
    model = TextClassifier(veco, len(CLASSES), settings, torch.Generator().manual_seed(0))
    return fine_tune(model, pairs, settings, seed=0), model


@pytest.mark.parametrize("graphs", [False, True])
def test_losses_are_close_to_those_of_the_cpu(
    tiny_encoder: Encoder, pairs: ClassPairs, graphs: bool
) -> None:
    expected, _ = tune(tiny_encoder, pairs, "cpu", PLAIN)
    exact, _ = tune(tiny_encoder, pairs, "cuda", replace(PLAIN, precision="fp32", graphs=graphs))
    np.testing.assert_allclose(exact.losses, expected.losses, rtol=2e-2)
    half, model = tune(tiny_encoder, pairs, "cuda", replace(PLAIN, graphs=graphs))
    np.testing.assert_allclose(half.losses, expected.losses, rtol=5e-2)
    assert model.classify(pairs, PLAIN).shape == pairs.labels.shape
