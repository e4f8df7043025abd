"""`calque extract`: static word vectors out of an encoder."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from calque.tools.static_extractor import ExtractReport, Method

METHODS, CONTEXTS = ("x2static", "pooling"), ("others", "all")
# Options of one method, and those that --no-filter undoes.
LEARNING = (
    "context",
    "epochs",
    "negatives",
    "subsample",
    "learning_rate",
    "batch_sentences",
    "seed",
)
FILTER = ("min_tokens", "min_sentences", "max_sentences")
FEW = 10  # targets a word and epoch


def extract(
    given: typer.Context,
    corpora: Annotated[
        list[str],
        typer.Argument(
            metavar="CORPUS…", help="Text of one language; plain, .gz, .xz, .zst, or - (a pipe)."
        ),
    ],
    language: Annotated[
        str, typer.Option(metavar="CODE", help="de, en, zh …: how to find sentences and words.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="VECTORS", help="Where the vectors go.")
    ],
    method: Annotated[
        str, typer.Option(metavar="HOW", help="x2static, or pooling: the mean of a word's states.")
    ] = "x2static",
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name; else the embedded model.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="0 is the embedding, -1 the last; else the middle one.")
    ] = None,
    context: Annotated[
        str,
        typer.Option(metavar="WHICH", help="others: all but the word; all: the word too."),
    ] = "others",
    epochs: Annotated[int, typer.Option(help="How often the text is learnt from.")] = 5,
    negatives: Annotated[int, typer.Option(help="Random words a word is told from.")] = 10,
    subsample: Annotated[
        float, typer.Option(help="t: a word of frequency f is learnt √(t/f) + t/f of the time.")
    ] = 5e-6,
    learning_rate: Annotated[float, typer.Option(help="Of Adam; it stays the same.")] = 1e-3,
    batch_sentences: Annotated[int, typer.Option(help="Sentences a step.")] = 128,
    seed: Annotated[int, typer.Option(help="For all that is drawn.")] = 0,
    max_words: Annotated[
        int, typer.Option(min=1, help="Words that get a vector, at most.")
    ] = 200_000,
    min_count: Annotated[int, typer.Option(min=1, help="How often a word must occur.")] = 10,
    max_length: Annotated[
        int, typer.Option(help="Subwords a sentence; the rest is cut off.")
    ] = 200,
    keep_case: Annotated[
        bool, typer.Option("--keep-case", help="Do not turn the text to small letters.")
    ] = False,
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="Words stand between spaces already.")
    ] = False,
    sentence_lines: Annotated[
        bool,
        typer.Option("--sentence-lines", help="A line is a sentence, blank lines end paragraphs."),
    ] = False,
    min_tokens: Annotated[int, typer.Option(min=0, help="Drop shorter sentences.")] = 7,
    min_sentences: Annotated[int, typer.Option(min=0, help="Drop shorter paragraphs.")] = 2,
    max_sentences: Annotated[
        int, typer.Option(min=0, help="Read no more than so many that are kept; 0: all.")
    ] = 1_000_000,
    no_filter: Annotated[
        bool, typer.Option("--no-filter", help="Keep all sentences of all paragraphs.")
    ] = False,
    binary: Annotated[
        bool, typer.Option("--binary", help="Write word2vec's binary format, not text.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was interrupted.")
    ] = False,
    skip_bad: Annotated[
        Path | None,
        typer.Option(metavar="LIST", help="Leave undecodable lines out and list them here."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Learn one vector a word from the states of an encoder.

    A line of the CORPUS is a paragraph. The vectors, in word2vec format with the most frequent
    word first, can be read by `calque map`, Gensim, VecMap and MUSE; VECTORS.counts says how
    often each word occurred. X2Static (Gupta and Jaggi, 2021) learns vectors that tell a word from
    others by the mean of the other states of its sentence.

    \b
    calque extract wiki.de.txt.xz --language de -o de.vec
    calque extract news.en --language en --sentence-lines --epochs 1 -o en.vec
    calque extract wiki.de.txt.xz --language de --method pooling --layer 4 -o de.vec
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.api import load
    from calque.cli.aligner_options import check_choice
    from calque.cli.progress import show_progress
    from calque.text.files import check_list
    from calque.text.word_counts import counts_path
    from calque.tools.static_corpus import CorpusFilter, CorpusReader
    from calque.tools.static_extractor import ExtractJob, check_output, extract_vectors
    from calque.tools.static_learners import PoolingSettings, X2StaticSettings
    from calque.tools.static_vocabulary import VocabularyLimits

    started = time.perf_counter()
    check_choice("--method", method, METHODS)
    check_choice("--context", context, CONTEXTS)
    _check_together(given, method)
    check_output(output, corpora)
    for written in (output, counts_path(output)):
        check_list(skip_bad, corpora, written)
    bounds = CorpusFilter(min_tokens, min_sentences, max_sentences or None)
    learning: Method = PoolingSettings()
    if method == "x2static":
        learning = X2StaticSettings(
            cast(Any, context),
            negatives,
            subsample,
            learning_rate,
            batch_sentences,
            epochs,
            seed,
        )
    report = extract_vectors(
        load(model, device),
        corpora,
        output,
        ExtractJob(
            CorpusReader(
                language,
                CorpusFilter.off() if no_filter else bounds,
                sentence_lines,
                tokenized,
                keep_case,
            ),
            learning,
            VocabularyLimits(max_words, min_count),
            layer,
            max_length,
        ),
        binary=binary,
        resume=resume,
        skip_bad=skip_bad,
        show_phase=show_progress,
    )
    seconds = time.perf_counter() - started
    print(f"{output}: {', '.join(_describe(report))}; {seconds:.1f} s", file=sys.stderr)


def _check_together(given: typer.Context, method: str) -> None:
    """Refuse options that do not go together."""
    named = [name for name in given.params if _is_named(given, name)]
    for name in LEARNING if method == "pooling" else ():
        if name in named:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option} with --method pooling", fix="pooling learns nothing: drop it"
            )
    for name in FILTER if given.params["no_filter"] else ():
        if name in named:
            raise InputError(f"--{name.replace('_', '-')} with --no-filter", fix="drop one")


def _is_named(given: typer.Context, name: str) -> bool:
    source = given.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _describe(report: ExtractReport) -> list[str]:
    """Say what was written, and what became of the text."""
    corpus = report.corpus
    notes = [f"{report.n_words:,} vectors of layer {report.layer}"]
    if report.loss is not None:
        notes.append(f"loss {report.loss:.3f} over {report.n_targets:,} words in the last epoch")
        if report.n_targets < FEW * report.n_words:
            notes[-1] += " (few: a small text wants a higher --subsample)"
    if report.n_unlearnt:
        notes.append(f"{report.n_unlearnt:,} words never learnt, their vectors are random")
    notes.append(f"{corpus.n_sentences:,} sentences of {corpus.n_lines:,} lines")
    unusual = [
        (corpus.n_lone, "sentences of short paragraphs dropped"),
        (corpus.n_short, "short sentences dropped"),
        (report.n_bad, "undecodable lines left out"),
        (report.n_empty, "sentences without a word that fits dropped"),
        (report.n_cut, f"sentences cut, and {report.n_lost_words:,} words with that"),
    ]
    notes += [f"{number:,} {what}" for number, what in unusual if number]
    if report.is_resumed:
        notes.append("an interrupted run ended")
    if corpus.is_full:
        notes.append("more text left unread")
    if report.n_spaced:
        notes.append(f"spaces replaced in {report.n_spaced:,} words")
    return notes
