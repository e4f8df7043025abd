"""Settings: which languages are trained on and tested, and from which weights runs start."""

from __future__ import annotations

import pytest
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.transfer import (
    TransferRun,
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
        ("zero-shot", [TransferRun(("en",), ("de", "en", "vi"))]),
        ("features", [TransferRun(("en",), ("de", "en", "vi"))]),
        ("translate-train-all", [TransferRun(("en", "vi"), ("de", "en", "vi"))]),
        ("supervised", [TransferRun(("en",), ("en",)), TransferRun(("vi",), ("vi",))]),
    ],
)
def test_runs_of_settings(setting: str, expected: list[TransferRun]) -> None:
    settings = TaskSettings(setting=setting)  # type: ignore[arg-type]
    assert plan_runs(settings, TRAINABLE, TESTS) == expected
    names = {name for run in expected for name in run.tests}
    found = choose_tests(settings, TRAINABLE, TESTS)
    assert found[0] == "en" and set(found) == names


def test_directions() -> None:
    settings = TaskSettings(setting="directions")
    found = choose_tests(settings, TRAINABLE, TESTS)
    assert found == ["en-de", "en-en", "en-vi", "vi-de", "vi-en", "vi-vi"]
    runs = plan_runs(settings, TRAINABLE, ["vi-de", "en-vi", "vi-en"])
    assert runs == [TransferRun(("vi",), ("de", "en"), True), TransferRun(("en",), ("vi",), True)]
    assert [run.name(test) for run in runs for test in run.tests] == ["vi-de", "vi-en", "en-vi"]
    with pytest.raises(InputError, match="no language has training files"):
        choose_tests(settings, [], TESTS)


def test_any_language_may_be_the_source() -> None:
    assert plan_runs(TaskSettings(source="vi"), TRAINABLE, TESTS)[0].sources == ("vi",)
    assert choose_tests(TaskSettings(source="vi"), TRAINABLE, TESTS) == ["vi", "de", "en"]


def test_impossible_runs_are_errors() -> None:
    with pytest.raises(
        InputError, match=r"'fr' has no training file \(set source to one of: en vi\)"
    ):
        plan_runs(TaskSettings(source="fr"), TRAINABLE, TESTS)
    with pytest.raises(InputError, match="none of the languages has training files"):
        plan_runs(TaskSettings(setting="supervised"), TRAINABLE, ["de"])
    with pytest.raises(InputError, match="no language has training files"):
        plan_runs(TaskSettings(setting="translate-train-all"), [], ["de"])
    with pytest.raises(InputError, match="needs several languages, but only en has files"):
        plan_runs(TaskSettings(setting="translate-train-all"), ["en"], ["de", "en"])
    with pytest.raises(InputError, match="no language to test"):
        plan_runs(TaskSettings(), TRAINABLE, [])
    with pytest.raises(InputError, match=r"no test for 'fr' \(choose from: de en\)"):
        pick_languages(["de", "en"], ["fr"], "data")
    assert pick_languages(["de", "en"], ["en"], "data") == ["en"]
    assert pick_languages(["de", "en"], None, "data") == ["de", "en"]


def test_every_run_starts_from_the_same_weights() -> None:
    model = torch.nn.Linear(2, 2)
    initial, reported = [], list[tuple[int, int]]()

    def measure(run: TransferRun, on_progress: object) -> list[LanguageScores]:
        initial.append(model.weight.detach().clone())
        with torch.no_grad():
            model.weight += 1
        on_progress(3, 4)  # type: ignore[operator]
        return [LanguageScores(run.tests[0], {"las": 1.0}, 1)]

    runs = [TransferRun(("en",), ("en",)), TransferRun(("vi",), ("vi",))]
    outcomes = measure_runs(
        model, runs, measure, lambda done, total: reported.append((done, total))
    )
    assert [outcome.language for outcome in outcomes] == ["en", "vi"]
    assert torch.equal(initial[0], initial[1])
    assert reported == [(3, 8), (7, 8)]
