"""Verdicts on simulated models: rates of false positives and of detection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from calque.report.bootstrap import ItemTable
from calque.report.comparison import ComparisonSettings, compare_pairs
from calque.report.difference import Difference, ModelScores, PairedScores
from calque.report.verdict import assign_verdicts

N_GRIDS, N_TASKS, LANGUAGES, N_ITEMS, N_SEEDS = 150, 4, ("en", "de", "ja"), 100, 5
JUDGING = ComparisonSettings(n_resamples=100)


def draw_side(
    name: str,
    ease: np.ndarray,
    generator: np.random.Generator,
    *,
    shift: float,
    seeds: float,
    items: float,
) -> ModelScores:
    """A model is right on an item with a chance of the item, the model's own way, and the seed.

    Without a deviation of seeds there are none: one model, scored as it is.
    """
    n_seeds = N_SEEDS if seeds else 1
    own = generator.normal(0, items, ease.shape)
    luck = generator.normal(0, seeds, (n_seeds, 1, 1))
    luck = luck + generator.normal(0, seeds, (n_seeds, len(ease), 1))
    chance = 1 / (1 + np.exp(-(ease + own + shift + luck)))
    hits = (generator.random(chance.shape) < chance).astype(float)
    ones = np.ones((n_seeds, N_ITEMS))
    tables = {name: ItemTable(hits[:, k], ones) for k, name in enumerate(LANGUAGES)}
    numbers = tuple(range(n_seeds)) if seeds else (None,)
    return ModelScores(name, numbers, 100 * hits.mean(2), tables, fixed=not seeds)


def draw_grid(
    generator: np.random.Generator, *, shift: float, seeds: float, items: float
) -> tuple[list[Difference], list[Difference]]:
    """Compare two models on a grid of tasks and languages: by task, and by language."""
    overall, cells = [], []
    for task in range(N_TASKS):
        ease = generator.normal(0.8, 1.2, (len(LANGUAGES), N_ITEMS))
        sides = [
            draw_side(name, ease, generator, shift=by, seeds=seeds, items=items)
            for name, by in (("new", shift), ("old", 0.0))
        ]
        pair = PairedScores(str(task), LANGUAGES, True, "en", sides[0], sides[1], paired=True)
        study = compare_pairs({"new": pair}, JUDGING, generator)["new"]
        overall.append(study.overall)
        cells += study.languages.values()
    return (
        assign_verdicts(overall, alpha=0.05, correction="holm"),
        assign_verdicts(cells, alpha=0.05, correction="holm"),
    )


def is_alarm(comparisons: Sequence[Difference]) -> bool:
    return any(each.category in ("helps", "hurts") for each in comparisons)


@pytest.mark.parametrize(
    ("seeds", "items"), [(0.1, 0.5), (0.3, 0.2), (0.01, 2.0)], ids=["both", "seeds", "items"]
)
def test_equal_models_are_called_equal(seeds: float, items: float) -> None:
    """At most 1 of 20 grids has a false positive.

    A test that looks at one source of chance alone calls it far too often where the other rules:
    that is why a verdict needs both.
    """
    generator = np.random.default_rng(20)
    grids = [draw_grid(generator, shift=0.0, seeds=seeds, items=items) for _ in range(N_GRIDS)]
    most = stats.binom.ppf(0.99, N_GRIDS, 0.05)
    assert sum(is_alarm(overall) for overall, _ in grids) <= most
    assert sum(is_alarm(cells) for _, cells in grids) <= most
    every = [each for overall, _ in grids for each in overall]
    covered = sum(each.low <= 0 <= each.high for each in every if each.low is not None)
    assert covered >= stats.binom.ppf(0.01, len(every), 0.95)
    naive = [each.p_items if seeds > items else each.p_seeds for each in every]
    if max(seeds, items) > 0.2 and seeds != 0.1:
        n_naive = sum(p is not None and p <= 0.05 for p in naive)
        assert n_naive > stats.binom.ppf(0.9999, len(every), 0.05)


def test_equal_models_without_seeds_are_called_equal() -> None:
    generator = np.random.default_rng(22)
    grids = [draw_grid(generator, shift=0.0, seeds=0.0, items=0.5) for _ in range(N_GRIDS)]
    most = stats.binom.ppf(0.99, N_GRIDS, 0.05)
    assert sum(is_alarm(overall) for overall, _ in grids) <= most
    assert sum(is_alarm(cells) for _, cells in grids) <= most
    raw = [each.p for overall, _ in grids for each in overall if each.p is not None]
    low, high = stats.binom.ppf([0.005, 0.995], len(raw), 0.05)
    assert low <= sum(p <= 0.05 for p in raw) <= high  # exact, not merely careful


def test_a_better_model_is_called_better() -> None:
    generator = np.random.default_rng(21)
    grids = [draw_grid(generator, shift=0.8, seeds=0.1, items=0.3) for _ in range(20)]
    found = [each.category for overall, _ in grids for each in overall]
    assert found.count("helps") >= 0.9 * len(found)
    assert "hurts" not in found
