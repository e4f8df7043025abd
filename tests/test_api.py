"""The public face: import calque; calque.load(); model.embed([...])."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

import calque
from calque.cli.app import build_app
from calque.models import loading


def test_load_and_embed(tiny_folder: Path) -> None:
    model = calque.load(tiny_folder, device="cpu")
    vectors = model.embed(["Guten Morgen!", "Good morning!"])
    assert isinstance(vectors, np.ndarray)
    assert vectors.shape == (2, 64)
    assert model.folder == tiny_folder
    assert (model.embed(["Hello."], layer=1) != model.embed(["Hello."], layer=2)).any()


def test_align_equals_the_word_aligner() -> None:
    model = calque.load(device="cpu")
    pairs = [(["das", "Haus", "ist", "alt"], ["the", "house", "is", "old"]), (["ja"], ["yes"])]
    assert model.align(pairs) == calque.WordAligner(model).align(pairs)
    options = {"method": "argmax", "layer": 3}
    assert model.align(pairs, **options) == calque.WordAligner(model, **options).align(pairs)  # type: ignore[arg-type]


def test_load_reads_a_string_too(tiny_folder: Path) -> None:
    model = calque.load(str(tiny_folder))
    assert isinstance(model, calque.Model)
    assert not model.training


def test_without_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calque.models.loading.embedded_models", dict)
    for name in (None, loading.EMBEDDED_MODEL):
        with pytest.raises(calque.InputError, match="calque-mini is not in this installation"):
            calque.load(name)


def test_the_embedded_model_is_the_default() -> None:
    model = calque.load(device="cpu")
    vectors = model.embed(["Guten Morgen!", "Good morning!"], normalize=True)
    assert model.folder == loading.embedded_models()[loading.EMBEDDED_MODEL]
    assert vectors[0] @ vectors[1] > 0.3


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_unknown_device(tiny_folder: Path, device: str) -> None:
    with pytest.raises(calque.InputError, match=f"device '{device}' cannot be used"):
        calque.load(tiny_folder, device=device)


def test_public_names() -> None:
    assert calque.__version__[0].isdigit()
    assert set(dir(calque)) == set(calque.__all__)
    assert all(hasattr(calque, name) for name in calque.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = calque.nothing


def test_looking_around_imports_no_torch() -> None:
    code = (
        "import calque, sys; calque.__version__; calque.InputError; print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


COMMANDS = {
    "align": "align_file",
    "attention": "pair_attention",
    "clean": "clean_bitext",
    "compare": "compare",
    "embed": "embed_file",
    "evaluate": "evaluate",
    "extract": "extract_vectors",
    "gap": "transfer_gap",
    "grow": "grow",
    "lexicon": "induce_lexicon",
    "links": "link_bitext",
    "map": "map_vectors",
    "mine": "mine",
    "neutralize": "neutralize",
    "prepare": "prepare",
    "serve": "serve",
    "train": "train",
    "translate": "translate_file",
}
# Options that only concern what is shown on the screen, and names that cannot be keywords.
ONLY_OPTIONS = {
    "align": {"reliability"},
    "attention": {"layer", "output"},
    "clean": {"set"},
    "compare": {"brief"},
    "evaluate": {"plot", "set"},
    "gap": {"plot", "steps"},
    "grow": {"no_compose"},
    "mine": {"k"},
    "prepare": {"set"},
    "train": {"set"},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_a_command_are_keywords_of_its_function(command: str) -> None:
    group = typer.main.get_command(build_app())
    options = {
        name[2:].replace("-", "_")
        for parameter in group.commands[command].params  # type: ignore[attr-defined]
        for name in parameter.opts
        if name.startswith("--")
    }
    function = getattr(calque, COMMANDS[command])
    keywords = set(inspect.signature(function).parameters)
    assert options - keywords - {"help"} == ONLY_OPTIONS.get(command, set())
    assert "Args:" in function.__doc__ and ">>>" in function.__doc__
