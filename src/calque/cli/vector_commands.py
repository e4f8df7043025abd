"""`calque extract`: static word vectors out of an encoder.

`calque map`: word vectors of several languages into one space.

`calque lexicon`: a bilingual dictionary out of word vectors, or how good it would be.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from calque.algorithms.self_learning import Round
    from calque.evaluation.tasks.lexicon_induction import DictionaryScores
    from calque.io.files import SkippedLines
    from calque.vectors.lexicon import Lexicon, LexiconSettings
    from calque.vectors.mapping import SeedDictionary
    from calque.vectors.static import VectorSpace, WordVectors
    from calque.vectors.trials import MapSettings
    from calque.vectors.x2static import ExtractReport, Method


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
    from calque.cli.console import show_progress
    from calque.io.files import check_list
    from calque.io.word_vectors import counts_path
    from calque.vectors.corpus import CorpusFilter, CorpusReader, VocabularyLimits
    from calque.vectors.x2static import (
        ExtractJob,
        PoolingSettings,
        X2StaticSettings,
        check_output,
        extract_vectors,
    )

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


def map_vectors(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…",
            help="Vectors in word2vec format, one file a language: en.vec de.vec.gz, or en=FILE.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where all of it goes.")
    ],
    pivot: Annotated[
        str | None,
        typer.Option(metavar="LANGUAGE", help="The others map to it; by default the first."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="HOW[,HOW…]",
            help="supervised, semi-supervised, identical, unsupervised, procrustes, refine, "
            "rcsls. By default supervised with a dictionary, else unsupervised.",
        ),
    ] = None,
    dictionary: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="To learn from: '{pivot}-{language}.0-5000.txt', in MUSE's format.",
        ),
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="To choose by, language for language, likewise."),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH",
            help="joint, all are changed; or pivot, which stays. By default as the method needs.",
        ),
    ] = None,
    max_words: Annotated[
        int, typer.Option(metavar="N", help="The first, most frequent words of a file; 0: all.")
    ] = 200_000,
    cutoff: Annotated[
        int, typer.Option(metavar="N", min=1, help="The words that learning matches.")
    ] = 20_000,
    seed: Annotated[int, typer.Option(help="Decides which scores are dropped.")] = 0,
    binary: Annotated[
        bool, typer.Option("--binary", help="Write word2vec's binary format.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")
    ] = False,
    skip_bad: Annotated[
        Path | None,
        typer.Option(
            metavar="LIST",
            help="Leave bad lines of vectors and dictionaries out, and list them here.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Map word vectors of several languages into one space.

    With --dev, a language that alignment does not help keeps its vectors; a table says what was
    chosen and why, and so does report.json in the folder.

    \b
    calque map en.vec de.vec -o mapped
    calque map en.vec de.vec fr.vec --pivot en -o mapped \\
        --dictionary 'muse/{pivot}-{language}.0-5000.txt' \\
        --dev 'muse/{pivot}-{language}.5000-6500.txt'
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from rich.console import Console

    from calque.cli.console_tables import explain_choices, tabulate_choices
    from calque.io.files import open_list
    from calque.vectors.mapping import check_folder, map_spaces, write_mapped

    started = time.perf_counter()
    paths = name_languages(files)
    center = pivot or next(iter(paths))
    if center not in paths:
        problem = f"no vectors of the pivot {center!r}"
        raise InputError(problem, fix=f"choose from: {' '.join(paths)}")
    settings = _settle(method, space, dictionary is not None, cutoff, seed, device)
    check_folder(output, overwrite, paths.values())
    _check_list(skip_bad, paths, center, (dictionary, dev), output)
    with ExitStack() as stack:
        skipped = open_list(skip_bad, stack)
        train, judges = (
            _read_dictionaries(pattern, center, list(paths), option, skipped)
            for pattern, option in ((dictionary, "--dictionary"), (dev, "--dev"))
        )
        spaces = _read_vectors(paths, max_words or None, skipped)
        tell, on_round = stack.enter_context(_show(settings))
        mapped = map_spaces(spaces, center, settings, train=train, dev=judges, on_round=on_round)
        n_spaced = write_mapped(mapped, spaces, output, settings, binary=binary, on_language=tell)
    Console().print(tabulate_choices(mapped.reports))
    print(*explain_choices(mapped.reports), sep="\n")
    seconds = time.perf_counter() - started
    notes = [f"{len(paths)} languages", f"{settings.space} space", f"{seconds:.1f} s"]
    if n_spaced:
        notes.append(f"spaces replaced in {n_spaced:,} words")
    if skipped is not None and skipped.n_lines:
        notes.append(f"{skipped.n_lines:,} bad lines skipped")
    print(f"{output}: {', '.join(notes)}", file=sys.stderr)


def name_languages(files: Sequence[str]) -> dict[str, str]:
    """Tell each file's language: en=FILE says it, or the file's name up to the first dot."""
    paths: dict[str, str] = {}
    for file in files:
        name, equals, path = file.partition("=")
        if not equals or "/" in name or Path(file).exists():
            name, path = Path(file).name.split(".")[0], file
        if not name or not path:
            raise InputError(f"no language in {file!r}", fix="write en=FILE")
        if name in paths:
            problem = f"{paths[name]} and {path} would both be {name!r}"
            raise InputError(problem, fix="write en=FILE de=FILE to tell their languages")
        paths[name] = path
    if len(paths) < 2:
        raise InputError("one language alone", fix="give the vectors of two or more")
    return paths


def _settle(
    method: str | None, space: str | None, has_dictionary: bool, cutoff: int, seed: int, device: str
) -> MapSettings:
    """Fill in what was not said."""
    from calque.algorithms.rcsls import RcslsSettings
    from calque.algorithms.self_learning import LearningSettings
    from calque.api import choose_device
    from calque.vectors.trials import TO_PIVOT, WITH_DICTIONARY, MapSettings

    default = "supervised" if has_dictionary else "unsupervised"
    methods = tuple(name.strip() for name in (method or default).split(","))
    chosen = space or ("pivot" if TO_PIVOT.intersection(methods) else "joint")
    settings = MapSettings(
        methods=cast(Any, methods),
        space=cast(Any, chosen),
        learning=LearningSettings(n_words=cutoff),
        rcsls=RcslsSettings(n_words=cutoff),
        seed=seed,
        device=choose_device(device),
    )
    needy = [name for name in methods if name in WITH_DICTIONARY]
    if needy and not has_dictionary:
        raise InputError(f"{needy[0]} needs a dictionary", fix="give one with --dictionary")
    if has_dictionary and not needy:
        problem = f"{', '.join(methods)} would make no use of --dictionary"
        raise InputError(problem, fix="drop it, give it as --dev, or choose another method")
    return settings


def _check_list(
    skip_bad: Path | None,
    paths: Mapping[str, str],
    pivot: str,
    patterns: Sequence[str | None],
    output: Path,
) -> None:
    """Refuse a list of bad lines that would take the place of what is read or written."""
    from calque.io.files import check_list
    from calque.vectors.mapping import name_dictionary

    if skip_bad is None:
        return
    if skip_bad.resolve().parent == output.resolve():
        raise InputError("in the folder of -o", file=skip_bad, fix="name a file elsewhere")
    read = [name_dictionary(name, pivot, other) for name in patterns if name for other in paths]
    check_list(skip_bad, [*paths.values(), *read])


def _read_vectors(
    paths: Mapping[str, str], max_words: int | None, skipped: SkippedLines | None
) -> dict[str, WordVectors]:
    """Read the vectors of all languages."""
    from calque.cli.console import show_phases
    from calque.vectors.static import read_vectors

    spaces: dict[str, WordVectors] = {}
    with show_phases("reading") as tell:
        for language, path in paths.items():
            tell(path)
            skip_bad = None if skipped is None else skipped.of(path)
            spaces[language] = read_vectors(path, max_words=max_words, skip_bad=skip_bad)
    return spaces


def _read_dictionaries(
    pattern: str | None,
    pivot: str,
    languages: Sequence[str],
    option: str,
    skipped: SkippedLines | None,
) -> dict[str, SeedDictionary]:
    """Read the dictionary of each language, if it has one."""
    from calque.vectors.mapping import LANGUAGE, load_dictionary

    others = [language for language in languages if language != pivot]
    if pattern is None:
        return {}
    if LANGUAGE not in pattern and len(others) > 1:
        problem = f"{option} names one file for {len(others)} languages"
        raise InputError(problem, fix=f"write {LANGUAGE} where their names differ")
    found = {language: load_dictionary(pattern, pivot, language, skipped) for language in others}
    there = {language: entries for language, entries in found.items() if entries is not None}
    if not there:
        raise InputError(f"{option}: no such file for any language", file=pattern)
    return there


@contextmanager
def _show(
    settings: MapSettings,
) -> Iterator[tuple[Callable[[str], None], Callable[[str, str, Round | None], None]]]:
    """Tell on standard error what is going on."""
    from calque.cli.console import show_phases

    with show_phases("mapping") as tell:

        def on_round(language: str, method: str, state: Round | None) -> None:
            phase = f"{language} {method}"
            if state is not None:
                kept = f"{100 * state.keep:.0f} % of scores"
                phase += f", round {state.number}, {kept}, similarity {state.objective:.4f}"
            tell(phase)

        yield (lambda language: tell(f"writing {language}")), on_round


FORMATS = ("tsv", "muse")
SHAPING = ("best", "mutual", "min_score", "form")


def lexicon(
    given: typer.Context,
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC.vec", help="Vectors in word2vec format; plain, .gz, .xz or .zst."
        ),
    ],
    tgt: Annotated[
        str, typer.Argument(metavar="TGT.vec", help="Vectors of the other language, same space.")
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Else standard output."),
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="HOW", help="nn (cosine), csls, or inverted-softmax.")
    ] = "csls",
    neighbors: Annotated[int, typer.Option(help="k of CSLS.")] = 10,
    hub_words: Annotated[
        int, typer.Option(metavar="N", help="Let CSLS look at the first N words only; 0: all.")
    ] = 0,
    best: Annotated[int, typer.Option(metavar="N", help="Translations a word.")] = 1,
    mutual: Annotated[
        bool, typer.Option("--mutual", help="Only pairs that are each other's best.")
    ] = False,
    min_score: Annotated[
        float | None, typer.Option(metavar="X", help="Only entries of at least this score.")
    ] = None,
    max_words: Annotated[
        int, typer.Option(metavar="N", help="The first, most frequent words of a file; 0: all.")
    ] = 200_000,
    form: Annotated[
        str, typer.Option("--format", metavar="WHICH", help="tsv, with scores; or muse, without.")
    ] = "tsv",
    evaluate: Annotated[
        str | None,
        typer.Option(metavar="DICT", help="Print precision against a dictionary, both ways."),
    ] = None,
    skip_bad: Annotated[
        Path | None,
        typer.Option(
            metavar="LIST",
            help="Leave bad lines of the vectors and of DICT out, and list them here.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Find the translations of words by their vectors.

    The vectors of both languages must be of one space, such as `calque map` makes. Against the
    cosine alone (nn), CSLS (Conneau et al., 2018) lowers words that are near to everything.

    \b
    calque lexicon en.vec de.vec --mutual --min-score 0 -o en-de.tsv
    calque lexicon en.vec de.vec --best 5 --format muse -o en-de.txt
    calque lexicon en.vec de.vec --evaluate en-de.5000-6500.txt
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.api import choose_device
    from calque.cli.aligner_options import check_choice
    from calque.io.files import open_list
    from calque.vectors.lexicon import METHODS, LexiconSettings

    started = time.perf_counter()
    check_choice("--method", method, METHODS)
    check_choice("--format", form, FORMATS)
    for option, value in (("--max-words", max_words), ("--hub-words", hub_words)):
        if value < 0:
            raise InputError(f"{option} {value}", fix="give 0 for all words")
    _check_together_lexicon(given, evaluate, output)
    _check_list_lexicon(skip_bad, [src, tgt, *([evaluate] if evaluate else [])], output)
    settings = LexiconSettings(
        cast(Any, method), neighbors, hub_words or None, best, mutual, min_score
    )
    place = choose_device(device)
    with ExitStack() as stack:
        skipped = open_list(skip_bad, stack)
        spaces = _load((src, tgt), max_words or None, place, skipped)
        if evaluate is not None:
            _print_scores(_evaluate(*spaces, evaluate, settings, skipped))
            if output is None and (notes := _left_out(*spaces, skipped)):
                print(", ".join(notes))
        if evaluate is None or output is not None:
            notes = _write(*spaces, settings, output or "-", with_scores=form == "tsv")
            notes += _left_out(*spaces, skipped)
            seconds = time.perf_counter() - started
            name = "standard output" if output in (None, "-") else output
            print(f"{name}: {', '.join(notes)}; {seconds:.1f} s", file=sys.stderr)


def _check_together_lexicon(given: typer.Context, evaluate: str | None, output: str | None) -> None:
    """Refuse options that would be without effect, and files that would be written over."""
    if evaluate is not None and output is None:
        for name in SHAPING:
            source = given.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                option = "--format" if name == "form" else f"--{name.replace('_', '-')}"
                problem = f"{option} shapes a dictionary, but --evaluate alone writes none"
                raise InputError(problem, fix="drop it, or name a file with -o")
    for name in ("src", "tgt", "evaluate"):
        if output and (path := given.params[name]) and _is_same_file(output, path):
            raise InputError("is read too", file=output, fix="write to another file")


def _is_same_file(output: str, path: str) -> bool:
    return os.path.isfile(output) and os.path.exists(path) and os.path.samefile(output, path)


def _check_list_lexicon(skip_bad: Path | None, inputs: list[str], output: str | None) -> None:
    from calque.io.files import check_list

    check_list(skip_bad, inputs, None if output in (None, "-") else Path(output))


def _load(
    files: tuple[str, str], max_words: int | None, device: Any, skipped: SkippedLines | None
) -> tuple[VectorSpace, VectorSpace]:
    """Read the vectors of both languages, which must be of one width."""
    from calque.cli.console import show_phases
    from calque.vectors.static import check_widths, load_space

    spaces = []
    with show_phases("reading") as tell:
        for file in files:
            tell(file)
            skip_bad = None if skipped is None else skipped.of(file)
            spaces.append(load_space(file, max_words, device, skip_bad))
    check_widths(*spaces)
    return spaces[0], spaces[1]


def _write(
    src: VectorSpace, tgt: VectorSpace, settings: LexiconSettings, output: str, *, with_scores: bool
) -> list[str]:
    """Make and write the dictionary; say what is in it and what is not."""
    from calque.cli.console import show_progress
    from calque.io.files import write_atomically
    from calque.vectors.lexicon import induce_lexicon, write_lexicon

    with write_atomically(output) as stream:  # first of all, so that a bad path is known at once
        with show_progress("comparing", settings.n_passes * len(src)) as advance:
            found = induce_lexicon(src, tgt, settings, on_rows=advance)
        n_unwritable = write_lexicon(stream, found, src, tgt, scores=with_scores)
    return _describe_lexicon(found, src, tgt, n_unwritable)


def _describe_lexicon(
    found: Lexicon, src: VectorSpace, tgt: VectorSpace, n_unwritable: int
) -> list[str]:
    n_translated = len(set(found.src.tolist()))
    notes = [
        f"{len(found) - n_unwritable:,} entries",
        f"{n_translated:,} of {len(src):,} words translated into {len(tgt):,}",
    ]
    if n_unwritable:
        what = "entries left out, of words with spaces around or line ends in them"
        notes.append(f"{n_unwritable:,} {what}")
    return notes


def _left_out(src: VectorSpace, tgt: VectorSpace, skipped: SkippedLines | None) -> list[str]:
    """Say which words take no part."""
    unusual = [
        (src.n_zero + tgt.n_zero, "words with vectors of zeros left out"),
        (src.n_duplicates + tgt.n_duplicates, "repeated words left out"),
        (0 if skipped is None else skipped.n_lines, "bad lines skipped"),
    ]
    return [f"{number:,} {what}" for number, what in unusual if number]


def _evaluate(
    src: VectorSpace,
    tgt: VectorSpace,
    dictionary: str,
    settings: LexiconSettings,
    skipped: SkippedLines | None,
) -> dict[str, DictionaryScores]:
    """Score both directions by nn, CSLS and the method asked for."""
    from calque.cli.console import show_phases, show_progress
    from calque.evaluation.tasks.lexicon_induction import METHODS, score_dictionary
    from calque.io.dictionaries import read_dictionary
    from calque.io.files import shown
    from calque.vectors.lexicon import Translator

    skip_bad = None if skipped is None else skipped.of(dictionary)
    entries = list(read_dictionary(dictionary, skip_bad))
    if not entries:
        raise InputError("holds no entries", file=shown(dictionary), fix="give another dictionary")
    inverted = [(tgt_word, src_word) for src_word, tgt_word in entries]
    names = dict.fromkeys([*METHODS, settings.method])
    with show_progress("comparing", (len(names) - 1) * len(src)) as advance:
        translators = [
            Translator.make(src, tgt, replace(settings, method=cast(Any, name)), advance)
            for name in names
        ]
    with show_phases("scoring"):
        forward = score_dictionary(translators, entries)
    if forward.n_known == 0:
        problem = f"none of its {forward.n_words:,} words has a vector and a translation with one"
        fix = "give the vectors in the order of the dictionary's languages, source first"
        raise InputError(problem, file=shown(dictionary), fix=fix)
    with show_phases("scoring"):
        backward = score_dictionary([translator.reverse() for translator in translators], inverted)
    return {"→": forward, "←": backward}


def _print_scores(results: dict[str, DictionaryScores]) -> None:
    from rich.console import Console

    from calque.cli.console_tables import tabulate_dictionary

    Console().print(tabulate_dictionary(results))
    for way, result in results.items():
        print(
            f"{way} {result.n_known:,} of {result.n_words:,} words known "
            f"({100 * result.coverage:.1f} %); {result.n_unknown_src:,} have no vector, "
            f"{result.n_unknown_tgt:,} no translation with one"
        )
