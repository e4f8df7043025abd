"""The store: what goes in comes out, and a damaged file is said, never read."""

from __future__ import annotations

import pickle
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.tokens.ragged import Ragged
from calque.tokens.store import TokenStore, write_store

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
        places = st.lists(st.integers(0, len(written) - 1), max_size=30) if written else st.just([])
        index = data.draw(places)
        read = store.gather(np.array(index, dtype=np.int64))
    ends = np.cumsum(read.lengths)
    found = [read.ids[end - n : end].tolist() for n, end in zip(read.lengths, ends, strict=True)]
    assert found == [written[k] for k in index]
    assert read.ids.dtype == np.int64


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_files_are_plain_numpy_of_the_smallest_type(
    tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    write(tmp_path / "text", [[vocab_size - 1, 0], []], [[5]], vocab_size=vocab_size)
    ids = np.load(tmp_path / "text.ids.npy")
    assert ids.dtype == dtype
    assert ids.tolist() == [vocab_size - 1, 0, 5]
    assert np.load(tmp_path / "text.offsets.npy").tolist() == [0, 2, 2, 3]


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with write_store(tmp_path / "text", 10) as append:
            append(Ragged.of([[1, 2]]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_files_have_no_name_before_they_are_whole(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("file", ["text.ids.npy", "text.offsets.npy"])
@pytest.mark.parametrize("damage", [cut, empty, make_pickle, shorten, Path.unlink])
def test_damage_is_one_line(tmp_path: Path, file: str, damage: object) -> None:
    write(tmp_path / "text", [[1, 2], [3]])
    damage(tmp_path / file)  # type: ignore[operator]
    with pytest.raises(InputError, match="prepare the text again") as caught:
        TokenStore.open(tmp_path / "text")
    assert str(caught.value).startswith(f"{tmp_path / 'text'}: ")
    assert "\n" not in str(caught.value)


def test_travels_as_a_path_not_as_text(tmp_path: Path) -> None:
    write(tmp_path / "text", [[1, 2, 3]] * 10_000)
    sent = pickle.dumps(TokenStore.open(tmp_path / "text"))
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert isinstance(received.ids, np.memmap)
    assert received.gather(np.array([9999])).ids.tolist() == [1, 2, 3]
    in_memory = TokenStore(np.array([4], dtype=np.uint16), np.array([0, 1]))
    assert pickle.loads(pickle.dumps(in_memory)).gather(np.array([0])).ids.tolist() == [4]
