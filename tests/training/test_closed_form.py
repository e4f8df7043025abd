"""Linear maps: exact in one pass, the same for any number of processes, or learned by steps."""

from __future__ import annotations

import json
import logging
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import load_file
from tests.training.run_helpers import assert_same_run, interrupt_at

import calque
from calque.cli import run
from calque.errors import InputError
from calque.models.language_maps import load_maps
from calque.tokens.streams import StreamPosition, load_batches
from calque.training import closed_form
from calque.training.closed_form import MapFit, OnePass, fit_maps, is_closed_form
from calque.training.loop import train
from calque.training.recipe import Recipe
from calque.training.recipe_io import load_recipe
from calque.training.run import Run
from calque.training.telemetry import read_metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeRecipe = Callable[..., Recipe]
TrainInTwo = Callable[..., subprocess.CompletedProcess[str]]


# Layers of 8 × 16, so that there are many more links than dimensions.
CHANGES = (
    "model.hidden=16",
    "model.intermediate=32",
    "objectives=[{kind: linear_map, batch_tokens: 256, batch_examples: 6}]",
    "optimizer.weight_decay=0.0",
    "optimizer.learning_rate=0.01",
    "freeze=['encoder.*']",
)


@pytest.fixture(scope="module")
def linked_text(
    demo_rows: list[tuple[str, str, str]],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """German in two corpora, one of them reversed, and French; words are linked in order."""
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    files, folder = tmp_path_factory.mktemp("linked"), tmp_path_factory.mktemp("text")
    sources = []
    for name, language, rows in (
        ("en-de", "de", slice(None, 20)),
        ("de-en", "de", slice(20, None)),
        ("en-fr", "fr", slice(None)),
    ):
        chosen = [row[1:] for row in demo_rows if row[0] == language][rows]
        pairs = [row[::-1] if name == "de-en" else row for row in chosen]
        text, links = files / f"{name}.text", files / f"{name}.links"
        text.write_text("".join(f"{src} ||| {tgt}\n" for src, tgt in pairs), encoding="utf-8")
        lines = [range(min(len(src.split()), len(tgt.split()))) for src, tgt in pairs]
        links.write_text("".join(" ".join(f"{k}-{k}" for k in line) + "\n" for line in lines))
        languages = tuple(name.split("-"))
        sources.append(TextSource((text,), languages, None, (), 1.0, links))
    prepare_corpora(sources, tiny_tokenizer, folder, rules=CleaningRules())
    return folder


@pytest.fixture(scope="module")
def recipe(tiny_recipe: MakeRecipe) -> Callable[..., Recipe]:
    def make(solver: str, *changes: str) -> Recipe:
        return tiny_recipe(*CHANGES, f"objectives.0.solver={solver}", *changes)

    return make


@pytest.fixture(scope="module")
def procrustes(
    recipe: MakeRecipe, linked_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("fits") / "procrustes"
    result = train(recipe("procrustes"), output=folder, prepared=linked_text)
    assert (result.model, result.best_score) == (folder / "model", None)
    assert result.step > 3
    return folder


# Every example once


def count_examples(streams: list[Any]) -> Counter[tuple[int, ...]]:
    """Count the examples of passes whose batches are lists of examples."""
    found: Counter[tuple[int, ...]] = Counter()
    for batches in streams:
        for _, sides in batches:
            for side in sides[:2]:
                bounds = np.cumsum(side.lengths)[:-1]
                found.update(tuple(ids.tolist()) for ids in np.split(side.ids, bounds))
    return found


@pytest.mark.parametrize(("n_ranks", "n_workers"), [(1, 0), (2, 0), (3, 0), (2, 2)])
def test_every_example_is_read_exactly_once(
    n_ranks: int,
    n_workers: int,
    recipe: MakeRecipe,
    linked_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closed_form, "BLOCK_SIZE", 7)  # several blocks, some of them not full
    pair = MapFit(recipe("procrustes", "data.alpha=0.1"), linked_text, tmp_path).stream
    for stream in (pair.training, pair.validation):
        assert stream is not None
        stream.collate = lambda sides, generator: sides
        everything = OnePass(stream)
        loaders = [
            load_batches(everything, rank=rank, n_ranks=n_ranks, n_workers=n_workers)
            for rank in range(n_ranks)
        ]
        expected: Counter[tuple[int, ...]] = Counter()
        for corpus in stream.corpora:
            for side in corpus.sides:
                expected.update(
                    tuple(side.gather(corpus.index[k : k + 1]).ids.tolist())
                    for k in range(len(corpus))
                )
        assert count_examples(loaders) == expected
        numbers = [
            place.count for place, _ in everything.iterate(StreamPosition(), lambda number: True)
        ]
        assert numbers == list(range(1, everything.count_batches() + 1))
    n_usable = sum(len(corpus) for corpus in pair.training.corpora)
    assert n_usable == pair.n_examples


# Exact maps


def read_all_links(folder: Path, text: Path, layer: int, language: str) -> tuple[Any, Any]:
    """English and other words of all linked training pairs, one sentence at a time."""
    from transformers import AutoModelForMaskedLM

    from calque.tokens.linked import unpack_links

    model = AutoModelForMaskedLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    recipe = load_recipe(folder / "recipe.yaml")
    fit = MapFit(recipe, text, folder / "other")
    rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for corpus in fit.stream.training.corpora:
        if language not in corpus.name:
            continue
        for number in corpus.index:
            arrays = [store.gather(np.array([number])).ids for store in corpus.stores]
            i, j, levels = unpack_links(arrays[4])
            assert (levels == 255).all()
            for side, (words, chosen) in enumerate(((arrays[2], i), (arrays[3], j))):
                ids = torch.tensor([[0, *arrays[side].tolist(), 2]])
                with torch.no_grad():
                    states = model(ids, output_hidden_states=True).hidden_states[layer][0, 1:-1]
                first = np.cumsum(words) - words
                to = side if corpus.name.startswith("en-") else 1 - side
                rows[to].append(states.numpy()[first[chosen]])
    src, tgt = (np.concatenate(part).astype(np.float64) for part in rows)
    return src, tgt


@pytest.mark.parametrize(("layer", "language"), [(0, "de"), (2, "de"), (1, "fr")])
def test_procrustes_equals_scipy_on_all_links(
    layer: int, language: str, procrustes: Path, linked_text: Path
) -> None:
    src, tgt = read_all_links(procrustes, linked_text, layer, language)
    expected, _ = scipy.linalg.orthogonal_procrustes(tgt, src)
    maps = load_maps(procrustes / "model", 16, 2)
    found = maps.maps[maps.languages.index(language), layer].numpy()
    # Untrained layer norms leave one direction empty, where SciPy's rotation is arbitrary.
    left_out = np.ones((16, 16)) / 16
    assert np.abs(src @ left_out).max() < 1e-5
    np.testing.assert_allclose(found - left_out @ found, expected - left_out @ expected, atol=2e-4)
    np.testing.assert_allclose(left_out @ found, left_out, atol=2e-4)
    about = maps.about
    assert about["links"][language] == len(src)
    losses = about["training"][language]
    assert losses["mapped"][layer] == pytest.approx(
        np.square(src - tgt @ expected).sum(axis=1).mean(), rel=1e-4
    )
    assert losses["unmapped"][layer] == pytest.approx(
        np.square(src - tgt).sum(axis=1).mean(), rel=1e-4
    )


def test_least_squares_equals_numpy_on_all_links(
    recipe: MakeRecipe, linked_text: Path, tmp_path: Path, procrustes: Path
) -> None:
    fit_maps(recipe("least_squares"), linked_text, tmp_path)
    src, tgt = read_all_links(tmp_path, linked_text, 2, "de")
    expected, *_ = np.linalg.lstsq(tgt, src, rcond=1e-6)
    maps = load_maps(tmp_path / "model", 16, 2)
    np.testing.assert_allclose(maps.maps[0, 2].numpy(), expected, atol=1e-4)
    orthogonal = load_maps(procrustes / "model", 16, 2).about["training"]
    for language, losses in maps.about["training"].items():
        for free, bound in zip(losses["mapped"], orthogonal[language]["mapped"], strict=True):
            assert free < bound


def test_encoder_is_unchanged(
    recipe: MakeRecipe, linked_text: Path, procrustes: Path, tmp_path: Path
) -> None:
    before = MapFit(recipe("procrustes"), linked_text, tmp_path).encoder.model.state_dict()
    after = load_file(procrustes / "model" / "model.safetensors")
    assert len(after) > 20
    assert [name for name, value in after.items() if not torch.equal(before[name], value)] == []
    from transformers import AutoModelForMaskedLM

    _, found = AutoModelForMaskedLM.from_pretrained(procrustes / "model", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]


def test_losses_are_recorded_and_stored(procrustes: Path) -> None:
    maps = calque.load(procrustes / "model", "cpu", maps=True).maps
    assert maps is not None
    assert (maps.languages, maps.layers, maps.pivot) == (("de", "fr"), (0, 1, 2), "en")
    gram = maps.maps @ maps.maps.mT
    torch.testing.assert_close(gram, torch.eye(16).expand_as(gram), atol=1e-5, rtol=0)
    *_, row = read_metrics(procrustes / "metrics.jsonl")
    assert row["kind"] == "validation"
    losses_by_language = maps.about["validation"]
    for name, key in (("mapped", "loss/linear_map"), ("unmapped", "loss/linear_map/unmapped")):
        values = [
            value
            for losses in losses_by_language.values()
            for value in losses[name]
            if value is not None
        ]
        assert row[key] == pytest.approx(np.mean(values), rel=1e-4)
    assert (procrustes / "recipe.yaml").exists()
    assert "links" in read_metrics(procrustes / "metrics.jsonl")[0]


def test_validation_text_is_optional(
    recipe: MakeRecipe, linked_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = ("data.validation_examples=0", "objectives.0.layers=[1]", "objectives.0.words=mean")
    with caplog.at_level(logging.INFO, "calque"):
        train(recipe("procrustes", *changes), output=tmp_path, prepared=linked_text)
    about = load_maps(tmp_path / "model", 16, 2).about
    assert "validation" not in about
    assert about["words"] == "mean"
    assert sum(text.endswith(" on the training text") for text in caplog.messages) == 2


def test_impossible_recipes_are_errors(
    recipe: MakeRecipe, tiny_recipe: MakeRecipe, linked_text: Path, tiny_text: Path, tmp_path: Path
) -> None:
    mixed = recipe(
        "procrustes", "objectives=[{kind: masked_lm}, {kind: linear_map, solver: procrustes}]"
    )
    with pytest.raises(InputError, match="cannot be combined with other objectives"):
        is_closed_form(mixed)
    with pytest.raises(InputError, match="cannot be combined with gradient steps"):
        Run(recipe("procrustes"), linked_text, tmp_path)
    with pytest.raises(InputError, match="no linked bitext"):
        fit_maps(recipe("procrustes"), tiny_text, tmp_path)
    assert not (tmp_path / "model").exists()
    (tmp_path / "model").mkdir()
    with pytest.raises(InputError, match="contains a model"):
        fit_maps(recipe("procrustes"), linked_text, tmp_path)


def test_language_without_links_is_an_error(
    recipe: MakeRecipe, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    sources = []
    for language, links in (("de", "0-0 1-1\n"), ("fr", "\n")):
        text, beside = tmp_path / f"{language}.text", tmp_path / f"{language}.links"
        text.write_text("".join(f"the house {k} ||| das Haus {k}\n" for k in range(9)))
        beside.write_text(9 * links)
        sources.append(TextSource((text,), ("en", language), links=beside))
    prepare_corpora(sources, tiny_tokenizer, tmp_path / "text", rules=CleaningRules())
    with pytest.raises(InputError, match="fr has no links"):
        fit_maps(recipe("procrustes"), tmp_path / "text", tmp_path / "run")
    assert not (tmp_path / "run" / "model").exists()


# The command line


def test_command_solves_and_cannot_resume(
    recipe: MakeRecipe, linked_text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.yaml").write_text(recipe("gradient").to_yaml())
    command = ["train", str(tmp_path / "r.yaml"), "-o", str(tmp_path / "run")]
    command += ["--prepared", str(linked_text), "--set", "objectives.0.solver=procrustes"]
    assert run([*command, "--resume"]) == 2
    assert "maps are computed in one pass, which cannot be resumed (start" in capfd.readouterr().err
    assert run(command) == 0
    stderr = capfd.readouterr().err
    assert f"{tmp_path}/run/model: model after " in stderr
    assert "de: " in stderr and " links, mean ‖s − tW‖² " in stderr
    assert run(command) == 2
    assert "the folder contains a model" in capfd.readouterr().err
    Path(tmp_path / "de.txt").write_text("Guten Morgen!\n", "utf-8")
    embed = ["embed", str(tmp_path / "de.txt"), "--model", str(tmp_path / "run" / "model")]
    embed += ["--device", "cpu", "--layer", "2"]
    for name, more in (("raw", []), ("de", ["--language", "de"]), ("en", ["--language", "en"])):
        assert run([*embed, "-o", str(tmp_path / f"{name}.npy"), *more]) == 0
    raw, mapped, kept = (np.load(tmp_path / f"{name}.npy") for name in ("raw", "de", "en"))
    maps = load_maps(tmp_path / "run" / "model", 16, 2)
    np.testing.assert_allclose(mapped, maps.apply(raw, "de", 2), atol=1e-5)
    np.testing.assert_array_equal(kept, raw)
    capfd.readouterr()
    assert run([*embed, "-o", str(tmp_path / "x.npy"), "--language", "ja"]) == 2
    assert "there is no map of 'ja'" in capfd.readouterr().err
    assert run([*embed, "-o", str(tmp_path / "x.npy"), "--maps", "beside"]) == 2
    assert "maps are given, but not the language of the text" in capfd.readouterr().err


def test_align_and_evaluate_with_maps(
    procrustes: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(procrustes / "model")
    (tmp_path / "de-en.text").write_text("das Haus ||| the house\n")
    (tmp_path / "de-en.gold").write_text("0-0 1-1\n")
    align = ["align", str(tmp_path / "de-en.text"), "--model", model, "--device", "cpu"]
    assert run([*align, "--languages", "de-en", "-o", str(tmp_path / "links")]) == 0
    assert (tmp_path / "links").read_text().count("\n") == 1
    assert run([*align, "--languages", "de-en", "--maps", model, "-o", str(tmp_path / "two")]) == 0
    assert (tmp_path / "two").read_text() == (tmp_path / "links").read_text()
    for options, message in (
        (["--languages", "ja-en"], "no map of 'ja'"),
        (["--maps", model], "--maps cannot be used here"),
        (["--languages", "de-en", "--encode", "joint"], "encoded separately"),
        (["--languages", "de-en", "--adapt"], "the maps do not fit an adapted encoder"),
        (["--languages", "de-en", "--aligner", "hybrid"], "choose --aligner neural"),
    ):
        capfd.readouterr()
        assert run([*align, *options]) == 2
        assert message in capfd.readouterr().err
    evaluate = ["evaluate", model, "--data", str(tmp_path), "--tasks", "word_alignment"]
    out = tmp_path / "scores.jsonl"
    assert run([*evaluate, "--device", "cpu", "--maps", "beside", "-o", str(out)]) == 0
    scores = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(set(score["layers"]) == {"0", "1", "2"} for score in scores)


# Steps instead of one pass


@pytest.fixture(scope="module")
def steps(recipe: MakeRecipe, linked_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fits") / "steps"
    train(recipe("gradient", "schedule.steps=12"), output=folder, prepared=linked_text)
    return folder


def test_steps_learn_maps_and_leave_the_encoder(steps: Path, procrustes: Path) -> None:
    after, before = (load_file(run / "model" / "model.safetensors") for run in (steps, procrustes))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    maps = calque.load(steps / "model", "cpu", maps=True).maps
    assert maps is not None
    assert maps.about["solver"] == "gradient"
    rows = [row for row in read_metrics(steps / "metrics.jsonl") if row["kind"] == "validation"]
    assert [row["step"] for row in rows] == [4, 8, 12]
    for row in rows:
        assert row["loss/linear_map"] < row["loss/linear_map/unmapped"]
    state = load_file(steps / "step-00000012" / "training_state.safetensors")
    assert torch.equal(state["objectives.0.best_maps"], maps.maps)
    trained = [name for name in state if name.endswith(".exp_avg")]
    assert trained == ["optimizer.objectives.0.maps.exp_avg"]


def test_interrupted_steps_resume_bit_identically(
    recipe: MakeRecipe,
    linked_text: Path,
    steps: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best maps so far, and their losses, are part of the state."""
    chosen = recipe("gradient", "schedule.steps=12")
    interrupt_at(monkeypatch, 6, chosen, linked_text, tmp_path)
    train(chosen, output=tmp_path, prepared=linked_text, resume=True)
    assert_same_run(steps, tmp_path, 12)
    assert (steps / "model/maps.json").read_text() == (tmp_path / "model/maps.json").read_text()


# Two processes


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["procrustes", "least_squares"])
def test_two_processes_solve_like_one(
    solver: str,
    recipe: MakeRecipe,
    linked_text: Path,
    tmp_path: Path,
    train_in_two: TrainInTwo,
) -> None:
    done = train_in_two(tmp_path / "two", recipe(solver), linked_text)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("/model: model after ") == 1, done.stderr
    fit_maps(recipe(solver), linked_text, tmp_path / "one")
    two, one = (load_maps(tmp_path / n / "model", 16, 2) for n in ("two/run", "one"))
    assert two.about["links"] == one.about["links"]
    torch.testing.assert_close(two.maps, one.maps, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_two_processes_take_steps_together(
    recipe: MakeRecipe, linked_text: Path, tmp_path: Path, train_in_two: TrainInTwo
) -> None:
    done = train_in_two(tmp_path / "two", recipe("gradient"), linked_text)
    assert done.returncode == 0, done.stderr
    assert load_maps(tmp_path / "two/run/model", 16, 2).languages == ("de", "fr")
    rows = read_metrics(tmp_path / "two/run/metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 9))
    assert rows[-1]["loss/linear_map"] < rows[-1]["loss/linear_map/unmapped"]
