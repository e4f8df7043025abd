"""The aligner that options ask for, and what tells two of them apart."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from calque.cli.align_job import choose_aligner, choose_sweep
from calque.cli.aligner_options import AlignerOptions

from calque.cli import options as aligner_options
from calque.errors import InputError
from calque.io.outputs import fingerprint
from calque.word_alignment.protocol import WordPair

PAIRS: list[WordPair] = [(["Guten", "Morgen"], ["Good", "morning"]), ([], ["empty"])]


def read_pairs() -> Iterator[WordPair]:
    return iter(PAIRS)


@pytest.mark.parametrize(
    ("option", "value"), [("aligner", "magic"), ("method", "magic"), ("encode", "magic")]
)
def test_unknown_choices(option: str, value: str) -> None:
    with pytest.raises(InputError, match=f"--{option} magic does not exist .choose from: "):
        AlignerOptions(**{option: value})  # type: ignore[arg-type]


def test_a_model_is_known_by_its_files(tiny_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    assert fingerprint(copy) == fingerprint(tiny_folder)
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    changed = fingerprint(copy)
    assert changed != fingerprint(tiny_folder)
    (copy / "config.json").rename(copy / "other.json")
    assert fingerprint(copy) != changed


def test_the_neural_aligner(tiny_folder: Path) -> None:
    options = AlignerOptions(
        model=str(tiny_folder), method="argmax", layer=-1, encode="separate", device="cpu"
    )
    with choose_aligner(options, read_pairs) as chosen:
        assert chosen.name == "neural argmax layer 4"
        block = chosen.aligner.align_block(PAIRS)
        assert (block.report.n_pairs, block.report.n_empty) == (2, 1)
        settings = chosen.settings()
    assert settings["model"] == fingerprint(tiny_folder)
    assert (settings["method"], settings["layer"], settings["device"]) == ("argmax", -1, "cpu")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"load": Path("m")}, "--load with --aligner neural"),
        ({"save": Path("m")}, "--save with --aligner neural"),
        ({"bitext": ("x",)}, "--bitext with --aligner neural"),
        ({"aligner": "eflomal", "adapt": True}, "--adapt with --aligner eflomal"),
        ({"aligner": "hybrid", "load": Path("m"), "save": Path("n")}, "--save with"),
        ({"aligner": "hybrid", "load": Path("m"), "bitext": ("x",)}, "--bitext with"),
        ({"adapt_steps": 5}, "--adapt-steps with"),
        ({"save_model": Path("m")}, "--save-model with"),
        ({"symmetrize": "best"}, "--symmetrize best does not exist"),
        ({"aligner": "giza"}, "--aligner giza does not exist"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        AlignerOptions(**options)


def test_the_symmetrizations_are_those_there_are() -> None:
    from calque.algorithms.symmetrize import SYMMETRIZATIONS

    assert set(SYMMETRIZATIONS) == set(aligner_options.SYMMETRIZATIONS)


def test_a_sweep_tries_all_methods_and_layers(tiny_folder: Path) -> None:
    found, layers = choose_sweep(AlignerOptions(model=str(tiny_folder), device="cpu"))
    assert set(found) == {"ot", "itermax", "argmax", "match"}
    assert layers == [0, 1, 2, 3, 4]
    one, layers = choose_sweep(AlignerOptions(model=str(tiny_folder), method="ot", layer=-1))
    assert (list(one), layers) == (["ot"], [4])
    with pytest.raises(InputError, match="layer 9 does not exist"):
        choose_sweep(AlignerOptions(model=str(tiny_folder), layer=9))
