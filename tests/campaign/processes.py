"""Two processes with the same output: one works, the other one says who does."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random

from tests.campaign.children import Child, start
from tests.campaign.disturbed import SECONDS, find_expected, lay_out, start_or_resume
from tests.campaign.outcomes import (
    Attempt,
    Outcome,
    compare_outputs,
    judge_end,
    judge_orphans,
    last_line,
    read_outputs,
)
from tests.campaign.tables import COMMANDS, Command

DONE = re.compile(r"--resume|--overwrite|contains a run|exists")


def plan(inputs: Path, count: int) -> Iterable[Attempt]:
    """Return so many pairs of processes, spread evenly over the commands."""
    for number in range(count):
        command = COMMANDS[number % len(COMMANDS)]
        yield Attempt("processes", command.name, number, partial(_try, command, inputs))


def _try(command: Command, inputs: Path, folder: Path, rng: Random) -> Outcome:
    lay_out(inputs, folder)
    outcome = Outcome()
    expected, duration = find_expected(command, inputs)
    arguments: Sequence[str] = shlex.split(command.arguments)
    if rng.random() < 0.5:  # both continue an interrupted run
        for _ in range(2):
            child = start_or_resume(command, folder, rng.uniform(0.3, 0.8) * duration)
            child.send(signal.SIGKILL)
            child.wait(10)
            judge_orphans(child, outcome, 8)
            arguments = child.arguments
    is_done = read_outputs(folder / "out") == expected
    delay = rng.choice((0.0, rng.uniform(0, duration)))
    first, second = _start_both(arguments, folder, delay)
    if first.code == second.code == 2 and "--resume" in first.stderr:
        first, second = _start_both([*arguments, "--resume"], folder, delay)
    for child, other in ((first, second), (second, first)):
        if child.code is None:
            outcome.add("hang", f"not ended after {SECONDS:g} s")
            child.end()
            continue
        judge_end(child, outcome)
        judge_orphans(child, outcome)
        if child.code == 2 and not _names_owner(child, other):
            outcome.add("wrong exit", f"names no process: {last_line(child.stderr)}")
    if 0 not in (first.code, second.code) and not is_done:
        outcome.add("wrong exit", f"neither finished: {last_line(first.stderr)}")
    compare_outputs(expected, read_outputs(folder / "out"), outcome)
    if not outcome.is_good:
        outcome.details.append(f"{' '.join(arguments)} twice, {delay:.2f} s apart")
    return outcome


def _start_both(arguments: Sequence[str], folder: Path, delay: float) -> tuple[Child, Child]:
    """Start two processes and wait for them."""
    first = start(arguments, folder)
    time.sleep(delay)
    second = start(arguments, folder)
    for child in (first, second):
        child.ends_within(SECONDS)
    return first, second


def _names_owner(child: Child, other: Child) -> bool:
    """Whether the error names the other process, or says that the output is there."""
    line = last_line(child.stderr)
    return (f"process {other.pid} on {socket.gethostname()}" in line) or bool(DONE.search(line))
