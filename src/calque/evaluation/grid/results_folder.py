"""The folder that an evaluation writes: results.jsonl with whole runs only, and items/."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.evaluation.grid.task_run import build_records, describe_run, key_of
from calque.io.files import write_atomically
from calque.io.locks import lock_output, remove_leftovers
from calque.io.result_records import (
    FIELDS,
    Record,
    format_record,
    load_items,
    read_records,
    select_items,
)

if TYPE_CHECKING:
    from calque.evaluation.grid.task_run import RunKey, RunResult, TaskRun

RESULTS, ITEMS, LOCK = "results.jsonl", "items", ".lock"
REQUIRED = tuple(name for name in FIELDS if name not in ("n_records", "notes"))


@contextmanager
def open_results_folder(folder: Path) -> Iterator[ResultsFolder]:
    """Open a results folder for writing, by one process at a time; create it if necessary."""
    check_results_folder(folder)
    _read_runs(folder)  # raises before anything is changed
    (folder / ITEMS).mkdir(parents=True, exist_ok=True)
    with lock_output(folder, folder / LOCK):
        yield ResultsFolder(folder)


class ResultsFolder:
    """A results folder that is open for writing.

    results.jsonl is replaced in one step after every run, so that a killed process leaves either
    all records of a run or none. `runs` has the records of finished and failed runs; `repairs`
    says what is damaged or incomplete and does not count as done.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / RESULTS
        remove_leftovers(folder / ITEMS)
        runs, self.repairs = _read_runs(folder)
        # Records with damaged items stay in the file until the run has been repeated.
        self._lines = {key: _to_lines(records) for key, records in runs.items()}
        if self.repairs or not self.path.exists():
            self._write()
        self.runs = dict(runs)
        for key, records in runs.items():
            if problem := _find_damage(folder, records):
                self.repairs.append(f"{describe_run(*key)}: {problem}; it counts as not done")
                del self.runs[key]

    @property
    def records(self) -> list[Record]:
        """All records in the order of the file."""
        return [record for records in self.runs.values() for record in records]

    def find_error(self, key: RunKey) -> str | None:
        """Return the error of a failed run."""
        return next((row["error"] for row in self.runs.get(key, ()) if row["error"]), None)

    def add(self, run: TaskRun, result: RunResult) -> list[Record]:
        """Write the items and records of a run and return the records."""
        records = build_records(run, result)
        for name in _list_items(records):
            _write_items(self.folder / name, result)
        before = _list_items(self.runs.pop(run.key, ()))
        self.runs[run.key] = records
        self._lines.pop(run.key, None)
        self._lines[run.key] = _to_lines(records)
        self._write()
        for name in before - _list_items(self.records):
            (self.folder / name).unlink(missing_ok=True)
        return records

    def _write(self) -> None:
        with write_atomically(self.path, binary=True) as stream:
            stream.writelines(self._lines.values())


def check_results_folder(folder: Path) -> None:
    """Raise an InputError unless a path is a results folder, an empty folder or does not exist."""
    fix = "pass a folder, or a file name with .jsonl"
    for path in (folder, folder / ITEMS):
        if path.exists() and not path.is_dir():
            raise InputError("the output is a file", file=path, fix=fix)
    if folder.is_dir() and not (folder / RESULTS).exists():
        own = {ITEMS, LOCK, *(path.name for path in folder.glob(".calque-*"))}
        others = {path.name for path in folder.iterdir()} - own
        if others:
            problem = f"the folder contains {min(others)} and no {RESULTS}"
            raise InputError(problem, file=folder, fix="pass a new folder for the results")


def read_results_folder(folder: Path) -> dict[RunKey, list[Record]]:
    """Return the records of a results folder by run, except damaged ones; none without a folder."""
    runs, _ = _read_runs(folder)
    return {key: records for key, records in runs.items() if not _find_damage(folder, records)}


def _read_runs(folder: Path) -> tuple[dict[RunKey, list[Record]], list[str]]:
    """Read the records of all runs, and say if the last line was incomplete."""
    runs: dict[RunKey, list[Record]] = {}
    if not (folder / RESULTS).exists():
        return runs, []
    records, is_truncated = read_records(folder / RESULTS, REQUIRED)
    for _, record in records:
        runs.setdefault(key_of(record), []).append(record)
    if not is_truncated:
        return runs, []
    if runs:  # the line may belong to the last run, which is then incomplete
        del runs[next(reversed(runs))]
    return runs, ["the last line was incomplete: its run is repeated"]


def _find_damage(folder: Path, records: Sequence[Record]) -> str | None:
    """Return what is wrong with the records of a run or their items, or None."""
    if records[0].get("n_records", len(records)) != len(records):
        return f"it has {len(records)} of {records[0]['n_records']} records"
    try:
        for name in _list_items(records):
            arrays = load_items(folder / name)
            for record in records:
                if record["items"] == name:
                    select_items(arrays, record["language"], record["value"], folder / name)
    except InputError as error:
        return f"{error.file}: {error.problem}"
    return None


def _list_items(records: Sequence[Record]) -> set[str]:
    return {record["items"] for record in records if record["items"] is not None}


def _write_items(path: Path, result: RunResult) -> None:
    """Write the items of all languages as arrays LANGUAGE.num and LANGUAGE.den."""
    import numpy as np

    arrays = {}
    for scores in result.scores:
        if scores.items is not None:
            arrays[f"{scores.language}.num"] = np.asarray(scores.items.numerators, np.float64)
            arrays[f"{scores.language}.den"] = np.asarray(scores.items.denominators, np.float64)
    with write_atomically(path, binary=True) as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def _to_lines(records: Sequence[Record]) -> bytes:
    return b"".join(map(format_record, records))
