"""A few attempts of the campaign; `make campaign` makes the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_slice_of_the_campaign() -> None:
    command = [sys.executable, "-m", "tests.campaign", "--slice", "--jobs", "1"]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
