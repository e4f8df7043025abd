import io
import os
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io import word_vectors as word2vec_text
from calque.io.files import SkippedLines
from calque.vectors import static
from calque.vectors.static import WordVectors, analogy, neighbors, read_vectors, write_vectors

# What Gensim 4.4 finds among these: most_similar(…, topn=3).
MATRIX = np.float32(
    [
        [0.0012301534, 0.29874554, -0.27413785],
        [-0.89059186, -0.4546708, -0.9916465],
        [0.0601436, 1.3402152, -0.4922065],
        [-0.6204749, 0.48984206, 0.356887],
        [0.10541425, -0.930468, -0.029251823],
        [0.6953032, -1.3442146, -0.45761576],
        [-1.9012227, -1.2895378, -1.841735],
        [1e-07, -123456.78, 0.0],
    ]
)
WORDS = ["the", "of", "été", "a\xa0b", "猫", "3.14", "...", "x"]
NEAR_THE = [("été", 0.92402166), ("of", 0.23628683), ("a\xa0b", 0.13574383)]
OF_MINUS_THE_PLUS_ETE = [("...", 0.9414627), ("a\xa0b", 0.28465188), ("x", 0.17127222)]


@pytest.fixture
def vectors() -> WordVectors:
    return WordVectors(WORDS, MATRIX)


def make_vectors(n_words: int, width: int = 4, seed: int = 0) -> WordVectors:
    matrix = np.random.default_rng(seed).standard_normal((n_words, width), dtype=np.float32)
    return WordVectors([f"w{k}" for k in range(n_words)], matrix, np.arange(n_words)[::-1])


def test_look_up(vectors):
    rows, found = vectors.look_up(["été", "ETE", "the", "été"])
    assert rows.tolist() == [2, -1, 0, 2]
    assert found.tolist() == [True, False, True, True]
    assert rows.dtype == np.int64
    assert vectors.look_up([])[0].shape == (0,)
    assert len(vectors) == 8


@pytest.mark.parametrize(
    ("words", "matrix", "counts"),
    [
        (["a"], np.zeros((2, 3), dtype=np.float32), None),
        (["a", "b"], np.zeros(2, dtype=np.float32), None),
        (["a"], np.zeros((1, 3)), None),
        (["a"], np.zeros((1, 3), dtype=np.float32), np.array([1, 2])),
    ],
)
def test_what_does_not_fit_together_is_refused(words, matrix, counts):
    with pytest.raises(ValueError, match="words"):
        WordVectors(words, matrix, counts)


@pytest.mark.parametrize("name", ["a.vec", "a.vec.gz", "a.vec.xz", "a.vec.zst"])
@pytest.mark.parametrize("binary", [False, True])
def test_what_is_written_is_read_back(tmp_path, name, binary):
    vectors = make_vectors(3000)
    assert write_vectors(vectors, tmp_path / name, binary=binary) == 0
    assert sorted(os.listdir(tmp_path)) == [name, f"{name}.counts"]
    read = read_vectors(tmp_path / name)
    assert read.words == vectors.words
    assert read.counts.tolist() == vectors.counts.tolist()
    if binary:
        assert read.matrix.tolist() == vectors.matrix.tolist()
    else:
        np.testing.assert_allclose(read.matrix, vectors.matrix, rtol=5.01e-6)
    assert read.n_duplicates == 0


def test_vectors_without_counts(tmp_path, vectors):
    write_vectors(make_vectors(2), tmp_path / "a.vec")
    write_vectors(vectors, tmp_path / "a.vec")
    assert os.listdir(tmp_path) == ["a.vec"]
    assert read_vectors(tmp_path / "a.vec").counts is None


def test_spaces_in_words_are_written_as_no_break_spaces_and_counted(tmp_path):
    matrix, counts = np.ones((3, 2), dtype=np.float32), np.array([3, 2, 1])
    vectors = WordVectors(["New York", "be", ". . ."], matrix, counts)
    assert write_vectors(vectors, tmp_path / "a.vec") == 2
    read = read_vectors(tmp_path / "a.vec")
    assert read.words == ["New\xa0York", "be", ".\xa0.\xa0."]
    assert read.counts.tolist() == [3, 2, 1]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_vectors_are_not_written(tmp_path, shape):
    vectors = WordVectors(["a", "b"][: shape[0]], np.zeros(shape, dtype=np.float32))
    with pytest.raises(InputError, match="no vectors to write"):
        write_vectors(vectors, tmp_path / "a.vec")
    assert os.listdir(tmp_path) == []


def test_a_word_that_cannot_be_written_leaves_the_old_file(tmp_path):
    write_vectors(make_vectors(2), tmp_path / "a.vec")
    before = (tmp_path / "a.vec").read_bytes()
    with pytest.raises(InputError, match="cannot be written"):
        write_vectors(WordVectors(["a\nb"], MATRIX[:1]), tmp_path / "a.vec")
    assert (tmp_path / "a.vec").read_bytes() == before
    assert read_vectors(tmp_path / "a.vec").counts.tolist() == [1, 0]


words = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12)


@given(words, st.none() | st.integers(1, 7), st.sampled_from([1, 12, 1000]))
def test_the_first_of_equal_words_is_kept(tmp_path_factory, words, max_words, block):
    path = tmp_path_factory.mktemp("some") / "a.vec"
    path.write_text("".join(f"{word} {row} -1\n" for row, word in enumerate(words)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word2vec_text, "BLOCK_BYTES", block)
        vectors = read_vectors(path, max_words=max_words)
    first = list(dict.fromkeys(words))[:max_words]
    rows = [words.index(word) for word in first]
    assert vectors.words == first
    assert vectors.matrix.tolist() == [[row, -1] for row in rows]
    n_read = len(words) if max_words is None or len(first) < max_words else rows[-1] + 1
    assert vectors.n_duplicates == n_read - len(first)


def test_no_more_is_read_than_asked_for(tmp_path):
    (tmp_path / "a.vec").write_text("3 2\na 1 2\nb 3 4\n" + "c 5 6\n" * 100_000 + "broken\n")
    vectors = read_vectors(tmp_path / "a.vec", max_words=2)
    assert (vectors.words, vectors.matrix.tolist()) == (["a", "b"], [[1, 2], [3, 4]])
    with pytest.raises(InputError, match="line 100004: 0 numbers where 2 are due"):
        read_vectors(tmp_path / "a.vec")


def test_bad_lines_can_be_skipped(tmp_path):
    (tmp_path / "a.vec").write_text("3 2\nbad\nb 3 4\nc 5 nan\n")
    skipped = SkippedLines()
    vectors = read_vectors(tmp_path / "a.vec", skip_bad=skipped)
    assert (vectors.words, skipped.n_lines) == (["b"], 2)
    (tmp_path / "a.vec").write_text("1 2\nbad\n")
    with pytest.raises(InputError, match="holds no vectors"):
        read_vectors(tmp_path / "a.vec", skip_bad=skipped)


def test_bad_requests(tmp_path, vectors):
    with pytest.raises(InputError, match="max_words=0"):
        read_vectors(tmp_path / "a.vec", max_words=0)
    with pytest.raises(InputError, match="no such file"):
        read_vectors(tmp_path / "a.vec")
    with pytest.raises(InputError, match="'gnu' is not among the 8 words"):
        neighbors(vectors, ["the", "gnu"])
    with pytest.raises(InputError, match="k=0"):
        neighbors(vectors, ["the"], k=0)
    with pytest.raises(TypeError, match="not a string"):
        neighbors(vectors, "the")


def test_standard_input(monkeypatch):
    piped = io.BufferedReader(io.BytesIO(b"1 2\na 1 2\n"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))
    assert read_vectors("-").words == ["a"]


def test_reading_takes_little_more_memory_than_the_matrix(tmp_path):
    path = tmp_path / "a.vec"
    row = " ".join(["-0.123456"] * 300)
    path.write_text("".join(f"w{k} {row}\n" for k in range(20_000)))  # 60 MB
    tracemalloc.start()
    vectors = read_vectors(path, cache=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert vectors.matrix.nbytes == 24_000_000
    assert vectors.matrix.nbytes < peak < 1.5 * vectors.matrix.nbytes


def test_neighbors_are_gensim_s(vectors):
    ((first, *rest),) = neighbors(vectors, ["the"], k=3)
    assert [word for word, _ in [first, *rest]] == [word for word, _ in NEAR_THE]
    assert [score for _, score in [first, *rest]] == pytest.approx([s for _, s in NEAR_THE])


def test_analogies_are_gensim_s(vectors):
    found = analogy(vectors, "the", "of", "été", k=3)
    assert [word for word, _ in found] == [word for word, _ in OF_MINUS_THE_PLUS_ETE]
    assert [score for _, score in found] == pytest.approx([s for _, s in OF_MINUS_THE_PLUS_ETE])


def test_an_analogy_by_hand():
    matrix = np.float32([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 1, 1], [1, 1, 1]])
    vectors = WordVectors(["man", "woman", "king", "queen", "rest"], matrix)
    # king − man + woman = (1/√2 − 1, 1/√2, 1); its cosine with (0, 1, 1)/√2:
    target = np.array([0.5**0.5 - 1, 0.5**0.5, 1])
    score = (target[1] + target[2]) / 2**0.5 / np.linalg.norm(target)
    assert analogy(vectors, "man", "woman", "king", k=1) == [("queen", pytest.approx(score))]


@pytest.mark.parametrize("block", [1, 3, 64, 10_000])
@pytest.mark.parametrize("k", [1, 5, 99, 1000])
def test_neighbors_do_not_depend_on_blocks(monkeypatch, block, k):
    monkeypatch.setattr(static, "BLOCK_ROWS", block)
    vectors = make_vectors(100)
    unit = torch.nn.functional.normalize(torch.from_numpy(vectors.matrix), dim=1)
    cosines = unit @ unit.T
    cosines.fill_diagonal_(-2)
    expected = cosines.sort(dim=1, descending=True)
    found = neighbors(vectors, vectors.words, k=k)
    n_found = min(k, 99)
    assert [[vectors.index[word] for word, _ in line] for line in found] == (
        expected.indices[:, :n_found].tolist()
    )
    scores = [[score for _, score in line] for line in found]
    np.testing.assert_allclose(scores, expected.values[:, :n_found], atol=1e-6)


def test_neighbors_of_vectors_include_the_word_that_has_it(vectors):
    (found,) = neighbors(vectors, 7 * vectors.matrix[2:3], k=1)
    assert found == [("été", pytest.approx(1))]


def test_equal_neighbors_come_in_the_order_of_words_and_zero_vectors_are_no_trouble():
    matrix = np.float32([[1, 0], [2, 0], [0, 0], [3, 0], [-1, 0]])
    (found,) = neighbors(WordVectors(list("abcde"), matrix), ["a"])
    assert found == [("b", 1), ("d", 1), ("c", 0), ("e", -1)]
    (found,) = neighbors(WordVectors(list("abcde"), matrix), ["c"], k=2)
    assert [score for _, score in found] == [0, 0]
