"""The names of a recipe's weights are known before any text is, and so is what `freeze` matches."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from calque.cli import run
from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.veco import Veco
from calque.training.loop import Trainer
from calque.training.recipe import Recipe
from calque.training.start import _sketch_step, check_freezing, prepare_text

MakeRecipe = Callable[..., Recipe]
CA_MLM = "objectives=[{kind: cross_attention_lm, batch_tokens: 512}]"
TRANSLATION = "objectives=[{kind: translation, batch_tokens: 512}]"
ALIGNMENT = "objectives=[{kind: denoising_alignment, batch_tokens: 512}]"


@pytest.fixture(scope="module")
def veco_folder(tiny_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "veco"
    veco = Veco.plug(tiny_encoder)
    veco.publish(folder, dtype=torch.float32, state=veco.model.state_dict())
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        ["model.architecture=bert"],
        ["model.start={plain}", ALIGNMENT],
        [CA_MLM, "model.cross_attention=random", "model.architecture=bert"],
        [CA_MLM, "model.cross_attention=self", "model.start={plain}"],
        [CA_MLM, "model.cross_attention=start", "model.start={veco}"],
        ["model.start={veco}/veco"],
        [TRANSLATION, "model.decoder={layers: 1, languages: [LANGUAGES]}"],
        [TRANSLATION, "model.start={veco}", "model.decoder={layers: 3, languages: [LANGUAGES]}"],
        [
            TRANSLATION,
            "model.start={writer}",
            "model.decoder={layers: 1, tie: all, languages: [LANGUAGES]}",
        ],
    ],
)
def test_the_names_are_those_of_the_run(
    changes: list[str],
    tiny_recipe: MakeRecipe,
    tiny_text: Path,
    tiny_folder: Path,
    veco_folder: Path,
    translator_folder: Path,
    demo_rows: list[tuple[str, str, str]],
    tmp_path: Path,
) -> None:
    languages = ", ".join(dict.fromkeys(row[0] for row in demo_rows))
    places = {
        "{plain}": str(tiny_folder),
        "{veco}": str(veco_folder),
        "{writer}": str(translator_folder),
        "LANGUAGES": f"{languages}, en",
    }
    for name, place in places.items():
        changes = [change.replace(name, place) for change in changes]
    recipe = tiny_recipe(*changes)
    expected = Trainer(recipe, tiny_text, tmp_path).module
    found = _sketch_step(recipe)
    names: list[dict[str, Any]] = [
        {name: tuple(value.shape) for name, value in each.named_parameters(remove_duplicate=False)}
        for each in (found, expected)
    ]
    assert names[0].keys() == names[1].keys()
    is_free_of_words = [name for name in names[0] if "layer" in name]
    assert {n: names[0][n] for n in is_free_of_words} == {n: names[1][n] for n in is_free_of_words}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["freeze=['encoder.*', '!*.crosattention.*']"], r"freeze: '!\*.crosattention.\*' matches"),
        (["freeze=[roberta.*]", "freeze_steps=2"], "freeze: 'roberta.\\*' matches no parameter"),
        (["freeze=['encoder.*']"], "every parameter is frozen"),
    ],
)
def test_wrong_patterns_are_told_before_text_is_prepared(
    changes: list[str], problem: str, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    (tmp_path / "en-de.tsv").write_text("One.\tEins.\n", encoding="utf-8")
    source = "data.sources=[{path: en-de.tsv, kind: bitext}]"
    recipe = tiny_recipe(CA_MLM, "model.cross_attention=self", source, *changes)
    with pytest.raises(InputError, match=problem):
        prepare_text(recipe, tmp_path, tmp_path / "text", say=lambda line: None, n_workers=1)
    assert not (tmp_path / "text").exists()


def test_maps_that_are_not_there_yet_are_not_frozen(tiny_recipe: MakeRecipe) -> None:
    change = "objectives=[{kind: linear_map, solver: gradient, batch_tokens: 512}]"
    check_freezing(tiny_recipe(change, "freeze=['encoder.*']"))


def test_drawing_names_leaves_the_global_generator_alone(tiny_recipe: MakeRecipe) -> None:
    before = torch.get_rng_state()
    check_freezing(tiny_recipe("freeze=['*.bias']"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{path: en-de.tsv, kind: bitext}", "cross_attention_lm: no source of plain text"),
        ("{path: en.txt, kind: text}", "translation_lm: no source of bitext"),
    ],
)
def test_text_of_the_wrong_kind_is_told_before_it_is_prepared(
    source: str,
    problem: str,
    tiny_recipe: MakeRecipe,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As when VECO's recipe gets bitext alone: its neighbors are of plain text."""
    (tmp_path / "en-de.tsv").write_text("One.\tEins.\n", encoding="utf-8")
    shutil.copy(tmp_path / "en-de.tsv", tmp_path / "en.txt")
    objectives = (
        "objectives=[{kind: cross_attention_lm, pairs: neighbors, batch_tokens: 512},"
        " {kind: translation_lm, batch_tokens: 512}]"
    )
    recipe = tiny_recipe(objectives, "model.cross_attention=self", f"data.sources=[{source}]")
    (tmp_path / "r.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    assert run(["train", str(tmp_path / "r.yaml"), "-o", str(tmp_path / "run")]) == 2
    assert f"{problem} among data.sources (add one, or leave" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
