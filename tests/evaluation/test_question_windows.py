"""Windows of texts: every token is in one, and answers keep their characters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.evaluation.tasks.question_answering import (
    NOT_HERE,
    QuestionExamples,
    _window_starts,
    encode_questions,
    find_tokens,
)
from calque.io.questions import Answer, Question, read_questions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QUESTIONS = Path(__file__).parents[1] / "data" / "questions"
ALL = [
    question
    for path in sorted(QUESTIONS.rglob("*.json*"))
    for question in read_questions(path)
    if question.answers
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of calque-mini, which covers the scripts of the samples."""
    import torch

    from calque.models.loading import load_checkpoint

    return load_checkpoint(None, torch.float32)[1]


@pytest.fixture(scope="module")
def examples(tokenizer: PreTrainedTokenizerFast) -> QuestionExamples:
    return encode_questions(tokenizer, ALL, 96, stride=32)


def test_windows_equal_pairs_encoded_by_the_tokenizer(
    tokenizer: PreTrainedTokenizerFast, examples: QuestionExamples
) -> None:
    ends = np.cumsum(examples.lengths)
    assert examples.lengths.max() <= 96
    whole = [w for w in range(len(ends)) if (examples.owners == examples.owners[w]).sum() == 1]
    assert whole
    for window in whole:
        question = ALL[examples.owners[window]]
        expected = tokenizer.backend_tokenizer.encode(question.text, question.context).ids
        found = examples.windows.ids[ends[window] - examples.lengths[window] : ends[window]]
        assert found.tolist() == expected


def test_answers_keep_their_characters(examples: QuestionExamples) -> None:
    n_here = 0
    for window, owner in enumerate(examples.owners.tolist()):
        start, end = int(examples.starts[window]), int(examples.ends[window])
        if start == NOT_HERE:
            assert end == NOT_HERE
            continue
        n_here += 1
        first, last = examples.characters(window, start, end)
        answer, context = ALL[owner].answers[0], ALL[owner].context
        begin = answer.start + len(answer.text) - len(answer.text.lstrip())
        stop = answer.start + len(answer.text.rstrip())
        # Tokens may extend beyond the answer on both sides, but must contain all of it ...
        assert first <= begin and stop <= last
        assert answer.text.strip() in context[first:last]
        # ... and the outermost tokens both have something of it.
        assert examples.characters(window, start, start)[1] > begin
        assert examples.characters(window, end, end)[0] < stop
    assert n_here >= len(ALL) - examples.n_lost_answers > 0.9 * len(ALL)


def test_every_token_of_a_text_is_in_a_window(examples: QuestionExamples) -> None:
    for owner, spans in enumerate(examples.spans):
        seen = np.zeros(len(spans), dtype=int)
        for window in np.flatnonzero(examples.owners == owner).tolist():
            begin = int(examples.offsets[window])
            seen[begin : begin + int(examples.n_text[window])] += 1
        assert seen.all()


@given(st.integers(0, 60), st.integers(2, 20), st.integers(1, 30), st.data())
def test_spans_of_half_a_window_are_completely_in_one(
    n_tokens: int, room: int, stride: int, data: st.DataObject
) -> None:
    starts = _window_starts(n_tokens, room, stride)
    assert starts[0] == 0 and starts[-1] + room >= n_tokens
    assert len(starts) == 1 or starts[-2] + room < n_tokens  # no superfluous window
    if n_tokens:
        first = data.draw(st.integers(0, n_tokens - 1))
        last = min(n_tokens - 1, first + room // 2 - 1)
        assert any(begin <= first and last < begin + room for begin in starts)


def test_tokens_of_an_answer_by_hand() -> None:
    spans = np.array([[0, 3], [3, 8], [8, 9], [9, 9], [9, 13]])  # "Die| Zeit|,|| Ort"
    assert find_tokens(spans, Answer("Zeit", 4)) == (1, 1)
    assert find_tokens(spans, Answer("Zeit, Ort", 4)) == (1, 4)
    assert find_tokens(spans, Answer(" Zeit ", 3)) == (1, 1)
    assert find_tokens(spans, Answer("x", 40)) is None


def test_long_questions_are_truncated_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    question = Question("q", "why " * 100, "Because of rain.", (Answer("rain", 11),))
    examples = encode_questions(tokenizer, [question], 40, stride=10)
    assert examples.n_cut_questions == 1
    assert examples.lengths.max() <= 40
    assert examples.starts.max() > 0
    with pytest.raises(InputError, match="too short for a question"):
        encode_questions(tokenizer, [question], 5, stride=10)


def test_an_answer_longer_than_any_window_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "the old house stood on a hill " * 8
    question = Question("q", "What?", text, (Answer(text, 0),))
    examples = encode_questions(tokenizer, [question], 32, stride=10)
    assert examples.n_lost_answers == 1
    assert not examples.starts.any()


def test_a_blank_text_has_one_window_without_text(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = encode_questions(tokenizer, [Question("q", "What?", " ", ())], 32, stride=10)
    assert examples.n_text.tolist() == [0]
    assert not examples.collate(np.array([0])).is_text.any()


def test_questions_whose_answers_are_all_long_are_counted(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "the old house stood on a hill"
    both = Question("1", "What?", text, (Answer(text, 0), Answer("house", 8)))
    long = Question("2", "What?", text, (Answer(text, 0),))
    unknown = Question("3", "What?", text, ())
    questions = [both, long, unknown]
    examples = encode_questions(tokenizer, questions, 64, stride=10)
    assert examples.count_longer(questions, 3) == 1
    assert examples.count_longer(questions, 30) == 0
