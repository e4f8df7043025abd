"""Commands on encoder-decoder models and attention: translate and attention."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.cli.options import BatchTokensOption, DeviceOption, ResumeOption, SkipBadOption
from calque.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.types import PairAttention


def translate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or hub name of an encoder-decoder model.")
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="One sentence per line; plain, .gz, .xz or .zst. Default: standard input.",
        ),
    ] = "-",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Output file. Default: standard output."
        ),
    ] = None,
    src_lang: Annotated[
        str | None,
        typer.Option(
            "--src-lang",
            metavar="CODE",
            help="Language of the text, to split long lines into sentences. Default: the model's.",
        ),
    ] = None,
    tgt_lang: Annotated[
        str | None,
        typer.Option(
            "--tgt-lang",
            metavar="CODE",
            help="Language to translate into, if the model has several.",
        ),
    ] = None,
    beams: Annotated[int, typer.Option("--beams", min=1, metavar="N", help="Number of beams.")] = 5,
    length_penalty: Annotated[
        float,
        typer.Option(
            "--length-penalty", metavar="X", help="Higher values favor longer translations."
        ),
    ] = 1.0,
    nbest: Annotated[
        int,
        typer.Option(
            "--nbest",
            min=1,
            metavar="N",
            help="Write the N best translations: `line ||| text ||| score`.",
        ),
    ] = 1,
    score: Annotated[
        Path | None,
        typer.Option(
            "--score",
            metavar="FILE",
            help="Compute BLEU and chrF against the references in this file.",
        ),
    ] = None,
    resume: ResumeOption = False,
    skip_bad: SkipBadOption = None,
    batch_tokens: BatchTokensOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Translate each line of a text.

    Line k of the output is the translation of line k. A line that is too long for the model is
    split into sentences, and their translations are joined. Empty and skipped lines stay empty.

    \b
    calque translate runs/translate/model < news.en > news.de
    calque translate runs/translate/model news.en.xz -o news.de.gz
    calque translate runs/both/model news.de --tgt-lang en
    calque translate runs/translate/model test.en --score test.de     BLEU and chrF
    calque translate runs/translate/model big.en -o big.de --resume   after an interruption

    Text of any size is translated block by block. Until FILE is complete, its blocks are kept in
    FILE.partial/.
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import print_summary, progress_bar
    from calque.translation.translate import translate_file

    started = time.perf_counter()
    with progress_bar() as progress:
        result = translate_file(
            model,
            file,
            output=output,
            src_lang=src_lang,
            tgt_lang=tgt_lang,
            beams=beams,
            length_penalty=length_penalty,
            nbest=nbest,
            score=score,
            resume=resume,
            skip_bad=skip_bad,
            batch_tokens=batch_tokens,
            device=device,
            progress=progress,
        )
    if (scores := result.scores) is not None:
        print(f"BLEU {scores.bleu:.2f}  {scores.bleu_signature}", file=sys.stderr)
        print(f"chrF {scores.chrf:.2f}  {scores.chrf_signature}", file=sys.stderr)
    counts = result.counts
    earlier = f" ({result.n_resumed:,} of them earlier)" if result.n_resumed else ""
    notes = [f"{counts.n_lines:,} lines{earlier}", f"{counts.n_written:,} tokens"]
    unusual = [
        (counts.n_long, "long lines split into sentences"),
        (counts.n_cut, "very long sentences split into windows"),
        (counts.n_unfinished, "translations reached the maximum length"),
        (counts.n_empty - result.n_skipped, "empty lines"),
        (result.n_skipped, "lines skipped"),
    ]
    notes += [f"{number:,} {what}" for number, what in unusual if number]
    print_summary(result.output or "standard output", notes, started)


def attention(
    src: Annotated[str, typer.Argument(metavar="SENTENCE", help="A sentence.")],
    tgt: Annotated[str, typer.Argument(metavar="TRANSLATION", help="Its translation.")],
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model folder, hub name or calque-mini. Can be repeated. Default: calque-mini.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also draw the attention into a .png, .svg or .pdf file.",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer",
            metavar="N",
            help="Layer to draw, counted from 1. Default: the mean of all layers.",
        ),
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            "--positions",
            metavar="reset|continue",
            help="How positions of the second sentence are counted. Default: as in training, or "
            "continue.",
        ),
    ] = None,
) -> None:
    """Show how much attention two sentences pay to each other.

    The table has, for each layer, the share of attention that goes to the other sentence. For
    self-attention, both sentences are in one sequence. A model trained with cross_attention_lm also
    has cross-attention; attention to special tokens counts for neither sentence.

    \b
    calque attention 'Take a seat' 'Setz dich' -o attention.svg
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from rich.console import Console

    from calque.cli.console import progress_bar
    from calque.report.plots import check_plot, find_fonts, plot_attention, save_plot
    from calque.translation.pair_attention import pair_attention

    if output is not None:
        check_plot(output)
    with progress_bar() as progress:
        results = pair_attention(
            src,
            tgt,
            model=list(dict.fromkeys(model)) if model else None,
            positions=positions,  # type: ignore[arg-type]
            progress=progress,
        )
    n_layers = min(len(result.shares) for result in results)
    if layer is not None and not 1 <= layer <= n_layers:
        raise InputError(f"there is no layer {layer}", fix=f"choose 1 to {n_layers} (--layer)")
    Console().print(_tabulate(results))
    if output is not None:
        save_plot(plot_attention(results, layer=layer), output)
        print(f"{output}: shares by layer, and lines between the tokens", file=sys.stderr)
        tokens = "".join(token for result in results for token in result.src + result.tgt)
        _, missing = find_fonts(tokens)
        if missing:
            print(
                f"calque: warning: no font has {missing}: such tokens are drawn as numbers "
                "(install a font such as Noto Sans CJK)",
                file=sys.stderr,
            )


def _tabulate(results: Sequence[PairAttention]) -> Table:
    from rich.table import Table

    from calque.report.plots import shorten_names

    names = shorten_names(result.model for result in results)
    table = Table(title="attention to the other sentence (%)")
    table.add_column("layer", justify="right")
    for result in results:
        table.add_column(f"{names[result.model]}\n{result.kind}", justify="right", overflow="fold")
    for layer in range(max(len(result.shares) for result in results)):
        cells = [result.shares[layer : layer + 1] for result in results]
        table.add_row(str(layer + 1), *(f"{100 * cell[0]:.1f}" if cell else "–" for cell in cells))
    table.add_section()
    means = [sum(result.shares) / len(result.shares) for result in results]
    table.add_row("mean", *(f"{100 * mean:.1f}" for mean in means), style="bold")
    table.add_row("if uniform", *(f"{100 * result.uniform:.1f}" for result in results))
    return table
