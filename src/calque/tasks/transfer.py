"""Settings as runs: in which languages a model learns, and in which it is tested after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from calque.types import InputError

if TYPE_CHECKING:
    from torch import nn

    from calque.tasks.outcome import Outcome
    from calque.tasks.task_settings import TaskSettings

OnProgress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Run:
    """Languages to learn in, all at once, and languages to test in."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


def plan_runs(settings: TaskSettings, trainable: Sequence[str], tests: Sequence[str]) -> list[Run]:
    """Say what the setting of a task means for the languages there are files of.

    >>> from calque.tasks.task_settings import TaskSettings
    >>> plan_runs(TaskSettings(setting="supervised"), ["en", "vi"], ["de", "en", "vi"])
    [Run(sources=('en',), tests=('en',)), Run(sources=('vi',), tests=('vi',))]
    """
    if not tests:
        raise InputError("no language to test in", fix="give a folder with tests")
    if settings.setting == "supervised":
        runs = [Run((name,), (name,)) for name in tests if name in trainable]
        if not runs:
            raise InputError(
                "none of the languages has files to learn from",
                fix=f"choose from: {' '.join(sorted(trainable))}, or another setting",
            )
        return runs
    if settings.setting == "translate-train-all":
        if not trainable:
            raise InputError("no language has files to learn from", fix="add a training file")
        if len(set(trainable)) < 2:
            problem = f"only {trainable[0]} has files to learn from: that is no translate-train-all"
            raise InputError(problem, fix="add translations, or choose another setting")
        return [Run(tuple(sorted(trainable)), tuple(tests))]
    if settings.source not in trainable:
        fix = f"set source to one of: {' '.join(sorted(trainable))}" if trainable else "add one"
        raise InputError(f"no file to learn from in the source {settings.source!r}", fix=fix)
    return [Run((settings.source,), tuple(tests))]


def choose_tests(
    settings: TaskSettings, trainable: Sequence[str], tests: Sequence[str]
) -> list[str]:
    """List the languages that can be tested in a setting, the source first."""
    runs = plan_runs(settings, trainable, tests)
    names = sorted({name for run in runs for name in run.tests})
    return sorted(names, key=lambda name: name != settings.source)


def pick_languages(known: Sequence[str], asked: Sequence[str] | None, data: object) -> list[str]:
    """Take those that are asked for, in the order they are known in; an unknown one is an error."""
    for name in asked or ():
        if name not in known:
            fix = f"choose from: {' '.join(known)}"
            raise InputError(f"nothing to test {name!r} on", file=data, fix=fix)
    return [name for name in known if asked is None or name in asked]


def measure_runs(
    encoder: nn.Module,
    runs: Sequence[Run],
    measure: Callable[[Run, OnProgress], list[Outcome]],
    on_progress: OnProgress = lambda done, total: None,
) -> list[Outcome]:
    """Measure run after run; each of several begins with the encoder's weights as they came."""
    kept = {name: value.clone() for name, value in encoder.state_dict().items()}
    outcomes: list[Outcome] = []
    for number, run in enumerate(runs):
        if number:
            with torch.no_grad():
                encoder.load_state_dict(kept)
        outcomes += measure(run, partial(tell_part, on_progress, number, len(runs)))
    return outcomes


def tell_part(on_progress: OnProgress, number: int, n_parts: int, done: int, total: int) -> None:
    """Tell the progress of one of several parts that are taken to be of the same length."""
    on_progress(number * total + done, n_parts * total)
