"""What a setting means: who learns from what, with which weights it begins."""

from __future__ import annotations

import pytest
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.transfer import (
    Run,
    choose_tests,
    measure_runs,
    pick_languages,
    plan_runs,
)
from calque.evaluation.records import LanguageScores
from calque.evaluation.settings import TaskSettings

TRAINABLE, TESTS = ["vi", "en"], ["de", "en", "vi"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("zero-shot", [Run(("en",), ("de", "en", "vi"))]),
        ("features", [Run(("en",), ("de", "en", "vi"))]),
        ("translate-train-all", [Run(("en", "vi"), ("de", "en", "vi"))]),
        ("supervised", [Run(("en",), ("en",)), Run(("vi",), ("vi",))]),
    ],
)
def test_runs_of_settings(setting: str, expected: list[Run]) -> None:
    settings = TaskSettings(setting=setting)  # type: ignore[arg-type]
    assert plan_runs(settings, TRAINABLE, TESTS) == expected
    names = {name for run in expected for name in run.tests}
    found = choose_tests(settings, TRAINABLE, TESTS)
    assert found[0] == "en" and set(found) == names


def test_any_language_may_be_the_source() -> None:
    assert plan_runs(TaskSettings(source="vi"), TRAINABLE, TESTS)[0].sources == ("vi",)
    assert choose_tests(TaskSettings(source="vi"), TRAINABLE, TESTS) == ["vi", "de", "en"]


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(InputError, match=r"source 'fr' \(set source to one of: en vi\)"):
        plan_runs(TaskSettings(source="fr"), TRAINABLE, TESTS)
    with pytest.raises(InputError, match="none of the languages has files to learn from"):
        plan_runs(TaskSettings(setting="supervised"), TRAINABLE, ["de"])
    with pytest.raises(InputError, match="no language has files"):
        plan_runs(TaskSettings(setting="translate-train-all"), [], ["de"])
    with pytest.raises(InputError, match="only en has files to learn from: that is no translate"):
        plan_runs(TaskSettings(setting="translate-train-all"), ["en"], ["de", "en"])
    with pytest.raises(InputError, match="no language to test in"):
        plan_runs(TaskSettings(), TRAINABLE, [])
    with pytest.raises(InputError, match=r"nothing to test 'fr' on \(choose from: de en\)"):
        pick_languages(["de", "en"], ["fr"], "data")
    assert pick_languages(["de", "en"], ["en"], "data") == ["en"]
    assert pick_languages(["de", "en"], None, "data") == ["de", "en"]


def test_every_run_begins_with_the_same_weights() -> None:
    model = torch.nn.Linear(2, 2)
    begun, told = [], list[tuple[int, int]]()

    def measure(run: Run, on_progress: object) -> list[LanguageScores]:
        begun.append(model.weight.detach().clone())
        with torch.no_grad():
            model.weight += 1
        on_progress(3, 4)  # type: ignore[operator]
        return [LanguageScores(run.tests[0], {"las": 1.0}, 1)]

    runs = [Run(("en",), ("en",)), Run(("vi",), ("vi",))]
    outcomes = measure_runs(model, runs, measure, lambda done, total: told.append((done, total)))
    assert [outcome.language for outcome in outcomes] == ["en", "vi"]
    assert torch.equal(begun[0], begun[1])
    assert told == [(3, 8), (7, 8)]
