"""Commands for word links: align, links and demo."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.cli.options import (
    BatchTokensOption,
    DeviceOption,
    InputFormatOption,
    LanguagePairOption,
    LayerOption,
    MapsOption,
    ModelOption,
    OverwriteOption,
    PrecisionOption,
    ResumeOption,
    SkipBadOption,
)

if TYPE_CHECKING:
    from rich.table import Table

    from calque.api import Model
    from calque.word_alignment.file_job import AlignResult

SymmetrizeOption = Annotated[
    str | None,
    typer.Option(
        "--symmetrize",
        metavar="NAME",
        help="For eflomal: grow-diag-final-and, intersection, union, ... "
        "Default: grow-diag-final-and.",
    ),
]
StemOption = Annotated[
    int | None,
    typer.Option(
        "--stem",
        min=0,
        metavar="N",
        help="eflomal and fast-align treat words with the same first N letters as one word; "
        "0: whole words. Default: 5.",
    ),
]


def align(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Lines 'source ||| target' or 'source TAB target', or the source side; "
            "- is standard input.",
        ),
    ],
    tgt: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="The target side, line by line.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File for the links. Default: standard output."
        ),
    ] = None,
    resume: ResumeOption = False,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="pharaoh (i-j), jsonl (words, links and scores) or words (word-word).",
        ),
    ] = "pharaoh",
    scores: Annotated[
        bool,
        typer.Option(
            "--scores",
            help="Write scores: i-j:0.9300. They are probabilities if the model is calibrated. "
            "jsonl always has them.",
        ),
    ] = False,
    tokenize: Annotated[
        str | None,
        typer.Option(
            "--tokenize",
            metavar="SRC-TGT",
            help="Split raw text of these languages into words, such as de-en. "
            "Default: words are separated by spaces.",
        ),
    ] = None,
    input_format: InputFormatOption = "auto",
    skip_bad: SkipBadOption = None,
    gold: Annotated[
        Path | None,
        typer.Option(
            "--gold", metavar="FILE", help="Score against gold links: i-j is sure, ipj possible."
        ),
    ] = None,
    gold_from_one: Annotated[
        bool, typer.Option("--gold-from-one", help="The words in --gold are counted from 1.")
    ] = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Score every layer, method and sharpness against --gold."),
    ] = False,
    dev_every: Annotated[
        int | None,
        typer.Option(
            "--dev-every",
            min=2,
            metavar="N",
            help="Choose in --sweep on every Nth pair, and score the choice on the others.",
        ),
    ] = None,
    store: Annotated[
        bool,
        typer.Option(
            "--store",
            help="Store the best of --sweep and its calibration in the config.json of --model.",
        ),
    ] = False,
    reliability: Annotated[
        Path | None,
        typer.Option(
            "--reliability",
            metavar="FILE",
            help="Compare the scores of links with --gold, and draw it (.png, .svg or .pdf).",
        ),
    ] = None,
    aligner: Annotated[
        str | None,
        typer.Option(
            "--aligner",
            metavar="NAME",
            help="neural, hybrid, eflomal or fast-align. "
            "Default: hybrid with --bitext or --load, otherwise neural.",
        ),
    ] = None,
    bitext: Annotated[
        list[str] | None,
        typer.Option(
            "--bitext",
            metavar="FILE",
            help="More sentence pairs to train on, besides FILE. Can be repeated.",
        ),
    ] = None,
    tokenize_bitext: Annotated[
        str | None,
        typer.Option(
            "--tokenize-bitext",
            metavar="SRC-TGT",
            help="Split --bitext into words. Default: as --tokenize.",
        ),
    ] = None,
    reverse_bitext: Annotated[
        bool,
        typer.Option(
            "--reverse-bitext", help="The first side of --bitext is the second side of FILE."
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="DIR", help="Save the trained statistical model for --load."
        ),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option("--load", metavar="DIR", help="Use a statistical model saved with --save."),
    ] = None,
    symmetrize: SymmetrizeOption = None,
    stem: StemOption = None,
    adapt: Annotated[
        bool,
        typer.Option("--adapt", help="First train the encoder on the bitext (minutes on a CPU)."),
    ] = False,
    adapt_steps: Annotated[
        int | None,
        typer.Option(
            "--adapt-steps",
            min=1,
            metavar="N",
            help="Training steps of --adapt. Default: 500 on a GPU, 200 on a CPU.",
        ),
    ] = None,
    save_model: Annotated[
        Path | None,
        typer.Option(
            "--save-model", metavar="DIR", help="Save the adapted encoder in DIR/run/model."
        ),
    ] = None,
    model: ModelOption = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="ot, itermax, argmax, match or probability. Default: the model's best method.",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            min=0,
            max=1,
            metavar="P",
            help="Write only links with at least this probability: higher is more precise. "
            "Default: with --method probability the model's best, otherwise 0.",
        ),
    ] = None,
    layer: LayerOption = None,
    encode: Annotated[
        str | None,
        typer.Option(
            "--encode",
            metavar="NAME",
            help="joint (both sides in one sequence) or separate. Default: the model's best.",
        ),
    ] = None,
    sharpness: Annotated[
        float | None,
        typer.Option(
            "--sharpness",
            metavar="S",
            help="Of ot: exp(S · cos), or dot products to the power S. Default: the model's best.",
        ),
    ] = None,
    similarity: Annotated[
        str | None,
        typer.Option(
            "--similarity", metavar="NAME", help="cosine, or dot as in XLM-Align. Default: cosine."
        ),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            "--unit",
            metavar="NAME",
            help="words, or subwords: words are linked if any of their subwords are. "
            "Default: words.",
        ),
    ] = None,
    scale_first: Annotated[
        str | None,
        typer.Option(
            "--scale-first",
            metavar="NAME",
            help="Of ot: columns, or rows as in XLM-Align. Default: columns.",
        ),
    ] = None,
    spelling: Annotated[
        float | None,
        typer.Option(
            "--spelling",
            min=0,
            max=1,
            metavar="W",
            help="Weight of the similarity of spelling beside the cosine; 0: the encoder alone. "
            "Default: 0.25.",
        ),
    ] = None,
    languages: Annotated[
        str | None,
        typer.Option(
            "--languages",
            metavar="SRC-TGT",
            help="Apply the model's linear maps of these languages, such as de-en.",
        ),
    ] = None,
    maps: MapsOption = None,
    batch_tokens: BatchTokensOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
) -> None:
    """Link the words of sentences that translate each other.

    Line k of the output has the links of pair k: i-j links word i of the first side with word j
    of the second, counted from 0. Words are separated by spaces, unless --tokenize splits raw
    text. A pair with an empty side has no links. A pair that is too long for the model is aligned
    in overlapping windows; nothing is cut off.

    \b
    calque align de-en.txt                     one line of links per pair: 0-0 1-2 2-1
    calque align de.txt.gz en.txt.gz -o links  two files, line by line
    calque align raw.tsv --tokenize de-en --format words
    zcat big.gz | calque align - > links
    calque align big.tsv -o links --resume     after an interruption; the same bytes
    calque align test.text --gold test.gold    precision, recall, F1 and AER
    calque align dev.text --gold dev.gold --sweep          ... by layer, method and sharpness
    calque align dev.text --gold dev.gold --sweep --dev-every 5 --model DIR --store
    calque align de-en.txt --method probability --threshold 0.8       fewer links, more precise
    calque align test.text --gold test.gold --reliability plot.png    how reliable scores are
    calque align test.text --bitext train.txt              hybrid: the best with a bitext
    calque align de-en.text --bitext en-de.tsv.xz --tokenize-bitext de-en --reverse-bitext
    calque align bitext.tsv --aligner eflomal --save m     ... then hybrid with --load m
    torchrun --nproc_per_node 8 -m calque align big.tsv -o links

    Files are plain, .gz, .xz or .zst, and may have any size. Until the output file is complete,
    its blocks are in FILE.partial/. With --gold, links are written only with -o.
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import print_summary, progress_bar
    from calque.word_alignment.file_job import align_file

    started = time.perf_counter()
    if reliability is not None:
        _check_reliability(reliability, has_gold=gold is not None, sweep=sweep, aligner=aligner)
    is_stdout = (output is None and gold is None) or str(output) == "-"
    with progress_bar() if sys.stderr.isatty() else nullcontext() as progress:
        result = align_file(
            file,
            tgt,
            output="-" if is_stdout and not sweep else output,
            aligner=aligner,
            model=model,
            method=method,
            layer=layer,
            encode=encode,
            sharpness=sharpness,
            similarity=similarity,
            unit=unit,
            scale_first=scale_first,
            spelling=spelling,
            threshold=threshold,
            languages=languages,
            maps=maps,
            tokenize=tokenize,
            input_format=input_format,
            format=format,
            scores=scores,
            gold=gold,
            gold_from_one=gold_from_one,
            sweep=sweep,
            dev_every=dev_every,
            store=store,
            bitext=bitext or (),
            tokenize_bitext=tokenize_bitext,
            reverse_bitext=reverse_bitext,
            save=save,
            load=load,
            symmetrize=symmetrize,
            stem=stem,
            adapt=adapt,
            adapt_steps=adapt_steps,
            save_model=save_model,
            skip_bad=skip_bad,
            resume=resume,
            batch_tokens=batch_tokens,
            device=device,
            precision=precision,
            progress=progress,
        )
    if not result.is_main:
        return
    if result.gold is not None or result.sweep is not None:
        _print_scores(result, reliability, to_stderr=is_stdout and not sweep)
    if result.sweep is not None:
        if store:
            print(f"{model}/config.json: best settings stored", file=sys.stderr)
        return
    if save is not None:
        notes = f"statistical model trained on {result.n_training_pairs:,} pairs"
        print(f"{save}: {notes}", file=sys.stderr)
    if result.adapted_model is not None:
        print(f"{result.adapted_model}: adapted model", file=sys.stderr)
    place = "standard output" if is_stdout else result.output or "links not written"
    print_summary(place, _summarize(result), started)


def _check_reliability(path: Path, *, has_gold: bool, sweep: bool, aligner: str | None) -> None:
    """Raise InputError if there would be nothing to draw, or it could not be written."""
    from calque.errors import InputError
    from calque.report.plots import check_plot
    from calque.word_alignment.build import STATISTICAL

    if not has_gold or sweep:
        problem = "--reliability compares links with gold links"
        raise InputError(problem, fix="pass --gold, and drop --sweep")
    if aligner in STATISTICAL:
        problem = f"the links of {aligner} have no scores"
        raise InputError(problem, fix="drop --reliability, or choose --aligner neural or hybrid")
    check_plot(path)


def _print_scores(result: AlignResult, plot: Path | None, *, to_stderr: bool) -> None:
    """Print the scores against gold links; to standard error if links are on standard output.

    Draw how reliable the scores of the links are if there is a file for the plot.
    """
    from rich.console import Console

    from calque.cli.alignment_tables import (
        tabulate_choice,
        tabulate_counts,
        tabulate_reliability,
        tabulate_sweep,
    )

    if result.sweep is not None:
        Console().print(tabulate_sweep(result.sweep))
        Console().print(tabulate_choice(result.sweep))
    elif result.gold is not None:
        console = Console(stderr=to_stderr)
        console.print(tabulate_counts(result.gold, result.aligner, result.n_pairs))
        if plot is not None and result.reliability is not None:
            from calque.errors import InputError
            from calque.report.plots import plot_reliability, save_plot

            if not result.reliability.n_items.any():
                problem = "there are no links whose scores could be compared with gold links"
                raise InputError(problem, fix="lower --threshold, or drop --reliability")
            console.print(tabulate_reliability(result.reliability))
            save_plot(plot_reliability({result.aligner: result.reliability}), plot)


def _summarize(result: AlignResult) -> list[str]:
    report = result.report
    before = f" ({result.n_resumed:,} of them before)" if result.n_resumed else ""
    notes = [f"{report.n_pairs:,} pairs{before}", f"{report.n_links:,} links"]
    if report.n_long:
        notes.append(f"{report.n_long:,} long pairs in {report.n_windows:,} windows")
    if report.n_cut:
        notes.append(f"{report.n_cut:,} very long words cut")
    if n_empty := report.n_empty - result.n_skipped:
        notes.append(f"{n_empty:,} pairs with an empty side")
    if result.n_skipped:
        notes.append(f"{result.n_skipped:,} lines skipped")
    return notes


def links(
    bitexts: Annotated[
        list[str],
        typer.Argument(
            metavar="BITEXT",
            help="Lines 'source TAB target' or 'source ||| target', or two sides: news.en news.de.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the linked text.")
    ],
    aligner: Annotated[
        str | None,
        typer.Option(
            "--aligner", metavar="NAME", help="fast-align, eflomal or neural. Default: fast-align."
        ),
    ] = None,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--links",
            metavar="FILE",
            help="Links found earlier, one FILE per BITEXT. Can be repeated.",
        ),
    ] = None,
    symmetrize: SymmetrizeOption = None,
    stem: StemOption = None,
    languages: LanguagePairOption = None,
    leave_out: Annotated[
        str | None,
        typer.Option(
            "--leave-out", metavar="LANG,LANG", help="Leave out the BITEXTs of these languages."
        ),
    ] = None,
    tokenized: Annotated[
        bool | None,
        typer.Option(
            "--tokenized/--not-tokenized",
            help="The words of the input are separated by spaces. Default: only with --links.",
        ),
    ] = None,
    input_format: Annotated[
        str,
        typer.Option(
            "--input-format",
            metavar="FORMAT",
            help="auto, pipes (lines of 'source ||| target'), tsv or moses (two sides).",
        ),
    ] = "auto",
    include_tags: Annotated[
        str | None,
        typer.Option(
            "--include-tags",
            metavar="TAG,TAG",
            help="Use only pairs with these tags (third column of a TSV file).",
        ),
    ] = None,
    exclude_tags: Annotated[
        str | None,
        typer.Option("--exclude-tags", metavar="TAG,TAG", help="Use no pairs with these tags."),
    ] = None,
    keep_identical: Annotated[
        bool, typer.Option("--keep-identical", help="Keep links between identical words.")
    ] = False,
    keep_many: Annotated[
        bool, typer.Option("--keep-many", help="Keep links that are not one-to-one.")
    ] = False,
    keep_empty: Annotated[
        bool, typer.Option("--keep-empty", help="Keep pairs without links.")
    ] = False,
    scores: Annotated[
        bool,
        typer.Option("--scores", help="Write scores (i-j:0.9300), which recipes use as weights."),
    ] = False,
    skip_bad: SkipBadOption = None,
    overwrite: OverwriteOption = False,
    model: ModelOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Link the words of bitext and keep what is worth training on.

    For every BITEXT the folder gets NAME.text (words ||| words) and NAME.links (i-j ...), one line
    per pair, and report.json, which says what each filter removed. The links are those of
    fast_align in both directions, combined by grow-diag-final-and. Links between identical words,
    links of words with several links, and pairs without links are dropped, in this order (Wu and
    Dredze, 2020).

    \b
    calque links bitext/en-*.tsv.xz -o linked --leave-out th
    calque links news.en news.de -o linked         two files, line by line
    calque links en-de.txt --tokenized -o linked   words are separated by spaces
    calque links bitext/en-*.tsv.xz -o linked --exclude-tags xnli --aligner eflomal
    calque links en-de.txt --links en-de.links -o linked
    calque links raw.tsv --languages de-en --aligner neural -o linked

    A recipe reads it as {path: linked/en-*.text, kind: bitext, links: linked/en-*.links}.
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from rich.console import Console

    from calque.cli.alignment_tables import tabulate_bitexts, tabulate_link_report
    from calque.cli.console import print_summary, progress_bar
    from calque.word_alignment.linked_bitext import REPORT, link_bitext

    started = time.perf_counter()
    with progress_bar() as progress:
        result = link_bitext(
            bitexts,
            output,
            aligner=aligner,
            links=given or (),
            symmetrize=symmetrize,
            stem=stem,
            languages=languages,
            leave_out=_split_list(leave_out or ""),
            tokenized=tokenized,
            input_format=input_format,
            include_tags=None if include_tags is None else _split_list(include_tags),
            exclude_tags=_split_list(exclude_tags or ""),
            keep_identical=keep_identical,
            keep_many=keep_many,
            keep_empty=keep_empty,
            scores=scores,
            skip_bad=skip_bad,
            overwrite=overwrite,
            model=model,
            device=device,
            progress=progress,
        )
    reports, total = result.reports, result.total
    is_one = len(reports) == 1
    if not is_one:
        Console().print(tabulate_bitexts(reports))
    Console().print(tabulate_link_report(total, next(iter(reports)) if is_one else "all"))
    notes = [f"{next(iter(reports))}.text, .links" if is_one else f"{len(reports):,} bitexts"]
    notes += [f"{total.n_kept:,} of {total.n_read:,} pairs", f"{total.n_kept_links:,} links"]
    if total.n_long:
        notes.append(f"{total.n_long:,} long pairs in parts")
    if total.n_cut:
        notes.append(f"{total.n_cut:,} very long words cut")
    print_summary(output, [*notes, REPORT], started)


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


CAPTION = """\
This is an illustration, not a benchmark: the embedded model was trained on sentences
of this kind, though not on these pairs."""
HINTS = """\
Next:
  calque align FILE                      word links of your own sentence pairs
  calque embed FILE -o vectors.npy       one vector per line of your own text
  calque models                          models in the package
  calque evaluate MODEL --data DIR       accuracy on the Tatoeba test sets
  python -c 'import calque; print(calque.load().embed(["Guten Morgen!"]))'"""

UNSPACED_LANGUAGES = ("ja", "zh")  # libraries that split them may not be installed
EXAMPLE_CHARACTERS = 40  # length of an example that fits a terminal beside its translation


def demo(
    model: ModelOption = None,
    examples: Annotated[
        int,
        typer.Option("--examples", min=0, metavar="N", help="Number of examples of each language."),
    ] = 2,
    device: DeviceOption = "auto",
) -> None:
    """Align words and find translations among 200 real sentences.

    Eight languages, the embedded model, no network, a few seconds.
    """
    from rich.console import Console

    from calque.api import load

    encoder, rows, console = load(model, device), read_demo_rows(), Console()
    found = find_translations(encoder, rows)
    if examples:
        console.print(_tabulate_links(encoder, rows, examples))
        console.print(_tabulate_examples(rows, found, examples))
    console.print(_tabulate_accuracy(rows, found))
    console.print(CAPTION, "", HINTS, sep="\n", highlight=False, soft_wrap=True)


def read_demo_rows() -> list[tuple[str, str, str]]:
    """Read the sentences of the package: language, English, sentence."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines()[1:]]
    return [(language, english, sentence) for language, english, sentence in rows]


def find_translations(model: Model, rows: list[tuple[str, str, str]]) -> list[str]:
    """Return the nearest English sentence of all languages for each sentence."""
    from calque.evaluation.metrics import find_nearest

    _, english, sentences = zip(*rows, strict=True)
    nearest = find_nearest(model.embed(sentences), model.embed(english))
    return [english[index] for index in nearest.tolist()]


def _tabulate_links(model: Model, rows: list[tuple[str, str, str]], n_examples: int) -> Table:
    """Show links of some pairs of every language whose words are separated by spaces."""
    from rich import box
    from rich.table import Table

    from calque.cli.alignment_tables import color_links
    from calque.io.segmentation import split_words
    from calque.word_alignment.neural import WordAligner

    chosen = []
    for language in dict.fromkeys(row[0] for row in rows if row[0] not in UNSPACED_LANGUAGES):
        some = [row for row in rows if row[0] == language]
        chosen += sorted(some, key=lambda row: abs(len(row[1]) - EXAMPLE_CHARACTERS))[:n_examples]
    words = [
        (split_words(sentence, language), split_words(english, "en"))
        for language, english, sentence in chosen
    ]
    table = Table("", box=box.SIMPLE_HEAD, title="linked words have the same color and number")
    table.add_column("sentence", overflow="fold")
    table.add_column("English", overflow="fold")
    for row, pair, links in zip(chosen, words, WordAligner(model).align(words), strict=True):
        table.add_row(row[0], *color_links(pair, links))
    return table


def _tabulate_examples(
    rows: list[tuple[str, str, str]], found: list[str], n_examples: int
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table("", box=box.SIMPLE_HEAD)
    table.add_column("sentence", overflow="fold")
    table.add_column(f"found among {len(rows)} English sentences", overflow="fold")
    table.add_column("")
    for name in dict.fromkeys(row[0] for row in rows):
        some = [(*row, best) for row, best in zip(rows, found, strict=True) if row[0] == name]
        for language, english, sentence, best in some[:: max(1, len(some) // n_examples)][
            :n_examples
        ]:
            mark = "[green]✓[/]" if best == english else "[red]✗[/]"
            table.add_row(language, sentence, best, mark)
        table.add_section()
    return table


def _tabulate_accuracy(rows: list[tuple[str, str, str]], found: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    hits = [(row[0], row[1] == best) for row, best in zip(rows, found, strict=True)]
    languages = list(dict.fromkeys(row[0] for row in rows))
    table = Table(*languages, "all", box=box.SIMPLE_HEAD, title="translations found (%)")
    groups = [[hit for name, hit in hits if name == language] for language in languages]
    groups.append([hit for _, hit in hits])
    table.add_row(*(f"{100 * sum(group) / len(group):.0f}" for group in groups))
    return table
