"""Progress bars on standard error, shown only where standard error is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calque.types import Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show one progress bar per stage while the block runs; yield the function that moves them.

    A stage whose total is unknown shows a moving bar and the number of items done.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    stages: dict[str, TaskID] = {}
    with RichProgress(*columns, console=console, transient=True) as bars:

        def update(stage: str, done: int, total: int | None) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done, total=total)

        yield update


@contextmanager
def show_log() -> Iterator[None]:
    """Print Calque's log messages on standard error while the block runs, one line each."""
    import logging

    class LineFormatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            text = record.getMessage()
            return f"warning: {text}" if record.levelno >= logging.WARNING else text

    handler, logger = logging.StreamHandler(), logging.getLogger("calque")
    handler.setFormatter(LineFormatter())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def print_summary(output: object, notes: Sequence[str], started: float) -> None:
    """Print the last line of a command on standard error: what was written where, and the time."""
    seconds = time.perf_counter() - started
    print(f"{output}: {', '.join(notes)}; {seconds:.1f} s", file=sys.stderr)
