"""Comparing models: seconds and memory of resampling test items, and of a whole comparison.

    python benchmarks/comparing.py
    python benchmarks/comparing.py --tiny

40 languages of 10,000 items, 5 seeds, two models, 10,000 resamples. Test sets of equal size, such
as translated ones, share their resamples; those of 40 sizes cannot. Accuracies have the same
denominators for all seeds, F1 has different ones for each.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from calque.report.bootstrap import ItemTable
from calque.report.comparison import ComparisonSettings, compare_pairs
from calque.report.difference import ModelScores, PairedScores


def simulate_scores(
    name: str, sizes: list[int], n_seeds: int, generator: np.random.Generator, *, f1: bool
) -> ModelScores:
    """Return random scores of a model whose test sets have the given sizes."""
    tables = {}
    for number, n_items in enumerate(sizes):
        shape = (n_seeds, n_items)
        if f1:
            gold = np.tile(generator.integers(1, 5, n_items), (n_seeds, 1))
            found = generator.integers(0, 5, shape)
            hits = generator.binomial(np.minimum(gold, found), 0.7)
            tables[f"l{number}"] = ItemTable(2.0 * hits, (gold + found).astype(float))
        else:
            hits = (generator.random(shape) < 0.7).astype(float)
            tables[f"l{number}"] = ItemTable(hits, np.ones(shape))
    values = np.stack([table.scores for table in tables.values()], axis=1)
    return ModelScores(name, tuple(range(n_seeds)), values, tables, fixed=False)


def main() -> None:
    """Compare two models in four cases and print the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--languages", type=int, default=40)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--resamples", type=int, default=10_000)
    parser.add_argument("--tiny", action="store_true", help="3 languages of 50 items")
    options = parser.parse_args()
    if options.tiny:
        options.languages, options.items, options.seeds, options.resamples = 3, 50, 2, 100
    settings = ComparisonSettings(n_resamples=options.resamples)
    for f1 in (False, True):
        for step in (0, 1):
            sizes = [options.items + step * number for number in range(options.languages)]
            generator = np.random.default_rng(0)
            sides = [
                simulate_scores(name, sizes, options.seeds, generator, f1=f1)
                for name in ("new", "old")
            ]
            languages = tuple(sides[0].tables)
            pair = PairedScores("task", languages, True, None, sides[0], sides[1], paired=True)
            start, cpu = time.perf_counter(), time.process_time()
            compare_pairs({"new": pair}, settings, generator)
            wall, cpu = time.perf_counter() - start, time.process_time() - cpu
            kind, size = "F1" if f1 else "accuracy", "many sizes" if step else "one size"
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"{kind}, {size}: {cpu:.1f} s of CPU, {wall:.1f} s; peak {peak:,.0f} MB")


if __name__ == "__main__":
    main()
