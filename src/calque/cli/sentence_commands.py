"""Commands on sentence vectors: embed, mine and neutralize."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from calque.cli.options import (
    DeviceOption,
    LayerOption,
    MapsOption,
    ModelOption,
    RawOption,
    ResumeOption,
    SkipBadOption,
)
from calque.errors import InputError

if TYPE_CHECKING:
    from calque.io.bitext import BitextPaths
    from calque.io.cleaning import CleaningReport, CleaningRules
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
    from calque.io.files import check_output_file, open_skip_list, write_atomically

    started, inputs = time.perf_counter(), [file] if file2 is None else [file, file2]
    if len(output) not in (1, 2):
        raise InputError(f"{len(output)} outputs", fix="give -o FILE, or -o twice: a file a side")
    lists = [path for path in (report, skip_bad) if path is not None]
    for path in [*output, *lists]:
        check_output_file(path, inputs)
    if len({path.resolve() for path in [*set(output), *lists]}) < len(set(output)) + len(lists):
        raise InputError("-o, --report and --skip-bad", fix="name different files")
    rules, found, wide = read_rules(changes or []), CleaningReport(), _WideLines()
    paths: BitextPaths = file if file2 is None else (file, file2)
    pair = _find_languages(languages, paths)
    with ExitStack() as stack:
        skipped = open_skip_list(skip_bad, stack)
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


def _find_languages(given: str | None, paths: BitextPaths) -> tuple[str, str] | None:
    from calque.io.bitext import infer_languages

    if given is None:
        found = infer_languages(paths)
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
    paths: BitextPaths, input_format: str, skipped: Any, wide: _WideLines
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
            help="One sentence per line; plain, .gz, .xz, .zst, or - for standard input.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="VECTORS.npy", help="Output file.")
    ],
    model: ModelOption = None,
    layer: LayerOption = None,
    raw: RawOption = False,
    language: Annotated[
        str | None,
        typer.Option(
            metavar="CODE", help="Language of the text: apply the model's linear map of it."
        ),
    ] = None,
    maps: MapsOption = None,
    center: Annotated[
        bool,
        typer.Option("--center", help="Subtract the mean vector of the file (one language)."),
    ] = False,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Scale every vector to length one.")
    ] = False,
    skip_bad: SkipBadOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Turn each line of a text into a vector.

    Row k of the NumPy file is line k. Long lines are split into windows and averaged, empty and
    skipped lines become zero vectors.

    \b
    calque embed news.de -o news.de.npy
    calque embed news.de.xz -o news.de.npy --model runs/align/model --normalize
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import print_summary, progress_bar
    from calque.sentences.embed import embed_file

    started = time.perf_counter()
    with progress_bar() as progress:
        result = embed_file(
            file,
            output=output,
            model=model,
            layer=layer,
            raw=raw,
            language=language,
            maps=maps,
            center=center,
            normalize=normalize,
            skip_bad=skip_bad,
            device=device,
            progress=progress,
        )
    counts = result.counts
    notes = [f"{counts.n_sentences:,} vectors"]
    if counts.n_long:
        notes.append(f"{counts.n_long:,} long lines split into {counts.n_windows:,} windows")
    if counts.n_empty:
        notes.append(f"{counts.n_empty:,} empty lines are zero")
    if result.n_skipped:
        notes.append(f"{result.n_skipped:,} of them invalid")
    print_summary(output, notes, started)


def mine(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="One sentence, or id TAB sentence, per line; plain, .gz, .xz or .zst. "
            "Or a .npy file of vectors.",
        ),
    ],
    tgt: Annotated[str, typer.Argument(metavar="TGT", help="The same for the other language.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file.")],
    model: ModelOption = None,
    vectors: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="SRC.npy TGT.npy",
            help="Vectors of the lines, written by calque embed.",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="T", help="Keep only pairs with at least this score."),
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Choose the threshold with true pairs of these texts: id TAB id, or sentences.",
        ),
    ] = None,
    margin: Annotated[
        str, typer.Option(help="ratio, distance, or absolute (the cosine itself).")
    ] = "ratio",
    retrieval: Annotated[
        str, typer.Option(help="max (each sentence at most once), intersect, forward or backward.")
    ] = "max",
    neighbors: Annotated[
        int, typer.Option("--neighbors", "--k", help="Nearest neighbors for the margin.")
    ] = 4,
    index: Annotated[
        str, typer.Option(help="exact, or a FAISS index for millions of lines: IVF1024,Flat ...")
    ] = "exact",
    probes: Annotated[int, typer.Option(help="Lists of a FAISS index to search.")] = 16,
    ids: Annotated[
        bool,
        typer.Option("--ids", help="Lines are id TAB sentence. Default: inferred for BUCC's ids."),
    ] = False,
    layer: LayerOption = None,
    raw: RawOption = False,
    resume: ResumeOption = False,
    skip_bad: SkipBadOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Find sentences of two texts that translate each other.

    Writes score TAB source TAB target, best first, followed by the ids if there are any. The score
    compares the cosine of a pair with those of its nearest neighbors (Artetxe & Schwenk, 2019).
    With the ratio, about 1.05 and more is good, but choose the threshold for your model with --dev.

    \b
    calque mine news.de news.en -o de-en.tsv --threshold 1.06
    calque mine zh-en.dev.zh zh-en.dev.en --dev zh-en.dev.gold -o zh-en.tsv
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import print_summary, progress_bar
    from calque.sentences import mine as mining

    started = time.perf_counter()
    with progress_bar() as progress:
        result = mining.mine(
            src,
            tgt,
            output=output,
            model=model,
            vectors=vectors,
            threshold=threshold,
            dev=dev,
            margin=margin,
            retrieval=retrieval,
            neighbors=neighbors,
            index=index,
            probes=probes,
            ids=ids,
            layer=layer,
            raw=raw,
            resume=resume,
            skip_bad=skip_bad,
            device=device,
            progress=progress,
        )
    if (score := result.dev_score) is not None:
        print(
            f"threshold {score.threshold:.6f} chosen with {dev}: F1 {100 * score.f1:.1f}, "
            f"precision {100 * score.precision:.1f}, recall {100 * score.recall:.1f} "
            "(on the same pairs)"
        )
    notes = [f"{result.n_pairs:,} pairs of {result.n_src:,} × {result.n_tgt:,} sentences"]
    if result.threshold is not None:
        notes.append(f"{result.n_below:,} below {result.threshold:.4f} left out")
    counts = [
        (result.n_duplicates, "repeated lines left out"),
        (result.n_empty, "empty lines left out"),
        (result.n_skipped, "of them invalid"),
        (result.n_zero, "zero vectors left out"),
        (result.n_long, "long lines split into windows"),
        (result.n_with_tabs, "sentences with a tab, written as a space"),
    ]
    notes += [f"{number:,} {what}" for number, what in counts if number]
    print_summary(output, notes, started)


def neutralize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model folder, hub name or calque-mini.")
    ],
    texts: Annotated[
        list[Path],
        typer.Argument(metavar="TEXT...", help="One file per language: en.txt, de.txt.xz, ..."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder of the new model.")
    ],
    layer: LayerOption = None,
    sentences: Annotated[
        int, typer.Option(min=50, metavar="N", help="Sentences to draw from each file.")
    ] = 2000,
    device: DeviceOption = "auto",
) -> None:
    """Copy a model and store how its languages differ, so that `embed` removes it.

    Neither bitext nor training is needed: only the mean vector of each language is used. The file
    names up to the first dot are the languages.

    \b
    calque neutralize xlm-roberta-base en.txt de.txt ja.txt -o neutral
    """  # noqa: D301 (a backspace keeps the lines of the examples apart)
    from calque.cli.console import print_summary, progress_bar
    from calque.sentences.language_neutral import neutralize as run_neutralize

    started = time.perf_counter()
    with progress_bar() as progress:
        result = run_neutralize(
            model,
            texts,
            output=output,
            layer=layer,
            sentences=sentences,
            device=device,
            progress=progress,
        )
    removed = f"{result.n_removed} directions removed, {result.n_kept} kept"
    print_summary(output, [f"layer {result.layer}", removed], started)
