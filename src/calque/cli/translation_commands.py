"""`calque translate`: lines in one language, lines in another."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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

    from calque.api import choose_device
    from calque.models.seq2seq import Seq2Seq

    place = choose_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    return Seq2Seq.load(name, device=place, dtype=dtype)


def _show_scores(translations: list[str], references: list[str], language: str) -> None:
    from calque.evaluation.tasks.machine_translation import score_translations

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
