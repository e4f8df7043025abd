"""`calque embed`."""

from __future__ import annotations

import io
import lzma
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import calque
from calque.cli import run

LINES = ["Guten Morgen!", "", "Good morning!", "word " * 200]


@pytest.fixture
def text() -> bytes:
    return "".join(line + "\n" for line in LINES).encode()


@pytest.fixture(scope="module")
def want(tiny_folder: Path) -> np.ndarray:
    return calque.load(tiny_folder).embed(LINES)


def embed(file: object, out: Path, folder: Path, *more: str) -> int:
    return run(["embed", str(file), "-o", str(out), "--model", str(folder), *more])


def test_one_row_per_line(
    tmp_path: Path,
    tiny_folder: Path,
    text: bytes,
    want: np.ndarray,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_bytes(text)
    out = tmp_path / "v.npy"
    assert embed(tmp_path / "text", out, tiny_folder) == 0
    np.testing.assert_allclose(np.load(out), want, atol=1e-6)
    said = capsys.readouterr().err
    assert said.startswith(f"{out}: 4 vectors, 1 long lines split into ")
    assert "1 empty lines are zero" in said


def test_compressed(tmp_path: Path, tiny_folder: Path, text: bytes, want: np.ndarray) -> None:
    (tmp_path / "text.xz").write_bytes(lzma.compress(text))
    assert embed(tmp_path / "text.xz", tmp_path / "v.npy", tiny_folder) == 0
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), want, atol=1e-6)


def test_standard_input(
    tmp_path: Path,
    tiny_folder: Path,
    text: bytes,
    want: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(text))))
    assert embed("-", tmp_path / "v.npy", tiny_folder) == 0
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), want, atol=1e-6)


def test_a_pipe_is_read_once(
    tmp_path: Path, tiny_folder: Path, text: bytes, want: np.ndarray
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[text])
    writer.start()
    assert embed(pipe, tmp_path / "v.npy", tiny_folder) == 0
    writer.join()
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), want, atol=1e-6)


def test_layer_center_normalize(tmp_path: Path, tiny_folder: Path, text: bytes) -> None:
    (tmp_path / "text").write_bytes(text)
    out = tmp_path / "v.npy"
    options = ["--layer", "-1", "--center", "--normalize", "--device", "cpu"]
    assert embed(tmp_path / "text", out, tiny_folder, *options) == 0
    model = calque.load(tiny_folder)
    want = model.embed(LINES, layer=4, languages=["x"] * 4, normalize=True)
    np.testing.assert_allclose(np.load(out), want, atol=1e-5)


def test_an_invalid_line_is_reported_before_the_work(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(b"fine\n\xff\xfe\nfine\n")
    assert embed(tmp_path / "text", tmp_path / "v.npy", tiny_folder) == 2
    assert "text, line 2: invalid UTF-8 at byte 1" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_invalid_lines_can_be_skipped(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(b"fine\n\xff\nfine\n")
    listed, out = tmp_path / "bad", tmp_path / "v.npy"
    for taken, problem in (("text", "both input and output"), ("v.npy", "both -o and --skip-bad")):
        options = ["--skip-bad", str(tmp_path / taken)]
        assert embed(tmp_path / "text", out, tiny_folder, *options) == 2
        assert problem in capsys.readouterr().err
    assert embed(tmp_path / "text", out, tiny_folder, "--skip-bad", str(listed)) == 0
    assert listed.read_text() == "2\tinvalid UTF-8 at byte 1\t\\xff\n"
    vectors = np.load(out)
    assert (vectors[0] == vectors[2]).all()
    assert (vectors[1] == 0).all()
    assert "1 of them invalid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--layer", "9"], "layer 9 does not exist"),
        (["--device", "toaster"], "device 'toaster'"),
        (["--precision", "fp8"], "--precision fp8 does not exist"),
    ],
)
def test_invalid_options(
    tmp_path: Path,
    tiny_folder: Path,
    options: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_bytes(b"fine\n")
    assert embed(tmp_path / "text", tmp_path / "v.npy", tiny_folder, *options) == 2
    assert problem in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_the_input_is_not_overwritten(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.npy"
    text.write_bytes(b"fine\n")
    assert embed(text, text, tiny_folder) == 2
    assert "text.npy: the file is both input and output" in capsys.readouterr().err
    assert text.read_bytes() == b"fine\n"


def test_missing_file(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert embed(tmp_path / "nothing", tmp_path / "v.npy", tiny_folder) == 2
    assert "nothing: no such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
