"""Extraction from files: resumed runs, and what is written."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calque.errors import InputError
from calque.io.resumable import ResumeWarning
from calque.models.encoder import Encoder
from calque.vectors import extract, x2static
from calque.vectors.corpus import (
    CorpusFilter,
    CorpusReader,
)
from calque.vectors.extract import ExtractionFolder, extract_vectors
from calque.vectors.static import WordVectors

Row = tuple[str, str, str]


@pytest.fixture
def text_file(tmp_path: Path, demo_rows: list[Row]) -> Path:
    path = tmp_path / "en.txt"
    path.write_text("".join(f"{row[1]} {row[1]}\n" for row in demo_rows[::2]), "utf-8")
    return path


OPTIONS: dict[str, Any] = {
    "language": "en",
    "subsample": 0.01,
    "batch_sentences": 16,
    "epochs": 2,
    "min_count": 3,
    "min_tokens": 3,
}


class Killed(BaseException):
    """Simulates SIGKILL, which cannot be caught."""


@pytest.mark.parametrize("method", ["x2static", "pooling"])
@pytest.mark.parametrize("n_blocks", [0, 1, 3])
def test_a_killed_run_is_resumed(
    tiny_folder: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    n_blocks: int,
) -> None:
    monkeypatch.setattr(x2static, "BLOCK_SENTENCES", 64)
    monkeypatch.setattr(x2static.PoolingLearner, "block_sentences", 64)
    options = {**OPTIONS, "model": Encoder.load(tiny_folder), "method": method}
    whole, halved = (text_file.with_name(name) for name in ("whole.vec", "halved.vec"))
    extract_vectors(text_file, output=whole, **options)
    left = iter(range(n_blocks))
    save = ExtractionFolder.save_if_due

    def save_or_die(self: ExtractionFolder, *args: Any) -> None:
        if next(left, None) is None:
            raise Killed
        save(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(extract, "SECONDS_BETWEEN_SAVES", 0)
        patch.setattr(ExtractionFolder, "save_if_due", save_or_die)
        with pytest.raises(Killed):
            extract_vectors(text_file, output=halved, **options)
    folder = halved.with_name("halved.vec.partial")
    assert (folder / "state.safetensors").exists() == (n_blocks > 0)
    assert not halved.exists()
    with pytest.raises(InputError, match=r"unfinished run \(continue it with --resume"):
        extract_vectors(text_file, output=halved, **options)
    with pytest.raises(InputError, match="this run started with min_count 3, not 4"):
        extract_vectors(text_file, output=halved, resume=True, **{**options, "min_count": 4})
    seen: list[tuple[str, int, int | None]] = []
    result = extract_vectors(
        text_file,
        output=halved,
        resume=True,
        progress=lambda *step: seen.append(step),
        **options,
    )
    assert result.is_resumed
    assert not folder.exists()
    assert halved.read_bytes() == whole.read_bytes()
    stage, n_done, n_total = seen[-1]
    assert (stage, n_done) == ("extracting", n_total)


def test_a_kill_while_reading_keeps_nothing(
    tiny_folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, output = Encoder.load(tiny_folder), text_file.with_name("en.vec")

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("calque.vectors.extract.number_corpus", die)
        with pytest.raises(Killed):
            extract_vectors(text_file, output=output, model=encoder, **OPTIONS)
    assert sorted(path.name for path in text_file.parent.iterdir()) == ["en.txt"]
    # The files of a real kill do not prevent the next run.
    folder = output.with_name("en.vec.partial")
    folder.mkdir()
    (folder / "settings.json").write_text("{}")
    (folder / "sentences.ids.npy").write_bytes(b"")
    extract_vectors(text_file, output=output, model=encoder, **OPTIONS)
    assert not folder.exists()


def test_other_files_are_not_removed(tiny_folder: Path, text_file: Path) -> None:
    folder = text_file.with_name("en.vec.partial")
    folder.mkdir()
    (folder / "thesis.tex").touch()
    output = text_file.with_name("en.vec")
    with pytest.raises(InputError, match="this path is needed for unfinished work"):
        extract_vectors(text_file, output=output, model=tiny_folder, **OPTIONS)
    assert (folder / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("state.safetensors", "vectors are learned from the start"),
        ("corpus.json", "the text is read again"),
        ("sentences.ids.npy", "the text is read again"),
        ("pieces.offsets.npy", "the text is read again"),
        ("settings.json", "the run cannot be resumed and starts again"),
    ],
)
def test_damaged_work_is_repeated(
    tiny_folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, file: str, problem: str
) -> None:
    monkeypatch.setattr(x2static, "BLOCK_SENTENCES", 64)
    options = {**OPTIONS, "model": Encoder.load(tiny_folder)}
    whole, halved = (text_file.with_name(name) for name in ("whole.vec", "halved.vec"))
    extract_vectors(text_file, output=whole, **options)
    generator = np.random.default_rng(0)
    for _ in range(3):
        interrupt(text_file, halved, options, monkeypatch)
        path = text_file.with_name("halved.vec.partial") / file
        content = bytearray(path.read_bytes())
        content[int(generator.integers(len(content)))] ^= 128
        path.write_bytes(content)
        path.with_name(".tmprZtf7M").touch()  # left by safetensors
        with pytest.warns(ResumeWarning, match=problem):
            extract_vectors(text_file, output=halved, resume=True, **options)
        assert not path.parent.exists()
        assert halved.read_bytes() == whole.read_bytes()
        halved.unlink()


def interrupt(
    text: Path, output: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt a run after three blocks; meanwhile, nobody else can write its output."""
    save, left = ExtractionFolder.save_if_due, iter(range(3))

    def save_or_stop(self: ExtractionFolder, *args: Any) -> None:
        if next(left, None) is None:
            with pytest.raises(InputError, match=r"partial: process \d+ on .* is writing here"):
                ExtractionFolder(output, {})
            raise KeyboardInterrupt
        save(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(extract, "SECONDS_BETWEEN_SAVES", 0)
        patch.setattr(ExtractionFolder, "save_if_due", save_or_stop)
        with pytest.raises(KeyboardInterrupt) as caught:
            extract_vectors(text, output=output, **options)
    kept = f"the finished work is kept in {output}.partial: continue with --resume"
    assert caught.value.__notes__ == [kept]


def test_written_vectors(tiny_folder: Path, text_file: Path) -> None:
    encoder, output = Encoder.load(tiny_folder), text_file.with_name("en.vec")
    result = extract_vectors([text_file] * 2, output=output, model=encoder, layer=-1, **OPTIONS)
    vectors = WordVectors.load(output, cache=False)
    assert result.layer == encoder.n_layers
    assert result.n_words == len(vectors) > 20
    assert vectors.counts is not None
    assert (np.diff(vectors.counts) <= 0).all()
    words = list(CorpusReader("en", CorpusFilter(min_tokens=3)).read([text_file]))
    counts = Counter(itertools.chain.from_iterable(words))
    assert vectors.counts.tolist() == [2 * counts[word] for word in vectors.words]
    assert result.n_running_words == vectors.counts.sum()
    assert result.corpus.n_sentences == 2 * len(words)
