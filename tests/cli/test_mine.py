"""`calque mine` on real sentences, from text and from vectors, and its error messages."""

from __future__ import annotations

import errno
import gzip
import os
import re
import runpy
import socket
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from calque.cli import run
from calque.io.locks import lock_output
from calque.io.resumable import ResumeWarning
from calque.models import inference
from calque.sentences import mine as mining

write_bucc = runpy.run_path(str(Path(__file__).parents[1] / "bucc_files.py"))["write_bucc"]
Rows = list[tuple[str, str, str]]


@pytest.fixture
def texts(tmp_path: Path, demo_rows: Rows) -> tuple[Path, Path]:
    """Plain text: German sentences, and English ones in another order, a few twice or empty."""
    pairs = [(sentence, english) for code, english, sentence in demo_rows if code == "de"]
    src = [sentence for sentence, _ in pairs]
    tgt = [english for _, english in reversed(pairs)]
    (tmp_path / "de.txt").write_text("\n".join([*src, src[3], "", src[5]]) + "\n", "utf-8")
    with gzip.open(tmp_path / "en.txt.gz", "wt", encoding="utf-8") as stream:
        stream.write("\n".join(tgt) + "\n")
    return tmp_path / "de.txt", tmp_path / "en.txt.gz"


def mine(*arguments: object) -> int:
    return run(["mine", *map(str, arguments), "--device", "cpu"])


def read(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text("utf-8").splitlines()]


def test_plain_text(
    texts: tuple[Path, Path], demo_rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    out = texts[0].parent / "out.tsv"
    assert mine(*texts, "-o", out) == 0
    rows = read(out)
    true = {(sentence, english) for code, english, sentence in demo_rows if code == "de"}
    found = [(src, tgt) for _, src, tgt in rows]
    assert len(true & set(found[:15])) >= 13
    scores = [float(score) for score, *_ in rows]
    assert scores == sorted(scores, reverse=True)
    said = capsys.readouterr().err
    assert said.startswith(f"{out}: {len(rows)} pairs of 25 × 25 sentences, ")
    assert "2 repeated lines left out, 1 empty lines left out" in said
    assert not list(out.parent.glob("*.mining"))
    # The same from vectors of the lines, and with a threshold.
    vectors = [out.parent / "src.npy", out.parent / "tgt.npy"]
    for text, file in zip(texts, vectors, strict=True):
        assert run(["embed", str(text), "-o", str(file), "--device", "cpu"]) == 0
    again, cut = out.parent / "again.tsv.gz", out.parent / "cut.tsv"
    assert mine(*texts, "--vectors", *vectors, "-o", again) == 0
    assert gzip.decompress(again.read_bytes()).decode() == out.read_text("utf-8")
    assert mine(*texts, "--vectors", *vectors, "-o", cut, "--threshold", scores[9] - 1e-6) == 0
    assert read(cut) == rows[:10]
    # With vectors only, the output has line numbers, and zero vectors are left out.
    assert mine(*vectors, "-o", cut, "--retrieval", "intersect", "--margin", "distance") == 0
    lines = texts[0].read_text("utf-8").splitlines()
    best = read(cut)[0]
    assert lines[int(best[1]) - 1] in {src for src, _ in true}
    assert "1 zero vectors left out" in capsys.readouterr().err


def test_ids_and_development_pairs(
    tmp_path: Path, demo_rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, gold = write_bucc(tmp_path, demo_rows)
    files = [tmp_path / f"de-en.dev.{side}" for side in ("de", "en")]
    out = tmp_path / "out.tsv"
    assert mine(*files, "--dev", tmp_path / "de-en.dev.gold", "-o", out) == 0
    said = capsys.readouterr()
    threshold = float(said.out.split()[1])
    rows = read(out)
    assert all(float(row[0]) >= threshold - 1e-6 for row in rows)
    hits = {(row[3], row[4]) for row in rows} & set(gold)
    f1 = 200 * len(hits) / (len(rows) + len(gold))
    assert f"F1 {f1:.1f}, precision {100 * len(hits) / len(rows):.1f}" in said.out
    (tmp_path / "bad.gold").write_text("de-000000001\ten-999999999\n")
    assert mine(*files, "--dev", tmp_path / "bad.gold", "-o", out) == 2
    assert "bad.gold, line 1: 'en-999999999' is not in" in capsys.readouterr().err
    # The error comes before the texts are embedded: there is nothing to resume.
    assert not list(tmp_path.glob("*.mining"))


def test_vectors_survive_development_pairs_that_are_not_found(
    tmp_path: Path, demo_rows: Rows, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, gold = write_bucc(tmp_path, demo_rows)
    files = [tmp_path / f"de-en.dev.{side}" for side in ("de", "en")]
    src, tgt = gold[0][0], gold[-1][1]  # no translations of each other
    (tmp_path / "wrong.gold").write_text(f"{src}\t{tgt}\n")
    out = tmp_path / "out.tsv"
    assert mine(*files, "--dev", tmp_path / "wrong.gold", "-o", out) == 2
    said = capsys.readouterr().err
    assert "none of the 1 pairs" in said and said.count("\n") == 1
    assert "the vectors are kept in" in said and "continue with --resume" in said
    assert mine(*files, "--ids", "-o", out, "--resume") == 0
    assert read(out) and not list(tmp_path.glob("*.mining"))


def test_an_interrupted_run_is_resumed(
    texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = texts[0].parent / "out.tsv", texts[0].parent / "whole.tsv"
    assert mine(*texts, "-o", whole) == 0
    monkeypatch.setattr(mining, "BLOCK_SENTENCES", 10)
    embed, done = mining._embed, list[int]()

    def stop(*arguments: object) -> tuple[bytes, tuple[int, ...]]:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(1)
        return embed(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(mining, "_embed", stop)
    assert mine(*texts, "-o", out) == 130
    assert not out.exists()
    kept = rf"the finished work is kept in {out}\.mining/\S*: continue with --resume"
    assert re.search(rf"\ncalque: interrupted; {kept}\n$", capsys.readouterr().err)
    assert mine(*texts, "-o", out) == 2
    assert "this folder holds an unfinished run" in capsys.readouterr().err
    folder = out.with_name("out.tsv.mining")
    with lock_output(folder):
        assert mine(*texts, "-o", out, "--resume") == 2
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    assert f"{folder}: {owner} is writing here" in capsys.readouterr().err
    rest = list[int]()
    monkeypatch.setattr(mining, "_embed", lambda *arguments: rest.append(1) or embed(*arguments))
    assert mine(*texts, "-o", out, "--resume") == 0
    assert len(rest) == 2  # of 3 + 3 blocks
    assert [row[1:] for row in read(out)] == [row[1:] for row in read(whole)]
    assert not list(out.parent.glob("*.mining"))


def test_vectors_of_another_precision_are_not_used(
    texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = texts[0].parent / "out.tsv"
    search = mining._search
    monkeypatch.setattr(mining, "_search", Mock(side_effect=KeyboardInterrupt))
    assert mine(*texts, "-o", out, "--precision", "fp32") == 130
    monkeypatch.setattr(mining, "_search", search)
    monkeypatch.setattr(inference, "has_fast_bf16", lambda: True)
    embed = Mock(side_effect=mining._embed)
    monkeypatch.setattr(mining, "_embed", embed)
    assert mine(*texts, "-o", out, "--resume", "--precision", "bf16") == 0
    assert embed.call_count == 2  # both texts again


@pytest.mark.parametrize(("pattern", "n_again"), [("*-*.f32", 4), ("*.partial/part-0", 3)])
def test_damaged_vectors_are_computed_again(
    texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, pattern: str, n_again: int
) -> None:
    out, whole = texts[0].parent / "out.tsv", texts[0].parent / "whole.tsv"
    monkeypatch.setattr(mining, "BLOCK_SENTENCES", 10)
    assert mine(*texts, "-o", whole) == 0
    embed, done = mining._embed, list[int]()

    def stop(*arguments: object) -> tuple[bytes, tuple[int, ...]]:
        done.append(1)
        if len(done) == 6:
            raise KeyboardInterrupt
        return embed(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(mining, "_embed", stop)
    assert mine(*texts, "-o", out) == 130
    [file] = out.with_name("out.tsv.mining").glob(pattern)
    content = bytearray(file.read_bytes())
    content[4000] ^= 1
    file.write_bytes(content)
    done[:] = [1] * 10
    with pytest.warns(ResumeWarning, match=rf"{file}: .* computed again"):
        assert mine(*texts, "-o", out, "--resume") == 0
    assert len(done) == 10 + n_again
    assert out.read_bytes() == whole.read_bytes()


def test_a_full_disk_and_a_symbolic_link(
    texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = texts[0].parent / "out.tsv"

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mining.SentenceStore, "_copy", fail)
    assert mine(*texts, "-o", out) == 2
    problem = "no space left on device (free some space or choose another output)"
    assert capsys.readouterr().err.endswith(f"calque: error: {out}.mining: {problem}\n")
    assert not list(out.parent.glob("out*")) and not list(out.parent.glob(".*"))
    out.with_name("out.tsv.mining").symlink_to(".")
    assert mine(*texts, "-o", out, "--resume") == 2
    assert f"{out}.mining: this path is needed for unfinished work" in capsys.readouterr().err


def test_invalid_input(texts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = texts[0].parent
    out = folder / "out.tsv"
    np.save(folder / "short.npy", np.ones((3, 4), np.float32))
    np.save(folder / "wide.npy", np.ones((25, 5), np.float32))
    broken = np.ones((28, 4), np.float32)
    broken[7, 2] = np.nan
    np.save(folder / "nan.npy", broken)
    (folder / "text.npy").write_text("no vectors")
    (folder / "empty.txt").write_text("\n\n")
    (folder / "bad.txt").write_bytes(b"good\n\xff\n")
    cases: list[tuple[list[object], str]] = [
        ([*texts, "--margin", "ration"], "there is no margin 'ration'"),
        ([*texts, "--retrieval", "min"], "there is no retrieval 'min'"),
        ([*texts, "--k", "0"], "neighbors is 0"),
        ([*texts, "--threshold", "1", "--dev", "x"], "drop --threshold or --dev"),
        ([*texts, "--threshold", "nan"], "the threshold is not a number"),
        (["-", texts[1]], "standard input cannot be mined"),
        ([texts[0], folder / "short.npy"], "text and vectors are mixed"),
        ([folder / "absent.txt", texts[1]], "absent.txt: no such file"),
        ([folder / "bad.txt", texts[1]], "bad.txt, line 2: invalid UTF-8"),
        ([folder / "empty.txt", texts[1]], "empty.txt: the file has no sentences"),
        ([*texts, "--ids"], "de.txt, line 1: the line has no id followed by a tab"),
        (
            [*texts, "--vectors", folder / "short.npy", folder / "wide.npy"],
            "3 vectors for 28 lines",
        ),
        ([*texts, "--vectors", folder / "nan.npy", folder / "wide.npy"], "vector 8 is not finite"),
        ([folder / "short.npy", folder / "wide.npy"], "the vectors have 4 and 5 dimensions"),
        ([folder / "short.npy", folder / "text.npy"], "this is not a valid .npy file"),
    ]
    for arguments, message in cases:
        assert mine(*arguments, "-o", out) == 2, message
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
        assert not out.exists()
        assert not list(folder.glob("*.mining"))


@pytest.mark.parametrize("index", ["Nonsense", "IVF4,PQ7"])
def test_an_impossible_index_is_reported_before_the_work(
    index: str,
    texts: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Vectors of 384 numbers cannot be split into seven parts."""
    pytest.importorskip("faiss")
    monkeypatch.delattr(mining, "embed_blocks")
    out = texts[0].parent / "out.tsv"
    assert mine(*texts, "-o", out, "--index", index) == 2
    said = capsys.readouterr().err
    assert f"FAISS has no index '{index}' for vectors of 384 dimensions" in said
    assert not out.exists()


def test_tabs_become_spaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\ttwo\nthree\n")
    (tmp_path / "b.txt").write_text("eins zwei\ndrei\n")
    assert mine(tmp_path / "a.txt", tmp_path / "b.txt", "-o", tmp_path / "out.tsv") == 0
    rows = read(tmp_path / "out.tsv")
    assert {row[1] for row in rows} <= {"one two", "three"}
    assert all(len(row) == 3 for row in rows)
    assert "1 sentences with a tab, written as a space" in capsys.readouterr().err


def test_invalid_lines_are_left_out_and_listed(
    texts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The result is the same without them; vectors from `embed --skip-bad` can be used."""
    folder = texts[0].parent
    assert mine(*texts, "-o", folder / "whole.tsv") == 0
    lines = texts[0].read_bytes().splitlines(keepends=True)
    (folder / "bad.txt").write_bytes(b"".join([b"\xfc first\n", *lines[:2], b"\xff\n", *lines[2:]]))
    out, listed = folder / "out.tsv", folder / "list.tsv"
    capsys.readouterr()
    assert mine(folder / "bad.txt", texts[1], "-o", out) == 2
    assert "bad.txt, line 1: invalid UTF-8 at byte 1" in capsys.readouterr().err
    assert not out.exists() and not list(folder.glob("*.mining"))
    given = (folder / "bad.txt", texts[1], "--skip-bad", listed)
    assert mine(*given, "-o", out) == 0
    assert out.read_bytes() == (folder / "whole.tsv").read_bytes()
    assert "3 empty lines left out, 2 of them invalid" in capsys.readouterr().err
    rows = [line.split("\t")[:2] for line in listed.read_text().splitlines()]
    reason = f"{folder / 'bad.txt'}: invalid UTF-8 at byte 1"
    assert rows == [["1", reason], ["4", reason]]
    vectors = [folder / "src.npy", folder / "tgt.npy"]
    for text, file in zip((folder / "bad.txt", texts[1]), vectors, strict=True):
        skip = ("--skip-bad", str(folder / "again"))
        assert run(["embed", str(text), "-o", str(file), *skip, "--device", "cpu"]) == 0
    assert mine(*given, "--vectors", *vectors, "-o", folder / "again.tsv") == 0
    assert (folder / "again.tsv").read_bytes() == out.read_bytes()
    assert mine(*given[:2], "--skip-bad", texts[1], "-o", out) == 2
    assert "both input and output" in capsys.readouterr().err
