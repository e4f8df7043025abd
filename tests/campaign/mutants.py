"""Damaged inputs of all formats.

Every mutant must end in a result or in one clear line. Where Calque has checksums of what it wrote
itself, a result must be that of the undamaged files.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from random import Random

from tests.campaign.children import run, start
from tests.campaign.mutations import copy_tree, mutate_file
from tests.campaign.outcomes import (
    Attempt,
    Outcome,
    compare_outputs,
    judge_end,
    judge_litter,
    judge_orphans,
    read_outputs,
)
from tests.campaign.tables import FORMATS, Format

SECONDS = 30.0


def plan(inputs: Path, count: int) -> Iterable[Attempt]:
    """Return so many attempts, spread evenly over the formats; the first of each has no change."""
    for number in range(count):
        case = FORMATS[number % len(FORMATS)]
        yield Attempt("mutants", case.name, number, partial(_try, case, number, inputs))


@cache
def _find_expected(case: Format, inputs: Path) -> dict[str, str]:
    """Return the outputs for the unchanged files."""
    folder = Path(tempfile.mkdtemp(dir=inputs.parent))
    _lay_out(case, inputs, folder)
    child = run(shlex.split(case.command), folder, seconds=SECONDS)
    assert child.code == 0, f"{case.command}: {child.stderr}"
    return read_outputs(folder / "out")


def _lay_out(case: Format, inputs: Path, folder: Path) -> None:
    (folder / "out").mkdir(parents=True)
    (folder / "in").mkdir()
    names = {word.split("/")[1] for word in case.command.split() if word.startswith("in/")}
    if ".yaml" in case.command:
        names |= {"en-de.tsv", "de.txt", "model", "linked.text", "linked.links"}
    for name in sorted(names):
        copy_tree(inputs / name, folder / "in" / name, link=True)
    if case.continued:
        copy_tree(inputs / case.continued, folder / "out" / case.continued, link=False)


def _try(case: Format, number: int, inputs: Path, folder: Path, rng: Random) -> Outcome:
    _lay_out(case, inputs, folder)
    outcome, how, file = Outcome(), "no change", folder / "out"
    if is_changed := number >= len(FORMATS):
        place = folder / ("out" if case.continued else "in")
        found = (path for pattern in case.files.split() for path in place.glob(pattern))
        file = rng.choice(sorted(path for path in found if path.is_file()))
        how = mutate_file(file, rng)
    child = start(shlex.split(case.command), folder)
    if not child.ends_within(SECONDS):
        outcome.add("hang", f"not ended after {SECONDS:g} s")
        child.end()
    else:
        judge_end(child, outcome, (0, 2) if is_changed else (0,))
        judge_orphans(child, outcome)
        judge_litter([folder / "in", folder / "out", folder / "tmp"], outcome)
        if case.is_checked and child.code == 0:
            found, name = read_outputs(folder / "out"), os.path.relpath(file, folder / "out")
            expected = _find_expected(case, inputs)
            if name in expected:  # an older checkpoint stays as it is
                found[name] = expected[name]
            compare_outputs(expected, found, outcome)
    if not outcome.is_good:
        outcome.details.append(f"{case.command} with {file.relative_to(folder)}: {how}")
    return outcome
