import sys
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calque.text.corpora import read_conllu, read_paragraphs, read_sentences
from calque.text.files import SkippedLines
from calque.types import InputError, MissingExtra

DATA = Path(__file__).parent.parent / "data"
WORD = "1\tHi\thi\tINTJ\t_\t_\t0\troot\t_\t_\n"


@pytest.fixture
def place(tmp_path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "text"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refusal(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        list(read_conllu(path))
    assert caught.value.file == str(path)
    return caught.value


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


def test_multiword_tokens_give_their_words():
    first, second, third = read_conllu(DATA / "fr_gsd.conllu")
    assert first.text == "Aviator, un film sur la vie de Hughes."
    assert " ".join(second.words) == "Elle lutte pour échapper à les tueurs à ses trousses ."
    assert " ".join(second.upos) == "PRON VERB ADP VERB ADP DET NOUN ADP DET NOUN PUNCT"
    assert second.heads == (2, 0, 4, 2, 7, 7, 4, 10, 10, 4, 2)
    assert second.deprels[:5] == ("nsubj", "root", "mark", "advcl", "case")
    assert second.text == "Elle lutte pour échapper aux tueurs à ses trousses."
    assert third.words[10] == "25 785"
    assert [s.n_ranges for s in (first, second, third)] == [0, 1, 1]


def test_empty_nodes_are_left_out():
    (sentence,) = read_conllu(DATA / "empty_node.conllu")
    assert sentence.words == ("She", "reads", "and", "he", "too", ".")
    assert sentence.heads == (2, 0, 4, 2, 4, 2)
    assert (sentence.n_ranges, sentence.n_empty_nodes) == (0, 1)


def test_text_and_end_of_file_may_be_missing(place):
    sentences = list(read_conllu(place(f"# text = Hi!\n{WORD}\n\n{WORD.rstrip()}")))
    assert [sentence.text for sentence in sentences] == ["Hi!", "Hi"]


def test_a_file_of_comments_holds_no_sentence(place):
    assert list(read_conllu(place("# newdoc\n\n# more\n"))) == []


def test_tags_without_trees_are_read(place):
    path = place("1\ta\t_\tDET\t_\t_\t_\t_\t_\t_\n2\tb\t_\tNOUN\t_\t_\t_\t_\t_\t_\n")
    (sentence,) = read_conllu(path)
    assert sentence.upos == ("DET", "NOUN")
    assert sentence.heads == sentence.deprels == ()


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (f"# text = Hi\n{WORD}\n1\tcut\toff\n", 4, "3 columns"),
        (WORD.replace("\t", " "), 1, "1 columns"),
        (WORD + WORD.replace("1\t", "x\t", 1), 2, "not a valid ID"),
        (WORD + WORD.replace("1\t", "3\t", 1), 2, "word 3 where word 2 is due"),
        (WORD + WORD, 2, "word 1 where word 2 is due"),
        (WORD.replace("\t0\t", "\tx\t"), 1, "head"),
        (WORD.replace("\t0\t", "\t2\t"), 1, "head 2 of word 1"),
        (WORD.replace("\t0\t", "\t1\t"), 1, "head 1 of word 1"),
        (WORD + WORD.replace("\t0\t", "\t_\t").replace("1\t", "2\t", 1), 2, "head _ of word 2"),
        (WORD + "\n" + "nul\0\n", 3, "NUL byte"),
    ],
)
def test_malformed_lines_are_named(place, text, line, problem):
    error = refusal(place(text))
    assert error.line == line
    assert problem in error.problem
    assert error.fix


def test_a_missing_library_names_its_extra(monkeypatch, place):
    monkeypatch.setitem(sys.modules, "conllu", None)
    with pytest.raises(MissingExtra, match=r"calque\[eval\]"):
        list(read_conllu(place(WORD)))
