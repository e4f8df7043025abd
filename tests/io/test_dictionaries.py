from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.dictionaries import group_translations, read_dictionary, write_dictionary
from calque.io.files import SkippedLines

SAMPLE = Path(__file__).parent.parent / "data" / "en-de.dictionary.txt"


@pytest.fixture
def place(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "dictionary.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_entries_come_in_order_with_repetitions():
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
def test_scores_are_passed_over(place, score):
    assert list(read_dictionary(place(f"ice cream\tEis\t{score}\n"))) == [("ice cream", "Eis")]


def test_translations_are_grouped():
    groups = group_translations(read_dictionary(SAMPLE))
    assert groups["cat"] == ["Katze", "Kater"]
    assert list(groups) == ["cat", "dog", "house", "ice cream", "skyscraper"]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a b\nice cream Eis\n", 2, "3 words where 2 are due"),
        ("a b\n\n", 2, "0 words where 2 are due"),
        ("alone\n", 1, "1 words where 2 are due"),
        ("a\tb\tc\n", 1, "3 words where 2 are due"),
        ("a\tb\t1.2.3\n", 1, "3 words where 2 are due"),
        ("a b 0.5\n", 1, "3 words where 2 are due"),
        ("a\t\t0.5\n", 1, "an empty side"),
        ("a\t\n", 1, "an empty side"),
        (b"a b\n\xff b\n", 2, "invalid UTF-8 at byte 1"),
    ],
)
def test_bad_lines_are_named(place, text, line, problem):
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
def test_any_entries_survive_a_round_trip(tmp_path, entries):
    path = tmp_path / "dictionary.txt.gz"
    assert write_dictionary(path, entries) == len(entries)
    assert list(read_dictionary(path)) == entries
    grouped = group_translations(entries)
    assert {(src, tgt) for src in grouped for tgt in grouped[src]} == set(entries)


@pytest.mark.parametrize(
    "entry", [("", "x"), ("a\tb", "x"), ("a", "x\n"), ("a ", "x"), ("a", "\0")]
)
def test_entries_that_would_break_the_file_are_refused(tmp_path, entry):
    path = tmp_path / "dictionary.txt"
    with pytest.raises(InputError, match="entry 2"):
        write_dictionary(path, [("fine", "fein"), entry])
    assert not path.exists()
