"""Questions in the JSON format of SQuAD, which XQuAD, MLQA and TyDiQA-GoldP share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calque.errors import InputError
from calque.io.files import PathLike, display_name, max_line_bytes
from calque.io.structured import read_json

FIX = "use a file in the format of SQuAD"


@dataclass(frozen=True, slots=True)
class Answer:
    """A part of the context, and the character at which it begins."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its context, and the correct answers, which may be unknown."""

    name: str
    text: str
    context: str
    answers: tuple[Answer, ...]


def read_questions(path: PathLike) -> list[Question]:
    """Read all questions of a file; an answer that is not at its position is an InputError.

    Test files with secret answers have blank ones, which are left out.
    """
    root = read_json(Path(path), dict, fix=FIX)
    questions = list(_read_all(_Node(root, "", path)))
    if not questions:
        raise InputError("the file has no questions", file=display_name(path), fix=FIX)
    return questions


class _Node:
    """A part of the JSON document and its location, for error messages."""

    def __init__(self, value: Any, location: str, path: PathLike) -> None:
        self.value, self.location, self.path = value, location, path

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the value of a key; raise InputError unless it has the given type."""
        found = self.value.get(key, default) if isinstance(self.value, dict) else None
        if not isinstance(found, kind) or isinstance(found, bool):
            raise self.error(f"there is no valid {key!r}")
        if isinstance(found, str) and len(found) > max_line_bytes():
            raise self.error(f"{key!r} is longer than {max_line_bytes():,} characters")
        return found

    def children(self, key: str, default: Any = None) -> Iterator[_Node]:
        """Yield the items of a list."""
        for number, value in enumerate(self.get(key, list, default)):
            yield _Node(value, f"{self.location}{key}[{number}].", self.path)

    def error(self, problem: str) -> InputError:
        where = f" in {self.location.rstrip('.')}" if self.location else ""
        return InputError(problem + where, file=display_name(self.path), fix=FIX)


def _read_all(root: _Node) -> Iterator[Question]:
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
                    str(entry.get("id", (str, int))),
                    entry.get("question", str),
                    context,
                    tuple(dict.fromkeys(answers)),
                )


def _read_answer(node: _Node, context: str) -> Answer:
    text, start = node.get("text", str), node.get("answer_start", int)
    if start < 0 or not context.startswith(text, start):
        raise node.error(f"the answer {text[:40]!r} is not at character {start} of the context,")
    return Answer(text, start)
