"""Signals to the process group while a step is compiled, on a GPU or, with a compiler, on a CPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path

import pytest
import torch

from calque.io.processes import STOP_SIGNALS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and shutil.which("g++") is None,
        reason="no CUDA device and no C++ compiler",
    ),
]

START_SECONDS = 180
SECONDS = 10  # for a stop
COMPILING, COMPILED = "compiling the step", "the first step took"
SETTINGS = (
    "model.start=calque-mini",
    "data.sources=[{path: en-de.tsv, kind: bitext}]",
    "objectives.0.batch_tokens=4096",
    "objectives.1.batch_tokens=4096",
    "engine.compile=true",
    "schedule.steps=1000",
    "schedule.warmup=10",
)


def write_bitext(folder: Path) -> None:
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines()[1:]]
    lines = [f"{english}\t{sentence}\n" for _, english, sentence in rows]
    (folder / "en-de.tsv").write_text("".join(lines), "utf-8")


def find_processes(mark: str) -> dict[int, str]:
    """Return the processes that have inherited an environment with this mark, and their names."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has just ended, or it belongs to someone else
            if mark.encode() in path.read_bytes():
                command = path.with_name("cmdline").read_text().replace("\0", " ")
                found[int(path.parent.name)] = command
    return found


def wait_for(is_so: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not (holds := is_so()) and time.monotonic() < end:
        time.sleep(0.1)
    return holds


@pytest.mark.parametrize("delay", [0.5, 4.0, 12.0])
@pytest.mark.parametrize("kind", STOP_SIGNALS)
def test_a_signal_while_a_step_is_compiled_ends_the_run(
    kind: signal.Signals, delay: float, tmp_path: Path
) -> None:
    write_bitext(tmp_path)
    mark = f"CALQUE_TEST_MARK={tmp_path}-{kind}-{delay}"
    # A fresh cache, since a step that is in the cache is not compiled.
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    caches = {name: str(tmp_path / name) for name in names}
    options = [text for setting in SETTINGS for text in ("--set", setting)]
    log = tmp_path / "stderr.txt"  # not a pipe: nothing is lost, whatever ends the process
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "calque", "train", "xlm-align", "-o", "run", *options],
            cwd=tmp_path,
            env=os.environ | caches | dict([mark.split("=", 1)]),
            stderr=stream,
            start_new_session=True,
        )

    def has_ended() -> bool:
        return process.poll() is not None

    try:
        wait_for(lambda: COMPILING in log.read_text("utf-8") or has_ended(), START_SECONDS)
        assert COMPILING in log.read_text("utf-8") and not has_ended(), log.read_text("utf-8")
        time.sleep(delay)
        os.killpg(process.pid, kind)
        stopped = wait_for(has_ended, SECONDS)
        left = [] if wait_for(lambda: not find_processes(mark), 3) else find_processes(mark)
    finally:
        for other in find_processes(mark):
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        process.wait()
    text = log.read_text("utf-8")
    assert stopped, f"not ended after {SECONDS} seconds:\n{text}"
    assert process.returncode == 128 + kind, text
    if COMPILED in text:
        pytest.skip("the step was compiled before the signal")
    assert text.splitlines()[-1].startswith(("calque: interrupted", "calque: stopped by")), text
    assert "Traceback" not in text and "semaphore" not in text, text
    assert not left, f"{left}:\n{text}"
    assert not list((tmp_path / "run").glob(".*")), text
