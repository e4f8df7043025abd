"""`calque align` around a toy aligner: input, output, errors, kills and several processes."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

import calque
from calque.cli import run
from calque.io.files import read_lines
from calque.io.links import read_links
from calque.word_alignment import build

TOY = Path(__file__).parents[1] / "toy_align.py"
GOLD = Path(__file__).parents[1] / "data" / "gold"
REAL_BUILD, REAL_SWEEP = build.build_aligner, build.build_sweep
LINES = ["a b c ||| x y", "ein Haus ||| a house", " ||| x", "a|||b"]
LINKS = "0-0 1-1\n0-0 1-1\n\n0-0\n"


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toy = runpy.run_path(str(TOY))
    monkeypatch.setattr(build, "build_aligner", toy["build_aligner"])
    monkeypatch.setattr(build, "build_sweep", toy["build_sweep"])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text() -> bytes:
    return "".join(line + "\n" for line in LINES).encode()


def names() -> set[str]:
    return {path.name for path in Path().iterdir()}


def fails(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Expect one line that names the problem, exit code 2 and no new file."""
    before = names()
    assert run(["align", *arguments]) == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert captured.err.startswith("calque: error: ")
    assert captured.err.count("\n") == 1
    # The lock of a process that was killed before is removed.
    assert names() == {name for name in before if not name.endswith(".lock")}


# What goes in


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_pipes_tabs_and_two_files(
    ending: str, bom: str, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    sides = [[part.strip(" ") for part in line.split("|||")] for line in LINES]
    files = {
        "pipes": LINES,
        "tabs": [f"{src}\t{tgt}\ttag" for src, tgt in sides],
        "src": [src for src, _ in sides],
        "tgt": [tgt for _, tgt in sides],
    }
    for name, lines in files.items():
        Path(name).write_bytes((bom + "".join(line + ending for line in lines)).encode())
    for arguments in (["pipes"], ["tabs"], ["src", "tgt"], ["tabs", "--input-format", "tsv"]):
        assert run(["align", *arguments]) == 0
        assert capsysbinary.readouterr().out == LINKS.encode()


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_compressed(text: bytes, suffix: str) -> None:
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
    Path(f"in{suffix}").write_bytes(pack.get(suffix, bytes)(text))
    for out in ("out", "out.gz", "out.xz", "out.zst"):
        assert run(["align", f"in{suffix}", "-o", out]) == 0
        assert "".join(line + "\n" for line in read_lines(out)) == LINKS


def test_standard_input(
    text: bytes, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    for options, place in (([], "standard output"), (["-o", "out"], "out")):
        stream = io.TextIOWrapper(io.BufferedReader(io.BytesIO(text)))  # type: ignore[type-var]
        monkeypatch.setattr(sys, "stdin", stream)
        assert run(["align", "-", *options]) == 0
        captured = capsysbinary.readouterr()
        assert captured.err.decode().startswith(f"{place}: 4 pairs, 5 links, 1 pairs with an empty")
        assert (captured.out or Path("out").read_bytes()) == LINKS.encode()
    assert names() == {"out"}


def test_a_named_pipe_is_read_once(text: bytes) -> None:
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_bytes, args=[text])
    writer.start()
    assert run(["align", "pipe", "-o", "out"]) == 0
    writer.join()
    assert Path("out").read_text() == LINKS


def test_an_empty_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").touch()
    assert run(["align", "in"]) == 0
    assert run(["align", "in", "-o", "out"]) == 0
    captured = capsys.readouterr()
    assert captured.out == Path("out").read_text() == ""
    assert "out: 0 pairs, 0 links; " in captured.err


def test_a_line_of_a_megabyte(capsys: pytest.CaptureFixture[str]) -> None:
    n_words = 120_000
    Path("in").write_text(
        "a ||| b\n" + "abc " * n_words + "||| " + "xyz " * n_words + "\na ||| b\n"
    )
    assert run(["align", "in", "-o", "out"]) == 0
    lines = Path("out").read_text().splitlines()
    assert [len(line.split()) for line in lines] == [1, n_words, 1]
    assert "1 long pairs in 2,400 windows" in capsys.readouterr().err


# What comes out


def test_scores_words_and_json(text: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_bytes(text)
    assert run(["align", "in", "--scores"]) == 0
    scored = capsys.readouterr().out.splitlines()
    assert [[link.partition(":")[0] for link in line.split()] for line in scored] == [
        line.split() for line in LINKS.splitlines()
    ]
    assert run(["align", "in", "--format", "words"]) == 0
    assert capsys.readouterr().out == "a-x b-y\nein-a Haus-house\n\na-b\n"
    assert run(["align", "in", "--format", "jsonl"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[1]["src"] == ["ein", "Haus"]
    assert rows[1]["links"][1][:2] == [1, 1]
    score = float(scored[0].partition(":")[2].split()[0])
    assert rows[1]["links"][1][2] == pytest.approx(score, abs=1e-4)


def test_raw_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text("L'eau, s'il vous plaît.\tWater, please.\n")
    assert run(["align", "in", "--tokenize", "fr-en", "--format", "jsonl"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["src"] == ["L'", "eau", ",", "s'", "il", "vous", "plaît", "."]
    assert row["tgt"] == ["Water", ",", "please", "."]


def test_a_list_of_bad_lines_overwrites_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("in").write_text("a ||| b\n")
    for options, problem in (
        (["--skip-bad", "in"], "in: the file is both input and output"),
        (
            ["--skip-bad", "out", "-o", "out"],
            "out: the file is both -o and --skip-bad (choose two files)",
        ),
    ):
        assert run(["align", "in", *options]) == 2
        assert problem in capsys.readouterr().err
    assert Path("in").read_text() == "a ||| b\n"
    assert not Path("out").exists()


def test_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_bytes(b"a ||| b\nno bars\n ||| x\n\xff ||| x\n" + b"a " * 120 + b"||| b\n")
    assert run(["align", "in", "-o", "out", "--skip-bad", "bad"]) == 0
    said = capsys.readouterr().err
    assert said.startswith(
        "out: 5 pairs, 2 links, 1 long pairs in 3 windows, 1 pairs with an empty side, "
        "2 lines skipped; "
    )
    assert Path("out").read_text() == "0-0\n\n\n\n0-0\n"
    assert Path("bad").read_text() == (
        "2\tthe line has 0 separators '|||' instead of 1\tno bars\n"
        "4\tinvalid UTF-8 at byte 1\t\\xff ||| x\n"
    )
    assert run(["align", "in", "--skip-bad", "bad", "--format", "jsonl"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[1]) == {
        "src": [],
        "tgt": [],
        "links": [],
    }


def test_a_closed_pipe_is_quiet(text: bytes) -> None:
    Path("in").write_bytes(text * 20_000)
    command = [sys.executable, str(TOY), "align", "in"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(100)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


# What is wrong


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nothing"], "nothing: no such file"),
        (["bad", "-o", "out"], "bad, line 2: invalid UTF-8 at byte 1"),
        (["bad"], "bad, line 2: invalid UTF-8 at byte 1"),
        (
            ["good", "short", "-o", "out"],
            "good: the file has 4 lines, but short has 1 (line 2 has no count",
        ),
        (["good", "good"], "good: both sides are the same file"),
        (["good", "-o", "no/out"], "no/out: the file cannot be created: its folder does not exist"),
        (["good", "-o", "good"], "good: the file is both input and output"),
        (["good", "--gold", "far", "-o", "far"], "far: the file is both input and output"),
        (["good", "--bitext", "far", "-o", "far"], "far: the file is both input and output"),
        (["good", "--gold", "far", "--skip-bad", "far"], "far: the file is both input and output"),
        (["good", "--format", "xml"], "--format xml does not exist (choose from: pharaoh, jsonl"),
        (["good", "--input-format", "csv"], "--input-format csv does not exist"),
        (["good", "--method", "magic"], "--method magic does not exist (choose from: ot, itermax"),
        (["good", "--aligner", "magic"], "--aligner magic does not exist"),
        (["good", "--tokenize", "german"], "'german' does not name two languages"),
        (["good", "--tokenize", "th-en"], "Thai has no spaces between words"),
        (["good", "--resume"], "--resume needs an output file (name it with -o)"),
        (["-", "--resume", "-o", "out"], "a pipe cannot be resumed"),
        (["good", "--sweep"], "--sweep needs gold links"),
        (["good", "--sweep", "--gold", "good", "-o", "x"], "--sweep writes no files"),
        (["good", "--gold", "good"], "good, line 1: 'a' is not a link"),
        (["good", "--gold", "short"], "short, line 1: 'one' is not a link"),
        (["good", "--gold", "few"], "few: the file has 1 lines, but good has 4 pairs"),
        (["good", "--gold", "far", "-o", "out"], "far, line 2: the link 7-0"),
        (["good", "--gold", "few", "--gold-from-one"], "few, line 1: '0-0' is not a link"),
        (
            ["good", "--gold", "far", "-o", "out", "--resume"],
            "--gold cannot score links of an earlier run",
        ),
    ],
)
def test_bad_input_is_one_line(
    text: bytes, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("good").write_bytes(text)
    Path("bad").write_bytes(b"a ||| b\n\xff ||| b\n")
    Path("short").write_text("one\n")
    Path("few").write_text("0-0\n")
    Path("far").write_text("0-0\n7p0\n\n0-0\n")
    fails(arguments, problem, capsys)


def test_an_error_in_a_pipe_leaves_whole_blocks_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY_BLOCK", "2")
    for options in ([], ["-o", "out"]):
        stream = io.BytesIO(b"a ||| b\n" * 5 + b"no bars\n")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(stream)))  # type: ignore[type-var]
        assert run(["align", "-", *options]) == 2
        captured = capsys.readouterr()
        assert captured.out == ("" if options else "0-0\n" * 4)
        assert "standard input, line 6: the line has 0 separators" in captured.err
    assert names() == set()


# Gold


def test_gold_scores(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text("a b c ||| x y z\na b ||| x y\n")
    Path("gold").write_text("0-0 1p1 2-1\n0-0\n")
    # Links: 0-0 1-1 2-2, 0-0 1-1. Sure: 3, two of them found; possible: three found.
    assert run(["align", "in", "--gold", "gold"]) == 0
    captured = capsys.readouterr()
    rows = [line.replace("│", " ").split() for line in captured.out.splitlines()]
    want = [3 / 5, 2 / 3, 2 * (3 / 5) * (2 / 3) / (3 / 5 + 2 / 3), 1 - (2 + 3) / (5 + 3)]
    assert ["toy", *(f"{100 * value:.2f}" for value in want)] in rows
    assert captured.err.startswith("links not written: 2 pairs, 5 links; ")
    assert names() == {"in", "gold"}


def test_gold_and_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY_BLOCK", "3")
    pair = [str(GOLD / "en-fr.text"), "--gold", str(GOLD / "en-fr.gold")]
    assert run(["align", *pair]) == 0
    table = capsys.readouterr().out
    assert run(["align", *pair, "-o", "out"]) == 0
    assert capsys.readouterr().out == table
    assert run(["align", *pair, "-o", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.out == Path("out").read_text()
    assert table in captured.err
    # The same by plain sets, over the whole file.
    links, lines = read_links("out").to_lists(), (GOLD / "en-fr.gold").read_text().splitlines()
    n_links = n_sure = n_both = 0
    for mine, line in zip(links, lines, strict=True):
        sure = {link for link in line.split() if "-" in link}
        possible = {link.replace("p", "-") for link in line.split()}
        found = {f"{i}-{j}" for i, j in mine}
        n_links, n_sure = n_links + len(found), n_sure + len(sure)
        n_both += len(found & sure) + len(found & possible)
    assert f"{100 * (1 - n_both / (n_links + n_sure)):.2f}" in table


def test_gold_of_a_pipe_is_counted_at_the_end(
    text: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for n_lines in (3, 5):
        Path("gold").write_text("\n" * n_lines)
        stream = io.TextIOWrapper(io.BufferedReader(io.BytesIO(text)))  # type: ignore[type-var]
        monkeypatch.setattr(sys, "stdin", stream)
        problem = f"gold: the file has {n_lines} lines, but standard input has 4 pairs"
        fails(["-", "--gold", "gold"], problem, capsys)


def test_words_are_counted_as_the_annotators_did(capsys: pytest.CaptureFixture[str]) -> None:
    pair = [str(GOLD / "ja-en.text"), "--gold", str(GOLD / "ja-en.gold")]
    assert run(["align", *pair]) == 0  # with str.split, links lie outside these sentences
    assert "5 pairs" in capsys.readouterr().err


def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text("a b c ||| x y z\n")
    Path("gold").write_text("0-0 1-1 2-2\n")
    assert run(["align", "in", "--gold", "gold", "--sweep"]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    # At layer 2 the toy gives 0-0 1-0 2-1: one of three is right.
    assert ["1", *["0.00"] * 8] in rows  # four methods, and ot with four values of sharpness
    # One of its 3 links and 2 of the 6 other word pairs are right, so that linking all is best.
    assert ["2", *["66.67"] * 7, "50.00"] in rows


def test_sweep_on_development_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text("a b c ||| x y z\n" * 5)
    # The first and the fourth pair say layer 1, the others would say layer 2.
    first, other = "0-0 1-1 2-2\n", "0-0 1-0 2-1\n"
    Path("gold").write_text(first + other + other + first + other)
    assert run(["align", "in", "--gold", "gold", "--sweep", "--dev-every", "3"]) == 0
    printed = capsys.readouterr().out
    assert "of 2 pairs" in " ".join(printed.replace("\n", " ").split())
    rows = [line.replace("│", " ").split() for line in printed.splitlines()]
    assert ["2", "that", "chose", "it", *["100.00"] * 3, "0.00"] in rows
    assert ["3", "others", *["33.33"] * 3, "66.67"] in rows


def test_reliability(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_text("a b c ||| x y z\na b ||| x y\n")
    Path("gold").write_text("0-0 1p1 2-1\n0-0\n")
    assert run(["align", "in", "--gold", "gold", "--reliability", "plot.svg"]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    found = calque.align_file("in", gold="gold").reliability
    assert found is not None
    # 1-1 of the first pair is only possible: of the others, 0-0 is right twice, 2-2 and 1-1 not.
    assert found.n_items.sum() == 4 and (found.right * found.n_items).sum() == 2
    (score,) = found.probability[found.n_items > 0]  # the toy has one for all links of a block
    assert found.error == pytest.approx(abs(score - 0.5))
    assert [*rows_with(rows, "4"), f"{100 * score:.1f}", "50.0"] in rows
    assert b"<svg" in Path("plot.svg").read_bytes()


def rows_with(rows: list[list[str]], count: str) -> list[str]:
    """Return the first two cells of the row with this number of links."""
    return next(row[:2] for row in rows if row[1:2] == [count])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--reliability", "x.gif"], "plots cannot be written as '.gif'"),
        (["--reliability", "x.png", "--sweep"], "pass --gold, and drop --sweep"),
        (["--reliability", "x.png", "--aligner", "eflomal"], "links of eflomal have no scores"),
        (["--aligner", "eflomal", "--threshold", "0"], "--threshold cannot be used here"),
        (["--sweep", "--threshold", "0.5"], "drop --threshold"),
        (["--dev-every", "5"], "--dev-every works with --sweep only"),
        (["--store"], "--store works with --sweep only"),
        (["--sweep", "--store"], "--store changes the config.json of a model folder"),
        (["--sweep", "--dev-every", "2"], "1 are for development and none for the test"),
        (["--unit", "letters"], "--unit letters does not exist"),
        (["--similarity", "l2"], "--similarity l2 does not exist"),
        (["--scale-first", "none"], "--scale-first none does not exist"),
        (["--aligner", "eflomal", "--sharpness", "9"], "--sharpness cannot be used here"),
        (["--aligner", "hybrid", "--unit", "subwords"], "--unit cannot be used here"),
    ],
)
def test_errors_of_sweeps_and_settings(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in").write_text("a b c ||| x y z\n")
    Path("gold").write_text("0-0 1-1 2-2\n")
    fails(["in", "--gold", "gold", *arguments], problem, capsys)


# Killed and resumed


def many_lines(n_lines: int) -> bytes:
    chance = random.Random(7)
    lines = ["a ||| b"]
    for number in range(1, n_lines):
        sides = [" ".join([f"w{number}"] * chance.randint(0, 12)) for _ in "ab"]
        lines.append(" ||| ".join(sides) if number % 50 else "a bad line")
    return "".join(line + "\n" for line in lines).encode()


def start(arguments: list[str], **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(TOY), "align", *arguments]
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Where the tests run in the background, Ctrl-C is ignored, and would be here too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a file has something in it, or the process has ended."""
    while process.poll() is None and not (
        Path(condition).exists() and Path(condition).stat().st_size
    ):
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("out", ["out", "out.gz"])
def test_killed_at_random_and_resumed(out: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_bytes(many_lines(600))
    arguments = ["in", "--scores", "--skip-bad", "bad", "-o"]
    assert run(["align", *arguments, f"whole{Path(out).suffix}"]) == 0
    wanted = capsys.readouterr().err.partition(": ")[2].partition(";")[0]
    listed = Path("bad").read_bytes()
    Path("bad").unlink()
    chance, n_kills = random.Random(out), 0
    while True:
        process = start([*arguments, out, "--resume"], TOY_DELAY="0.02")
        # The last kill comes when something has been done, however slow the machine is.
        begun = "part-0.journal" if n_kills == 5 else "settings.json"
        wait_for(f"{out}.partial/{begun}", process)
        if n_kills < 6:
            time.sleep(chance.random() * 0.4)
            process.send_signal(signal.SIGKILL)
            n_kills += 1
        _, said = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, said
        assert not Path(out).exists()
        assert not Path("bad").exists()
    assert n_kills == 6
    assert Path(out).read_bytes() == Path(f"whole{Path(out).suffix}").read_bytes()
    assert Path("bad").read_bytes() == listed
    # The counts are those of the whole, with a word on what had been done before.
    counts = said.decode().partition(": ")[2].partition(";")[0]
    pairs, _, rest = counts.partition(" (")
    assert rest.partition(" of them before)")[0].isdigit()
    assert pairs + rest.partition(")")[2] == wanted
    assert not {name for name in names() if "partial" in name and not name.startswith(".calque")}


def interrupt(arguments: list[str], number: signal.Signals) -> bytes:
    """Stop a slow run after its first block."""
    process = start(arguments, TOY_DELAY="0.2")
    wait_for(f"{arguments[arguments.index('-o') + 1]}.partial/part-0.journal", process)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode != 0
    return said


@pytest.mark.slow
def test_ctrl_c_keeps_finished_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    Path("in").write_bytes(b"a ||| b\n" * 100)
    said = interrupt(["in", "-o", "out"], signal.SIGINT).decode()
    kept = f"the finished work is kept in {Path('out.partial').absolute()}: continue with --resume"
    assert said.endswith(f"calque: interrupted; {kept}\n")
    fails(["in", "-o", "out"], "out.partial: this folder holds an unfinished run", capsys)
    fails(["in", "-o", "out", "--resume", "--scores"], "started with scores off, not on", capsys)
    fails(["in", "-o", "out", "--resume", "--layer", "2"], "started with layer 1, not 2", capsys)
    Path("in").write_bytes(b"a ||| c\n" * 100)
    fails(["in", "-o", "out", "--resume"], "the input has changed", capsys)
    Path("in").write_bytes(b"a ||| b\n" * 99)
    fails(["in", "-o", "out", "--resume"], "started with input_size 800, not 792", capsys)
    Path("in").write_bytes(b"a ||| b\n" * 100)
    assert run(["align", "in", "-o", "out", "--resume"]) == 0
    assert Path("out").read_text() == "0-0\n" * 100
    assert "of them before)" in capsys.readouterr().err
    assert names() == {"in", "out"}


# Several processes


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def launch(fork_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Run `calque align` in two processes, in forks; torchrun would import everything again."""

    def call(
        *arguments: str, program: Path = TOY, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        output = tmp_path_factory.mktemp("printed") / "two"
        options = {"output": output, "environment": environment}
        return fork_server.run(program, "align", *arguments, **options)  # type: ignore[no-any-return]

    return call


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    return subprocess.run(
        [*launcher, "--master_port", str(port), str(TOY), "align", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("out", "by_torchrun"), [("out", True), ("out.zst", False)])
def test_two_processes_write_what_one_would(
    out: str, by_torchrun: bool, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in").write_bytes(many_lines(200))
    arguments = ["in", "--scores", "--skip-bad", "bad", "-o"]
    assert run(["align", *arguments, f"one{Path(out).suffix}"]) == 0
    wanted = capsys.readouterr().err.partition(": ")[2].partition(";")[0]
    listed = Path("bad").read_bytes()
    done = (torchrun if by_torchrun else launch)(*arguments, out)
    assert done.returncode == 0, done.stderr
    assert Path(out).read_bytes() == Path(f"one{Path(out).suffix}").read_bytes()
    assert Path("bad").read_bytes() == listed
    assert done.stderr.count(f"{out}: {wanted}; ") == 1, done.stderr
    assert names() == {"in", out, f"one{Path(out).suffix}", "bad"}


@pytest.mark.slow
def test_two_processes_resume_after_a_failure(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("in").write_bytes(b"a b ||| c d\n" * 100)
    assert run(["align", "in", "--scores", "-o", "one"]) == 0
    stopped = launch("in", "--scores", "-o", "out", TOY_STOP_RANK="1", TOY_STOP_BLOCK="3")
    assert stopped.returncode != 0
    assert (Path("out.partial") / "part-1.journal").read_bytes().count(b"\n") == 3
    capsys.readouterr()
    fails(["in", "--scores", "-o", "out", "--resume"], "started with processes 2, not 1", capsys)
    done = launch("in", "--scores", "-o", "out", "--resume")
    assert done.returncode == 0, done.stderr
    assert Path("out").read_bytes() == Path("one").read_bytes()
    assert names() == {"in", "one", "out"}


@pytest.mark.slow
def test_two_processes_report_an_error_once(launch: Launch) -> None:
    Path("in").write_bytes(b"a ||| b\n\xff ||| b\n")
    for arguments, problem in (
        (["in", "-o", "out"], "in, line 2: invalid UTF-8"),
        (["in"], "several processes need input files and an output file"),
    ):
        done = launch(*arguments)
        assert done.returncode != 0
        assert done.stderr.count(problem) == 1, done.stderr
        assert "Traceback" not in done.stderr
    assert names() == {"in"}


# With a model


@pytest.mark.slow
def test_a_real_encoder_alone_and_in_two_processes(
    tiny_folder: Path,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from calque.word_alignment.neural import WordAligner

    monkeypatch.setattr(build, "build_aligner", REAL_BUILD)
    monkeypatch.setattr(build, "build_sweep", REAL_SWEEP)
    pairs = (GOLD / "en-fr.text").read_text().splitlines()
    aligner = WordAligner(calque.load(tiny_folder, "cpu"), method="argmax", layer=2)
    words = [tuple(side.split() for side in pair.split("|||")) for pair in pairs]
    want = aligner.align(words)  # type: ignore[arg-type]
    # More lines than a block has pairs, so that both processes have something to do.
    n_times = build.BLOCK_PAIRS["cpu"] // len(pairs) + 10
    Path("in").write_text("".join(pair + "\n" for pair in pairs) * n_times)
    arguments = ["in", "--model", str(tiny_folder), "--device", "cpu"]
    arguments += ["--method", "argmax", "--layer", "2", "-o"]
    assert run(["align", *arguments, "one"]) == 0
    assert read_links("one").to_lists() == want * n_times
    done = launch(*arguments, "two", program=Path(calque.__file__).with_name("__main__.py"))
    assert done.returncode == 0, done.stderr
    assert Path("two").read_bytes() == Path("one").read_bytes()
    gold = ["--gold", str(GOLD / "en-fr.gold"), "--sweep"]
    capsys.readouterr()
    assert run(["align", str(GOLD / "en-fr.text"), *arguments[1:5], *gold]) == 0
    rows = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    by_layer = [row for row in rows if len(row) == 9 and row[0].isdigit() and "chose" not in row]
    assert [row[0] for row in by_layer] == list("01234")


# Aligners that are trained on the text


@pytest.fixture
def texts(demo_rows: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("systran_align")
    monkeypatch.setattr(build, "build_aligner", REAL_BUILD)
    lines = [f"{row[2]}\t{row[1]}\n" for row in demo_rows if row[0] == "de"]
    Path("test.tsv").write_text("".join(lines[:5]), encoding="utf-8")
    Path("more.tsv").write_text("".join(lines[5:] * 5), encoding="utf-8")


def test_trained_saved_and_loaded(texts: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["align", "test.tsv", "--aligner", "fast-align", "--tokenize", "de-en"]
    assert run([*command, "--bitext", "more.tsv", "--save", "m", "-o", "trained"]) == 0
    printed = capsys.readouterr().err
    assert "m: statistical model trained on 105 pairs" in printed
    assert "trained: 5 pairs" in printed
    assert run([*command, "--load", "m", "-o", "loaded"]) == 0
    assert Path("loaded").read_text() == Path("trained").read_text()
    assert len(Path("loaded").read_text().splitlines()) == 5


@pytest.mark.slow
def test_an_adapted_encoder(
    texts: None,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "choose_library", lambda: "fast-align")
    command = ["align", "test.tsv", "--model", str(tiny_folder), "--device", "cpu"]
    command += ["--adapt", "--adapt-steps", "2", "--bitext", "more.tsv", "--save-model", "new"]
    assert run([*command, "-o", "links"]) == 0
    assert len(Path("links").read_text().splitlines()) == 5
    assert Path("new/run/model/config.json").exists()
    assert "new/run/model: adapted model" in capsys.readouterr().err
    # Another run does not replace the files of this one.
    before = Path("new/linked.tsv").read_bytes()
    fails([*command[1:], "-o", "others"], "new: the folder of the adapted model is not", capsys)
    assert Path("new/linked.tsv").read_bytes() == before


def test_symmetrization_of_a_saved_model(texts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("eflomal")
    command = ["align", "test.tsv", "--aligner", "eflomal", "--tokenize", "de-en"]
    assert run([*command, "--bitext", "more.tsv", "--save", "m", "-o", "trained"]) == 0
    counts = {}
    for name in ("union", "intersection"):
        assert run([*command, "--load", "m", "--symmetrize", name, "-o", name]) == 0
        counts[name] = len(Path(name).read_text().split())
    assert counts["union"] > counts["intersection"]


def test_models_that_cannot_be_saved_are_reported_before_the_training(
    texts: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(build, "_get_statistical")
    Path("own").write_text("precious")
    command = ["test.tsv", "--aligner", "fast-align", "--tokenize", "de-en", "--save", "own"]
    fails(command, "own: the path exists and is not a model of this kind", capsys)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["-", "--aligner", "fast-align"], "a pipe can be read only once"),
        (["test.tsv", "--aligner", "fast-align", "-o", "x", "--resume"], "training again would"),
        (["test.tsv", "--bitext", "absent.tsv"], "absent.tsv: no such file"),
        (["test.tsv", "--load", "absent"], "absent"),
        (["test.tsv", "--reverse-bitext"], "--reverse-bitext needs --bitext"),
        (["test.tsv", "--tokenize-bitext", "de-en"], "--tokenize-bitext needs --bitext"),
        (["test.tsv", "--aligner", "hybrid", "--sweep", "--gold", "test.tsv"], "--sweep"),
    ],
)
def test_errors_of_trained_aligners(
    texts: None, options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(options, problem, capsys)
