"""`calque clean`: bitext without the pairs that are of no use, and what was dropped and why."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from calque.text.bitext import Paths
    from calque.text.cleaning import CleaningReport, CleaningRules
    from calque.types import SentencePair


def clean(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Lines `a TAB b` or `a ||| b`, or one side.")
    ],
    file2: Annotated[
        str | None, typer.Argument(metavar="FILE2", help="The other side, line by line.")
    ] = None,
    output: Annotated[
        list[Path],
        typer.Option("--output", "-o", metavar="FILE", help="A TSV; or twice, a file a side."),
    ] = [],  # noqa: B006 (typer makes a list of its own)
    languages: Annotated[
        str | None,
        typer.Option(metavar="SRC-TGT", help="de-en, zh-fr …; else the files' names tell."),
    ] = None,
    input_format: Annotated[
        str, typer.Option("--input", metavar="KIND", help="auto, pipes (a ||| b) or tsv.")
    ] = "auto",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="RULE=VALUE", help="Change a rule: max_ratio=2; repeatable."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="JSON", help="Keep the counts, with a few examples of each."),
    ] = None,
    skip_bad: Annotated[
        Path | None, typer.Option(metavar="LIST", help="Leave bad lines out, and list them here.")
    ] = None,
) -> None:
    """Drop sentence pairs that are of no use, and tidy the rest.

    Dropped are pairs with an empty side, too long or too unequal ones, those that are mostly no
    letters, in the wrong script for their language, the same on both sides, or there already. The
    rest is composed (NFC), without control characters, with single spaces. Rules and defaults:
    min_chars 1, max_chars 1000, min_words 1, max_words none, max_ratio 3.0, max_nonletters 0.6,
    drop_identical, drop_duplicates, check_scripts and normalize true.

    \b
    calque clean en-de.tsv.gz -o clean.en-de.tsv.gz --report report.json
    calque clean news.en news.de -o clean.en -o clean.de --set max_ratio=2 --set max_chars=none
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.text.bitext import write_bitext
    from calque.text.cleaning import CleaningReport, clean_pairs
    from calque.text.files import check_target, open_list, write_atomically

    started, inputs = time.perf_counter(), [file] if file2 is None else [file, file2]
    if len(output) not in (1, 2):
        raise InputError(f"{len(output)} outputs", fix="give -o FILE, or -o twice: a file a side")
    lists = [path for path in (report, skip_bad) if path is not None]
    for path in [*output, *lists]:
        check_target(path, inputs)
    if len({path.resolve() for path in [*set(output), *lists]}) < len(set(output)) + len(lists):
        raise InputError("-o, --report and --skip-bad", fix="name different files")
    rules, found, wide = read_rules(changes or []), CleaningReport(), _WideLines()
    paths: Paths = file if file2 is None else (file, file2)
    pair = _find_languages(languages, paths)
    with ExitStack() as stack:
        skipped = open_list(skip_bad, stack)
        pairs = _read(paths, input_format, skipped, wide)
        write_bitext([str(path) for path in output], clean_pairs(pairs, rules, found, pair))
        if report is not None:
            stream = stack.enter_context(write_atomically(report))
            stream.write(json.dumps(found.to_dict(), ensure_ascii=False, indent=1) + "\n")
    place, notes = ", ".join(map(str, output)), _describe(found, skipped, wide)
    print(f"{place}: {notes}; {time.perf_counter() - started:.1f} s", file=sys.stderr)


def read_rules(changes: list[str]) -> CleaningRules:
    """Read rules as `data.cleaning` of a recipe takes them; `none` switches one off.

    >>> read_rules(["max_ratio=2", "max_chars=none"]).max_ratio
    2
    """
    from pydantic import ValidationError

    from calque.training.data import cleaning_rules
    from calque.training.recipe import DataSection, apply_override
    from calque.training.recipe_errors import describe_error

    rules: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        apply_override(rules, f"{name}{equals}{'null' if value.lower() == 'none' else value}")
    try:
        return cleaning_rules(DataSection(cleaning=rules))
    except ValidationError as error:
        problem = describe_error(error, {"cleaning": rules}, DataSection)
        raise InputError(f"--set {problem.removeprefix('cleaning: ')}") from error


def _find_languages(given: str | None, paths: Paths) -> tuple[str, str] | None:
    from calque.text.bitext import languages_of

    if given is None:
        found = languages_of(paths)
        if found is None:
            hint = "give --languages de-en to have them checked"
            print(f"scripts are not checked: no languages in the names ({hint})", file=sys.stderr)
        return found
    src, dash, tgt = given.partition("-")
    if not (src and dash and tgt):
        raise InputError(f"--languages {given} is no pair", fix="write de-en")
    return src, tgt


class _WideLines:
    """Counts lines that have columns which are not kept."""

    def __init__(self) -> None:
        self.n_lines = self.first = 0

    def __call__(self, number: int) -> None:
        """Note one such line."""
        self.first = self.first or number
        self.n_lines += 1


def _read(
    paths: Paths, input_format: str, skipped: Any, wide: _WideLines
) -> Iterator[SentencePair]:
    from calque.cli.progress import show_progress
    from calque.text.bitext import read_bitext

    with show_progress("cleaning", None) as advance:
        kind = cast(Any, input_format)
        for pair in read_bitext(paths, kind, skip_bad=skipped, on_wide=wide):
            yield pair
            advance(1)


def _describe(report: CleaningReport, skipped: Any, wide: _WideLines) -> str:
    notes = [report.summary(), f"{report.n_normalized:,} tidied"]
    if skipped is not None and skipped.n_lines:
        notes.append(f"{skipped.n_lines:,} bad lines skipped")
    if wide.n_lines:
        what = "lines with more than three columns, of which the rest is left out"
        notes.append(f"{wide.n_lines:,} {what} (line {wide.first:,} is the first)")
    return "; ".join(notes)
