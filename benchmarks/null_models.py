"""Verdicts on simulated models: how often each rule calls equal models unequal.

    python benchmarks/null_models.py --grids 1000
    python benchmarks/null_models.py --tiny

Each grid has 4 tasks in 3 languages, 5 seeds and 100 items per language, simulated as in
tests/report/test_null_models.py. A rule fails in a grid if it calls any model better or worse.
"""

from __future__ import annotations

import argparse
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from calque.report.comparison import Comparison

TEST = Path(__file__).parents[1] / "tests" / "report" / "test_null_models.py"
# Standard deviations of the effects of seeds and of items, in logits.
CASES = {"both": (0.1, 0.5), "seeds": (0.3, 0.2), "items": (0.01, 2.0), "no seeds": (0.0, 0.5)}
RULES: dict[str, Callable[[Comparison], bool]] = {
    "verdict": lambda c: c.category in ("helps", "hurts"),
    "one standard deviation": lambda c: c.rule in ("above", "below"),
    "paired t over seeds, p ≤ 0.05": lambda c: c.p_seeds is not None and c.p_seeds <= 0.05,
    "items alone, p ≤ 0.05": lambda c: c.p_items is not None and c.p_items <= 0.05,
    "resampled interval without 0": lambda c: (c.item_low or 0) > 0 or (c.item_high or 0) < 0,
}


def main() -> None:
    """Simulate grids and print the error rates of all rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grids", type=int, default=1000)
    parser.add_argument("--tiny", action="store_true", help="2 grids")
    options = parser.parse_args()
    n_grids = 2 if options.tiny else options.grids
    draw_grid = runpy.run_path(str(TEST))["draw_grid"]
    for case, (seeds, items) in CASES.items():
        generator, fails = np.random.default_rng(1), Counter[str]()
        for _ in range(n_grids):
            overall, cells = draw_grid(generator, shift=0.0, seeds=seeds, items=items)
            fails.update({name for name, rule in RULES.items() if any(map(rule, overall))})
            by_language = any(map(RULES["verdict"], cells))
            fails["mark by language"] += by_language
            fails["verdict or mark"] += by_language or any(map(RULES["verdict"], overall))
        for name in ("verdict", "mark by language", "verdict or mark", *list(RULES)[1:]):
            print(f"{case}: {name}: {100 * fails[name] / n_grids:.1f} % of grids")


if __name__ == "__main__":
    main()
