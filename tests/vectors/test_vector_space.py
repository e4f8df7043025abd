"""Spaces of word vectors, and folders of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.vectors.static import N_KEPT, VectorFolder, VectorSpace, WordVectors, load_space


def write(path: Path, vectors: dict[str, list[float]]) -> Path:
    lines = [f"{len(vectors)} {len(next(iter(vectors.values())))}"]
    lines += [f"{word} {' '.join(map(str, row))}" for word, row in vectors.items()]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_rows_have_length_one_and_zeros_go(tmp_path: Path) -> None:
    path = write(tmp_path / "de.vec", {"ein": [3, 4], "nichts": [0, 0], "zwei": [0, -2]})
    before = path.read_bytes()
    space = load_space(path)
    assert list(space.words) == ["ein", "zwei"]
    np.testing.assert_allclose(space.rows.numpy(), [[0.6, 0.8], [0, -1]], rtol=1e-6)
    assert (space.n_read, space.n_zero, len(space)) == (3, 1, 2)
    assert space.look_up(["zwei", "nichts", "ein"]).tolist() == [1, -1, 0]
    assert path.read_bytes() == before


def test_only_the_most_frequent(tmp_path: Path) -> None:
    path = write(tmp_path / "de.vec", {"ein": [3, 4], "zwei": [0, -2], "drei": [1, 1]})
    assert list(load_space(path, max_words=2).words) == ["ein", "zwei"]


def test_nothing_but_zeros() -> None:
    vectors = WordVectors(["a"], np.zeros((1, 3), dtype=np.float32))
    with pytest.raises(InputError, match=r"de\.vec: all vectors are zero"):
        VectorSpace.of(vectors, "de.vec")


def test_a_folder_knows_its_languages(tmp_path: Path) -> None:
    for name in ("de.vec", "en.vec", "fr.vec", "it.vec", "ceb.bin", "de.vec.counts", "notes.txt"):
        write(tmp_path / name, {name[:2]: [1.0, 2.0]})
    (tmp_path / "de.vec.counts").unlink()  # would have to belong to de.vec
    folder = VectorFolder(tmp_path)
    assert folder.languages == ["ceb", "de", "en", "fr", "it"]
    first = folder.load("de")
    assert folder.load("de") is first
    for language in ("en", "fr", "it"):
        folder.load(language)
    assert len(folder._loaded) == N_KEPT
    assert folder.load("de") is not first
    assert list(folder.load("de").words) == ["de"]
    with pytest.raises(InputError, match=r"no vectors of 'sw' \(choose from: ceb de en fr it\)"):
        folder.load("sw")


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        VectorFolder(tmp_path / "gone")
    with pytest.raises(InputError, match="no word vectors here"):
        VectorFolder(tmp_path)
    write(tmp_path / "de.vec", {"a": [1.0, 2.0]})
    write(tmp_path / "en.vec", {"a": [1.0, 2.0, 3.0]})
    with pytest.raises(InputError, match=r"de\.vec: its vectors have 2 numbers, .*en\.vec have 3"):
        VectorFolder(tmp_path).load_pair("de", "en")
    (tmp_path / "de.bin").touch()
    with pytest.raises(InputError, match=r"de\.bin and de\.vec are both of 'de'"):
        VectorFolder(tmp_path)
