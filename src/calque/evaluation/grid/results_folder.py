"""The folder that an evaluation writes: results.jsonl with whole runs only, and items/."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from calque.errors import InputError
from calque.evaluation.grid.task_run import Record, build_records, key_of
from calque.io.files import remove_partial_files, write_atomically
from calque.io.resumable import lock_file

if TYPE_CHECKING:
    from calque.evaluation.grid.task_run import RunKey, RunResult, TaskRun

RESULTS, ITEMS, LOCK = "results.jsonl", "items", ".lock"
REQUIRED = ("model", "task", "language", "seed", "config", "value", "error")


class ResultsFolder:
    """A results folder that is open for writing, by one process at a time.

    results.jsonl is replaced in one step after every run, so that a killed process leaves either
    all records of a run or none. `runs` has the records of finished and failed runs; `repairs`
    says what was incomplete in the file and has been removed.
    """

    def __init__(self, folder: Path) -> None:
        check_results_folder(folder)
        self.folder, self.path = folder, folder / RESULTS
        self.repairs: list[str] = []
        _read_runs(self.path)  # raises before anything is changed
        (folder / ITEMS).mkdir(parents=True, exist_ok=True)
        self._lock: BinaryIO = open(folder / LOCK, "ab")  # noqa: SIM115
        lock_file(self._lock, folder)
        for place in (folder, folder / ITEMS):
            remove_partial_files(place)
        self.runs, is_truncated = _read_runs(self.path)
        self._lines = {key: _to_lines(records) for key, records in self.runs.items()}
        if is_truncated and self.runs:
            # The line may belong to the last run, which is then incomplete.
            key = next(reversed(self.runs))
            del self.runs[key], self._lines[key]
        if is_truncated:
            self.repairs.append("the last line was incomplete: its run is repeated")
        if is_truncated or not self.path.exists():
            self._write()

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
        names = {record["items"] for record in records} - {None}
        for name in names:
            _write_items(self.folder / name, result)
        stale = {record["items"] for record in self.runs.pop(run.key, [])} - names - {None}
        self.runs[run.key] = records
        self._lines.pop(run.key, None)
        self._lines[run.key] = _to_lines(records)
        self._write()
        for name in stale:
            (self.folder / name).unlink(missing_ok=True)
        return records

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _write(self) -> None:
        with write_atomically(self.path, binary=True) as stream:
            stream.writelines(self._lines.values())


def check_results_folder(folder: Path) -> None:
    """Raise an InputError unless a path is a results folder, an empty folder or does not exist."""
    if folder.exists() and not folder.is_dir():
        problem = "the output is a file"
        raise InputError(problem, file=folder, fix="pass a folder, or a file name with .jsonl")
    if folder.is_dir() and not (folder / RESULTS).exists():
        others = [path.name for path in folder.iterdir() if path.name not in (ITEMS, LOCK)]
        if others:
            problem = f"the folder contains {min(others)} and no {RESULTS}"
            raise InputError(problem, file=folder, fix="pass a new folder for the results")


def read_results_folder(folder: Path) -> dict[RunKey, list[Record]]:
    """Read the records of a results folder by run; return nothing if there is no such folder."""
    return _read_runs(folder / RESULTS)[0]


def _read_runs(path: Path) -> tuple[dict[RunKey, list[Record]], bool]:
    """Read all whole lines, grouped by run; also return whether the last line is incomplete."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    runs: dict[RunKey, list[Record]] = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record: Any = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or any(name not in record for name in REQUIRED):
            fix = "remove the line, or pass a new folder"
            problem = "the line is not a record of results"
            raise InputError(problem, file=path, line=number, fix=fix)
        runs.setdefault(key_of(record), []).append(record)
    return runs, len(whole) < len(content)


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


def _to_lines(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in records).encode()
