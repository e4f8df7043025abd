"""The command line: parses arguments, calls the public API and prints results."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable

from calque.errors import InputError


def main() -> None:
    """Run `calque` and exit: 2 for bad input, 130 when interrupted."""
    warnings.formatwarning = _format_warning
    sys.exit(run())


def run(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; user errors are one line on standard error."""
    from calque.cli.app import build_app

    try:
        code = _call(lambda: build_app()(arguments, prog_name="calque"))
        sys.stdout.flush()
    except InputError as error:
        print(f"calque: error: {error}", file=sys.stderr)
        code = 2
    except BrokenPipeError:
        _silence_stdout()
        code = 1
    except OSError as error:
        from calque.io.files import DISK_FULL

        if error.errno not in DISK_FULL:
            raise
        _silence_stdout()
        place = error.filename or "standard output or a temporary file"
        problem = (error.strerror or str(error)).lower()
        print(f"calque: error: {place}: {problem} (free some space)", file=sys.stderr)
        code = 2
    if code == 130:
        print("calque: interrupted", file=sys.stderr)
    return code


def _call(command: Callable[[], object]) -> int:
    """Return the exit code of a command, which Typer ends with SystemExit."""
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


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
