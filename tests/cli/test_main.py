"""What every command shares: help, exit codes, errors of one line, quiet pipes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from calque.cli import app, run
from calque.errors import InputError


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in app.COMMANDS)
    assert "..." not in shown.partition("Commands:")[2]  # a sentence cut off
    for name in app.COMMANDS:
        assert run([name, "--help"]) == 0


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"numpy", "rich", "torch", "transformers"}),
        (["clean", os.devnull, "-o", "out.tsv"], {"torch", "transformers"}),
    ],
)
def test_light_commands_import_nothing_heavy(
    arguments: list[str], heavy: set[str], tmp_path: Path
) -> None:
    code = f"import sys; from calque.cli import run; run({arguments}); print(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "calque.cli.app" in done.stdout
    assert heavy.isdisjoint(done.stdout.splitlines()[-1].split())


def test_only_the_command_of_the_arguments_is_built() -> None:
    def build(*arguments: str) -> set[str]:
        return {command.name or "" for command in app.build_app(arguments).registered_commands}

    assert build("embed", "train") == {"embed"}
    assert build() == build("--help") == build("nope") == app.COMMANDS.keys()


def test_help_takes_little_time() -> None:
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "calque", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3


def test_only_warnings_of_calque_are_one_line() -> None:
    code = """
import warnings
from calque import cli

class Odd(UserWarning):
    __module__ = "calque.models.loading"

def warn():
    warnings.warn("model: has no head", Odd)
    warnings.warn("old", FutureWarning)
    return 3

cli.run = warn
cli.main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    ours, *others = done.stderr.splitlines()
    assert ours == "calque: warning: model: has no head"
    assert others[0].endswith(": FutureWarning: old")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("calque 0.")


@pytest.mark.parametrize("arguments", [["nope"], ["embed"], ["embed", "--nope"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert "Error:" in capsys.readouterr().err


NO_MEMORY = (
    "error: there is not enough memory (use smaller batches, a smaller model or a shorter input)"
)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            InputError("bad", file="a.txt", line=3, fix="mend it"),
            2,
            "error: a.txt, line 3: bad (mend it)",
        ),
        (KeyboardInterrupt(), 130, "interrupted; unfinished work was discarded"),
        (
            FileNotFoundError(2, "No such file or directory", "x\n.json"),
            2,
            "error: x\\n.json: no such file or directory (check the path)",
        ),
        (MemoryError(), 2, NO_MEMORY),
        (RuntimeError("[enforce fail] can't allocate memory: you tried"), 2, NO_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 2, NO_MEMORY),
    ],
)
def test_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setitem(app.COMMANDS, "models", fail)
    assert run(["models"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"calque: {line}\n"
    assert captured.out == ""


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(app.COMMANDS, "models", fail)
    with pytest.raises(ZeroDivisionError):
        run(["models"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is full")
def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "calque", "data"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    place = b"standard output or a temporary file"
    problem = b"no space left on device (free some space or choose another output)"
    assert (done.returncode, done.stderr) == (
        2,
        b"calque: error: " + place + b": " + problem + b"\n",
    )


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("clean - -o out.tsv <&-", 2, "standard input: bad file descriptor"),
        ("data >&-", 2, "standard output or a temporary file: bad file descriptor"),
        ("clean ü.tsv -o out.tsv <&- >&- 2>&-", 0, ""),
    ],
)
def test_closed_standard_streams(tmp_path: Path, command: str, code: int, said: str) -> None:
    (tmp_path / "ü.tsv").write_text("one line\teine Zeile\n")
    done = subprocess.run(
        f"{sys.executable} -m calque {command}",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert said in done.stderr and bool(said) == bool(done.stderr)
    assert "Traceback" not in done.stderr
    if code == 0:
        assert (tmp_path / "out.tsv").read_text() == "one line\teine Zeile\n"


@pytest.mark.parametrize(
    ("encoding", "name"), [("ascii", b"\\xfc\\u732b"), ("latin-1", b"\xfc\\u732b")]
)
def test_terminals_without_unicode(tmp_path: Path, encoding: str, name: bytes) -> None:
    (tmp_path / "ü猫").write_text("one line\teine Zeile\n")
    env = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "calque", "clean", "ü猫", "-o", "ü猫"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=env, check=False)
    assert done.stderr.startswith(b"calque: error: " + name + b": the file is both input and out")


def test_python_without_docstrings_is_refused() -> None:
    command = [sys.executable, "-OO", "-m", "calque", "models"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "calque: error: python -OO removes docstrings, without which transformers does not work "
        "(use python or python -O)\n"
    )


def test_a_closed_pipe_is_quiet() -> None:
    command = [sys.executable, "-m", "calque", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_exit_codes_reach_the_shell() -> None:
    command = [sys.executable, "-m", "calque", "clean", "nothing.tsv", "-o", "out.tsv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "calque: error: nothing.tsv: no such file or directory (check the path)\n"
    )
