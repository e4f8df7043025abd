"""What commands show while they work: nothing long goes by without a sign."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from calque.cli import run
from calque.vectors.static import WordVectors, write_vectors


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is shown, in order."""
    shown: list[str] = []

    @contextmanager
    def show(label: str, total: int | None = None) -> Iterator[Callable[[object], None]]:
        shown.append(label)
        yield lambda _: None

    for name in ("show_progress", "show_phases"):
        monkeypatch.setattr(f"calque.cli.console.{name}", show)
    return shown


def test_texts(signs: list[str], tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "de").write_text("Guten Morgen!\nDas Haus ist rot.\n")
    (tmp_path / "en").write_text("The house is red.\nGood morning!\n")
    (tmp_path / "both").write_text("das Haus ||| the house\n")
    model = ["--model", str(tiny_folder), "--device", "cpu"]
    texts = [str(tmp_path / name) for name in ("de", "en")]
    assert run(["embed", texts[0], "-o", str(tmp_path / "de.npy"), *model]) == 0
    assert signs == ["reading", "embedding"]
    signs.clear()
    assert run(["mine", *texts, "-o", str(tmp_path / "mined.tsv"), *model]) == 0
    assert signs == ["reading", "embedding", "comparing"]
    signs.clear()
    assert run(["align", str(tmp_path / "both"), "-o", str(tmp_path / "links"), *model]) == 0
    assert signs == ["reading", "aligning"]


def test_vectors(signs: list[str], tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    files = []
    for language in ("en", "de"):
        files.append(str(tmp_path / f"{language}.vec"))
        write_vectors(WordVectors([f"{language}{row}" for row in range(20)], matrix), files[-1])
    (tmp_path / "en-de.txt").write_text("".join(f"en{row} de{row}\n" for row in range(20)))
    gold = str(tmp_path / "en-de.txt")
    assert run(["map", *files, "-o", str(tmp_path / "mapped"), "--dictionary", gold]) == 0
    assert signs == ["reading", "mapping"]
    signs.clear()
    output = ["-o", str(tmp_path / "out.tsv")]
    assert run(["lexicon", *files, "--evaluate", gold, *output]) == 0
    assert signs == ["reading", "comparing", "scoring", "scoring", "comparing"]
