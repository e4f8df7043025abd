"""Induced dictionaries compared with dense formulas, and precision computed by hand."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.dictionaries import parse_entry
from calque.vectors.lexicon import (
    METHODS,
    Lexicon,
    LexiconMethod,
    LexiconSettings,
    WordTranslator,
    build_lexicon,
    find_ranks,
    precision_at_k,
    score_dictionary,
    write_entries,
)
from calque.vectors.static import VectorSpace, WordVectors

Floats = npt.NDArray[np.float64]


def make_space(name: str, matrix: npt.ArrayLike, words: list[str] | None = None) -> VectorSpace:
    rows = np.asarray(matrix, dtype=np.float32)
    return VectorSpace.from_vectors(
        WordVectors(words or [f"{name}{i}" for i in range(len(rows))], rows), name
    )


def make_pair(n_src: int, n_tgt: int, seed: int) -> tuple[VectorSpace, VectorSpace]:
    random = np.random.default_rng(seed)
    src, tgt = random.standard_normal((n_src, 5)), random.standard_normal((n_tgt, 5))
    return make_space("a", src), make_space("b", tgt + 0.5)  # a common part makes hubs


def dense_scores(src: VectorSpace, tgt: VectorSpace, method: LexiconMethod, k: int) -> Floats:
    """Compute the formulas of the papers directly."""
    cosines = src.rows.double().numpy() @ tgt.rows.double().numpy().T
    if method == "nn":
        return cosines
    if method == "inverted-softmax":
        powers = np.exp(30 * cosines)
        return powers / powers.sum(axis=0, keepdims=True)
    src_hubness = np.sort(cosines, axis=1)[:, -k:].mean(axis=1, keepdims=True)
    tgt_hubness = np.sort(cosines, axis=0)[-k:].mean(axis=0, keepdims=True)
    return 2 * cosines - src_hubness - tgt_hubness


def best_but_self(scores: Floats) -> Floats:
    """Return for each score the highest other score in its row."""
    ordered = np.sort(scores)
    return np.where(scores == ordered[:, -1:], ordered[:, -2:-1], ordered[:, -1:])


@given(
    st.sampled_from(METHODS), st.integers(3, 60), st.integers(3, 60), st.integers(1, 3), st.data()
)
def test_best_entries_of_the_formula(
    method: LexiconMethod, n_src: int, n_tgt: int, best: int, data: st.DataObject
) -> None:
    src, tgt = make_pair(n_src, n_tgt, data.draw(st.integers(0, 99)))
    found = build_lexicon(src, tgt, LexiconSettings(method, neighbors=3, best=best))
    scores = dense_scores(src, tgt, method, 3)
    assert found.src.tolist() == np.repeat(np.arange(n_src), best).tolist()
    expected = -np.sort(-scores)[:, :best]
    np.testing.assert_allclose(found.scores.reshape(n_src, best), expected, atol=2e-5)
    np.testing.assert_allclose(scores[found.src, found.tgt], found.scores, atol=2e-5)


@given(st.sampled_from(METHODS), st.integers(3, 40), st.integers(3, 40), st.integers(0, 99))
def test_mutual_entries_are_best_in_both_directions(
    method: LexiconMethod, n_src: int, n_tgt: int, seed: int
) -> None:
    src, tgt = make_pair(n_src, n_tgt, seed)
    found = build_lexicon(src, tgt, LexiconSettings(method, neighbors=3, mutual=True))
    forward, backward = dense_scores(src, tgt, method, 3), dense_scores(tgt, src, method, 3)
    # What is best by less than rounding may or may not be found.
    is_best, is_clear = (
        (forward > best_but_self(forward) + margin)
        & (backward > best_but_self(backward) + margin).T
        for margin in (-2e-5, 2e-5)
    )
    entries = set(zip(found.src.tolist(), found.tgt.tolist(), strict=True))
    assert set(zip(*map(np.ndarray.tolist, is_clear.nonzero()), strict=True)) <= entries
    assert entries <= set(zip(*map(np.ndarray.tolist, is_best.nonzero()), strict=True))
    assert len(set(found.tgt.tolist())) == len(set(found.src.tolist())) == len(found)


def test_mutual_entries_do_not_depend_on_the_direction() -> None:
    src, tgt = make_pair(50, 70, 5)
    settings = LexiconSettings(mutual=True)
    there, back = build_lexicon(src, tgt, settings), build_lexicon(tgt, src, settings)
    entries = set(zip(there.src.tolist(), there.tgt.tolist(), strict=True))
    assert entries == set(zip(back.tgt.tolist(), back.src.tolist(), strict=True))
    assert 0 < len(entries) < 50


def test_csls_avoids_a_hub() -> None:
    # The first target is between both sources, and so is nearest to both.
    src = make_space("a", [[1, 0], [0, 1]])
    tgt = make_space("b", [[1, 1], [1, -1.1], [-1.1, 1]])
    assert build_lexicon(src, tgt, LexiconSettings("nn")).tgt.tolist() == [0, 0]
    assert build_lexicon(src, tgt, LexiconSettings("csls", neighbors=2)).tgt.tolist() == [1, 2]


def test_min_score_and_progress() -> None:
    src, tgt = make_pair(30, 40, 1)
    everything = build_lexicon(src, tgt, LexiconSettings(best=4))
    n_done: list[int] = []
    settings = LexiconSettings(best=4, min_score=-0.1)
    some = build_lexicon(src, tgt, settings, on_rows=n_done.append)
    kept = everything.scores >= -0.1
    assert 0 < kept.sum() < len(everything)
    assert some.tgt.tolist() == everything.tgt[kept].tolist()
    assert some.src.tolist() == everything.src[kept].tolist()
    assert sum(n_done) == settings.n_passes * 30


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_rows", [0, 1, 3, 60])
def test_translations_of_some_words(method: LexiconMethod, n_rows: int) -> None:
    src, tgt = make_pair(90, 120, 3)
    rows = np.random.default_rng(0).permutation(90)[:n_rows]
    settings = LexiconSettings(method, best=5)
    found = WordTranslator.build(src, tgt, settings).find(rows, 5)
    everything = build_lexicon(src, tgt, settings).tgt.reshape(90, 5)
    assert found.tolist() == everything[rows].tolist()


def test_more_translations_than_words() -> None:
    src, tgt = make_pair(20, 4, 3)
    settings = LexiconSettings("nn", best=5)
    assert WordTranslator.build(src, tgt, settings).find(np.arange(20), 10).shape == (20, 4)
    with pytest.raises(
        InputError, match=r"b: 5 translations are requested, but there are 4 words \(request 4"
    ):
        build_lexicon(src, tgt, settings)
    with pytest.raises(
        InputError, match=r"b: 10 neighbors are requested, but there are 4 words \(choose 4"
    ):
        build_lexicon(src, tgt)
    with pytest.raises(InputError, match=r"b: 3 neighbors are requested, but there are 2 words"):
        build_lexicon(src, tgt, LexiconSettings(neighbors=3, hub_words=2))


@pytest.mark.parametrize("method", METHODS)
def test_reversed_translator(method: LexiconMethod) -> None:
    src, tgt = make_pair(30, 40, 2)
    settings = LexiconSettings(method, best=2)
    there, back = WordTranslator.build(src, tgt, settings), WordTranslator.build(tgt, src, settings)
    turned, expected = there.reverse().build_lexicon(), back.build_lexicon()
    assert turned.src.tolist() == expected.src.tolist()
    np.testing.assert_allclose(turned.scores, expected.scores, atol=1e-5)
    best = there.reverse().find(np.arange(40), 2)
    assert best.tolist() == turned.tgt.reshape(40, 2).tolist()


def test_hub_words() -> None:
    src, tgt = make_pair(50, 60, 2)
    some = build_lexicon(src, tgt, LexiconSettings(neighbors=3, hub_words=20))
    cosines = src.rows.double().numpy() @ tgt.rows.double().numpy().T
    src_hubness = np.sort(cosines[:, :20])[:, -3:].mean(axis=1, keepdims=True)
    scores = 2 * cosines - src_hubness - np.sort(cosines[:20], axis=0)[-3:].mean(axis=0)
    assert some.tgt.tolist() == scores.argmax(axis=1).tolist()
    np.testing.assert_allclose(some.scores, scores.max(axis=1), atol=1e-5)
    everything = build_lexicon(src, tgt, LexiconSettings(neighbors=3, hub_words=60))
    assert (
        everything.tgt.tolist()
        == build_lexicon(src, tgt, LexiconSettings(neighbors=3)).tgt.tolist()
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "faiss"}, "no method 'faiss'"),
        ({"best": 0}, "best is 0"),
        ({"neighbors": 0}, "neighbors is 0"),
        ({"hub_words": 0}, "hub_words is 0"),
        ({"best": 2, "mutual": True}, "best is 2, but with mutual"),
    ],
)
def test_invalid_settings(options: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        LexiconSettings(**options)  # type: ignore[arg-type]


def test_written_entries_are_read_back() -> None:
    words = ["eis", "new\xa0york", " lead", "b\u2028c"]
    src = make_space("a", np.eye(4), words)
    tgt = make_space("b", np.eye(4), ["ice", "New York", "x", "d"])
    rows = np.arange(4)
    found = Lexicon(rows, rows, np.array([0.5, 1, 0, -0.12345], dtype=np.float32))
    with_scores, plain = io.StringIO(), io.StringIO()
    assert write_entries(with_scores, found.iterate(src, tgt), with_scores=True) == 1
    assert write_entries(plain, found.iterate(src, tgt), with_scores=False) == 1
    assert with_scores.getvalue().split("\n")[:2] == [
        "eis\tice\t0.5000",
        "new\xa0york\tNew York\t1.0000",
    ]
    lines = plain.getvalue().split("\n")
    assert lines[0] == "eis ice"
    entries = [("eis", "ice"), ("new\xa0york", "New York"), ("b\u2028c", "d")]
    assert [parse_entry(line) for line in lines[:-1]] == entries


def test_different_widths() -> None:
    src, tgt = make_space("en.vec", np.eye(3)), make_space("de.vec", np.eye(4))
    with pytest.raises(InputError, match=r"en\.vec: the vectors have 3 .*de\.vec have 4"):
        build_lexicon(src, tgt, LexiconSettings("nn"))


def test_vectors_are_not_changed() -> None:
    src, tgt = make_pair(30, 40, 1)
    before = src.rows.clone(), tgt.rows.clone()
    for method in METHODS:
        build_lexicon(src, tgt, LexiconSettings(method, mutual=True))
        WordTranslator.build(src, tgt, LexiconSettings(method)).find(np.arange(30), 1)
    assert torch.equal(src.rows, before[0]) and torch.equal(tgt.rows, before[1])


# Precision.

# Words on a circle, in degrees, so that the nearest words are known from the differences.
ENGLISH = {"dog": 0, "cat": 40, "cow": 80, "pig": 120}
GERMAN = {"Hund": 1, "Katze": 47, "Kater": 44, "Kuh": 60, "Rind": 88, "Huhn": 119, "Sau": 137}


def on_circle(degrees: dict[str, int]) -> WordVectors:
    angles = np.radians(list(degrees.values()))
    matrix = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return WordVectors(list(degrees), 3 * matrix)


def translators() -> list[WordTranslator]:
    spaces = (
        VectorSpace.from_vectors(on_circle(w), name)
        for w, name in ((ENGLISH, "en"), (GERMAN, "de"))
    )
    return [WordTranslator.build(*spaces, LexiconSettings("nn"))]


def test_any_translation_of_a_word_is_correct() -> None:
    entries = [
        ("dog", "Hund"),  # ranked first
        ("cat", "Katze"),  # ranked second,
        ("cat", "Kater"),  # but this one is first
        ("cow", "Kuh"),  # ranked second, after Rind
        ("pig", "Sau"),  # ranked second, after Huhn
        ("dog", "Hund"),  # repeated
    ]
    result = score_dictionary(translators(), entries)
    assert result.ranks["nn"].tolist() == [0, 0, 1, 1]
    assert (result.n_words, result.n_known, result.coverage) == (4, 4, 1.0)
    assert result.precision("nn", 1) == 0.5
    assert result.precision("nn", 5) == 1.0


def test_unknown_words() -> None:
    entries = [
        ("dog", "Hund"),
        ("cow", "Kuh"),
        ("cow", "Muhkuh"),  # unknown, but Kuh is not
        ("pig", "Ferkel"),  # unknown, so that pig is wrong
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


def test_no_known_words() -> None:
    result = score_dictionary(translators(), [("gnu", "Gnu"), ("pig", "Ferkel")])
    assert (result.n_known, result.n_unknown_src, result.n_unknown_tgt) == (0, 1, 1)
    assert result.precision("nn", 1) == result.precision("nn", 1, known=True) == 0.0
    with pytest.raises(InputError, match="no entries"):
        score_dictionary(translators(), [])


@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_ranks_of_plain_sets(n_queries: int, width: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 9), min_size=width, max_size=width, unique=True)
    found = [data.draw(row) for _ in range(n_queries)]
    gold = [data.draw(st.lists(st.integers(0, 9), max_size=4)) for _ in range(n_queries)]
    entries = [(query, answer) for query, answers in enumerate(gold) for answer in answers]
    queries, answers = np.array(entries, dtype=np.int64).reshape(-1, 2).T
    ranks = find_ranks(np.array(found), queries, answers)
    for k in range(1, width + 1):
        hits = [bool(set(mine[:k]) & set(right)) for mine, right in zip(found, gold, strict=True)]
        assert precision_at_k(ranks, k) == pytest.approx(sum(hits) / n_queries)
        assert precision_at_k(ranks, k, n_queries + 2) == pytest.approx(sum(hits) / (n_queries + 2))


def test_precision_without_queries() -> None:
    assert precision_at_k(np.zeros(0, dtype=np.int64), 1) == 0.0
