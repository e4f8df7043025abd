"""Signals to the process group while a step is compiled, on a GPU or, with a compiler, on a CPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
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

SECONDS = 10  # for a stop
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


def find_processes(mark: str) -> list[int]:
    """Return the processes that have inherited an environment with this mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if mark.encode() in content:
            found.append(int(path.parent.name))
    return found


def wait_until_gone(mark: str, seconds: float) -> list[int]:
    """Return the processes that are still there after so many seconds."""
    end = time.monotonic() + seconds
    while (left := find_processes(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


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
    with subprocess.Popen(
        [sys.executable, "-m", "calque", "train", "xlm-align", "-o", "run", *options],
        cwd=tmp_path,
        env=os.environ | caches | dict([mark.split("=", 1)]),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        lines = list[str]()
        while not lines or "compiling the step" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        time.sleep(delay)
        started = time.monotonic()
        os.killpg(process.pid, kind)
        try:
            rest = process.communicate(timeout=SECONDS)[1]
        finally:
            for other in find_processes(mark) if process.poll() is None else ():
                os.kill(other, signal.SIGKILL)
        assert time.monotonic() - started < SECONDS
    assert process.returncode == 128 + kind
    if "the first step took" in rest:
        pytest.skip("the step was compiled before the signal")
    assert rest.splitlines()[-1].startswith(("calque: interrupted", "calque: stopped by")), rest
    assert "Traceback" not in rest
    assert "semaphore" not in rest
    assert wait_until_gone(mark, 3) == []
    assert not list((tmp_path / "run").glob(".*"))
