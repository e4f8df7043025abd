"""Undisturbed runs to compare with, and runs that are continued as a user would."""

from __future__ import annotations

import shlex
import tempfile
from functools import cache
from pathlib import Path

from tests.campaign.children import Child, run, start
from tests.campaign.outcomes import Outcome, compare_outputs, judge_end, judge_orphans, read_outputs
from tests.campaign.tables import COMMANDS, COMPILED, Command

SECONDS = 90.0


def lay_out(inputs: Path, folder: Path) -> None:
    """Create out/, and in/ as a link: these commands do not change their inputs."""
    (folder / "in").symlink_to(inputs)
    (folder / "out").mkdir(exist_ok=True)


def find_command(name: str) -> Command:
    """Return the command of that name."""
    return next(command for command in (*COMMANDS, COMPILED) if command.name == name)


@cache
def find_expected(command: Command, inputs: Path) -> tuple[dict[str, str], float]:
    """Return the outputs of an undisturbed run and how many seconds it takes."""
    folder = Path(tempfile.mkdtemp(dir=inputs.parent))
    lay_out(inputs, folder)
    child = run(shlex.split(command.arguments), folder, seconds=SECONDS)
    assert child.code == 0, f"{command.arguments}: {child.stderr}"
    return read_outputs(folder / "out"), child.ended - child.started


def start_or_resume(command: Command, folder: Path, seconds: float) -> Child:
    """Start a command; if it asks for --resume or --overwrite, start it again with that option.

    Return the process, which may still run after so many seconds.
    """
    arguments = shlex.split(command.arguments)
    child = start(arguments, folder)
    if child.wait(seconds) and child.code == 2:
        for option in ("--resume", "--overwrite"):
            if option in child.stderr:
                child = start([*arguments, option], folder)
                child.wait(seconds)
                break
    return child


def finish(command: Command, inputs: Path, folder: Path, outcome: Outcome) -> None:
    """Continue a disturbed run to its end, and compare its outputs with an undisturbed run."""
    child = start_or_resume(command, folder, SECONDS)
    if not child.ends_within(SECONDS):
        outcome.add("hang", f"resumed, but not ended after {SECONDS:g} s")
        child.end()
        return
    if "exists already" in child.stderr:  # the run had finished, and nothing may replace its output
        outcome.add("ok")
    else:
        judge_end(child, outcome, (0,))
    judge_orphans(child, outcome)
    compare_outputs(find_expected(command, inputs)[0], read_outputs(folder / "out"), outcome)
