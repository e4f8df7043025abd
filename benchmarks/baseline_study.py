"""The baseline study: calque-mini and the same architecture with random weights, on every task.

    python benchmarks/baseline_study.py pack DATA -o ARCHIVE
    python benchmarks/baseline_study.py run DATA -o OUT [--minutes 9] [--jobs 5] [--from ARCHIVE]
    python benchmarks/baseline_study.py table OUT > docs/studies/baseline.md

DATA holds xtreme/, ud/, tatoeba/ and gold_alignments/ as `calque data` describes them. `pack` puts
what the study reads, in the languages of the model, into one archive; `run --from` unpacks it.

`run` does what is missing and stops before its minutes are over: exit code 1 says that cells are
left or have failed, and the same command goes on. OUT/results is a folder of `calque evaluate`;
OUT/study.tar.xz is the same in one file, out of which OUT/results is filled on another machine.
OUT/sittings.jsonl says how long each sitting took.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MODEL = "calque-mini"
RESULTS, PACKED, SITTINGS = "results", "study.tar.xz", "sittings.jsonl"
MOST_MIB = 25
# Where a dev set must be learnt from, for want of a training set, there are few updates an epoch.
DEFAULTS = {"xnli": {"epochs": 10}, "pawsx": {"epochs": 10}}
SPARE_SECONDS = 15  # to stop workers and pack the results
HEAD = """# Baseline: calque-mini and its floor

What does the embedded encoder know, and would the same architecture with random weights do as
well? calque-mini against `random:calque-mini`, fine-tuned and tested by the same code with
{n_seeds} seeds each: zero-shot transfer from English where a task is learnt, one layer of the model
as it is where nothing is. A task that is not clearly above its floor measures nothing here.

```
python benchmarks/baseline_study.py pack DATA -o data.tar.xz
python benchmarks/baseline_study.py run --from data.tar.xz -o OUT --jobs 5 --minutes 9
python benchmarks/baseline_study.py table OUT > docs/studies/baseline.md
```

- Languages are those the model was trained on, as far as a task has a test. Tests of what is learnt
  have at most {examples} examples a language, spread over the file; English is learnt from whole.
- XTREME's test sets have no public labels: tests are its development sets. XNLI and PAWS-X have no
  training set here: two thirds of the English development set are learnt from, and tests are
  translations of the other third.
- Questions are learnt from TyDiQA's English training set alone, for XQuAD and MLQA too.
- Settings are the defaults, but ten epochs of XNLI and PAWS-X. Their learning rates were chosen by
  these tests (see the page on tasks), so that calque-mini's scores are a little optimistic.
- Random weights are drawn anew for every seed: untrained tasks have seeds for the floor, too.
"""


def main() -> None:
    """Read the options and do what is asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, work in (("pack", pack), ("run", run), ("table", table)):
        verb = verbs.add_parser(name)
        verb.set_defaults(work=work)
        verb.add_argument("place", type=Path, nargs="?", help="OUT" if name == "table" else "DATA")
        verb.add_argument("--model", default=MODEL)
        if name != "table":
            verb.add_argument("-o", "--out", type=Path, required=True)
            verb.add_argument("--languages", help="by default those of the model")
        if name == "run":
            verb.add_argument("--from", dest="archive", type=Path, help="instead of DATA")
            verb.add_argument("--minutes", type=float, default=1e6)
            verb.add_argument("--jobs", default="auto", help="cells at a time; 0: in this process")
            verb.add_argument("--seeds", type=int, default=5)
            verb.add_argument("--tasks", help="by default all that there are data of")
            verb.add_argument("--models", help="by default the model and its floor")
            verb.add_argument("--device", default="auto")
            verb.add_argument("--force", action="store_true")
            verb.add_argument(
                "--test-examples", type=int, default=1000, help="of a language, of trained tasks"
            )
            verb.add_argument("--set", action="append", default=[], help="KEY=VALUE of settings")
    options = parser.parse_args()
    if options.place is None and getattr(options, "archive", None) is None:
        print("needs a folder DATA: skipped")
        return
    sys.exit(options.work(options))


# Data.


def find_languages(options: argparse.Namespace) -> list[str]:
    """Take the languages asked for, or those the model says it knows."""
    from calque.models.loading import find_folder

    if options.languages:
        return list(options.languages.split(","))
    config = json.loads((find_folder(options.model) / "config.json").read_text("utf-8"))
    return list((config.get("calque") or {}).get("languages") or ["en"])


def find_tested(options: argparse.Namespace, kinds: Mapping[str, Any], data: Path) -> list[str]:
    """Take those of the languages that some task has a test of."""
    from calque.evaluation.grid.grid import choose_languages
    from calque.evaluation.settings import TaskSettings

    languages = find_languages(options)
    if options.languages:
        return languages
    lacking = [
        set(choose_languages(name, kind, data, TaskSettings(), languages)[1])
        for name, kind in kinds.items()
    ]
    return [name for name in languages if not all(name in names for names in lacking)]


def find_tasks(data: Path) -> dict[str, Any]:
    """Find the tasks of encoders that there are files of."""
    from calque.evaluation.grid.model_specs import find_data
    from calque.evaluation.registry import TASKS

    of_encoders = {name: kind for name, kind in TASKS.items() if not kind.of_vectors}
    return {name: kind for name, kind in of_encoders.items() if find_data(data, kind.files)}


def pack(options: argparse.Namespace) -> int:
    """Put the files of all tasks in the languages wanted into one archive."""
    from calque.evaluation.grid.model_specs import find_data

    wanted = find_languages(options)
    files = {
        path
        for kind in find_tasks(options.place).values()
        for _, path in find_data(options.place, kind.files)
        if is_wanted(path.name, wanted)
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(options.out, "w:xz") as archive:
        for path in sorted(files):
            archive.add(path, str(path.relative_to(options.place)), filter=strip_owner)
    size = options.out.stat().st_size / 2**20
    print(f"{options.out}: {len(files)} whole files, {size:.1f} MiB, {' '.join(wanted)}")
    if size > MOST_MIB:
        print(f"more than {MOST_MIB} MiB: name fewer --languages", file=sys.stderr)
    return int(size > MOST_MIB)


def is_wanted(name: str, languages: Sequence[str]) -> bool:
    """Tell by a file's name whether it is of languages that are wanted, or English to learn from.

    TyDiQA's other training files stay, too: where dev has no answers, tests come out of them.

    >>> [is_wanted(n, ["en", "de"]) for n in ("dev-de.tsv.xz", "dev-yo.tsv.xz", "train-de.tsv.xz")]
    [True, False, False]
    """
    from calque.io.xtreme import long_name

    if name.startswith("tatoeba."):
        codes = name.split(".")[1].split("-")
        return codes[0] in {long_name(language) for language in languages}
    parts = re.split(r"[^a-z]+", name)
    codes = {part for part in parts if len(part) == 2} - {"ud", "xz"}
    learns = "train" in parts and "tydiqa" not in parts
    return codes <= ({"en"} if learns else set(languages))


def strip_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make equal files give equal archives."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def unpack(archive: Path, folder: Path) -> Path:
    """Fill a folder from an archive, once."""
    if not folder.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    return folder


# Runs.


def run(options: argparse.Namespace) -> int:
    """Do the cells that are missing until the time is over; 0 if nothing is left."""
    from calque.cli.grid_progress import parse_jobs, parse_setting
    from calque.evaluation.grid.grid import plan_cells, sort_out
    from calque.evaluation.grid.model_specs import find_entrants
    from calque.evaluation.grid.results_folder import ResultsFolder

    begin = time.monotonic()
    deadline = begin + 60 * options.minutes - SPARE_SECONDS
    options.out.mkdir(parents=True, exist_ok=True)
    data = unpack(options.archive, options.out / "data") if options.archive else options.place
    if (options.out / PACKED).exists():
        unpack(options.out / PACKED, options.out / RESULTS)
    kinds = find_tasks(data)
    if options.tasks:
        kinds = {name: kinds[name] for name in options.tasks.split(",")}
    for name in kinds.keys() & DEFAULTS.keys():
        kinds[name] = replace(kinds[name], defaults={**kinds[name].defaults, **DEFAULTS[name]})
    floor = f"random:{options.model}"
    models = options.models.split(",") if options.models else [options.model, floor]
    chosen: dict[str, Any] = {"test_examples": options.test_examples}
    for text in options.set:
        name, _, value = text.partition("=")
        chosen[name] = parse_setting(name, value)
    cells, notes = plan_cells(
        find_entrants(models, of_vectors=False),
        kinds,
        range(1, options.seeds + 1),
        data,
        languages=find_tested(options, kinds, data),
        chosen=chosen,
    )
    with ResultsFolder(options.out / RESULTS) as results:
        plan = sort_out(cells, results, force=options.force)
        print(*notes, *plan.notes, f"{len(plan.todo)} of {len(cells)} cells to do", sep="\n")
        progress = compute(plan.todo, results, options.device, parse_jobs(options.jobs), deadline)
    n_left = progress.n_all - progress.n_done
    seconds = time.monotonic() - begin
    note_sitting(options, progress.n_done, seconds)
    pack_results(options.out)
    print(f"{seconds:.0f} s, {n_left} cells left, {progress.n_failed} failed")
    return int(n_left > 0 or progress.n_failed > 0)


def compute(
    cells: Sequence[Any], results: Any, device: str, n_jobs: int | None, deadline: float
) -> Any:
    """Run cells and print a line for each that is done."""
    from calque.cli.grid_progress import GridProgress
    from calque.evaluation.grid.grid import run_cells

    progress = GridProgress(cells, results.rows, lambda line: print(line, flush=True))
    events = run_cells(cells, results, device=device, n_jobs=n_jobs, deadline=deadline)
    with closing(events):
        for event in events:
            progress.note(event)
    return progress


def note_sitting(options: argparse.Namespace, n_cells: int, seconds: float) -> None:
    """Take down what a sitting did."""
    about = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "cells": n_cells,
        "jobs": options.jobs,
        "tasks": options.tasks or "all",
        "models": options.models or "all",
    }
    with open(options.out / SITTINGS, "a") as stream:
        stream.write(json.dumps(about) + "\n")


def pack_results(out: Path) -> None:
    """Put all results into one file that is easy to carry."""
    draft = out / f"{PACKED}.partial"
    with tarfile.open(draft, "w:xz") as archive:
        for path in sorted((out / RESULTS).rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                archive.add(path, str(path.relative_to(out / RESULTS)), filter=strip_owner)
    draft.replace(out / PACKED)


# Table.


def table(options: argparse.Namespace) -> int:
    """Print the study as Markdown: verdicts, all scores, and what they cost."""
    from calque.report.results import read_results
    from calque.report.study import make_study
    from calque.report.tables import to_markdown

    out = options.place
    if not (out / RESULTS).exists() and (out / PACKED).exists():
        unpack(out / PACKED, out / RESULTS)
    found = read_results([out / RESULTS])
    floor = next(name for name in found.models if name.startswith("random:"))
    body = to_markdown(make_study(found, floor))
    print(HEAD.format(n_seeds=count_seeds(found), examples=find_most_items(found)))
    print(body.partition("\n")[2].strip())
    print("\n## What it cost\n")
    print(tabulate_costs(out))
    return 0


def count_seeds(results: Any) -> int:
    """Count the seeds of trained tasks."""
    return len({row.seed for row in results.rows if row.seed is not None})


def find_most_items(results: Any) -> str:
    """Say how many test items a trained task has at most in a language."""
    return f"{max((row.n_items for row in results.rows if row.source), default=0):,}"


def tabulate_costs(out: Path) -> str:
    """List seconds and memory of a cell by task and model, and the sittings."""
    from calque.evaluation.grid.results_folder import read_folder

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failed = []
    for (model, task, _), rows in read_folder(out / RESULTS).items():
        failed += [f"- {model}, {task}: {row['error']}" for row in rows if row["error"]]
        groups.setdefault((task, model), []).append(rows[0])
    lines = ["| task | model | cells | seconds a cell | most memory (MB) | device |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for (task, model), rows in sorted(groups.items()):
        seconds = [row["seconds"] for row in rows]
        memory = max(row["memory_mb"] or 0 for row in rows)
        mean = sum(seconds) / len(seconds)
        device = rows[0]["device"] or "–"
        lines.append(f"| {task} | {model} | {len(rows)} | {mean:.1f} | {memory:,.0f} | {device} |")
    for line in read_sittings(out):
        lines += ["", line]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])])


def read_sittings(out: Path) -> list[str]:
    """Say how long sittings took."""
    path = out / SITTINGS
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    shown = "; ".join(
        f"{s['cells']} cells in {s['seconds']:.0f} s, jobs {s['jobs']}" for s in found
    )
    return [f"Sittings: {shown}."]


if __name__ == "__main__":
    main()
