"""Error messages: one line, without control characters, and not too long."""

from __future__ import annotations

import pytest

from calque.errors import InputError, first_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünïcode 猫 \\n", "plain ünïcode 猫 \\n"),
        ("a\nb\r\tc\0", "a\\nb\\r\\tc\\x00"),
        ("\x1b[31mred\x9b1m\x07", "\\x1b[31mred\\x9b1m\\x07"),
        ("\u2028\u202eabc\u2066", "\\u2028\\u202eabc\\u2066"),
        ("\ud800", "\\ud800"),
        (b"bytes", "b'bytes'"),
    ],
)
def test_printable(text: object, shown: str) -> None:
    assert printable(text) == printable(text, None) == shown


def test_long_text_is_shortened() -> None:
    assert printable("x" * 500) == printable("x" * 500, None) == "x" * 500
    assert printable("x" * 501) == "x" * 499 + "…"
    assert printable("\n" * 10, 7) == "\\n\\n\\n…"
    assert printable("x" * 501, None) == "x" * 501


def test_every_part_of_a_message_is_printable() -> None:
    error = InputError("a\nb", file="c\x1bd", line=3, fix="e\rf" * 1000)
    assert str(error).startswith("c\\x1bd, line 3: a\\nb (e\\rfe\\rf")
    assert len(str(error)) < 550
    assert (error.problem, error.file, error.line) == ("a\nb", "c\x1bd", 3)


def test_first_line() -> None:
    assert first_line(ValueError("\n  \n  first \nsecond")) == "first"
    assert first_line(ValueError()) == "ValueError"
