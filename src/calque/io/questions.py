"""Questions on texts in SQuAD's JSON, which XQuAD, MLQA and TyDiQA-GoldP share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from calque.errors import InputError
from calque.io.files import PathLike, display_name, read_chunks

FIX = "give a file in SQuAD's format"


@dataclass(frozen=True, slots=True)
class Answer:
    """Some characters of a text, and where they begin."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the text it is asked on, and the answers that count; none where none is known."""

    name: str
    text: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(path: PathLike) -> list[Question]:
    """Read all questions of a file; an answer must stand where it is said to.

    Test files whose answers are kept secret have blank ones: those are no answers.
    """
    content = b"".join(read_chunks(path))
    try:
        root = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        problem = f"invalid UTF-8 at byte {error.start + 1}"
        raise InputError(
            problem, file=display_name(path), fix="convert the file to UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        problem = f"no JSON: {error.msg}"
        raise InputError(problem, file=display_name(path), line=error.lineno, fix=FIX) from error
    questions = list(_walk(_Node(root, "", path)))
    if not questions:
        raise InputError("holds no question", file=display_name(path), fix=FIX)
    return questions


class _Node:
    """A part of the file that knows where it stands, for messages that name the place."""

    def __init__(self, value: Any, place: str, path: PathLike) -> None:
        self.value, self.place, self.path = value, place, path

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Take a value of a certain kind."""
        found = self.value.get(key, default) if isinstance(self.value, dict) else None
        if not isinstance(found, kind):
            raise self.error(f"no {key}")
        return found

    def children(self, key: str, default: Any = None) -> Iterator[_Node]:
        """Go through a list."""
        for number, value in enumerate(self.get(key, list, default)):
            yield _Node(value, f"{self.place}{key}[{number}].", self.path)

    def error(self, problem: str) -> InputError:
        where = f" in {self.place.rstrip('.')}" if self.place else ""
        return InputError(problem + where, file=display_name(self.path), fix=FIX)


def _walk(root: _Node) -> Iterator[Question]:
    for article in root.children("data"):
        for paragraph in article.children("paragraphs"):
            context = paragraph.get("context", str)
            for entry in paragraph.children("qas"):
                answers = [
                    _read_answer(answer, context)
                    for answer in entry.children("answers", [])
                    if answer.get("text", str)
                ]
                yield Question(
                    str(entry.get("id", (str, int))),  # type: ignore[arg-type]
                    entry.get("question", str),
                    context,
                    tuple(dict.fromkeys(answers)),
                )


def _read_answer(node: _Node, context: str) -> Answer:
    text, start = node.get("text", str), node.get("answer_start", int)
    if start < 0 or not context.startswith(text, start):
        raise node.error(f"{text[:40]!r} is not at character {start} of its text,")
    return Answer(text, start)
