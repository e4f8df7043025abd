"""Lexicon induction: numbers counted by hand, and MUSE's rules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.evaluation.tasks.lexicon_induction import (
    find_pairs,
    score_dictionary,
    score_lexicon_induction,
)
from calque.vectors.lexicon import LexiconSettings, Translator
from calque.vectors.static import VectorFolder, VectorSpace, WordVectors, write_vectors

# On a circle, in degrees: each English word's nearest German ones are known by their difference.
ENGLISH = {"dog": 0, "cat": 40, "cow": 80, "pig": 120}
GERMAN = {"Hund": 1, "Katze": 47, "Kater": 44, "Kuh": 60, "Rind": 88, "Huhn": 119, "Sau": 137}


def on_circle(degrees: dict[str, int]) -> WordVectors:
    angles = np.radians(list(degrees.values()))
    matrix = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return WordVectors(list(degrees), 3 * matrix)


def translators() -> list[Translator]:
    spaces = (VectorSpace.of(on_circle(w), name) for w, name in ((ENGLISH, "en"), (GERMAN, "de")))
    return [Translator.make(*spaces, LexiconSettings("nn"))]


def test_a_word_counts_once_and_any_translation_is_right() -> None:
    entries = [
        ("dog", "Hund"),  # found first
        ("cat", "Katze"),  # found second,
        ("cat", "Kater"),  # but this one first
        ("cow", "Kuh"),  # found second, after Rind
        ("pig", "Sau"),  # found second, after Huhn
        ("dog", "Hund"),  # a repetition changes nothing
    ]
    result = score_dictionary(translators(), entries)
    assert result.ranks["nn"].tolist() == [0, 0, 1, 1]
    assert (result.n_words, result.n_known, result.coverage) == (4, 4, 1.0)
    assert result.precision("nn", 1) == 0.5
    assert result.precision("nn", 5) == 1.0


def test_unknown_words_are_wrong_or_left_out() -> None:
    entries = [
        ("dog", "Hund"),
        ("cow", "Kuh"),
        ("cow", "Muhkuh"),  # unknown, but Kuh is not
        ("pig", "Ferkel"),  # unknown: so pig cannot be right
        ("gnu", "Hund"),  # has no vector
        ("emu", "Emu"),
    ]
    result = score_dictionary(translators(), entries)
    assert (result.n_words, result.n_unknown_src, result.n_unknown_tgt) == (5, 2, 1)
    assert result.coverage == 2 / 5
    assert result.precision("nn", 1) == 1 / 5
    assert result.precision("nn", 1, known=True) == 1 / 2
    assert result.precision("nn", 10) == 2 / 5
    assert result.precision("nn", 10, known=True) == 1.0


def test_nothing_known() -> None:
    result = score_dictionary(translators(), [("gnu", "Gnu"), ("pig", "Ferkel")])
    assert (result.n_known, result.n_unknown_src, result.n_unknown_tgt) == (0, 1, 1)
    assert result.precision("nn", 1) == result.precision("nn", 1, known=True) == 0.0
    with pytest.raises(InputError, match="no entries"):
        score_dictionary(translators(), [])


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Vectors of 30 words in three languages, the same up to little noise, and dictionaries."""
    mapped, muse = tmp_path / "mapped", tmp_path / "data" / "muse"
    mapped.mkdir()
    muse.mkdir(parents=True)
    random = np.random.default_rng(0)
    matrix = random.standard_normal((30, 16)).astype(np.float32)
    for language in ("de", "en", "fr"):
        noise = 0.01 * random.standard_normal(matrix.shape).astype(np.float32)
        words = [f"{language}{row}" for row in range(30)]
        write_vectors(WordVectors(words, matrix + noise), mapped / f"{language}.vec")
    for src, tgt in (("en", "de"), ("de", "en"), ("en", "fr"), ("en", "en"), ("en", "sw")):
        lines = [f"{src}{row} {tgt}{row}\n" for row in range(20, 40)]  # ten of them unknown
        (muse / f"{src}-{tgt}.5000-6500.txt").write_text("".join(lines))
        (muse / f"{src}-{tgt}.0-5000.txt").write_text("x y\n")
    return mapped, tmp_path / "data"


def test_rows_of_all_pairs_with_vectors(folders: tuple[Path, Path]) -> None:
    heard: list[str] = []
    mapped, data = folders
    vectors = VectorFolder(mapped)
    scores = score_lexicon_induction(vectors, data, model="m", on_language=heard.append)
    assert heard == ["de-en", "en-de", "en-fr"]
    assert len(scores) == (3 + 1) * 2 * 7
    found = {(s.language, s.variant, s.metric): (s.value, s.n_items) for s in scores}
    for method in ("nn", "csls"):
        for pair in heard:
            assert found[pair, method, "precision_at_1"] == (0.5, 20)
            assert found[pair, method, "precision_at_1_known"] == (1.0, 10)
            assert found[pair, method, "coverage"] == (0.5, 20)
        assert found["mean", method, "precision_at_10"] == (0.5, 60)
    assert {(s.model, s.task) for s in scores} == {("m", "lexicon_induction")}


def test_which_pairs(folders: tuple[Path, Path]) -> None:
    _, data = folders
    known = ["de", "en", "fr"]
    assert find_pairs(data, known, ["fr"]) == ["en-fr"]
    assert find_pairs(data / "muse", known, ["de", "en-de"]) == ["de-en", "en-de"]
    assert find_pairs(data, known, ["en"]) == ["de-en", "en-de", "en-fr"]
    assert find_pairs(data, known, ["en-en"]) == ["en-en"]
    with pytest.raises(InputError, match=r"no test for 'sw' with vectors of both .*de-en en-de"):
        find_pairs(data, known, ["sw"])
    with pytest.raises(InputError, match="no test for any two of fr sw"):
        find_pairs(data, ["fr", "sw"])
    with pytest.raises(InputError, match=r"no xx-yy\.5000-6500\.txt here"):
        find_pairs(data.parent / "mapped", known)
    with pytest.raises(InputError, match="no such folder"):
        find_pairs(data / "gone", known)
