"""Stop signals: every command ends within seconds, and says what was saved.

The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt in the main thread, where commands save
what they can. The main thread may not get there, for example while it waits for a compiler. So a
thread ends the process after `STOP_SECONDS`, or as soon as a second signal arrives.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import warnings
from types import FrameType

from calque.io.processes import STOP_SIGNALS, kill_descendants

STOP_SECONDS = "CALQUE_STOP_SECONDS"
DEFAULT_STOP_SECONDS = 8.0


class StopSignals:
    """The stop signals that this process received.

    Attributes:
        received: The first signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.kinds: list[signal.Signals] = []

    def handle(self) -> None:
        """Handle stop signals from now on, except those that the caller ignores (as nohup does)."""
        kinds = [kind for kind in STOP_SIGNALS if signal.getsignal(kind) is not signal.SIG_IGN]
        self.kinds = kinds
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The number of a signal is written to this pipe even while the main thread is busy.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for kind in kinds:
            signal.signal(kind, self._interrupt)
        threading.Thread(target=_watch, args=(reader, set(kinds)), daemon=True).start()

    def release(self) -> None:
        """Let signals end the process from now on: there is nothing to save any more."""
        for kind in self.kinds:
            signal.signal(kind, signal.SIG_DFL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            # What libraries report about an interruption, also in destructors, is no news.
            sys.unraisablehook = lambda _: None
            warnings.simplefilter("ignore")
            raise KeyboardInterrupt


def _watch(reader: int, kinds: set[signal.Signals]) -> None:
    """Wait for a stop signal, then for a second one or the deadline, and end the process."""
    process = os.getpid()
    first = _wait_for_signal(reader, kinds, None)
    assert first is not None
    second = _wait_for_signal(reader, kinds, stop_seconds())
    if os.getpid() == process:
        _end(first, "a second signal" if second else f"{stop_seconds():g} seconds")


def stop_seconds() -> float:
    """Return the time that a command has for saving its work after a signal."""
    try:
        return max(0.0, float(os.environ[STOP_SECONDS]))
    except (KeyError, ValueError):
        return DEFAULT_STOP_SECONDS


def _wait_for_signal(
    reader: int, kinds: set[signal.Signals], seconds: float | None
) -> signal.Signals | None:
    while select.select([reader], [], [], seconds)[0]:
        number = os.read(reader, 1)[0]
        if number in kinds:
            return signal.Signals(number)
    return None


def _end(kind: signal.Signals, reason: str) -> None:
    """End this process and its children at once; remove files that are not complete."""
    kill_descendants()
    files = sys.modules.get("calque.io.files")
    if files is not None:
        files.remove_unfinished()
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""  # a progress bar may have hidden it
    text = f"calque: stopped by {kind.name} after {reason}; work that was not saved is lost"
    os.write(2, f"{show_cursor}{text}\n".encode())
    os._exit(128 + kind)
