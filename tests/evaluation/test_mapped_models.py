"""Models with linear maps beside them: maps are found, applied by every task, and recorded."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import calque
from calque.errors import InputError
from calque.evaluation.finetuning.head_model import HeadModel
from calque.evaluation.grid.model_specs import find_models
from calque.evaluation.grid.run_grid import plan_grid
from calque.evaluation.registry import find_tasks
from calque.models.language_maps import LanguageMaps

DATA = Path(__file__).parents[1] / "data"
QUESTIONS = DATA / "questions"
Rows = list[tuple[str, str, str]]
write_bucc = runpy.run_path(str(Path(__file__).parents[1] / "bucc_files.py"))["write_bucc"]

# Maps of German for the five layers of the small model.
MAPS: dict[str, Callable[[], Tensor]] = {
    "identity": lambda: torch.eye(64).expand(1, 5, 64, 64).clone(),
    "zero": lambda: torch.zeros(1, 5, 64, 64),
}
FEATURES = {"epochs": 1, "extra_layers": 0, "train_examples": 6, "test_examples": 3}


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same encoder without maps, with identity maps, and with zero maps."""
    found = {"none": tiny_folder}
    for name, make in MAPS.items():
        found[name] = tmp_path_factory.mktemp("models") / name
        shutil.copytree(tiny_folder, found[name])
        LanguageMaps(make(), ("de",), (0, 1, 2, 3, 4), "en").save(found[name])
    return found


@pytest.fixture(scope="module")
def data(demo_rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """German tests of tasks that compare languages, made of the sentences of the demo."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("tatoeba", "bucc2018", "ud"):
        (folder / name).mkdir()
    rows = [row for row in demo_rows if row[0] == "de"]
    for code, column in (("eng", 1), ("deu", 2)):
        text = "".join(row[column] + "\n" for row in rows)
        (folder / "tatoeba" / f"tatoeba.deu-eng.{code}").write_text(text, "utf-8")
    write_bucc(folder / "bucc2018", demo_rows)
    (folder / "gold_alignments").symlink_to(DATA / "gold")
    for name in ("en_ewt-train.conllu", "en_ewt-dev.conllu", "de_gsd-dev.conllu.xz"):
        shutil.copy(DATA / "tagged" / name, folder / "ud" / name.replace("-", "-ud-", 1))
    return folder


@pytest.mark.parametrize(
    ("task", "place", "settings"),
    [
        ("pos", DATA, {}),
        ("ner", DATA, {"head": "crf"}),
        ("xnli", DATA, {}),
        ("parsing", DATA, {}),
        ("xquad", QUESTIONS, {}),
    ],
)
def test_frozen_features_are_mapped_by_the_language_of_the_test(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    place: Path,
    settings: dict[str, Any],
) -> None:
    """Without extra layers, heads read the mean of the mapped layers."""
    plain_read = HeadModel.read
    found: dict[str, dict[str, Tensor]] = {}

    def read(self: HeadModel, tokens: Any) -> Tensor:
        states = plain_read(self, tokens)
        if not self.training:
            language = "training" if self.language == "en" and not of_model else self.language
            of_model.setdefault(language, states)
        return states

    monkeypatch.setattr(HeadModel, "read", read)
    for name, folder in folders.items():
        of_model = found.setdefault(name, {})
        (*_, record) = calque.evaluate(
            f"{name}={folder}",
            data=place,
            tasks=task,
            languages=["de"],
            setting="features",
            seeds=[1],
            settings=FEATURES | settings,
            device="cpu",
        ).records
        assert record["maps"] == (name != "none")
    assert all(of_model.keys() == {"training", "de"} for of_model in found.values())
    assert torch.equal(found["identity"]["de"], found["none"]["de"])
    assert found["none"]["de"].any() and not found["zero"]["de"].any()
    # English is the pivot, which has no map.
    assert torch.equal(found["zero"]["training"], found["none"]["training"])


@pytest.mark.parametrize("task", ["tatoeba", "word_alignment", "bucc", "pos_probe"])
def test_identity_maps_change_no_score_and_zero_maps_do(
    folders: dict[str, Path], data: Path, task: str
) -> None:
    layers = None if task == "bucc" else [4]
    models = [f"{name}={folder}" for name, folder in folders.items()]
    found = calque.evaluate(
        models, data=data, tasks=task, layers=layers, languages=["de"], device="cpu"
    )
    assert all(record["maps"] == (record["model"] != "none") for record in found.records)
    values: dict[str, dict[str, Any]] = {name: {} for name in folders}
    for record in found.records:
        values[record["model"]][record["language"]] = record["metrics"]
    assert values["identity"] == values["none"]
    (german,) = {"de", "de-en"} & values["none"].keys()
    assert values["zero"][german] != values["none"][german]


def test_one_grid_has_models_with_and_without_maps(
    folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": data, "jobs": 0, "device": "cpu"}
    models = [f"{name}={folder}" for name, folder in folders.items()]
    grid = calque.evaluate(models, output=tmp_path / "grid", **options)
    assert {(r["model"], r["maps"]) for r in grid.records} == {
        ("none", False),
        ("identity", True),
        ("zero", True),
    }
    scores = {r["model"]: r["value"] for r in grid.records}
    assert scores["none"] == scores["identity"] > scores["zero"]
    # Maps can be left out, and given to a model that has none; configurations differ.
    left_out = calque.evaluate(models[2], maps="none", **options).records[0]
    given = calque.evaluate(models[0], maps=folders["zero"], **options).records[0]
    assert (left_out["maps"], left_out["value"]) == (False, scores["none"])
    assert (given["maps"], given["value"]) == (True, scores["zero"])
    assert len({r["config"] for r in (*grid.records, given)}) == 4


def test_where_maps_are_found(folders: dict[str, Path]) -> None:
    mapped, plain = str(folders["zero"]), str(folders["none"])
    for source, maps, expected in (
        (mapped, None, folders["zero"]),
        (mapped, "none", None),
        (plain, None, None),
        (plain, mapped, folders["zero"]),
        (f"random:{mapped}", None, None),
    ):
        (spec,) = find_models([source], maps=maps)
        assert spec.maps == expected
    for maps in ("beside", str(DATA)):
        with pytest.raises(InputError, match="there are no maps in this folder"):
            find_models([plain], maps=maps)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tasks": "pos"}, "pos would change the encoder of m.*--setting features"),
        ({"tasks": "tatoeba", "neutral": True}, "cannot be combined with maps .*--maps none"),
        ({"tasks": "pos", "setting": "features", "languages": ["hi"]}, "no maps for hi"),
        ({"tasks": "pos", "setting": "features", "source": "hi", "languages": ["de"]}, "for hi"),
        ({"tasks": "multi30k"}, "multi30k does not support maps"),
    ],
)
def test_maps_that_would_not_be_applied_are_an_error(
    folders: dict[str, Path], data: Path, tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    place = data if "neutral" in options else DATA
    if options["tasks"] == "multi30k":
        place = tmp_path
        (tmp_path / "translation" / "multi30k").mkdir(parents=True)
        for language in ("en", "de"):
            path = tmp_path / "translation" / "multi30k" / f"test_2016_flickr.{language}"
            path.write_text("a\n")
    with pytest.raises(InputError, match=problem):
        calque.evaluate(f"m={folders['zero']}", data=place, device="cpu", **options)


def test_the_protocol_freezes_encoders_with_maps(folders: dict[str, Path]) -> None:
    """Linear maps are evaluated on frozen features, other models are fine-tuned."""
    models = find_models([f"{name}={folder}" for name, folder in folders.items()])
    tasks = find_tasks(["ner", "pos"])
    choices: dict[str, Any] = {"languages": ["de"], "protocol": "wu-dredze"}
    runs, _ = plan_grid(models, tasks, [1], DATA, **choices)
    found = {(r.model.name, r.task_name): r.settings for r in runs}
    assert len(found) == 6
    for (model, task), settings in found.items():
        assert settings.is_frozen == (model != "none")
        assert settings.head == ("crf" if task == "ner" and model != "none" else "linear")
    # One setting for all models, and single values, can still be chosen.
    runs, _ = plan_grid(
        models, tasks, [1], DATA, settings={"setting": "features", "epochs": 1}, **choices
    )
    assert {(r.settings.is_frozen, r.settings.epochs) for r in runs} == {(True, 1)}
    assert {r.settings.batch_examples for r in runs} == {128}
