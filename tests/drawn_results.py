"""Results folders with random scores, as `calque evaluate` writes them, for tests of readers.

Imported with runpy.run_path, since the tests are not a package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

N_ITEMS = 120


def make_row(**changes: Any) -> dict[str, Any]:
    """Return a row with every field and some changes."""
    row = {
        "model": "base",
        "task": "pos",
        "language": "de",
        "seed": 1,
        "metric": "accuracy",
        "value": 50.0,
        "metrics": {"accuracy": 50.0},
        "n_items": N_ITEMS,
        "layers": {},
        "counts": {},
        "setting": "zero-shot",
        "source": "en",
        "higher_is_better": True,
        "config": "aa-bb-base",
        "versions": {"calque": "0.1.0", "torch": "2.11"},
        "seconds": 1.0,
        "memory_mb": 10.0,
        "device": "cpu",
        "time": "2026-01-01T00:00:00+00:00",
        "error": None,
        "items": None,
    }
    return row | changes


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "results.jsonl").write_text(text, "utf-8")
    return folder


def draw_results(
    folder: Path,
    models: Mapping[str, float],
    *,
    tasks: Sequence[str] = ("pos", "ner"),
    languages: Sequence[str] = ("en", "de", "ja"),
    seeds: Sequence[int | None] = (1, 2, 3, 4, 5),
    higher_is_better: bool = True,
    with_items: bool = True,
    draw: int = 0,
) -> list[dict[str, Any]]:
    """Write and return rows of models that are correct on `models[name]` percent of the items."""
    generator = np.random.default_rng(draw)
    (folder / "items").mkdir(parents=True, exist_ok=True)
    rows = []
    for task in tasks:
        for model, rate in models.items():
            for seed in seeds:
                luck = 0 if seed is None else generator.normal(0, 0.01)
                hits = generator.random((len(languages), N_ITEMS)) < rate / 100 + luck
                name = f"items/{len(rows)}.npz"
                arrays = {}
                for language, own in zip(languages, hits.astype(float), strict=True):
                    arrays |= {f"{language}.num": own, f"{language}.den": np.ones(N_ITEMS)}
                    rows.append(
                        make_row(
                            model=model,
                            task=task,
                            language=language,
                            seed=seed,
                            value=100 * float(own.mean()),
                            higher_is_better=higher_is_better,
                            config=f"aa-bb-{len(model):x}",
                            layers={str(k): 100 * float(own.mean()) * k / 4 for k in range(5)},
                            items=name if with_items else None,
                        )
                    )
                np.savez(folder / name, **arrays)
    write_rows(folder, rows)
    return rows
