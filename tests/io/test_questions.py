"""Files of questions, and the errors of invalid files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calque.errors import InputError
from calque.io.questions import Answer, read_questions

QUESTIONS = Path(__file__).parents[1] / "data" / "questions"


@pytest.fixture
def place(tmp_path: Path) -> Callable[[Any], Path]:
    def write(content: Any) -> Path:
        path = tmp_path / "questions.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def wrap(entry: Any, context: Any = "Paris is in France.") -> dict[str, Any]:
    return {"data": [{"paragraphs": [{"context": context, "qas": [entry]}]}]}


@pytest.mark.parametrize("path", sorted(QUESTIONS.rglob("*.json*")), ids=lambda path: path.name)
def test_answers_are_at_their_positions(path: Path) -> None:
    questions = read_questions(path)
    assert len(questions) >= 3
    for question in questions:
        assert question.text.strip() and question.context.strip()
        for answer in question.answers:
            end = answer.start + len(answer.text)
            assert question.context[answer.start : end] == answer.text


def test_one_question_by_hand() -> None:
    first = read_questions(QUESTIONS / "xquad" / "xquad.en.json")[0]
    raw = json.loads((QUESTIONS / "xquad" / "xquad.en.json").read_text())
    entry = raw["data"][0]["paragraphs"][0]["qas"][0]
    assert (first.name, first.text) == (entry["id"], entry["question"])
    said = entry["answers"][0]
    assert first.answers == (Answer(said["text"], said["answer_start"]),)


def test_blank_answers_are_none(place: Callable[[Any], Path]) -> None:
    assert not any(q.answers for q in read_questions(QUESTIONS / "tydiqa/tydiqa.goldp.en.dev.json"))
    entry = {"id": "a", "question": "Where?", "is_impossible": True}
    assert read_questions(place(wrap(entry)))[0].answers == ()


def test_the_same_answer_counts_once(place: Callable[[Any], Path]) -> None:
    answer = {"text": "France", "answer_start": 12}
    entry = {"id": 7, "question": "Where?", "answers": [answer, answer]}
    (question,) = read_questions(place(wrap(entry)))
    assert question.name == "7"
    assert question.answers == (Answer("France", 12),)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "this is not valid JSON"),
        ('{"data":\n [}\n', "line 2 column 3"),
        ("[" * 100_000, "nested too deeply"),
        ([], "does not hold a JSON object"),
        ({}, "there is no valid 'data'"),
        ({"data": []}, "the file has no questions"),
        ('{"data": [' + "9" * 5000 + "]}", "a number of 5000 digits"),
        ('{"data": ["\\ud800"]}', "not valid UTF-8"),
        ({"data": {}}, "there is no valid 'data'"),
        ({"data": [3]}, r"no valid 'paragraphs' in data\[0\]"),
        ({"data": [{"paragraphs": [None]}]}, r"no valid 'context' in data\[0\].paragraphs\[0\]"),
        (wrap(3), "no valid 'answers'"),
        (wrap({}, context="a" * 1_000_001), "'context' is longer than 1,000,000 characters"),
        (wrap({"id": True, "question": "?"}), "no valid 'id'"),
        (wrap({"id": ["a"], "question": "?"}), "no valid 'id'"),
        (wrap({"id": "a", "question": "?", "answers": {"text": "Paris"}}), "no valid 'answers'"),
        (wrap({"id": "a", "question": "?", "answers": ["Paris"]}), "no valid 'text'"),
        *(
            (
                wrap({"id": "a", "question": "?", "answers": [{"text": "P", "answer_start": k}]}),
                problem,
            )
            for k, problem in (
                (-19, "'P' is not at character -19"),
                (10**19, f"'P' is not at character {10**19}"),
                (False, "no valid 'answer_start'"),
                ("0", "no valid 'answer_start'"),
                (0.0, "no valid 'answer_start'"),
            )
        ),
        ({"data": [{}]}, r"no valid 'paragraphs' in data\[0\]"),
        (
            wrap({"id": "a", "answers": []}),
            r"no valid 'question' in data\[0\].paragraphs\[0\].qas\[0\]",
        ),
        (
            wrap({"id": "a", "question": "?"}, context=3),
            r"no valid 'context' in data\[0\].paragraphs\[0\]",
        ),
        (
            wrap({"id": "a", "question": "?", "answers": [{"text": "Rome", "answer_start": 0}]}),
            r"'Rome' is not at character 0 of the context, in .*answers\[0\]",
        ),
        (
            wrap({"id": "a", "question": "?", "answers": [{"text": "Paris"}]}),
            r"no valid 'answer_start' in .*answers\[0\]",
        ),
    ],
)
def test_invalid_files(place: Callable[[Any], Path], content: Any, problem: str) -> None:
    path = place(content)
    with pytest.raises(InputError, match=problem) as caught:
        read_questions(path)
    assert str(caught.value.file) == str(path)
    assert caught.value.fix


def test_invalid_utf8(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(b'{"data": "\xff"}')
    with pytest.raises(InputError, match="not valid UTF-8"):
        read_questions(path)
