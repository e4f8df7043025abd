"""Stop signals in every phase, to the whole process group, as terminals send them."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.children import Child, find_owner, start
from tests.campaign.disturbed import SECONDS, find_command, find_expected, finish, lay_out
from tests.campaign.outcomes import (
    Attempt,
    Outcome,
    describe_traceback,
    judge_litter,
    judge_orphans,
    last_line,
    read_outputs,
)
from tests.campaign.tables import COMPILED, PHASES

KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COMPILER_CACHE = "torchinductor|^cc[^/]*$"  # of PyTorch and GCC, in the folder of temporary files
FIRST_SECONDS, SECOND_SECONDS = 10.0, 2.0


def plan(inputs: Path, count: int) -> Iterable[Attempt]:
    """Return so many interrupted runs, spread evenly over the phases."""
    names = list(PHASES)
    for number in range(count):
        name = names[number % len(names)]
        yield Attempt("signals", name, number, partial(_try, name, inputs))


def mark_call(place: str, call: int, marker: Path) -> None:
    """Create a file when a function "module:name" is called so often."""
    owner, name = find_owner(place)
    function, n_calls = getattr(owner, name), 0

    def marked(*arguments: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == call:
            marker.touch()
        return function(*arguments, **options)

    setattr(owner, name, marked)


def _try(phase: str, inputs: Path, folder: Path, rng: Random) -> Outcome:
    lay_out(inputs, folder)
    name, place, n_calls = PHASES[phase]
    command, marker, outcome = find_command(name), folder / "phase", Outcome()
    is_finished = command is not COMPILED
    expected = find_expected(command, inputs)[0] if is_finished else {}
    call = rng.randint(1, n_calls)
    kind, is_second = rng.choice(KINDS), rng.random() < 0.3
    arguments = shlex.split(command.arguments)
    child = start(arguments, folder, prepare=partial(mark_call, place, call, marker))
    while not marker.exists() and not child.wait(0.002):
        assert time.monotonic() < child.started + 10 * SECONDS, f"{phase} is never reached"
    time.sleep(rng.choice((0, 0, 0.01, 0.05, 0.2, 0.5)) if is_finished else rng.uniform(0, 20))
    if not child.wait(0):
        _interrupt(child, kind, outcome, rng.uniform(0, 0.3) if is_second else None)
        is_done = read_outputs(folder / "out") == expected
        if not _says_what_is_lost(child) and not is_done:
            outcome.add("wrong exit", f"what is lost or saved? {last_line(child.stderr)}")
        # When all is done, a signal may end the process while Python frees its memory.
        if child.code not in (None, 0, 128 + kind) and not (is_done and child.code == -kind):
            outcome.add("wrong exit", f"exit code {child.code}: {last_line(child.stderr)}")
        judge_orphans(child, outcome)
        if not is_second:
            judge_litter([folder / "out", folder / "tmp"], outcome, COMPILER_CACHE)
    if is_finished:
        finish(command, inputs, folder, outcome)
    else:
        outcome.add("ok")
    if not outcome.is_good:
        more = ", twice" if is_second else ""
        where = f"{kind.name}{more} in call {call} of {place}"
        outcome.details.append(f"{command.arguments} with {where}")
    return outcome


def _interrupt(
    child: Child, kind: signal.Signals, outcome: Outcome, second_after: float | None
) -> None:
    """Send a signal, and perhaps a second one, and judge how the process ends."""
    child.send(kind)
    limit = FIRST_SECONDS
    if second_after is not None and not child.wait(second_after):
        child.send(kind)
        limit = SECOND_SECONDS
    if not child.ends_within(limit):
        outcome.add("hang", f"not ended {limit:g} s after {kind.name}")
        child.end()
        return
    shown = child.stderr
    if "Traceback" in shown:
        outcome.add("traceback", describe_traceback(shown, child.code))
    if "semaphore" in shown or "resource_tracker" in shown:
        outcome.add("litter", "a warning about semaphores")


def _says_what_is_lost(child: Child) -> bool:
    return last_line(child.stderr).startswith(("calque: interrupted", "calque: stopped"))
