"""Child processes: they end with the main process, which alone handles signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

ResultT = TypeVar("ResultT")

# Ctrl-C; `kill`, `timeout` and job schedulers; a terminal that was closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block stop signals in this thread, and in processes that are started in the block.

    A worker process is not disturbed then while it imports modules, before `start_worker`.
    """
    from multiprocessing import resource_tracker

    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # it must outlive a signal, too; it unblocks some signals
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run a function of a library in a thread and return its result.

    Python handles no signal while the main thread is inside a library, but it does while the main
    thread waits. After an interruption, the thread ends with the process.
    """
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again in the main thread)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()


def start_worker() -> None:
    """Set up a worker process: it ignores stop signals, and ends when its parent has ended.

    A signal reaches every process of a group. The main process decides what is still computed, and
    it ends its workers with SIGKILL or by closing what they read from.
    """
    for kind in STOP_SIGNALS:
        signal.signal(kind, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def end_workers() -> None:
    """Kill worker processes that an error or a signal has left.

    At its end, Python would send them SIGTERM, which they ignore, and wait for them.
    """
    module = sys.modules.get("multiprocessing")
    for child in module.active_children() if module is not None else ():
        child.kill()


def kill_descendants() -> None:
    """Kill all child processes of this process and their children, as far as /proc lists them.

    Python's resource tracker is left: it ends by itself, and removes semaphores and shared memory.
    """
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(getattr(module, "_resource_tracker", None), "_pid", None)
    for child in set(_find_descendants(os.getpid())) - {tracker}:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)


def _find_descendants(process: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            children = [int(child) for child in path.read_text().split()]
            found += [each for child in children for each in (child, *_find_descendants(child))]
    return found
