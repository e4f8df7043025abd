"""Which word aligner `calque align` was asked for, ready to work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from calque.cli.aligner_options import LEARNERS, METHODS, AlignerOptions
from calque.types import InputError

if TYPE_CHECKING:
    from calque.tasks.word_alignment import LayeredAligner
    from calque.tools.aligning import Aligner, WordPair
    from calque.tools.resumable_file import Settings

    ReadPairs = Callable[[], Iterator[WordPair]]

# A GPU needs more pairs to fill its batches, and loses less time to a kill.
BLOCK_PAIRS = {"cpu": 2048, "cuda": 16384}


@dataclass(frozen=True, slots=True)
class ChosenAligner:
    """An aligner, how tables call it, and the size of its blocks.

    `settings` tell what its links depend on, for runs that are gone on with.
    """

    aligner: Aligner
    name: str
    block_pairs: int
    settings: Callable[[], Settings]


@contextmanager
def choose_aligner(
    options: AlignerOptions, read_pairs: ReadPairs, read_bitext: ReadPairs = lambda: iter(())
) -> Iterator[ChosenAligner]:
    """Make the aligner asked for; one that learns from the text reads the pairs first."""
    from calque.cli import trained_aligners as trained

    statistical = None
    if options.aligner in LEARNERS:
        statistical = trained.get_statistical(options, read_pairs, read_bitext)
        if options.aligner != "hybrid":
            found = trained.make_statistical(options, statistical)
            yield ChosenAligner(found, options.aligner, BLOCK_PAIRS["cuda"], _settings(options))
            return

    def read_all() -> Iterator[WordPair]:
        return chain(read_pairs(), read_bitext())

    with trained.adapt(options, _load(options), read_all) as encoder:
        aligner: Aligner
        if statistical is None:
            aligner = _make_neural(encoder, options.method, options)
        else:
            aligner = _make_hybrid(encoder, statistical, options)
        kind = next(encoder.parameters()).device.type
        block_pairs = BLOCK_PAIRS.get(kind, BLOCK_PAIRS["cpu"])
        name = _describe(aligner, options)
        yield ChosenAligner(aligner, name, block_pairs, _settings(options, encoder))


def _settings(options: AlignerOptions, encoder: Any = None) -> Callable[[], Settings]:
    """Give what the links of an aligner depend on."""

    def settings() -> Settings:
        found: dict[str, Any] = {
            "calque": _version(),
            "aligner": options.aligner,
            "method": options.method,
            "layer": options.layer,
            "encode": options.encode,
            "batch_tokens": options.batch_tokens,
            "symmetrize": options.symmetrize,
        }
        if options.map_from is not None:
            found["map_from"] = list(options.map_from)
        if options.maps not in (None, "beside"):
            place = Path(str(options.maps))
            found["maps"] = fingerprint(place if place.is_dir() else place.parent)
        if options.load is not None:
            found["statistics"] = fingerprint(options.load)
        if encoder is not None:
            kind = next(encoder.parameters()).device.type
            found |= {"model": fingerprint(encoder.folder), "device": kind}
        return found

    return settings


def choose_sweep(options: AlignerOptions) -> tuple[Mapping[str, LayeredAligner], list[int]]:
    """Make the aligners of a sweep, by method, and list the layers they are to be tried at."""
    encoder = _load(options)
    methods = METHODS if options.method is None else (options.method,)
    layers = range(encoder.n_layers + 1) if options.layer is None else [options.layer]
    numbers = [encoder.check_layer(layer) for layer in layers]
    return {method: _make_neural(encoder, method, options) for method in methods}, numbers


def check_sweep(options: AlignerOptions) -> None:
    """Refuse a sweep of what has no layers, or would have to be trained for each."""
    if options.aligner != "neural" or options.adapt:
        raise InputError("--sweep tries the layers of an encoder", fix="use --aligner neural")


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

    maps = None if options.map_from is None else options.maps or True
    return load(options.model, options.device, maps=maps)


def _make_neural(encoder: Any, method: str | None, options: AlignerOptions) -> LayeredAligner:
    from calque.tools.word_aligner import WordAligner

    aligner = WordAligner(
        encoder,
        method=cast(Any, method),
        layer=options.layer,
        encode=cast(Any, options.encode),
        map_from=options.map_from,
        batch_tokens=options.batch_tokens,
    )
    return cast("LayeredAligner", aligner)


def _make_hybrid(encoder: Any, statistical: Any, options: AlignerOptions) -> Aligner:
    from calque.tools.hybrid_aligner import HybridAligner, make_words

    words = make_words(
        encoder,
        method=cast(Any, options.method),
        layer=options.layer,
        encode=cast(Any, options.encode),
        batch_tokens=options.batch_tokens,
    )
    return HybridAligner(words, statistical, own_text=options.load is None)


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
