"""Word vectors of many languages, mapped into one space around a pivot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.align.mapping import Pairs, Step, apply_map, solve_joint
from calque.align.self_learning import Round
from calque.align.similarity import normalize_rows
from calque.models.static import WordVectors
from calque.tools.map_trials import (
    UNALIGNED,
    Attempt,
    MapSettings,
    NormalSpace,
    Task,
    Trial,
    choose,
    measure,
    try_method,
    try_unaligned,
)
from calque.tools.seed_dictionaries import SeedDictionary
from calque.types import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

OnRound = Callable[[str, str, Round | None], None]
PIVOT = "pivot"


@dataclass(frozen=True, slots=True)
class LanguageReport:
    """What was chosen for a language and why, and P@1 in the space that all share.

    Of the `n_train_entries` and `n_dev_entries` of its dictionaries, `n_train` and `n_dev` have
    vectors on both sides. `n_zero` words have a vector of zeros, which stays; `n_duplicates`
    repeated ones were left out when the vectors were read.
    """

    language: str
    n_words: int
    n_zero: int
    n_duplicates: int
    chosen: str
    reason: str
    trials: list[Trial]
    n_train: int = 0
    n_train_entries: int = 0
    n_dev: int = 0
    n_dev_entries: int = 0
    precision: float | None = None


@dataclass(frozen=True, slots=True)
class SpaceMap:
    """The way of one language's vectors: scaled, less their mean, scaled, times a matrix."""

    mean: Float[Tensor, "hidden"]
    weight: Float[Tensor, "hidden hidden"]
    steps: tuple[Step, ...]

    def apply(self, rows: Float[Tensor, "words hidden"]) -> Float[Tensor, "words hidden"]:
        """Map rows, which may be of words that had no part in finding the map."""
        known = rows.any(dim=1, keepdim=True)
        for step in self.steps:
            rows = normalize_rows(rows) if step == "unit" else (rows - self.mean) * known
        return apply_map(rows, self.weight)


@dataclass(frozen=True, slots=True)
class MappedSpaces:
    """The maps of all languages into one space, and what was chosen for each."""

    pivot: str
    maps: dict[str, SpaceMap]
    reports: list[LanguageReport]

    def apply(self, language: str, vectors: WordVectors) -> WordVectors:
        """Map the vectors of a language."""
        space_map = self.maps[language]
        matrix = torch.from_numpy(np.asarray(vectors.matrix)).to(space_map.mean.device)
        return replace(vectors, matrix=space_map.apply(matrix).cpu().numpy())


@dataclass(frozen=True, slots=True)
class _Known:
    """The rows of a dictionary's entries, None without a dictionary, and the number of all."""

    pairs: Pairs | None = None
    n_entries: int = 0

    @property
    def n_pairs(self) -> int:
        return 0 if self.pairs is None else len(self.pairs)


@dataclass(frozen=True, slots=True)
class _Decision:
    report: LanguageReport
    attempt: Attempt
    mean: Float[Tensor, "hidden"]
    dev: Pairs | None

    @property
    def is_aligned(self) -> bool:
        return self.attempt.trial.method != UNALIGNED


def map_spaces(
    spaces: Mapping[str, WordVectors],
    pivot: str,
    settings: MapSettings,
    *,
    train: Mapping[str, SeedDictionary] | None = None,
    dev: Mapping[str, SeedDictionary] | None = None,
    on_round: OnRound = lambda language, method, number: None,
) -> MappedSpaces:
    """Map all languages into one space, each by what serves it best.

    Two languages at a time are in memory. Where a development dictionary shows that no method
    helps, a language keeps its vectors, which go the pivot's way (Hämmerl et al., 2022).
    """
    _check(spaces, pivot)
    learned, judged = (_look_up(each or {}, spaces, pivot) for each in (train, dev))
    center = NormalSpace.of(pivot, spaces[pivot], settings)
    decisions = {
        language: _decide(
            center,
            NormalSpace.of(language, vectors, settings),
            settings,
            learned.get(language, _Known()),
            judged.get(language, _Known()),
            on_round,
        )
        for language, vectors in spaces.items()
        if language != pivot
    }
    weights = _solve(decisions, center, settings)
    maps = {
        language: SpaceMap(
            center.mean if language == pivot else decisions[language].mean,
            weights[language],
            settings.steps,
        )
        for language in spaces
    }
    reports = [_report_pivot(center)]
    for language, decision in decisions.items():
        precision = decision.attempt.trial.precision
        if settings.space == "joint" and decision.dev is not None:
            other = NormalSpace.of(language, spaces[language], settings)
            task = Task(center, other, None, decision.dev)
            precision = measure(task, weights[language], weights[pivot])
        reports.append(replace(decision.report, precision=precision))
    return MappedSpaces(pivot, maps, reports)


def _check(spaces: Mapping[str, WordVectors], pivot: str) -> None:
    if pivot not in spaces:
        raise InputError(
            f"no vectors of the pivot {pivot!r}", fix=f"choose from: {' '.join(spaces)}"
        )
    if len(spaces) < 2:
        raise InputError("one language alone", fix="give the vectors of two or more")
    width = spaces[pivot].matrix.shape[1]
    for language, vectors in spaces.items():
        if vectors.matrix.shape[1] != width:
            raise InputError(
                f"vectors of {language} have {vectors.matrix.shape[1]} dimensions, "
                f"those of {pivot} {width}",
                fix="give vectors of one width",
            )


def _look_up(
    dictionaries: Mapping[str, SeedDictionary], spaces: Mapping[str, WordVectors], pivot: str
) -> dict[str, _Known]:
    """Find what dictionaries have, of all languages before the first is learnt."""
    return {
        language: _Known(
            dictionary.find_pairs(spaces[pivot], spaces[language]), len(dictionary.entries)
        )
        for language, dictionary in dictionaries.items()
        if language in spaces
    }


def _decide(
    center: NormalSpace,
    other: NormalSpace,
    settings: MapSettings,
    train: _Known,
    dev: _Known,
    on_round: OnRound,
) -> _Decision:
    """Try all methods on a language and choose."""
    task = Task(center, other, train.pairs, dev.pairs)
    attempts = [] if task.dev is None else [try_unaligned(task)]
    for method in settings.methods:
        on_round(other.language, method, None)

        def tell(number: Round, method: str = method) -> None:
            on_round(other.language, method, number)

        attempts.append(try_method(task, method, settings, tell))
    best, reason = choose(attempts)
    report = LanguageReport(
        language=other.language,
        n_words=len(other.vectors),
        n_zero=_count_zeros(other),
        n_duplicates=other.vectors.n_duplicates,
        chosen=best.trial.method,
        reason=reason,
        trials=[attempt.trial for attempt in attempts],
        n_train=train.n_pairs,
        n_train_entries=train.n_entries,
        n_dev=dev.n_pairs,
        n_dev_entries=dev.n_entries,
    )
    return _Decision(report, best, other.mean, task.dev)


def _solve(
    decisions: Mapping[str, _Decision], center: NormalSpace, settings: MapSettings
) -> dict[str, Float[Tensor, "hidden hidden"]]:
    """Find the matrices of all languages; those unaligned share the pivot's."""
    identity = torch.eye(center.rows.shape[1], dtype=torch.float64)
    aligned = {name: decision for name, decision in decisions.items() if decision.is_aligned}
    if settings.space == "pivot" or not aligned:
        found = {name: decision.attempt.weight for name, decision in aligned.items()}
        pivot_weight = identity
    else:
        moments = [decision.attempt.moments for decision in aligned.values()]
        joint = solve_joint([each for each in moments if each is not None], settings.reweight)
        found, pivot_weight = dict(zip(aligned, joint.others, strict=True)), joint.pivot
    weights = {center.language: pivot_weight}
    for name in decisions:
        weight = found.get(name)
        weights[name] = pivot_weight if weight is None else weight
    return weights


def _report_pivot(center: NormalSpace) -> LanguageReport:
    return LanguageReport(
        language=center.language,
        n_words=len(center.vectors),
        n_zero=_count_zeros(center),
        n_duplicates=center.vectors.n_duplicates,
        chosen=PIVOT,
        reason="all others map to it",
        trials=[],
    )


def _count_zeros(space: NormalSpace) -> int:
    return len(space.rows) - int(space.rows.any(dim=1).sum())
