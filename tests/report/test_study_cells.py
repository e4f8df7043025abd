"""The cells of the tables of studies follow the rule of `calque compare`."""

from __future__ import annotations

import doctest
import runpy
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "study_cells.py"
CELLS: dict[str, Any] = runpy.run_path(str(PATH))

STEADY, NOISY = [1.0, 1.1, 1.2], [0.0, 3.0, 6.0]  # deviations 0.1 and 3


@pytest.mark.parametrize(
    ("values", "before", "sign", "cell", "verdict"),
    [
        # Only the deviation of the baseline counts, whichever side has the larger one.
        (NOISY, STEADY, 1, "3.0 ± 3.0 (+1.9 ↑)", "+1.9, holds"),
        (STEADY, NOISY, 1, "1.1 ± 0.1 (−1.9)", "−1.9, open"),
        (NOISY, STEADY, -1, "3.0 ± 3.0 (+1.9 ↓)", "−1.9, reversed"),
        # A baseline without seeds has no deviation.
        (NOISY, [1.0], 1, "3.0 ± 3.0 (+2.0)", "+2.0, open"),
        ([2.0], STEADY, 1, "2.0 (+0.9 ↑)", "+0.9, holds"),
    ],
)
def test_the_deviation_of_the_baseline_decides(
    values: list[float], before: list[float], sign: int, cell: str, verdict: str
) -> None:
    assert CELLS["show"](values, before, sign=sign) == cell
    assert CELLS["judge"](values, before, sign) == verdict


def test_examples_and_missing_values() -> None:
    assert CELLS["judge"]([], STEADY) == "–"
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(CELLS["show"], "show", globs=CELLS):
        runner.run(test)
    for test in doctest.DocTestFinder().find(CELLS["judge"], "judge", globs=CELLS):
        runner.run(test)
    assert (runner.failures, runner.tries) == (0, 2)
