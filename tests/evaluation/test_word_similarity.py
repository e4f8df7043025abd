"""Word similarity: lines in the format of SemEval-2017 and RG-65, values against SciPy."""

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
    measure,
    read_pairs,
)
from calque.vectors.static import VectorFolder, VectorSpace, WordVectors

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
    make_vectors(ENGLISH).save(mapped / "en.vec")
    make_vectors(GERMAN).save(mapped / "de.vec")
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


def test_correlations_agree_with_scipy(folders: tuple[Path, Path]) -> None:
    mapped, data = folders
    scores = measure(VectorFolder(mapped), data)
    assert [(each.language, each.n_items) for each in scores] == [
        ("en-de:rg65_cross", 6),
        ("en-de:semeval17_cross", 6),
        ("en", 3),
    ]
    assert [each.notes["collection"] for each in scores][1:] == [
        "semeval17_cross",
        "semeval17_mono",
    ]
    cosines = np.cos(np.radians([60, 5, 20, 15, 40]))  # of the pairs with two known words
    gold = np.array([2.83, 3.98, 4.0, 1.2, 2.83])
    pearson = scipy.stats.pearsonr(cosines, gold).statistic
    spearman = scipy.stats.spearmanr(cosines, gold).statistic
    filled, wanted = np.insert(cosines, 4, cosines.mean()), np.insert(gold, 4, 0.5)
    expected = {
        "pearson_known": 100 * pearson,
        "spearman_known": 100 * spearman,
        "harmonic_mean_known": 100 * scipy.stats.hmean([pearson, spearman]),
        "pearson": 100 * scipy.stats.pearsonr(filled, wanted).statistic,
        "coverage": 100 * 5 / 6,
    }
    for each in scores[:2]:
        assert next(iter(each.metrics)) == "harmonic_mean"
        found = {name: each.metrics[name] for name in expected}
        assert found == pytest.approx(expected, abs=1e-4)
        assert each.items is None


def test_cases_phrases_and_unknown_words() -> None:
    english, german = (
        VectorSpace.from_vectors(make_vectors(words), name)
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
    with pytest.raises(InputError, match="no test for sw"):
        find_tests(data, ["sw"])
    with pytest.raises(InputError, match="the folder does not exist"):
        find_tests(data / "gone", ["sw"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("car\tauto\t1\ncar\tauto\n", "line 2: the line is not two words and their similarity"),
        ("car auto 1\n", "line 1: the line is not two words"),
        ("car\t \t1\n", "line 1: the line is not two words"),
        ("car\tauto\tmuch\n", "line 1: 'much' is not a number"),
        ("car\tauto\tnan\n", "line 1: 'nan' is not a number"),
        ("", "has no word pairs"),
    ],
)
def test_invalid_lines(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "en-de.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_pairs(path)
