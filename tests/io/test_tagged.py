from pathlib import Path

import pytest

from calque.errors import InputError
from calque.io.conllu import TaggedSentence, read_tagged, sample_evenly

DATA = Path(__file__).parent.parent / "data"
TAGGED = DATA / "tagged"


@pytest.fixture
def place(tmp_path):
    def write(text: str, name: str = "sample.tsv") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read_tagged(path)
    assert caught.value.file == str(path)
    return caught.value


def test_treebanks_give_syntactic_words():
    second = read_tagged(DATA / "fr_gsd.conllu")[1]
    assert " ".join(second.words) == "Elle lutte pour échapper à les tueurs à ses trousses ."
    assert " ".join(second.tags) == "PRON VERB ADP VERB ADP DET NOUN ADP DET NOUN PUNCT"


def test_empty_nodes_are_no_words():
    (sentence,) = read_tagged(DATA / "empty_node.conllu")
    assert sentence.words == ("She", "reads", "and", "he", "too", ".")
    assert len(sentence.tags) == 6


def test_packed_treebanks():
    sentences = read_tagged(TAGGED / "de_gsd-dev.conllu.xz")
    assert len(sentences) == 15
    assert {"NOUN", "VERB", "DET"} < {tag for sentence in sentences for tag in sentence.tags}


def test_a_tag_of_version_1_is_renamed(place):
    line = "1\tund\tund\tCONJ\t_\t_\t0\troot\t_\t_\n"
    assert read_tagged(place(line, "old.conllu"))[0].tags == ("CCONJ",)


def test_columns_as_in_xtreme():
    sentences = read_tagged(TAGGED / "dev-en.tsv")
    assert len(sentences) == 15
    assert " ".join(sentences[0].words[:6]) == "Read the entire article ; there"
    assert " ".join(sentences[0].tags[:6]) == "VERB DET ADJ NOUN PUNCT PRON"


def test_the_last_sentence_needs_no_empty_line(place):
    text = "\na\tX\n\n\nb c\tY\nd\tX"
    assert read_tagged(place(text)) == [
        TaggedSentence(("a",), ("X",)),
        TaggedSentence(("b c", "d"), ("Y", "X")),
    ]


@pytest.mark.parametrize("line", ["word", "word\t", "\tX", "a\tX\tY", " \tX"])
def test_a_line_without_a_tag_is_named(place, line):
    error = refusal(place(f"a\tX\n{line}\n"))
    assert error.line == 2
    assert error.fix == "write a word, a tab and its tag"


def test_a_file_without_sentences(place):
    assert "holds no tagged sentence" in refusal(place("\n\n")).problem
    assert "holds no tagged sentence" in refusal(place("# x\n", "empty.conllu")).problem


def test_sentences_are_chosen_all_over_the_file():
    everything = read_tagged(TAGGED / "en_ewt-train.conllu")
    few = read_tagged(TAGGED / "en_ewt-train.conllu", 4)
    assert few == [everything[number] for number in (0, 15, 30, 45)]
    assert read_tagged(TAGGED / "en_ewt-train.conllu", 1000) == everything


def test_spread_keeps_order_and_count():
    for n_items in range(1, 12):
        for n_most in range(1, 14):
            chosen = sample_evenly(range(n_items), n_most)
            assert len(chosen) == min(n_items, n_most)
            assert chosen == sorted(set(chosen))
