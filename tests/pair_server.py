"""Starts groups of two processes, like torchrun, by forking a process that has all imports.

Imports take five seconds per process, training a tiny model one. torchrun itself is tested in
tests/training/test_loop.py, tests/end_to_end/test_recipes.py and tests/cli/test_align.py.
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
from pathlib import Path
from typing import Any, NoReturn

N_PROCESSES = 2
MODULES = (
    "accelerate",
    "calque.cli",
    "calque.cli.training_commands",
    "calque.training.loop",
    "torch.distributed.fsdp",
    "transformers.models.deberta_v2.modeling_deberta_v2",
    "transformers.models.encoder_decoder.modeling_encoder_decoder",
    "transformers.models.xlm_roberta.modeling_xlm_roberta",
)


class PairServer:
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
        self, script: Path, *arguments: object, beside: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in two processes and return their output, one after the other.

        With `beside`, the script can import the modules in the folder of that file.
        """
        paths = [str(beside.parent), *filter(None, sys.path)] if beside else []
        job = {"script": str(script), "arguments": [*map(str, arguments)], "paths": paths}
        job["folder"] = os.getcwd()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        output = [
            "".join(Path(f"{script}.{rank}.{name}").read_text() for rank in range(N_PROCESSES))
            for name in ("out", "err")
        ]
        worst = next((code for code in codes if code), 0)
        return subprocess.CompletedProcess([str(script)], worst, *output)

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.communicate()


def serve() -> None:
    """Import the modules, then run a pair of processes for every line of standard input."""
    for name in MODULES:
        importlib.import_module(name)
    n_threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert n_threads == 1, "threads do not survive a fork"
    for line in sys.stdin:
        print(json.dumps(run_pair(json.loads(line))), flush=True)


def run_pair(job: dict[str, Any]) -> list[int]:
    """Fork two processes and return their exit codes; if one fails, the other is terminated."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: dict[int, int] = {}
    for rank in range(N_PROCESSES):
        process = os.fork()
        if not process:
            work(job, rank, port)
        ranks[process] = rank
    codes = [0] * N_PROCESSES
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        codes[rank] = os.waitstatus_to_exitcode(status)
        if codes[rank]:
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    return codes


def work(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    """Run the script as one of the two processes and exit."""
    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(f"{job['script']}.{rank}.{name}", flags), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        values = (rank, rank, N_PROCESSES, N_PROCESSES)
        os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
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
