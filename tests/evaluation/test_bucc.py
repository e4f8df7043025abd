"""BUCC 2018: thresholds from other pairs, F1 by hand, both names of the files, bad files."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

import calque
from calque.algorithms.margin import MinedPairs
from calque.errors import InputError
from calque.evaluation.records import LanguageScores
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.bucc import (
    _choose_kept,
    _count_items,
    _Mined,
    find_gold,
    list_languages,
    measure,
    read_test,
)
from calque.models.encoder import Encoder

write_bucc = runpy.run_path(str(Path(__file__).parents[1] / "bucc_files.py"))["write_bucc"]

Rows = list[tuple[str, str, str]]


def measure_german(encoder: Encoder, data: Path, layer: int | None = None) -> LanguageScores:
    steps: list[tuple[int, int]] = []
    (found,) = measure(
        encoder,
        data,
        languages=None,
        settings=TaskSettings(layer=layer),
        seed=0,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    assert steps == [(1, 1)]
    return found


def mined(scores: list[float], src: list[int], is_gold: list[bool], gold: list[int]) -> _Mined:
    pairs = MinedPairs(np.array(src), np.array(src), np.float32(scores))
    return _Mined(pairs, np.array(is_gold), np.array(gold), 6)


def test_two_folds_by_hand() -> None:
    # Sources 0 and 3 are gold and go to either fold; 1, 2, 4, 5 by their number: odd ones to the
    # second. First fold: 0 (gold, 1.3), 2 (1.0), 4 (1.4). Second: 1 (1.2), 3 (gold, 1.1), 5 (0.9).
    found = mined(
        [1.4, 1.3, 1.2, 1.1, 1.0, 0.9],
        [4, 0, 1, 3, 2, 5],
        [False, True, False, True, False, False],
        [0, 3],
    )
    assert found.folds.tolist() == [False, True, False, True, False, True]
    # First fold: keep 4 and 0 (F1 2/3), cut midway to 2: 1.15. Second: keep 1 and 3, cut at 1.0.
    assert np.isclose(found.threshold(~found.folds), 1.15)
    assert np.isclose(found.threshold(found.folds), 1.0)
    kept = _choose_kept([found])
    # The first fold is cut at 1.0: 4, 0 and 2 stay; the second at 1.15: only 1.
    assert sorted(found.pairs.src[kept].tolist()) == [0, 1, 2, 4]
    items = _count_items(found, kept)
    assert items.numerators.tolist() == [2, 0, 0, 0, 0, 0]
    assert items.denominators.tolist() == [2, 1, 1, 1, 1, 0]
    assert np.isclose(items.score, 100 * 2 / (4 + 2))


def test_the_threshold_of_another_split() -> None:
    test = mined([1.4, 1.1], [0, 1], [True, True], [0, 1])
    dev = mined([1.5, 1.0], [0, 1], [True, False], [0])
    kept = _choose_kept([test, dev])
    assert kept.tolist() == [True, False]
    assert np.isclose(_count_items(test, kept).score, 100 * 2 / 3)


def test_real_sentences(tmp_path: Path, demo_rows: Rows) -> None:
    src, _, gold = write_bucc(tmp_path, demo_rows)
    found = measure_german(calque.load(device="cpu"), tmp_path)
    assert found.language == "de"
    assert list(found.metrics) == ["f1", "precision", "recall", "f1_best"]
    assert found.metrics["f1"] > 60  # each pair is one of a few dozen
    assert found.items is not None
    assert np.isclose(found.items.score, found.metrics["f1"], atol=1e-9)
    precision, recall = found.metrics["precision"], found.metrics["recall"]
    assert np.isclose(found.metrics["f1"], 2 * precision * recall / (precision + recall))
    assert found.n_items == len(found.items.numerators) == len(set(src))
    assert found.counts["gold_pairs"] == len(gold)
    assert found.counts["folds"] == 2


def test_splits_and_names(tmp_path: Path, tiny_encoder: Encoder, demo_rows: Rows) -> None:
    inside = tmp_path / "xtreme/bucc2018"
    inside.mkdir(parents=True)
    write_bucc(inside, demo_rows, split="dev")
    write_bucc(inside, demo_rows, split="test")
    assert list(find_gold(tmp_path)["de"]) == ["test", "dev"]
    assert list_languages(tmp_path, TaskSettings()) == ["de"]
    found = measure_german(tiny_encoder, tmp_path, layer=2)
    assert found.counts["folds"] == 0
    assert found.counts["layer"] == 2
    assert found.metrics["f1"] == found.metrics["f1_best"]  # both splits are the same here
    # The organizers' own names, a folder a language.
    own = tmp_path / "own/de-en"
    own.mkdir(parents=True)
    for split in ("sample", "training"):
        write_bucc(own, demo_rows, split=split)
    assert list(find_gold(tmp_path / "own")["de"]) == ["training", "sample"]


def test_repeated_sentences_count_once(tmp_path: Path) -> None:
    (tmp_path / "fr-en.dev.fr").write_text("fr-1\tOui.\nfr-2\tNon.\nfr-3\tOui.\n")
    (tmp_path / "fr-en.dev.en").write_text("en-1\tYes.\nen-2\tNo.\n")
    (tmp_path / "fr-en.dev.gold").write_text("fr-3\ten-1\n")
    test = read_test(tmp_path / "fr-en.dev.gold")
    assert test.src == ("Oui.", "Non.")
    assert test.gold == {(0, 0)}
    assert test.n_duplicates == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gold", "fr-9\ten-1\n", "fr-en.dev.gold, line 1: the id 'fr-9' is not in fr-en.dev.fr"),
        ("gold", "fr-1 en-1\n", "line 1: the line does not have two columns"),
        ("gold", "", "has no pairs"),
        ("en", "Yes.\n", "fr-en.dev.en, line 1: the line has no id followed by a tab"),
        ("fr", "fr-1\tOui.\nfr-1\tNon.\n", "fr-en.dev.fr, line 2: the id 'fr-1' occurs twice"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / "fr-en.dev.fr").write_text("fr-1\tOui.\n")
    (tmp_path / "fr-en.dev.en").write_text("en-1\tYes.\n")
    (tmp_path / "fr-en.dev.gold").write_text("fr-1\ten-1\n")
    (tmp_path / f"fr-en.dev.{name}").write_text(content)
    with pytest.raises(InputError, match=message):
        read_test(tmp_path / "fr-en.dev.gold")


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no files such as xx-en\.dev\.gold"):
        find_gold(tmp_path)
    (tmp_path / "fr-en.dev.gold").write_text("fr-1\ten-1\n")
    with pytest.raises(InputError, match=r"fr-en\.dev\.fr is missing"):
        read_test(tmp_path / "fr-en.dev.gold")
