"""Treebanks: words, heads and relations, against the `conllu` package and by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.conllu import find_tree_error, read_conllu, read_trees
from calque.io.files import read_lines

DATA = Path(__file__).parent.parent / "data"
UD = DATA / "ud"
WORD = "1\tHi\thi\tINTJ\t_\t_\t0\troot\t_\t_\n"


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "text.conllu"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        list(read_conllu(path))
    assert caught.value.file == str(path)
    return caught.value


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


@pytest.mark.parametrize("path", sorted(UD.glob("*.conllu*")), ids=lambda path: path.name)
def test_all_as_the_conllu_package_reads_it(path: Path) -> None:
    conllu = pytest.importorskip("conllu")
    found = read_trees(path)
    expected = conllu.parse("\n".join(read_lines(path)) + "\n\n")
    assert len(found) == len(expected) > 5
    for ours, theirs in zip(found, expected, strict=True):
        words = [token for token in theirs if isinstance(token["id"], int)]
        assert list(ours.words) == [token["form"] for token in words]
        assert list(ours.upos) == [token["upos"] for token in words]
        assert list(ours.heads) == [token["head"] for token in words]
        assert list(ours.deprels) == [token["deprel"] for token in words]
        assert ours.n_ranges + ours.n_empty_nodes == len(theirs) - len(words)


def test_multiword_tokens_and_empty_nodes_are_there_to_be_read() -> None:
    sentences = read_trees(UD / "en_ewt-ud-dev.conllu")
    assert sum(sentence.n_ranges for sentence in sentences) > 0
    assert sum(sentence.n_empty_nodes for sentence in sentences) > 0


@pytest.mark.parametrize(
    ("heads", "problem"),
    [("20", "cycle at word 1"), ("00", "2 roots"), ("21", "0 roots"), ("__", "no heads")],
)
def test_sentences_that_are_no_trees_are_named(
    place: Callable[[str], Path], heads: str, problem: str
) -> None:
    lines = [f"{n}\tw\t_\tX\t_\t_\t{h}\tdep\t_\t_\n" for n, h in enumerate(heads, start=1)]
    if "cycle" in problem:  # words 1 and 2 on each other, word 3 the root
        lines = [f"{n}\tw\t_\tX\t_\t_\t{h}\tdep\t_\t_\n" for n, h in ((1, 2), (2, 1), (3, 0))]
    path = place(WORD + "\n# a comment\n" + "".join(lines))
    with pytest.raises(InputError, match=problem) as caught:
        read_trees(path)
    assert (caught.value.file, caught.value.line) == (str(path), 4)


def test_an_empty_treebank_is_an_error(place: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="holds no sentence"):
        read_trees(place("# nothing\n"))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_faults_are_found_as_by_walking_up_from_every_word(heads: list[int]) -> None:
    heads = [min(head, len(heads)) for head in heads]
    is_tree = heads.count(0) == 1
    for start in range(1, len(heads) + 1):
        word = start
        for _ in heads:
            word = heads[word - 1] if word else 0
        is_tree &= word == 0
    assert (find_tree_error(heads) is None) == is_tree
