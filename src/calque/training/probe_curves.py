"""Transfer along training, read off the metrics that runs have written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from calque.training.telemetry import METRICS, PROBE, PROBE_OTHERS, PROBE_SOURCE, read_metrics
from calque.types import InputError


class TransferPoint(NamedTuple):
    """What a probe found after a step: the score of the source, the mean of the others."""

    step: int
    source: float
    others: float

    @property
    def gap(self) -> float:
        """Subtract the others from the source."""
        return self.source - self.others


def read_curve(run: Path) -> list[TransferPoint]:
    """Read what the probe of a run found, in the order of steps; to have none is an error."""
    if not run.is_dir():
        raise InputError("no such folder", file=run, fix="give the folder of a run")
    points = [
        TransferPoint(row["step"], row[PROBE_SOURCE], row[PROBE_OTHERS])
        for row in read_metrics(run / METRICS)
        if row["kind"] == PROBE and None not in (row.get(PROBE_SOURCE), row.get(PROBE_OTHERS))
    ]
    if not points:
        fix = "train with a `probe` in the recipe"
        raise InputError("holds no transfer", file=run / METRICS, fix=fix)
    return points
