"""Runs that are killed at random moments, several times, and then continued to the end."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random

from tests.campaign.disturbed import find_expected, finish, lay_out, start_or_resume
from tests.campaign.outcomes import Attempt, Outcome, judge_orphans
from tests.campaign.tables import COMMANDS, Command


def plan(inputs: Path, count: int) -> Iterable[Attempt]:
    """Return so many runs, spread evenly over the commands."""
    for number in range(count):
        command = COMMANDS[number % len(COMMANDS)]
        yield Attempt("kills", command.name, number, partial(_try, command, inputs))


def _try(command: Command, inputs: Path, folder: Path, rng: Random) -> Outcome:
    lay_out(inputs, folder)
    outcome, kills = Outcome(), list[str]()
    _, duration = find_expected(command, inputs)
    for _ in range(rng.randint(1, 3)):
        seconds = rng.uniform(0, duration)
        child = start_or_resume(command, folder, seconds)
        if child.code is not None:
            break
        to_group = rng.random() < 0.5
        kills.append(f"{seconds:.2f} s ({'group' if to_group else 'main process'})")
        child.send(signal.SIGKILL, to_group=to_group)
        child.wait(10)
        judge_orphans(child, outcome, 8)
    outcome.n_kills = len(kills)
    finish(command, inputs, folder, outcome)
    if not outcome.is_good:
        when = f"{', '.join(kills)} of {duration:.1f} s"
        outcome.details.append(f"{command.arguments} killed after {when}")
    return outcome
