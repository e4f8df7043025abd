"""Which word aligner `calque align` was asked for, ready to work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from calque.types import InputError

if TYPE_CHECKING:
    from calque.tasks.word_alignment import LayeredAligner
    from calque.tools.aligning import Aligner, WordPair
    from calque.tools.resumable_file import Settings

    ReadPairs = Callable[[], Iterator[WordPair]]

ALIGNERS = ("neural",)
METHODS = ("ot", "itermax", "argmax", "match")
ENCODINGS = ("joint", "separate")
# A GPU needs more pairs to fill its batches, and loses less time to a kill.
BLOCK_PAIRS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True, slots=True)
class AlignerOptions:
    """What the command line says of the aligner; None leaves the choice to the aligner."""

    aligner: str = "neural"
    model: str | None = None
    method: str | None = None
    layer: int | None = None
    encode: str | None = None
    batch_tokens: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("aligner", ALIGNERS), ("method", METHODS), ("encode", ENCODINGS)):
            check_choice(f"--{name}", getattr(self, name), known)


@dataclass(frozen=True, slots=True)
class ChosenAligner:
    """An aligner, how tables call it, and the size of its blocks.

    `settings` tell what its links depend on, for runs that are gone on with.
    """

    aligner: Aligner
    name: str
    block_pairs: int
    settings: Callable[[], Settings]


def choose_aligner(options: AlignerOptions, read_pairs: ReadPairs) -> ChosenAligner:
    """Make the aligner asked for; one that learns from the text reads the pairs first."""
    encoder = _load(options)
    aligner = _make_neural(encoder, options.method, options)
    kind = next(encoder.parameters()).device.type

    def settings() -> Settings:
        return {
            "calque": _version(),
            "aligner": options.aligner,
            "model": fingerprint(encoder.folder),
            "method": options.method,
            "layer": options.layer,
            "encode": options.encode,
            "batch_tokens": options.batch_tokens,
            "device": kind,
        }

    block_pairs = BLOCK_PAIRS.get(kind, BLOCK_PAIRS["cpu"])
    return ChosenAligner(aligner, _describe(aligner, options), block_pairs, settings)


def choose_sweep(options: AlignerOptions) -> tuple[Mapping[str, LayeredAligner], list[int]]:
    """Make the aligners of a sweep, by method, and list the layers they are to be tried at."""
    encoder = _load(options)
    methods = METHODS if options.method is None else (options.method,)
    layers = range(encoder.n_layers + 1) if options.layer is None else [options.layer]
    numbers = [encoder.check_layer(layer) for layer in layers]
    return {method: _make_neural(encoder, method, options) for method in methods}, numbers


def check_choice(option: str, value: str | None, known: tuple[str, ...]) -> None:
    """Refuse a value that an option does not know."""
    if value is not None and value not in known:
        raise InputError(f"{option} {value} does not exist", fix=f"choose from: {', '.join(known)}")


def fingerprint(folder: Path) -> str:
    """Tell models apart by what is in their files."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "blake2b")
        total.update(path.name.encode() + b"\0" + digest.digest())
    return total.hexdigest()


def _load(options: AlignerOptions) -> Any:
    from calque.api import load

    return load(options.model, options.device)


def _make_neural(encoder: Any, method: str | None, options: AlignerOptions) -> LayeredAligner:
    from calque.tools.word_aligner import WordAligner

    aligner = WordAligner(
        encoder,
        method=cast(Any, method),
        layer=options.layer,
        encode=cast(Any, options.encode),
        batch_tokens=options.batch_tokens,
    )
    return cast("LayeredAligner", aligner)


def _describe(aligner: object, options: AlignerOptions) -> str:
    """Name an aligner by what it is and, where it says so, how and at which layer it works."""
    found = [options.aligner, getattr(aligner, "method", None)]
    layer = getattr(aligner, "layer", None)
    return " ".join(
        [*map(str, filter(None, found)), *([] if layer is None else [f"layer {layer}"])]
    )


def _version() -> str:
    from importlib.metadata import version

    return version("calque")
