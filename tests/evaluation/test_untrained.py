"""Tasks without training: linear maps of languages, and errors where there is no map."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import calque
from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks import alignment_error, tatoeba
from calque.models.language_maps import LanguageMaps

Rows = list[tuple[str, str, str]]


def make_maps(layers: tuple[int, ...] = (0, 1, 2, 3, 4)) -> LanguageMaps:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, len(layers), 64, 64, generator=generator)
    return LanguageMaps(maps, ("de", "ja"), layers, "en", {"solver": "procrustes"})


@pytest.fixture
def mapped_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "mapped"
    shutil.copytree(tiny_folder, folder)
    make_maps().save(folder)
    return folder


@pytest.fixture
def data(demo_rows: Rows, tmp_path: Path) -> Path:
    """Sentences of the demo as a test of retrieval, and one pair as a test of word alignment."""
    folder = tmp_path / "data"
    (folder / "tatoeba").mkdir(parents=True)
    (folder / "gold_alignments").mkdir()
    for short, code in (("de", "deu"), ("ja", "jpn"), ("fr", "fra")):
        rows = [row for row in demo_rows if row[0] == short]
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in rows)
            (folder / "tatoeba" / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    for name in ("de-en", "fr-en"):
        (folder / "gold_alignments" / f"{name}.text").write_text("das Haus ||| the house\n")
        (folder / "gold_alignments" / f"{name}.gold").write_text("0-0 1-1\n")
    return folder


def test_retrieval_maps_each_side_by_its_language(
    mapped_folder: Path, tiny_folder: Path, data: Path, demo_rows: Rows
) -> None:
    model = calque.load(mapped_folder, "cpu", maps=True)
    scores = tatoeba.measure(model, data, languages=["deu", "ja"], settings=TaskSettings())
    plain = calque.load(tiny_folder, "cpu")
    for number, each in enumerate(scores):
        rows = [row for row in demo_rows if row[0] == each.language]
        src, eng = (plain.embed([row[i] for row in rows], layer=3) for i in (2, 1))
        src = src @ make_maps().maps[number, 3].numpy()
        src, eng = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (src, eng))
        expected = np.mean((src @ eng.T).argmax(axis=1) == np.arange(len(src)))
        assert each.layers[3]["accuracy_to_english"] == 100 * expected


def test_languages_and_layers_must_have_maps(mapped_folder: Path, data: Path) -> None:
    model = calque.load(mapped_folder, "cpu", maps=True)
    settings = TaskSettings()
    with pytest.raises(InputError, match=r"no maps for fr \(use --languages de,ja\)"):
        tatoeba.measure(model, data, settings=settings)
    with pytest.raises(InputError, match=r"no maps for fr-en \(use --languages de-en\)"):
        alignment_error.measure(model, data, settings=settings)
    make_maps(layers=(1, 4)).save(mapped_folder)
    few = calque.load(mapped_folder, "cpu", maps=True)
    with pytest.raises(InputError, match="layer 2"):
        tatoeba.measure(few, data, languages=["de"], settings=TaskSettings(layers=(2,)))
    (scores,) = alignment_error.measure(few, data, languages=["de-en"], settings=settings)
    assert list(scores.layers) == [1, 4]
    assert scores.counts == {"layer": 4}  # the nearest to layer 3, the best one for words


def test_evaluate_loads_maps(mapped_folder: Path, data: Path, tmp_path: Path) -> None:
    options = {"data": data, "languages": ["de"], "layers": [3], "device": "cpu"}
    model = f"m={mapped_folder}"
    mapped = calque.evaluate(model, **options)
    loaded = calque.load(mapped_folder, "cpu", maps=True)
    (expected,) = tatoeba.measure(
        loaded, data, languages=["de"], settings=TaskSettings(layers=(3,))
    )
    assert mapped.records[0]["metrics"] == expected.metrics
    plain = calque.evaluate(model, maps="none", **options)
    configs = [result.records[0]["config"].split("-") for result in (mapped, plain)]
    assert [old == new for old, new in zip(*configs, strict=True)] == [True, True, False]
