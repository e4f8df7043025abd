"""Fine-tuning on a GPU in bfloat16, with and without CUDA graphs, compared with a CPU."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calque.evaluation.finetuning.finetune import FinetuneResult, fine_tune
from calque.evaluation.finetuning.head_model import HeadModel
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.classification import TextClassifier, encode_texts
from calque.evaluation.tasks.tagging import TagExamples, Tagger, encode_tagged
from calque.io.conllu import read_tagged
from calque.io.labeled import read_labeled_pairs
from calque.models.encoder import Encoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DATA = Path(__file__).parents[1] / "data" / "xtreme"
# Without dropout, because devices draw different random numbers.
PLAIN = TaskSettings(
    epochs=4,
    learning_rate=5e-4,
    head_learning_rate=3e-3,
    batch_tokens=256,
    dropout=0.0,
    body_dropout=0.0,
)


def copy_encoder(encoder: Encoder, device: str) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer).to(device)


def read_words(encoder: Encoder) -> tuple[TagExamples, list[str]]:
    sentences = read_tagged(DATA / "udpos" / "train-en.tsv")
    names = sorted({tag for sentence in sentences for tag in sentence.tags})
    return encode_tagged(encoder.tokenizer, sentences, names, longest=128, overlap=0.2), names


def tune_tagger(
    encoder: Encoder, device: str, settings: TaskSettings, seed: int = 0
) -> tuple[FinetuneResult, HeadModel]:
    examples, names = read_words(encoder)
    generator = torch.Generator().manual_seed(0)
    tagger = Tagger(copy_encoder(encoder, device), names, settings, generator)
    return fine_tune(tagger, examples, settings, seed=seed), tagger


@pytest.mark.parametrize("head", ["linear", "crf"])
@pytest.mark.parametrize("graphs", [False, True])
def test_bfloat16_losses_are_close_to_those_of_the_cpu(
    tiny_encoder: Encoder, head: str, graphs: bool
) -> None:
    settings = replace(PLAIN, head=head, graphs=graphs)  # type: ignore[arg-type]
    expected, _ = tune_tagger(tiny_encoder, "cpu", settings)
    found, _ = tune_tagger(tiny_encoder, "cuda", settings)
    assert found.losses[-1] < 0.9 * found.losses[0]
    assert found.losses == pytest.approx(expected.losses, rel=0.03)


@pytest.mark.parametrize("setting", ["zero-shot", "features"])
def test_replayed_steps_equal_normal_steps(tiny_encoder: Encoder, setting: str) -> None:
    settings = replace(PLAIN, precision="fp32", setting=setting, graphs=False)  # type: ignore[arg-type]
    plain, plain_model = tune_tagger(tiny_encoder, "cuda", settings)
    replayed, model = tune_tagger(tiny_encoder, "cuda", replace(settings, graphs=True))
    assert replayed.losses == pytest.approx(plain.losses, rel=1e-4)
    for found, expected in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-2)


@pytest.mark.parametrize("graphs", [False, True])
def test_losses_depend_on_the_seed_only(tiny_encoder: Encoder, graphs: bool) -> None:
    settings = replace(PLAIN, dropout=0.1, body_dropout=0.1, graphs=graphs)
    state = torch.cuda.get_rng_state()
    reports = [tune_tagger(tiny_encoder, "cuda", settings, seed)[0] for seed in (0, 0, 1)]
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert reports[0].losses == reports[1].losses != reports[2].losses


def test_dropout_of_replayed_steps_differs(tiny_encoder: Encoder) -> None:
    """With learning rates near 0, only dropout changes the loss."""
    settings = replace(
        PLAIN,
        learning_rate=1e-30,
        head_learning_rate=1e-30,
        weight_decay=0.0,
        dropout=0.5,
        batch_tokens=1 << 14,
        epochs=8,
        graphs=True,
    )
    losses = tune_tagger(tiny_encoder, "cuda", settings)[0].losses
    assert len(set(losses)) == 8


@pytest.mark.filterwarnings("ignore:.*ynchronization debug mode")
@pytest.mark.parametrize("graphs", [False, True])
def test_steps_do_not_wait_for_the_device(tiny_encoder: Encoder, graphs: bool) -> None:
    pairs = read_labeled_pairs(DATA / "xnli" / "dev-en.tsv")
    classes = sorted({pair.label for pair in pairs})
    examples = encode_texts(tiny_encoder.tokenizer, pairs, classes, 128)
    settings = replace(PLAIN, epochs=2, dropout=0.1, body_dropout=0.1, graphs=graphs)
    encoder = copy_encoder(tiny_encoder, "cuda")
    model = TextClassifier(encoder, 3, settings, torch.Generator().manual_seed(0))
    done: list[int] = []

    def watch(number: int, total: int) -> None:
        done.append(number)
        # Recording waits once; later steps of the epoch must not.
        if number == 5:
            torch.cuda.set_sync_debug_mode("error")
        if number == total // 2 - 1:
            torch.cuda.set_sync_debug_mode("default")

    try:
        fine_tune(model, examples, settings, seed=0, on_progress=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(done) > 12
