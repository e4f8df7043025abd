"""Commands on static word vectors: extract, map and lexicon."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calque.cli.options import (
    BinaryOption,
    DeviceOption,
    MaxWordsOption,
    ModelOption,
    OverwriteOption,
    ResumeOption,
    SeedOption,
    SkipBadOption,
    TokenizedOption,
)
from calque.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from calque.vectors.extract import ExtractResult
    from calque.vectors.lexicon import DictionaryScores, LexiconResult
    from calque.vectors.mapping import LanguageReport

# Options of x2static only, options that --no-filter disables, and options of a written dictionary.
X2STATIC_OPTIONS = (
    "context",
    "epochs",
    "negatives",
    "subsample",
    "learning_rate",
    "batch_sentences",
    "seed",
)
FILTER_OPTIONS = ("min_tokens", "min_sentences", "max_sentences")
DICTIONARY_OPTIONS = ("best", "mutual", "min_score", "format")
FEW_TARGETS = 10  # per word and epoch


def extract(
    context_: typer.Context,
    corpus: Annotated[
        list[str],
        typer.Argument(
            metavar="CORPUS...",
            help="Text of one language; plain, .gz, .xz, .zst, or - for standard input.",
        ),
    ],
    language: Annotated[
        str,
        typer.Option(
            "--language",
            metavar="CODE",
            help="Language code, which decides how sentences and words are split.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="VECTORS", help="Output file.")],
    method: Annotated[
        str,
        typer.Option(
            "--method", metavar="NAME", help="x2static, or pooling (the mean state of a word)."
        ),
    ] = "x2static",
    model: ModelOption = None,
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer",
            metavar="N",
            help="Layer: 0 is the embedding layer, -1 the last. Default: the middle layer.",
        ),
    ] = None,
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="NAME",
            help="Context of a word: others (all other tokens of its sentence) or all.",
        ),
    ] = "others",
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="Passes over the text.")] = 5,
    negatives: Annotated[
        int, typer.Option("--negatives", metavar="N", help="Number of negative samples per word.")
    ] = 10,
    subsample: Annotated[
        float,
        typer.Option(
            "--subsample",
            metavar="T",
            help="A word of frequency f is used with probability √(t/f) + t/f.",
        ),
    ] = 5e-6,
    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning-rate", metavar="X", help="Learning rate of Adam, which is constant."
        ),
    ] = 1e-3,
    batch_sentences: Annotated[
        int, typer.Option("--batch-sentences", metavar="N", help="Sentences per step.")
    ] = 128,
    seed: SeedOption = 0,
    max_words: Annotated[
        int,
        typer.Option(
            "--max-words", min=1, metavar="N", help="Maximum number of words that get a vector."
        ),
    ] = 200_000,
    min_count: Annotated[
        int,
        typer.Option(
            "--min-count", min=1, metavar="N", help="Minimum number of occurrences of a word."
        ),
    ] = 10,
    max_length: Annotated[
        int,
        typer.Option("--max-length", metavar="N", help="Maximum number of tokens per sentence."),
    ] = 200,
    keep_case: Annotated[
        bool, typer.Option("--keep-case", help="Do not convert the text to lower case.")
    ] = False,
    tokenized: TokenizedOption = False,
    sentence_lines: Annotated[
        bool,
        typer.Option(
            "--sentence-lines",
            help="A line is a sentence, and blank lines end paragraphs. Default: a line is a "
            "paragraph.",
        ),
    ] = False,
    min_tokens: Annotated[
        int,
        typer.Option("--min-tokens", min=0, metavar="N", help="Drop sentences with fewer words."),
    ] = 7,
    min_sentences: Annotated[
        int,
        typer.Option(
            "--min-sentences", min=0, metavar="N", help="Drop paragraphs with fewer sentences."
        ),
    ] = 2,
    max_sentences: Annotated[
        int,
        typer.Option(
            "--max-sentences",
            min=0,
            metavar="N",
            help="Stop after this many sentences; 0 means never.",
        ),
    ] = 1_000_000,
    no_filter: Annotated[
        bool, typer.Option("--no-filter", help="Keep all sentences of all paragraphs.")
    ] = False,
    binary: BinaryOption = False,
    resume: ResumeOption = False,
    skip_bad: SkipBadOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Learn one vector per word from the states of an encoder.

    The vectors are in word2vec format with the most frequent word first, which `calque map`,
    Gensim, VecMap and MUSE can read; VECTORS.counts has the word counts. X2Static (Gupta and Jaggi,
    2021) learns vectors that predict a word from the mean of the other states of its sentence.

    \b
    calque extract wiki.de.txt.xz --language de -o de.vec
    calque extract news.en --language en --sentence-lines --epochs 1 -o en.vec
    calque extract wiki.de.txt.xz --language de --method pooling --layer 4 -o de.vec
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import print_summary, progress_bar
    from calque.vectors.extract import extract_vectors

    started = time.perf_counter()
    if method == "pooling" and (option := _find_given(context_, X2STATIC_OPTIONS)):
        raise InputError(f"{option} has no effect with --method pooling", fix="drop it")
    if no_filter and (option := _find_given(context_, FILTER_OPTIONS)):
        raise InputError(f"{option} contradicts --no-filter", fix="drop one of them")
    with progress_bar() as progress:
        result = extract_vectors(
            corpus,
            language=language,
            output=output,
            method=method,
            model=model,
            layer=layer,
            context=context,
            epochs=epochs,
            negatives=negatives,
            subsample=subsample,
            learning_rate=learning_rate,
            batch_sentences=batch_sentences,
            seed=seed,
            max_words=max_words,
            min_count=min_count,
            max_length=max_length,
            keep_case=keep_case,
            tokenized=tokenized,
            sentence_lines=sentence_lines,
            min_tokens=min_tokens,
            min_sentences=min_sentences,
            max_sentences=max_sentences,
            no_filter=no_filter,
            binary=binary,
            resume=resume,
            skip_bad=skip_bad,
            device=device,
            progress=progress,
        )
    print_summary(output, _describe_extraction(result), started)


def _find_given(context: typer.Context, names: Sequence[str]) -> str | None:
    """Return the first of some options that was given on the command line."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            return f"--{name.replace('_', '-')}"
    return None


def _describe_extraction(result: ExtractResult) -> list[str]:
    corpus = result.corpus
    notes = [f"{result.n_words:,} vectors of layer {result.layer}"]
    if result.loss is not None:
        notes.append(f"loss {result.loss:.3f} over {result.n_targets:,} words in the last epoch")
        if result.n_targets < FEW_TARGETS * result.n_words:
            notes[-1] += " (few: use a higher --subsample for a small text)"
    if result.n_unlearned:
        notes.append(f"{result.n_unlearned:,} words never used, so that their vectors are random")
    notes.append(f"{corpus.n_sentences:,} sentences of {corpus.n_lines:,} lines")
    counts = [
        (corpus.n_in_short_paragraphs, "sentences of short paragraphs dropped"),
        (corpus.n_short, "short sentences dropped"),
        (result.n_skipped, "invalid lines skipped"),
        (result.n_empty, "sentences without a word that fits dropped"),
        (result.n_truncated, f"sentences truncated by {result.n_lost_words:,} words"),
    ]
    notes += [f"{number:,} {what}" for number, what in counts if number]
    if result.is_resumed:
        notes.append("resumed an interrupted run")
    if corpus.is_full:
        notes.append("the rest of the text was not read")
    if result.n_spaced:
        notes.append(f"spaces replaced in {result.n_spaced:,} words")
    return notes


def map_vectors(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Vectors in word2vec format, one file per language: en.vec de.vec.gz, or en=FILE.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Output folder.")],
    pivot: Annotated[
        str | None,
        typer.Option(
            "--pivot",
            metavar="CODE",
            help="Language that the others are mapped to. Default: the first.",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="NAMES",
            help="One or several of supervised, semi-supervised, identical, unsupervised, "
            "procrustes, refine, rcsls, separated by commas. Default: supervised with a "
            "dictionary, otherwise unsupervised.",
        ),
    ] = None,
    dictionary: Annotated[
        str | None,
        typer.Option(
            "--dictionary",
            metavar="PATTERN",
            help="Training dictionaries in MUSE's format: '{pivot}-{language}.0-5000.txt'.",
        ),
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(
            "--dev",
            metavar="PATTERN",
            help="Development dictionaries used to choose the method for each language.",
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            "--space",
            metavar="NAME",
            help="joint (all languages change) or pivot (it stays). Default: what the method "
            "needs.",
        ),
    ] = None,
    max_words: MaxWordsOption = 200_000,
    cutoff: Annotated[
        int,
        typer.Option(
            "--cutoff", metavar="N", min=1, help="Frequent words that self-learning matches."
        ),
    ] = 20_000,
    seed: SeedOption = 0,
    binary: BinaryOption = False,
    overwrite: OverwriteOption = False,
    skip_bad: SkipBadOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Map word vectors of several languages into one space.

    With --dev, a language for which no method helps keeps its vectors. A table shows the choices
    and their reasons, which are also written to report.json in the output folder.

    \b
    calque map en.vec de.vec -o mapped
    calque map en.vec de.vec fr.vec --pivot en -o mapped \\
        --dictionary 'muse/{pivot}-{language}.0-5000.txt' \\
        --dev 'muse/{pivot}-{language}.5000-6500.txt'
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from rich.console import Console

    from calque.cli.console import print_summary, progress_bar
    from calque.vectors import mapping

    started = time.perf_counter()
    with progress_bar() as progress:
        result = mapping.map_vectors(
            files,
            output=output,
            pivot=pivot,
            method=method,
            dictionary=dictionary,
            dev=dev,
            space=space,
            max_words=max_words,
            cutoff=cutoff,
            seed=seed,
            binary=binary,
            overwrite=overwrite,
            skip_bad=skip_bad,
            device=device,
            progress=progress,
        )
    Console().print(_tabulate_choices(result.languages))
    for report in result.languages:
        print(f"{report.language}: {'; '.join(_explain_choice(report))}")
    notes = [f"{len(result.languages)} languages", f"{result.space} space"]
    if result.n_spaced:
        notes.append(f"spaces replaced in {result.n_spaced:,} words")
    if result.n_skipped:
        notes.append(f"{result.n_skipped:,} invalid lines skipped")
    print_summary(output, notes, started)


def _tabulate_choices(reports: Sequence[LanguageReport]) -> Table:
    """Show the precision of each method, the choice, and the precision in the common space."""
    from rich.table import Table

    methods = list(dict.fromkeys(trial.method for each in reports for trial in each.trials))
    table = Table(
        title="maps into one space",
        caption="P@1 (%): CSLS among the words of the development dictionary, both directions",
    )
    table.add_column("language")
    table.add_column("words", justify="right")
    for method in methods:
        table.add_column(f"{method}\nP@1", justify="right")
    table.add_column("chosen")
    table.add_column("final\nP@1", justify="right")
    for report in reports:
        precisions = {trial.method: trial.precision for trial in report.trials}
        cells = [
            _percent(precisions[method], "–") if method in precisions else "" for method in methods
        ]
        final = _percent(report.precision, "")
        table.add_row(report.language, f"{report.n_words:,}", *cells, report.chosen, final)
    return table


def _percent(value: float | None, missing: str) -> str:
    return missing if value is None else f"{100 * value:.1f}"


def _explain_choice(report: LanguageReport) -> list[str]:
    """Return the choice and its reason, the use of dictionaries, and anything unusual."""
    notes = [f"{report.chosen}, {report.reason}"]
    if report.n_train_entries:
        notes.append(f"trained on {report.n_train:,} of {report.n_train_entries:,} entries")
    if report.n_dev_entries:
        notes.append(f"compared on {report.n_dev:,} of {report.n_dev_entries:,} entries")
    notes += [
        f"{trial.n_rounds} rounds of {trial.method}" for trial in report.trials if trial.n_rounds
    ]
    if report.n_zero:
        notes.append(f"{report.n_zero:,} zero vectors kept")
    if report.n_duplicates:
        notes.append(f"{report.n_duplicates:,} repeated words left out")
    return notes


def lexicon(
    context: typer.Context,
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC.vec", help="Vectors in word2vec format; plain, .gz, .xz or .zst."
        ),
    ],
    tgt: Annotated[
        str,
        typer.Argument(metavar="TGT.vec", help="Vectors of the other language in the same space."),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Output file. Default: standard output."
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option("--method", metavar="NAME", help="nn (cosine), csls, or inverted-softmax."),
    ] = "csls",
    neighbors: Annotated[
        int, typer.Option("--neighbors", metavar="K", help="Nearest neighbors of CSLS.")
    ] = 10,
    hub_words: Annotated[
        int,
        typer.Option(
            "--hub-words",
            metavar="N",
            help="Search these neighbors among the first N words only; 0 means all.",
        ),
    ] = 0,
    best: Annotated[int, typer.Option("--best", metavar="N", help="Translations per word.")] = 1,
    mutual: Annotated[
        bool,
        typer.Option(
            "--mutual", help="Only pairs in which each word is the best translation of the other."
        ),
    ] = False,
    min_score: Annotated[
        float | None,
        typer.Option("--min-score", metavar="X", help="Only entries with at least this score."),
    ] = None,
    max_words: MaxWordsOption = 200_000,
    format: Annotated[
        str, typer.Option("--format", metavar="NAME", help="tsv (with scores) or muse (without).")
    ] = "tsv",
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--evaluate",
            metavar="DICT",
            help="Print the precision on this dictionary in both directions.",
        ),
    ] = None,
    skip_bad: SkipBadOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Find the translations of words by their vectors.

    The vectors of both languages must be in one space, such as `calque map` writes. Unlike the
    cosine alone (nn), CSLS (Conneau et al., 2018) penalizes words that are near to everything.

    \b
    calque lexicon en.vec de.vec --mutual --min-score 0 -o en-de.tsv
    calque lexicon en.vec de.vec --best 5 --format muse -o en-de.txt
    calque lexicon en.vec de.vec --evaluate en-de.5000-6500.txt
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import print_summary, progress_bar
    from calque.vectors.lexicon import induce_lexicon

    started = time.perf_counter()
    is_written = evaluate is None or output is not None
    if not is_written and (option := _find_given(context, DICTIONARY_OPTIONS)):
        raise InputError(
            f"{option} is for a written dictionary, but --evaluate alone writes none",
            fix="drop it, or name a file with -o",
        )
    with progress_bar() as progress:
        result = induce_lexicon(
            src,
            tgt,
            output=(output or "-") if is_written else None,
            method=method,
            neighbors=neighbors,
            hub_words=hub_words,
            best=best,
            mutual=mutual,
            min_score=min_score,
            max_words=max_words,
            format=format,
            evaluate=evaluate,
            skip_bad=skip_bad,
            device=device,
            progress=progress,
        )
    if result.scores is not None:
        _print_scores(result.scores)
    notes = _describe_lexicon(result) if is_written else [f"precision on {evaluate}"]
    counts = [
        (result.n_zero, "words with zero vectors left out"),
        (result.n_duplicates, "repeated words left out"),
        (result.n_skipped, "invalid lines skipped"),
    ]
    notes += [f"{number:,} {what}" for number, what in counts if number]
    place = "standard output" if output in (None, "-") else output
    print_summary(place, notes, started)


def _describe_lexicon(result: LexiconResult) -> list[str]:
    notes = [
        f"{result.n_entries - result.n_unwritable:,} entries",
        f"{result.n_translated:,} of {result.n_src:,} words translated into {result.n_tgt:,}",
    ]
    if result.n_unwritable:
        what = "entries left out, since words have spaces around or line ends in them"
        notes.append(f"{result.n_unwritable:,} {what}")
    return notes


def _print_scores(scores: Mapping[str, DictionaryScores]) -> None:
    from rich.console import Console
    from rich.table import Table

    from calque.vectors.lexicon import PRECISION_AT

    arrows = {"forward": "→", "backward": "←"}
    table = Table(
        title="precision (%)", caption="all: unknown words count as wrong; known: they are left out"
    )
    table.add_column("")
    table.add_column("method")
    for words in ("all", "known"):
        for k in PRECISION_AT:
            table.add_column(f"{words}\nP@{k}", justify="right")
    for direction, result in scores.items():
        for method in result.ranks:
            values = [
                result.precision(method, k, known=known)
                for known in (False, True)
                for k in PRECISION_AT
            ]
            table.add_row(arrows[direction], method, *(f"{100 * value:.2f}" for value in values))
        table.add_section()
    Console().print(table)
    for direction, result in scores.items():
        print(
            f"{arrows[direction]} {result.n_known:,} of {result.n_words:,} words known "
            f"({100 * result.coverage:.1f} %); {result.n_unknown_src:,} have no vector, "
            f"{result.n_unknown_tgt:,} have no translation with a vector"
        )
