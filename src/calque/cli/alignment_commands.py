"""`calque align`: the links between the words of sentence pairs.

`calque links`: from bitext to words with links that encoders can be aligned by.

`calque attention`: how much a sentence and its translation look at each other in a model.

`calque demo`: align words and find translations with the embedded model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.api import Model
    from calque.cli.align_job import AlignJob, BitextFiles, GoldTally
    from calque.cli.aligner_options import AlignerOptions
    from calque.io.outputs import Shard
    from calque.word_alignment.file_job import LinkLayout, LinkTotals
    from calque.word_alignment.linked_bitext import LinkReport, OnProgress
    from calque.word_alignment.protocol import Aligner


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
    from calque.io.outputs import StoppedByMain, join_shards
    from calque.io.segmentation import find_splitter, parse_languages
    from calque.word_alignment.file_job import LinkLayout

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
    from calque.cli import align_job as aligners
    from calque.cli.align_job import GoldTally
    from calque.cli.console import show_phases, show_progress
    from calque.word_alignment.file_job import write_links

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

    from calque.cli import align_job as aligners
    from calque.cli.console import show_progress
    from calque.cli.console_tables import tabulate_sweep
    from calque.word_alignment.scoring import count_layers

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

    from calque.cli.console_tables import tabulate_counts

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


ALIGNERS = ("fast-align", "eflomal", "neural")
SPLITS = ("rules", "spaces")
INPUTS_LINKS = ("auto", "pipes", "tsv", "moses")


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
    from calque.io.files import check_list
    from calque.io.segmentation import parse_languages
    from calque.word_alignment.linked_bitext import LinkRules, find_bitexts, make_links
    from calque.word_alignment.statistical import DEFAULT_SYMMETRIZATION

    started = time.perf_counter()
    check_choice("--aligner", aligner, ALIGNERS)
    check_choice("--split", split, SPLITS)
    check_choice("--input", input_format, INPUTS_LINKS)
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
    from calque.cli import align_job as aligners
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

    from calque.word_alignment.linked_bitext import REPORT, LinkReport

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

    from calque.word_alignment.linked_bitext import share

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

    from calque.word_alignment.linked_bitext import share

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


CAPTION = """\
An illustration, not a benchmark: the embedded model was trained on sentences
of this kind, though not on these pairs."""
HINTS = """\
Next:
  calque align FILE                      word links of your own sentence pairs
  calque embed FILE -o vectors.npy       one vector a line of your own text
  calque models                          what is in the package
  calque evaluate MODEL --data DIR       accuracy on the Tatoeba test sets
  python -c 'import calque; print(calque.load().embed(["Guten Morgen!"]))'"""

SPACELESS = ("ja", "zh")  # to be split by libraries that may not be there
LEGIBLE = 40  # characters of an example that fits a terminal beside its translation


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence, its translation, and the one found among all the others."""

    language: str
    sentence: str
    english: str
    found: str

    @property
    def is_right(self) -> bool:
        """Tell whether the translation was found."""
        return self.found == self.english


def demo(
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name; else the embedded model.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="How many to show of each language.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …")] = "auto",
) -> None:
    """Align words and find translations among 200 real sentences.

    Eight languages, the embedded model, no network, a few seconds.
    """
    from rich.console import Console

    from calque.api import load

    encoder, pairs, console = load(model, device), read_pairs(), Console()
    if examples:
        console.print(_tabulate_links(encoder, _choose(pairs, examples)))
    findings = find_translations(encoder, pairs)
    if examples:
        console.print(_tabulate_examples(findings, examples))
    console.print(_tabulate_accuracy(findings))
    console.print(CAPTION, "", HINTS, sep="\n", highlight=False, soft_wrap=True)


def read_pairs() -> list[list[str]]:
    """Read the bundled rows: language, English, sentence."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    return [line.split("\t") for line in table.splitlines()[1:]]


def find_translations(model: Model, pairs: list[list[str]]) -> list[Finding]:
    """Look for each sentence among the English of all languages."""
    from calque.evaluation.metrics import find_nearest

    languages, english, sentences = zip(*pairs, strict=True)
    queries, candidates = model.embed(sentences), model.embed(english)
    return [
        Finding(language, sentence, translation, english[index])
        for language, sentence, translation, index in zip(
            languages, sentences, english, find_nearest(queries, candidates), strict=True
        )
    ]


def _choose(pairs: list[list[str]], n_examples: int) -> list[list[str]]:
    """Choose some pairs of every language that can be split into words at its spaces."""
    chosen = []
    for language in dict.fromkeys(pair[0] for pair in pairs):
        mine = [pair for pair in pairs if pair[0] == language and language not in SPACELESS]
        chosen += sorted(mine, key=lambda pair: abs(len(pair[1]) - LEGIBLE))[:n_examples]
    return chosen


def _tabulate_links(model: Model, pairs: list[list[str]]) -> Table:
    from rich import box
    from rich.table import Table

    from calque.cli.console_tables import color_links
    from calque.io.segmentation import split_words
    from calque.word_alignment.neural import WordAligner

    words = [
        (split_words(sentence, language), split_words(english, "en"))
        for language, english, sentence in pairs
    ]
    table = Table("", box=box.SIMPLE_HEAD, title="linked words have one color and number")
    table.add_column("sentence", overflow="fold")
    table.add_column("English", overflow="fold")
    for pair, both, links in zip(pairs, words, WordAligner(model).align(words), strict=True):
        table.add_row(pair[0], *color_links(both, links))
    return table


def _tabulate_examples(findings: list[Finding], n_examples: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table("", box=box.SIMPLE_HEAD)
    table.add_column("sentence", overflow="fold")
    table.add_column(f"found among {len(findings)} English sentences", overflow="fold")
    table.add_column("")
    for language in dict.fromkeys(finding.language for finding in findings):
        mine = [finding for finding in findings if finding.language == language]
        for finding in mine[:: max(1, len(mine) // n_examples)][:n_examples]:
            mark = "[green]✓[/]" if finding.is_right else "[red]✗[/]"
            table.add_row(language, finding.sentence, finding.found, mark)
        table.add_section()
    return table


def _tabulate_accuracy(findings: list[Finding]) -> Table:
    from rich import box
    from rich.table import Table

    languages = list(dict.fromkeys(finding.language for finding in findings))
    table = Table(*languages, "all", box=box.SIMPLE_HEAD, title="translations found (%)")
    groups = [[f for f in findings if f.language == language] for language in languages]
    rates = [sum(f.is_right for f in group) / len(group) for group in [*groups, findings]]
    table.add_row(*(f"{100 * rate:.0f}" for rate in rates))
    return table
