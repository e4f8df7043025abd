"""Lexicon induction: MUSE's files, and scores of vectors that are almost equal in all languages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.evaluation.tasks.lexicon_induction import find_pairs, measure
from calque.vectors.static import VectorFolder, WordVectors


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
        WordVectors(words, matrix + noise).save(mapped / f"{language}.vec")
    for src, tgt in (("en", "de"), ("de", "en"), ("en", "fr"), ("en", "en"), ("en", "sw")):
        lines = [f"{src}{row} {tgt}{row}\n" for row in range(20, 40)]  # ten of them unknown
        (muse / f"{src}-{tgt}.5000-6500.txt").write_text("".join(lines))
        (muse / f"{src}-{tgt}.0-5000.txt").write_text("x y\n")
    return mapped, tmp_path / "data"


def test_scores_of_all_pairs_with_vectors(folders: tuple[Path, Path]) -> None:
    steps: list[tuple[int, int]] = []
    mapped, data = folders
    scores = measure(VectorFolder(mapped), data, on_progress=lambda *step: steps.append(step))
    assert [each.language for each in scores] == ["de-en", "en-de", "en-fr"]
    assert steps[-1] == (3, 3)
    for each in scores:
        assert next(iter(each.metrics)) == "precision_at_1_csls"
        assert each.n_items == 20
        for method in ("nn", "csls"):
            assert each.metrics[f"precision_at_1_{method}"] == 50
            assert each.metrics[f"precision_at_10_{method}"] == 50
            assert each.metrics[f"precision_at_1_{method}_known"] == 100
        assert each.metrics["coverage"] == 50
        assert each.counts == {"unknown_src": 10, "unknown_tgt": 0}


def test_items_are_source_words_in_the_order_of_the_dictionary(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    (tmp_path / "vectors").mkdir()
    more = " a b c d e f"  # CSLS looks at ten neighbors
    for name, words in (("de", "eins zwei drei vier Hund"), ("en", "four three two one dog")):
        matrix = generator.normal(size=(11, 4)).astype(np.float32)
        vectors = WordVectors((words + more).split(), matrix)
        vectors.save(tmp_path / "vectors" / f"{name}.vec")
    entries = "zwei two\nsechs six\neins one\neins won\ndrei trio\nHund dog\n"
    (tmp_path / "de-en.5000-6500.txt").write_text(entries)
    (scores,) = measure(VectorFolder(tmp_path / "vectors"), tmp_path)
    assert scores.metrics["coverage"] == 60
    assert scores.counts == {"unknown_src": 1, "unknown_tgt": 1}
    assert scores.items is not None
    assert scores.items.score == pytest.approx(scores.metrics["precision_at_1_csls"])
    assert len(scores.items.numerators) == scores.n_items == 5
    assert scores.items.numerators[[1, 3]].tolist() == [0, 0]  # sechs, and drei's trio


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
    with pytest.raises(InputError, match=r"no files xx-yy\.5000-6500\.txt"):
        find_pairs(data.parent / "mapped", known)
    with pytest.raises(InputError, match="the folder does not exist"):
        find_pairs(data / "gone", known)
