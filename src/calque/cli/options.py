"""Options that several commands share: one name, one type and one help text each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Model folder, hub name or calque-mini. Default: calque-mini.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, ...")
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="fp32, bf16 (faster on CPUs with instructions for it), or auto: bf16 on a GPU.",
    ),
]
LayerOption = Annotated[
    int | None,
    typer.Option(
        "--layer",
        metavar="N",
        help="Layer: 0 is the embedding layer, -1 the last. Default: the model's best layer.",
    ),
]
MapsOption = Annotated[
    str | None,
    typer.Option(
        "--maps",
        metavar="DIR",
        help="Folder with linear maps of languages. Default: the model folder.",
    ),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Ignore the language-neutral space stored with the model.")
]
BatchTokensOption = Annotated[
    int | None,
    typer.Option(
        "--batch-tokens",
        min=1,
        metavar="N",
        help="Tokens per batch. Default: chosen for the device.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="Random seed.")]
LanguagePairOption = Annotated[
    str | None,
    typer.Option(
        "--languages",
        metavar="SRC-TGT",
        help="Languages of the two sides, such as de-en. Default: inferred from the file names.",
    ),
]
InputFormatOption = Annotated[
    str,
    typer.Option(
        "--input-format",
        metavar="FORMAT",
        help="auto, pipes (lines of 'source ||| target') or tsv.",
    ),
]
TokenizedOption = Annotated[
    bool, typer.Option("--tokenized", help="The words of the input are separated by spaces.")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted run with the same output.")
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output of an earlier run.")
]
SkipBadOption = Annotated[
    Path | None,
    typer.Option(
        "--skip-bad",
        metavar="FILE",
        help="Skip invalid lines and list them in this file instead of stopping at the first one.",
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting, for example data.alpha=0.5. Can be repeated.",
    ),
]
DataOption = Annotated[
    Path, typer.Option("--data", metavar="DIR", envvar="CALQUE_DATA", help="Folder with test data.")
]
TasksOption = Annotated[
    str | None, typer.Option("--tasks", metavar="NAMES", help="Tasks, separated by commas.")
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the result into a .png, .svg or .pdf file."),
]
MaxWordsOption = Annotated[
    int,
    typer.Option(
        "--max-words", min=0, metavar="N", help="Use the first N words of each file; 0 means all."
    ),
]
BinaryOption = Annotated[
    bool, typer.Option("--binary", help="Write the binary word2vec format instead of text.")
]
