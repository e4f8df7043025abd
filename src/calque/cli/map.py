"""`calque map`: word vectors of several languages into one space."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.types import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from calque.align.self_learning import Round
    from calque.models.static import WordVectors
    from calque.text.files import SkippedLines
    from calque.tools.map_trials import MapSettings
    from calque.tools.seed_dictionaries import SeedDictionary


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

    from calque.cli.map_tables import explain_choices, tabulate_choices
    from calque.text.files import open_list
    from calque.tools.mapped_folder import check_folder, write_mapped
    from calque.tools.space_mapper import map_spaces

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
    from calque.align.rcsls import RcslsSettings
    from calque.align.self_learning import LearningSettings
    from calque.api import choose_device
    from calque.tools.map_trials import TO_PIVOT, WITH_DICTIONARY, MapSettings

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
    from calque.text.files import check_list
    from calque.tools.seed_dictionaries import name_dictionary

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
    from calque.cli.progress import show_phases
    from calque.models.static import read_vectors

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
    from calque.tools.seed_dictionaries import LANGUAGE, load_dictionary

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
    from calque.cli.progress import show_phases

    with show_phases("mapping") as tell:

        def on_round(language: str, method: str, state: Round | None) -> None:
            phase = f"{language} {method}"
            if state is not None:
                kept = f"{100 * state.keep:.0f} % of scores"
                phase += f", round {state.number}, {kept}, similarity {state.objective:.4f}"
            tell(phase)

        yield (lambda language: tell(f"writing {language}")), on_round
