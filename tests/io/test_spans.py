import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities

from calque.errors import InputError
from calque.io.conllu import check_bio_tags, count_spans, find_spans

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
    # B-LOC I-LOC | I-PER B-PER | O, in two sentences of which the second goes on with I-PER.
    tags, lengths = flatten([[1, 2, 4, 3, 0], [4, 4, 2]])
    spans = find_spans(tags, NAMES, lengths).tolist()
    loc, per = 0, 1
    assert spans == [[0, 2, loc], [2, 3, per], [3, 4, per], [5, 7, per], [7, 8, loc]]


@given(SENTENCES)
def test_spans_are_those_of_seqeval(sentences):
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
def test_f1_is_that_of_seqeval(sentences):
    sides = [[[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1)]
    (gold, lengths), (found, _) = map(flatten, sides)
    named = [[[NAMES[tag] for tag in sentence] for sentence in side] for side in sides]
    counts = count_spans(gold, found, NAMES, lengths)
    assert counts.f1 == pytest.approx(f1_score(*named, zero_division=0))
    if counts.n_found:
        precision = precision_score(*named, zero_division=0)
        assert counts.n_right / counts.n_found == pytest.approx(precision)
    if counts.n_gold:
        assert counts.n_right / counts.n_gold == pytest.approx(recall_score(*named))


@pytest.mark.parametrize("name", ["NOUN", "B-", "E-LOC", "_"])
def test_other_tags_are_refused(name):
    with pytest.raises(InputError, match="is not a tag of a span"):
        check_bio_tags(["O", "B-LOC", name])
    check_bio_tags(NAMES)
