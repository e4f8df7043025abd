"""A toy task for tests of grids, and a command line that has it: python toy_grid.py evaluate ...

Files `fake/slow-SEED`, `fail-SEED` and `die-SEED` make a run slow, fail, or die.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.registry import TASKS, Task

TRAINED = Task(
    "a toy",
    "accuracy",
    "toy_grid:measure",
    ("fake/test-*.txt",),
    "toy_grid:list_languages",
    trained=True,
)
UNTRAINED = replace(TRAINED, languages=None, trained=False, higher_is_better=False)


def list_languages(data: Path, settings: Any) -> list[str]:
    return sorted(path.stem.removeprefix("test-") for path in (data / "fake").glob("test-*.txt"))


def list_more(data: Path, settings: Any) -> list[str]:
    return [*list_languages(data, settings), "sw"]


def measure(
    encoder: Any, data: Path, *, languages: Any, settings: Any, seed: int, on_progress: Any
) -> list[LanguageScores]:
    """Score lines at random, depending on the seed and the weights."""
    fake = data / "fake"
    with open(fake / "log", "a") as log:
        log.write(f"{os.getpid()} {seed}\n")
    if (fake / f"slow-{seed}").exists():
        time.sleep(120)
    if (fake / f"fail-{seed}").exists():
        raise ZeroDivisionError("on purpose\nand more")
    if (fake / f"die-{seed}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    first = float(next(iter(encoder.parameters())).detach().float().sum())
    scores = []
    for n_done, language in enumerate(languages, start=1):
        n_lines = len((fake / f"test-{language}.txt").read_text().splitlines())
        generator = np.random.default_rng([seed, abs(int(first * 1000)), settings.epochs])
        hits = generator.integers(0, 2, n_lines).astype(float)
        items = ItemScores(hits, np.ones(n_lines))
        metrics = {"accuracy": items.score, "lines": float(n_lines)}
        scores.append(
            LanguageScores(language, metrics, n_lines, items, {2: {"accuracy": 1.5}}, {"cut": 3})
        )
        on_progress(n_done, len(languages))
    return scores


if __name__ == "__main__":
    from calque.cli import main

    TASKS["toy"] = TRAINED
    main()
