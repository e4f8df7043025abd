"""`calque lexicon`: a bilingual dictionary out of word vectors, or how good it would be."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from calque.tasks.lexicon_induction import DictionaryScores
    from calque.text.files import SkippedLines
    from calque.tools.lexicon import Lexicon, LexiconSettings
    from calque.tools.vector_space import VectorSpace

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
    from calque.text.files import open_list
    from calque.tools.lexicon import METHODS, LexiconSettings

    started = time.perf_counter()
    check_choice("--method", method, METHODS)
    check_choice("--format", form, FORMATS)
    for option, value in (("--max-words", max_words), ("--hub-words", hub_words)):
        if value < 0:
            raise InputError(f"{option} {value}", fix="give 0 for all words")
    _check_together(given, evaluate, output)
    _check_list(skip_bad, [src, tgt, *([evaluate] if evaluate else [])], output)
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


def _check_together(given: typer.Context, evaluate: str | None, output: str | None) -> None:
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


def _check_list(skip_bad: Path | None, inputs: list[str], output: str | None) -> None:
    from calque.text.files import check_list

    check_list(skip_bad, inputs, None if output in (None, "-") else Path(output))


def _load(
    files: tuple[str, str], max_words: int | None, device: Any, skipped: SkippedLines | None
) -> tuple[VectorSpace, VectorSpace]:
    """Read the vectors of both languages, which must be of one width."""
    from calque.cli.progress import show_phases
    from calque.tools.vector_space import check_widths, load_space

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
    from calque.cli.progress import show_progress
    from calque.text.files import write_atomically
    from calque.tools.lexicon import induce_lexicon, write_lexicon

    with write_atomically(output) as stream:  # first of all, so that a bad path is known at once
        with show_progress("comparing", settings.n_passes * len(src)) as advance:
            found = induce_lexicon(src, tgt, settings, on_rows=advance)
        n_unwritable = write_lexicon(stream, found, src, tgt, scores=with_scores)
    return _describe(found, src, tgt, n_unwritable)


def _describe(found: Lexicon, src: VectorSpace, tgt: VectorSpace, n_unwritable: int) -> list[str]:
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
    from calque.cli.progress import show_phases, show_progress
    from calque.tasks.lexicon_induction import METHODS, score_dictionary
    from calque.text.dictionaries import read_dictionary
    from calque.text.files import shown
    from calque.tools.lexicon import Translator

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

    from calque.cli.vector_tables import tabulate_dictionary

    Console().print(tabulate_dictionary(results))
    for way, result in results.items():
        print(
            f"{way} {result.n_known:,} of {result.n_words:,} words known "
            f"({100 * result.coverage:.1f} %); {result.n_unknown_src:,} have no vector, "
            f"{result.n_unknown_tgt:,} no translation with one"
        )
