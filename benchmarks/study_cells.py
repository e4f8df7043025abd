"""Tables of studies: means over seeds, the rule of one standard deviation, and tables in pages.

All studies use the rule of `calque compare`: a difference counts if it exceeds the standard
deviation of the baseline over seeds. A baseline without seeds, such as a given model, has none.
Studies that store their differences use those of `calque compare`, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from calque.report.statistics import one_deviation_rule, summarize


def show(
    values: Sequence[float],
    before: Sequence[float] | None = None,
    *,
    sign: int = 1,
    digits: int = 1,
    note: str = "",
) -> str:
    """Return mean ± standard deviation, and the difference from a baseline.

    An arrow marks a difference that counts: ↑ better, ↓ worse. `sign` is −1 if lower is better.

    >>> show([3.0, 4.0, 5.0], [1.0, 2.0])
    '4.0 ± 1.0 (+2.5 ↑)'
    """
    mine = summarize(values)
    shown = f"{mine.mean:.{digits}f}"
    if mine.deviation is not None:
        shown += f" ± {mine.deviation:.{digits}f}"
    shown += note
    if before is None:
        return shown
    baseline = summarize(before)
    rule = one_deviation_rule(mine, baseline)
    mark = "" if rule in (None, "within") else " ↑" if (rule == "above") == (sign > 0) else " ↓"
    change = round(mine.mean - baseline.mean, digits) + 0.0  # no sign before zero
    return f"{shown} ({change:+.{digits}f}{mark})".replace("-", "−")


def judge(one: Sequence[float], other: Sequence[float], sign: int = 1) -> str:
    """Return the gain of one method over another, and whether it counts.

    >>> judge([3.0, 4.0], [1.0, 2.0]), judge([3.0, 4.0], [1.0], sign=-1)
    ('+2.0, holds', '−2.5, open')
    """
    if not len(one) or not len(other):
        return "–"
    mine, baseline = summarize(one), summarize(other)
    rule = one_deviation_rule(mine, baseline)
    verdict = "open"
    if rule in ("above", "below"):
        verdict = "holds" if (rule == "above") == (sign > 0) else "reversed"
    gain = sign * (mine.mean - baseline.mean)
    return f"{gain:+.1f}, {verdict}".replace("-", "−")


def make_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, has_numbers: bool = True
) -> str:
    """Return a Markdown table; with numbers, all columns but the first are aligned to the right.

    >>> print(make_table(["method", "AER"], [["itermax", "57.6"]]))
    | method | AER |
    | --- | --: |
    | itermax | 57.6 |
    """
    rule = ["---", *["--:" if has_numbers else "---"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def fill_tables(text: str, tables: Mapping[str, str]) -> str:
    """Replace the tables between `<!-- table: NAME -->` and `<!-- end -->` in a page."""
    names = re.findall(r"<!-- table: (.*?) -->", text)
    if sorted(names) != sorted(tables):
        raise ValueError(f"the page has the tables {names}, not {[*tables]}")

    def replace(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n\n{tables[found[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (.*?) -->.*?<!-- end -->", replace, text, flags=re.DOTALL)


def compare_results(folders: Sequence[Path], one: str, base: str) -> list[dict[str, Any]]:
    """Return the differences between two models by task, as `calque compare` measures them."""
    import calque

    comparison = calque.compare(folders, baseline=base, models=[one])
    rows = []
    for task in comparison.tasks:
        difference = task.models[one].overall
        numbers = {
            "score": difference.model.mean,
            "baseline": difference.baseline.mean,
            "low": difference.low,
            "high": difference.high,
        }
        rows.append(
            {"method": one, "versus": base, "task": task.task, "seeds": difference.n_seeds}
            | {name: round(float(value), 3) for name, value in numbers.items() if value is not None}
        )
    return rows


def write_differences(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write differences as JSON with one row per line."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"differences": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{path}: {len(rows)} differences")
