"""Commands on bitext: clean."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.cli.console import progress_bar
from calque.cli.options import InputFormatOption, LanguagePairOption, SkipBadOption
from calque.errors import InputError

if TYPE_CHECKING:
    from calque.io.cleaning import CleaningResult, CleaningRules


def clean(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Lines of 'source TAB target' or 'source ||| target', or one side."
        ),
    ],
    file2: Annotated[
        str | None, typer.Argument(metavar="FILE2", help="The other side, line by line.")
    ] = None,
    output: Annotated[
        list[Path],
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Output TSV file; given twice, one file per side.",
        ),
    ] = [],  # noqa: B006 (typer copies the list)
    languages: LanguagePairOption = None,
    input_format: InputFormatOption = "auto",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="RULE=VALUE",
            help="Change a rule, for example max_ratio=2; none disables it. Can be repeated.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write the counts as JSON, with a few examples of each reason.",
        ),
    ] = None,
    skip_bad: SkipBadOption = None,
) -> None:
    """Drop unusable sentence pairs and normalize the rest.

    Drops pairs that have an empty side, are too long, have very different lengths, consist mostly
    of non-letters, are in the wrong script for their language, have two identical sides, or are
    duplicates. The rest is composed (NFC), without control characters, with single spaces.

    Rules and their defaults: min_chars 1, max_chars 1000, min_words 1, max_words none,
    max_ratio 3.0, max_nonletters 0.6, and true for drop_identical, drop_duplicates, check_scripts
    and normalize.

    \b
    calque clean en-de.tsv.gz -o clean.en-de.tsv.gz --report report.json
    calque clean news.en news.de -o clean.en -o clean.de --set max_ratio=2 --set max_chars=none
    """  # noqa: D301 (the backspace keeps the lines of the examples apart)
    from calque.io.cleaning import clean_bitext

    started, rules = time.perf_counter(), read_rules(changes or [])
    with progress_bar() as progress:
        result = clean_bitext(
            file,
            file2,
            output=output,
            languages=languages,
            input_format=cast(Any, input_format),
            rules=rules,
            report=report,
            skip_bad=skip_bad,
            progress=progress,
        )
    if result.languages is None and rules.check_scripts:
        print(
            "scripts were not checked: the file names do not contain languages (use --languages)",
            file=sys.stderr,
        )
    print(f"{_describe(result)}; {time.perf_counter() - started:.1f} s", file=sys.stderr)


def read_rules(changes: list[str]) -> CleaningRules:
    """Return the rules with some changed, as in `data.cleaning` of a recipe; `none` disables one.

    >>> read_rules(["max_ratio=2", "max_chars=none"]).max_ratio
    2
    """
    from calque.io.cleaning import CleaningRules

    if not changes:  # the modules below take seconds to import
        return CleaningRules()
    from pydantic import ValidationError

    from calque.training.recipe import DataSection
    from calque.training.recipe_io import apply_setting, describe_error

    rules: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        apply_setting(rules, f"{name}{equals}{'null' if value.lower() == 'none' else value}")
    try:
        return DataSection(cleaning=rules).cleaning_rules()
    except ValidationError as error:
        problem = describe_error(error, {"cleaning": rules}, DataSection)
        raise InputError(f"--set {problem.removeprefix('cleaning: ')}") from error


def _describe(result: CleaningResult) -> str:
    share = result.n_kept / max(result.n_read, 1)
    reasons = ", ".join(f"{name} {n:,}" for name, n in result.dropped.items()) or "none"
    notes = [
        f"{', '.join(result.outputs)}: kept {result.n_kept:,} of {result.n_read:,} ({share:.1%})",
        f"dropped: {reasons}",
        f"{result.n_normalized:,} normalized",
    ]
    if result.n_bad:
        notes.append(f"{result.n_bad:,} bad lines skipped")
    if result.n_extra_columns:
        notes.append(
            f"{result.n_extra_columns:,} lines have more than three columns, and the rest was left "
            f"out (line {result.first_extra_columns:,} is the first)"
        )
    return "; ".join(notes)
