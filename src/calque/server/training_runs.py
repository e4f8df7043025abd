"""Training runs below a folder: their state, speed and metrics, read as they are written."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from yaml import YAMLError

from calque.errors import InputError
from calque.server.folder_files import list_files
from calque.training.recipe_io import parse_yaml
from calque.training.telemetry import METRICS, TRAIN

MetricRow: TypeAlias = dict[str, Any]

# Rows of a run that are kept; when there are more, every second training step is dropped.
MAX_ROWS = 8_192
# Bytes that are read at once from a file that grows.
MAX_READ = 16 << 20
# A run that wrote nothing for so long, or for some log intervals, has stopped.
SILENT_SECONDS, SILENT_INTERVALS = 120.0, 5.0
MAX_RECIPE_BYTES = 1 << 20
# Rows over which the speed is measured.
PACE_ROWS = 20


@dataclass(slots=True)
class MetricsFile:
    """The rows of a metrics.jsonl that were read so far.

    A last line that is not complete is read again later. A resumed run replaces the file: then it
    is read from the start.
    """

    path: Path
    rows: list[MetricRow] = field(default_factory=list)
    _position: int = 0
    _identity: tuple[int, int] | None = None
    _stride: int = 1
    _n_train: int = 0

    def update(self) -> None:
        """Read the lines that were added since the last call."""
        with self.path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            identity = (status.st_dev, status.st_ino)
            if identity != self._identity or status.st_size < self._position:
                self.rows, self._position, self._identity = [], 0, identity
                self._stride, self._n_train = 1, 0
            stream.seek(self._position)
            data = stream.read(MAX_READ)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == MAX_READ:  # no metrics have such lines
            end = len(data)
        self._position += end
        for line in data[:end].splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # a line that a killed process left incomplete
            return
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            return
        if row.get("kind") == TRAIN:
            self._n_train += 1
            if self._n_train % self._stride:
                return
        self.rows.append(row)
        if len(self.rows) > MAX_ROWS:
            self._stride *= 2
            train = [number for number, row in enumerate(self.rows) if row.get("kind") == TRAIN]
            dropped = set(train[:-1:2])
            others = len(self.rows) - len(train)
            self.rows = [row for number, row in enumerate(self.rows) if number not in dropped]
            if others > MAX_ROWS // 2:
                del self.rows[: MAX_ROWS // 4]


class TrainingRuns:
    """The runs below a folder; a run is a folder with metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            fix = "pass a folder with runs of `calque train` (--runs)"
            raise InputError("this folder does not exist", file=folder, fix=fix)
        self._folder = folder
        self._files: dict[str, MetricsFile] = {}
        self._lock = threading.Lock()

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of every run, the most recently updated first."""
        with self._lock:
            self._find()
            runs = [self._describe(name, file) for name, file in self._files.items()]
        return sorted(runs, key=lambda run: -run["updated"])

    def read(self, name: str, after: int) -> tuple[dict[str, Any], list[MetricRow]] | None:
        """Return the state of a run and its rows after a step, or None if there is no such run."""
        with self._lock:
            if name not in self._files:
                self._find()
            file = self._files.get(name)
            if file is None:
                return None
            description = self._describe(name, file)
            return description, [row for row in file.rows if row["step"] > after]

    def _find(self) -> None:
        """Look for new runs, and forget those that are gone."""
        paths = {
            (Path(name).parent.as_posix() if "/" in name else path.parent.name): path
            for name, path in list_files(self._folder, METRICS.__eq__).items()
        }
        self._files = {
            name: self._files.get(name) or MetricsFile(path) for name, path in paths.items()
        }

    def _describe(self, name: str, file: MetricsFile) -> dict[str, Any]:
        try:
            file.update()
            updated = file.path.stat().st_mtime
        except OSError:  # removed in the meantime
            updated = 0.0
        trained = [row for row in file.rows if row.get("kind") == TRAIN]
        last = trained[-1] if trained else {}
        steps, step = _read_steps(file.path.parent), last.get("step", 0)
        seconds_per_step = _measure_pace(trained)
        interval = (seconds_per_step or 0.0) * (step - trained[-2]["step"] if trained[1:] else 0)
        silent = max(SILENT_SECONDS, SILENT_INTERVALS * interval)
        is_finished = (file.path.parent / "model" / "config.json").is_file()
        state = "running" if time.time() - updated < silent else "stopped"
        left = None
        if state == "running" and steps is not None and seconds_per_step is not None:
            left = max(0.0, (steps - step) * seconds_per_step)
        return {
            "name": name,
            "state": "finished" if is_finished else state,
            "step": step,
            "steps": steps,
            "tokens_per_second": last.get("tokens_per_second"),
            "eta_seconds": None if is_finished else left,
            "updated": updated,
        }


def _measure_pace(rows: list[MetricRow]) -> float | None:
    """Return the seconds per step of the last rows."""
    recent = [row for row in rows[-PACE_ROWS:] if isinstance(row.get("seconds"), int | float)]
    if len(recent) < 2 or recent[-1]["step"] <= recent[0]["step"]:
        return None
    seconds = recent[-1]["seconds"] - recent[0]["seconds"]
    return max(0.0, float(seconds / (recent[-1]["step"] - recent[0]["step"])))


def _read_steps(folder: Path) -> int | None:
    """Return the number of steps in the recipe of a run, if it can be read."""
    path = folder / "recipe.yaml"
    try:
        if path.is_symlink() or path.stat().st_size > MAX_RECIPE_BYTES:
            return None
        steps = parse_yaml(path.read_text("utf-8"))["schedule"]["steps"]
    except (OSError, UnicodeError, YAMLError, LookupError, TypeError):
        return None
    return steps if isinstance(steps, int) else None
