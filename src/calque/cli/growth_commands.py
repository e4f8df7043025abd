"""The command that starts a cross-lingual model from a monolingual one, and its tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.cli.options import OverwriteOption

if TYPE_CHECKING:
    from rich.table import Table

    from calque.growth.grow import GrowReport, MatchExample, MatchReport, TextShare

N_EXAMPLES, N_SCRIPTS = 4, 20
SHORT_NAMES = {"normalized": "norm.", "dictionary": "dict.", "composed": "comp."}
CAPTION = "without: if there were no dictionaries"


def grow(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Monolingual model: a folder, a hub name or calque-mini."
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            metavar="NEW",
            help="New tokenizer: a folder, a file tokenizer.json, a hub name or calque-mini.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the new model.")
    ],
    dictionary: Annotated[
        list[str] | None,
        typer.Option(
            "--dictionary",
            metavar="FILE",
            help="Dictionary in the format of MUSE, or a quoted pattern such as 'muse/en-*.txt'. "
            "Can be repeated.",
        ),
    ] = None,
    language: Annotated[
        str,
        typer.Option(
            "--language",
            metavar="CODE",
            help="Language of MODEL, as in the names of the dictionaries.",
        ),
    ] = "en",
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text, or a quoted pattern, for which to count the tokens that start matched. "
            "Can be repeated.",
        ),
    ] = None,
    initialize: Annotated[
        str,
        typer.Option(
            "--initialize", metavar="WHAT", help="What to copy: both, body, embeddings or none."
        ),
    ] = "both",
    unmatched: Annotated[
        str,
        typer.Option(
            "--unmatched",
            metavar="HOW",
            help="Unmatched rows: moments (mean and covariance of the matched rows), normal "
            "(N(0, 0.02)) or pieces (mean of those that MODEL splits the piece into).",
        ),
    ] = "moments",
    prefer: Annotated[
        str,
        typer.Option(
            "--prefer",
            metavar="WHAT",
            help="What to try first: dictionary (a piece's translation) or surface (its text).",
        ),
    ] = "dictionary",
    average: Annotated[
        str,
        typer.Option(
            "--average",
            metavar="HOW",
            help="Mean of several translations: plain or weighted (by the number of dictionaries).",
        ),
    ] = "plain",
    no_compose: Annotated[
        bool,
        typer.Option(
            "--no-compose", help="Ignore translations that MODEL splits into several pieces."
        ),
    ] = False,
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, metavar="N", help="Random seed.")
    ] = 0,
    overwrite: OverwriteOption = False,
) -> None:
    """Start a cross-lingual model from a monolingual one (MetaXLM).

    The architecture stays the same and the body is copied; a row of the new vocabulary takes the
    row of the same text or of its translation. The output is a plain Hugging Face folder for the
    recipe setting `model.start`, with a report in growth.json. The name of a dictionary, such as
    en-de.txt or de-en.txt, names its columns.

    \b
    calque grow roberta-base --tokenizer xlm-roberta-base -o start
    calque grow MINILM --tokenizer calque-mini -o start \\
        --dictionary 'muse/en-*.txt' --dictionary 'muse/*-en.*.txt' --text 'wiki/*.txt'
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from rich.console import Console

    from calque.cli.console import print_summary, progress_bar
    from calque.growth import grow as growth

    started = time.perf_counter()
    with progress_bar() as progress:
        report = growth.grow(
            model,
            tokenizer=tokenizer,
            output=output,
            dictionary=dictionary or (),
            language=language,
            text=text or (),
            initialize=cast(Any, initialize),
            unmatched=cast(Any, unmatched),
            prefer=cast(Any, prefer),
            average=cast(Any, average),
            compose=not no_compose,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
    if report.match is not None:
        console = Console()
        console.print(_tabulate_rules(report.match))
        console.print(_tabulate_scripts(report.match))
        if report.match.texts:
            console.print(_tabulate_texts(report.match, language))
    print_summary(output, _summarize(report), started)


def _tabulate_rules(match: MatchReport) -> Table:
    """Return the number of rows of each rule, with and without dictionaries."""
    from rich.markup import escape
    from rich.table import Table

    from calque.growth.match import RULES, UNMATCHED

    table = Table(title="rows by rule", caption=CAPTION)
    for name in ("rule", "rows", "%", "without", "for example"):
        table.add_column(name, justify="left" if name in ("rule", "for example") else "right")
    n_rows = sum(match.rules.values()) or 1
    for rule in (*RULES[1:], RULES[UNMATCHED]):
        n, without = match.rules[rule], match.rules_without[rule]
        examples = ", ".join(map(_format_example, match.examples[rule][:N_EXAMPLES]))
        table.add_row(rule, f"{n:,}", f"{100 * n / n_rows:.1f}", f"{without:,}", escape(examples))
    return table


def _format_example(example: MatchExample) -> str:
    origin = "/".join(example.meanings[:3]) or " ".join(example.sources[:3])
    return f"{example.piece} → {origin}" if origin else example.piece


def _tabulate_scripts(match: MatchReport) -> Table:
    """Return the percentage of each script's rows that were matched, by rule."""
    from rich.table import Table

    rules = _matching_rules()
    table = Table(title="rows by script (%)")
    table.add_column("script")
    for name in ("rows", "matched", *(SHORT_NAMES.get(rule, rule) for rule in rules)):
        table.add_column(name, justify="right")
    for script, counts in list(match.scripts.items())[:N_SCRIPTS]:
        n_rows = sum(counts.values())
        shares = [100 * counts[rule] / n_rows for rule in rules]
        cells = [f"{share:.1f}" for share in (sum(shares), *shares)]
        table.add_row(script, f"{n_rows:,}", *cells)
    if len(match.scripts) > N_SCRIPTS:
        table.caption = f"and {len(match.scripts) - N_SCRIPTS} scripts with fewer rows"
    return table


def _tabulate_texts(match: MatchReport, language: str) -> Table:
    """Return the percentage of each text's tokens that start matched."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from calque.growth.grow import average_other_texts

    # With the usual lines and padding, ten columns would not fit 80 characters.
    title = "tokens of texts whose row starts matched (%)"
    table = Table(title=title, caption=CAPTION, box=SIMPLE_HEAD, padding=0)
    table.add_column("text")
    rules = (SHORT_NAMES.get(rule, rule) for rule in _matching_rules())
    for name in ("tokens", "matched", "without", *rules):
        table.add_column(name, justify="right")
    for text in match.texts:
        table.add_row(*_format_text(text))
    others = average_other_texts(match.texts, language)
    if len(match.texts) > 1 and others is not None:
        table.add_section()
        table.add_row(*_format_text(others), style="bold")
    return table


def _format_text(text: TextShare) -> list[str]:
    shares = [text.matched, text.matched_without, *(text.rules[r] for r in _matching_rules())]
    return [text.name, f"{text.n_tokens:,}", *(f"{100 * share:.1f}" for share in shares)]


def _matching_rules() -> tuple[str, ...]:
    from calque.growth.match import EXACT, RULES

    return RULES[EXACT:]


def _summarize(report: GrowReport) -> list[str]:
    """Return what was grown, in a few words."""
    notes = [f"{report.n_rows:,} rows instead of {report.n_mono_rows:,}"]
    if report.match is None:
        notes.append("embeddings new")
    else:
        notes.append(f"{100 * report.match.matched:.1f} % matched")
        uses = report.match.dictionaries
        if n_entries := sum(use.n_entries for use in uses):
            n_used = sum(use.n_used for use in uses)
            notes.append(f"{n_used:,} of {n_entries:,} dictionary entries used")
        if unused := [Path(use.path).name for use in uses if not use.n_used]:
            notes.append(f"none of {', '.join(unused)}")
        if report.match.n_unspelled:
            notes.append(f"{report.match.n_unspelled:,} translations unknown to the model")
    notes.append("body copied" if report.initialize in ("both", "body") else "body new")
    if not report.has_head:
        notes.append("language modeling head new, because the checkpoint has none")
    missing = [new for new, old in report.special.values() if old is None]
    if missing:
        notes.append(f"special tokens without a counterpart: {' '.join(dict.fromkeys(missing))}")
    return notes
