"""The command line: parses arguments, calls the public API and prints results."""

from __future__ import annotations

import atexit
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress

from calque.errors import FIXES, InputError, explain_os_error

# PyTorch's errors for the CPU and for GPUs.
OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory")


def main() -> None:
    """Run `calque` and exit: 2 for bad input, 128 + N when stopped by signal N."""
    from calque.cli.signals import StopSignals
    from calque.io.processes import end_workers

    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that ASCII or Latin-1 cannot show
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _format_warning
    # At a forced end, Python's resource tracker frees semaphores; that is no news to users.
    sys.warnoptions.append("ignore:resource_tracker")
    signals = StopSignals()
    signals.handle()
    try:
        code = run()
        if signals.received is None:
            signals.release()
    except KeyboardInterrupt:  # outside of a command, for example while modules are imported
        print("calque: interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    end_workers()
    if signals.received is not None:
        _end_at_once(128 + signals.received)
    sys.exit(code)


def run(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; user errors are one line on standard error."""
    from calque.cli.app import Stopped, build_app
    from calque.io.shards import StoppedByMainProcess

    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _call(lambda: build_app(arguments)(arguments, prog_name="calque"))
        sys.stdout.flush()
    except InputError as error:
        print(f"calque: error: {error}", file=sys.stderr)
        code = 2
    except Stopped as stop:
        notes = "; ".join(stop.args) or "unfinished work was discarded"
        if os.environ.get("RANK", "0") == "0":  # of several processes, one says it
            print(f"calque: interrupted; {notes}", file=sys.stderr)
        code = 128 + signal.SIGINT
    except StoppedByMainProcess:
        code = 2
    except BrokenPipeError:
        _silence_stdout()
        code = 1
    except OSError as error:
        if error.filename is None and error.errno not in FIXES:
            raise
        if error.filename is None:
            _silence_stdout()
        place = error.filename or "standard output or a temporary file"
        print(f"calque: error: {explain_os_error(error, place)}", file=sys.stderr)
        code = 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        fix = "use smaller batches, a smaller model or a shorter input"
        print(f"calque: error: there is not enough memory ({fix})", file=sys.stderr)
        code = 2
    return code


def _end_at_once(code: int) -> None:
    """End an interrupted process without the seconds that Python may take to free its memory.

    Threads of libraries may still be computing then, and nothing watches over the time any more.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _call(command: Callable[[], object]) -> int:
    """Return the exit code of a command, which Typer ends with SystemExit."""
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _replace_closed_streams() -> None:
    """Open something in place of closed standard streams; else the next file takes their number.

    Reading or writing it then fails, except that messages on a closed standard error are dropped.
    """
    modes = (os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)
    for number, (name, mode) in enumerate(zip(("stdin", "stdout", "stderr"), modes, strict=True)):
        if getattr(sys, name) is None:
            os.open(os.devnull, mode)  # takes the lowest free number, which is this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
    _usual: Callable[..., str] = warnings.formatwarning,
) -> str:
    """Format Calque's own warnings as one line, without the location in the code."""
    if category.__module__.partition(".")[0] == "calque":
        return f"calque: warning: {message}\n"
    return _usual(message, category, filename, lineno, line)


def _silence_stdout() -> None:
    """Prevent an error message at exit when standard output is a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
