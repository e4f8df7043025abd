"""`calque extract`."""

from __future__ import annotations

import gzip
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from calque.cli import run
from calque.vectors.static import WordVectors

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "The lazy dog sleeps under the old brown tree.",
    "A quick fox runs over the old stone bridge.",
]
TEXT = "".join(" ".join(SENTENCES[k % 3 :] + SENTENCES[: k % 3]) + "\n" for k in range(6))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "en.txt"
    path.write_text(TEXT, "utf-8")
    return path


def extract(file: object, folder: Path, *more: str) -> int:
    output = ["-o", str(folder / "en.vec"), "--language", "en"]
    return run(["extract", str(file), *output, "--model", str(folder / "model"), *more])


@pytest.fixture(autouse=True)
def model(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "model").symlink_to(tiny_folder)


def test_vectors_of_words(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--min-count", "6", "--epochs", "2", "--subsample", "0.1"]
    assert extract(text, tmp_path, *options) == 0
    vectors = WordVectors.load(tmp_path / "en.vec", cache=False)
    assert vectors.words[:2] == ["the", "."]
    assert vectors.counts is not None
    # Three sentences in six lines: "the" twice, twice and once in them, "fox" once, not, once.
    assert vectors.counts[0] == 30
    assert vectors.counts[vectors.index["fox"]] == 12
    assert vectors.matrix.shape == (17, 64)
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path / 'en.vec'}: 17 vectors of layer 2, loss ")
    assert "18 sentences of 6 lines" in said
    assert "--subsample" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "en.txt",
        "en.vec",
        "en.vec.counts",
        "model",
    ]


def test_gensim_reads_it(tmp_path: Path, text: Path) -> None:
    """The format is also checked without Gensim."""
    assert extract(text, tmp_path, "--min-count", "6", "--method", "pooling") == 0
    header, *lines = (tmp_path / "en.vec").read_text("utf-8").splitlines()
    assert header == f"{len(lines)} 64"
    assert all(len(line.split(" ")) == 65 for line in lines)
    gensim = pytest.importorskip("gensim.models")
    loaded = gensim.KeyedVectors.load_word2vec_format(str(tmp_path / "en.vec"))
    np.testing.assert_allclose(
        loaded["fox"],
        WordVectors.load(tmp_path / "en.vec", cache=False).matrix[loaded.get_index("fox")],
    )


def test_several_compressed_and_piped_files(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more.gz").write_bytes(gzip.compress(TEXT.encode()))
    piped = io.TextIOWrapper(io.BufferedReader(io.BytesIO(TEXT.encode())))
    monkeypatch.setattr(sys, "stdin", piped)
    output = ["-o", str(tmp_path / "en.vec"), "--model", str(tmp_path / "model")]
    files = [str(text), str(tmp_path / "more.gz"), "-"]
    assert run(["extract", *files, *output, "--language", "en", "--method", "pooling"]) == 0
    counts = WordVectors.load(tmp_path / "en.vec", cache=False).counts
    assert counts is not None
    assert counts[0] == 90


def test_binary(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--min-count", "6", "--epochs", "1", "--binary"]
    assert extract(text, tmp_path, *options) == 0
    assert (tmp_path / "en.vec").read_bytes().startswith(b"17 64\nthe ")
    assert "few: use a higher --subsample for a small text" in capsys.readouterr().err
    binary = WordVectors.load(tmp_path / "en.vec", cache=False)
    assert extract(text, tmp_path, *options[:-1]) == 0
    plain = WordVectors.load(tmp_path / "en.vec", cache=False)
    assert list(binary.words) == list(plain.words)
    np.testing.assert_allclose(binary.matrix, plain.matrix, rtol=1e-5)


def test_words_that_were_never_targets(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("Hello\nWorld\n" * 3 + TEXT, "utf-8")
    options = ["--min-count", "3", "--no-filter", "--sentence-lines"]
    assert extract(text, tmp_path, *options, "--subsample", "1", "--epochs", "1") == 0
    assert ", 2 words never used, so that their vectors are random, " in capsys.readouterr().err
    assert extract(text, tmp_path, *options, "--method", "pooling") == 0
    assert "never used" not in capsys.readouterr().err


def test_random_vectors_are_not_written(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text("Hello\nWorld\n", "utf-8")
    options = ["--min-count", "1", "--no-filter", "--sentence-lines"]
    assert extract(text, tmp_path, *options) == 2
    assert "no word was ever a target" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"en.txt", "model"}


def test_dropped_sentences_are_reported(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.write_text(TEXT + "Only a headline, however long it may be\nIs it? Yes, it is.\n")
    options = ["--min-count", "6", "--method", "pooling", "--max-sentences", "17"]
    assert extract(text, tmp_path, *options, "--max-length", "12") == 0
    said = capsys.readouterr().err
    assert "17 sentences of 6 lines" in said
    assert "the rest of the text was not read" in said
    assert "sentences truncated by " in said
    assert extract(text, tmp_path, *options[:-2]) == 0
    said = capsys.readouterr().err
    assert "1 sentences of short paragraphs dropped, 2 short sentences dropped" in said
    assert extract(text, tmp_path, *options[:-2], "--no-filter") == 0
    said = capsys.readouterr().err
    assert "21 sentences of 8 lines" in said
    assert " dropped" not in said


def test_an_invalid_line(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text.write_bytes(TEXT.encode() + b"\xff\n" + TEXT.encode())
    assert extract(text, tmp_path, "--min-count", "6") == 2
    assert "en.txt, line 7: invalid UTF-8 at byte 1" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["en.txt", "model"]
    assert extract(text, tmp_path, "--skip-bad", str(text)) == 2
    assert "en.txt: the file is both input and output" in capsys.readouterr().err
    assert extract(text, tmp_path, "--skip-bad", str(tmp_path / "en.vec.counts")) == 2
    assert "en.vec.counts: the file is both -o and --skip-bad" in capsys.readouterr().err
    listed = ["--skip-bad", str(tmp_path / "bad")]
    assert extract(text, tmp_path, "--min-count", "6", "--method", "pooling", *listed) == 0
    assert "1 invalid lines skipped" in capsys.readouterr().err
    assert (tmp_path / "bad").read_text() == "7\tinvalid UTF-8 at byte 1\t\\xff\n"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--method", "magic"], "there is no method 'magic' (choose from: x2static, pooling)"),
        (["--context", "none"], "there is no context 'none'"),
        (["--layer", "9"], "layer 9 does not exist"),
        (["--method", "pooling", "--epochs", "9"], "--epochs has no effect with --method pooling"),
        (["--no-filter", "--min-tokens", "3"], "--min-tokens contradicts --no-filter"),
        (["--epochs", "0"], "n_epochs is 0"),
        (["--max-length", "2"], "max_length=2 leaves no room"),
        (["--min-count", "99"], "no word occurs 99 times or more: the most frequent one occurs 30"),
        (["--language", "jp"], "'jp' is a country"),
        (["--language", "lo"], "Lao has no spaces between words"),
        (["-o", "-"], "vectors cannot be written to standard output"),
        (["-o", "nowhere/en.vec"], "its folder does not exist"),
        (["--seed", "-1"], "the seed is -1 (choose 0 or more)"),
        (["--subsample", "nan"], "subsample is nan (choose more than 0)"),
    ],
)
def test_invalid_options(
    tmp_path: Path,
    text: Path,
    options: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert extract(text, tmp_path, "--min-count", "6", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["en.txt", "model"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "xx.gz: no such file or directory (check the path)"),
        (b"not packed\n", "xx.gz: the content is not .gz data (rename or compress"),
        (gzip.compress(TEXT.encode(), mtime=0)[:-20], "xx.gz: damaged or truncated .gz data"),
        (gzip.compress(b"", mtime=0), "no word occurs 6 times or more: no words"),
        (gzip.compress(b"\n\n", mtime=0), "no word occurs 6 times or more: no words"),
        (gzip.compress(b"one\0two\n", mtime=0), "xx.gz, line 1: the line contains a NUL byte"),
        (gzip.compress(b"a\nb\n\xfc\n", mtime=0), "xx.gz, line 3: invalid UTF-8 at byte 1"),
    ],
)
def test_invalid_files(
    tmp_path: Path, content: bytes | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "xx.gz").write_bytes(content)
    before = sorted(tmp_path.iterdir())
    assert extract(tmp_path / "xx.gz", tmp_path, "--min-count", "6") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert sorted(tmp_path.iterdir()) == before


def test_folders_instead_of_files(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    for options, problem in (
        (["-o", str(tmp_path / "full")], "full: this is a directory (pass the path of a file)"),
        (["--model", str(tmp_path / "full")], "full: this folder has no config.json"),
    ):
        assert extract(text, tmp_path, *options) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert problem in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["en.txt", "full", "model"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes"]


def test_the_text_is_not_overwritten(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text.rename(tmp_path / "en.vec")
    assert extract(tmp_path / "en.vec", tmp_path) == 2
    assert "both input and output" in capsys.readouterr().err


def test_a_killed_process_is_resumed(tmp_path: Path, text: Path) -> None:
    options = ["--min-count", "6", "--subsample", "0.1", "--epochs"]
    assert extract(text, tmp_path, *options, "100") == 0
    whole = (tmp_path / "en.vec").read_bytes()
    (tmp_path / "en.vec").unlink()
    code = (
        "from calque.vectors import extract; extract.SECONDS_BETWEEN_SAVES = 0;"
        "from calque.cli import main; main()"
    )
    arguments = ["extract", str(text), "-o", str(tmp_path / "en.vec"), "--language", "en"]
    arguments += ["--model", str(tmp_path / "model"), *options, "100"]
    with subprocess.Popen([sys.executable, "-c", code, *arguments]) as process:
        state = tmp_path / "en.vec.partial" / "state.safetensors"
        while not state.exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "en.vec").exists()
    assert extract(text, tmp_path, *options, "100", "--resume") == 0
    assert (tmp_path / "en.vec").read_bytes() == whole
    assert not state.parent.exists()
