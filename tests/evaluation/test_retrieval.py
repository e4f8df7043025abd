"""Tatoeba: files in LASER's layout, and scores that a plain computation confirms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.evaluation.registry import find_tasks
from calque.evaluation.tasks.tatoeba import (
    average_languages,
    find_languages,
    read_test,
    score_tatoeba,
)
from calque.io.xtreme import THREE_LETTERS, TWO_LETTERS
from calque.models.encoder import Encoder
from calque.sentences.embed import embed_sentences
from calque.types import Score

Row = tuple[str, str, str]


@pytest.fixture(scope="module")
def data(demo_rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """German and Japanese of the demo, as LASER would have it."""
    folder = tmp_path_factory.mktemp("data") / "tatoeba"
    folder.mkdir()
    for short, code in (("de", "deu"), ("ja", "jpn")):
        rows = [row for row in demo_rows if row[0] == short]
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in rows)
            (folder / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    return folder.parent


def score_plainly(src: np.ndarray, eng: np.ndarray) -> float:
    """How often the largest cosine of a row is its own."""
    src, eng = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (src, eng))
    return float(np.mean((src @ eng.T).argmax(1) == np.arange(len(src))))


def test_scores_match_a_plain_computation(
    tiny_encoder: Encoder, data: Path, demo_rows: list[Row]
) -> None:
    scores = score_tatoeba(tiny_encoder, data, model="tiny", languages=["de", "jpn"])
    found = {(s.language, s.layer, s.metric): s for s in scores}
    assert len(scores) == len(found) == 3 * 5 * 2
    german = [row for row in demo_rows if row[0] == "de"]
    for layer in (0, 3):
        src, eng = (
            embed_sentences(tiny_encoder, [row[i] for row in german], layer=layer) for i in (2, 1)
        )
        to_english = found["de", layer, "accuracy_to_english"]
        assert to_english.value == score_plainly(src, eng)
        assert found["de", layer, "accuracy_from_english"].value == score_plainly(eng, src)
        assert to_english.n_items == 25
        both = [found[name, layer, "accuracy_to_english"].value for name in ("de", "ja")]
        assert found["mean", layer, "accuracy_to_english"].value == pytest.approx(sum(both) / 2)


def test_a_perfect_pair_scores_one(tiny_encoder: Encoder, tmp_path: Path) -> None:
    for side in ("deu", "eng"):
        (tmp_path / f"tatoeba.deu-eng.{side}").write_text("Eins.\nZwei Wörter.\nDrei!\n", "utf-8")
    for center in (False, True):
        scores = score_tatoeba(tiny_encoder, tmp_path, model="tiny", layers=[-1], center=center)
        assert [(s.language, s.layer, s.value) for s in scores] == 2 * [("de", 4, 1.0)] + 2 * [
            ("mean", 4, 1.0)
        ]


def test_centering_is_each_sides_own_mean(
    tiny_encoder: Encoder, data: Path, demo_rows: list[Row]
) -> None:
    rows = [row for row in demo_rows if row[0] == "ja"]
    src, eng = (embed_sentences(tiny_encoder, [row[i] for row in rows], layer=1) for i in (2, 1))
    scores = score_tatoeba(
        tiny_encoder, data, model="tiny", languages=["ja"], layers=[1], center=True
    )
    assert scores[0].value == score_plainly(src - src.mean(0), eng - eng.mean(0))


def test_languages_of_a_folder(data: Path) -> None:
    assert find_languages(data) == find_languages(data / "tatoeba") == ["de", "ja"]
    assert read_test(data, "de") == read_test(data, "deu")


def test_progress_is_told(tiny_encoder: Encoder, data: Path) -> None:
    told: list[str] = []
    score_tatoeba(tiny_encoder, data, model="tiny", layers=[0], on_language=told.append)
    assert told == ["de", "ja"]


def test_bad_folders(tiny_encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        find_languages(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no tatoeba\.xxx-eng\.xxx here"):
        score_tatoeba(tiny_encoder, tmp_path, model="tiny")
    (tmp_path / "tatoeba.deu-eng.deu").write_text("Eins.\nZwei.\n")
    with pytest.raises(InputError, match=r"tatoeba\.deu-eng\.eng: no such file"):
        read_test(tmp_path, "de")
    (tmp_path / "tatoeba.deu-eng.eng").write_text("One.\n")
    with pytest.raises(InputError, match=r"2 lines, but 1 in tatoeba\.deu-eng\.eng"):
        read_test(tmp_path, "de")
    with pytest.raises(InputError, match=r"no test for 'fr'.*choose from: de"):
        read_test(tmp_path, "fr")


def test_mean_counts_every_language_the_same() -> None:
    scores = [
        Score("m", "t", name, "a", value, n) for name, value, n in (("x", 1.0, 9), ("y", 0.0, 1))
    ]
    assert average_languages(scores) == [Score("m", "t", "mean", "a", 0.5, 10)]


def test_language_table() -> None:
    assert len(THREE_LETTERS) == len(TWO_LETTERS) > 80
    assert all(len(short) == 2 and len(long) == 3 for short, long in THREE_LETTERS.items())


def test_task_names() -> None:
    assert find_tasks("tatoeba") == {"tatoeba": score_tatoeba}
    for names in ("tatoeba,nope", "", ","):
        with pytest.raises(InputError, match="choose from: tatoeba"):
            find_tasks(names)
