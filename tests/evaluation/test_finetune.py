from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import get_linear_schedule_with_warmup

from calque.errors import InputError
from calque.evaluation.finetuning.finetune import _can_replay, fine_tune, plan_epoch, predict
from calque.evaluation.finetuning.optimizer_step import (
    OptimizerStep,
    copy_tensors,
    list_tensors,
    tensor_sizes,
)
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.classification import (
    ClassBatch,
    ClassExamples,
    TextClassifier,
    encode_texts,
)
from calque.evaluation.tasks.tagging import TagExamples, Tagger, encode_tagged
from calque.io.conllu import read_tagged
from calque.io.labeled import read_labeled_pairs
from calque.models.encoder import Encoder
from calque.tokens.layout import fit_batch_shape
from calque.tokens.ragged import BatchShape

DATA = Path(__file__).parents[1] / "data" / "xtreme"
SETTINGS = TaskSettings(epochs=4, learning_rate=1e-3, head_learning_rate=3e-3, batch_tokens=256)


def copy_encoder(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer)


def read_words(encoder: Encoder) -> tuple[TagExamples, list[str]]:
    sentences = read_tagged(DATA / "udpos" / "train-en.tsv", 20)
    names = sorted({tag for sentence in sentences for tag in sentence.tags})
    return encode_tagged(encoder.tokenizer, sentences, names, longest=128, overlap=0.2), names


def make_tagger(encoder: Encoder, settings: TaskSettings = SETTINGS) -> tuple[Tagger, TagExamples]:
    examples, names = read_words(encoder)
    generator = torch.Generator().manual_seed(0)
    return Tagger(copy_encoder(encoder), names, settings, generator), examples


def weights_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_training_lowers_the_loss_and_depends_on_the_seed_only(tiny_encoder: Encoder) -> None:
    state = torch.random.get_rng_state()
    models, reports = [], []
    for seed in (1, 1, 2):
        tagger, examples = make_tagger(tiny_encoder)
        reports.append(fine_tune(tagger, examples, SETTINGS, seed=seed))
        models.append(weights_of(tagger))
    assert torch.equal(torch.random.get_rng_state(), state)  # the global state is restored
    assert reports[0].losses[-1] < 0.9 * reports[0].losses[0]
    assert reports[0].losses == reports[1].losses != reports[2].losses
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert reports[0].n_tokens == 4 * examples.lengths.sum() and reports[0].epoch == 4


def test_graphs_have_no_effect_on_a_cpu(tiny_encoder: Encoder) -> None:
    assert SETTINGS.graphs
    models, losses = [], []
    for settings in (SETTINGS, replace(SETTINGS, graphs=False)):
        tagger, examples = make_tagger(tiny_encoder, settings)
        losses.append(fine_tune(tagger, examples, settings, seed=1).losses)
        models.append(weights_of(tagger))
    assert losses[0] == losses[1]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize(
    ("row", "choices", "is_recorded"),
    [
        (256, {}, True),
        (256, {"precision": "fp32"}, True),
        (256, {"setting": "features"}, True),
        (256, {"graphs": False}, False),
        (None, {}, False),  # as on a CPU
        # In longer rows padded attention waits for the device.
        (264, {}, False),
        (264, {"precision": "fp32"}, False),
        (264, {"setting": "features"}, False),
    ],
)
def test_steps_that_may_wait_for_the_device_are_not_recorded(
    tiny_encoder: Encoder, row: int | None, choices: dict[str, object], is_recorded: bool
) -> None:
    settings = TaskSettings(**choices)  # type: ignore[arg-type]
    tagger, _ = make_tagger(tiny_encoder, settings)
    shape = None if row is None else BatchShape(4 * row, row, 8, 4 * row)
    assert _can_replay(tagger, settings, shape) == is_recorded
    tagger.can_replay = False
    assert not _can_replay(tagger, settings, shape)


def test_layers_that_cannot_be_fused_are_not_recorded(
    tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tagger, _ = make_tagger(tiny_encoder)
    shape = BatchShape(1024, 256, 8, 1024)
    assert _can_replay(tagger, SETTINGS, shape)
    monkeypatch.setattr(Encoder, "can_fuse", False)
    assert not _can_replay(tagger, SETTINGS, shape)


def test_loss_equals_that_of_the_padded_hugging_face_model(tiny_encoder: Encoder) -> None:
    tagger, examples = make_tagger(tiny_encoder)
    tagger.eval()
    sentences = read_tagged(DATA / "udpos" / "train-en.tsv", 20)[:6]
    encoding = tiny_encoder.tokenizer(
        [list(s.words) for s in sentences],
        is_split_into_words=True,
        padding=True,
        return_tensors="pt",
    )
    labels = torch.full(encoding.input_ids.shape, -100)
    for row, sentence in enumerate(sentences):
        for place, word in reversed(list(enumerate(encoding.word_ids(row)))):
            if word is not None:
                labels[row, place] = examples.names.index(sentence.tags[word])
        ids = encoding.word_ids(row)
        repeated = [k for k in range(1, len(ids)) if ids[k] is not None and ids[k] == ids[k - 1]]
        labels[row, repeated] = -100
    with torch.no_grad():
        states = tagger.encoder.model.roberta(**encoding).last_hidden_state
        expected = F.cross_entropy(tagger.head(states).flatten(0, 1), labels.flatten())
        rows = np.arange(6)
        for shape in (None, fit_batch_shape(examples.lengths, [rows])):
            found = tagger(examples.collate(rows, shape))
            assert found.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("head", ["linear", "crf"])
def test_a_fixed_shape_changes_no_gradient(tiny_encoder: Encoder, head: str) -> None:
    settings = TaskSettings(head=head, dropout=0.0)  # type: ignore[arg-type]
    tagger, examples = make_tagger(tiny_encoder, settings)
    tagger.eval()
    rows = np.array([3, 0, 7, 5])
    gradients = []
    for shape in (None, fit_batch_shape(examples.lengths, [rows, np.arange(8)])):
        tagger.zero_grad()
        tagger(examples.collate(rows, shape)).backward()
        gradients.append({n: p.grad for n, p in tagger.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-3)


def test_steps_equal_those_of_torch_and_transformers(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(
        learning_rate=2e-4, dropout=0.0, body_dropout=0.0, warmup=0.25, max_grad_norm=0.1
    )
    tagger, examples = make_tagger(tiny_encoder, settings)
    reference, _ = make_tagger(tiny_encoder, settings)
    body = set(reference.encoder.parameters())
    every = list(reference.parameters())
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in every if (p in body) == inside and (p.ndim > 1) == wide],
                "lr": 2e-4 if inside else 1e-3,
                "weight_decay": 0.01 if wide else 0.0,
            }
            for inside in (True, False)
            for wide in (True, False)
        ]
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 9)
    optimizer.step()  # their schedule starts with a step at rate 0, here without gradients
    update = OptimizerStep(tagger, settings, n_updates=8)
    tagger.train(), reference.train()
    for number in range(8):
        batch = examples.collate(np.arange(number, number + 4))
        schedule.step()
        update(batch, number)
        optimizer.zero_grad()
        reference(batch).backward()
        torch.nn.utils.clip_grad_norm_(every, 0.1)
        optimizer.step()
    for found, expected in zip(tagger.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_the_best_epoch_is_kept(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(epochs=3, batch_tokens=256, select="best")
    tagger, examples = make_tagger(tiny_encoder, settings)
    scores, states = [0.5, 0.75, 0.75], []

    def score() -> float:
        states.append(weights_of(tagger))
        return scores[len(states) - 1]

    report = fine_tune(tagger, examples, settings, seed=0, score_dev=score)
    assert report.epoch == 2 and report.dev_scores == scores
    found = weights_of(tagger)
    assert all(torch.equal(found[name], states[1][name]) for name in found)
    assert not all(torch.equal(found[name], states[2][name]) for name in found)


def test_frozen_features_do_not_change_the_encoder(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(setting="features", epochs=2, extra_layers=1, batch_tokens=256)
    tagger, examples = make_tagger(tiny_encoder, settings)
    before = weights_of(tagger)
    report = fine_tune(tagger, examples, settings, seed=0)
    after = weights_of(tagger)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(name.startswith("encoder") for name in changed)
    assert {name for name in before if not name.startswith("encoder")} == changed
    assert report.losses[1] < report.losses[0]


def test_every_example_occurs_once_per_epoch_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 100)
    plans = [plan_epoch(lengths, TaskSettings(batch_tokens=128), 0, epoch) for epoch in (0, 1)]
    for plan in plans:
        assert sorted(np.concatenate(plan).tolist()) == list(range(100))
        assert max(lengths[batch].sum() for batch in plan) <= 128
    assert plans[0][0].tolist() != plans[1][0].tolist()
    with pytest.raises(InputError, match="59 tokens, but batch_tokens is 32"):
        plan_epoch(lengths, TaskSettings(batch_tokens=32), 0, 0)


def test_batches_of_a_number_of_examples() -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 100)
    plan = plan_epoch(lengths, TaskSettings(batch_tokens=8, batch_examples=32), 0, 0)
    assert [len(batch) for batch in plan] == [32, 32, 32, 4]
    assert sorted(np.concatenate(plan).tolist()) == list(range(100))


def test_nonfinite_loss_is_an_error(tiny_encoder: Encoder) -> None:
    tagger, examples = make_tagger(tiny_encoder)
    with torch.no_grad():
        tagger.head.weight.fill_(math.inf)
    with pytest.raises(InputError, match="loss of epoch 1 is nan"):
        fine_tune(tagger, examples, SETTINGS, seed=0)


def test_nonfinite_loss_after_the_last_step_is_an_error(tiny_encoder: Encoder) -> None:
    """No training loss follows the last step, so it needs a check of its own."""
    whole = {"epochs": 1, "batch_tokens": 100_000, "warmup": 0.0}  # a single update
    calm = replace(SETTINGS, **whole)
    tagger, examples = make_tagger(tiny_encoder, calm)
    assert fine_tune(tagger, examples, calm, seed=1).n_updates == 1
    wild = replace(calm, learning_rate=1e30)
    tagger, examples = make_tagger(tiny_encoder, wild)
    with pytest.raises(InputError, match=r"loss after the last step is nan \(lower learning_rate"):
        fine_tune(tagger, examples, wild, seed=1)


def test_no_examples(tiny_encoder: Encoder) -> None:
    tagger, examples = make_tagger(tiny_encoder)
    none = encode_tagged(tiny_encoder.tokenizer, [], examples.names, longest=128, overlap=0.2)
    with pytest.raises(InputError, match="no training examples"):
        fine_tune(tagger, none, SETTINGS, seed=0)


def read_classes(encoder: Encoder, longest: int = 128) -> ClassExamples:
    pairs = read_labeled_pairs(DATA / "xnli" / "dev-en.tsv")
    return encode_texts(encoder.tokenizer, pairs, sorted({p.label for p in pairs}), longest)


def test_pairs_are_encoded_and_truncated_as_by_the_tokenizer(tiny_encoder: Encoder) -> None:
    pairs = read_labeled_pairs(DATA / "xnli" / "dev-en.tsv")
    examples = read_classes(tiny_encoder, longest=40)
    expected = tiny_encoder.tokenizer(
        [p.texts[0] for p in pairs],
        [p.texts[1] for p in pairs],
        truncation="longest_first",
        max_length=40,
    ).input_ids
    assert examples.text.ids.tolist() == [token for ids in expected for token in ids]
    whole = read_classes(tiny_encoder, longest=1000)
    assert examples.counts == {"texts_cut": int((whole.lengths > 40).sum())}
    assert whole.counts == {}


def test_a_classifier_reads_first_tokens(tiny_encoder: Encoder) -> None:
    examples = read_classes(tiny_encoder)
    generator = torch.Generator().manual_seed(0)
    model = TextClassifier(copy_encoder(tiny_encoder), 3, SETTINGS, generator).eval()
    rows = np.arange(5)
    with torch.no_grad():
        starts = np.cumsum(examples.lengths) - examples.lengths
        ids = [
            torch.from_numpy(examples.text.ids[s : s + n])
            for s, n in zip(starts[:5], examples.lengths[:5], strict=True)
        ]
        body = model.encoder.model.roberta
        firsts = torch.stack([body(one[None]).last_hidden_state[0, 0] for one in ids])
        for shape in (None, fit_batch_shape(examples.lengths, [rows])):
            found = model.score(examples.collate(rows, shape))[:5]
            torch.testing.assert_close(found, model.head(firsts), atol=1e-5, rtol=1e-4)


def test_predictions_belong_to_their_rows(tiny_encoder: Encoder) -> None:
    examples = read_classes(tiny_encoder)
    generator = torch.Generator().manual_seed(0)
    model = TextClassifier(copy_encoder(tiny_encoder), 3, SETTINGS, generator).train()
    found = {}

    def answer(batch: ClassBatch) -> Tensor:
        assert not model.training and not torch.is_grad_enabled()
        return batch.labels

    for rows, _, labels in predict(model, examples, SETTINGS, answer, batch_tokens=200):
        found |= dict(zip(rows.tolist(), labels.tolist(), strict=True))
    assert model.training
    assert [found[k] for k in range(90)] == examples.labels.tolist()


def test_copy_tensors_overwrites_a_batch(tiny_encoder: Encoder) -> None:
    examples = read_classes(tiny_encoder)
    plans = [np.arange(5), np.arange(5, 9)]
    shape = fit_batch_shape(examples.lengths, plans)
    one, other = (examples.collate(rows, shape) for rows in plans)
    assert tensor_sizes(one) == tensor_sizes(other) and len(list_tensors(one)) == 5
    copy_tensors(one, other)
    assert all(map(torch.equal, list_tensors(one), list_tensors(other)))
