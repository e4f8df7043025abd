"""Stores return what was written, are pickled as paths, and report damaged files."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.tokens.ragged import Ragged
from calque.tokens.store import (
    JoinedSentences,
    NpyWriter,
    PreviousSentences,
    TokenStore,
    VectorStore,
    write_store,
    write_vector_store,
)

sentences = st.lists(st.lists(st.integers(0, 65_535), max_size=12), max_size=20)


def write(stem: Path, *blocks: list[list[int]], vocab_size: int = 65_536) -> None:
    with write_store(stem, vocab_size) as append:
        for block in blocks:
            append(Ragged.of(block))


@given(st.lists(sentences, max_size=4), st.data())
def test_round_trip(blocks: list[list[list[int]]], data: st.DataObject) -> None:
    written = [sentence for block in blocks for sentence in block]
    with TemporaryDirectory() as folder:
        write(Path(folder) / "text", *blocks)
        store = TokenStore.open(Path(folder) / "text")
        assert len(store) == len(written)
        indices = (
            st.lists(st.integers(0, len(written) - 1), max_size=30) if written else st.just([])
        )
        index = data.draw(indices)
        read = store.gather(np.array(index, dtype=np.int64))
    ends = np.cumsum(read.lengths)
    found = [read.ids[end - n : end].tolist() for n, end in zip(read.lengths, ends, strict=True)]
    assert found == [written[k] for k in index]
    assert read.ids.dtype == np.int64


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_files_are_plain_numpy_of_the_smallest_dtype(
    tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    write(tmp_path / "text", [[vocab_size - 1, 0], []], [[5]], vocab_size=vocab_size)
    ids = np.load(tmp_path / "text.ids.npy")
    assert ids.dtype == dtype
    assert ids.tolist() == [vocab_size - 1, 0, 5]
    assert np.load(tmp_path / "text.offsets.npy").tolist() == [0, 2, 2, 3]


def test_an_error_leaves_no_files(tmp_path: Path) -> None:
    def fail() -> None:
        with write_store(tmp_path / "text", 10) as append:
            append(Ragged.of([[1, 2]]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_files_appear_when_they_are_complete(tmp_path: Path) -> None:
    with write_store(tmp_path / "text", 10) as append:
        append(Ragged.of([[1, 2]]))
        assert list(tmp_path.glob("*.npy")) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.ids.npy", "text.offsets.npy"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_pickle(path: Path) -> None:
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)


def shorten(path: Path) -> None:
    np.save(path, np.load(path)[:-1])


def change_type(path: Path) -> None:
    np.save(path, np.load(path).astype(np.int32))


def add_dimension(path: Path) -> None:
    np.save(path, np.load(path)[None])


@pytest.mark.parametrize("file", ["text.ids.npy", "text.offsets.npy"])
@pytest.mark.parametrize(
    "damage", [cut, empty, make_pickle, shorten, change_type, add_dimension, Path.unlink]
)
def test_damage_is_reported_in_one_line(tmp_path: Path, file: str, damage: object) -> None:
    write(tmp_path / "text", [[1, 2], [3]])
    damage(tmp_path / file)  # type: ignore[operator]
    with pytest.raises(InputError, match="prepare the text again") as caught:
        TokenStore.open(tmp_path / "text")
    assert str(caught.value).startswith(f"{tmp_path / 'text'}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [-1, 2, 3, 4], [0, 2, 3, 5], []])
def test_offsets_that_do_not_fit_the_ids_are_reported(
    offsets: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calque.tokens.store.CHECKED_AT_ONCE", 2)
    write(tmp_path / "text", [[1, 2], [3], [4]])
    TokenStore.open(tmp_path / "text")
    np.save(tmp_path / "text.offsets.npy", np.array(offsets, dtype=np.int64))
    with pytest.raises(InputError, match="offsets and ids do not match"):
        TokenStore.open(tmp_path / "text")


def test_ids_beyond_the_vocabulary_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "text", [[1, 9]])
    assert len(TokenStore.open(tmp_path / "text", vocab_size=10)) == 1
    with pytest.raises(InputError, match=r"ids\.npy: an id is beyond the vocabulary of 9"):
        TokenStore.open(tmp_path / "text", vocab_size=9)


def test_a_store_is_pickled_as_its_path(tmp_path: Path) -> None:
    write(tmp_path / "text", [[1, 2, 3]] * 10_000)
    sent = pickle.dumps(TokenStore.open(tmp_path / "text"))
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert isinstance(received.ids, np.memmap)
    assert received.gather(np.array([9999])).ids.tolist() == [1, 2, 3]
    in_memory = TokenStore(np.array([4], dtype=np.uint16), np.array([0, 1]))
    assert pickle.loads(pickle.dumps(in_memory)).gather(np.array([0])).ids.tolist() == [4]


def write_vectors(stem: Path, *parts: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    with write_vector_store(stem, parts[0].shape[1]) as append:
        for part in parts:
            append(part)


def draw(n_rows: int, width: int = 3) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(n_rows).normal(size=(n_rows, width)).astype(np.float32)


def test_vectors_come_in_the_given_order(tmp_path: Path) -> None:
    parts = (draw(4), draw(0), draw(2))
    write_vectors(tmp_path / "vectors", *parts)
    store = VectorStore.open(tmp_path / "vectors")
    assert isinstance(store.rows, np.memmap)
    assert (len(store), store.width) == (6, 3)
    index = np.array([5, 0, 0], dtype=np.uint8)
    found = store.gather(index)
    assert found.lengths.tolist() == [3, 3, 3]
    assert found.ids.dtype == np.float32
    np.testing.assert_array_equal(found.ids.reshape(3, 3), np.concatenate(parts)[index])
    assert store.gather(np.zeros(0, dtype=np.int64)).ids.shape == (0,)


def test_a_store_without_vectors(tmp_path: Path) -> None:
    write_vectors(tmp_path / "vectors", draw(0))
    store = VectorStore.open(tmp_path / "vectors")
    assert (len(store), store.width) == (0, 3)


def test_a_vector_store_is_pickled_as_its_path(tmp_path: Path) -> None:
    write_vectors(tmp_path / "vectors", draw(2000, 50))
    store = VectorStore.open(tmp_path / "vectors")
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert isinstance(again.rows, np.memmap)
    np.testing.assert_array_equal(again.rows, store.rows)
    in_memory = pickle.loads(pickle.dumps(VectorStore(draw(3))))
    np.testing.assert_array_equal(in_memory.rows, draw(3))


def test_an_interrupted_vector_store_leaves_no_file(tmp_path: Path) -> None:
    def interrupt() -> None:
        with write_vector_store(tmp_path / "vectors", 3) as append:
            append(draw(4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert list(tmp_path.iterdir()) == []


def test_an_invalid_vector_store_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prepare the text again"):
        VectorStore.open(tmp_path / "absent")
    np.save(tmp_path / "flat.npy", np.zeros(4))
    with pytest.raises(InputError, match="the file has no matrix of vectors"):
        VectorStore.open(tmp_path / "flat")
    write_vectors(tmp_path / "cut", draw(100))
    content = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cut"):
        VectorStore.open(tmp_path / "cut")


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    with write_store(tmp_path / "side0", vocab_size=100) as append:
        append(Ragged.of([[5], [6, 7], [8, 9, 10], [11]]))
    return TokenStore.open(tmp_path / "side0")


@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_previous_sentences(store: TokenStore, dtype: type) -> None:
    before = PreviousSentences(store)
    assert len(before) == 4
    assert before.lengths(np.arange(4).astype(dtype)).tolist() == [0, 1, 2, 3]
    found = before.gather(np.array([3, 1], dtype=dtype))
    assert (found.ids.tolist(), found.lengths.tolist()) == ([8, 9, 10, 5], [3, 1])
    with pytest.raises(AssertionError, match="the first sentence has no previous"):
        before.gather(np.array([0]))


def test_previous_sentences_are_pickled_as_a_path(store: TokenStore) -> None:
    again = pickle.loads(pickle.dumps(PreviousSentences(store)))
    assert again.gather(np.array([2])).ids.tolist() == [6, 7]
    assert len(pickle.dumps(PreviousSentences(store))) < 400


def join_naively(sentences: list[list[int]], most: int) -> list[list[int]]:
    """Join sentences one by one; a longer one fills blocks of its own, and its rest begins one."""
    blocks: list[list[int]] = []
    last: list[int] = []
    for sentence in sentences:
        while sentence:
            if len(last) + min(len(sentence), most) > most:
                blocks, last = [*blocks, last], []
            last, sentence = last + sentence[:most], sentence[most:]
    return [*blocks, last] if last else blocks


@given(sentences, st.integers(0, 20), st.integers(1, 15))
def test_joined_sentences_lose_nothing(text: list[list[int]], split: int, most: int) -> None:
    store = TokenStore(
        Ragged.of(text).ids.astype(np.uint16),
        np.cumsum([0, *map(len, text)], dtype=np.int64),
    )
    n_training = min(split, len(text))
    joined = JoinedSentences.of(store, most, n_training)
    parts = join_naively(text[:n_training], most), join_naively(text[n_training:], most)
    assert joined.n_training == len(parts[0])
    found = joined.gather(np.arange(len(joined)))
    assert found.lengths.tolist() == [len(block) for part in parts for block in part]
    assert found.ids.tolist() == [token for sentence in text for token in sentence]
    assert joined.lengths(np.arange(len(joined), dtype=np.uint8)).max(initial=0) <= most


def test_joined_sentences_are_pickled_as_a_path(store: TokenStore) -> None:
    joined = JoinedSentences.of(store, 4, len(store) - 1)
    copy = pickle.loads(pickle.dumps(joined))
    assert str(copy.store.ids.filename) == str(store.ids.filename)  # type: ignore[attr-defined]
    everything = np.arange(len(joined))
    assert copy.gather(everything).ids.tolist() == joined.gather(everything).ids.tolist()
    assert copy.lengths(everything).tolist() == joined.lengths(everything).tolist()


@pytest.mark.parametrize("n_rows", [0, 1, 7, 123_456])
@pytest.mark.parametrize(
    ("dtype", "row_shape"), [("<f4", (3,)), (np.uint16, ()), (np.int64, ())], ids=str
)
def test_npy_writer_writes_the_bytes_of_numpy(
    n_rows: int, dtype: object, row_shape: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 60_000, (n_rows, *row_shape)).astype(dtype)
    grown, whole = io.BytesIO(), io.BytesIO()
    writer = NpyWriter(grown, dtype, row_shape)
    for part in np.array_split(rows, 3):
        writer.append(part)
    writer.close()
    np.save(whole, rows)
    assert grown.getvalue() == whole.getvalue()
