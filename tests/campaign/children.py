"""Runs `calque` in forks of this process, which has imported the libraries.

An import of torch takes three seconds, a run on tiny inputs a tenth of one. A child behaves as a
process of its own: it leads a session, works in its own folder and has its output in files there.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NoReturn

MODULES = (
    "accelerate",
    "calque.cli.app",
    "calque.cli.evaluation_commands",
    "calque.evaluation.dataset_check",
    "calque.evaluation.evaluate",
    "calque.evaluation.tasks.classification",
    "calque.evaluation.tasks.question_answering",
    "calque.growth.grow",
    "calque.report.compare",
    "calque.report.plots",
    "calque.sentences.language_neutral",
    "calque.sentences.mine",
    "calque.tokens.prepare",
    "calque.training.closed_form",
    "calque.training.loop",
    "calque.training.sources",
    "calque.translation.translate",
    "calque.vectors.extract",
    "calque.vectors.lexicon",
    "calque.vectors.mapping",
    "calque.word_alignment.file_job",
    "calque.word_alignment.linked_bitext",
    "calque.word_alignment.neural",
    "matplotlib.backends.backend_svg",
    "rich.progress",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.encoder_decoder.modeling_encoder_decoder",
    "transformers.models.xlm_roberta.modeling_xlm_roberta",
)
# Small blocks, so that a run on a few hundred lines has many of them.
SMALL = {
    "calque.sentences.embed:BLOCK_SENTENCES": 16,
    "calque.sentences.mine:BLOCK_SENTENCES": 16,
    "calque.translation.translate:BLOCK_LINES": 4,
    "calque.vectors.extract:SECONDS_BETWEEN_SAVES": 0.0,
    "calque.vectors.x2static:BLOCK_SENTENCES": 32,
    "calque.word_alignment.build:BLOCK_PAIRS": {"cpu": 8, "cuda": 8},
    "calque.word_alignment.linked_bitext:BLOCK_PAIRS": 32,
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "COLUMNS": "200",
}
# A bug that asks for 100 GB should fail by itself instead of taking the machine down.
EXTRA_MEMORY = 6 << 30


def warm_up() -> None:
    """Import what the commands need, without starting threads, which do not survive a fork."""
    os.environ.update(ENVIRONMENT)
    for name in MODULES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    n_threads = len(os.listdir("/proc/self/task"))
    # A build of PyTorch for CUDA starts a thread of its own, which does nothing here.
    assert n_threads == 1 or torch.version.cuda, "threads do not survive a fork"
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, all memory


@dataclass
class Child:
    """A running `calque`; `code` is its exit code, negative for a signal, None while it runs."""

    pid: int
    arguments: Sequence[str]
    folder: Path
    name: str
    started: float = field(default_factory=time.monotonic)
    code: int | None = None
    ended: float = 0.0
    max_bytes: int = 0

    def ends_within(self, seconds: float) -> bool:
        """Wait until the process ends; return whether it takes no longer than so many seconds.

        On a machine with more to do than it has cores, it may take longer.
        """
        return self.wait(seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))

    def wait(self, seconds: float) -> bool:
        """Wait until the process ends, for so many seconds at most; return whether it ended."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.ended, self.max_bytes = time.monotonic(), usage.ru_maxrss * 1024
            elif time.monotonic() >= end:
                return False
            else:
                time.sleep(0.002)
        return True

    def send(self, number: signal.Signals, *, to_group: bool = True) -> None:
        """Send a signal to the process, or to it and all its descendants."""
        if self.code is None:
            (os.killpg if to_group else os.kill)(self.pid, number)

    def find_orphans(self, seconds: float = 3.0) -> list[str]:
        """Return processes of the session that are left after so many seconds, and end them."""
        end = time.monotonic() + seconds
        while (left := _list_session(self.pid)) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return [f"{pid} {name}" for pid, name in left.items()]

    def end(self) -> None:
        """End the process and all that it started."""
        self.send(signal.SIGKILL)
        self.wait(10)
        self.find_orphans(0)

    @property
    def stderr(self) -> str:
        """What the process wrote to standard error."""
        return (self.folder / f"{self.name}.err").read_bytes().decode("utf-8", "replace")

    @property
    def stdout(self) -> str:
        """What the process wrote to standard output."""
        return (self.folder / f"{self.name}.out").read_bytes().decode("utf-8", "replace")


def start(
    arguments: Sequence[str], folder: Path, *, prepare: Callable[[], object] = lambda: None
) -> Child:
    """Start `calque` with the folder as working directory; `prepare` is called in the child."""
    (folder / "tmp").mkdir(exist_ok=True)
    name = f"run-{len(list(folder.glob('run-*.err')))}"
    (folder / f"{name}.err").touch()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _work(arguments, folder, name, prepare)
    return Child(pid, arguments, folder, name)


def run(arguments: Sequence[str], folder: Path, *, seconds: float = 60.0) -> Child:
    """Run `calque` to its end, or end it after so many seconds."""
    child = start(arguments, folder)
    if not child.ends_within(seconds):
        child.end()
    return child


def patch(values: dict[str, object]) -> None:
    """Set attributes given as "module:name" or "module:Class.name"."""
    for place, value in values.items():
        owner, name = find_owner(place)
        setattr(owner, name, value)


def find_owner(place: str) -> tuple[object, str]:
    """Return the module or class of an attribute "module:Class.name", and the attribute's name."""
    module, _, path = place.partition(":")
    owner: object = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    assert hasattr(owner, name), f"{place} does not exist"
    return owner, name


def _work(
    arguments: Sequence[str], folder: Path, name: str, prepare: Callable[[], object]
) -> NoReturn:
    """Become a process of its own, run the command and exit."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        for number, suffix in ((1, "out"), (2, "err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(f"{name}.{suffix}", flags), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        _limit_memory()
        patch(SMALL)
        prepare()
        sys.argv = ["calque", *arguments]
        sys.modules["__main__"] = ModuleType("__main__")  # what spawned processes import
        from calque.cli import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what an interpreter does at its end
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        _exit(code)


def _exit(code: int) -> NoReturn:
    """End as an interpreter does: threads, exit handlers, buffers."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _list_session(session: int) -> dict[int, str]:
    """Return the living processes of a session and their names."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            except OSError:
                continue
            match = re.fullmatch(r"\d+ \((.*)\) (\w) \d+ \d+ (\d+) .*\n", text, re.DOTALL)
            if match and int(match[3]) == session and match[2] not in "ZX":
                found[int(entry)] = match[1]
    return found
