"""Worker processes: they ignore stop signals and end with the main process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.processes import has_ended, is_running

from calque.io.processes import (
    STOP_SIGNALS,
    block_stop_signals,
    run_in_thread,
)

PROGRAM = """
import multiprocessing, os, time
from calque.io.processes import start_worker

def work(connection):
    start_worker()
    connection.send(os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    receiver, sender = multiprocessing.Pipe()
    worker = multiprocessing.get_context("{method}").Process(target=work, args=(sender,))
    worker.start()
    print(receiver.recv(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_outlives_signals_but_not_its_parent(tmp_path: Path, method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(method=method))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        for kind in STOP_SIGNALS:
            os.kill(worker, kind)
        time.sleep(0.1)
        assert is_running(worker)
        process.kill()
    assert has_ended(worker)


def test_a_process_is_not_disturbed_while_it_starts() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with block_stop_signals():
        child = subprocess.Popen(["sleep", "60"])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    with child:
        for kind in STOP_SIGNALS:
            child.send_signal(kind)
        time.sleep(0.1)
        assert is_running(child.pid)
        child.kill()


def test_kill_descendants_includes_grandchildren() -> None:
    """In a process of its own, because this one has other children, such as the fork server."""
    program = """
import subprocess
from calque.io.processes import kill_descendants

command = ["sh", "-c", "sleep 60 & echo $!; wait"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
    grandchild = child.stdout.readline().strip()
    kill_descendants()
print(child.returncode, grandchild)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    code, grandchild = map(int, done.stdout.split())
    assert code == -signal.SIGKILL
    assert has_ended(grandchild)


def test_a_thread_returns_its_result_or_its_error() -> None:
    assert run_in_thread(lambda: threading.current_thread()) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        run_in_thread(lambda: 1 // 0)


def test_waiting_for_a_thread_can_be_interrupted() -> None:
    """A library may not return to Python for minutes."""
    is_over = threading.Event()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait(60)

    with pytest.raises(KeyboardInterrupt):
        run_in_thread(work)
    is_over.set()
