import os

import numpy as np
import pytest

from calque.errors import InputError
from calque.io.word_vectors import counts_path, read_word_counts, write_word_counts


def test_counts_stand_beside_the_vectors(tmp_path):
    path = tmp_path / "de.vec.gz"
    with write_word_counts(path, ["der", "a\xa0b"], np.array([2**40, 0])):
        assert read_word_counts(path, ["der"]) is None  # not before the block ends
    assert (tmp_path / "de.vec.gz.counts").read_text() == "der\t1099511627776\na\xa0b\t0\n"
    assert read_word_counts(path, ["a\xa0b", "der"]).tolist() == [0, 2**40]


def test_a_failed_block_leaves_the_counts_as_they_were(tmp_path):
    path = tmp_path / "de.vec"
    counts_path(path).write_text("der\t5\n")
    for counts in (np.array([7]), None):
        with pytest.raises(RuntimeError), write_word_counts(path, ["der"], counts):
            raise RuntimeError
    assert os.listdir(tmp_path) == ["de.vec.counts"]
    assert read_word_counts(path, ["der"]).tolist() == [5]


def test_counts_of_other_vectors_do_not_stay(tmp_path):
    path = tmp_path / "de.vec"
    counts_path(path).write_text("der\t5\n")
    with write_word_counts(path, ["der"], None):
        pass
    assert read_word_counts(path, ["der"]) is None


def test_standard_output_has_no_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with write_word_counts("-", ["der"], np.array([7])):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "line", ["der", "der\t", "\t5", "der\t-5", "der\t5.0", "der\t٣", "der 5", "der\t" + "9" * 19]
)
def test_a_bad_count_is_named(tmp_path, line):
    counts_path(tmp_path / "de.vec").write_text(f"die\t7\n{line}\n")
    with pytest.raises(InputError, match=r"de.vec.counts, line 2: not a word and its count"):
        read_word_counts(tmp_path / "de.vec", ["die"])


def test_every_word_needs_a_count(tmp_path):
    counts_path(tmp_path / "de.vec").write_text("die\t7\n")
    with pytest.raises(InputError, match="has no count for 'der'"):
        read_word_counts(tmp_path / "de.vec", ["die", "der"])
