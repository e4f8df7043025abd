"""Vectors on disk: what is written comes back, is mapped, and travels as a path."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.tokens.store import VectorStore, write_vector_store


def write(stem: Path, *parts: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    with write_vector_store(stem, parts[0].shape[1]) as append:
        for part in parts:
            append(part)


def draw(n_rows: int, width: int = 3) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.random.default_rng(n_rows).normal(size=(n_rows, width)).astype(np.float32)


def test_rows_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    parts = (draw(4), draw(0), draw(2))
    write(tmp_path / "vectors", *parts)
    store = VectorStore.open(tmp_path / "vectors")
    assert isinstance(store.rows, np.memmap)
    assert (len(store), store.width) == (6, 3)
    index = np.array([5, 0, 0], dtype=np.uint8)
    found = store.gather(index)
    assert found.lengths.tolist() == [3, 3, 3]
    assert found.ids.dtype == np.float32
    np.testing.assert_array_equal(found.ids.reshape(3, 3), np.concatenate(parts)[index])
    assert store.gather(np.zeros(0, dtype=np.int64)).ids.shape == (0,)


def test_no_rows_are_rows_too(tmp_path: Path) -> None:
    write(tmp_path / "vectors", draw(0))
    store = VectorStore.open(tmp_path / "vectors")
    assert (len(store), store.width) == (0, 3)


def test_a_store_travels_as_its_path(tmp_path: Path) -> None:
    write(tmp_path / "vectors", draw(2000, 50))
    store = VectorStore.open(tmp_path / "vectors")
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert isinstance(again.rows, np.memmap)
    np.testing.assert_array_equal(again.rows, store.rows)
    in_memory = pickle.loads(pickle.dumps(VectorStore(draw(3))))
    np.testing.assert_array_equal(in_memory.rows, draw(3))


def test_an_interrupted_store_leaves_no_file(tmp_path: Path) -> None:
    def interrupt() -> None:
        with write_vector_store(tmp_path / "vectors", 3) as append:
            append(draw(4))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_store_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prepare the text again"):
        VectorStore.open(tmp_path / "absent")
    np.save(tmp_path / "flat.npy", np.zeros(4))
    with pytest.raises(InputError, match="holds no rows of vectors"):
        VectorStore.open(tmp_path / "flat")
    write(tmp_path / "cut", draw(100))
    content = (tmp_path / "cut.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cut"):
        VectorStore.open(tmp_path / "cut")
