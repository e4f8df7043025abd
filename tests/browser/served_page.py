"""Folders to show, the server in a process of its own, and the browser.

Imported with runpy.run_path in tests, since they are not a package, and by screenshots.py.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
BROWSER_OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
DRAWN = runpy.run_path(str(Path(__file__).parents[1] / "drawn_results.py"))
# English, German and Arabic words with the same meaning have the same vector.
WORDS = {
    "en": ("water", "house", "mother", "red", "seven"),
    "de": ("Wasser", "Haus", "Mutter", "rot", "sieben"),
    "ar": ("ماء", "بيت", "أم", "أحمر", "سبعة"),
}


def write_folders(place: Path) -> list[str]:
    """Write invented results, runs and word vectors, and return the options that serve them."""
    models = {"baseline": 62.0, "model-a": 71.0, "model-b": 62.5}
    languages = ("en", "de", "ar", "ur")
    DRAWN["draw_results"](place / "results", models, tasks=("xnli", "pos"), languages=languages)
    write_run(place / "runs" / "run-a", 260, n_steps=400)
    write_run(place / "runs" / "run-b", 400, n_steps=400)
    write_vectors(place / "vectors")
    return [f"--{name}={place / name}" for name in ("results", "runs", "vectors")]


def write_run(folder: Path, last_step: int, n_steps: int) -> None:
    """Write the metrics of a run up to a step; a run that has all its steps has a model."""
    folder.mkdir(parents=True)
    if last_step == n_steps:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}", "utf-8")
    (folder / "recipe.yaml").write_text(f"schedule:\n  steps: {n_steps}\n", "utf-8")
    rows = []
    for step in range(10, last_step + 1, 10):
        noise = 0.1 * math.sin(step)
        losses = {
            "loss/mlm": 2 + 4 * math.exp(-step / 100) + noise,
            "loss/align": 1 + 2 * math.exp(-step / 60),
        }
        pace = {"tokens": 4096 * step, "tokens_per_second": 61_000.0, "seconds": 0.7 * step}
        rows.append({"kind": "train", "step": step, **losses, "lr": 3e-4, **pace})
        if step % 50 == 0:
            loss = {"loss/mlm": 2.1 + 4 * math.exp(-step / 100)}
            rows.append({"kind": "validation", "step": step, **loss, "seconds": 0.7 * step})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, "utf-8")


def write_vectors(folder: Path) -> None:
    folder.mkdir(parents=True)
    for language, words in WORDS.items():
        lines = [
            f"{word} {' '.join('1' if k == number else '0.1' for k in range(len(words)))}\n"
            for number, word in enumerate(words)
        ]
        text = f"{len(words)} {len(words)}\n" + "".join(lines)
        (folder / f"{language}.vec").write_text(text, "utf-8")


@contextmanager
def run_server(options: Sequence[str]) -> Iterator[str]:
    """Start `calque serve` on a free port and yield its address."""
    command = [sys.executable, "-m", "calque", "serve", "--port=0", "--device=cpu", *options]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stderr is not None
        lines = []
        try:
            for line in server.stderr:
                lines.append(line)
                found = re.search(r"http://[\d.]+:\d+", line)
                if found:
                    yield found[0]
                    break
            else:
                raise RuntimeError("the server did not start:\n" + "".join(lines))
        finally:
            server.terminate()
            server.communicate(timeout=20)
