"""Words with vectors on their way into training: blocks, and words that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.io.cleaning import CleaningReport
from calque.io.word_vectors import VectorBlock
from calque.tokens.prepare import WordFilter, read_vector_blocks
from calque.tokens.ragged import Ragged


def write(path: Path, words: list[str], width: int = 2) -> None:
    """Word k has the vector k, k + 0.5, …"""
    lines = [f"{len(words)} {width}"]
    lines += [" ".join([w, *(f"{k + j / 2}" for j in range(width))]) for k, w in enumerate(words)]
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.mark.parametrize("name", ["de.vec", "de.vec.gz"])
@pytest.mark.parametrize("size", [1, 100, 10_000])
@pytest.mark.parametrize("max_words", [None, 1, 2500, 3000, 9999])
def test_blocks_hold_the_first_words(
    tmp_path: Path, name: str, size: int, max_words: int | None
) -> None:
    words = [f"w{k}" for k in range(3000)]
    write(tmp_path / name, words)
    blocks = list(read_vector_blocks(tmp_path / name, max_words, size))
    assert [word for block in blocks for word in block.words] == words[:max_words]
    rows = np.concatenate([block.matrix for block in blocks])
    n_words = min(3000, max_words or 3000)
    np.testing.assert_array_equal(rows[:, 0], np.arange(n_words))
    assert all(len(block.words) >= min(size, n_words) for block in blocks[:-1])
    assert all(len(block.words) for block in blocks)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "de.vec").write_text("a 1 2\nb 3 4\nc 5 oops\n")
    with pytest.raises(InputError, match=r"de\.vec, line 3"):
        list(read_vector_blocks(tmp_path / "de.vec"))
    with pytest.raises(InputError, match=r"absent\.vec: no such file"):
        list(read_vector_blocks(tmp_path / "absent.vec"))


@pytest.fixture
def report() -> CleaningReport:
    return CleaningReport()


@pytest.fixture
def word_filter(tmp_path: Path, report: CleaningReport) -> WordFilter:
    """`<s>` and `<unk>` are special, 7 is an ordinary word that was added."""
    added = [{"id": 0, "special": True}, {"id": 3, "special": True}, {"id": 7, "special": False}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return WordFilter.of(tmp_path / "tokenizer.json", report)


def test_what_is_no_word_goes_and_is_counted(
    word_filter: WordFilter, report: CleaningReport
) -> None:
    words = ["das", "</s>", "\u200d", "das", "Haus", "☃a", "added"]
    pieces = Ragged.of([[10], [0], [], [10], [11, 12], [3, 13], [7]])
    matrix = np.arange(14, dtype=np.float32).reshape(7, 2)
    kept, vectors = word_filter.select(VectorBlock(words, matrix), pieces)
    assert kept.ids.tolist() == [10, 11, 12, 7]
    assert kept.lengths.tolist() == [1, 2, 1]
    np.testing.assert_array_equal(vectors, matrix[[0, 4, 6]])
    assert dict(report.dropped) == {
        "no subwords": 1,
        "unknown to the tokenizer": 2,
        "duplicate": 1,
    }
    assert report.examples["unknown to the tokenizer"] == [("</s>",), ("☃a",)]
    assert (report.n_read, report.n_kept) == (7, 3)
    # Words of earlier blocks are known.
    again, vectors = word_filter.select(
        VectorBlock(["Haus", "neu"], matrix[:2]), Ragged.of([[11, 12], [14]])
    )
    assert again.ids.tolist() == [14]
    np.testing.assert_array_equal(vectors, matrix[1:2])
    assert (report.n_read, report.n_kept, report.dropped["duplicate"]) == (9, 4, 2)


def test_vectors_of_zeros_teach_nothing(word_filter: WordFilter, report: CleaningReport) -> None:
    matrix = np.array([[0, 1], [0, 0], [0, 0], [-1, 1]], dtype=np.float32)
    pieces = Ragged.of([[10], [11, 12], [], [13]])
    kept, vectors = word_filter.select(VectorBlock(["a", "b", "c", "d"], matrix), pieces)
    assert kept.ids.tolist() == [10, 13]
    np.testing.assert_array_equal(vectors, matrix[[0, 3]])
    assert dict(report.dropped) == {"no subwords": 1, "a vector of zeros": 1}
    assert report.examples["a vector of zeros"] == [("b",)]
