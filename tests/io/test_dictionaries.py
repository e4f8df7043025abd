"""Bilingual dictionaries: entries, scores, and the errors of bad lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.dictionaries import read_dictionary
from calque.io.files import SkippedLines

SAMPLE = Path(__file__).parent.parent / "data" / "en-de.dictionary.txt"


@pytest.fixture
def place(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "dictionary.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_entries_keep_order_and_repetitions():
    assert list(read_dictionary(SAMPLE)) == [
        ("cat", "Katze"),
        ("cat", "Kater"),
        ("dog", "Hund"),
        ("house", "Haus"),
        ("ice cream", "Eis"),
        ("cat", "Katze"),
        ("skyscraper", "Wolkenkratzer"),
    ]


@pytest.mark.parametrize("score", ["0.8431", "-0.02", "1", "1.5e-05", "2E+3"])
def test_scores_are_ignored(place, score):
    assert list(read_dictionary(place(f"ice cream\tEis\t{score}\n"))) == [("ice cream", "Eis")]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a b\nice cream Eis\n", 2, "the line has 3 words instead of 2"),
        ("a b\n\n", 2, "the line has 0 words instead of 2"),
        ("alone\n", 1, "the line has 1 words instead of 2"),
        ("a\tb\tc\n", 1, "the line has 3 columns instead of 2"),
        ("a\tb\t1.2.3\n", 1, "the line has 3 columns instead of 2"),
        ("a b 0.5\n", 1, "the line has 3 words instead of 2"),
        ("a\t\t0.5\n", 1, "one side is empty"),
        ("a\t\n", 1, "one side is empty"),
        (b"a b\n\xff b\n", 2, "invalid UTF-8 at byte 1"),
    ],
)
def test_bad_lines(place, text, line, problem):
    path = place(text)
    with pytest.raises(InputError) as caught:
        list(read_dictionary(path))
    error = caught.value
    assert (error.file, error.line, error.problem) == (str(path), line, problem)
    assert error.fix


def test_bad_lines_can_be_skipped(place):
    skipped = SkippedLines()
    path = place("a b\nice cream Eis\nc d\n")
    assert list(read_dictionary(path, skipped)) == [("a", "b"), ("c", "d")]
    assert skipped.n_lines == 1


WORDS = st.text(st.characters(exclude_characters="\n\r\t\0\ufeff", codec="utf-8"), min_size=1)
TRIMMED = WORDS.map(str.strip).filter(bool)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.lists(st.tuples(TRIMMED, TRIMMED)))
def test_any_entries_with_tabs(place, entries):
    path = place("".join(f"{src}\t{tgt}\n" for src, tgt in entries))
    assert list(read_dictionary(path)) == entries
