"""Every bundled recipe, made tiny, from real sentences to a model, by the command line."""

from __future__ import annotations

import json
import lzma
import os
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from calque.cli import run
from calque.models.loading import build_model
from calque.training.optimizer import freeze
from calque.training.recipe_io import bundled_recipes, load_recipe
from calque.training.telemetry import read_metrics

DATA = Path(__file__).parents[1] / "data"
DEMO = Path(str(resources.files("calque"))) / "data" / "demo.tsv"

TINY = {
    "model.layers": 2,
    "model.hidden": 48,
    "model.heads": 2,
    "model.intermediate": 96,
    "model.positions": 128,
    "tokenizer.vocab_size": 600,
    "data.max_length": 96,
    "data.validation_examples": 5,
    "objectives.0.batch_tokens": 1536,
    "optimizer.learning_rate": "4e-3",
    "schedule.steps": 24,
    "schedule.warmup": 4,
    "checkpoints.every": 20,
    "checkpoints.validate_every": 12,
    "checkpoints.validation_batches": 1,
    "telemetry.every": 4,
}
PAIRED = {"objectives.1.batch_tokens": 1536}
CHANGES: dict[str, dict[str, Any]] = {
    "xlm": {},
    "xlm-tlm": PAIRED,
    "calque-mini": PAIRED | {"data.hold_out": DEMO},
    "calque-base-mono": {"data.hold_out": DEMO, "tokenizer.path": "null"},
    "calque-mini-align": PAIRED
    | {
        "data.hold_out": DEMO,
        "model.start": "null",
        "objectives.0.layer": 1,
        "objectives.1.layer": 2,
        "objectives.1.weight": 0.1,
        "objectives.2.batch_tokens": 1536,
        "objectives.2.weight": 3,  # MLM is learned slowly beside two other losses
        "optimizer.learning_rate": "6e-3",
    },
    # Its teacher is tested below: here the vocabulary is new.
    "calque-mini-refine": PAIRED
    | {
        "model.start": "null",
        "objectives.0.layer": 1,
        "objectives.1.layer": 2,
        "objectives.1.queue": 0,
        "objectives.1.teacher": "null",
        "objectives.1.weight": 0.1,
        "optimizer.learning_rate": "6e-3",
    },
    # Only word embeddings are trained, here almost all of them.
    "add-languages": PAIRED
    | {
        "model.start": "null",
        "freeze_rows": 5,
        "objectives.0.layer": 2,
        "objectives.0.queue": 0,
        "objectives.1.layer": 1,
        "optimizer.learning_rate": "3e-2",
    },
    "xlm-align": PAIRED
    | {
        "model.start": "null",
        "engine.accumulation": 1,
        "objectives.0.weight": 3,  # MLM is learned slowly beside two other losses
        "optimizer.learning_rate": "6e-3",
    },
    "adapt": {"model.start": "null"},
    "l2": {"model.start": "null", "objectives.0.hidden_weight": 0.1},
    # The regularizer keeps the weights near their start, which is random here.
    "weak": {"model.start": "null", "objectives.0.parameter_weight": 0.01},
    "strong": {"model.start": "null", "objectives.0.parameter_weight": 0.01},
    "sentence-contrastive": PAIRED
    | {
        "model.start": "null",
        "objectives.0.weight": 0.03,  # TLM is learned slowly beside it
        "optimizer.learning_rate": "6e-3",
    },
    "linear-map": {"model.start": "null"},
    "mlm-only": {"model.start": "null", "optimizer.learning_rate": "6e-3"},
    "veco": PAIRED
    | {
        "model.start": "null",
        "objectives.2.batch_tokens": 1536,
        "freeze_steps": 2,
        "optimizer.learning_rate": "8e-3",
    },
    # MLM is learned slowly beside it.
    "x2s-dcca": PAIRED
    | {
        "model.start": "null",
        "objectives.1.weight": 0.03,
        "optimizer.learning_rate": "6e-3",
    },
    # Vectors of length 1 are so near to 0 that the loss has fallen before it is first logged.
    "x2s-mse": PAIRED
    | {
        "model.start": "null",
        "objectives.1.unit": "false",
        "optimizer.learning_rate": "8e-3",
    },
    "meta-pretrain": {"data.sources.0.path": "text/de.txt.xz"},
    "metaxlm": {"model.start": "null", "optimizer.learning_rate": "6e-3"},
    "metaxlm-dict": {"model.start": "null", "optimizer.learning_rate": "6e-3"},
    "metaxlm-frozen": {"model.start": "null", "optimizer.learning_rate": "8e-3"},
    "translate": {
        "model.start": "null",
        "model.decoder.layers": 1,
        "optimizer.learning_rate": "8e-3",
    },
    "mbart": PAIRED
    | {
        "model.decoder.languages": "[en, de, ja]",
        "optimizer.learning_rate": "8e-3",
    },
    "xlm-kd": {
        "tokenizer.path": "null",
        "objectives.0.teacher": "teacher",
        "objectives.0.languages": "[de]",
        "optimizer.learning_rate": "6e-3",
    },
}
ONE_OBJECTIVE = ("xlm", "adapt", "l2", "weak", "strong", "linear-map", "mlm-only", "xlm-kd")
ONE_OBJECTIVE += ("meta-pretrain", "metaxlm", "metaxlm-dict", "metaxlm-frozen")
ONE_OBJECTIVE += ("translate", "calque-base-mono")
# Encoder–decoders, whose encoders are in a folder inside.
GENERATING = ("translate", "mbart")
THREE_OBJECTIVES = ("calque-mini-align", "veco")


def options(changes: dict[str, Any]) -> list[str]:
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module")
def texts(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the recipes describe it.

    bitext/en-de.tsv.xz, text/de.txt.xz, vectors/de.vec, and linked/en-de.text beside
    linked/en-de.links, where words at the same positions are linked; linked.tsv and linked.links
    likewise; and a teacher with another vocabulary.
    """
    texts = tmp_path_factory.mktemp("texts")
    (texts / "teacher").symlink_to(tiny_folder)
    for folder in ("bitext", "linked", "text", "vectors"):
        (texts / folder).mkdir()
    for file in sorted(DATA.glob("en-*.tsv")):
        lines = file.read_text(encoding="utf-8").splitlines()
        with lzma.open(texts / "bitext" / f"{file.name}.xz", "wt", encoding="utf-8") as out:
            out.writelines(f"{line}\n" for line in lines)
        language = file.stem.partition("-")[2]
        (texts / "linked.tsv").write_text("".join(f"{line}\n" for line in lines), "utf-8")
        with lzma.open(texts / "text" / f"{language}.txt.xz", "wt", encoding="utf-8") as out:
            out.writelines(line.split("\t")[1] + "\n" for line in lines)
        write_vectors(texts / "vectors" / f"{language}.vec", lines)
        pairs = [line.split("\t")[:2] for line in lines]
        links = (range(min(len(src.split()), len(tgt.split()))) for src, tgt in pairs)
        beside = texts / "linked" / file.stem
        beside.with_suffix(".text").write_text(
            "".join(f"{src} ||| {tgt}\n" for src, tgt in pairs), encoding="utf-8"
        )
        beside.with_suffix(".links").write_text(
            "".join(" ".join(f"{k}-{k}" for k in places) + "\n" for places in links)
        )
        shutil.copy(beside.with_suffix(".links"), texts / "linked.links")
    return texts


@pytest.fixture(autouse=True)
def _folder_with_text(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with these texts.

    Text is prepared in this process: starting others takes longer than the work.
    """
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    for path in texts.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


def write_vectors(path: Path, lines: list[str]) -> None:
    """Write a vector far from 0 for every word; text without spaces has characters as words."""
    sentences = [line.split("\t")[1] for line in lines]
    split = list if path.stem == "ja" else str.split
    words = list(dict.fromkeys(word for text in sentences for word in split(text)))
    rows = np.random.default_rng(0).normal(2, 1, size=(len(words), 48))
    lines = [
        " ".join([word, *map("{:.3f}".format, row)]) for word, row in zip(words, rows, strict=True)
    ]
    path.write_text("".join(f"{line}\n" for line in [f"{len(words)} 48", *lines]), "utf-8")


def read_losses(folder: str) -> dict[str, list[float]]:
    rows = [row for row in read_metrics(Path(folder) / "metrics.jsonl") if row["kind"] == "train"]
    names = [name for name in rows[0] if name.startswith("loss/")]
    return {name: [row[name] for row in rows] for name in names}


def assert_learns(folder: str, n_objectives: int) -> None:
    losses = {name: values for name, values in read_losses(folder).items() if name.count("/") == 1}
    assert len(losses) == n_objectives
    for name, values in losses.items():
        assert len(values) == 6
        assert values[-1] < values[0] - 0.5, name


def test_every_bundled_recipe_is_tested() -> None:
    assert CHANGES.keys() == bundled_recipes().keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_recipe_trains_a_model_from_text(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    assert run(["train", name, *options(TINY | CHANGES[name])]) == 0
    stderr = capfd.readouterr().err
    assert "training a tokenizer of 600 entries" in stderr
    assert f"runs/{name}/model: model after 24 steps" in stderr
    if "denoising" not in (Path("runs") / name / "recipe.yaml").read_text():
        assert "warning" not in stderr
    n_objectives = 3 if name in THREE_OBJECTIVES else 1 if name in ONE_OBJECTIVE else 2
    assert_learns(f"runs/{name}", n_objectives)
    model, tokenizer = f"runs/{name}/model", AutoTokenizer.from_pretrained(f"runs/{name}/model")
    model += "/encoder" if name in GENERATING else ""
    loaded, found = AutoModelForMaskedLM.from_pretrained(model, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    dtype = "float16" if name.startswith("calque-mini") else "float32"
    assert json.loads(Path(model, "config.json").read_text())["dtype"] == dtype
    encoded = tokenizer("Das Gerücht könnte wahr sein.", return_tensors="pt")
    assert loaded(**encoded).logits.isfinite().all()
    AutoModel.from_pretrained(model)
    Path("lines.txt").write_text("Das Gerücht könnte wahr sein.\nHe walked quietly.\n")
    assert run(["embed", "lines.txt", "-o", "v.npy", "--model", model, "--device", "cpu"]) == 0
    assert np.load("v.npy").shape == (2, 48)


@pytest.mark.slow
def test_a_model_is_refined_with_itself_as_the_teacher(capfd: pytest.CaptureFixture[str]) -> None:
    """Sentences stay near those of the teacher, which is a folder with the same vocabulary."""
    changes = TINY | CHANGES["calque-mini-refine"]
    changes |= {"model.start": "teacher", "objectives.1.teacher": "teacher"}
    changes |= {"objectives.1.queue": 64, "objectives.1.weight": 1.0, "schedule.steps": 8}
    changes |= {"telemetry.every": 1, "optimizer.learning_rate": "1e-3"}
    assert run(["train", "calque-mini-refine", *options(changes)]) == 0
    losses = read_losses("runs/calque-mini-refine")
    # English sentences are compared with themselves at first, which is easy; others are not.
    assert losses["loss/sentence_contrastive/accuracy"][0] > 0.45
    assert losses["loss/sentence_contrastive"][-1] < losses["loss/sentence_contrastive"][1]
    other = options(changes | {"model.start": "null"})
    assert run(["train", "calque-mini-refine", "-o", "other", *other]) == 2
    assert "the teacher of sentence_contrastive has another vocabulary" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("start", ["veco", "mbart"])
def test_pretrained_models_are_trained_to_translate(
    start: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """From sentences over VECO or its mBART control to a translator, and to translated lines."""
    from transformers import EncoderDecoderModel

    short = TINY | {"schedule.steps": 4, "schedule.warmup": 1}
    control = {
        "objectives.0.target": "masked",
        "objectives.0.rate": 0.15,
        "objectives.1.mask_rate": 0.25,
    }
    changes = CHANGES[start] | ({"freeze_steps": 2} if start == "veco" else control)
    prepare = ["prepare", start, "-o", "prepared", "--workers", "1"]
    assert run([*prepare, *options(short | changes)]) == 0
    assert run(["train", start, "--prepared", "prepared", *options(short | changes)]) == 0
    own = {
        "model.start": f"runs/{start}/model",
        "model.decoder.tie": "all" if start == "veco" else "embeddings",
        "data.leave_out_languages": "[ja]",
    }
    more = options(short | own)
    assert run(["train", "translate", "--prepared", "prepared", *more]) == 0
    model = "runs/translate/model"
    _, found = EncoderDecoderModel.from_pretrained(model, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    lines = [line.split("\t")[:2] for line in Path(DATA / "en-de.tsv").read_text().splitlines()]
    Path("test.en").write_text("".join(f"{src}\n" for src, _ in lines[:3]) + "\n")
    Path("test.de").write_text("".join(f"{tgt}\n" for _, tgt in lines[:3]) + "\n")
    capfd.readouterr()
    ask = ["translate", model, "test.en", "-o", "out.de", "--score", "test.de", "--device", "cpu"]
    assert run([*ask, "--beams", "2"]) == 0
    assert len(Path("out.de").read_text().split("\n")) == 5
    stderr = capfd.readouterr().err
    assert "BLEU " in stderr and "chrF " in stderr and "out.de: 4 lines" in stderr
    assert "1 empty lines" in stderr


@pytest.mark.slow
def test_xlm_align_starts_from_an_aligned_model(capfd: pytest.CaptureFixture[str]) -> None:
    """From the embedded model there is no warning, and its own tokenizer is used."""
    changes = {
        "model.start": "calque-mini",
        "data.max_length": 96,
        "data.validation_examples": 0,
        "objectives.0.batch_tokens": 192,
        "objectives.1.batch_tokens": 1152,
        "objectives.1.positions": "reset",  # as the model was trained
        "schedule.steps": 3,
        "schedule.warmup": 1,
        "engine.accumulation": 1,
        "telemetry.every": 1,
    }
    assert run(["train", "xlm-align", "-o", "aligned", *options(changes)]) == 0
    stderr = capfd.readouterr().err
    assert "warning" not in stderr
    assert "training a tokenizer" not in stderr
    losses = read_losses("aligned")
    assert min(losses["loss/denoising_alignment/labelled"]) > 0.5
    assert max(losses["loss/denoising_alignment/tlm"]) < 4
    content = json.loads(Path("aligned/model/config.json").read_text())
    assert content["num_hidden_layers"] == 8


FROM_DEBERTA: dict[str, dict[str, Any]] = {
    "xlm-align": PAIRED | {"engine.accumulation": 1},
    "weak": {},
    "linear-map": {},
    "x2s-dcca": {},
    "xlm-kd": {
        "tokenizer.path": "null",
        "objectives.0.teacher": "deberta",
        "objectives.0.languages": "[de]",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_DEBERTA)
def test_recipes_start_from_deberta(
    name: str, deberta_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Self-labels, given links, maps, vectors and a teacher: what reads pairs and layers."""
    from transformers import AutoModelForMaskedLM

    Path("deberta").symlink_to(deberta_folder)
    kept = ("data.", "objectives.", "optimizer.", "checkpoints.", "telemetry.")
    changes = {key: value for key, value in TINY.items() if key.startswith(kept)}
    changes |= {"schedule.steps": 4, "schedule.warmup": 1, "model.start": "deberta"}
    assert run(["train", name, *options(changes | FROM_DEBERTA[name])]) == 0
    stderr = capfd.readouterr().err
    assert "training a tokenizer" not in stderr
    for values in read_losses(f"runs/{name}").values():
        assert np.isfinite(values).all()
    folder = f"runs/{name}/model"
    model, found = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values())
    before = AutoModelForMaskedLM.from_pretrained(deberta_folder).state_dict()
    key = "deberta.encoder.rel_embeddings.weight"
    assert torch.equal(model.state_dict()[key], before[key]) == (name == "linear-map")


@pytest.mark.slow
def test_linear_maps_are_solved_in_one_pass(capfd: pytest.CaptureFixture[str]) -> None:
    """The same recipe with another solver; the model is used with and without its maps."""
    changes = TINY | CHANGES["linear-map"] | {"objectives.0.solver": "procrustes"}
    assert run(["train", "linear-map", "-o", "solved", *options(changes)]) == 0
    stderr = capfd.readouterr().err
    assert "training a tokenizer of 600 entries" in stderr
    assert "de: " in stderr and "ja: " in stderr and " links, mean ‖s − tW‖² " in stderr
    Path("lines.txt").write_text("Das Gerücht könnte wahr sein.\n")
    embed = ["embed", "lines.txt", "--model", "solved/model", "--device", "cpu", "--layer", "1"]
    assert run([*embed, "-o", "raw.npy"]) == 0
    assert run([*embed, "-o", "mapped.npy", "--language", "de"]) == 0
    raw, mapped = np.load("raw.npy"), np.load("mapped.npy")
    assert not np.allclose(raw, mapped, atol=1e-2)
    assert np.linalg.norm(raw) == pytest.approx(np.linalg.norm(mapped), rel=1e-5)  # a rotation


@pytest.mark.slow
def test_monolingual_model_becomes_cross_lingual(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """All phases of MetaXLM: one language, a new vocabulary, many languages; and distillation."""
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    alone = options(TINY | CHANGES["meta-pretrain"])
    assert run(["train", "meta-pretrain", *alone]) == 0
    assert run(["prepare", "xlm", "-o", "prepared", "--workers", "1", *options(TINY)]) == 0
    Path("de-ja.txt").write_text("ist は\nnicht ない\nauch も\n", encoding="utf-8")
    mono = "runs/meta-pretrain/model"
    grow = ["grow", mono, "--tokenizer", "prepared/tokenizer", "--language", "de"]
    assert run([*grow, "-o", "start"]) == 0
    assert run([*grow, "--dictionary", "de-ja.txt", "-o", "start-dict"]) == 0
    capfd.readouterr()
    short = TINY | {"schedule.steps": 8, "telemetry.every": 2}
    for name in ("metaxlm", "metaxlm-dict", "metaxlm-frozen"):
        assert run(["train", name, "--prepared", "prepared", *options(short)]) == 0
    teacher_labeled = {"tokenizer.path": "prepared/tokenizer", "objectives.0.teacher": mono}
    changes = options(short | teacher_labeled | {"objectives.0.languages": "[de]"})
    assert run(["train", "xlm-kd", "--prepared", "prepared", *changes]) == 0
    assert "warning" not in capfd.readouterr().err
    before = load_file(f"{mono}/model.safetensors")
    n_pieces = len(AutoTokenizer.from_pretrained("prepared/tokenizer"))
    for name in ("metaxlm", "metaxlm-dict", "metaxlm-frozen"):
        after = load_file(f"runs/{name}/model/model.safetensors")
        assert after.keys() == before.keys()
        for weight, value in after.items():
            if ".encoder.layer." in weight:
                assert torch.equal(value, before[weight]) == (name == "metaxlm-frozen"), weight
        content = json.loads(Path(f"runs/{name}/model/config.json").read_text())
        assert (content["model_type"], content["vocab_size"]) == ("roberta", n_pieces)
        assert read_losses(f"runs/{name}")["loss/masked_lm"][-1] < np.log(n_pieces)
    losses = read_losses("runs/xlm-kd")
    assert min(losses["loss/distillation/share"]) > 0.05
    assert max(losses["loss/distillation/unread"]) == 0


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta", "bert"])
def test_frozen_body_is_all_layers_and_nothing_else(kind: str) -> None:
    from transformers import AutoConfig

    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 20}
    model = build_model(AutoConfig.for_model(kind, intermediate_size=8, **sizes))
    whole = torch.nn.ModuleDict({"encoder": torch.nn.ModuleDict({"model": model})})
    assert freeze(whole, load_recipe("metaxlm-frozen").freeze) > 0
    for name, weight in model.named_parameters():
        assert weight.requires_grad == (".encoder.layer." not in name), name
    learning = {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad}
    assert "embeddings" in learning and len(learning) > 1


def test_recipes_of_one_paper_differ_in_their_point_only() -> None:
    """Runs of metaxlm and its variants are compared, so everything else must be the same."""
    plain = load_recipe("metaxlm").model_dump()
    apart = {
        "metaxlm-dict": {"model"},
        "metaxlm-frozen": {"freeze"},
        "xlm-kd": {"model", "tokenizer", "objectives"},
    }
    for name, sections in apart.items():
        other = load_recipe(name).model_dump()
        assert {key for key in plain if plain[key] != other[key]} == {"name", *sections}
    distilled, plain_mlm = (
        load_recipe("xlm-kd").objectives[0],
        load_recipe("metaxlm").objectives[0],
    )
    for key in ("probability", "batch_tokens", "batch_examples", "weight"):
        assert getattr(distilled, key) == getattr(plain_mlm, key)
    assert plain["data"]["alpha"] == 0.7
    assert plain["optimizer"] == {
        "learning_rate": 1e-4,
        "betas": [0.9, 0.98],
        "epsilon": 1e-6,
        "weight_decay": 0.01,
        "clip": 1.0,
    }
    assert plain["schedule"] == {"kind": "linear", "steps": 200_000, "warmup": 10_000}


def test_text_is_prepared_once_for_many_runs(capfd: pytest.CaptureFixture[str]) -> None:
    changes = options(TINY | PAIRED | {"schedule.steps": 8})
    assert run(["prepare", "xlm-tlm", "-o", "prepared", "--workers", "2", *changes]) == 0
    first = capfd.readouterr().err
    assert "prepared: 2 corpora, 53 examples, " in first
    before = {path: path.stat().st_mtime_ns for path in Path("prepared").rglob("*.npy")}
    assert run(["prepare", "xlm-tlm", "-o", "prepared", *changes]) == 0
    again = capfd.readouterr().err
    assert "training a tokenizer" in first
    assert "training a tokenizer" not in again
    assert before == {path: path.stat().st_mtime_ns for path in Path("prepared").rglob("*.npy")}
    for folder in ("a", "b"):
        command = ["train", "xlm-tlm", "-o", folder, "--prepared", "prepared", *changes]
        assert run(command) == 0
        assert not Path(folder, "text").exists()
    assert read_losses("a") == read_losses("b")


def test_another_vocabulary_size_trains_another_tokenizer(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for size in (600, 500):
        changes = options(TINY | PAIRED | {"tokenizer.vocab_size": size})
        assert run(["prepare", "xlm-tlm", "-o", "prepared", "--workers", "1", *changes]) == 0
        assert f"training a tokenizer of {size} entries" in capfd.readouterr().err
        content = json.loads(Path("prepared/tokenizer/tokenizer.json").read_text("utf-8"))
        assert len(content["model"]["vocab"]) <= size


def test_paths_start_from_the_recipe_or_the_working_directory(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start, a tokenizer and text beside the recipe; more text in the working directory."""
    beside, here = tmp_path / "recipes", tmp_path / "here"
    here.mkdir()
    (tmp_path / "bitext").rename(here / "bitext")
    beside.mkdir()
    (beside / "start").symlink_to(tiny_folder)
    (beside / "de.txt").write_text("Das Gerücht könnte wahr sein.\n" * 3, encoding="utf-8")
    (beside / "mine.yaml").write_text(
        "name: mine\n"
        "model: {start: start}\n"
        "tokenizer: {path: start}\n"
        "data:\n"
        "  sources:\n"
        "    - {path: de.txt, kind: text}\n"
        "    - {path: 'bitext/*', kind: bitext}\n"
        "objectives: [{kind: masked_lm, batch_tokens: 512}]\n"
        "schedule: {steps: 2, warmup: 0}\n"
    )
    monkeypatch.chdir(here)
    assert run(["train", "../recipes/mine.yaml", "-o", "run"]) == 0
    corpora = json.loads(Path("run/text/prepared.json").read_text())["corpora"]
    assert [name.partition(".")[0] for name in corpora] == ["de", "en-de", "en-ja"]
    assert json.loads(Path("run/model/config.json").read_text())["num_hidden_layers"] == 4
    # From elsewhere, and without its sources, a run is resumed with the recipe that it wrote.
    monkeypatch.chdir(tmp_path)
    (here / "bitext").rename(here / "gone")
    assert run(["train", "here/run/recipe.yaml", "-o", "here/run", "--resume"]) == 0


@pytest.mark.parametrize("start", [True, False])
def test_too_short_model_is_an_error_before_text_is_prepared(
    start: bool, tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"model.start": str(tiny_folder)} if start else {"model.positions": 128}
    settings = options(TINY | PAIRED | changes | {"data.max_length": 129})
    assert run(["train", "xlm-tlm", "-o", "run", *settings]) == 2
    assert "data.max_length=129 exceeds the model's 128" in capfd.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nope"], "nope: no such recipe (pass a YAML file or one of adapt, add-lang"),
        (
            ["train", "xlm", "--set", "schedule.stepz=1"],
            "schedule.stepz: unknown key; did you mean",
        ),
        (
            ["train", "xlm", "--resume"],
            "runs/xlm: there is no checkpoint to resume from",
        ),
        (["train", "xlm", "--prepared", "bitext"], "bitext: this is not a folder of prepared text"),
        (["train", "xlm", "--set", "data.sources.0.path=no/*.xz"], "no/*.xz: no such file"),
        (["train", "xlm", "--set", "data.sources=[]"], "the recipe has no text"),
        (
            ["train", "xlm", "--set", "schedule.steps=100"],
            "warmup=10000 exceeds steps=100: set schedule.warmup, too",
        ),
        (
            ["train", "calque-mini-align", "--set", "data.sources.0.links=linked/en-de.links"],
            "linked/en-de.links: there are 1 files of links for 2 bitexts (correct",
        ),
        (
            ["prepare", "xlm", "-o", "x", "--set", "model.start=./no/x"],
            "./no/x: there is no such folder",
        ),
    ],
)
def test_errors_are_one_line_and_exit_2(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("calque: error: ")
    assert message in line
    assert not Path("runs/xlm/model").exists()


def test_folder_with_a_run_is_an_error_before_any_work(capfd: pytest.CaptureFixture[str]) -> None:
    changes = options(TINY | {"schedule.steps": 2, "schedule.warmup": 0})
    assert run(["train", "xlm", *changes]) == 0
    capfd.readouterr()
    assert run(["train", "xlm", *changes]) == 2
    assert "runs/xlm: the folder contains a run (use --resume or" in capfd.readouterr().err
    assert run(["train", "xlm", *changes, "--resume", "--set", "seed=5"]) == 2
    assert "written with another value of: recipe" in capfd.readouterr().err
    assert run(["train", "xlm", *changes, "--resume"]) == 0


@pytest.mark.slow
def test_text_is_prepared_in_one_process_and_trained_on_in_all(fork_server: Any) -> None:
    changes = options(TINY | PAIRED | {"schedule.steps": 4, "telemetry.every": 1})
    script = Path("main.py").absolute()
    script.write_text("import os; os.cpu_count = lambda: 1\nfrom calque.cli import main; main()\n")
    done = fork_server.run(script, "train", "xlm-tlm", "-o", "two", *changes)
    assert done.returncode == 0, done.stderr
    for line in ("training a tokenizer", "two/model: model after 4 steps", "step 4/4 "):
        assert done.stderr.count(line) == 1, done.stderr
    assert [row["step"] for row in read_metrics(Path("two/metrics.jsonl"))][:4] == [1, 2, 3, 4]
