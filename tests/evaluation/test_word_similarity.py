"""Word similarity: lines in the format of SemEval-2017 and RG-65, numbers against SciPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from calque.errors import InputError
from calque.evaluation.tasks.word_similarity import (
    WordPairs,
    compare_words,
    find_tests,
    read_pairs,
    score_word_similarity,
)
from calque.vectors.static import VectorFolder, VectorSpace, WordVectors, write_vectors

# In degrees on a circle: the cosine of two words is that of their difference.
ENGLISH = {"car": 0, "bicycle": 50, "Obama": 120, "spacecraft": 20, "new\xa0york": 10}
GERMAN = {"auto": 5, "fahrrad": 60, "Obama": 100, "raumschiff": 90, "york": 30, "new": 50}
PAIRS = """car\tFahrrad\t2.83
Car\tauto\t3.98
obama\tObama\t4.0
spacecraft\tAuto\t1.2
spacecraft\tGnu\t0.5
bicycle\traumschiff\t2.83
"""


def make_vectors(degrees: dict[str, int]) -> WordVectors:
    angles = np.radians(list(degrees.values()))
    matrix = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return WordVectors(list(degrees), 2 * matrix.astype(np.float32))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    mapped, data = tmp_path / "mapped", tmp_path / "data"
    mapped.mkdir()
    write_vectors(make_vectors(ENGLISH), mapped / "en.vec")
    write_vectors(make_vectors(GERMAN), mapped / "de.vec")
    texts = {
        "semeval17_mono/english.txt": "car\tbicycle\t2.83\ncar\tspacecraft\t1.2\ncar\tObama\t0.1\n",
        "semeval17_mono/farsi.txt": "ماشین\tدوچرخه\t2.92\n",
        "semeval17_cross/en-de.txt": PAIRS,
        "rg65_cross/rg65_EN-DE.txt": PAIRS.lower().removesuffix("\n"),  # as released
    }
    for name, text in texts.items():
        path = data / "word_similarity" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return mapped, data


def test_rows_are_scipys_numbers(folders: tuple[Path, Path]) -> None:
    mapped, data = folders
    heard: list[str] = []
    scores = score_word_similarity(VectorFolder(mapped), data, model="m", on_language=heard.append)
    assert heard == ["en-de", "en-de", "en"]
    found = {(s.variant, s.language, s.metric): (s.value, s.n_items) for s in scores}
    cosines = np.cos(np.radians([60, 5, 20, 15, 40]))  # of the pairs with two known words
    gold = np.array([2.83, 3.98, 4.0, 1.2, 2.83])
    linear = scipy.stats.pearsonr(cosines, gold).statistic
    ranked = scipy.stats.spearmanr(cosines, gold).statistic
    for collection in ("semeval17_cross", "rg65_cross"):
        assert found[collection, "en-de", "pearson_known"] == (pytest.approx(linear, abs=1e-6), 5)
        assert found[collection, "en-de", "spearman_known"] == (pytest.approx(ranked), 5)
        harmonic = scipy.stats.hmean([linear, ranked])
        expected = pytest.approx(harmonic, abs=1e-6)
        assert found[collection, "en-de", "harmonic_mean_known"] == (expected, 5)
        assert found[collection, "en-de", "coverage"] == (5 / 6, 6)
        assert found[collection, "mean", "coverage"] == (5 / 6, 6)
    filled, wanted = np.insert(cosines, 4, cosines.mean()), np.insert(gold, 4, 0.5)
    linear = scipy.stats.pearsonr(filled, wanted).statistic
    assert found["rg65_cross", "en-de", "pearson"] == (pytest.approx(linear, abs=1e-6), 6)


def test_cases_phrases_and_unknown_words() -> None:
    english, german = (
        VectorSpace.of(make_vectors(words), name)
        for words, name in ((ENGLISH, "en"), (GERMAN, "de"))
    )
    src = ["New York", "OBAMA", "obama", "gnu", "new gnu", "car"]
    tgt = ["new york", "Auto", "AUTO", "auto", "auto", "new gnu"]
    cosines = compare_words(english, german, WordPairs(src, tgt, np.ones(6)))
    # New York is a word of its own in English, and the mean of two words in German: 40 degrees.
    expected = [np.cos(np.radians(difference)) for difference in (30, 115, 115)]
    np.testing.assert_allclose(cosines[:3], expected, atol=1e-6)
    assert np.isnan(cosines[3:]).all()


def test_which_tests(folders: tuple[Path, Path]) -> None:
    _, data = folders
    everything = find_tests(data, ["en", "de", "fa"])
    assert [(test.collection, test.name) for test in everything] == [
        ("rg65_cross", "en-de"),
        ("semeval17_cross", "en-de"),
        ("semeval17_mono", "en"),
        ("semeval17_mono", "fa"),
    ]
    assert [test.name for test in find_tests(data, ["en", "de", "fa"], ["fa"])] == ["fa"]
    assert [t.name for t in find_tests(data, ["en", "de"], ["en-de"])] == ["en-de", "en-de"]
    one = find_tests(data / "word_similarity" / "semeval17_mono", ["en"])
    assert [(test.collection, test.name) for test in one] == [("semeval17_mono", "en")]
    with pytest.raises(
        InputError, match=r"no test for 'fa' with vectors \(choose from: en-de en de"
    ):
        find_tests(data, ["en", "de"], ["fa"])
    with pytest.raises(InputError, match="no test for sw here"):
        find_tests(data, ["sw"])
    with pytest.raises(InputError, match="no such folder"):
        find_tests(data / "gone", ["sw"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("car\tauto\t1\ncar\tauto\n", "line 2: not two words and their similarity"),
        ("car auto 1\n", "line 1: not two words"),
        ("car\t \t1\n", "line 1: not two words"),
        ("car\tauto\tmuch\n", "line 1: 'much' is no number"),
        ("car\tauto\tnan\n", "line 1: 'nan' is no number"),
        ("", "holds no pairs"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "en-de.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_pairs(path)
