"""`calque translate`: lines in one language, lines in another."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.types import PairAttention

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calque.models.seq2seq import Seq2Seq
    from calque.translation.translate import TranslateReport


def translate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The folder of an encoder–decoder, or hub name.")
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="One sentence a line; plain, .gz, .xz, .zst; else standard input."
        ),
    ] = "-",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where it goes; else standard output."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a run to the same -o was interrupted.")
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(metavar="LANGUAGE", help="The language to write, if the model has several."),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="LANGUAGE", help="That of the text: how long lines are split."
        ),
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="How many are kept in the search.")] = 5,
    length_penalty: Annotated[
        float, typer.Option(help="More favors longer translations, 0 shorter ones.")
    ] = 1.0,
    nbest: Annotated[
        int, typer.Option(min=1, help="Write the N best: `line ||| text ||| score`.")
    ] = 1,
    score: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score against these references: BLEU and chrF."),
    ] = None,
    skip_bad: Annotated[
        Path | None,
        typer.Option(metavar="LIST", help="Leave undecodable lines empty, and list them here."),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Source tokens a batch; else what suits the device.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Translate each line of a text.

    Line k of the output is the translation of line k. A line too long for the model is split into
    sentences, and put together again: nothing is cut off. Empty lines stay empty.

    \b
    calque translate runs/translate/model < news.en > news.de
    calque translate runs/translate/model news.en.xz -o news.de.gz
    calque translate runs/both/model news.de --to en
    calque translate runs/translate/model test.en --score test.de     BLEU and chrF
    calque translate runs/translate/model big.en -o big.de --resume   after a kill: the same

    Text of any size is read in blocks. Until FILE is whole they are kept in FILE.partial/.
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.translate_job import TranslateJob
    from calque.translation.translate import Search, Translator

    job = TranslateJob(file, output, resume, skip_bad, score)
    search = Search(beams, length_penalty, nbest)
    job.check(n_best=nbest)
    started = time.perf_counter()
    n_lines = job.count_lines()
    references = job.read_references(n_lines)
    translator = Translator(
        load_model(model, device), search, target=to, source=language, batch_tokens=batch_tokens
    )
    try:
        report, n_before, n_skipped, kept = job.run(translator, n_lines)
    except KeyboardInterrupt:
        if job.unfinished is not None:
            print(f"{job.unfinished}: go on with --resume", file=sys.stderr)
        raise
    seconds = time.perf_counter() - started
    if references is not None:
        _show_scores(kept, references, translator.target)
    notes = _describe(report, n_before, n_skipped)
    print(f"{job.place}: {notes}; {seconds:.1f} s", file=sys.stderr)


def load_model(name: str, device: str) -> Seq2Seq:
    """Load an encoder–decoder in half precision on a GPU, in single precision elsewhere."""
    import torch

    from calque.models.inference import choose_device
    from calque.models.seq2seq import Seq2Seq

    place = choose_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    return Seq2Seq.load(name, device=place, dtype=dtype)


def _show_scores(translations: list[str], references: list[str], language: str) -> None:
    from calque.translation.bleu import score_translations

    found = score_translations(translations, references, language)
    print(f"BLEU {found.bleu:.2f}  {found.bleu_signature}", file=sys.stderr)
    print(f"chrF {found.chrf:.2f}  {found.chrf_signature}", file=sys.stderr)


def _describe(report: TranslateReport, n_before: int, n_skipped: int) -> str:
    """Say what was written, and what was not usual about it."""
    before = f" ({n_before:,} of them before)" if n_before else ""
    notes = [f"{report.n_lines:,} lines{before}", f"{report.n_written:,} tokens"]
    if report.n_long:
        notes.append(f"{report.n_long:,} long lines split by sentence")
    if report.n_cut:
        notes.append(f"{report.n_cut:,} huge sentences cut into windows")
    if report.n_unfinished:
        notes.append(f"{report.n_unfinished:,} translations reached the longest allowed")
    if n_empty := report.n_empty - n_skipped:
        notes.append(f"{n_empty:,} empty lines")
    if n_skipped:
        notes.append(f"{n_skipped:,} lines skipped")
    return ", ".join(notes)


def attention(
    src: Annotated[str, typer.Argument(metavar="SENTENCE", help="A sentence.")],
    tgt: Annotated[
        str, typer.Argument(metavar="TRANSLATION", help="The same in another language.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model folder or hub name, or several; else the embedded model."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PICTURE", help="Draw it, too: .png, .svg or .pdf."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Of the lines drawn: 1 to the last; else the mean of all.")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            metavar="reset|continue",
            help="How a second sentence's positions count; else as the model says, or continue.",
        ),
    ] = None,
) -> None:
    """Show how much a sentence looks at its translation, by layer.

    Shown is the share of attention that goes to the other sentence. Self-attention reads the two
    side by side; a model trained with cross_attention_lm also has a cross-attention, of which what
    sentence marks get counts as nothing.
    """
    from rich.console import Console

    from calque.cli.console import show_phases
    from calque.report.plots import check_plot, find_fonts, plot_attention, save_plot
    from calque.translation.pair_attention import read_pair

    if output is not None:
        check_plot(output)
    if positions not in (None, "reset", "continue"):
        raise InputError(f"--positions {positions}: no such way", fix="give reset or continue")
    readings: list[PairAttention] = []
    with show_phases("reading") as tell:
        names: list[str | None] = [*dict.fromkeys(model or [])] or [None]
        for name in names:
            tell(name or "the embedded model")
            readings += read_pair(name, src, tgt, positions=positions)  # type: ignore[arg-type]
    _check_layer(readings, layer)
    Console().print(_tabulate(readings))
    if output is not None:
        save_plot(plot_attention(readings, layer=layer), output)
        print(f"{output}: shares by layer, and lines from piece to piece", file=sys.stderr)
        _, missing = find_fonts("".join(piece for one in readings for piece in one.src + one.tgt))
        if missing:
            told = f"no font here draws {missing}: such pieces go by their numbers"
            print(f"warning: {told} (install one, such as Noto Sans CJK)", file=sys.stderr)


def _check_layer(readings: Sequence[PairAttention], layer: int | None) -> None:
    n_layers = min(len(one.shares) for one in readings)
    if layer is not None and not 1 <= layer <= n_layers:
        raise InputError(f"--layer {layer}: no such layer", fix=f"give 1 to {n_layers}")


def _tabulate(readings: Sequence[PairAttention]) -> Table:
    from rich.table import Table

    from calque.report.plots import shorten_names

    names = shorten_names(one.model for one in readings)
    table = Table(title="attention to the other sentence (%)")
    table.add_column("layer", justify="right")
    for one in readings:
        table.add_column(f"{names[one.model]}\n{one.kind}", justify="right", overflow="fold")
    for layer in range(max(len(one.shares) for one in readings)):
        cells = [one.shares[layer : layer + 1] for one in readings]
        table.add_row(str(layer + 1), *(f"{100 * cell[0]:.1f}" if cell else "–" for cell in cells))
    table.add_section()
    means = [sum(one.shares) / len(one.shares) for one in readings]
    table.add_row("mean", *(f"{100 * mean:.1f}" for mean in means), style="bold")
    table.add_row("if even", *(f"{100 * one.even:.1f}" for one in readings))
    return table
