"""One language's way to the pivot: what each method gives, and which of them is best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from calque.algorithms.nearest import csls_nearest, normalize_rows
from calque.algorithms.procrustes import (
    STEPS,
    PairMoments,
    Pairs,
    Step,
    apply_map,
    collect_moments,
    normalize_space,
    solve_joint,
    solve_orthogonal,
)
from calque.algorithms.rcsls import RcslsSettings, fit_rcsls
from calque.algorithms.self_learning import (
    LearningSettings,
    Round,
    learn,
    refine,
    start_from_nothing,
)
from calque.errors import InputError
from calque.vectors.static import WordVectors

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


Method = Literal[
    "supervised", "semi-supervised", "identical", "unsupervised", "procrustes", "refine", "rcsls"
]
Space = Literal["joint", "pivot"]
METHODS: tuple[Method, ...] = (
    "supervised",
    "semi-supervised",
    "identical",
    "unsupervised",
    "procrustes",
    "refine",
    "rcsls",
)
SPACES: tuple[Space, ...] = ("joint", "pivot")
# Those that need a dictionary, and those that map to a pivot that stays where it is.
WITH_DICTIONARY = frozenset({"supervised", "semi-supervised", "procrustes", "refine", "rcsls"})
TO_PIVOT = frozenset({"procrustes", "refine", "rcsls"})
UNALIGNED = "unaligned"


@dataclass(frozen=True, slots=True)
class MapSettings:
    """How spaces are made one.

    In the `joint` space all languages, the pivot too, are whitened, turned, re-weighted and
    de-whitened; in the `pivot`'s, it stays and the others are turned to it (or mapped by rcsls).
    With several methods, each language gets the best by its development dictionary.
    """

    methods: tuple[Method, ...] = ("unsupervised",)
    space: Space = "joint"
    steps: tuple[Step, ...] = STEPS
    reweight: float = 0.5
    learning: LearningSettings = field(default_factory=LearningSettings)
    rcsls: RcslsSettings = field(default_factory=RcslsSettings)
    n_refinements: int = 5
    seed: int = 0
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        for value in (unknown for unknown in self.methods if unknown not in METHODS):
            raise InputError(f"no method {value!r}", fix=f"choose from: {', '.join(METHODS)}")
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise InputError("name every method once", fix=f"choose from: {', '.join(METHODS)}")
        if self.space not in SPACES:
            raise InputError(f"no space {self.space!r}", fix=f"choose from: {', '.join(SPACES)}")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"seed={self.seed}", fix="choose 0 or more, below 2⁶³")
        turning = [method for method in self.methods if method in TO_PIVOT]
        if self.space == "joint" and turning:
            problem = f"{turning[0]} leaves the pivot as it is, which the joint space does not"
            raise InputError(problem, fix="choose the pivot's space, or another method")


@dataclass(frozen=True, eq=False, slots=True)
class NormalSpace:
    """A language's normalized vectors on the device, and the mean that was subtracted."""

    language: str
    vectors: WordVectors
    rows: Float[Tensor, "words hidden"]
    mean: Float[Tensor, "hidden"]

    @classmethod
    def of(cls, language: str, vectors: WordVectors, settings: MapSettings) -> NormalSpace:
        """Normalize vectors, which must be finite and not all the same."""
        matrix = torch.from_numpy(np.asarray(vectors.matrix)).to(settings.device)
        rows, mean = normalize_space(matrix, settings.steps)
        if not rows.isfinite().all():
            raise InputError(f"{language} has vectors that are not finite", fix="make them again")
        if not rows.any():
            problem = f"all vectors of {language} are zero, or the same"
            raise InputError(problem, fix="make them again")
        return cls(language, vectors, rows, mean)


@dataclass(frozen=True, slots=True)
class Task:
    """A language to be mapped to the pivot, and rows of dictionaries to learn and judge by."""

    pivot: NormalSpace
    other: NormalSpace
    train: Pairs | None
    dev: Pairs | None


@dataclass(frozen=True, slots=True)
class Trial:
    """What one method gave for a language: P@1 on the development dictionary, and the effort.

    `objective` is the mean similarity of words with their nearest at the end of self-learning.
    """

    method: str
    precision: float | None
    n_pairs: int = 0
    n_rounds: int = 0
    objective: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trial and what it takes to make use of it: moments for the joint space, or a map."""

    trial: Trial
    moments: PairMoments | None = None
    weight: Float[Tensor, "hidden hidden"] | None = None


def try_method(
    task: Task,
    method: Method,
    settings: MapSettings,
    on_round: Callable[[Round], None] = lambda _: None,
) -> Attempt:
    """Learn by one method how the language maps to the pivot, and measure it."""
    started = time.perf_counter()
    src, tgt = task.other.rows, task.pivot.rows
    pairs, rounds = _find_pairs(task, method, settings, on_round)
    moments = collect_moments(src, tgt, pairs)
    n_rounds, objective = len(rounds), rounds[-1].objective if rounds else None
    if settings.space == "joint":
        maps = solve_joint([moments], settings.reweight)
        weight, pivot_weight = maps.others[0], maps.pivot
    else:
        weight, pivot_weight = solve_orthogonal(moments), None
        if method == "rcsls":
            fit = fit_rcsls(src, tgt, pairs, settings.rcsls)
            weight, n_rounds = fit.map.cpu().double(), len(fit.losses) - 1
    precision = measure(task, weight, pivot_weight)
    seconds = time.perf_counter() - started
    trial = Trial(method, precision, len(pairs), n_rounds, objective, seconds)
    return Attempt(trial, moments, weight)


def try_unaligned(task: Task) -> Attempt:
    """Measure the vectors as they came."""
    return Attempt(Trial(UNALIGNED, measure(task, None, None)))


def choose(attempts: Sequence[Attempt]) -> tuple[Attempt, str]:
    """Choose the attempt of highest precision, and say why; of equals the first.

    So unaligned vectors, tried first, are kept unless a method improves them.
    """
    precisions = [attempt.trial.precision for attempt in attempts]
    if len(attempts) == 1 or None in precisions:
        aligned = [attempt for attempt in attempts if attempt.trial.method != UNALIGNED]
        return aligned[0], "no development dictionary to compare by"
    best = max(attempts, key=lambda attempt: attempt.trial.precision or 0.0)
    others = ", ".join(
        f"{100 * (attempt.trial.precision or 0):.1f} {attempt.trial.method}"
        for attempt in attempts
        if attempt is not best
    )
    said = f"P@1 {100 * (best.trial.precision or 0):.1f} against {others}"
    is_unaligned = best.trial.method == UNALIGNED
    return best, f"alignment does not help: {said}" if is_unaligned else said


def measure(
    task: Task,
    weight: Float[Tensor, "hidden hidden"] | None,
    pivot_weight: Float[Tensor, "hidden hidden"] | None,
) -> float | None:
    """Give P@1 on the development dictionary, the mean of both ways, by CSLS among its words."""
    if task.dev is None:
        return None
    other, pivot = (
        normalize_rows(rows if W is None else apply_map(rows, W))
        for rows, W in ((task.other.rows, weight), (task.pivot.rows, pivot_weight))
    )
    back = Pairs(task.dev.tgt, task.dev.src)
    return (find_precision(other, pivot, task.dev) + find_precision(pivot, other, back)) / 2


def find_precision(
    src: Float[Tensor, "src hidden"], tgt: Float[Tensor, "tgt hidden"], gold: Pairs
) -> float:
    """Give the share of source words whose nearest word is one of their translations."""
    queries = torch.unique(gold.src).to(src.device)
    k = min(10, len(queries), len(tgt))
    found = csls_nearest(src[queries], tgt, k, 1, order_only=True)[1][:, 0]
    right = (gold.src * len(tgt) + gold.tgt).to(src.device)
    return float(torch.isin(queries * len(tgt) + found, right).float().mean())


def _find_pairs(
    task: Task, method: Method, settings: MapSettings, on_round: Callable[[Round], None]
) -> tuple[Pairs, list[Round]]:
    """Find the words that are to coincide, from a dictionary or by learning."""
    src, tgt = task.other.rows, task.pivot.rows
    start = task.train
    if method == "identical":
        start = find_identical(task.pivot.vectors, task.other.vectors, settings.learning.n_words)
    elif method == "unsupervised":
        start = start_from_nothing(src, tgt, settings.learning)
    if start is None or len(start) == 0:
        raise InputError(
            f"{method}: no pairs of words between {task.other.language} and {task.pivot.language}",
            fix="give a dictionary whose words have vectors, or learn unsupervised",
        )
    start = Pairs(start.src.to(src.device), start.tgt.to(src.device))
    if method == "refine":
        found = refine(src, tgt, start, settings.learning, settings.n_refinements, on_round)
    elif method in ("semi-supervised", "identical", "unsupervised"):
        generator = torch.Generator().manual_seed(settings.seed)
        found = learn(src, tgt, start, settings.learning, generator, on_round)
    else:
        return start, []
    return found.pairs, found.rounds


def find_identical(pivot: WordVectors, other: WordVectors, n_words: int) -> Pairs:
    """Pair words that are written alike in both languages, among the most frequent."""
    rows, known = pivot.look_up(other.words[:n_words])
    known &= rows < n_words
    src = torch.from_numpy(np.flatnonzero(known))
    return Pairs(src, torch.from_numpy(rows[known]))
