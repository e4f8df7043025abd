"""Transfer between languages: which languages each run of a setting trains on and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from calque.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from calque.evaluation.records import LanguageScores
    from calque.evaluation.settings import TaskSettings

OnProgress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TransferRun:
    """Languages to train on, all at once, and languages to test.

    The scores of a `directed` run are those of en-de and so on instead of de.
    """

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    directed: bool = False

    def name(self, test: str) -> str:
        """Return the name of the scores of a test."""
        return f"{self.sources[0]}-{test}" if self.directed else test


def plan_runs(
    settings: TaskSettings, trainable: Sequence[str], tests: Sequence[str]
) -> list[TransferRun]:
    """Return the runs that a setting requires for the available languages.

    >>> from calque.evaluation.settings import TaskSettings
    >>> runs = plan_runs(TaskSettings(setting="supervised"), ["en", "vi"], ["de", "en", "vi"])
    >>> [(run.sources, run.tests) for run in runs]
    [(('en',), ('en',)), (('vi',), ('vi',))]
    """
    if not tests:
        raise InputError("there is no language to test", fix="pass a folder with test files")
    if settings.setting == "supervised":
        runs = [TransferRun((name,), (name,)) for name in tests if name in trainable]
        if not runs:
            raise InputError(
                "none of the languages has training files",
                fix=f"choose from: {' '.join(sorted(trainable))}, or use another setting",
            )
        return runs
    if settings.setting == "directions":
        directions = [name.partition("-")[::2] for name in tests]
        return [
            TransferRun((source,), tuple(test for s, test in directions if s == source), True)
            for source in dict.fromkeys(source for source, _ in directions)
        ]
    if settings.setting == "translate-train-all":
        if not trainable:
            raise InputError("no language has training files", fix="add a training file")
        if len(set(trainable)) < 2:
            problem = (
                f"translate-train-all needs several languages, but only {trainable[0]} has files"
            )
            raise InputError(problem, fix="add translations, or use another setting")
        return [TransferRun(tuple(sorted(trainable)), tuple(tests))]
    if settings.source not in trainable:
        fix = f"set source to one of: {' '.join(sorted(trainable))}" if trainable else "add one"
        raise InputError(f"the source language {settings.source!r} has no training file", fix=fix)
    return [TransferRun((settings.source,), tuple(tests))]


def choose_tests(
    settings: TaskSettings, trainable: Sequence[str], tests: Sequence[str]
) -> list[str]:
    """Return the languages or directions that can be tested in a setting, the source first."""
    if settings.setting == "directions":
        if not trainable:
            raise InputError("no language has training files", fix="add a training file")
        tests = [f"{source}-{test}" for source in sorted(trainable) for test in tests]
        return sorted(tests, key=lambda name: not name.startswith(f"{settings.source}-"))
    runs = plan_runs(settings, trainable, tests)
    names = sorted({name for run in runs for name in run.tests})
    return sorted(names, key=lambda name: name != settings.source)


def pick_languages(known: Sequence[str], asked: Sequence[str] | None, data: object) -> list[str]:
    """Return the requested languages in the order of `known`; an unknown one is an error."""
    for name in asked or ():
        if name not in known:
            fix = f"choose from: {' '.join(known)}"
            raise InputError(f"there is no test for {name!r}", file=data, fix=fix)
    return [name for name in known if asked is None or name in asked]


def measure_runs(
    encoder: nn.Module,
    runs: Sequence[TransferRun],
    measure: Callable[[TransferRun, OnProgress], list[LanguageScores]],
    on_progress: OnProgress = lambda done, total: None,
) -> list[LanguageScores]:
    """Measure all runs; each one starts from the original weights of the encoder."""
    kept = {name: value.clone() for name, value in encoder.state_dict().items()}
    outcomes: list[LanguageScores] = []
    for number, run in enumerate(runs):
        if number:
            with torch.no_grad():
                encoder.load_state_dict(kept)
        found = measure(run, partial(report_part, on_progress, number, len(runs)))
        outcomes += [replace(scores, language=run.name(scores.language)) for scores in found]
    return outcomes


def report_part(on_progress: OnProgress, number: int, n_parts: int, done: int, total: int) -> None:
    """Report the progress of one of several parts that are assumed to have the same length."""
    on_progress(number * total + done, n_parts * total)
