"""`calque translate`: files and pipes, scores, invalid lines, and interrupted runs."""

from __future__ import annotations

import gzip
import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from calque.cli import run
from calque.translation import translate as tool

Pairs = list[tuple[str, str]]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taught_pairs: Pairs) -> Path:
    monkeypatch.chdir(tmp_path)
    for side, name in enumerate(("text.en", "text.de")):
        lines = [pair[side] + "\n" for pair in taught_pairs]
        Path(name).write_text("".join(lines), encoding="utf-8")
    return tmp_path


@pytest.fixture
def command(translator_folder: Path, place: Path) -> list[str]:
    return ["translate", str(translator_folder), "text.en", "--tgt-lang", "de", "--device", "cpu"]


def give_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    stream = io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": stream}))


def test_lines_come_out_in_order(command: list[str], capfdbinary: Any) -> None:
    assert run(command) == 0
    out, err = capfdbinary.readouterr()
    assert out == Path("text.de").read_bytes()
    assert b"standard output: 8 lines, " in err
    assert b" tokens; " in err


def test_a_pipe_is_translated(
    translator_folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    give_input(monkeypatch, b"\n" + Path("text.de").read_bytes())
    assert run(["translate", str(translator_folder), "--tgt-lang", "en", "--device", "cpu"]) == 0
    out, err = capfdbinary.readouterr()
    assert out == b"\n" + Path("text.en").read_bytes()
    assert b"9 lines, " in err and b"1 empty lines" in err


def test_a_missing_sacrebleu_is_reported_first(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    assert run([*command, "--score", "text.de"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "calque: error: sacrebleu is not installed (pip install 'calque[eval]')\n"


def test_compressed_files_and_scores(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    wrong = Path("text.de").read_text().splitlines()
    wrong[0] = wrong[0].replace("Gäste", "Leute")
    Path("reference").write_text("\n".join(wrong) + "\n")
    assert run([*command, "-o", "out.gz", "--score", "reference"]) == 0
    assert gzip.decompress(Path("out.gz").read_bytes()) == Path("text.de").read_bytes()
    err = capfd.readouterr().err
    right = Path("text.de").read_text().splitlines()
    bleu = sacrebleu.corpus_bleu(right, [wrong])
    assert f"BLEU {bleu.score:.2f}  nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|" in err
    assert f"chrF {sacrebleu.corpus_chrf(right, [wrong]).score:.2f}  nrefs:1|" in err
    assert 90 < bleu.score < 100
    assert run([*command, "--score", "text.de"]) == 0
    out, err = capfd.readouterr()
    assert out == Path("text.de").read_text()
    assert "BLEU 100.00" in err


def test_scores_without_an_output_file(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "-o", os.devnull, "--score", "text.de"]) == 0
    assert "BLEU 100.00" in capfd.readouterr().err


def test_n_best_lists(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--nbest", "2"]) == 0
    rows = [line.split(" ||| ") for line in capfd.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [str(number // 2) for number in range(16)]
    assert [row[1] for row in rows[::2]] == Path("text.de").read_text().splitlines()
    assert all(float(row[2]) <= 0 for row in rows)


def test_invalid_lines(
    command: list[str], capfd: pytest.CaptureFixture[str], taught_pairs: Pairs
) -> None:
    english = taught_pairs[0][0].encode()
    Path("text.en").write_bytes(english + b"\n\xff\xfe\n" + english + b"\n")
    assert run([*command, "-o", "out"]) == 2
    assert "text.en, line 2: invalid UTF-8 at byte 1" in capfd.readouterr().err
    assert not Path("out").exists() and not Path("out.partial").exists()
    assert run([*command, "-o", "out", "--skip-bad", "bad"]) == 0
    german = taught_pairs[0][1]
    assert Path("out").read_text().splitlines() == [german, "", german]
    assert Path("bad").read_text().startswith("2\tinvalid UTF-8")
    assert "1 lines skipped" in capfd.readouterr().err


def test_an_interrupted_run_is_resumed(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "BLOCK_LINES", 3)
    translate_block, seen = tool.Translator.translate_block, []

    def stop_at_second(self: tool.Translator, lines: list[str]) -> Any:
        seen.append(lines)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return translate_block(self, lines)

    with monkeypatch.context() as patch:
        patch.setattr(tool.Translator, "translate_block", stop_at_second)
        assert run([*command, "-o", "out"]) == 130
    kept = f"the finished work is kept in {Path('out.partial').absolute()}: continue with --resume"
    assert capfd.readouterr().err.endswith(f"calque: interrupted; {kept}\n")
    assert not Path("out").exists()
    assert run([*command, "-o", "out"]) == 2
    assert "this folder holds an unfinished run" in capfd.readouterr().err
    assert run([*command, "-o", "out", "--resume", "--beams", "2"]) == 2
    assert "this run started with beams 5, not 2" in capfd.readouterr().err
    assert run([*command, "-o", "out", "--resume", "--score", "text.de"]) == 0
    assert Path("out").read_bytes() == Path("text.de").read_bytes()
    message = capfd.readouterr().err
    assert "8 lines (3 of them earlier)" in message and "BLEU 100.00" in message
    assert not Path("out.partial").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--tgt-lang", "fr"], "this model does not translate into fr (choose one of de, en)"),
        (["--nbest", "6"], "6 translations are requested from 5 beams"),
        (["--nbest", "2", "--score", "text.de"], "n-best lists cannot be scored"),
        (["--resume"], "only a run from a file to a file can be resumed"),
        (["-o", "text.en"], "text.en: the file is both input and output"),
        (["-o", "no/out"], "no/out: the file cannot be created: its folder does not exist"),
        (["-o", "text.de", "--score", "text.de"], "text.de: the file is both input and output"),
        (["--skip-bad", "text.en"], "text.en: the file is both input and output"),
        (["--skip-bad", "text.de", "--score", "text.de"], "text.de: the file is both input"),
        (["--skip-bad", "out", "-o", "./out"], "out: the file is both -o and --skip-bad"),
        (["--skip-bad", "no/bad"], "no/bad: the file cannot be created: its folder does not exist"),
        (["--length-penalty", "inf"], "the length penalty is inf (choose a finite number)"),
        (["--score", "short"], "short: there are 1 references for 8 lines"),
        (["--score", "gone"], "gone: no such file"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    changes: list[str], message: str, command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("short").write_text("Eins.\n")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    assert run([*command, *changes]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("calque: error: ")
    assert message in line
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_an_encoder_cannot_translate(
    tiny_folder: Path, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["translate", str(tiny_folder), "text.en"]) == 2
    assert "this xlm-roberta model is not an encoder–decoder" in capfd.readouterr().err
    assert run(["translate", "calque-mini", "gone.en"]) == 2
    assert "gone.en: no such file" in capfd.readouterr().err
