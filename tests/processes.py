"""Whether a process runs, for tests that stop processes."""

from __future__ import annotations

import time
from pathlib import Path


def is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the process may end between open and read
        return False


def has_ended(process: int) -> bool:
    """Return whether a process ends within ten seconds: a killed one may run for a moment."""
    deadline = time.monotonic() + 10
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(process)
