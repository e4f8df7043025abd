"""`calque align`: the links between the words of sentence pairs."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from calque.cli.align_job import AlignJob, BitextFiles, GoldTally
    from calque.cli.aligner_options import AlignerOptions
    from calque.tools.link_writer import LinkLayout, LinkTotals
    from calque.tools.shards import Shard

FORMATS = ("pharaoh", "jsonl", "words")
INPUTS = ("auto", "pipes", "tsv")


def align(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Lines `a ||| b` or `a TAB b`, or one side; - is standard input."
        ),
    ],
    other: Annotated[
        str | None, typer.Argument(metavar="FILE2", help="The other side, line by line.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="LINKS", help="Where the links go; else standard output."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a run to the same -o was interrupted.")
    ] = False,
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="pharaoh (i-j), jsonl (words, links, scores), words (to read)."
        ),
    ] = "pharaoh",
    scores: Annotated[
        bool, typer.Option("--scores", help="Write i-j:0.9300; jsonl always has the scores.")
    ] = False,
    tokenize: Annotated[
        str | None,
        typer.Option(metavar="SRC-TGT", help="Split raw text into words: de-en, zh-fr …"),
    ] = None,
    input_format: Annotated[
        str, typer.Option("--input", metavar="KIND", help="auto, pipes (a ||| b) or tsv.")
    ] = "auto",
    skip_bad: Annotated[
        Path | None,
        typer.Option(metavar="LIST", help="Give bad lines no links, and list them here."),
    ] = None,
    gold: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Score against these links: i-j sure, ipj possible."),
    ] = None,
    gold_from_one: Annotated[
        bool, typer.Option("--gold-from-one", help="The words of --gold count from 1.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Score every layer and method against --gold.")
    ] = False,
    aligner: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="neural, hybrid, eflomal or fast-align; else hybrid with --bitext or --load.",
        ),
    ] = None,
    bitext: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="More sentence pairs to learn from, beside FILE; repeatable."
        ),
    ] = None,
    tokenize_bitext: Annotated[
        str | None,
        typer.Option(metavar="SRC-TGT", help="Split --bitext into words; else as --tokenize."),
    ] = None,
    reverse_bitext: Annotated[
        bool, typer.Option("--reverse-bitext", help="The first side of --bitext is FILE's second.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep what was learned, for --load.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Use what an earlier run kept with --save.")
    ] = None,
    symmetrize: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="For eflomal: grow-diag-final-and, intersection, union …"),
    ] = None,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Train the encoder on the bitext first; wants a GPU.")
    ] = False,
    adapt_steps: Annotated[
        int | None, typer.Option(min=1, help="How long; else 500 steps, 100 small ones on a CPU.")
    ] = None,
    save_model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the adapted encoder: DIR/run/model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name; else the embedded model.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="ot, itermax, argmax or match; else the model's best."),
    ] = None,
    layer: Annotated[
        str, typer.Option(metavar="N", help="0 is the embedding, -1 the last; auto: the best.")
    ] = "auto",
    encode: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="joint (both sides at once) or separate; else the best."),
    ] = None,
    map_from: Annotated[
        str | None,
        typer.Option(metavar="SRC-TGT", help="Apply the model's maps of these languages: de-en."),
    ] = None,
    maps: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the maps are; else beside the model.")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a batch; else what suits the device.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Link the words of sentences that translate each other.

    Line k of the output holds the links of pair k: i-j links word i of the first side with word j
    of the second, counted from 0. Words are what stands between spaces, unless --tokenize splits
    raw text. A pair with an empty side has no links. A pair too long for the model is aligned in
    windows that overlap: nothing is cut off.

    \b
    calque align de-en.txt                     a line of links a pair: 0-0 1-2 2-1
    calque align de.txt.gz en.txt.gz -o links  two files, line by line
    calque align raw.tsv --tokenize de-en --format words
    zcat big.gz | calque align - > links
    calque align big.tsv -o links --resume     after a kill: the same, to the byte
    calque align test.text --gold test.gold    precision, recall, F1, AER
    calque align test.text --gold test.gold --sweep        … by layer and method
    calque align test.text --bitext train.txt              with a bitext: hybrid, the best
    calque align de-en.text --bitext en-de.tsv.xz --tokenize-bitext de-en --reverse-bitext
    calque align bitext.tsv --aligner eflomal --save m     … fast-align, and hybrid --load m
    torchrun --nproc_per_node 8 -m calque align big.tsv -o links

    Files are plain, .gz, .xz or .zst, and of any size: memory does not grow with them. Until LINKS
    is whole its blocks are kept in LINKS.partial/. With --gold, links are written only with -o.
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.align_job import AlignJob, BitextFiles, check_readable
    from calque.cli.aligner_options import AlignerOptions, check_choice
    from calque.text.segmentation import find_splitter, parse_languages
    from calque.tools.link_writer import LinkLayout
    from calque.tools.shards import StoppedByMain, join_shards

    check_choice("--format", format, FORMATS)
    check_choice("--input", input_format, INPUTS)
    options = AlignerOptions(
        aligner or ("hybrid" if bitext or load else "neural"),
        model,
        method,
        _parse_layer(layer),
        encode,
        batch_tokens,
        device,
        tuple(bitext or ()),
        save,
        load,
        symmetrize,
        adapt,
        adapt_steps,
        save_model,
        None if map_from is None else parse_languages(map_from),
        maps,
    )
    languages = None if tokenize is None else parse_languages(tokenize)
    bitext_languages = languages if tokenize_bitext is None else parse_languages(tokenize_bitext)
    for language in (*(languages or ()), *(bitext_languages or ())):
        find_splitter(language)
    layout = LinkLayout(cast(Any, format), scores, languages)
    paths = (file,) if other is None else (file, other)
    job = AlignJob(
        paths,
        cast(Any, input_format),
        output,
        skip_bad,
        gold,
        gold_from_one,
        resume,
        options.bitext,
    )
    for path in options.bitext:
        check_readable(path)
    learning = BitextFiles(
        options.bitext, cast(Any, input_format), bitext_languages, reverse_bitext
    )
    if sweep:
        _sweep(job, layout, options)
        return
    with join_shards() as shard:
        try:
            shard.run_on_main(lambda: job.check(shard, learns=options.learns))
            _align(job, layout, options, shard, learning)
        except StoppedByMain:
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            if shard.is_main and job.unfinished is not None:
                print(f"{job.unfinished}: go on with --resume", file=sys.stderr)
            raise


def _align(
    job: AlignJob,
    layout: LinkLayout,
    options: AlignerOptions,
    shard: Shard,
    learning: BitextFiles,
) -> None:
    from calque.cli import aligners
    from calque.cli.align_job import GoldTally
    from calque.cli.progress import show_phases, show_progress
    from calque.tools.link_writer import write_links

    started = time.perf_counter()
    with show_phases("reading") if shard.is_main else nullcontext():
        n_pairs = shard.run_on_main(job.prepare)
    gold = job.read_gold(n_pairs)
    tally = None if gold is None else GoldTally(gold)
    with ExitStack() as stack:
        chosen = stack.enter_context(
            aligners.choose_aligner(
                options,
                lambda: map(layout.split, job.read_again()),
                learning.read,
            )
        )
        layout = replace(layout, block_pairs=chosen.block_pairs)
        progress = show_progress("aligning", n_pairs) if shard.is_main else nullcontext()
        settings = {
            "pairs": n_pairs,
            "input": job.input_format,
            "skip_bad": job.skip_bad is not None,
            **layout.to_settings(),
            **(chosen.settings() if job.target else {}),
        }
        totals = write_links(
            chosen.aligner,
            job.read_and_list(shard, stack),
            stack.enter_context(job.open_sink(settings, shard)),
            layout,
            suffix=job.target.suffix if job.target else "",
            observe=tally,
            on_block=stack.enter_context(progress),
        )
    if tally is not None:
        _show_scores(job, tally, chosen.name)
    if shard.is_main:
        seconds = time.perf_counter() - started
        print(f"{job.place}: {_describe(totals)}; {seconds:.1f} s", file=sys.stderr)


def _sweep(job: AlignJob, layout: LinkLayout, options: AlignerOptions) -> None:
    from rich.console import Console

    from calque.cli import aligners
    from calque.cli.alignment_tables import tabulate_sweep
    from calque.cli.progress import show_progress
    from calque.tasks.word_alignment import count_layers

    aligners.check_sweep(options)
    job.check_sweep()
    pairs = [layout.split(pair) for pair in job.read(None)]
    gold = job.read_gold(len(pairs))
    assert gold is not None  # as check_sweep has seen
    gold.check_words(pairs)
    chosen, layers = aligners.choose_sweep(options)
    with show_progress("methods", len(chosen)) as advance:
        sweep = {}
        for method, aligner in chosen.items():
            sweep[method] = count_layers(aligner, pairs, gold, layers)
            advance(1)
    Console().print(tabulate_sweep(sweep, len(pairs)))


def _show_scores(job: AlignJob, tally: GoldTally, name: str) -> None:
    from rich.console import Console

    from calque.cli.alignment_tables import tabulate_counts

    console = Console(stderr=job.prints_links)
    console.print(tabulate_counts(tally.check().counts, name, tally.n_pairs))


def _describe(totals: LinkTotals) -> str:
    """Say what was written, and what was not usual about it."""
    report = totals.report
    before = f" ({totals.n_before:,} of them before)" if totals.n_before else ""
    notes = [f"{report.n_pairs:,} pairs{before}", f"{report.n_links:,} links"]
    if report.n_long:
        notes.append(f"{report.n_long:,} long pairs in {report.n_windows:,} windows")
    if report.n_cut:
        notes.append(f"{report.n_cut:,} huge words known by their beginnings")
    if n_empty := report.n_empty - totals.n_skipped:
        notes.append(f"{n_empty:,} pairs with an empty side")
    if totals.n_skipped:
        notes.append(f"{totals.n_skipped:,} lines skipped")
    return ", ".join(notes)


def _parse_layer(text: str) -> int | None:
    try:
        return None if text == "auto" else int(text)
    except ValueError:
        raise InputError(f"--layer {text} is no number", fix="try auto, 6 or -1") from None
