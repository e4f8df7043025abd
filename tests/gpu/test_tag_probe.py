"""On a GPU: the probe in half precision, as in training, against single precision on the CPU."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from calque.io.conllu import read_tagged
from calque.models.encoder import Encoder
from calque.models.tag_probe import TagProbe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TAGGED = Path(__file__).parents[1] / "data" / "tagged"


def make_probe(encoder: Encoder) -> TagProbe:
    tests = {
        "en": read_tagged(TAGGED / "dev-en.tsv"),
        "zh": read_tagged(TAGGED / "dev-zh.tsv"),
    }
    return TagProbe(encoder, tests["en"] + tests["zh"], tests, source="en")


@pytest.mark.parametrize("use_fused_layers", [False, True])
def test_half_precision_does_as_single(tiny_encoder: Encoder, use_fused_layers: bool) -> None:
    layers = [0, 2, 4]
    expected = make_probe(tiny_encoder).measure(tiny_encoder, layers)
    encoder = Encoder(deepcopy(tiny_encoder.model), tiny_encoder.tokenizer).cuda().train()
    encoder.use_fused_layers = use_fused_layers
    probe = make_probe(encoder)
    with torch.autocast("cuda", torch.bfloat16):
        found, again = (probe.measure(encoder, layers) for _ in range(2))
    assert found == again  # to the last bit
    assert encoder.training
    for layer in layers:
        for language, score in found[layer].scores.items():
            assert score == pytest.approx(expected[layer].scores[language], abs=0.05)
