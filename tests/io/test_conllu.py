"""CoNLL-U against the `conllu` package, tagged sentences, and spans against seqeval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from calque.errors import InputError
from calque.io.conllu import (
    TaggedSentence,
    check_bio_tags,
    count_spans,
    find_spans,
    find_tree_error,
    join_characters,
    read_conllu,
    read_tagged,
    read_trees,
    sample_evenly,
)
from calque.io.files import read_lines

DATA = Path(__file__).parent.parent / "data"
UD = DATA / "ud"
TAGGED = DATA / "tagged"
WORD = "1\tHi\thi\tINTJ\t_\t_\t0\troot\t_\t_\n"


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "text.conllu") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def read_error(path: Path, read: Callable[[Path], Iterable[object]] = read_conllu) -> InputError:
    with pytest.raises(InputError) as caught:
        list(read(path))
    assert caught.value.file == str(path)
    return caught.value


def test_multiword_tokens():
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


def test_a_file_of_comments_has_no_sentences(place):
    assert list(read_conllu(place("# newdoc\n\n# more\n"))) == []


def test_tags_without_trees_are_read(place):
    path = place("1\ta\t_\tDET\t_\t_\t_\t_\t_\t_\n2\tb\t_\tNOUN\t_\t_\t_\t_\t_\t_\n")
    (sentence,) = read_conllu(path)
    assert sentence.upos == ("DET", "NOUN")
    assert sentence.heads == sentence.deprels == ()


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (f"# text = Hi\n{WORD}\n1\tcut\toff\n", 4, "3 columns instead of 10"),
        (WORD.replace("\t", " "), 1, "1 columns instead of 10"),
        (WORD + WORD.replace("1\t", "x\t", 1), 2, "not a valid word ID"),
        (WORD.replace("1\t", "9" * 5000 + "\t", 1), 1, "not a valid word ID"),
        (WORD.replace("\t0\t", "\t" + "9" * 5000 + "\t"), 1, "is not a number"),
        (WORD + WORD.replace("1\t", "3\t", 1), 2, "the word has number 3 instead of 2"),
        (WORD + WORD, 2, "the word has number 1 instead of 2"),
        (WORD.replace("\t0\t", "\tx\t"), 1, "head"),
        (WORD.replace("\t0\t", "\t2\t"), 1, "word 1 has the head 2"),
        (WORD.replace("\t0\t", "\t1\t"), 1, "word 1 has the head 1"),
        (
            WORD + WORD.replace("\t0\t", "\t_\t").replace("1\t", "2\t", 1),
            2,
            "has the head _",
        ),
        (WORD + "\n" + "nul\0\n", 3, "NUL byte"),
        (WORD.replace("1\t", "١\t", 1), 1, "not a valid word ID"),
        (WORD.replace("1\t", "3-1\t", 1), 1, "'3-1' is not a valid word ID"),
        (WORD.replace("1\t", "1-1\t", 1), 1, "'1-1' is not a valid word ID"),
        (WORD.replace("1\t", f"1-{'9' * 5000}\t", 1), 1, "'1-999"),
        (WORD.replace("1\t", "-\t", 1), 1, "'-' is not a valid word ID"),
    ],
)
def test_malformed_lines(place, text, line, problem):
    error = read_error(place(text))
    assert error.line == line
    assert problem in error.problem
    assert error.fix


@pytest.mark.parametrize("path", sorted(UD.glob("*.conllu*")), ids=lambda path: path.name)
def test_agreement_with_the_conllu_package(path: Path) -> None:
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


def test_the_sample_has_multiword_tokens_and_empty_nodes() -> None:
    sentences = read_trees(UD / "en_ewt-ud-dev.conllu")
    assert sum(sentence.n_ranges for sentence in sentences) > 0
    assert sum(sentence.n_empty_nodes for sentence in sentences) > 0


@pytest.mark.parametrize(
    ("heads", "problem"),
    [("20", "cycle at word 1"), ("00", "2 roots"), ("21", "0 roots"), ("__", "no heads")],
)
def test_sentences_that_are_not_trees(
    place: Callable[[str], Path], heads: str, problem: str
) -> None:
    lines = [f"{n}\tw\t_\tX\t_\t_\t{h}\tdep\t_\t_\n" for n, h in enumerate(heads, start=1)]
    if "cycle" in problem:  # words 1 and 2 on each other, word 3 the root
        lines = [f"{n}\tw\t_\tX\t_\t_\t{h}\tdep\t_\t_\n" for n, h in ((1, 2), (2, 1), (3, 0))]
    path = place(WORD + "\n# a comment\n" + "".join(lines))
    with pytest.raises(InputError, match=problem) as caught:
        read_trees(path)
    assert (caught.value.file, caught.value.line) == (str(path), 4)


def test_long_chains_are_checked_in_linear_time() -> None:
    chain = (*range(2, 200_001), 0)  # every word depends on the next one
    assert find_tree_error(chain) is None
    assert find_tree_error((*chain[:-1], 100_000, 0)) == "has a cycle at word 100000"


def test_an_empty_treebank_is_an_error(place: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match="the file has no sentences"):
        read_trees(place("# nothing\n"))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_trees_against_walking_up_from_every_word(heads: list[int]) -> None:
    heads = [min(head, len(heads)) for head in heads]
    is_tree = heads.count(0) == 1
    for start in range(1, len(heads) + 1):
        word = start
        for _ in heads:
            word = heads[word - 1] if word else 0
        is_tree &= word == 0
    assert (find_tree_error(heads) is None) == is_tree


# Tagged sentences.


def test_tags_of_syntactic_words():
    second = read_tagged(DATA / "fr_gsd.conllu")[1]
    assert " ".join(second.words) == "Elle lutte pour échapper à les tueurs à ses trousses ."
    assert " ".join(second.tags) == "PRON VERB ADP VERB ADP DET NOUN ADP DET NOUN PUNCT"


def test_empty_nodes_have_no_tags():
    (sentence,) = read_tagged(DATA / "empty_node.conllu")
    assert sentence.words == ("She", "reads", "and", "he", "too", ".")
    assert len(sentence.tags) == 6


def test_compressed_treebanks():
    sentences = read_tagged(TAGGED / "de_gsd-dev.conllu.xz")
    assert len(sentences) == 15
    assert {"NOUN", "VERB", "DET"} < {tag for sentence in sentences for tag in sentence.tags}


def test_tags_of_version_1_are_renamed(place):
    line = "1\tund\tund\tCONJ\t_\t_\t0\troot\t_\t_\n"
    assert read_tagged(place(line, "old.conllu"))[0].tags == ("CCONJ",)


def test_columns_as_in_xtreme():
    sentences = read_tagged(TAGGED / "dev-en.tsv")
    assert len(sentences) == 15
    assert " ".join(sentences[0].words[:6]) == "Read the entire article ; there"
    assert " ".join(sentences[0].tags[:6]) == "VERB DET ADJ NOUN PUNCT PRON"


def test_the_last_sentence_needs_no_empty_line(place):
    text = "\na\tX\n\n\nb c\tY\nd\tX"
    assert read_tagged(place(text, "sample.tsv")) == [
        TaggedSentence(("a",), ("X",)),
        TaggedSentence(("b c", "d"), ("Y", "X")),
    ]


@pytest.mark.parametrize("line", ["word", "word\t", "\tX", "a\tX\tY", " \tX"])
def test_lines_without_a_tag(place, line):
    error = read_error(place(f"a\tX\n{line}\n", "sample.tsv"), read_tagged)
    assert error.line == 2
    assert error.fix == "write word TAB tag"


def test_a_file_without_sentences(place):
    assert (
        "the file has no tagged sentences"
        in read_error(place("\n\n", "sample.tsv"), read_tagged).problem
    )
    assert (
        "the file has no tagged sentences"
        in read_error(place("# x\n", "empty.conllu"), read_tagged).problem
    )


def test_sentences_are_sampled_from_the_whole_file():
    everything = read_tagged(TAGGED / "en_ewt-train.conllu")
    few = read_tagged(TAGGED / "en_ewt-train.conllu", 4)
    assert few == [everything[number] for number in (0, 15, 30, 45)]
    assert read_tagged(TAGGED / "en_ewt-train.conllu", 1000) == everything


def test_sampling_keeps_order_and_count():
    for n_items in range(1, 12):
        for n_most in range(1, 14):
            chosen = sample_evenly(range(n_items), n_most)
            assert len(chosen) == min(n_items, n_most)
            assert chosen == sorted(set(chosen))


# Spans.

NAMES = ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
SENTENCES = st.lists(
    st.lists(
        st.tuples(st.integers(0, len(NAMES) - 1), st.integers(0, len(NAMES) - 1)),
        min_size=1,
        max_size=6,
    ),
    min_size=1,
    max_size=5,
)


def flatten(sentences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    flat = [tag for sentence in sentences for tag in sentence]
    return np.array(flat, dtype=np.int64), np.array([len(s) for s in sentences], dtype=np.int64)


def test_spans_by_hand():
    # B-LOC I-LOC | I-PER B-PER | O, in two sentences of which the second starts with I-PER.
    tags, lengths = flatten([[1, 2, 4, 3, 0], [4, 4, 2]])
    spans = find_spans(tags, NAMES, lengths).tolist()
    loc, per = 0, 1
    assert spans == [[0, 2, loc], [2, 3, per], [3, 4, per], [5, 7, per], [7, 8, loc]]


@given(SENTENCES)
def test_spans_agree_with_seqeval(sentences):
    gold = [[pair[0] for pair in sentence] for sentence in sentences]
    tags, lengths = flatten(gold)
    expected = get_entities([[NAMES[tag] for tag in sentence] for sentence in gold])
    # seqeval puts an O between sentences when it numbers words.
    shift = np.repeat(np.arange(len(gold)), lengths)
    found = [
        (("LOC", "PER")[kind], first + shift[first], after - 1 + shift[first])
        for first, after, kind in find_spans(tags, NAMES, lengths).tolist()
    ]
    assert found == [tuple(entity) for entity in expected]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@given(SENTENCES)
def test_f1_agrees_with_seqeval(sentences):
    sides = [[[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1)]
    (gold, lengths), (found, _) = map(flatten, sides)
    named = [[[NAMES[tag] for tag in sentence] for sentence in side] for side in sides]
    counts = count_spans(gold, found, NAMES, lengths)
    assert counts.f1 == pytest.approx(f1_score(*named, zero_division=0))
    if counts.n_predicted:
        precision = precision_score(*named, zero_division=0)
        assert counts.n_correct / counts.n_predicted == pytest.approx(precision)
    if counts.n_gold:
        assert counts.n_correct / counts.n_gold == pytest.approx(recall_score(*named))


@pytest.mark.parametrize("name", ["NOUN", "B-", "E-LOC", "_"])
def test_other_tags_are_an_error(name):
    with pytest.raises(InputError, match="is not a BIO tag"):
        check_bio_tags(["O", "B-LOC", name])
    check_bio_tags(NAMES)


@pytest.mark.parametrize(
    ("characters", "tags", "words", "expected", "n_crossed"),
    [
        # One tag per word, of its first character.
        ("我在北京", "O O B-LOC I-LOC", "我 在 北京", "O O B-LOC", 0),
        # A span begins within a word: the rest of it is a span, or it is lost.
        ("在北京", "O B-LOC I-LOC", "在北 京", "O B-LOC", 1),
        ("在京", "O B-LOC", "在京", "O", 1),
        # A span ends within a word, and another one begins.
        ("北京人", "B-LOC I-LOC O", "北京人", "B-LOC", 1),
        ("北京", "B-LOC B-ORG", "北京", "B-LOC", 1),
        # The type of a span changes without B-.
        ("北京", "B-LOC I-ORG", "北 京", "B-LOC B-ORG", 0),
        # Tokens of several characters are not split, and white space is a word of its own.
        (("AB", "　", "京"), "O O B-LOC", "A B 京", "O O B-LOC", 0),
    ],
)
def test_characters_are_joined_to_words(
    characters: Sequence[str], tags: str, words: str, expected: str, n_crossed: int
) -> None:
    sentence = TaggedSentence(tuple(characters), tuple(tags.split()))
    joined, count = join_characters(sentence, lambda text: words.split())
    assert (" ".join(joined.tags), count) == (expected, n_crossed)
    assert "".join(joined.words) == "".join(characters)
    alone, none_crossed = join_characters(sentence, lambda text: list(text.replace("　", "")))
    assert alone.words == sentence.words and none_crossed == 0
