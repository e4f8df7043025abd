"""On a GPU: DeBERTa's states, compiled steps and fine-tuning against the same on the CPU."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from calque.evaluation.finetuning.finetune import FinetuneResult, fine_tune
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.tagging import Tagger, encode_tagged
from calque.io.conllu import read_tagged
from calque.models.encoder import Encoder
from calque.objectives.masked_lm import (
    MaskedLM,
    MaskedLMSettings,
    TranslationLM,
    TranslationLMSettings,
)
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens, encode_sentences
from calque.word_alignment.neural import WordAligner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = "cuda"
DATA = Path(__file__).parents[1] / "data" / "xtreme"
SHAPE = BatchShape(tokens=2048, row=128, sequences=128, budget=2048)


@pytest.fixture(scope="module")
def encoder(deberta_encoder: Encoder) -> Encoder:
    """Large weights, so that attention is not uniform, and no dropout."""
    encoder = deepcopy(deberta_encoder)
    for module in encoder.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for name, weight in encoder.model.named_parameters():
            if "proj.weight" in name:
                weight.mul_(8)
    return encoder


@pytest.fixture(scope="module")
def sides(encoder: Encoder, demo_rows: list[tuple[str, str, str]]) -> tuple[Ragged, Ragged]:
    german = [row for row in demo_rows if row[0] == "de"][:24]
    english, foreign = (
        Ragged.of([ids.tolist() for ids in encode_sentences(encoder.tokenizer, texts)])
        for texts in ([row[1] for row in german], [row[2] for row in german])
    )
    return english, foreign


def pick(name: str) -> MaskedLM:
    if name == "masked":
        return MaskedLM(MaskedLMSettings())
    return TranslationLM(TranslationLMSettings())


@pytest.mark.parametrize("name", ["masked", "translation"])
@pytest.mark.parametrize("way", ["end to end", "rows", "compiled"])
def test_a_step_equals_that_on_the_cpu(
    name: str, way: str, encoder: Encoder, sides: tuple[Ragged, Ragged]
) -> None:
    """In half precision; positions restart in pairs, so that each pair has its own distances."""
    shape = None if way == "end to end" else SHAPE
    collate = pick(name).build_collator(SpecialTokens.of(encoder.tokenizer), shape)
    read = sides if name == "translation" else sides[:1]
    batch = collate(read, torch.Generator().manual_seed(4))
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for device in ("cpu", DEVICE):
        model, objective = deepcopy(encoder).to(device), pick(name)
        if way == "compiled" and device != "cpu":
            objective.compile(dynamic=False)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = objective(model, batch.to(device)).loss
        loss.backward()
        weights = model.model.named_parameters()
        gradients = {key: w.grad.cpu().float() for key, w in weights if w.grad is not None}
        found.append((loss.cpu(), gradients))
    (expected, their), (loss, mine) = found
    torch.testing.assert_close(loss.float(), expected, rtol=5e-3, atol=0)
    assert mine.keys() == their.keys()
    assert any("rel_embeddings" in key for key in mine)
    whole = torch.cat([gradient.flatten() for gradient in their.values()])
    apart = torch.cat([(mine[key] - their[key]).flatten() for key in their])
    assert apart.norm() < 0.1 * whole.norm()


def test_links_are_those_of_the_cpu(
    encoder: Encoder, demo_rows: list[tuple[str, str, str]]
) -> None:
    pairs = [(row[1].split(), row[2].split()) for row in demo_rows[:40]]
    links = [
        WordAligner(deepcopy(encoder).to(device), method="argmax", layer=2).align(pairs)
        for device in ("cpu", DEVICE)
    ]
    assert any(links[0])
    expected, found = (
        {(n, *link) for n, pair in enumerate(each) for link in pair} for each in links
    )
    assert len(expected ^ found) <= 0.02 * len(expected)  # words may be as near as one another


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fine_tuning_learns_as_on_the_cpu(
    precision: Literal["fp32", "bf16"], encoder: Encoder
) -> None:
    sentences = read_tagged(DATA / "udpos" / "train-en.tsv")
    names = sorted({tag for sentence in sentences for tag in sentence.tags})
    examples = encode_tagged(encoder.tokenizer, sentences, names, longest=128, overlap=0.2)

    def tune(device: str) -> FinetuneResult:
        settings = TaskSettings(
            epochs=4,
            learning_rate=5e-4,
            batch_tokens=256,
            dropout=0.0,
            body_dropout=0.0,
            precision=precision if device != "cpu" else "fp32",
        )
        copy = Encoder(deepcopy(encoder.model), encoder.tokenizer).to(device)
        tagger = Tagger(copy, names, settings, torch.Generator().manual_seed(0))
        return fine_tune(tagger, examples, settings, seed=0)

    expected, found = tune("cpu"), tune(DEVICE)
    assert found.losses[-1] < 0.9 * found.losses[0]
    assert found.losses == pytest.approx(expected.losses, rel=0.03)
