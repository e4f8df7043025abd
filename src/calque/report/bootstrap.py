"""Uncertainty over test items: each item's contribution to a score, and bootstrap resampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calque.report.statistics import TINY, StandardError, add_errors

Array = npt.NDArray[np.float64]
BLOCK_ITEMS = 1_000_000  # samples at a time, about 25 MB


@dataclass(frozen=True, slots=True, eq=False)
class ItemTable:
    """Numerators and denominators of the test items of one language; one row per seed."""

    above: Array
    below: Array

    @property
    def n_items(self) -> int:
        """The number of test items."""
        return int(self.above.shape[1])

    @property
    def scores(self) -> Array:
        """The score of every seed, in percent."""
        return _ratio(self.above.sum(1), self.below.sum(1))


@dataclass(frozen=True, slots=True)
class ItemErrors:
    """Standard errors over test items of a difference between two models.

    `resampling` belongs to the confidence interval: the error of drawing other items. `testing`
    belongs to the test that there is no difference; for accuracies in one language it is that of
    McNemar's test. `irreducible` is the part of `resampling` that more seeds would not reduce.
    """

    resampling: StandardError
    testing: StandardError
    irreducible: StandardError


def item_contributions(table: ItemTable, origin: Array | float) -> Array:
    """Return the contribution of each item to 100 · Σ above / Σ below − origin; a row per seed.

    The contributions add up to that difference exactly. Around the seeds' own scores they are the
    influence function of the score, whose squares add up to the variance of resampled scores.
    """
    totals = table.below.sum(1)[:, None]
    centered = 100 * table.above - np.broadcast_to(origin, len(totals))[:, None] * table.below
    return np.asarray(np.divide(centered, totals, out=np.zeros_like(centered), where=totals != 0))


def measure_item_errors(
    model: Mapping[str, ItemTable], baseline: Mapping[str, ItemTable], weights: Mapping[str, float]
) -> ItemErrors:
    """Return the errors over items of a weighted sum of differences by language.

    Languages with the same number of items are treated item by item, because many test sets are
    translations of each other; where they are not, nothing is lost.
    """
    by_size: dict[int, list[str]] = defaultdict(list)
    for language in weights:
        by_size[model[language].n_items].append(language)
    resampling, irreducible, contributions = [], [], []
    for n_items, languages in by_size.items():
        sides = [
            np.sum([weights[n] * item_contributions(side[n], side[n].scores) for n in languages], 0)
            for side in (model, baseline)
        ]
        difference = sides[0].mean(0) - sides[1].mean(0)
        total = float((difference**2).sum())
        by_seed = sum(float(s.var(0, ddof=1).sum()) / len(s) for s in sides if len(s) > 1)
        resampling.append(_to_error(total, n_items))
        irreducible.append(_to_error(max(0.0, total - by_seed), n_items))
        contributions.append(difference)
    mean_difference = sum(
        weight * (model[name].scores.mean() - baseline[name].scores.mean())
        for name, weight in weights.items()
    )
    testing = _null_error(np.concatenate(contributions), float(mean_difference))
    return ItemErrors(add_errors(*resampling), testing, add_errors(*irreducible))


def resample_scores(
    tables: Sequence[ItemTable], n_resamples: int, generator: np.random.Generator
) -> Array:
    """Return the scores of resampled items: one row per table, the mean over its seeds.

    Tables with the same number of items share every resample, so that models are compared on the
    same items and translated test sets stay aligned.
    """
    scores = np.empty((len(tables), n_resamples))
    by_size: dict[int, list[int]] = defaultdict(list)
    for index, table in enumerate(tables):
        by_size[table.n_items].append(index)
    for n_items, indices in sorted(by_size.items()):
        columns = _Columns([tables[index] for index in indices])
        step = max(1, BLOCK_ITEMS // n_items)
        for start in range(0, n_resamples, step):
            stop = min(start + step, n_resamples)
            counts = _sample_counts(stop - start, n_items, generator)
            scores[indices, start:stop] = columns.score(counts)
    return scores


class _Columns:
    """Item columns to be summed; equal columns, such as gold counts, are stored once.

    Single precision is enough: counts are integers, and intervals are shown with two decimals.
    """

    def __init__(self, tables: Sequence[ItemTable]) -> None:
        indices: dict[bytes, int] = {}
        columns: list[Array] = []

        def index_of(column: Array) -> int:
            key = column.tobytes()
            if key not in indices:
                indices[key] = len(columns)
                columns.append(column)
            return indices[key]

        self.indices = []
        for table in tables:
            above, below = table.above, table.below
            if (below == below[0]).all():  # then the mean over seeds is a single ratio
                above, below = above.mean(0, keepdims=True), below[:1]
            self.indices.append((list(map(index_of, above)), list(map(index_of, below))))
        self.matrix = np.stack(columns, axis=1).astype(np.float32)

    def score(self, counts: npt.NDArray[np.float32]) -> Array:
        """Return the scores if each item occurs as often as counted; one row per table."""
        sums = (counts @ self.matrix).T.astype(np.float64)
        return np.stack([_ratio(sums[above], sums[below]).mean(0) for above, below in self.indices])


def _null_error(contributions: Array, difference: float) -> StandardError:
    """Return the error of the contributions if the true difference is zero.

    The effective number of items is (Σ w²)² / Σ w⁴; for accuracies it is the number of items on
    which the models differ.
    """
    whole = contributions + difference / len(contributions)  # adds up to the difference
    squares = float((whole**2).sum())
    if squares <= TINY**2:
        return StandardError(0.0, 1)
    return StandardError(float(np.sqrt(squares)), squares**2 / float((whole**4).sum()) - 1)


def _sample_counts(
    n_resamples: int, n_items: int, generator: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Sample n_items items with replacement, and count each item; one row per resample."""
    sampled = generator.integers(0, n_items, (n_resamples, n_items), dtype=np.int64)
    sampled += np.arange(n_resamples, dtype=np.int64)[:, None] * n_items
    counts = np.bincount(sampled.ravel(), minlength=n_resamples * n_items)
    return counts.reshape(n_resamples, n_items).astype(np.float32)


def _to_error(squares: float, n_items: int) -> StandardError:
    if n_items < 2:
        return StandardError(float("inf"), 1)
    return StandardError(float(np.sqrt(squares * n_items / (n_items - 1))), n_items - 1)


def _ratio(above: Array, below: Array) -> Array:
    """Return the ratio in percent, 0 where the denominator is 0."""
    return 100 * np.divide(above, below, out=np.zeros_like(above), where=below != 0)
