"""Items: contributions that add up, errors against resampling, resampling against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar

from calque.report import bootstrap as item_bootstrap
from calque.report.bootstrap import (
    ItemTable,
    item_contributions,
    measure_item_errors,
    resample_scores,
)
from calque.report.statistics import p_value


def draw_table(seed: int, n_seeds: int, n_items: int, rate: float = 0.6) -> ItemTable:
    """F1-like items: twice the hits above, predicted and gold spans below."""
    generator = np.random.default_rng(seed)
    gold = np.tile(generator.integers(1, 6, n_items), (n_seeds, 1))
    predicted = generator.integers(0, 6, (n_seeds, n_items))
    hits = generator.binomial(np.minimum(gold, predicted), rate)
    return ItemTable(2.0 * hits, (gold + predicted).astype(float))


def mark_hits(*rows: list[int]) -> ItemTable:
    hits = np.array(rows, float)
    return ItemTable(hits, np.ones_like(hits))


@given(st.integers(0, 99), st.integers(1, 4), st.integers(2, 30), st.floats(0, 100))
def test_contributions_add_up(seed: int, n_seeds: int, n_items: int, origin: float) -> None:
    table = draw_table(seed, n_seeds, n_items)
    sums = item_contributions(table, origin).sum(1)
    assert sums == pytest.approx(table.scores - origin, abs=1e-9)


def test_resampling_equals_scipy() -> None:
    """The percentile interval of a difference of two F1 on the same items."""
    ours, theirs = draw_table(1, 1, 150, 0.7), draw_table(2, 1, 150, 0.6)

    def difference(places: np.ndarray, axis: int) -> np.ndarray:
        sides = [
            100 * t.above[0][places].sum(axis) / t.below[0][places].sum(axis)
            for t in (ours, theirs)
        ]
        return np.asarray(sides[0] - sides[1])

    expected = stats.bootstrap(
        (np.arange(150),),
        difference,
        n_resamples=20_000,
        method="percentile",
        random_state=np.random.default_rng(3),
    )
    scores = resample_scores([ours, theirs], 20_000, np.random.default_rng(4))
    low, high = np.quantile(scores[0] - scores[1], (0.025, 0.975))
    assert low == pytest.approx(expected.confidence_interval.low, abs=0.15)
    assert high == pytest.approx(expected.confidence_interval.high, abs=0.15)
    errors = measure_item_errors({"de": ours}, {"de": theirs}, {"de": 1.0})
    assert errors.resampling.se == pytest.approx(expected.standard_error, rel=0.03)


def test_seeds_are_averaged_and_test_sets_of_equal_size_stay_aligned() -> None:
    tables = [draw_table(seed, 3, n) for seed, n in ((1, 80), (2, 80), (3, 50))]
    sides = {"de": tables[0], "fr": tables[1], "ja": tables[2]}
    others = {"de": draw_table(4, 3, 80), "fr": tables[0], "ja": draw_table(6, 3, 50)}
    weights = {"de": 0.5, "fr": -1.0, "ja": 0.25}
    errors = measure_item_errors(sides, others, weights)
    scores = resample_scores([*sides.values(), *others.values()], 20_000, np.random.default_rng(0))
    drawn = np.array(list(weights.values())) @ (scores[:3] - scores[3:])
    assert errors.resampling.se == pytest.approx(float(drawn.std()), rel=0.03)
    assert scores.mean(1) == pytest.approx(
        [t.scores.mean() for t in (*sides.values(), *others.values())], abs=0.1
    )


def test_the_test_equals_mcnemar() -> None:
    ours = mark_hits([1] * 30 + [1] * 12 + [0] * 4 + [0] * 20)
    theirs = mark_hits([1] * 30 + [0] * 12 + [1] * 4 + [0] * 20)
    error = measure_item_errors({"de": ours}, {"de": theirs}, {"de": 1.0}).testing
    difference = ours.scores[0] - theirs.scores[0]
    expected = mcnemar([[30, 12], [4, 20]], exact=False, correction=False)
    assert (difference / error.se) ** 2 == pytest.approx(expected.statistic)
    assert error.df == pytest.approx(15)
    # With t instead of the normal curve, a few items are judged more carefully.
    assert expected.pvalue < p_value(difference, error) < 0.1


def test_a_few_items_are_not_significant() -> None:
    """All three items are better: resampling has no spread, but the test does."""
    errors = measure_item_errors(
        {"de": mark_hits([1, 1, 1])}, {"de": mark_hits([0, 0, 0])}, {"de": 1.0}
    )
    assert errors.resampling.se == 0
    assert p_value(100.0, errors.testing) > 0.2
    one = measure_item_errors({"de": mark_hits([1])}, {"de": mark_hits([0])}, {"de": 1.0})
    assert math.isinf(one.resampling.se) and p_value(100.0, one.testing) == 1.0


def test_a_contrast_of_languages_that_all_changed() -> None:
    """Both languages lost 40 points, which is no evidence that their gap changed."""
    generator = np.random.default_rng(5)
    lengths = {"en": generator.integers(1, 40, 90), "de": generator.integers(1, 40, 120)}

    def draw(rate: float) -> dict[str, ItemTable]:
        return {
            name: ItemTable(generator.binomial(below, rate)[None] * 1.0, below[None] * 1.0)
            for name, below in lengths.items()
        }

    errors = measure_item_errors(draw(0.4), draw(0.8), {"en": 1.0, "de": -1.0})
    assert errors.testing.se == pytest.approx(errors.resampling.se, rel=0.05)


def test_the_irreducible_error_is_shared_by_all_seeds() -> None:
    steady, generator = draw_table(1, 1, 400), np.random.default_rng(2)
    same = ItemTable(np.repeat(steady.above, 4, 0), np.repeat(steady.below, 4, 0))
    base = ItemTable(np.repeat(draw_table(3, 1, 400).above, 4, 0), same.below)
    errors = measure_item_errors({"de": same}, {"de": base}, {"de": 1.0})
    assert errors.irreducible.se == pytest.approx(errors.resampling.se)
    noise = ItemTable(generator.integers(0, 2, (4, 400)).astype(float), np.ones((4, 400)))
    other = ItemTable(generator.integers(0, 2, (4, 400)).astype(float), np.ones((4, 400)))
    errors = measure_item_errors({"de": noise}, {"de": other}, {"de": 1.0})
    assert errors.irreducible.se < 0.5 * errors.resampling.se


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [draw_table(1, 2, 40), draw_table(2, 2, 40), mark_hits([0, 1, 1])]
    whole = resample_scores(tables, 64, np.random.default_rng(0))
    monkeypatch.setattr(item_bootstrap, "BLOCK_ITEMS", 100)
    assert resample_scores(tables, 64, np.random.default_rng(0)) == pytest.approx(whole)


def test_a_zero_denominator_gives_a_score_of_zero() -> None:
    empty = ItemTable(np.zeros((1, 5)), np.zeros((1, 5)))
    assert resample_scores([empty], 10, np.random.default_rng(0)).tolist() == [[0.0] * 10]
    assert item_contributions(empty, 0.0).tolist() == [[0.0] * 5]
