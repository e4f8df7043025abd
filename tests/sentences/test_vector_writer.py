"""Vectors on disk: the same as in memory, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.sentences import embed as embedder
from calque.sentences.embed import (
    center_by_language,
    embed_sentences,
    normalize_rows,
    write_vectors,
)

TEXTS = ["One.", "Two words.", "", "And three more.", "Fünf."]


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_file_equals_memory(
    tiny_encoder: Encoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    center: bool,
    normalize: bool,
) -> None:
    monkeypatch.setattr(embedder, "BLOCK_SENTENCES", 2)
    path = tmp_path / "vectors.npy"
    report = write_vectors(tiny_encoder, iter(TEXTS), path, center=center, normalize=normalize)
    want = embed_sentences(tiny_encoder, TEXTS)
    want = center_by_language(want, ["one"] * 5) if center else want
    want = normalize_rows(want) if normalize else want
    np.testing.assert_allclose(np.load(path), want, atol=1e-6)
    assert (np.load(path)[2] == 0).all()
    assert (report.n_sentences, report.n_empty) == (5, 1)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("center", [False, True])
def test_no_lines(tiny_encoder: Encoder, tmp_path: Path, center: bool) -> None:
    write_vectors(tiny_encoder, [], tmp_path / "none.npy", center=center)
    assert np.load(tmp_path / "none.npy").shape == (0, 64)


def test_an_interrupted_run_leaves_the_old_file(
    tiny_encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> Iterator[str]:
        yield from TEXTS
        raise KeyboardInterrupt

    monkeypatch.setattr(embedder, "BLOCK_SENTENCES", 2)
    path = tmp_path / "vectors.npy"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_vectors(tiny_encoder, interrupt(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "problem"), [("v.txt", "try v.npy"), ("-", "as .npy"), ("no/v.npy", "mkdir -p")]
)
def test_impossible_outputs(tiny_encoder: Encoder, tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        write_vectors(tiny_encoder, TEXTS, tmp_path / name)
