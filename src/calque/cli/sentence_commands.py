"""Commands on sentence vectors: embed, mine and neutralize."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from calque.cli.options import (
    DeviceOption,
    LayerOption,
    MapsOption,
    ModelOption,
    PrecisionOption,
    RawOption,
    ResumeOption,
    SkipBadOption,
)


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
            "--language",
            metavar="CODE",
            help="Language of the text: apply the model's linear map of it.",
        ),
    ] = None,
    maps: MapsOption = None,
    center: Annotated[
        bool, typer.Option("--center", help="Subtract the mean vector of the file (one language).")
    ] = False,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Scale every vector to length one.")
    ] = False,
    skip_bad: SkipBadOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
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
            precision=precision,
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
            "--vectors",
            metavar="SRC.npy TGT.npy",
            help="Vectors of the lines, written by calque embed.",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", metavar="T", help="Keep only pairs with at least this score."),
    ] = None,
    dev: Annotated[
        str | None,
        typer.Option(
            "--dev",
            metavar="FILE",
            help="Choose the threshold with true pairs of these texts: id TAB id, or sentences.",
        ),
    ] = None,
    margin: Annotated[
        str, typer.Option("--margin", help="ratio, distance, or absolute (the cosine itself).")
    ] = "ratio",
    retrieval: Annotated[
        str,
        typer.Option(
            "--retrieval", help="max (each sentence at most once), intersect, forward or backward."
        ),
    ] = "max",
    neighbors: Annotated[
        int, typer.Option("--neighbors", "--k", help="Nearest neighbors for the margin.")
    ] = 4,
    index: Annotated[
        str,
        typer.Option(
            "--index", help="exact, or a FAISS index for millions of lines: IVF1024,Flat ..."
        ),
    ] = "exact",
    probes: Annotated[int, typer.Option("--probes", help="Lists of a FAISS index to search.")] = 16,
    ids: Annotated[
        bool,
        typer.Option("--ids", help="Lines are id TAB sentence. Default: inferred for BUCC's ids."),
    ] = False,
    layer: LayerOption = None,
    raw: RawOption = False,
    resume: ResumeOption = False,
    skip_bad: SkipBadOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
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
            precision=precision,
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
        int,
        typer.Option("--sentences", min=50, metavar="N", help="Sentences to draw from each file."),
    ] = 2000,
    device: DeviceOption = "auto",
) -> None:
    """Copy a model and store how its languages differ.

    `calque embed` then removes the differences. Neither bitext nor training is needed: only the
    mean vector of each language is used. The file names up to the first dot are the languages.

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
