"""Runs scripts in forks of a process that has imported the libraries.

Imports take five seconds per process, training a tiny model one. A script runs either alone or in
several processes that know of each other, as with torchrun; torchrun itself is tested in
tests/training/test_loop.py and tests/cli/test_align.py.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    "accelerate",
    "calque.cli",
    "calque.cli.training_commands",
    "calque.training.loop",
    "matplotlib.pyplot",
    "sacrebleu",
    "torch.distributed.fsdp",
    "transformers.models.deberta_v2.modeling_deberta_v2",
    "transformers.models.encoder_decoder.modeling_encoder_decoder",
    "transformers.models.xlm_roberta.modeling_xlm_roberta",
)


class ForkServer:
    """The process that forks others; it ends when this object is closed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            text=True,
        )

    def run(
        self,
        script: Path,
        *arguments: object,
        beside: Path | None = None,
        n_processes: int = 2,
        output: Path | None = None,
        seconds: int = 600,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script and return what its processes print, one after the other.

        With `beside`, the script can import the modules in the folder of that file. The output is
        kept in files whose names start with `output` (default: the path of the script). Processes
        that take more than so many seconds are terminated. The variables of `environment` are set
        in addition to those that this process had when the object was made.
        """
        job = {
            "script": str(script),
            "arguments": [*map(str, arguments)],
            "paths": [str(beside.parent), *filter(None, sys.path)] if beside else [],
            "folder": os.getcwd(),
            "n_processes": n_processes,
            "output": str(output or script),
            "seconds": seconds,
            "environment": dict(environment or {}),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        printed = [
            "".join(
                Path(f"{job['output']}.{rank}.{name}").read_text() for rank in range(n_processes)
            )
            for name in ("out", "err")
        ]
        worst = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess([str(script)], worst, *printed)

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.communicate()


def serve() -> None:
    """Import the modules, then run a script for every line of standard input."""
    for name in MODULES:
        importlib.import_module(name)
    n_threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert n_threads == 1, "threads do not survive a fork"
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)


def run_job(job: dict[str, Any]) -> list[int]:
    """Fork the processes and return their exit codes; if one fails, the others are terminated."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: dict[int, int] = {}
    for rank in range(job["n_processes"]):
        process = os.fork()
        if not process:
            work(job, rank, port)
        ranks[process] = rank
    codes = [0] * job["n_processes"]
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        codes[rank] = os.waitstatus_to_exitcode(status)
        if codes[rank]:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return codes


def work(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Run the script as one of the processes and exit."""
    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(f"{job['output']}.{rank}.{name}", flags), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.alarm(job["seconds"])
        if (n_processes := job["n_processes"]) > 1:
            names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            values = map(str, (rank, rank, n_processes, n_processes))
            os.environ.update(zip(names, values, strict=True))
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        sys.path[:0] = job["paths"]
        sys.argv = [job["script"], *job["arguments"]]
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the loop of the parent must never continue here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
