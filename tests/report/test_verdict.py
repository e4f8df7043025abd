"""Verdicts in words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from statsmodels.stats.power import TTestPower

from calque.report.bootstrap import ItemErrors
from calque.report.difference import Difference
from calque.report.statistics import Spread, StandardError
from calque.report.verdict import (
    assign_verdicts,
    summarize_verdicts,
    verdict_name,
    verdict_sentence,
)


def make(p: float | None = 0.5, **changes: Any) -> Difference:
    """Return a difference of +0.4 [−0.2, 1.0] with five seeds."""
    given = {
        "task": "ner",
        "name": "mean",
        "scope": "mean",
        "higher_is_better": True,
        "model": Spread(68.1, 1.0, 5),
        "baseline": Spread(67.7, 1.3, 5),
        "difference": 0.4,
        "low": -0.2,
        "high": 1.0,
        "p": p,
        "item_low": 0.1,
        "item_high": 0.7,
        "n_items": 9000,
        "deviation": 0.64,
        "item_errors": ItemErrors(
            StandardError(0.01, 8999), StandardError(0.01, 500), StandardError(0.01, 8999)
        ),
    }
    return Difference(**(given | changes))


def word(comparison: Difference, *family: Difference) -> str:
    judged = assign_verdicts([comparison, *family], alpha=0.05, correction="holm")[0]
    return verdict_sentence(judged, "weak", correction="holm")


def test_within_noise() -> None:
    # With so many items seeds alone decide.
    needed = TTestPower().solve_power(0.4 / 0.64, alpha=0.05, power=0.8)
    assert math.ceil(needed) == 23
    assert word(make(0.13)) == (
        "weak: +0.4 [−0.2, 1.0] on ner: within noise with 5 seeds;"
        " 23 seeds would be needed to detect it"
    )


def test_helps_and_hurts() -> None:
    assert word(make(0.0004, low=0.2)) == (
        "weak: +0.4 [0.2, 1.0] on ner: helps (5 seeds; p < 0.001)"
    )
    worse = make(0.01, difference=-0.4, low=-0.6, high=-0.2, item_low=-0.5, item_high=-0.1)
    assert word(worse, make(0.5), make(None)) == (
        "weak: −0.4 [−0.6, −0.2] on ner: hurts (5 seeds; p = 0.020 after 2 tests)"
    )
    assert "hurts" in word(make(0.01, higher_is_better=False))


def test_correction_revokes_a_verdict() -> None:
    text = word(make(0.03, low=0.1), make(0.5), make(0.7))
    assert "within noise with 5 seeds, corrected for 3 tests; " in text


def test_resampled_items_must_agree() -> None:
    (judged,) = assign_verdicts([make(0.01, item_low=-0.1)], alpha=0.05, correction="holm")
    assert judged.category == "within noise"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"p": None, "model": Spread(68.1, None, 1), "baseline": Spread(67.7, None, 1)},
            "one seed is not enough for a verdict",
        ),
        (
            {
                "p": None,
                "model": Spread(68.1, 0.0, 1, True),
                "baseline": Spread(67.7, 0.0, 1, True),
                "item_errors": None,
            },
            "a verdict needs seeds or test items",
        ),
        ({"n_items": 0, "item_errors": None}, "5 seeds, without test items; 23 seeds"),
        ({"paired": False}, "within noise with 5 seeds per model, unpaired"),
        ({"difference": 0.001}, "the difference is close to zero"),
        ({"deviation": 9.0}, "more than 1,000 seeds would be needed"),
        (
            {
                "item_errors": ItemErrors(
                    StandardError(0.3, 500), StandardError(0.3, 90), StandardError(0.2, 500)
                )
            },
            "no number of seeds would detect it on these items: about 2.0 times as many",
        ),
        (
            {
                "model": Spread(68.1, 0.0, 1, True),
                "baseline": Spread(67.7, 0.0, 1, True),
                "deviation": None,
                "item_errors": ItemErrors(
                    StandardError(0.2, 500), StandardError(0.3, 90), StandardError(0.2, 500)
                ),
            },
            "within noise with 9,000 test items, no seeds; about 2.0 times as many test items",
        ),
        ({"difference": 0.0, "low": 0.0, "high": 0.0}, "there is no difference"),
        ({"deviation": 0.05}, "a few more seeds would decide"),
    ],
)
def test_what_would_be_needed(changes: dict[str, Any], words: str) -> None:
    assert words in word(replace(make(), **changes))


def test_gaps_narrow_and_widen() -> None:
    narrowed = make(
        0.001, scope="gap", difference=-0.4, low=-0.6, high=-0.2, item_low=-0.5, item_high=-0.1
    )
    (judged,) = assign_verdicts([narrowed], alpha=0.05, correction="none")
    assert (judged.category, verdict_name(judged)) == ("helps", "narrowed")
    assert verdict_sentence(judged, "weak", correction="none") == (
        "weak: −0.4 [−0.6, −0.2] on the gap of ner: narrowed (5 seeds; p = 0.001)"
    )
    # Of errors too: gaps are turned so that above 0 is behind the source.
    (judged,) = assign_verdicts(
        [replace(narrowed, higher_is_better=False)], alpha=0.05, correction="none"
    )
    assert verdict_name(judged) == "narrowed"


def test_families() -> None:
    judged = assign_verdicts([make(0.03), make(None), make(0.02)], alpha=0.05, correction="bh")
    assert [each.p_adjusted for each in judged] == [0.03, None, 0.03]
    assert [each.n_tests for each in judged] == [2, 2, 2]
    assert [each.category for each in judged] == ["helps", "cannot tell", "helps"]
    assert (
        summarize_verdicts(judged, "weak")
        == "weak, 3 tasks: helps on 2, hurts on 0, cannot tell on 1"
    )
