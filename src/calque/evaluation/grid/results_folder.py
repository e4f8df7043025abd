"""The folder a study writes: results.jsonl, whole cells only whatever happens, and items/.

A cell's rows are appended by one write behind a note of where they begin, which goes when they
have reached the disk. So a kill leaves either all rows of a cell or, once the folder is opened
again, none of them. A cell that is computed again takes its old rows' place in one step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from calque.errors import InputError
from calque.evaluation.grid.cells import Row, key_of
from calque.io.files import clear_partial, write_atomically
from calque.io.outputs import lock_file

if TYPE_CHECKING:
    from calque.evaluation.grid.cells import Cell, CellKey, CellResult


ROWS, ITEMS, NOTE, LOCK = "results.jsonl", "items", ".appending.json", ".lock"
NEEDED = ("model", "task", "language", "seed", "config", "value", "error")


class ResultsFolder:
    """Results that only one process writes; `rows` are those of finished and failed cells.

    `repairs` says what was found broken when the folder was opened, and mended.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / ROWS
        check_folder(folder)
        read_folder(folder)  # what is not of results is refused before anything is touched
        (folder / ITEMS).mkdir(parents=True, exist_ok=True)
        self._lock: BinaryIO = open(folder / LOCK, "ab")  # noqa: SIM115
        lock_file(self._lock, folder)
        self.repairs: list[str] = []
        for place in (folder, folder / ITEMS):
            clear_partial(place)
        self._undo_append()
        self.path.touch()
        self.cells = self._read()

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order of the file."""
        return [row for rows in self.cells.values() for row in rows]

    def find_error(self, key: CellKey) -> str | None:
        """Give the error of a failed cell."""
        return next((row["error"] for row in self.cells.get(key, ()) if row["error"]), None)

    def add(self, cell: Cell, result: CellResult) -> list[Row]:
        """Write what came of a cell: test items first, then its rows, whole or not at all."""
        from calque.evaluation.grid.cells import make_rows

        rows = make_rows(cell, result)
        names = {row["items"] for row in rows if row["items"] is not None}
        for name in names:
            write_items(self.folder / name, result)
        old = self.cells.pop(cell.key, None)
        self.cells[cell.key] = rows
        if old is None:
            self._append(rows)
        else:
            with write_atomically(self.path, binary=True) as stream:
                stream.write(_to_bytes(self.rows))
            stale = {row["items"] for row in old} - names - {None}
            for name in stale:
                (self.folder / name).unlink(missing_ok=True)
        return rows

    def close(self) -> None:
        """Let others write."""
        self._lock.close()

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _append(self, rows: Sequence[Row]) -> None:
        content, note = _to_bytes(rows), self.folder / NOTE
        start = self.path.stat().st_size
        with write_atomically(note) as stream:
            json.dump({"start": start, "end": start + len(content)}, stream)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            written = os.write(handle, content)
            if written < len(content):
                os.ftruncate(handle, start)
                fix = "free some space; the same command goes on"
                raise InputError("the disk is full", file=self.path, fix=fix)
            os.fsync(handle)
        finally:
            os.close(handle)
        note.unlink()

    def _undo_append(self) -> None:
        """Cut off rows whose writing did not come to its end."""
        note = self.folder / NOTE
        if not note.exists():
            return
        about = json.loads(note.read_text(encoding="utf-8"))
        if self.path.exists() and about["start"] < self.path.stat().st_size < about["end"]:
            os.truncate(self.path, about["start"])
            self.repairs.append("rows of a cell that was being written are dropped")
        note.unlink()

    def _read(self) -> dict[CellKey, list[Row]]:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        rows = parse_rows(whole, self.path)
        if len(whole) < len(content):
            # Its cell is not whole either; if nothing is left of its name, it may be the last one.
            broken = _find_key(content[len(whole) :]) or (key_of(rows[-1]) if rows else None)
            rows = [row for row in rows if key_of(row) != broken]
            with write_atomically(self.path, binary=True) as stream:
                stream.write(_to_bytes(rows))
            self.repairs.append("the last line was torn: its cell is dropped and done again")
        return group_rows(rows)


def check_folder(folder: Path) -> None:
    """Refuse a place that is something else than a folder of results, or to be one."""
    if folder.exists() and not folder.is_dir():
        raise InputError("this is a file", file=folder, fix="name a folder for the results")
    if folder.is_dir() and not (folder / ROWS).exists():
        others = [path.name for path in folder.iterdir() if path.name not in (ITEMS, LOCK, NOTE)]
        if others:
            problem = f"a folder with {min(others)} and no {ROWS}"
            raise InputError(problem, file=folder, fix="name a new folder for the results")


def read_folder(folder: Path) -> dict[CellKey, list[Row]]:
    """Read the rows of a folder by cell and leave it as it is; of none, nothing."""
    path = folder / ROWS
    content = path.read_bytes() if path.exists() else b""
    return group_rows(parse_rows(content[: content.rfind(b"\n") + 1], path))


def group_rows(rows: Iterable[Row]) -> dict[CellKey, list[Row]]:
    """Put the rows of a cell together."""
    cells: dict[CellKey, list[Row]] = {}
    for row in rows:
        cells.setdefault(key_of(row), []).append(row)
    return cells


def parse_rows(content: bytes, path: Path) -> list[Row]:
    """Read whole lines; one that is no row of results is an error that names it."""
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row: Any = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or any(name not in row for name in NEEDED):
            fix = "remove the line, or name a new folder"
            raise InputError("no row of results", file=path, line=number, fix=fix)
        rows.append(row)
    return rows


def write_items(path: Path, result: CellResult) -> None:
    """Write the items of all languages as LANG.num and LANG.den, readable without pickle."""
    import numpy as np

    arrays = {}
    for outcome in result.outcomes:
        if outcome.items is not None:
            arrays[f"{outcome.language}.num"] = np.asarray(outcome.items.numerators, np.float64)
            arrays[f"{outcome.language}.den"] = np.asarray(outcome.items.denominators, np.float64)
    with write_atomically(path, binary=True) as stream:
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


def _to_bytes(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _find_key(torn: bytes) -> CellKey | None:
    """Tell the cell of half a line, if as much as that is left of it."""
    text = torn.decode(errors="ignore")
    try:
        start = json.loads(text[: text.index(', "metric"')] + "}")
        return key_of(start)
    except (ValueError, KeyError):
        return None
