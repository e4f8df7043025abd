"""Map one language to the pivot by each method, and choose the method with the best precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch

from calque.algorithms.nearest import csls_nearest_neighbors, normalize_rows
from calque.algorithms.procrustes import (
    NORMALIZATION_STEPS,
    IndexPairs,
    NormalizationStep,
    PairMoments,
    apply_map,
    collect_moments,
    normalize_space,
    solve_joint_maps,
    solve_procrustes,
)
from calque.algorithms.rcsls import RcslsSettings, fit_rcsls
from calque.algorithms.self_learning import (
    LearningRound,
    SelfLearningSettings,
    refine_map,
    self_learn,
    unsupervised_seed,
)
from calque.errors import InputError
from calque.vectors.static import WordVectors

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    OnRound = Callable[[LearningRound], None]

MappingMethod = Literal[
    "supervised", "semi-supervised", "identical", "unsupervised", "procrustes", "refine", "rcsls"
]
TargetSpace = Literal["joint", "pivot"]
METHODS: tuple[MappingMethod, ...] = get_args(MappingMethod)
SPACES: tuple[TargetSpace, ...] = get_args(TargetSpace)
# Methods that need a dictionary, and methods that leave the pivot unchanged.
WITH_DICTIONARY = frozenset({"supervised", "semi-supervised", "procrustes", "refine", "rcsls"})
TO_PIVOT = frozenset({"procrustes", "refine", "rcsls"})
UNALIGNED = "unaligned"


@dataclass(frozen=True, slots=True)
class MapSettings:
    """How the vectors of several languages are mapped into one space.

    In the `joint` space all languages, including the pivot, are whitened, rotated, re-weighted and
    de-whitened. In the space of the `pivot`, it stays unchanged, and the others are rotated to it
    (or mapped by rcsls). With several methods, each language gets the one with the best precision
    on its development dictionary.
    """

    methods: tuple[MappingMethod, ...] = ("unsupervised",)
    space: TargetSpace = "joint"
    steps: tuple[NormalizationStep, ...] = NORMALIZATION_STEPS
    reweight: float = 0.5
    learning: SelfLearningSettings = field(default_factory=SelfLearningSettings)
    rcsls: RcslsSettings = field(default_factory=RcslsSettings)
    n_refinements: int = 5
    seed: int = 0
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        choices = f"choose from: {', '.join(METHODS)}"
        for method in self.methods:
            if method not in METHODS:
                raise InputError(f"there is no method {method!r}", fix=choices)
        if not self.methods or len(set(self.methods)) < len(self.methods):
            raise InputError("each method must be named once", fix=choices)
        if self.space not in SPACES:
            raise InputError(
                f"there is no space {self.space!r}", fix=f"choose from: {', '.join(SPACES)}"
            )
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"the seed is {self.seed}", fix="choose 0 or more, below 2⁶³")
        to_pivot = [method for method in self.methods if method in TO_PIVOT]
        if self.space == "joint" and to_pivot:
            raise InputError(
                f"{to_pivot[0]} leaves the pivot unchanged, but the joint space does not",
                fix="choose the space of the pivot (--space pivot), or another method",
            )


@dataclass(frozen=True, eq=False, slots=True)
class NormalizedSpace:
    """Normalized vectors of a language on the device, and the mean that was subtracted."""

    language: str
    vectors: WordVectors
    rows: Float[Tensor, "words hidden"]
    mean: Float[Tensor, "hidden"]

    def map(self, weight: Float[Tensor, "hidden hidden"] | None) -> Float[Tensor, "words hidden"]:
        """Return the mapped rows; without a map, the vectors as they were before normalization."""
        if weight is None:
            return torch.from_numpy(np.asarray(self.vectors.matrix)).to(self.rows.device)
        return apply_map(self.rows, weight)

    @classmethod
    def from_vectors(
        cls, language: str, vectors: WordVectors, settings: MapSettings
    ) -> NormalizedSpace:
        """Normalize vectors, which must be finite and not all equal."""
        matrix = torch.from_numpy(np.asarray(vectors.matrix)).to(settings.device)
        rows, mean = normalize_space(matrix, settings.steps)
        if not rows.isfinite().all():
            raise InputError(
                f"{language} has vectors that are not finite", fix="create the vectors again"
            )
        if not rows.any():
            raise InputError(
                f"all vectors of {language} are zero or equal", fix="create the vectors again"
            )
        return cls(language, vectors, rows, mean)


@dataclass(frozen=True, slots=True)
class MappingTask:
    """A language to map to the pivot, with index pairs of the training and development words."""

    pivot: NormalizedSpace
    other: NormalizedSpace
    train: IndexPairs | None
    dev: IndexPairs | None


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one method for a language: P@1 on the development dictionary, and the effort.

    `objective` is the mean similarity of words to their nearest neighbors after self-learning.
    """

    method: str
    precision: float | None
    n_pairs: int = 0
    n_rounds: int = 0
    objective: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FittedTrial:
    """A trial with its map, and the moments that are needed for the joint space."""

    trial: Trial
    moments: PairMoments | None = None
    weight: Float[Tensor, "hidden hidden"] | None = None


def try_method(
    task: MappingTask,
    method: MappingMethod,
    settings: MapSettings,
    on_round: OnRound = lambda _: None,
) -> FittedTrial:
    """Learn the map of a language to the pivot by one method, and measure its precision."""
    started = time.perf_counter()
    src, tgt = task.other.rows, task.pivot.rows
    pairs, rounds = _find_pairs(task, method, settings, on_round)
    moments = collect_moments(src, tgt, pairs)
    n_rounds, objective = len(rounds), rounds[-1].objective if rounds else None
    if settings.space == "joint":
        maps = solve_joint_maps([moments], settings.reweight)
        weight, pivot = maps.others[0], task.pivot.map(maps.pivot)
    else:
        weight, pivot = solve_procrustes(moments.cross), tgt
        if method == "rcsls":
            fit = fit_rcsls(src, tgt, pairs, settings.rcsls)
            weight, n_rounds = fit.map.cpu().double(), len(fit.losses) - 1
    precision = measure_precision(task.dev, task.other.map(weight), pivot)
    seconds = time.perf_counter() - started
    trial = Trial(method, precision, len(pairs), n_rounds, objective, seconds)
    return FittedTrial(trial, moments, weight)


def try_unaligned(task: MappingTask) -> FittedTrial:
    """Measure the precision of the vectors as they are, without normalization and map."""
    precision = measure_precision(task.dev, task.other.map(None), task.pivot.map(None))
    return FittedTrial(Trial(UNALIGNED, precision))


def choose_trial(trials: Sequence[FittedTrial]) -> tuple[FittedTrial, str]:
    """Return the trial with the highest precision and the reason; of equal trials, the first.

    Unaligned vectors are tried first, so that they are kept unless a method improves them.
    """
    if len(trials) == 1 or None in [each.trial.precision for each in trials]:
        aligned = [each for each in trials if each.trial.method != UNALIGNED]
        return aligned[0], "no development dictionary to compare by"
    best = max(trials, key=lambda each: each.trial.precision or 0.0)
    others = ", ".join(
        f"{100 * (each.trial.precision or 0):.1f} {each.trial.method}"
        for each in trials
        if each is not best
    )
    reason = f"P@1 {100 * (best.trial.precision or 0):.1f} against {others}"
    if best.trial.method == UNALIGNED:
        reason = f"alignment does not help: {reason}"
    return best, reason


def measure_precision(
    dev: IndexPairs | None,
    other: Float[Tensor, "other hidden"],
    pivot: Float[Tensor, "pivot hidden"],
) -> float | None:
    """Return P@1 by CSLS on the development dictionary, the mean of both directions."""
    if dev is None:
        return None
    other, pivot = normalize_rows(other), normalize_rows(pivot)
    forward = compute_precision(other, pivot, dev)
    return (forward + compute_precision(pivot, other, IndexPairs(dev.tgt, dev.src))) / 2


def compute_precision(
    src: Float[Tensor, "src hidden"], tgt: Float[Tensor, "tgt hidden"], gold: IndexPairs
) -> float:
    """Return the fraction of source words whose nearest word is one of their translations.

    CSLS is computed among the source words of the dictionary.
    """
    queries = torch.unique(gold.src).to(src.device)
    k = min(10, len(queries), len(tgt))
    found = csls_nearest_neighbors(src[queries], tgt, k, 1, order_only=True)[1][:, 0]
    correct = (gold.src * len(tgt) + gold.tgt).to(src.device)
    return float(torch.isin(queries * len(tgt) + found, correct).float().mean())


def _find_pairs(
    task: MappingTask, method: MappingMethod, settings: MapSettings, on_round: OnRound
) -> tuple[IndexPairs, list[LearningRound]]:
    """Return the pairs of words to fit the map to, from a dictionary or by self-learning."""
    src, tgt = task.other.rows, task.pivot.rows
    seed = task.train
    if method == "identical":
        seed = find_identical_words(
            task.pivot.vectors, task.other.vectors, settings.learning.n_words
        )
    elif method == "unsupervised":
        seed = unsupervised_seed(src, tgt, settings.learning)
    if seed is None or len(seed) == 0:
        raise InputError(
            f"{method}: there are no word pairs of {task.other.language} and {task.pivot.language}",
            fix="use a dictionary whose words have vectors, or the unsupervised method",
        )
    seed = IndexPairs(seed.src.to(src.device), seed.tgt.to(src.device))
    if method == "refine":
        found = refine_map(src, tgt, seed, settings.learning, settings.n_refinements, on_round)
    elif method in ("semi-supervised", "identical", "unsupervised"):
        generator = torch.Generator().manual_seed(settings.seed)
        found = self_learn(src, tgt, seed, settings.learning, generator, on_round)
    else:
        return seed, []
    return found.pairs, found.rounds


def find_identical_words(pivot: WordVectors, other: WordVectors, n_words: int) -> IndexPairs:
    """Return the pairs of identical words among the most frequent words of both languages."""
    rows = pivot.look_up(other.words[:n_words])
    is_shared = (rows >= 0) & (rows < n_words)
    src = torch.from_numpy(np.flatnonzero(is_shared))
    return IndexPairs(src, torch.from_numpy(rows[is_shared]))
