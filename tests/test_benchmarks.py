"""Every script in benchmarks/ runs to its end in its tiny mode, with the modules it imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = [path.name for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_tiny_mode(
    name: str,
    run_benchmark: Callable[..., CompletedProcess[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_benchmark(name, "--tiny", seconds=120)
    assert done.returncode == 0, done.stderr or done.stdout
    assert done.stdout.strip() and "skipped" not in done.stdout
    assert not list(tmp_path.iterdir()), "the script left files behind"
