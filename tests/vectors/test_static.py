"""Word vectors: files, the cache, neighbors (compared with Gensim), and folders of vectors."""

from __future__ import annotations

import io
import os
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io import word_vectors as word2vec
from calque.io.files import SkippedLines
from calque.vectors import static
from calque.vectors.static import (
    N_SPACES_IN_MEMORY,
    CacheEntry,
    VectorFolder,
    VectorSpace,
    WordVectors,
    user_cache_folder,
)

# Vectors and the results of most_similar(..., topn=3) of Gensim 4.4.
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
    rows = vectors.look_up(["été", "ETE", "the", "été"])
    assert rows.tolist() == [2, -1, 0, 2]
    assert rows.dtype == np.int64
    assert vectors.look_up([]).shape == (0,)
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
def test_mismatched_shapes(words, matrix, counts):
    with pytest.raises(ValueError, match="do not fit together"):
        WordVectors(words, matrix, counts)


@pytest.mark.parametrize("name", ["a.vec", "a.vec.gz", "a.vec.xz", "a.vec.zst"])
@pytest.mark.parametrize("binary", [False, True])
def test_written_files_are_read_back(tmp_path, name, binary):
    vectors = make_vectors(3000)
    assert vectors.save(tmp_path / name, binary=binary) == 0
    assert sorted(os.listdir(tmp_path)) == [name, f"{name}.counts"]
    read = WordVectors.load(tmp_path / name)
    assert read.words == vectors.words
    assert read.counts.tolist() == vectors.counts.tolist()
    if binary:
        assert read.matrix.tolist() == vectors.matrix.tolist()
    else:
        np.testing.assert_allclose(read.matrix, vectors.matrix, rtol=5.01e-6)
    assert read.n_duplicates == 0


def test_vectors_without_counts(tmp_path, vectors):
    make_vectors(2).save(tmp_path / "a.vec")
    vectors.save(tmp_path / "a.vec")
    assert os.listdir(tmp_path) == ["a.vec"]
    assert WordVectors.load(tmp_path / "a.vec").counts is None


def test_spaces_in_words_become_no_break_spaces(tmp_path):
    matrix, counts = np.ones((3, 2), dtype=np.float32), np.array([3, 2, 1])
    vectors = WordVectors(["New York", "be", ". . ."], matrix, counts)
    assert vectors.save(tmp_path / "a.vec") == 2
    read = WordVectors.load(tmp_path / "a.vec")
    assert read.words == ["New\xa0York", "be", ".\xa0.\xa0."]
    assert read.counts.tolist() == [3, 2, 1]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_vectors_are_not_written(tmp_path, shape):
    vectors = WordVectors(["a", "b"][: shape[0]], np.zeros(shape, dtype=np.float32))
    with pytest.raises(InputError, match="no vectors to write"):
        vectors.save(tmp_path / "a.vec")
    assert os.listdir(tmp_path) == []


def test_an_error_keeps_the_old_file(tmp_path):
    make_vectors(2).save(tmp_path / "a.vec")
    before = (tmp_path / "a.vec").read_bytes()
    with pytest.raises(InputError, match="cannot be written"):
        WordVectors(["a\nb"], MATRIX[:1]).save(tmp_path / "a.vec")
    assert (tmp_path / "a.vec").read_bytes() == before
    assert WordVectors.load(tmp_path / "a.vec").counts.tolist() == [1, 0]


words = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12)


@given(words, st.none() | st.integers(1, 7), st.sampled_from([1, 12, 1000]))
def test_the_first_of_equal_words_is_kept(tmp_path_factory, words, max_words, block):
    path = tmp_path_factory.mktemp("some") / "a.vec"
    path.write_text("".join(f"{word} {row} -1\n" for row, word in enumerate(words)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word2vec, "BLOCK_BYTES", block)
        vectors = WordVectors.load(path, max_words=max_words)
    first = list(dict.fromkeys(words))[:max_words]
    rows = [words.index(word) for word in first]
    assert vectors.words == first
    assert vectors.matrix.tolist() == [[row, -1] for row in rows]
    n_read = len(words) if max_words is None or len(first) < max_words else rows[-1] + 1
    assert vectors.n_duplicates == n_read - len(first)


def test_only_max_words_are_read(tmp_path):
    (tmp_path / "a.vec").write_text("3 2\na 1 2\nb 3 4\n" + "c 5 6\n" * 100_000 + "broken\n")
    vectors = WordVectors.load(tmp_path / "a.vec", max_words=2)
    assert (vectors.words, vectors.matrix.tolist()) == (["a", "b"], [[1, 2], [3, 4]])
    with pytest.raises(InputError, match="line 100004: the line has 0 numbers instead of 2"):
        WordVectors.load(tmp_path / "a.vec")


def test_invalid_lines_can_be_skipped(tmp_path):
    (tmp_path / "a.vec").write_text("3 2\nbad\nb 3 4\nc 5 nan\n")
    skipped = SkippedLines()
    vectors = WordVectors.load(tmp_path / "a.vec", skip_bad=skipped)
    assert (vectors.words, skipped.n_lines) == (["b"], 2)
    (tmp_path / "a.vec").write_text("1 2\nbad\n")
    with pytest.raises(InputError, match="the file has no vectors"):
        WordVectors.load(tmp_path / "a.vec", skip_bad=skipped)


def test_invalid_requests(tmp_path, vectors):
    with pytest.raises(InputError, match="max_words is 0"):
        WordVectors.load(tmp_path / "a.vec", max_words=0)
    with pytest.raises(InputError, match="no such file"):
        WordVectors.load(tmp_path / "a.vec")
    with pytest.raises(InputError, match="'gnu' is not among the 8 words"):
        vectors.neighbors(["the", "gnu"])
    with pytest.raises(InputError, match="k is 0"):
        vectors.neighbors(["the"], k=0)


def test_standard_input(monkeypatch):
    piped = io.BufferedReader(io.BytesIO(b"1 2\na 1 2\n"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))
    assert WordVectors.load("-").words == ["a"]


def test_reading_needs_little_more_memory_than_the_matrix(tmp_path):
    path = tmp_path / "a.vec"
    row = " ".join(["-0.123456"] * 300)
    path.write_text("".join(f"w{k} {row}\n" for k in range(20_000)))  # 60 MB
    tracemalloc.start()
    vectors = WordVectors.load(path, cache=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert vectors.matrix.nbytes == 24_000_000
    assert vectors.matrix.nbytes < peak < 1.5 * vectors.matrix.nbytes


def test_neighbors_of_gensim(vectors):
    found = vectors.neighbors("the", k=3)
    assert [word for word, _ in found] == [word for word, _ in NEAR_THE]
    assert [score for _, score in found] == pytest.approx([score for _, score in NEAR_THE])
    assert vectors.neighbors(["the"], k=3) == [found]


def test_analogy_of_gensim(vectors):
    found = vectors.analogy("the", "of", "été", k=3)
    assert [word for word, _ in found] == [word for word, _ in OF_MINUS_THE_PLUS_ETE]
    assert [score for _, score in found] == pytest.approx([s for _, s in OF_MINUS_THE_PLUS_ETE])


def test_analogy_by_hand():
    matrix = np.float32([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 1, 1], [1, 1, 1]])
    vectors = WordVectors(["man", "woman", "king", "queen", "rest"], matrix)
    # king − man + woman = (1/√2 − 1, 1/√2, 1); its cosine with (0, 1, 1)/√2:
    target = np.array([0.5**0.5 - 1, 0.5**0.5, 1])
    score = (target[1] + target[2]) / 2**0.5 / np.linalg.norm(target)
    assert vectors.analogy("man", "woman", "king", k=1) == [("queen", pytest.approx(score))]


@pytest.mark.parametrize("block", [1, 3, 64, 10_000])
@pytest.mark.parametrize("k", [1, 5, 99, 1000])
def test_neighbors_do_not_depend_on_blocks(monkeypatch, block, k):
    monkeypatch.setattr(static, "BLOCK_ROWS", block)
    vectors = make_vectors(100)
    unit = torch.nn.functional.normalize(torch.from_numpy(vectors.matrix), dim=1)
    cosines = unit @ unit.T
    cosines.fill_diagonal_(-2)
    expected = cosines.sort(dim=1, descending=True)
    found = vectors.neighbors(vectors.words, k=k)
    n_found = min(k, 99)
    assert [[vectors.index[word] for word, _ in line] for line in found] == (
        expected.indices[:, :n_found].tolist()
    )
    scores = [[score for _, score in line] for line in found]
    np.testing.assert_allclose(scores, expected.values[:, :n_found], atol=1e-6)


def test_neighbors_of_a_vector_include_its_word(vectors):
    (found,) = vectors.neighbors(7 * vectors.matrix[2:3], k=1)
    assert found == [("été", pytest.approx(1))]


def test_order_of_equal_neighbors_and_zero_vectors():
    matrix = np.float32([[1, 0], [2, 0], [0, 0], [3, 0], [-1, 0]])
    (found,) = WordVectors(list("abcde"), matrix).neighbors(["a"])
    assert found == [("b", 1), ("d", 1), ("c", 0), ("e", -1)]
    (found,) = WordVectors(list("abcde"), matrix).neighbors(["c"], k=2)
    assert [score for _, score in found] == [0, 0]


# The cache.

CACHED_TEXT = "3 2\na 1 2\nb 3 4\na 5 6\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.vec"
    path.write_text(CACHED_TEXT)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "vectors"


def suffixes(folder) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def is_mapped(vectors) -> bool:
    return isinstance(vectors.matrix, np.memmap)


def test_the_second_read_is_memory_mapped(file, folder):
    first = WordVectors.load(file, cache=folder)
    assert not is_mapped(first)
    assert suffixes(folder) == [".npy", ".words"]
    second = WordVectors.load(file, cache=folder)
    assert is_mapped(second)
    assert second.words == first.words == ["a", "b"]
    assert second.matrix.tolist() == first.matrix.tolist() == [[1, 2], [3, 4]]
    assert second.n_duplicates == first.n_duplicates == 1
    assert second.matrix.dtype == np.float32


def test_changing_a_mapped_matrix_keeps_the_file(file, folder):
    WordVectors.load(file, cache=folder)
    matrix = torch.from_numpy(
        WordVectors.load(file, cache=folder).matrix
    )  # writable, so that torch does not warn
    matrix += 100
    assert WordVectors.load(file, cache=folder).matrix.tolist() == [[1, 2], [3, 4]]


def test_counts_are_not_cached(file, folder):
    for counts in ([5, 4], [7, 6]):
        file.with_name("a.vec.counts").write_text(f"a\t{counts[0]}\nb\t{counts[1]}\n")
        assert WordVectors.load(file, cache=folder).counts.tolist() == counts


@pytest.mark.parametrize("in_place", [True, False])
def test_a_changed_file_is_read_again(file, folder, in_place):
    WordVectors.load(file, cache=folder)
    status = file.stat()
    if not in_place:
        file.unlink()
    time.sleep(0.02)  # the clock of the file system may be coarse
    file.write_text(CACHED_TEXT.replace("3 4", "3 9"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    vectors = WordVectors.load(file, cache=folder)
    assert vectors.matrix.tolist() == [[1, 2], [3, 9]]
    assert suffixes(folder) == [".npy", ".words"]  # and the old entry is gone
    assert is_mapped(WordVectors.load(file, cache=folder))


def test_a_file_that_changes_while_it_is_read_is_not_cached(file, folder, monkeypatch):
    original = CacheEntry.save

    def save(*arguments):
        time.sleep(0.02)
        file.write_text(CACHED_TEXT + "c 7 8\n")
        original(*arguments)

    monkeypatch.setattr(CacheEntry, "save", save)
    WordVectors.load(file, cache=folder)
    assert not folder.exists()


def test_each_max_words_has_its_entry(file, folder):
    for max_words in (1, None, 1, None):
        vectors = WordVectors.load(file, cache=folder, max_words=max_words)
        assert vectors.words == ["a", "b"][:max_words]
        assert vectors.n_duplicates == (0 if max_words else 1)
    assert is_mapped(vectors)
    assert suffixes(folder) == [".npy", ".npy", ".words", ".words"]


def test_symbolic_links_share_an_entry(file, folder):
    WordVectors.load(file, cache=folder)
    file.with_name("link.vec").symlink_to(file)
    assert is_mapped(WordVectors.load(file.with_name("link.vec"), cache=folder))


@pytest.mark.parametrize("suffix", [".npy", ".words"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "other", "open", "deep"])
def test_a_damaged_entry_is_written_again(file, folder, suffix, damage):
    WordVectors.load(file, cache=folder)
    (part,) = folder.glob(f"*{suffix}")
    data = part.read_bytes()
    changed = {
        "empty": b"",
        "short": data[:-4],
        "other": b"{}\nx\ny\nz",
        "open": data.replace(b"}", b"("),  # NumPy's parser of headers raises TokenError
        "deep": data.replace(b"{", b"{" + b"[" * 5000),
    }
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(changed[damage])
    vectors = WordVectors.load(file, cache=folder)
    assert (vectors.words, vectors.matrix.tolist()) == (["a", "b"], [[1, 2], [3, 4]])
    assert not is_mapped(vectors)
    assert is_mapped(WordVectors.load(file, cache=folder))


def test_a_pickle_is_not_executed(file, folder, tmp_path):
    WordVectors.load(file, cache=folder)
    (part,) = folder.glob("*.npy")

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    np.save(part, np.array([Trap()], dtype=object), allow_pickle=True)
    assert WordVectors.load(file, cache=folder).words == ["a", "b"]
    assert not (tmp_path / "trapped").exists()


def test_files_with_skipped_lines_are_not_cached(file, folder):
    file.write_text("2 2\na 1 2\nbad\n")
    for _ in range(2):
        skipped = SkippedLines()
        assert WordVectors.load(file, cache=folder, skip_bad=skipped).words == ["a"]
        assert skipped.n_lines == 1
    with pytest.raises(InputError, match="line 3"):
        WordVectors.load(file, cache=folder)


def test_entries_of_missing_files_are_removed(file, folder):
    other = file.with_name("b.vec")
    other.write_text(CACHED_TEXT)
    WordVectors.load(file, cache=folder)
    file.unlink()
    left = folder / ".calque-12345678.partial"
    left.touch()
    os.utime(left, (0, 0))
    (folder / "mine.words").write_text("not an entry")
    WordVectors.load(other, cache=folder)
    assert suffixes(folder) == [".npy", ".words", ".words"]
    assert (folder / "mine.words").exists()
    assert is_mapped(WordVectors.load(other, cache=folder))


def test_a_cache_that_cannot_be_written_is_ignored(file, tmp_path):
    (tmp_path / "cache").touch()
    for _ in range(2):
        assert WordVectors.load(file, cache=tmp_path / "cache" / "vectors").words == ["a", "b"]


def test_only_large_files_use_the_cache_of_the_user(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    WordVectors.load(file)
    assert not (tmp_path / "home").exists()
    monkeypatch.setattr(static, "MIN_CACHED_BYTES", len(CACHED_TEXT))
    WordVectors.load(file, cache=False)
    assert not (tmp_path / "home").exists()
    WordVectors.load(file)
    folder = tmp_path / "home" / "calque" / "vectors"
    assert suffixes(folder) == [".npy", ".words"]
    assert folder.stat().st_mode & 0o077 == 0
    assert is_mapped(WordVectors.load(file))


def test_without_a_home_folder_there_is_no_cache(file, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(static, "MIN_CACHED_BYTES", 0)
    assert user_cache_folder() is None
    assert WordVectors.load(file).words == ["a", "b"]


# Spaces and folders.


def write_vec(path: Path, vectors: dict[str, list[float]]) -> Path:
    lines = [f"{len(vectors)} {len(next(iter(vectors.values())))}"]
    lines += [f"{word} {' '.join(map(str, row))}" for word, row in vectors.items()]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_a_space_has_unit_vectors_without_zeros(tmp_path: Path) -> None:
    path = write_vec(tmp_path / "de.vec", {"ein": [3, 4], "nichts": [0, 0], "zwei": [0, -2]})
    before = path.read_bytes()
    space = VectorSpace.load(path)
    assert list(space.words) == ["ein", "zwei"]
    np.testing.assert_allclose(space.rows.numpy(), [[0.6, 0.8], [0, -1]], rtol=1e-6)
    assert (space.n_read, space.n_zero, len(space)) == (3, 1, 2)
    assert space.look_up(["zwei", "nichts", "ein"]).tolist() == [1, -1, 0]
    assert path.read_bytes() == before


def test_a_space_of_the_most_frequent_words(tmp_path: Path) -> None:
    path = write_vec(tmp_path / "de.vec", {"ein": [3, 4], "zwei": [0, -2], "drei": [1, 1]})
    assert list(VectorSpace.load(path, max_words=2).words) == ["ein", "zwei"]


def test_a_space_of_zero_vectors() -> None:
    vectors = WordVectors(["a"], np.zeros((1, 3), dtype=np.float32))
    with pytest.raises(InputError, match=r"de\.vec: all vectors are zero"):
        VectorSpace.from_vectors(vectors, "de.vec")


def test_languages_of_a_folder(tmp_path: Path) -> None:
    for name in ("de.vec", "en.vec", "fr.vec", "it.vec", "ceb.bin", "de.vec.counts", "notes.txt"):
        write_vec(tmp_path / name, {name[:2]: [1.0, 2.0]})
    (tmp_path / "de.vec.counts").unlink()  # would have to match de.vec
    folder = VectorFolder(tmp_path)
    assert folder.languages == ["ceb", "de", "en", "fr", "it"]
    first = folder.load("de")
    assert folder.load("de") is first
    for language in ("en", "fr", "it"):
        folder.load(language)
    assert len(folder._loaded) == N_SPACES_IN_MEMORY
    assert folder.load("de") is not first
    assert list(folder.load("de").words) == ["de"]
    with pytest.raises(
        InputError, match=r"there are no vectors of 'sw' \(choose from: ceb de en fr it\)"
    ):
        folder.load("sw")


def test_invalid_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        VectorFolder(tmp_path / "gone")
    with pytest.raises(InputError, match="there are no word vectors"):
        VectorFolder(tmp_path)
    write_vec(tmp_path / "de.vec", {"a": [1.0, 2.0]})
    write_vec(tmp_path / "en.vec", {"a": [1.0, 2.0, 3.0]})
    with pytest.raises(
        InputError, match=r"de\.vec: the vectors have 2 dimensions, .*en\.vec have 3"
    ):
        VectorFolder(tmp_path).load_pair("de", "en")
    (tmp_path / "de.bin").touch()
    with pytest.raises(InputError, match=r"de\.bin and de\.vec are both of 'de'"):
        VectorFolder(tmp_path)
