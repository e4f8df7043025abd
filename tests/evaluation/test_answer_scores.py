"""F1 and exact match of the scripts of SQuAD and MLQA, computed by hand."""

from __future__ import annotations

import string
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.evaluation.tasks.question_answering import (
    MLQA_ARTICLES,
    normalize_mlqa,
    normalize_squad,
    score_answer,
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Quick, brown fox!", "quick brown fox"),
        ("An  apple\ta day", "apple day"),
        ("theatre and an anthem", "theatre and anthem"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # punctuation is removed before articles
        ("“quoted” – dash", "“quoted” – dash"),  # SQuAD removes ASCII punctuation only
        ("a", ""),
        ("Die Stadt", "die stadt"),
    ],
)
def test_normalization_of_squad(answer: str, expected: str) -> None:
    assert normalize_squad(answer) == expected


@pytest.mark.parametrize(
    ("language", "answer", "expected"),
    [
        ("en", "The “quoted” – dash", "quoted dash"),
        ("en", "$5 (about)", "5 about"),  # ASCII symbols count as punctuation
        ("en", "€5", "€5"),  # other symbols do not
        ("de", "Der Mann, des Jahres", "mann jahres"),
        ("de", "the Haus", "the haus"),
        ("es", "¿Los Ángeles?", "ángeles"),
        ("vi", "cái bàn của tôi", "bàn tôi"),
        ("hi", "राम, श्याम।", "राम श्याम"),
        ("ar", "البيت الكبير", "بيت كبير"),
        ("ar", "خالد", "خ د"),  # the script removes the article inside a word, too
        ("zh", "北京，2008 Olympics年", "北 京 2008 olympics 年"),
        ("zh", "the 山", "the 山"),
    ],
)
def test_normalization_of_mlqa(language: str, answer: str, expected: str) -> None:
    assert normalize_mlqa(answer, language) == expected


def test_a_language_without_rules_is_an_error() -> None:
    with pytest.raises(InputError, match="no rules for answers in 'fr'"):
        normalize_mlqa("le", "fr")


def test_scores_by_hand() -> None:
    # Two words in common of 3 and 4: precision 2/3, recall 1/2, F1 = 4/7.
    assert score_answer("the red old house", ["a red wooden house today"]) == (
        pytest.approx(4 / 7),
        0,
    )
    # Repeated words count as often as they occur on both sides: 2 of 3 and of 2.
    assert score_answer("ba ba ba", ["ba ba"])[0] == pytest.approx(4 / 5)
    # Both scores use the gold answer that fits best.
    assert score_answer("1976", ["in 1976", "1976"]) == (1, 1)
    assert score_answer("nothing", ["in 1976", "1976"]) == (0, 0)
    # Chinese is split into characters: 2 in common of 3 and 2.
    assert score_answer("北京市", ["北京"], partial(normalize_mlqa, language="zh"))[0] == (
        pytest.approx(4 / 5)
    )
    assert score_answer("北京市", ["北京"])[0] == 0
    # Two empty strings are equal but have no word in common, as in both scripts.
    assert score_answer("the", ["a"]) == (0, 1)


WORDS = st.lists(st.sampled_from(["the", "a", "red", "Red", "house,", "2", "“x”"]), max_size=6).map(
    " ".join
)


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3))
def test_scores_equal_the_definition(found: str, answers: list[str]) -> None:
    """F1 = 2PR / (P + R) over words without punctuation."""

    def words(text: str) -> list[str]:
        bare = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in bare.split() if word not in ("a", "an", "the")]

    expected = []
    for answer in answers:
        common = sum((Counter(words(found)) & Counter(words(answer))).values())
        if common:
            precision, recall = common / len(words(found)), common / len(words(answer))
            expected.append(2 * precision * recall / (precision + recall))
    f1, exact = score_answer(found, answers)
    assert f1 == pytest.approx(max(expected, default=0))
    assert exact == any(words(found) == words(answer) for answer in answers)


@given(st.text(max_size=30), st.sampled_from(sorted(MLQA_ARTICLES)))
def test_normalized_answers_have_single_spaces_and_full_scores(text: str, language: str) -> None:
    normal = normalize_mlqa(text, language)
    assert normal == " ".join(normal.split())
    f1, exact = score_answer(text, [text], partial(normalize_mlqa, language=language))
    assert (f1, exact) == (float(bool(normal)), 1)
