"""`calque links`: from bitext to words with links that encoders can be aligned by."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.tools.aligning import Aligner
    from calque.tools.link_maker import OnProgress
    from calque.tools.link_report import LinkReport

ALIGNERS = ("fast-align", "eflomal", "neural")
SPLITS = ("rules", "spaces")
INPUTS = ("auto", "pipes", "tsv", "moses")


def links(
    bitexts: Annotated[
        list[str],
        typer.Argument(
            metavar="BITEXT…", help="Lines `a TAB b` or `a ||| b`, or two sides: news.en news.de."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the linked text goes.")
    ],
    aligner: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="fast-align (the default), eflomal or neural."),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option("--links", metavar="FILE", help="Links found before; one FILE a BITEXT."),
    ] = None,
    symmetrize: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="For eflomal; else grow-diag-final-and."),
    ] = None,
    languages: Annotated[
        str | None,
        typer.Option(metavar="SRC-TGT", help="de-en, zh-fr …; else the files' names tell."),
    ] = None,
    leave_out: Annotated[
        str | None, typer.Option(metavar="LANG,LANG", help="No BITEXT of these languages.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Words by the rules of the languages, or at spaces (the default with --links).",
        ),
    ] = None,
    input_format: Annotated[
        str, typer.Option("--input", metavar="KIND", help="auto, pipes, tsv or moses (two sides).")
    ] = "auto",
    include_tags: Annotated[
        str | None,
        typer.Option(metavar="TAG,TAG", help="Only pairs of these third columns of a TSV."),
    ] = None,
    exclude_tags: Annotated[
        str | None, typer.Option(metavar="TAG,TAG", help="No pairs of these.")
    ] = None,
    keep_identical: Annotated[
        bool, typer.Option("--keep-identical", help="Keep links between identical words.")
    ] = False,
    keep_many: Annotated[
        bool, typer.Option("--keep-many", help="Keep links that are not one-to-one.")
    ] = False,
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Keep pairs that are left without links.")
    ] = False,
    scores: Annotated[
        bool, typer.Option("--scores", help="Write i-j:0.9300: recipes take scores for weights.")
    ] = False,
    skip_bad: Annotated[
        Path | None, typer.Option(metavar="LIST", help="Leave bad lines out, and list them here.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier run wrote.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="For neural: a folder or hub name; else the embedded model.")
    ] = None,
    device: Annotated[str, typer.Option(help="For neural: auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Link the words of bitext, and keep what is worth training on.

    For every BITEXT the FOLDER gets NAME.text (words ||| words) and NAME.links (i-j …), a line a
    pair, and report.json, which says what each filter removed. The links are those of fast_align
    in both directions, grow-diag-final-and; dropped are, in this order, links between identical
    words, links of words that have several, and pairs left with none (Wu and Dredze, 2020).

    \b
    calque links bitext/en-*.tsv.xz -o linked --leave-out th
    calque links news.en news.de -o linked           two files, line by line
    calque links en-de.txt --split spaces -o linked  words stand apart already
    calque links bitext/en-*.tsv.xz -o linked --exclude-tags xnli --aligner eflomal
    calque links en-de.txt --links en-de.links -o linked
    calque links raw.tsv --languages de-en --aligner neural -o linked

    A recipe reads it as {path: linked/en-*.text, kind: bitext, links: linked/en-*.links}.
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.aligner_options import check_choice
    from calque.text.files import check_list
    from calque.text.segmentation import parse_languages
    from calque.tools.link_maker import LinkRules, make_links
    from calque.tools.link_sources import find_bitexts
    from calque.tools.statistical_aligner import DEFAULT_SYMMETRIZATION

    started = time.perf_counter()
    check_choice("--aligner", aligner, ALIGNERS)
    check_choice("--split", split, SPLITS)
    check_choice("--input", input_format, INPUTS)
    _check_together(aligner, symmetrize, model, has_links=bool(given))
    sources = find_bitexts(
        bitexts,
        languages=None if languages is None else parse_languages(languages),
        split=cast(Any, split),
        format=cast(Any, input_format),
        links=given or (),
        leave_out=_parse_list(leave_out or ""),
    )
    check_list(skip_bad, [*(path for source in sources for path in source.paths), *(given or ())])
    rules = LinkRules(
        None if include_tags is None else _parse_list(include_tags),
        _parse_list(exclude_tags or ""),
        keep_identical,
        keep_many,
        keep_empty,
        scores,
    )
    with ExitStack() as stack:
        chosen, more = _choose_aligner(aligner, model, device, stack)
        reports = make_links(
            sources,
            output,
            aligner=chosen,
            rules=rules,
            skip_bad=skip_bad,
            overwrite=overwrite,
            on_progress=stack.enter_context(_show_progress()),
            say=lambda note: print(note, file=sys.stderr),
            symmetrize=symmetrize or DEFAULT_SYMMETRIZATION,
            **more,
        )
    _show(reports, output, time.perf_counter() - started)


def _check_together(
    aligner: str | None, symmetrize: str | None, model: str | None, *, has_links: bool
) -> None:
    """Refuse options that do not go together."""
    from calque.cli.aligner_options import SYMMETRIZATIONS, check_choice

    check_choice("--symmetrize", symmetrize, SYMMETRIZATIONS)
    clashes = [
        (has_links and aligner, "--aligner with --links", "the links are there: drop one"),
        (has_links and symmetrize, "--symmetrize with --links", "the links are there: drop one"),
        (aligner == "neural" and symmetrize, "--symmetrize with --aligner neural", "drop it"),
        (aligner != "neural" and model, "--model without an encoder", "add --aligner neural"),
    ]
    for clash, problem, fix in clashes:
        if clash:
            raise InputError(problem, fix=fix)


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _choose_aligner(
    kind: str | None, model: str | None, device: str, stack: ExitStack
) -> tuple[Any | Aligner, dict[str, Any]]:
    """Give the aligner, and the size of the blocks that an encoder likes."""
    if kind != "neural":
        return kind or "fast-align", {}
    from calque.cli import aligners
    from calque.cli.aligner_options import AlignerOptions

    options = AlignerOptions("neural", model, device=device)
    chosen = stack.enter_context(aligners.choose_aligner(options, lambda: iter(())))
    return chosen.aligner, {"block_pairs": chosen.block_pairs}


@contextmanager
def _show_progress() -> Iterator[OnProgress]:
    """Draw a bar on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda name, phase, n_done, n_pairs: progress.update(
            task, description=f"{name}: {phase}", completed=n_done, total=n_pairs
        )


def _show(reports: Mapping[str, LinkReport], output: Path, seconds: float) -> None:
    """Say what was dropped, and what was written where."""
    from rich.console import Console

    from calque.tools.link_report import REPORT, LinkReport

    total = LinkReport.total(reports.values())
    console = Console()
    if len(reports) > 1:
        console.print(_tabulate_bitexts(reports))
    console.print(_tabulate_steps(total, next(iter(reports)) if len(reports) == 1 else "all"))
    notes = [
        f"{len(reports):,} bitexts" if len(reports) > 1 else f"{next(iter(reports))}.text, .links"
    ]
    notes += [f"{total.n_kept:,} of {total.n_read:,} pairs", f"{total.n_kept_links:,} links"]
    if total.n_long:
        notes.append(f"{total.n_long:,} long pairs in parts")
    if total.n_cut:
        notes.append(f"{total.n_cut:,} huge words known by their beginnings")
    print(f"{output}: {', '.join(notes)}, {REPORT}; {seconds:.1f} s", file=sys.stderr)


def _tabulate_steps(report: LinkReport, name: str) -> Table:
    """Show what each step dropped: of the pairs read, and of the links found."""
    from rich.table import Table

    from calque.tools.link_report import share

    table = Table(title=name)
    for column in ("", "number", "%"):
        table.add_column(column, justify="right" if column else "left")

    def add(rows: list[tuple[str, int]], whole: int) -> None:
        for label, number in rows:
            if number or label not in UNUSUAL:
                table.add_row(label, f"{number:,}", f"{100 * share(number, whole):.1f}")

    pairs = [
        ("pairs read", report.n_read),
        ("bad lines", report.n_bad),
        ("other tags", report.n_other_tags),
        ("empty sides", report.n_empty),
        ("words not to be written", report.n_unfit),
        ("without links", report.n_unlinked),
        ("pairs kept", report.n_kept),
    ]
    found = [
        ("links found", report.n_links),
        ("identical words", report.n_identical),
        ("not one-to-one", report.n_many),
        ("links kept", report.n_kept_links),
    ]
    add(pairs, report.n_read)
    table.add_section()
    add(found, report.n_links)
    return table


UNUSUAL = {"bad lines", "other tags", "words not to be written"}


def _tabulate_bitexts(reports: Mapping[str, LinkReport]) -> Table:
    """Show what is left of every bitext."""
    from rich.table import Table

    from calque.tools.link_report import share

    table = Table(title="by bitext")
    table.add_column("bitext")
    for column in ("pairs\nread", "kept", "links\nfound", "identical\n%", "not 1-1\n%", "kept"):
        table.add_column(column, justify="right")
    for name, report in reports.items():
        shares = (share(n, report.n_links) for n in (report.n_identical, report.n_many))
        identical, many = (f"{100 * part:.1f}" for part in shares)
        counts = (report.n_read, report.n_kept, report.n_links, report.n_kept_links)
        read, kept, found, kept_links = (f"{n:,}" for n in counts)
        table.add_row(name, read, kept, found, identical, many, kept_links)
    return table
