"""The baseline study: calque-mini and the same architecture with random weights, on every task.

    python benchmarks/baseline_study.py pack DATA -o ARCHIVE
    python benchmarks/baseline_study.py run DATA -o OUT [--minutes 9] [--jobs 5] [--from ARCHIVE]
    python benchmarks/baseline_study.py table OUT > docs/studies/baseline.md
    python benchmarks/baseline_study.py --tiny

DATA contains xtreme/, ud/, tatoeba/ and gold_alignments/ as described by `calque data`. `pack` puts
the files that the study reads, in the languages of the model, into one archive; `run --from`
unpacks it.

`run` executes the runs that are missing and stops before its minutes are over: exit code 1 means
that runs are left or have failed, and the same command continues. OUT/results is a results folder
of `calque evaluate`; OUT/study.tar.xz is the same in one file, from which OUT/results is restored
on another machine. OUT/sessions.jsonl records how long each session took. `--tiny` runs all steps
on the sentences of the demo.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

MODEL = "calque-mini"
RESULTS, PACKED, SESSIONS = "results", "study.tar.xz", "sessions.jsonl"
MAX_MIB = 25
# XNLI and PAWS-X are trained on a small dev set, so an epoch has few updates.
OWN_SETTINGS = {"xnli": {"epochs": 10}, "pawsx": {"epochs": 10}}
SPARE_SECONDS = 15  # to stop workers and pack the results
HEAD = """# Baseline: calque-mini and random weights

What does the embedded encoder know, and would the same architecture with random weights do as
well? calque-mini against `random:calque-mini`, fine-tuned and tested by the same code with
{n_seeds} seeds each: zero-shot transfer from English for tasks with training, one layer of the
unchanged model for the others. A task that is not clearly above random weights measures nothing.

```
python benchmarks/baseline_study.py pack DATA -o data.tar.xz
python benchmarks/baseline_study.py run --from data.tar.xz -o OUT --jobs 5 --minutes 9
python benchmarks/baseline_study.py table OUT > docs/studies/baseline.md
```

- The languages are those of the model's training text, as far as a task has a test. Fine-tuned
  tasks are tested on at most {examples} examples per language, taken at equal distances; the
  English training sets are used completely.
- XTREME's test sets have no public labels: its development sets are the tests. XNLI and PAWS-X
  have no training set here: two thirds of the English development set are the training set, and
  translations of the other third are the tests.
- Question answering is trained on TyDiQA's English training set, for XQuAD and MLQA too.
- Settings are the defaults, except ten epochs for XNLI and PAWS-X. Their learning rates were chosen
  on these tests, so that the scores of calque-mini are slightly optimistic.
- Random weights are drawn for every seed: tasks without training have seeds for them, too.
"""


def main() -> None:
    """Parse the arguments and execute a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="all steps on a few sentences")
    steps = parser.add_subparsers(dest="step")
    for name, work in (("pack", pack), ("run", run), ("table", table)):
        step = steps.add_parser(name)
        step.set_defaults(work=work)
        step.add_argument("path", type=Path, nargs="?", help="OUT" if name == "table" else "DATA")
        step.add_argument("--model", default=MODEL)
        if name != "table":
            step.add_argument("-o", "--out", type=Path, required=True)
            step.add_argument("--languages", help="default: those of the model")
        if name == "run":
            step.add_argument("--from", dest="archive", type=Path, help="instead of DATA")
            step.add_argument("--minutes", type=float, default=1e6)
            step.add_argument("--jobs", default="auto", help="parallel runs; 0: in this process")
            step.add_argument("--seeds", type=int, default=5)
            step.add_argument("--tasks", help="default: all that have data")
            step.add_argument("--models", help="default: the model and random weights")
            step.add_argument("--device", default="auto")
            step.add_argument("--overwrite", action="store_true")
            step.add_argument(
                "--test-examples", type=int, default=1000, help="per language, of trained tasks"
            )
            step.add_argument("--set", action="append", default=[], help="KEY=VALUE of settings")
    options = parser.parse_args()
    if options.tiny:
        sys.exit(run_tiny(parser))
    if options.step is None or (options.path is None and getattr(options, "archive", None) is None):
        print("skipped: this study needs data (see --help), or --tiny")
        return
    sys.exit(options.work(options))


def run_tiny(parser: argparse.ArgumentParser) -> int:
    """Execute all steps on German sentences of the demo."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines()[1:] if line.startswith("de\t")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data" / "tatoeba").mkdir(parents=True)
        for side, column in (("eng", 1), ("deu", 2)):
            text = "".join(row[column] + "\n" for row in rows)
            path = folder / "data" / "tatoeba" / f"tatoeba.deu-eng.{side}"
            path.write_text(text, encoding="utf-8")
        archive, out = str(folder / "data.tar.xz"), str(folder / "out")
        common = ["--languages", "de,en"]
        for arguments in (
            ["pack", str(folder / "data"), "-o", archive, *common],
            ["run", "--from", archive, "-o", out, *common, "--seeds", "2", "--jobs", "0"],
            ["table", out],
        ):
            options = parser.parse_args(arguments)
            if code := options.work(options):
                return int(code)
    return 0


# Data.


def find_languages(options: argparse.Namespace) -> list[str]:
    """Return the languages asked for, or those in the model's configuration."""
    from calque.models.loading import find_model

    if options.languages:
        return list(options.languages.split(","))
    config = json.loads((find_model(options.model) / "config.json").read_text("utf-8"))
    return list((config.get("calque") or {}).get("languages") or ["en"])


def find_tested(options: argparse.Namespace, tasks: Sequence[str], data: Path) -> list[str]:
    """Return those of the languages for which some task has a test."""
    from calque.evaluation.grid.run_grid import choose_languages
    from calque.evaluation.registry import TASKS
    from calque.evaluation.settings import TaskSettings

    languages = find_languages(options)
    if options.languages:
        return languages
    missing = [
        set(choose_languages(name, TASKS[name], data, TaskSettings(), languages)[1])
        for name in tasks
    ]
    return [name for name in languages if not all(name in names for names in missing)]


def find_tasks(data: Path) -> list[str]:
    """Return the tasks of encoders and encoder-decoders that have data files."""
    from calque.evaluation.grid.model_specs import find_data
    from calque.evaluation.registry import TASKS

    return [
        name
        for name, task in TASKS.items()
        if task.model != "vectors" and find_data(data, task.files)
    ]


def pack(options: argparse.Namespace) -> int:
    """Write the files of all tasks in the languages of the study into one archive."""
    from calque.evaluation.grid.model_specs import find_data
    from calque.evaluation.registry import TASKS

    wanted = find_languages(options)
    files = {
        path
        for name in find_tasks(options.path)
        for _, path in find_data(options.path, TASKS[name].files)
        if is_wanted(path.name, wanted)
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(options.out, "w:xz") as archive:
        for path in sorted(files):
            archive.add(path, str(path.relative_to(options.path)), filter=strip_owner)
    size = options.out.stat().st_size / 2**20
    print(f"{options.out}: {len(files)} files, {size:.1f} MiB, {' '.join(wanted)}")
    if size > MAX_MIB:
        print(f"more than {MAX_MIB} MiB: use fewer --languages", file=sys.stderr)
    return int(size > MAX_MIB)


def is_wanted(name: str, languages: Sequence[str]) -> bool:
    """Return whether a file name is one of the languages, or English training data.

    The other training files of TyDiQA are kept, too: if dev has no answers, they are the tests.

    >>> [is_wanted(n, ["en", "de"]) for n in ("dev-de.tsv.xz", "dev-yo.tsv.xz", "train-de.tsv.xz")]
    [True, False, False]
    """
    from calque.io.xtreme import three_letter_code

    if name.startswith("tatoeba."):
        codes = name.split(".")[1].split("-")
        return codes[0] in {three_letter_code(language) for language in languages}
    parts = re.split(r"[^a-z]+", name)
    codes = {part for part in parts if len(part) == 2} - {"ud", "xz"}
    is_training = "train" in parts and "tydiqa" not in parts
    return codes <= ({"en"} if is_training else set(languages))


def strip_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove times and owners, so that equal files give equal archives."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o644
    return entry


def unpack(archive: Path, folder: Path) -> Path:
    """Extract an archive into a folder unless it exists."""
    if not folder.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    return folder


# Runs.


def run(options: argparse.Namespace) -> int:
    """Execute the missing runs until the time is over; return 0 if nothing is left."""
    import calque
    from calque.evaluation.settings import parse_setting

    start = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    data = unpack(options.archive, options.out / "data") if options.archive else options.path
    if (options.out / PACKED).exists():
        unpack(options.out / PACKED, options.out / RESULTS)
    tasks = options.tasks.split(",") if options.tasks else find_tasks(data)
    settings: dict[str, Any] = {"test_examples": options.test_examples}
    for text in options.set:
        name, _, value = text.partition("=")
        settings[name] = parse_setting(name, value)
    models = options.models.split(",") if options.models else [options.model]
    if not options.models:
        models.append(f"random:{options.model}")
    n_records = n_failed = n_remaining = 0
    groups = [[name for name in tasks if name not in OWN_SETTINGS]]
    groups += [[name] for name in tasks if name in OWN_SETTINGS]
    for group in filter(None, groups):
        result = calque.evaluate(
            models,
            data=data,
            tasks=group,
            languages=find_tested(options, group, data),
            seeds=options.seeds,
            settings={**OWN_SETTINGS.get(group[0], {}), **settings},
            output=options.out / RESULTS,
            overwrite=options.overwrite,
            device=options.device,
            jobs=options.jobs,
            time_limit=start + 60 * options.minutes - SPARE_SECONDS - time.monotonic(),
            log=lambda line: print(line, flush=True),
        )
        n_records += len(result.records)
        n_failed += result.n_failed
        n_remaining += result.n_remaining
    seconds = time.monotonic() - start
    record_session(options, n_records, seconds)
    pack_results(options.out)
    print(f"{seconds:.0f} s, {n_remaining} runs left, {n_failed} failed")
    return int(n_remaining > 0 or n_failed > 0)


def record_session(options: argparse.Namespace, n_records: int, seconds: float) -> None:
    """Append what a session did to a file."""
    about = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "records": n_records,
        "jobs": options.jobs,
        "tasks": options.tasks or "all",
        "models": options.models or "all",
    }
    with open(options.out / SESSIONS, "a") as stream:
        stream.write(json.dumps(about) + "\n")


def pack_results(out: Path) -> None:
    """Write all results into one file."""
    draft = out / f"{PACKED}.partial"
    with tarfile.open(draft, "w:xz") as archive:
        for path in sorted((out / RESULTS).rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                archive.add(path, str(path.relative_to(out / RESULTS)), filter=strip_owner)
    draft.replace(out / PACKED)


# Table.


def table(options: argparse.Namespace) -> int:
    """Print the study as Markdown: verdicts, all scores, and their cost."""
    from calque.report.comparison import compare_results
    from calque.report.results import read_results
    from calque.report.tables import to_markdown

    out = options.path
    if not (out / RESULTS).exists() and (out / PACKED).exists():
        unpack(out / PACKED, out / RESULTS)
    found = read_results([out / RESULTS])
    baseline = next(name for name in found.models if name.startswith("random:"))
    body = to_markdown(compare_results(found, baseline))
    n_seeds = len({row.seed for row in found.rows if row.seed is not None})
    n_examples = max((row.n_items for row in found.rows if row.source), default=0)
    print(HEAD.format(n_seeds=n_seeds, examples=f"{n_examples:,}"))
    print(body.partition("\n")[2].strip())
    print("\n## Cost\n")
    print(tabulate_costs(out))
    return 0


def tabulate_costs(out: Path) -> str:
    """Return a table of seconds and memory per run by task and model, and the sessions."""
    from calque.evaluation.grid.results_folder import read_results_folder

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failed = []
    for (model, task, _), records in read_results_folder(out / RESULTS).items():
        failed += [f"- {model}, {task}: {row['error']}" for row in records if row["error"]]
        groups.setdefault((task, model), []).append(records[0])
    lines = ["| task | model | runs | seconds per run | peak memory (MB) | device |"]
    lines.append("|---|---|---:|---:|---:|---|")
    for (task, model), records in sorted(groups.items()):
        seconds = sum(record["seconds"] for record in records) / len(records)
        memory = max(record["memory_mb"] or 0 for record in records)
        cells = [task, model, str(len(records)), f"{seconds:.1f}", f"{memory:,.0f}"]
        lines.append(f"| {' | '.join(cells)} | {records[0]['device'] or '–'} |")
    path = out / SESSIONS
    sessions = path.read_text().splitlines() if path.exists() else []
    if sessions:
        shown = [
            f"{each['seconds']:.0f} s, jobs {each['jobs']}" for each in map(json.loads, sessions)
        ]
        lines += ["", f"Sessions: {'; '.join(shown)}."]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])])


if __name__ == "__main__":
    main()
