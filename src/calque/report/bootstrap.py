"""How sure a score is of its test items: their shares of it, and resampling them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calque.report.statistics import TINY, Error, add_errors

Vector = npt.NDArray[np.float64]
BLOCK_ITEMS = 1_000_000  # draws at a time: about 25 MB


@dataclass(frozen=True, slots=True, eq=False)
class ItemTable:
    """Items of one model, task and language: a row a seed, above and below the line."""

    above: npt.NDArray[np.float64]
    below: npt.NDArray[np.float64]

    @property
    def n_items(self) -> int:
        """How many items there are."""
        return int(self.above.shape[1])

    @property
    def scores(self) -> Vector:
        """The score of every seed, in percent."""
        return _divide(self.above.sum(1), self.below.sum(1))


@dataclass(frozen=True, slots=True)
class ItemErrors:
    """Errors over items of a difference between two models.

    `resampling` is that of drawing other items, for intervals. `testing` is that of the test
    that there is no difference: for accuracies in one language, McNemar's. `lasting` is the part
    of the first that more seeds would not average away.
    """

    resampling: Error
    testing: Error
    lasting: Error


def share_out(table: ItemTable, origin: Vector | float) -> npt.NDArray[np.float64]:
    """Give each item's share of 100 · Σ above / Σ below − origin, a row a seed.

    The shares add up to it exactly. Around the seeds' own scores they are the score's influence
    function, whose squares add up to the variance of resampled scores.
    """
    totals = table.below.sum(1)[:, None]
    centered = 100 * table.above - np.broadcast_to(origin, len(totals))[:, None] * table.below
    return np.asarray(np.divide(centered, totals, out=np.zeros_like(centered), where=totals != 0))


def measure_item_errors(
    model: Mapping[str, ItemTable], baseline: Mapping[str, ItemTable], weights: Mapping[str, float]
) -> ItemErrors:
    """Give the errors over items of a weighted sum of differences by language.

    Languages with as many items are taken item by item: many test sets are translations of one
    another, and where they are not, nothing is lost.
    """
    alike: dict[int, list[str]] = defaultdict(list)
    for language in weights:
        alike[model[language].n_items].append(language)
    spreads, lasting, all_shares = [], [], []
    for n_items, languages in alike.items():
        own = [_weigh_shares(side, weights, languages) for side in (model, baseline)]
        shares = own[0].mean(0) - own[1].mean(0)
        total = float((shares**2).sum())
        passing = sum(float(each.var(0, ddof=1).sum()) / len(each) for each in own if len(each) > 1)
        spreads.append(_to_error(total, n_items))
        lasting.append(_to_error(max(0.0, total - passing), n_items))
        all_shares.append(shares)
    difference = sum(
        weight * (model[name].scores.mean() - baseline[name].scores.mean())
        for name, weight in weights.items()
    )
    testing = _test_shares(np.concatenate(all_shares), float(difference))
    return ItemErrors(add_errors(*spreads), testing, add_errors(*lasting))


def _test_shares(shares: Vector, difference: float) -> Error:
    """Give the error that shares have if there is no difference: theirs of it counts as chance.

    The number of items that matter, (Σ w²)² / Σ w⁴, is that of those that differ where all
    differ alike, as in accuracies.
    """
    whole = shares + difference / len(shares)  # adds up to the difference
    squares = float((whole**2).sum())
    if squares <= TINY**2:
        return Error(0.0, 1)
    return Error(float(np.sqrt(squares)), squares**2 / float((whole**4).sum()) - 1)


def _weigh_shares(
    side: Mapping[str, ItemTable], weights: Mapping[str, float], languages: Sequence[str]
) -> npt.NDArray[np.float64]:
    shares = [weights[name] * share_out(side[name], side[name].scores) for name in languages]
    return np.asarray(np.sum(shares, axis=0))


def resample_scores(
    tables: Sequence[ItemTable],
    n_resamples: int,
    generator: np.random.Generator,
    on_progress: Callable[[int], None] = lambda n_tables: None,
) -> npt.NDArray[np.float64]:
    """Score resampled items, a row a table: the mean over seeds of the ratio of sums.

    Tables with as many items share every resample, so that models are compared on the same
    items, and translated test sets keep together.
    """
    scores = np.empty((len(tables), n_resamples))
    alike: dict[int, list[int]] = defaultdict(list)
    for index, table in enumerate(tables):
        alike[table.n_items].append(index)
    for n_items, indices in sorted(alike.items()):
        columns = _Columns([tables[index] for index in indices])
        step = max(1, BLOCK_ITEMS // n_items)
        for start in range(0, n_resamples, step):
            stop = min(start + step, n_resamples)
            scores[indices, start:stop] = columns.score(
                _draw_counts(stop - start, n_items, generator)
            )
        on_progress(len(indices))
    return scores


class _Columns:
    """Columns of items to be summed; the same column, such as gold counts, is summed once.

    Single precision: counts are whole numbers, and intervals are read to two decimals.
    """

    def __init__(self, tables: Sequence[ItemTable]) -> None:
        known: dict[bytes, int] = {}
        columns: list[Vector] = []

        def place(column: Vector) -> int:
            key = column.tobytes()
            if key not in known:
                known[key] = len(columns)
                columns.append(column)
            return known[key]

        self.places = []
        for table in tables:
            above, below = table.above, table.below
            if (below == below[0]).all():  # then the mean over seeds is one ratio
                above, below = above.mean(0, keepdims=True), below[:1]
            self.places.append(([place(row) for row in above], [place(row) for row in below]))
        self.matrix = np.stack(columns, axis=1).astype(np.float32)

    def score(self, counts: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Score the items as often as they were drawn: a row a table."""
        sums = (counts @ self.matrix).T.astype(np.float64)
        return np.stack([_divide(sums[above], sums[below]).mean(0) for above, below in self.places])


def _draw_counts(
    n_resamples: int, n_items: int, generator: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Draw items with replacement, as many as there are, and count each."""
    drawn = generator.integers(0, n_items, (n_resamples, n_items), dtype=np.int64)
    drawn += np.arange(n_resamples, dtype=np.int64)[:, None] * n_items
    counts = np.bincount(drawn.ravel(), minlength=n_resamples * n_items)
    return counts.reshape(n_resamples, n_items).astype(np.float32)


def _to_error(squares: float, n_items: int) -> Error:
    if n_items < 2:
        return Error(float("inf"), 1)
    return Error(float(np.sqrt(squares * n_items / (n_items - 1))), n_items - 1)


def _divide(above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> Vector:
    """Divide in percent; 0 where there is nothing to divide by, as scores are defined."""
    return 100 * np.divide(above, below, out=np.zeros_like(above), where=below != 0)
