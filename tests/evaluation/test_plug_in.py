"""Plug-in fine-tuning: batches of pairs equal single pairs; missing translations."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from calque import cli
from calque.errors import InputError
from calque.evaluation.finetuning.plug_in import PlugInTokens, TranslatedExample, encode_plug_in
from calque.evaluation.grid.model_specs import find_models
from calque.evaluation.grid.run_grid import plan_grid
from calque.evaluation.grid.runner import Runner
from calque.evaluation.registry import find_tasks
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks import parsing
from calque.evaluation.tasks.classification import (
    ClassExamples,
    ClassPairs,
    TextClassifier,
    encode_class_pairs,
    encode_texts,
    measure,
)
from calque.evaluation.tasks.tagging import TagExamples, Tagger, encode_tag_pairs, encode_tagged
from calque.io.conllu import TaggedSentence, read_tagged
from calque.io.labeled import LabeledText, read_labeled_pairs
from calque.models.encoder import Encoder
from calque.models.heads import NO_LABEL
from calque.models.veco import Veco
from calque.tokens.layout import fit_batch_shape
from calque.tokens.ragged import BatchShape, Ragged, pack

DATA = Path(__file__).parents[1] / "data"
XNLI = DATA / "xtreme" / "xnli"
CLASSES = ["contradiction", "entailment", "neutral"]
PLUG = TaskSettings(plug="in", dropout=0.0, body_dropout=0.0)


@pytest.fixture(scope="module")
def veco(tiny_encoder: Encoder) -> Veco:
    """A model whose cross-attention has an effect."""
    found = Veco.plug(tiny_encoder, "random", torch.Generator().manual_seed(1)).eval()
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if ".crossattention." in name and weight.ndim == 2:
                weight.mul_(10)
    return found


def copy_veco(veco: Veco) -> Veco:
    return Veco(deepcopy(veco.model), veco.tokenizer)


def encode_pairs(veco: Veco, pairs: Sequence[TranslatedExample[LabeledText]]) -> ClassPairs:
    def encode(examples: Sequence[LabeledText], classes: list[str]) -> ClassExamples:
        return encode_texts(veco.tokenizer, examples, classes, longest=64)

    return encode_class_pairs(encode, pairs, CLASSES)


@pytest.fixture(scope="module")
def real_pairs() -> list[TranslatedExample[LabeledText]]:
    """German with English; the third without it, the fourth without training on the English."""
    sides = [read_labeled_pairs(XNLI / f"dev-{name}.tsv")[:6] for name in ("de", "en")]
    pairs = [
        TranslatedExample(german, english, True) for german, english in zip(*sides, strict=True)
    ]
    pairs[2], pairs[3] = TranslatedExample(sides[0][2]), TranslatedExample(sides[0][3], sides[1][3])
    return pairs


def read_alone(veco: Veco, ids: np.ndarray, other: np.ndarray | None) -> torch.Tensor:
    """Return [H ; S] of one sequence, computed without batching."""
    one = pack(Ragged.of([ids]), pad_id=1)
    (alone,) = veco(one)
    if other is None:
        return torch.cat([alone, alone], 1)
    read = pack(Ragged.of([other]), pad_id=1)
    (keys,) = veco(read)
    return torch.cat([alone, veco.cross(one, keys, read)], 1)


@pytest.mark.parametrize("in_rows", [False, True])
def test_batches_equal_single_pairs(
    veco: Veco, real_pairs: list[TranslatedExample[LabeledText]], in_rows: bool
) -> None:
    pairs = encode_pairs(veco, real_pairs)
    rows = np.array([4, 2, 0, 3, 1])
    shape: BatchShape | None = fit_batch_shape(pairs.lengths, [rows]) if in_rows else None
    batch = pairs.collate(rows, shape)
    assert isinstance(batch.tokens, PlugInTokens)
    with torch.no_grad():
        states = encode_plug_in(veco, batch.tokens)
        found = states[batch.firsts]
        texts = pairs.texts.text
        ids = np.split(texts.ids, np.cumsum(texts.lengths)[:-1])
        for place, row in enumerate(rows.tolist()):
            right = int(pairs.rows.right[row])
            other = None if right < 0 else ids[right]
            expected = read_alone(veco, ids[row], other)
            torch.testing.assert_close(found[place], expected[0], atol=2e-5, rtol=1e-4)
            if other is not None:
                turned = read_alone(veco, other, ids[row])[0]
                torch.testing.assert_close(found[len(rows) + place], turned, atol=2e-5, rtol=1e-4)
                wrong = read_alone(veco, ids[row], ids[row])[0]
                assert (wrong - expected[0]).abs().max() > 1e-2
    assert pairs.rows.right[2] == -1
    german, english = batch.labels[: len(rows)], batch.labels[len(rows) :]
    assert german.tolist() == pairs.labels[rows].tolist()
    assert english.tolist()[1] == english.tolist()[3] == NO_LABEL
    assert english.tolist()[0] == german.tolist()[0]


def test_padding_to_a_shape_does_not_change_the_loss(
    veco: Veco, real_pairs: list[TranslatedExample[LabeledText]]
) -> None:
    pairs = encode_pairs(veco, real_pairs)
    model = TextClassifier(copy_veco(veco), 3, PLUG, torch.Generator().manual_seed(0)).eval()
    rows = np.arange(6)
    shape = fit_batch_shape(pairs.lengths, [rows])
    losses = [model(pairs.collate(rows, s)) for s in (None, shape)]
    torch.testing.assert_close(losses[0], losses[1])
    losses[0].backward()
    plugs = [p for n, p in model.encoder.named_parameters() if ".crossattention." in n]
    assert plugs and all(p.grad is not None and p.grad.abs().sum() > 0 for p in plugs)


def test_cross_attention_has_no_gradient_without_translations(
    veco: Veco, real_pairs: list[TranslatedExample[LabeledText]]
) -> None:
    alone = [TranslatedExample(pair.example) for pair in real_pairs]
    model = TextClassifier(copy_veco(veco), 3, PLUG, torch.Generator().manual_seed(0)).eval()
    model(encode_pairs(veco, alone).collate(np.arange(6))).backward()
    plugs = [p.grad for n, p in model.encoder.named_parameters() if ".crossattention." in n]
    assert all(grad is None or not grad.any() for grad in plugs)


def test_windows_of_long_sentences_are_paired_in_order(veco: Veco) -> None:
    def encode(sentences: Sequence[TaggedSentence], names: list[str]) -> TagExamples:
        return encode_tagged(veco.tokenizer, sentences, names, longest=24, overlap=0.25)

    english = read_tagged(DATA / "xtreme" / "udpos" / "dev-en.tsv")
    german = read_tagged(DATA / "xtreme" / "udpos" / "dev-de.tsv")
    names = sorted({tag for sentence in english + german for tag in sentence.tags} - {"_"})
    both = list(zip(german, english, strict=False))
    pairs = [TranslatedExample(x, y, learns_other=k % 2 == 0) for k, (x, y) in enumerate(both)]
    pairs.append(TranslatedExample(german[0]))
    found = encode_tag_pairs(encode, pairs, names)
    alone = encode([pair.example for pair in pairs], names)
    assert found.counts["sentences_in_windows"] == alone.counts["sentences_in_windows"] > 0
    assert len(found.lengths) > len(pairs)
    # Every tagged word is predicted exactly once, and only in translations that are trained on.
    words, n_words = found.find_words(np.arange(len(found.lengths)))
    numbers = np.sort(found.words[words])
    n_learned = [len(p.other.words) for p in pairs if p.other is not None and p.learns_other]
    trained = numbers[numbers >= len(found.tags)]
    assert np.array_equal(numbers[numbers < len(found.tags)], np.sort(alone.words))
    assert len(np.unique(trained)) == len(trained) <= sum(n_learned) and len(trained) > 0
    assert n_words.sum() == len(words)
    model = Tagger(copy_veco(veco), names, PLUG, torch.Generator().manual_seed(0)).eval()
    rows = np.arange(len(found.lengths))
    shape = fit_batch_shape(found.lengths, [rows])
    torch.testing.assert_close(model(found.collate(rows)), model(found.collate(rows, shape)))


def test_xnli_by_line(veco: Veco) -> None:
    settings = TaskSettings(
        setting="translate-train-all", plug="in", epochs=1, max_length=64, train_examples=12
    )
    outcomes = measure(copy_veco(veco), DATA, task="xnli", settings=settings, seed=0)
    assert [outcome.language for outcome in outcomes] == ["en", "de", "sw"]
    for outcome in outcomes:
        # German and Swahili, each with English.
        assert outcome.counts["train_examples"] == 4 * 12
        assert outcome.counts["human_translations"] == outcome.n_items
        assert outcome.notes == {"upper_bound": "tests are read beside human translations"}
        assert "without_translation" not in outcome.counts
    again = measure(copy_veco(veco), DATA, task="xnli", settings=settings, seed=0)
    assert [o.metrics for o in again] == [o.metrics for o in outcomes]


def test_translations_that_name_their_original(
    veco: Veco, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "xnli"
    (folder / "translate-train").mkdir(parents=True)
    (folder / "translate-test").mkdir()
    sides = [
        [line.split("\t") for line in (XNLI / f"dev-{name}.tsv").read_text("utf-8").splitlines()]
        for name in ("en", "de")
    ]
    english, german = sides

    def write(place: str, rows: Sequence[Sequence[str]]) -> None:
        text = "\n".join("\t".join(columns) for columns in rows)
        (folder / place).write_text(text, encoding="utf-8")

    write("train-en.tsv", english[:40])
    five = [[*en[:2], *de] for en, de in zip(english, german, strict=True)]
    write("translate-train/en-de-translated.tsv", five[10:40][::-1])  # not in the same order
    write("dev-en.tsv", english[60:70])
    write("dev-de.tsv", german[60:75])  # not parallel to the English file
    write("translate-test/test-de-en-translated.tsv", english[60:75])
    settings = TaskSettings(setting="translate-train-all", plug="in", epochs=1, max_length=64)
    en, de = measure(copy_veco(veco), tmp_path, task="xnli", settings=settings, seed=0)
    assert en.counts["train_examples"] == 40 + 30
    assert en.counts["learnt_without_translation"] == 10
    assert en.counts["without_translation"] == 10 and "human_translations" not in en.counts
    assert "without_translation" not in de.counts and "human_translations" not in de.counts
    assert not en.notes and not de.notes
    (folder / "translate-test" / "test-de-en-translated.tsv").unlink()
    write("translate-test/test-de.tsv", english[60:70])
    other = replace(settings, epochs=2)  # other settings, so that the cache is not used
    monkeypatch.delattr(
        "calque.evaluation.finetuning.experiment.fine_tune"
    )  # the error must come before the training
    with pytest.raises(InputError, match="10 translations of 15 test examples"):
        measure(copy_veco(veco), tmp_path, task="xnli", settings=other, seed=0)


def test_training_without_any_translation_is_an_error(veco: Veco) -> None:
    settings = TaskSettings(plug="in", epochs=1, batch_tokens=128)
    with pytest.raises(InputError, match="no training example has one"):
        measure(copy_veco(veco), DATA, task="reviews", settings=settings, seed=0)


def test_plug_in_needs_cross_attention_and_a_supporting_task(
    tiny_encoder: Encoder, veco: Veco
) -> None:
    settings = TaskSettings(plug="in", epochs=1)
    with pytest.raises(InputError, match="needs a model with cross-attention"):
        measure(tiny_encoder, DATA, task="xnli", settings=settings, seed=0)
    with pytest.raises(InputError, match="this task does not support plug=in"):
        parsing.measure(copy_veco(veco), DATA, settings=settings, seed=0)


def test_grid_with_plug_in(veco: Veco, tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    veco.publish(folder, dtype=torch.float32, state=veco.model.state_dict())
    chosen = {"setting": "translate-train-all", "plug": "in", "epochs": 1, "train_examples": 6}
    names = [f"veco={folder}", f"floor=random:{tiny_folder}", f"plain={tiny_folder}"]
    models = find_models(names)
    tasks = find_tasks(["pawsx"])
    runs, _ = plan_grid(models, tasks, [1], DATA, languages=["de"], settings=chosen)
    runner = Runner("cpu")
    results = {run.model.name: runner.run(run) for run in runs}
    for name in ("veco", "floor"):
        assert results[name].error is None
        assert (
            results[name].scores[0].counts["human_translations"] == results[name].scores[0].n_items
        )
    assert "cross-attention" in (results["plain"].error or "")
    out, _ = plan_grid(models[:1], tasks, [1], DATA, settings=chosen | {"plug": "out"})
    assert runner.run(out[0]).error is None
    assert out[0].config != runs[0].config
    (folder / "veco" / "model.safetensors").write_bytes(b"other")
    assert models[0].hash() != runs[0].config.split("-")[2]


def test_command_warns_of_missing_translations(
    veco: Veco, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The warning appears once per model and task, not per seed."""
    veco.publish(tmp_path / "model", dtype=torch.float32, state=veco.model.state_dict())
    folder = tmp_path / "data" / "xnli"
    (folder / "translate-train").mkdir(parents=True)
    lines = {
        name: (XNLI / f"dev-{name}.tsv").read_text("utf-8").splitlines() for name in ("en", "de")
    }
    five = [
        "\t".join([*en.split("\t")[:2], de])
        for en, de in zip(lines["en"], lines["de"], strict=True)
    ]
    for name, rows in (
        ("train-en.tsv", lines["en"][:20]),
        ("translate-train/en-de-translated.tsv", five[:15]),
        ("test-en.tsv", lines["en"][60:64]),
        ("test-de.tsv", lines["de"][60:66]),
    ):
        (folder / name).write_text("\n".join(rows), encoding="utf-8")
    command = ["evaluate", f"veco={tmp_path / 'model'}", "--data", str(tmp_path / "data")]
    command += ["--tasks", "xnli", "--setting", "translate-train-all", "--device", "cpu"]
    command += ["--seeds", "2", "--jobs", "0", "--set", "epochs=1", "--set", "max_length=64"]
    assert cli.run([*command, "--set", "plug=in", "-o", str(tmp_path / "in")]) == 0
    found = capfd.readouterr().err
    assert [line for line in found.splitlines() if "warning" in line] == [
        "warning: veco, xnli: 5 training examples, 4 of 4 tests of en, 6 of 6 tests of de have no "
        "translation and are read alone, as with plug=out"
    ]
    assert cli.run([*command, "--set", "plug=out", "-o", str(tmp_path / "out")]) == 0
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize(("plug", "is_learned"), [("in", True), ("out", False)])
def test_label_that_only_the_translation_determines(
    veco: Veco, tmp_path: Path, plug: Literal["in", "out"], is_learned: bool
) -> None:
    """All German texts are equal; only the English, which plug-out does not read, has the label."""
    folder = tmp_path / "xnli"
    (folder / "translate-train").mkdir(parents=True)
    signs = {"entailment": "yes yes yes", "neutral": "maybe", "contradiction": "no no"}
    english = [f"I see .\t{signs[CLASSES[k % 3]]}\t{CLASSES[k % 3]}" for k in range(60)]
    german = [f"Ich sehe .\tEs ist so\t{CLASSES[k % 3]}" for k in range(60)]
    for name, lines in (("en", english), ("de", german)):
        place = folder if name == "en" else folder / "translate-train"
        (place / f"train-{name}.tsv").write_text("\n".join(lines), encoding="utf-8")
        (folder / f"dev-{name}.tsv").write_text("\n".join(lines[:30]), encoding="utf-8")
    settings = TaskSettings(
        setting="translate-train-all",
        plug=plug,
        epochs=8,
        batch_tokens=256,
        learning_rate=2e-3,
        head_learning_rate=2e-3,
    )
    (outcome,) = measure(
        copy_veco(veco), tmp_path, task="xnli", languages=["de"], settings=settings, seed=0
    )
    assert outcome.metrics["accuracy"] > 90 if is_learned else outcome.metrics["accuracy"] < 50
