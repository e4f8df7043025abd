"""Statistics of seeds against scipy, statsmodels and published examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.meta_analysis import effectsize_smd
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from calque.report.statistics import (
    MAX_SEEDS,
    Spread,
    StandardError,
    add_errors,
    adjust_p_values,
    count_seeds_needed,
    hedges_g,
    interval_half_width,
    one_deviation_rule,
    p_value,
    paired_error,
    power_of_test,
    sign_flip_p,
    summarize,
    welch_error,
)

# Student's (1908) sleep of ten patients under two drugs: t = 4.0621, p = 0.00283, 9 df.
DRUG_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
DRUG_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]

scores = st.floats(0, 100).map(lambda value: round(value, 3))
several = st.lists(st.tuples(scores, scores), min_size=3, max_size=9)


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_student_s_own_example() -> None:
    error = paired_error(DRUG_2, DRUG_1)
    difference = summarize(DRUG_2).mean - summarize(DRUG_1).mean
    assert difference == pytest.approx(1.58)
    assert difference / error.se == pytest.approx(4.0621, abs=1e-4)
    assert p_value(difference, error) == pytest.approx(0.00283, abs=1e-5)
    assert interval_half_width(error, 0.05) == pytest.approx(0.8799, abs=1e-3)


@given(several)
def test_the_paired_test_equals_scipy(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = map(list, zip(*pairs, strict=True))
    if np.std(np.subtract(ours, theirs)) < 1e-6:
        return
    expected = stats.ttest_rel(ours, theirs)
    error = paired_error(ours, theirs)
    difference = summarize(ours).mean - summarize(theirs).mean
    assert p_value(difference, error) == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-9)
    low, high = expected.confidence_interval(0.95)
    half = interval_half_width(error, 0.05)
    assert (difference - half, difference + half) == pytest.approx((low, high), abs=1e-6)


@given(st.lists(scores, min_size=2, max_size=8), st.lists(scores, min_size=2, max_size=8))
def test_the_unpaired_test_equals_scipy(ours: list[float], theirs: list[float]) -> None:
    if np.std(ours) < 1e-3 or np.std(theirs) < 1e-3:
        return
    expected = stats.ttest_ind(ours, theirs, equal_var=False)
    error = welch_error(summarize(ours), summarize(theirs))
    assert error.df == pytest.approx(expected.df)
    difference = summarize(ours).mean - summarize(theirs).mean
    assert p_value(difference, error) == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-9)


def test_a_model_without_seeds_against_one_with() -> None:
    error = welch_error(summarize([4.0, 5.0, 6.0]), summarize([4.0], fixed=True))
    assert error == StandardError(1 / math.sqrt(3), 2)
    assert p_value(1.0, error) == pytest.approx(stats.ttest_1samp([4, 5, 6], 4).pvalue)


@given(several)
def test_sign_flips_equal_scipy(pairs: list[tuple[float, float]]) -> None:
    differences = [a - b for a, b in pairs]
    expected = stats.permutation_test(
        (differences, np.zeros(len(differences))),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    assert sign_flip_p(differences, generator()) == pytest.approx(expected.pvalue)


def test_five_seeds_give_at_least_a_sixteenth() -> None:
    assert sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0], generator()) == 2 / 32


def test_many_seeds_are_sampled() -> None:
    differences = (np.arange(20) - 7.0).tolist()
    # The normal approximation of the same test.
    z = abs(sum(differences)) / math.sqrt(sum(each**2 for each in differences))
    p = sign_flip_p(differences, generator())
    assert p == sign_flip_p(differences, generator())
    assert p == pytest.approx(2 * stats.norm.sf(z), abs=0.01)


def test_min_f_prime_equals_clark() -> None:
    """Raaijmakers et al. (1999): min F' = F1 F2 / (F1 + F2), df = (F1+F2)² / (F1²/n2 + F2²/n1)."""
    difference, seeds, items = 2.0, StandardError(0.5, 4), StandardError(0.8, 199)
    f1, f2 = (difference / seeds.se) ** 2, (difference / items.se) ** 2
    both = add_errors(seeds, items)
    assert (difference / both.se) ** 2 == pytest.approx(f1 * f2 / (f1 + f2))
    assert both.df == pytest.approx((f1 + f2) ** 2 / (f1**2 / items.df + f2**2 / seeds.df))


def test_an_unknown_error_stays_unknown() -> None:
    """One test item has no spread: seeds do not replace it, and p is still a number."""
    both = add_errors(StandardError(1.0, 4), StandardError(math.inf, 1))
    assert both == StandardError(math.inf, 1)
    assert p_value(3.0, both) == 1.0


def test_the_rule_of_the_paper() -> None:
    """mBERT's parsing in Wu and Dredze's Table 1: weak alignment counts as better there."""
    mbert = Spread(52.6, 0.4, 5)
    assert one_deviation_rule(Spread(53.1, 0.6, 5), mbert) == "above"
    assert one_deviation_rule(Spread(52.2 + 0.1, 0.7, 5), mbert) == "within"
    assert one_deviation_rule(Spread(51.0, 0.7, 5), mbert) == "below"
    assert one_deviation_rule(Spread(53.1, 0.6, 5), mbert, 0.6) == "within"
    assert one_deviation_rule(Spread(51.0, 0.7, 5), Spread(52.6, None, 1)) is None
    assert one_deviation_rule(Spread(51.0, 0.7, 5), summarize([52.6], fixed=True)) is None


@pytest.mark.parametrize(("ours", "method"), [("holm", "holm"), ("bh", "fdr_bh")])
@settings(max_examples=15)  # statsmodels collects garbage at each call
@given(ps=st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_corrections_equal_statsmodels(ours: str, method: str, ps: list[float]) -> None:
    expected = multipletests(ps, method=method)[1]
    assert adjust_p_values(ps, ours) == pytest.approx(expected.tolist())  # type: ignore[arg-type]


def test_no_correction() -> None:
    assert adjust_p_values([0.2, 0.01], "none") == [0.2, 0.01]
    assert adjust_p_values([], "holm") == []


def test_hedges_g() -> None:
    ours, theirs = [5.0, 7.0, 6.5, 8.0], [4.0, 4.5, 6.0, 5.0]
    pooled = math.sqrt((np.var(ours, ddof=1) + np.var(theirs, ddof=1)) / 2)
    exact = math.gamma(3) / (math.sqrt(3) * math.gamma(2.5))
    g = hedges_g(summarize(ours), summarize(theirs))
    assert g == pytest.approx((np.mean(ours) - np.mean(theirs)) / pooled * exact)
    # statsmodels takes the bias off by 1 − 3 / (4n − 9), which is close to the exact factor.
    sides = [(np.mean(x), np.std(x, ddof=1), 4) for x in (ours, theirs)]
    assert g == pytest.approx(effectsize_smd(*sides[0], *sides[1])[0], rel=0.005)
    assert hedges_g(summarize([1.0]), summarize(theirs)) is None


@pytest.mark.parametrize("effect", [0.3, 0.6, 1.2, 3.0])
@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_seeds_needed_equal_statsmodels(effect: float, alpha: float) -> None:
    expected = TTestPower().solve_power(effect_size=effect, alpha=alpha, power=0.8)
    found = count_seeds_needed(effect * 2.5, 2.5, None, alpha)
    assert found == math.ceil(expected - 1e-6)


def test_power_equals_statsmodels() -> None:
    expected = TTestPower().power(effect_size=0.9, nobs=8, alpha=0.05)
    assert power_of_test(0.9, StandardError(1 / math.sqrt(8), 7), 0.05) == pytest.approx(expected)
    # Where the noncentral t cannot be computed, all is seen.
    assert power_of_test(1e4, StandardError(1.0, 7), 0.05) == pytest.approx(1.0)


def test_no_number_of_seeds_is_enough() -> None:
    assert count_seeds_needed(0.0, 1.0, None, 0.05) is None
    assert count_seeds_needed(1e-4, 1.0, None, 0.05) is None
    few_items = StandardError(1.0, 99)
    assert count_seeds_needed(1.0, 0.5, lambda n: few_items, 0.05) is None
    many_items = count_seeds_needed(1.0, 0.5, lambda n: StandardError(0.2, 9999), 0.05)
    alone = count_seeds_needed(1.0, 0.5, None, 0.05)
    assert many_items is not None and alone is not None
    assert MAX_SEEDS > many_items >= alone


@given(several, st.floats(-50, 50))
def test_a_shift_of_all_scores_changes_nothing(
    pairs: list[tuple[float, float]], shift: float
) -> None:
    ours, theirs = map(list, zip(*pairs, strict=True))
    before = paired_error(ours, theirs)
    after = paired_error([a + shift for a in ours], [b + shift for b in theirs])
    assert after.se == pytest.approx(before.se, abs=1e-6)


@given(st.permutations(range(6)))
def test_the_order_of_seeds_does_not_matter(order: list[int]) -> None:
    ours, theirs = [3.0, 5.0, 4.0, 8.0, 1.0, 2.0], [2.0, 2.5, 4.5, 6.0, 0.0, 3.0]
    mixed = [ours[k] for k in order], [theirs[k] for k in order]
    assert paired_error(*mixed).se == pytest.approx(paired_error(ours, theirs).se)
    differences = [a - b for a, b in zip(*mixed, strict=True)]
    unmixed = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert sign_flip_p(differences, generator()) == sign_flip_p(unmixed, generator())


def test_a_constant_difference_is_not_significant() -> None:
    """Two seeds of coarse scores: the paired deviation is 0, that of the scores is not."""
    error = paired_error([50.0, 60.0], [40.0, 50.0])
    assert error.se == pytest.approx(math.sqrt(50))
    assert p_value(10.0, error) > 0.2
    assert p_value(0.0, StandardError(0.0, 4)) == 1.0
