"""Runs Calque against damaged inputs, kills, signals, other processes and full disks.

    python -m tests.campaign [PART ...] [--count N] [--seed S] [--minutes M] [--jobs 2] [--out FILE]

It prints a table of counts. Every attempt is a function of its part, its number and the seed:
`--only NUMBER --keep FOLDER` repeats one and keeps its files.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from tests.campaign.children import ENVIRONMENT, warm_up
from tests.campaign.outcomes import GOOD, Attempt, Outcome, tabulate

Record: TypeAlias = dict[str, Any]
Plan: TypeAlias = Callable[[Path, int], Iterable[Attempt]]

# Parts and their default numbers of attempts, and the few attempts that the test suite makes.
PARTS = {"mutants": 1100, "kills": 60, "signals": 60, "processes": 24, "disk": 28}
SLICE = {
    "mutants": range(56, 400, 33),
    "kills": (0, 4),
    "signals": (6, 13),
    "processes": (4,),
    "disk": (4,),
}


def main() -> int:
    """Run the parts and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--count", type=int, help="attempts per part")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing after this time")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only this attempt")
    parser.add_argument("--slice", action="store_true", help="only the attempts of the test suite")
    parser.add_argument("--rows", help="only rows of the table whose names contain this")
    parser.add_argument("--keep", type=Path, help="folder for the files of failed attempts")
    parser.add_argument("--out", type=Path, help="file for failures, as JSON lines, and the table")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)}: choose from {', '.join(PARTS)}")
    end = time.monotonic() + 60 * options.minutes
    os.environ.update(ENVIRONMENT)
    warm_up()
    from tests.campaign.inputs import build_inputs

    modules = {name: importlib.import_module(f"tests.campaign.{name}") for name in PARTS}
    folder = Path(tempfile.mkdtemp(prefix="calque-campaign-")).resolve()
    try:
        inputs = build_inputs(folder)
        records = []
        for part in options.parts or PARTS:
            numbers: Sequence[int] = range(options.count or PARTS[part])
            if options.slice or options.only is not None:
                numbers = SLICE[part] if options.slice else [options.only]
            records += run_part(modules[part].plan, inputs, numbers, options, end)
    finally:
        shutil.rmtree(folder)
    return report(records, options.out)


def run_part(
    plan: Plan, inputs: Path, numbers: Sequence[int], options: argparse.Namespace, end: float
) -> list[Record]:
    """Run the attempts of a part in several processes and return their records."""
    attempts = [
        attempt
        for attempt in plan(inputs, max(numbers) + 1)
        if attempt.number in numbers and (options.rows or "") in attempt.row
    ]
    results = [Path(tempfile.mkstemp(dir=inputs.parent)[1]) for _ in range(options.jobs)]
    workers = []
    for job, path in enumerate(results):
        if worker := os.fork():
            workers.append(worker)
            continue
        code = 1
        try:
            with open(path, "w", encoding="utf-8") as stream:
                for attempt in attempts[job :: options.jobs]:
                    if time.monotonic() < end:
                        record = run_attempt(attempt, inputs.parent, options)
                        print(json.dumps(record), file=stream, flush=True)
            code = 0
        except BaseException:  # noqa: BLE001 - a worker must not continue as the main process
            traceback.print_exc()
        finally:
            os._exit(code)
    show_progress(attempts, results, workers)
    return [json.loads(line) for path in results for line in path.read_text().splitlines()]


def run_attempt(attempt: Attempt, folder: Path, options: argparse.Namespace) -> Record:
    """Run one attempt in a folder of its own and return its record."""
    name = f"{attempt.part}-{attempt.number}"
    scratch = folder / name
    scratch.mkdir()
    started = time.monotonic()
    try:
        outcome = attempt.act(scratch, Random(f"{options.seed} {attempt.part} {attempt.number}"))
    except Exception as error:  # noqa: BLE001 - for example, an undisturbed run failed
        outcome = Outcome()
        outcome.add("wrong exit", f"the campaign itself failed: {error!r}")
    if options.keep and (not outcome.is_good or options.only is not None):
        shutil.rmtree(options.keep / name, ignore_errors=True)
        shutil.copytree(scratch, options.keep / name, symlinks=True)
    shutil.rmtree(scratch)
    return {
        "part": attempt.part,
        "row": attempt.row,
        "number": attempt.number,
        "seed": options.seed,
        "counts": sorted(outcome.counts),
        "details": outcome.details,
        "kills": outcome.n_kills,
        "seconds": round(time.monotonic() - started, 2),
    }


def show_progress(attempts: Sequence[Attempt], results: Sequence[Path], workers: list[int]) -> None:
    """Wait for the workers and show how far they are."""
    shown = 0.0
    while workers:
        pid, status = os.waitpid(workers[0], os.WNOHANG)
        if pid:
            workers.pop(0)
            assert os.waitstatus_to_exitcode(status) == 0, "the campaign itself failed"
        elif time.monotonic() - shown > 20:
            shown = time.monotonic()
            n_done = sum(len(path.read_bytes().splitlines()) for path in results)
            part = attempts[0].part if attempts else "nothing"
            print(f"{part}: {n_done} of {len(attempts)}", file=sys.stderr, flush=True)
        else:
            time.sleep(0.1)


def report(records: list[Record], out: Path | None) -> int:
    """Print failures and the table of counts; return 1 if there was a failure."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    failed = [record for record in records if not set(record["counts"]) <= set(GOOD)]
    for record in sorted(records, key=lambda record: list(PARTS).index(record["part"])):
        counts = rows.setdefault((record["part"], record["row"]), Counter())
        counts.update(["tries", *record["counts"]])
    for record in failed:
        print(f"{record['part']} {record['number']}: {' | '.join(record['details'])}")
    n_kills = sum(record["kills"] for record in records)
    table = tabulate(rows) + (f"\n\n{n_kills:,} processes were killed." if n_kills else "")
    print(table)
    if out is not None:
        lines = [json.dumps(record, ensure_ascii=False) for record in failed]
        out.write_text("\n".join([*lines, table, ""]), "utf-8")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
