"""Two models' scores in a task side by side: the languages and seeds that both have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from calque.report.item_bootstrap import ItemTable
from calque.report.results import Row, read_items
from calque.report.statistics import TINY

if TYPE_CHECKING:
    import numpy.typing as npt

# Scores of a model in a task: by seed, then by language.
ModelRows = Mapping[int | None, Mapping[str, Row]]


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """Scores of one model: a row a seed, a column a language, and the items behind them.

    `fixed` says that no seed changes them.
    """

    model: str
    seeds: tuple[int | None, ...]
    values: npt.NDArray[np.float64]
    tables: Mapping[str, ItemTable]
    fixed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A model and the baseline in one task, on what both have.

    `paired` says that row k of both sides has the same seed; `notes` what had to be left out.
    """

    task: str
    languages: tuple[str, ...]
    higher_is_better: bool
    source: str | None
    model: Side
    baseline: Side
    paired: bool
    notes: Sequence[str] = field(default_factory=tuple)


def pair_models(task: str, model: ModelRows, baseline: ModelRows) -> Pair | None:
    """Put two models side by side; None where they share no language.

    Seeds that both have are paired if there are two or more; else all seeds of both are used,
    as unrelated. Languages that a seed lacks are left out.
    """
    notes: list[str] = []
    mine, theirs = _choose_seeds(model, baseline)
    left_out = len(_own_seeds(model)) - len(mine) + len(_own_seeds(baseline)) - len(theirs)
    if left_out:
        notes.append(f"{left_out} of the seeds are one model's alone and left out")
    if any(None in side and len(side) > 1 for side in (model, baseline)):
        notes.append("scores without a seed beside others with one are left out")
    sets = [set(model[seed]) for seed in mine] + [set(baseline[seed]) for seed in theirs]
    union = dict.fromkeys(
        name for side in (baseline, model) for seed in side for name in side[seed]
    )
    languages = tuple(name for name in union if all(name in each for each in sets))
    if not languages:
        return None
    if len(languages) < len(union):
        absent = ", ".join(name for name in union if name not in languages)
        notes.append(f"not in all runs of both and left out: {absent}")
    first = baseline[theirs[0]][languages[0]]
    sides = [_make_side(model, mine, languages), _make_side(baseline, theirs, languages)]
    odd = [
        name
        for name in languages
        if name in sides[0].tables
        and name in sides[1].tables
        and sides[0].tables[name].n_items != sides[1].tables[name].n_items
    ]
    if odd:
        notes.append(f"the models have other test items in {', '.join(odd)}: not resampled there")
        sides = [_drop_tables(side, odd) for side in sides]
    return Pair(
        task,
        languages,
        first.higher_is_better,
        first.source,
        sides[0],
        sides[1],
        paired=mine == theirs,
        notes=notes,
    )


def _choose_seeds(
    model: ModelRows, baseline: ModelRows
) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    mine, theirs = _own_seeds(model), _own_seeds(baseline)
    common = tuple(seed for seed in mine if seed in theirs)
    least = min(2, len(mine), len(theirs))
    return (common, common) if len(common) >= least else (mine, theirs)


def _own_seeds(rows: ModelRows) -> tuple[int | None, ...]:
    """List the seeds in order; scores without a seed count only where there are no others."""
    seeds = sorted(seed for seed in rows if seed is not None)
    return tuple(seeds) or (None,)


def _make_side(rows: ModelRows, seeds: Sequence[int | None], languages: Sequence[str]) -> Side:
    values = np.array([[rows[seed][name].value for name in languages] for seed in seeds])
    constant = len(seeds) > 1 and bool((np.ptp(values, axis=0) <= TINY).all())
    tables = {name: _read_table([rows[seed][name] for seed in seeds]) for name in languages}
    found = {name: table for name, table in tables.items() if table is not None}
    model = rows[seeds[0]][languages[0]].model
    return Side(model, tuple(seeds), values, found, fixed=constant or tuple(seeds) == (None,))


def _read_table(rows: Sequence[Row]) -> ItemTable | None:
    """Stack the items of seeds; None where one has none, or others."""
    found = [items for row in rows if (items := read_items(row)) is not None]
    if len(found) < len(rows) or len({len(above) for above, _ in found}) > 1:
        return None
    return ItemTable(np.stack([above for above, _ in found]), np.stack([b for _, b in found]))


def _drop_tables(side: Side, names: Sequence[str]) -> Side:
    kept = {name: table for name, table in side.tables.items() if name not in names}
    return Side(side.model, side.seeds, side.values, kept, side.fixed)
