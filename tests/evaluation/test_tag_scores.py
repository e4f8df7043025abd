from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics import f1_score, precision_score, recall_score

from calque.evaluation.tasks.tagging import repair_spans, score_runs, score_spans, score_words
from calque.models.heads import NO_LABEL

SPANS = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
# Without X: seqeval since 1.0, unlike the version that XTREME used, takes one letter for O.
PARTS = ["ADJ", "INTJ", "NOUN", "SCONJ", "SYM", "VERB"]


def draw_sentences(n_tags: int) -> st.SearchStrategy[list[tuple[list[int], list[int]]]]:
    tag = st.integers(0, n_tags - 1)
    word = st.tuples(tag, tag)
    sentence = st.lists(word, min_size=1, max_size=8).map(lambda w: tuple(map(list, zip(*w))))  # noqa: B905
    return st.lists(sentence, min_size=1, max_size=4)  # type: ignore[return-value]


def flatten(
    sentences: list[tuple[list[int], list[int]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    gold, found = (np.array([tag for s in sentences for tag in s[side]]) for side in (0, 1))
    return gold, found, np.array([len(s[0]) for s in sentences])


@given(draw_sentences(len(SPANS)))
def test_span_scores_equal_seqeval(sentences: list[tuple[list[int], list[int]]]) -> None:
    gold, found, lengths = flatten(sentences)
    items, shares = score_spans(gold, found, SPANS, lengths)
    named = [[[SPANS[tag] for tag in s[side]] for s in sentences] for side in (0, 1)]
    assert items.score / 100 == pytest.approx(f1_score(*named, zero_division=0))
    assert shares["precision"] / 100 == pytest.approx(precision_score(*named, zero_division=0))
    assert shares["recall"] / 100 == pytest.approx(recall_score(*named, zero_division=0))
    for k, (here, there) in enumerate(zip(*named, strict=True)):
        if items.denominators[k]:
            share = items.numerators[k] / items.denominators[k]
            assert share == pytest.approx(f1_score([here], [there], zero_division=0))


@given(draw_sentences(len(PARTS)))
def test_run_scores_equal_seqeval(sentences: list[tuple[list[int], list[int]]]) -> None:
    gold, found, lengths = flatten(sentences)
    items, _ = score_runs(gold, found, PARTS, lengths)
    named = [[[PARTS[tag] for tag in s[side]] for s in sentences] for side in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns that these are not span tags
        assert items.score / 100 == pytest.approx(f1_score(*named, zero_division=0))


def test_word_scores_by_hand() -> None:
    gold, found = np.array([0, 1, NO_LABEL, 2, 2]), np.array([0, 2, 1, NO_LABEL, 2])
    items = score_words(gold, found, np.array([3, 2]))
    assert items.numerators.tolist() == [1, 1]
    assert items.denominators.tolist() == [2, 2]
    assert items.score == 50


def test_word_without_prediction_is_outside_of_spans() -> None:
    gold = np.array([0, 2, 4])
    items, _ = score_spans(gold, np.array([0, NO_LABEL, NO_LABEL]), SPANS, np.array([3]))
    assert items.score == 0  # the predicted span is one word too short


@given(draw_sentences(len(SPANS)))
def test_repair_gives_valid_tags_and_the_same_score(
    sentences: list[tuple[list[int], list[int]]],
) -> None:
    gold, found, lengths = flatten(sentences)
    repaired, n_repaired = repair_spans(found, SPANS, lengths)
    numbers = np.array([SPANS.index(name) for name in repaired])
    assert n_repaired == int((numbers != found).sum())
    assert (
        score_spans(gold, numbers, SPANS, lengths)[0].score
        == score_spans(gold, found, SPANS, lengths)[0].score
    )
    assert repair_spans(numbers, SPANS, lengths)[1] == 0
