"""Stages of progress that commands show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from calque.cli import run
from calque.types import Progress
from calque.vectors.static import WordVectors


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the stages, in order."""
    names: list[str] = []

    def note(stage: str, done: int, total: int | None) -> None:
        assert total is None or done <= total
        if stage not in names:
            names.append(stage)

    @contextmanager
    def record() -> Iterator[Progress]:
        yield note

    monkeypatch.setattr("calque.cli.console.progress_bar", record)
    return names


def test_texts(stages: list[str], tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "de").write_text("Guten Morgen!\nDas Haus ist rot.\n")
    (tmp_path / "en").write_text("The house is red.\nGood morning!\n")
    model = ["--model", str(tiny_folder), "--device", "cpu"]
    texts = [str(tmp_path / name) for name in ("de", "en")]
    assert run(["embed", texts[0], "-o", str(tmp_path / "de.npy"), *model]) == 0
    assert stages == ["reading", "embedding"]
    stages.clear()
    assert run(["mine", *texts, "-o", str(tmp_path / "mined.tsv"), *model]) == 0
    assert stages == ["reading", "embedding", "comparing"]


def test_vectors(stages: list[str], tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    files = []
    for language in ("en", "de"):
        files.append(str(tmp_path / f"{language}.vec"))
        WordVectors([f"{language}{row}" for row in range(20)], matrix).save(files[-1])
    (tmp_path / "en-de.txt").write_text("".join(f"en{row} de{row}\n" for row in range(20)))
    gold = str(tmp_path / "en-de.txt")
    assert run(["map", *files, "-o", str(tmp_path / "mapped"), "--dictionary", gold]) == 0
    assert stages == ["reading", "mapping de: supervised", "writing"]
    stages.clear()
    output = ["-o", str(tmp_path / "out.tsv")]
    assert run(["lexicon", *files, "--evaluate", gold, *output]) == 0
    assert stages == ["reading", "comparing"]
