"""Stop signals, sent to the whole process group as terminals and job schedulers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.processes import has_ended

from calque.cli.signals import DEFAULT_STOP_SECONDS, STOP_SECONDS, stop_seconds
from calque.io.processes import STOP_SIGNALS

# The command prints a line when it runs; it is given as the body of a function.
PROGRAM = """
import subprocess, sys, time
from calque.cli import app, main
from calque.io.files import write_atomically

def models():
    child = subprocess.Popen(["sleep", "60"])

    def sleep():
        print(child.pid, flush=True)
        time.sleep(60)

    {body}

app.COMMANDS["models"] = models
sys.argv = ["calque", "models"]
main()
"""
SLEEP = "sleep()"
NOTE = """
    try:
        sleep()
    except KeyboardInterrupt as stop:
        stop.add_note("two blocks are kept")
        raise
"""
# A library may swallow the exception; the file is not complete.
DEAF = """
    with write_atomically("out.txt") as stream:
        stream.write("half")
        stream.flush()
        while True:
            try:
                sleep()
            except KeyboardInterrupt:
                pass
"""
# Python waits for its workers at exit, and these ignore signals.
WORKER = """
    import multiprocessing
    from calque.io.processes import start_worker

    def work(ready):
        start_worker()
        ready.set()
        time.sleep(60)

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=work, args=(ready,), daemon=True)
    worker.start()
    ready.wait()
    sleep()
"""
DISCARDED = "calque: interrupted; unfinished work was discarded\n"


def start(folder: Path, body: str, seconds: float = 30) -> tuple[subprocess.Popen[str], int]:
    """Start a command and wait until it runs; return its process and that of its child."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, STOP_SECONDS: str(seconds)},
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize(
    ("body", "line"),
    [(SLEEP, DISCARDED), (WORKER, DISCARDED), (NOTE, "calque: interrupted; two blocks are kept\n")],
    ids=["sleep", "worker", "note"],
)
@pytest.mark.parametrize("kind", STOP_SIGNALS, ids=lambda kind: str(kind.name))
def test_a_signal_interrupts_the_command(
    tmp_path: Path, kind: signal.Signals, body: str, line: str
) -> None:
    process, _ = start(tmp_path, body)
    os.killpg(process.pid, kind)
    assert process.communicate(timeout=20)[1] == line
    assert process.returncode == 128 + kind


@pytest.mark.parametrize("is_second", [False, True])
def test_a_command_that_does_not_stop_is_ended(tmp_path: Path, is_second: bool) -> None:
    process, child = start(tmp_path, DEAF, 60 if is_second else 0.5)
    os.kill(process.pid, signal.SIGTERM)  # not to the child
    if is_second:
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
    reason = "a second signal" if is_second else "0.5 seconds"
    assert process.communicate(timeout=20)[1] == (
        f"calque: stopped by SIGTERM after {reason}; work that was not saved is lost\n"
    )
    assert process.returncode == 128 + signal.SIGTERM
    assert has_ended(child)
    assert list(tmp_path.iterdir()) == []


def test_signals_that_the_caller_ignores_stay_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process, _ = start(tmp_path, SLEEP)
    finally:
        signal.signal(signal.SIGHUP, before)
    os.kill(process.pid, signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30.0), ("soon", DEFAULT_STOP_SECONDS), ("-1", 0.0)]
)
def test_stop_seconds(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(STOP_SECONDS, text)
    assert stop_seconds() == seconds


def test_a_signal_after_the_work_prints_nothing(tmp_path: Path) -> None:
    process, _ = start(tmp_path, "import atexit; atexit.register(sleep)")
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=20) == -signal.SIGTERM
    os.killpg(process.pid, signal.SIGKILL)  # its child, which has the same standard error
    assert process.communicate(timeout=20)[1] == ""
