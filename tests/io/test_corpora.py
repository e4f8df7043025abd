from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.bitext import read_paragraphs, read_sentences
from calque.io.files import SkippedLines


@pytest.fixture
def place(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "text"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_blank_lines_part_paragraphs(place):
    path = place("\na\nb\n\n \t\nc\n\nd")
    assert list(read_sentences(path)) == ["a", "b", "c", "d"]
    assert list(read_paragraphs(path)) == [["a", "b"], ["c"], ["d"]]


def test_long_paragraphs_are_cut(place):
    path = place("a\nb\nc\nd\n\ne\n")
    assert list(read_paragraphs(path, max_sentences=2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(read_paragraphs(path, max_sentences=3)) == [["a", "b", "c"], ["d"], ["e"]]


def test_bad_sentences_are_named_or_skipped(place):
    path = place(b"one\n\n\xff\nfour\n")
    with pytest.raises(InputError, match="line 3"):
        list(read_sentences(path))
    skipped = SkippedLines()
    assert list(read_paragraphs(path, skipped)) == [["one"], ["four"]]
    assert skipped.n_lines == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.sampled_from(["a", "b", "", " "])), most=st.integers(1, 4))
def test_paragraphs_hold_every_sentence(place, lines, most):
    path = place("".join(line + "\n" for line in lines))
    paragraphs = list(read_paragraphs(path, max_sentences=most))
    assert list(chain.from_iterable(paragraphs)) == list(read_sentences(path))
    assert list(read_sentences(path)) == [line for line in lines if line.strip()]
    assert all(1 <= len(paragraph) <= most for paragraph in paragraphs)
