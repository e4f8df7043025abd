"""`calque clean`: bitext without the pairs that are of no use, and what was dropped and why.

`calque embed`: one vector a line of text.

`calque mine`: translations out of two texts that are not parallel.

`calque neutralize`: sentence vectors without their language, from plain text.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.errors import InputError

if TYPE_CHECKING:
    from calque.algorithms.margin import MinedPairs
    from calque.io.bitext import Paths
    from calque.io.cleaning import CleaningReport, CleaningRules
    from calque.io.files import SkippedLines
    from calque.models.inference import EmbedReport
    from calque.sentences.mine import SentenceStore, Side
    from calque.types import SentencePair


def clean(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Lines `a TAB b` or `a ||| b`, or one side.")
    ],
    file2: Annotated[
        str | None, typer.Argument(metavar="FILE2", help="The other side, line by line.")
    ] = None,
    output: Annotated[
        list[Path],
        typer.Option("--output", "-o", metavar="FILE", help="A TSV; or twice, a file a side."),
    ] = [],  # noqa: B006 (typer makes a list of its own)
    languages: Annotated[
        str | None,
        typer.Option(metavar="SRC-TGT", help="de-en, zh-fr …; else the files' names tell."),
    ] = None,
    input_format: Annotated[
        str, typer.Option("--input", metavar="KIND", help="auto, pipes (a ||| b) or tsv.")
    ] = "auto",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="RULE=VALUE", help="Change a rule: max_ratio=2; repeatable."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="JSON", help="Keep the counts, with a few examples of each."),
    ] = None,
    skip_bad: Annotated[
        Path | None, typer.Option(metavar="LIST", help="Leave bad lines out, and list them here.")
    ] = None,
) -> None:
    """Drop sentence pairs that are of no use, and tidy the rest.

    Dropped are pairs with an empty side, too long or too unequal ones, those that are mostly no
    letters, in the wrong script for their language, the same on both sides, or there already. The
    rest is composed (NFC), without control characters, with single spaces. Rules and defaults:
    min_chars 1, max_chars 1000, min_words 1, max_words none, max_ratio 3.0, max_nonletters 0.6,
    drop_identical, drop_duplicates, check_scripts and normalize true.

    \b
    calque clean en-de.tsv.gz -o clean.en-de.tsv.gz --report report.json
    calque clean news.en news.de -o clean.en -o clean.de --set max_ratio=2 --set max_chars=none
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.io.bitext import write_bitext
    from calque.io.cleaning import CleaningReport, clean_pairs
    from calque.io.files import check_target, open_list, write_atomically

    started, inputs = time.perf_counter(), [file] if file2 is None else [file, file2]
    if len(output) not in (1, 2):
        raise InputError(f"{len(output)} outputs", fix="give -o FILE, or -o twice: a file a side")
    lists = [path for path in (report, skip_bad) if path is not None]
    for path in [*output, *lists]:
        check_target(path, inputs)
    if len({path.resolve() for path in [*set(output), *lists]}) < len(set(output)) + len(lists):
        raise InputError("-o, --report and --skip-bad", fix="name different files")
    rules, found, wide = read_rules(changes or []), CleaningReport(), _WideLines()
    paths: Paths = file if file2 is None else (file, file2)
    pair = _find_languages(languages, paths)
    with ExitStack() as stack:
        skipped = open_list(skip_bad, stack)
        pairs = _read(paths, input_format, skipped, wide)
        write_bitext([str(path) for path in output], clean_pairs(pairs, rules, found, pair))
        if report is not None:
            stream = stack.enter_context(write_atomically(report))
            stream.write(json.dumps(found.to_dict(), ensure_ascii=False, indent=1) + "\n")
    place, notes = ", ".join(map(str, output)), _describe(found, skipped, wide)
    print(f"{place}: {notes}; {time.perf_counter() - started:.1f} s", file=sys.stderr)


def read_rules(changes: list[str]) -> CleaningRules:
    """Read rules as `data.cleaning` of a recipe takes them; `none` switches one off.

    >>> read_rules(["max_ratio=2", "max_chars=none"]).max_ratio
    2
    """
    from pydantic import ValidationError

    from calque.training.data import cleaning_rules
    from calque.training.recipe import DataSection, apply_override
    from calque.training.recipe_io import describe_error

    rules: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        apply_override(rules, f"{name}{equals}{'null' if value.lower() == 'none' else value}")
    try:
        return cleaning_rules(DataSection(cleaning=rules))
    except ValidationError as error:
        problem = describe_error(error, {"cleaning": rules}, DataSection)
        raise InputError(f"--set {problem.removeprefix('cleaning: ')}") from error


def _find_languages(given: str | None, paths: Paths) -> tuple[str, str] | None:
    from calque.io.bitext import languages_of

    if given is None:
        found = languages_of(paths)
        if found is None:
            hint = "give --languages de-en to have them checked"
            print(f"scripts are not checked: no languages in the names ({hint})", file=sys.stderr)
        return found
    src, dash, tgt = given.partition("-")
    if not (src and dash and tgt):
        raise InputError(f"--languages {given} is no pair", fix="write de-en")
    return src, tgt


class _WideLines:
    """Counts lines that have columns which are not kept."""

    def __init__(self) -> None:
        self.n_lines = self.first = 0

    def __call__(self, number: int) -> None:
        """Note one such line."""
        self.first = self.first or number
        self.n_lines += 1


def _read(
    paths: Paths, input_format: str, skipped: Any, wide: _WideLines
) -> Iterator[SentencePair]:
    from calque.cli.console import show_progress
    from calque.io.bitext import read_bitext

    with show_progress("cleaning", None) as advance:
        kind = cast(Any, input_format)
        for pair in read_bitext(paths, kind, skip_bad=skipped, on_wide=wide):
            yield pair
            advance(1)


def _describe(report: CleaningReport, skipped: Any, wide: _WideLines) -> str:
    notes = [report.summary(), f"{report.n_normalized:,} tidied"]
    if skipped is not None and skipped.n_lines:
        notes.append(f"{skipped.n_lines:,} bad lines skipped")
    if wide.n_lines:
        what = "lines with more than three columns, of which the rest is left out"
        notes.append(f"{wide.n_lines:,} {what} (line {wide.first:,} is the first)")
    return "; ".join(notes)


def embed(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="One sentence a line; plain, .gz, .xz, .zst, or - (standard input).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="VECTORS.npy", help="Where the vectors go.")
    ],
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name; else the embedded model.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="0 is the embedding, -1 the last; else the model's best.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave the model's neutral space, if it has one, alone.")
    ] = False,
    map_from: Annotated[
        str | None,
        typer.Option(metavar="LANGUAGE", help="The text's language: apply the model's map of it."),
    ] = None,
    maps: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where the maps are; else beside the model."),
    ] = None,
    center: Annotated[
        bool, typer.Option("--center", help="Subtract the file's mean: one language a file.")
    ] = False,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Scale every vector to length one.")
    ] = False,
    skip_bad: Annotated[
        Path | None,
        typer.Option(metavar="LIST", help="Make undecodable lines zero and list them here."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Turn each line of a text into a vector.

    Row k of the NumPy file is line k. Long lines are read in windows: nothing is cut off.
    """
    from calque.api import load
    from calque.cli.console import show_phases, show_progress
    from calque.io.files import check_list, open_list
    from calque.sentences.embed import check_output, write_vectors

    check_output(output, [file])
    check_list(skip_bad, [file], output)
    if maps is not None and map_from is None:
        raise InputError("--maps without --map-from", fix="name the text's language: --map-from de")
    started = time.perf_counter()
    with ExitStack() as stack:
        skipped = open_list(skip_bad, stack)
        with show_phases("reading"):
            n_lines = _count_lines(file, skipped)
        encoder = load(model, device, maps=None if map_from is None else maps or True)
        report = write_vectors(
            encoder,
            _read_lines(file, skipped),
            output,
            layer=layer,
            raw=raw,
            map_from=map_from,
            center=center,
            normalize=normalize,
            on_block=stack.enter_context(show_progress("embedding", n_lines)),
        )
    seconds = time.perf_counter() - started
    notes = _describe_embed(report, 0 if skipped is None else skipped.n_lines)
    print(f"{output}: {', '.join(notes)}; {seconds:.1f} s", file=sys.stderr)


def _count_lines(file: str, skipped: SkippedLines | None) -> int | None:
    """Read a file once before the work, so that a bad line is known at once; not a pipe."""
    from calque.io.files import SkippedLines

    if Path(file).exists() and not Path(file).is_file():
        return None
    if file == "-":
        return None
    return sum(1 for _ in _read_lines(file, None if skipped is None else SkippedLines()))


def _read_lines(file: str, skipped: SkippedLines | None) -> Iterator[str]:
    """Read lines; one that is skipped is empty, so that rows and lines keep in step."""
    from calque.io.files import refuse, scan_lines

    for number, line in enumerate(scan_lines(file), start=1):
        if not isinstance(line, str):
            refuse(line, file, number, skipped)
        yield line if isinstance(line, str) else ""


def _describe_embed(report: EmbedReport, n_skipped: int) -> list[str]:
    """Say what was written, and what was not usual about it."""
    notes = [f"{report.n_sentences:,} vectors"]
    if report.n_long:
        notes.append(f"{report.n_long:,} long lines read in {report.n_windows:,} windows")
    if report.n_empty:
        notes.append(f"{report.n_empty:,} empty lines are zero")
    if n_skipped:
        notes.append(f"{n_skipped:,} of them undecodable")
    return notes


NPY = ".npy"


def mine(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A sentence, or id TAB sentence, a line; plain, .gz, .xz, .zst. Or .npy vectors.",
        ),
    ],
    tgt: Annotated[str, typer.Argument(metavar="TGT", help="The same of the other language.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the pairs go.")
    ],
    model: Annotated[
        str | None, typer.Option(help="A model folder or hub name; else the embedded model.")
    ] = None,
    vectors: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="SRC.npy TGT.npy", help="Vectors of the lines, as calque embed makes them."
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(metavar="T", help="Only pairs that score at least this.")
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(
            metavar="GOLD",
            help="Choose the threshold by true pairs of these texts: id TAB id, or sentences.",
        ),
    ] = None,
    margin: Annotated[str, typer.Option(help="ratio, distance, or absolute (the cosine).")] = (
        "ratio"
    ),
    retrieval: Annotated[
        str,
        typer.Option(help="max (each sentence once), intersect, forward or backward."),
    ] = "max",
    k: Annotated[
        int, typer.Option("--neighbors", "--k", help="Over how many a margin is taken.")
    ] = 4,
    index: Annotated[
        str, typer.Option(help="exact, or a FAISS index for millions: IVF1024,Flat …")
    ] = "exact",
    probes: Annotated[int, typer.Option(help="Lists of a FAISS index that are looked at.")] = 16,
    ids: Annotated[
        bool, typer.Option("--ids", help="Lines are id TAB sentence; BUCC's are known as such.")
    ] = False,
    layer: Annotated[
        int | None, typer.Option(help="0 is the embedding, -1 the last; else the model's best.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Leave the model's neutral space, if it has one, alone.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what was interrupted.")
    ] = False,
    skip_bad: Annotated[
        Path | None,
        typer.Option(metavar="LIST", help="Leave undecodable lines out and list them here."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Find sentences of two texts that translate each other.

    Writes score TAB source TAB target, best first; ids follow where there are any. The score
    compares a pair's cosine with those of its neighbors (Artetxe & Schwenk, 2019); about 1.05
    and more is good for the ratio, but choose it for your model, by --dev.

    \b
    calque mine news.de news.en -o de-en.tsv --threshold 1.06
    calque mine zh-en.dev.zh zh-en.dev.en --dev zh-en.dev.gold -o zh-en.tsv
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import show_phases
    from calque.io.files import check_list, check_target, open_list, write_atomically
    from calque.sentences.mine import MiningSettings, choose_threshold, locate_gold, write_pairs

    started = time.perf_counter()
    settings = MiningSettings(cast(Any, margin), cast(Any, retrieval), k, index, probes)
    inputs = [src, tgt, *(vectors or ()), *([dev] if dev else [])]
    _check(inputs, threshold, dev, vectors)
    check_target(output, inputs)
    check_list(skip_bad, inputs, output)
    with ExitStack() as stack:
        skipped = open_list(skip_bad, stack)
        folder = stack.enter_context(_working_folder(output, resume))
        with show_phases("reading"):
            job = _Job((src, tgt), vectors, folder, ids or None, resume, device, skipped)
        stack.callback(job.close)
        given = job.open_vectors() if job.is_given else None
        gold = set[tuple[int, int]]()
        if dev is not None:
            gold = locate_gold(dev, job.stores or [len(s.vectors.array) for s in given or ()])
        sides = given or job.embed(model, layer, raw, settings.index)
        pairs = _search(sides, settings)
        if dev is not None:
            cut = choose_threshold(pairs, *sides, gold)
            if not cut.n_hits:
                problem = f"none of its {cut.n_gold:,} pairs is among the {len(pairs):,} found"
                raise InputError(problem, file=dev, fix="give a better model or another list")
            threshold = cut.threshold
            print(
                f"threshold {threshold:.6f} by {dev}: F1 {100 * cut.f1:.1f}, precision "
                f"{100 * cut.precision:.1f}, recall {100 * cut.recall:.1f} (of the same pairs)"
            )
        kept = pairs if threshold is None else pairs.above(threshold)
        with write_atomically(output) as stream:
            n_tabs = write_pairs(stream, kept, *sides)
        notes = _describe_mine(sides, job, kept, pairs, n_tabs, threshold)
    print(f"{output}: {', '.join(notes)}; {time.perf_counter() - started:.1f} s", file=sys.stderr)


class _Job:
    """The two texts of a run, or their vectors, made ready for the search."""

    def __init__(
        self,
        files: tuple[str, str],
        vectors: tuple[str, str] | None,
        folder: Path,
        ids: bool | None,
        resume: bool,
        device: str,
        skipped: SkippedLines | None,
    ) -> None:
        from calque.sentences.mine import SentenceStore

        self.files, self.vectors, self.folder = files, vectors, folder
        self.skipped = skipped
        self.resume, self.device, self.n_long = resume, device, 0
        self.is_bare = files[0].endswith(NPY)
        self.is_given = vectors is not None or self.is_bare
        self.stores: list[SentenceStore] = []
        for name, file in zip(("src", "tgt"), () if self.is_bare else files, strict=False):
            skip_bad = None if skipped is None else skipped.of(file)
            store = SentenceStore(file, folder / f"{name}.txt", ids=ids, skip_bad=skip_bad)
            self.stores.append(store)
            if not len(self.stores[-1]):
                raise InputError("holds no sentence", file=file, fix="give another file")

    def open_vectors(self) -> tuple[Side, Side]:
        """Map the vectors that were given."""
        from calque.api import choose_device
        from calque.sentences.mine import Side, open_vectors, usable_rows

        place, sides = choose_device(self.device), []
        for number, file in enumerate(self.vectors or self.files):
            store = None if self.is_bare else self.stores[number]
            array = open_vectors(Path(file), None if store is None else store.n_lines)
            lines = None if store is None else store.lines
            sides.append(Side(*usable_rows(array, file, lines, place), store))
        return sides[0], sides[1]

    def embed(
        self, model: str | None, layer: int | None, raw: bool, index: str
    ) -> tuple[Side, Side]:
        """Embed both texts, for an index that can be made of them."""
        from calque.algorithms.nearest import check_index
        from calque.api import load
        from calque.cli.console import show_progress
        from calque.models.inference import device_of
        from calque.sentences.mine import Side, embed_store, usable_rows

        encoder, sides = load(model, self.device), []
        check_index(index, encoder.hidden_size)
        with show_progress("embedding", sum(map(len, self.stores))) as advance:
            for store in self.stores:
                array, n_long = embed_store(
                    encoder,
                    store,
                    self.folder,
                    layer=layer,
                    raw=raw,
                    resume=self.resume,
                    on_block=advance,
                )
                self.n_long += n_long
                vectors, rows = usable_rows(array, store.file, None, device_of(encoder))
                sides.append(Side(vectors, rows, store))
        return sides[0], sides[1]

    def close(self) -> None:
        """Let go of the files."""
        for store in self.stores:
            store.close()


def _search(sides: tuple[Side, Side], settings: Any) -> MinedPairs:
    from calque.cli.console import show_progress
    from calque.sentences.mine import mine

    with show_progress("comparing", sum(len(side.vectors) for side in sides)) as advance:
        return mine(*sides, settings, advance)


def _check(
    inputs: list[str], threshold: float | None, dev: str | None, vectors: tuple[str, str] | None
) -> None:
    """Refuse options that contradict each other, and input that can be read only once."""
    if threshold is not None and dev is not None:
        raise InputError("--threshold and --dev", fix="give one of both")
    if threshold is not None and math.isnan(threshold):
        raise InputError("--threshold nan", fix="give a number")
    if "-" in inputs:
        raise InputError("standard input cannot be mined", fix="name a file")
    are_vectors = [name.endswith(NPY) for name in inputs[:2]]
    if any(are_vectors) and (vectors is not None or not all(are_vectors)):
        fix = "give two texts (and --vectors SRC.npy TGT.npy), or two .npy files"
        raise InputError("text and vectors mixed", fix=fix)


@contextmanager
def _working_folder(output: Path, resume: bool) -> Iterator[Path]:
    """Keep the sentences and vectors beside the output until it is there."""
    from calque.io.files import DISK_FULL

    folder = output.with_name(f"{output.name}.mining")
    if folder.exists() and not resume:
        fix = "go on with --resume, or remove this folder to begin anew"
        raise InputError("an unfinished run is here", file=folder, fix=fix)
    try:
        folder.mkdir(exist_ok=True)
        yield folder
    except BaseException as error:
        if not any(folder.glob("*.f32*")):  # no vectors yet: nothing is lost
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, PermissionError) or getattr(error, "errno", None) in DISK_FULL:
            raise InputError(str(error), fix="make room, or write elsewhere") from error
        raise
    shutil.rmtree(folder)


def _describe_mine(
    sides: tuple[Side, Side],
    job: _Job,
    kept: MinedPairs,
    pairs: MinedPairs,
    n_tabs: int,
    threshold: float | None,
) -> list[str]:
    """Say what was written, and what was not."""
    stores: list[SentenceStore] = job.stores
    n_sentences = [len(side.vectors) for side in sides]
    notes = [f"{len(kept):,} pairs of {n_sentences[0]:,} × {n_sentences[1]:,} sentences"]
    if threshold is not None:
        notes.append(f"{len(pairs) - len(kept):,} below {threshold:.4f} left out")
    n_rows = sum(len(store) for store in stores) or sum(len(side.vectors.array) for side in sides)
    unusual = [
        (sum(store.n_duplicates for store in stores), "repeated lines left out"),
        (sum(store.n_empty for store in stores), "empty lines left out"),
        (0 if job.skipped is None else job.skipped.n_lines, "of them undecodable"),
        (n_rows - sum(n_sentences), "vectors of zeros left out"),
        (job.n_long, "long lines read in windows"),
        (n_tabs, "sentences with a tab, written as a space"),
    ]
    return notes + [f"{number:,} {what}" for number, what in unusual if number]


def neutralize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, a hub name or calque-mini.")
    ],
    texts: Annotated[
        list[Path],
        typer.Argument(metavar="TEXT…", help="One file a language: en.txt, de.txt.xz and so on."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the new model goes.")
    ],
    layer: Annotated[int | None, typer.Option(help="By default the model's best.")] = None,
    sentences: Annotated[int, typer.Option(min=50, help="How many to draw from each file.")] = 2000,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
) -> None:
    """Store what tells languages apart, so that `embed` drops it.

    No bitext, no training: each language's mean vector is enough. The files' names, up to the
    first dot, name the languages.
    """
    from calque.api import load
    from calque.cli.console import show_progress
    from calque.io.bitext import read_sentences
    from calque.sentences.language_neutral import find_neutral_space, save_neutral_model

    names = [path.name.split(".")[0] for path in texts]
    for name, path in zip(names, texts, strict=True):
        if names.count(name) > 1:
            fix = "give one file a language, named after it: en.txt, de.txt"
            raise InputError(f"two files are of a language {name!r}", file=path, fix=fix)
    if output.exists():
        raise InputError("this folder exists", file=output, fix="give a new one")
    encoder = load(model, device)
    with show_progress("embedding", len(names)) as advance:
        space = find_neutral_space(
            encoder,
            {name: read_sentences(path) for name, path in zip(names, texts, strict=True)},
            layer=layer,
            n_sentences=sentences,
            on_language=lambda _: advance(1),
        )
    save_neutral_model(encoder, space, output)
    n_removed, n_kept = len(space.directions), encoder.hidden_size - len(space.directions)
    print(f"{output}: layer {space.layer}, {n_removed} directions removed, {n_kept} kept")
