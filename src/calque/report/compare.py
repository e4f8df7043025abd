"""`compare`: verdicts on models from result files, written as HTML, Markdown, LaTeX or CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.io.files import check_output_file, write_atomically
from calque.report.comparison import Comparison, ComparisonSettings, compare_results
from calque.report.page import build_page
from calque.report.plots import check_matplotlib
from calque.report.results import read_results
from calque.report.statistics import CORRECTIONS, Correction, check_scipy
from calque.report.tables import to_csv, to_latex, to_markdown

if TYPE_CHECKING:
    from calque.types import Progress

MIN_RESAMPLES, MAX_RESAMPLES = 100, 1_000_000
FORMATS: dict[str, Callable[[Comparison], str]] = {
    ".html": build_page,
    ".md": to_markdown,
    ".tex": to_latex,
    ".csv": to_csv,
}


def compare(
    results: str | Path | Iterable[str | Path],
    *,
    baseline: str,
    models: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    correction: Correction = "holm",
    output: str | Path | Iterable[str | Path] = (),
    alpha: float = 0.05,
    bootstrap: int = 10_000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Compare models with a baseline and return the differences with their verdicts.

    A model helps or hurts only if the difference is significant over seeds, over test items and
    over both together, after correction for the number of comparisons.

    Args:
        results: Folders or .jsonl files that `calque evaluate -o` has written.
        baseline: Name of the model that the others are compared with.
        models: Models to compare. Default: all others.
        tasks: Tasks to compare. Default: all.
        correction: Correction for many comparisons: holm, bh (Benjamini-Hochberg) or none.
        output: Files to write: .html, .md, .tex or .csv.
        alpha: Significance level; confidence intervals have level 1 - alpha.
        bootstrap: Number of bootstrap resamples of the test items.
        seed: Random seed of the resampling.
        progress: Called after each task.

    Examples:
        >>> report = compare("results", baseline="calque-mini")  # doctest: +SKIP
        >>> report.tasks[0].models["run"].overall.category       # doctest: +SKIP
        'helps'
    """
    if correction not in CORRECTIONS:
        fix = f"choose from: {', '.join(CORRECTIONS)}"
        raise InputError(f"there is no correction {correction!r}", fix=fix)
    if not 0 < alpha < 0.5:
        problem = f"alpha {alpha:g} is not a significance level"
        raise InputError(problem, fix="choose a number between 0 and 0.5")
    if not MIN_RESAMPLES <= bootstrap <= MAX_RESAMPLES:
        amount = "few" if bootstrap < MIN_RESAMPLES else "many"
        fix = f"choose a number from {MIN_RESAMPLES} to {MAX_RESAMPLES:,}"
        raise InputError(f"{bootstrap} bootstrap resamples are too {amount}", fix=fix)
    if seed < 0:
        raise InputError(f"the seed {seed} is negative", fix="choose 0 or a positive number")
    check_scipy()
    paths = _check_outputs(_as_paths(output))
    settings = ComparisonSettings(alpha, correction, bootstrap, seed)
    comparison = compare_results(
        read_results(_as_paths(results)),
        baseline,
        models=models,
        tasks=tasks,
        settings=settings,
        progress=progress,
    )
    texts = {path: FORMATS[path.suffix](comparison) for path in paths}
    for path, text in texts.items():
        with write_atomically(path) as stream:
            stream.write(text)
    return comparison


def _as_paths(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    several = [paths] if isinstance(paths, str | Path) else paths
    return list(dict.fromkeys(Path(path) for path in several))


def _check_outputs(paths: list[Path]) -> list[Path]:
    for path in paths:
        if path.suffix not in FORMATS:
            fix = f"name it {path.stem or 'report'}.html, .md, .tex or .csv"
            raise InputError(f"comparisons are not written as {path.suffix!r}", file=path, fix=fix)
        check_output_file(path, ())
    if any(path.suffix == ".html" for path in paths):
        check_matplotlib()
    return paths
