"""Every script in benchmarks/ runs to its end in its tiny mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_benchmark_runs_in_tiny_mode(
    script: Path, fork_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fork_server.run(
        script, "--tiny", beside=script, n_processes=1, output=tmp_path / "printed", seconds=120
    )
    assert done.returncode == 0, done.stderr or done.stdout
    assert done.stdout.strip() and not done.stdout.startswith("skipped")
