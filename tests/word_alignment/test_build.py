"""The aligner that options ask for: choices, conflicts, settings of a run, trained aligners."""

from __future__ import annotations

import copy
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from calque.errors import InputError
from calque.io.outputs import fingerprint
from calque.models.encoder import Encoder
from calque.word_alignment import build
from calque.word_alignment.build import AlignerOptions, build_aligner, build_sweep, choose_library
from calque.word_alignment.file_job import align_file
from calque.word_alignment.neural import METHODS
from calque.word_alignment.protocol import AlignWarning, WordPair

PAIRS: list[WordPair] = [(["Guten", "Morgen"], ["Good", "morning"]), ([], ["empty"])]


@pytest.mark.parametrize(
    ("option", "value"), [("aligner", "magic"), ("method", "magic"), ("encode", "magic")]
)
def test_unknown_choices(option: str, value: str) -> None:
    with pytest.raises(InputError, match=f"--{option} magic does not exist .choose from: "):
        AlignerOptions(**{option: value})  # type: ignore[arg-type]


def test_models_are_identified_by_their_files(tiny_folder: Path, tmp_path: Path) -> None:
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
    built = build_aligner(options, lambda: iter(PAIRS))
    assert built.name == "neural argmax layer 4"
    block = built.aligner.align_block(PAIRS)
    assert (block.report.n_pairs, block.report.n_empty) == (2, 1)
    settings = built.to_settings()
    assert settings["model"] == fingerprint(tiny_folder)
    assert (settings["method"], settings["layer"], settings["device"]) == ("argmax", -1, "cpu")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"load": Path("m")}, "--load cannot be used here with --aligner neural"),
        ({"save": Path("m")}, "--save cannot be used here with --aligner neural"),
        ({"stem": 4}, "--stem cannot be used here with --aligner neural"),
        ({"bitext": ("x",)}, "--bitext cannot be used here with --aligner neural"),
        (
            {"aligner": "eflomal", "adapt": True},
            "--adapt cannot be used here with --aligner",
        ),
        ({"aligner": "hybrid", "load": Path("m"), "save": Path("n")}, "--save cannot be used here"),
        (
            {"aligner": "hybrid", "load": Path("m"), "bitext": ("x",)},
            "--bitext cannot be used here",
        ),
        ({"adapt_steps": 5}, "--adapt-steps cannot be used here"),
        ({"adapt": True, "method": "probability"}, "an adapted encoder is not calibrated"),
        ({"save_model": Path("m")}, "--save-model cannot be used here"),
        ({"symmetrize": "best"}, "--symmetrize best does not exist"),
        ({"aligner": "eflomal", "model": "m"}, "--model cannot be used here"),
        ({"aligner": "eflomal", "layer": 7}, "--layer cannot be used here"),
        ({"aligner": "fast-align", "encode": "joint"}, "--encode cannot be used here"),
        ({"aligner": "fast-align", "precision": "bf16"}, "--precision cannot be used here"),
        ({"aligner": "eflomal", "stem": -1}, "--stem is -1 (use 0 or more)"),
        ({"batch_tokens": 0}, "--batch-tokens is 0"),
        ({"adapt": True, "adapt_steps": -1}, "--adapt-steps is -1"),
        ({"aligner": "giza"}, "--aligner giza does not exist"),
    ],
)
def test_options_that_cannot_be_combined(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        AlignerOptions(**options)


def test_a_sweep_tries_all_methods_and_layers(tiny_folder: Path) -> None:
    _, choices = build_sweep(AlignerOptions(model=str(tiny_folder), device="cpu"))
    assert {choice.method for choice in choices} == set(METHODS)
    assert {choice.layer for choice in choices} == {0, 1, 2, 3, 4}
    options = AlignerOptions(model=str(tiny_folder), method="ot", layer=-1, device="cpu")
    _, choices = build_sweep(options)
    assert {(choice.method, choice.layer) for choice in choices} == {("ot", 4)}
    with pytest.raises(InputError, match="layer 9 does not exist"):
        build_sweep(AlignerOptions(model=str(tiny_folder), layer=9))


# Aligners that are trained on the text


@pytest.fixture
def texts(
    demo_rows: list[tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("systran_align")
    monkeypatch.chdir(tmp_path)
    lines = [f"{row[2]}\t{row[1]}\n" for row in demo_rows if row[0] == "de"]
    Path("test.tsv").write_text("".join(lines[:5]), encoding="utf-8")
    Path("more.tsv").write_text("".join(lines[5:] * 5), encoding="utf-8")


def test_a_bitext_may_be_raw_and_swapped(texts: None) -> None:
    from calque.io.bitext import read_bitext
    from calque.io.segmentation import split_words

    raw = list(read_bitext("more.tsv"))
    spaced = [(" ".join(split_words(p.src, "de")), " ".join(split_words(p.tgt, "en"))) for p in raw]
    Path("spaced.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in spaced), encoding="utf-8")
    Path("swapped.tsv").write_text("".join(f"{p.tgt}\t{p.src}\n" for p in raw), encoding="utf-8")
    align_file("test.tsv", output="one", aligner="fast-align", bitext="spaced.tsv")
    align_file(
        "test.tsv",
        output="two",
        aligner="fast-align",
        bitext=["swapped.tsv"],
        tokenize_bitext="de-en",
        reverse_bitext=True,
    )
    assert Path("one").read_text() == Path("two").read_text() != ""


@pytest.mark.parametrize("is_swapped", [True, False])
def test_a_swapped_bitext_is_noticed(
    is_swapped: bool, texts: None, recwarn: pytest.WarningsRecorder
) -> None:
    if is_swapped:
        lines = [line.split("\t") for line in Path("more.tsv").read_text("utf-8").splitlines()]
        Path("more.tsv").write_text("".join(f"{b}\t{a}\n" for a, b in lines), encoding="utf-8")
    for reverse in (False, True):
        align_file(
            "test.tsv",
            aligner="fast-align",
            tokenize="de-en",
            bitext="more.tsv",
            reverse_bitext=reverse,
        )
        messages = [str(warning.message) for warning in recwarn.list]
        assert [m.startswith("the sides of --bitext seem to be swapped") for m in messages] == (
            [True] if is_swapped != reverse else []
        )
        recwarn.clear()


def test_hybrid_is_the_default_with_a_bitext(
    texts: None, tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "choose_library", lambda: "fast-align")
    Path("gold").write_text("0-0\n" * 5)
    result = align_file("test.tsv", model=tiny_encoder, gold="gold", bitext="more.tsv")
    assert result.aligner == "hybrid argmax layer 3"
    assert (result.n_pairs, result.n_training_pairs) == (5, 105)


@pytest.mark.parametrize("method", ["probability", "argmax"])
def test_the_hybrid_keeps_its_method_after_adaptation(
    method: str, texts: None, tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked_by = []

    def adapt(options: Any, linker: Any, pairs: Any, progress: Any) -> tuple[Encoder, None]:
        linked_by.append((linker.method, linker.words.settings.threshold))
        return tiny_encoder, None

    monkeypatch.setattr(build, "choose_library", lambda: "fast-align")
    monkeypatch.setattr(build, "_adapt", adapt)
    encoder = copy.deepcopy(tiny_encoder)
    if method == "probability":
        calibration = {"slope": 1.0, "intercept": 0.0, "threshold": 0.5}
        encoder.config.calque = {"alignment": {"calibration": calibration}}
    Path("gold").write_text("0-0\n" * 5)
    result = align_file(
        "test.tsv", model=encoder, gold="gold", bitext="more.tsv", adapt=True, threshold=0.9
    )
    assert result.aligner == f"hybrid {method} layer 3"
    assert linked_by == [("argmax", None)]


def test_fast_align_replaces_a_missing_eflomal(
    texts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "eflomal", None)
    with pytest.warns(AlignWarning, match=re.escape("pip install 'calque[eflomal]'")):
        assert choose_library() == "fast-align"
