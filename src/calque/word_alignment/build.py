"""Build the word aligner that a set of options asks for, and train it first where necessary."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from calque.errors import InputError, MissingExtra, check_choice
from calque.io.outputs import check_model_folder, fingerprint
from calque.word_alignment.protocol import AlignWarning

if TYPE_CHECKING:
    from calque.io.resumable import RunSettings
    from calque.models.encoder import Encoder
    from calque.types import Progress
    from calque.word_alignment.hybrid import HybridAligner
    from calque.word_alignment.neural import AlignSettings, WordAligner
    from calque.word_alignment.protocol import Aligner, WordPair
    from calque.word_alignment.statistical import StatisticalAligner

    ReadPairs = Callable[[], Iterator[WordPair]]

STATISTICAL = ("eflomal", "fast-align")
ALIGNERS = ("neural", *STATISTICAL, "hybrid")
METHODS = ("ot", "itermax", "argmax", "match", "probability")
ENCODINGS = ("joint", "separate")
SIMILARITIES, UNITS, SCALE_FIRST = ("cosine", "dot"), ("words", "subwords"), ("columns", "rows")
# Pairs per block. A GPU needs more pairs to fill its batches, and repeats a lost block faster.
BLOCK_PAIRS = {"cpu": 2048, "cuda": 16384}
# The sides of the bitext are reported as swapped if this many times as many words match that way.
SWAP_RATIO = 2


@dataclass(frozen=True, slots=True)
class AlignerOptions:
    """Options of an aligner; None leaves the choice to the aligner or to its model."""

    aligner: str = "neural"
    model: str | Path | Encoder | None = None
    method: str | None = None
    layer: int | None = None
    encode: str | None = None
    sharpness: float | None = None
    similarity: str | None = None
    unit: str | None = None
    scale_first: str | None = None
    spelling: float | None = None
    threshold: float | None = None
    batch_tokens: int | None = None
    device: str = "auto"
    precision: str = "auto"
    bitext: tuple[str, ...] = ()
    save: Path | None = None
    load: Path | None = None
    symmetrize: str | None = None
    stem: int | None = None
    adapt: bool = False
    adapt_steps: int | None = None
    save_model: Path | None = None
    languages: tuple[str, str] | None = None
    maps: str | None = None

    def __post_init__(self) -> None:
        check_choice("--aligner", self.aligner, ALIGNERS)
        check_choice("--method", self.method, METHODS)
        check_choice("--encode", self.encode, ENCODINGS)
        check_choice("--similarity", self.similarity, SIMILARITIES)
        check_choice("--unit", self.unit, UNITS)
        check_choice("--scale-first", self.scale_first, SCALE_FIRST)
        for option, number, least in (
            ("--stem", self.stem, 0),
            ("--batch-tokens", self.batch_tokens, 1),
            ("--adapt-steps", self.adapt_steps, 1),
        ):
            if number is not None and number < least:
                raise InputError(f"{option} is {number}", fix=f"use {least} or more")
        if self.symmetrize is not None:
            from calque.algorithms.symmetrize import SYMMETRIZATIONS

            check_choice("--symmetrize", self.symmetrize, SYMMETRIZATIONS)
        neural, statistical = self.aligner == "neural", self.aligner in STATISTICAL
        conflicts = [
            (neural and self.load, "--load", "choose --aligner hybrid, eflomal or fast-align"),
            (neural and self.save, "--save", "choose --aligner hybrid, eflomal or fast-align"),
            (neural and self.symmetrize, "--symmetrize", "choose --aligner eflomal"),
            (
                self.stem is not None and (neural or self.load),
                "--stem",
                "it is for training a statistical aligner: drop it",
            ),
            (
                neural and self.bitext and not self.adapt,
                "--bitext",
                "add --adapt, or choose --aligner hybrid",
            ),
            (self.load and self.save, "--save", "the model of --load is already saved"),
            (
                self.load and self.bitext and not self.adapt,
                "--bitext",
                "with --load nothing is trained: drop one of the two",
            ),
            (statistical and self.adapt, "--adapt", "choose --aligner hybrid or neural"),
            *(
                (statistical and is_given, option, "choose --aligner hybrid or neural")
                for option, is_given in (
                    ("--model", self.model is not None),
                    ("--layer", self.layer is not None),
                    ("--method", self.method is not None),
                    ("--encode", self.encode is not None),
                    ("--precision", self.precision != "auto"),
                )
            ),
            (
                statistical and self.threshold is not None,
                "--threshold",
                "choose --aligner hybrid or neural, whose links have scores",
            ),
            # The weights of the hybrid are tuned for averaged words and one sharpness.
            (self.sharpness and not neural, "--sharpness", "choose --aligner neural"),
            (self.similarity and not neural, "--similarity", "choose --aligner neural"),
            (self.unit and not neural, "--unit", "choose --aligner neural"),
            (self.scale_first and not neural, "--scale-first", "choose --aligner neural"),
            (self.spelling is not None and not neural, "--spelling", "choose --aligner neural"),
            (
                neural and self.adapt and self.method == "probability",
                "--method probability",
                "an adapted encoder is not calibrated: choose another method",
            ),
            (self.save_model and not self.adapt, "--save-model", "add --adapt"),
            (self.adapt_steps and not self.adapt, "--adapt-steps", "add --adapt"),
            (self.maps and not self.languages, "--maps", "add --languages, such as de-en"),
            (self.languages and not neural, "--languages", "choose --aligner neural"),
            (
                self.languages and self.adapt,
                "--languages",
                "the maps do not fit an adapted encoder: drop --adapt",
            ),
        ]
        for is_conflict, option, fix in conflicts:
            if is_conflict:
                raise InputError(
                    f"{option} cannot be used here with --aligner {self.aligner}", fix=fix
                )

    @property
    def is_trained(self) -> bool:
        """Whether something is trained on the text before it is aligned."""
        return self.adapt or (self.aligner != "neural" and self.load is None)

    def load_encoder(self) -> Encoder:
        """Load the encoder, with its maps if the languages of the text are given."""
        from calque.models.encoder import Encoder
        from calque.models.inference import load_encoder

        if isinstance(self.model, Encoder):
            return self.model
        maps = None if self.languages is None else self.maps or True
        return load_encoder(self.model, self.device, maps=maps, precision=self.precision)

    def build_neural(self, encoder: Encoder) -> WordAligner:
        """Build the aligner that uses the encoder alone."""
        from calque.word_alignment.neural import WordAligner

        return WordAligner(
            encoder,
            method=cast(Any, self.method),
            layer=self.layer,
            encode=cast(Any, self.encode),
            sharpness=self.sharpness,
            similarity=cast(Any, self.similarity),
            unit=cast(Any, self.unit),
            scale_first=cast(Any, self.scale_first),
            spelling=self.spelling,
            threshold=self.threshold,
            languages=self.languages,
            batch_tokens=self.batch_tokens,
        )


@dataclass(frozen=True, slots=True)
class BuiltAligner:
    """An aligner, its name in tables, and how many pairs it should get at once."""

    aligner: Aligner
    name: str
    block_pairs: int
    options: AlignerOptions
    encoder: Encoder | None = None
    n_training_pairs: int = 0
    adapted_model: Path | None = None

    def to_settings(self) -> RunSettings:
        """Return everything that the links depend on, for a run that may be resumed."""
        from calque.models.language_maps import OWN_FOLDER

        options = self.options
        settings: dict[str, Any] = {
            "calque": version("calque"),
            "aligner": options.aligner,
            "method": options.method,
            "layer": options.layer,
            "encode": options.encode,
            "sharpness": options.sharpness,
            "similarity": options.similarity,
            "unit": options.unit,
            "scale_first": options.scale_first,
            "spelling": options.spelling,
            "threshold": options.threshold,
            "batch_tokens": options.batch_tokens,
            "symmetrize": options.symmetrize,
            "stem": options.stem,
        }
        if options.languages is not None:
            settings["languages"] = "-".join(options.languages)
        if options.maps not in (None, OWN_FOLDER):
            maps = Path(str(options.maps))
            settings["maps"] = fingerprint(maps if maps.is_dir() else maps.parent)
        if options.load is not None:
            settings["statistics"] = fingerprint(options.load)
        if self.encoder is not None:
            settings["device"] = next(self.encoder.parameters()).device.type
            settings["precision"] = options.precision
            with suppress(InputError):  # a model that was built in memory has no folder
                settings["model"] = None if options.adapt else fingerprint(self.encoder.folder)
        return settings


def build_aligner(
    options: AlignerOptions,
    read_pairs: ReadPairs,
    read_bitext: ReadPairs = lambda: iter(()),
    progress: Progress | None = None,
) -> BuiltAligner:
    """Build the aligner that the options ask for.

    An aligner that is trained reads the pairs to be aligned, and the additional bitext, first.
    """
    statistical = None
    n_training_pairs = 0
    _check_targets(options)
    if options.aligner != "neural":
        statistical = _get_statistical(options, read_pairs, read_bitext, progress)
        n_training_pairs = 0 if options.load is not None else statistical.n_pairs
    if statistical is not None and options.aligner != "hybrid":
        from calque.word_alignment.statistical import TrainingText

        found = TrainingText(statistical) if options.load is None else statistical
        return BuiltAligner(
            found, options.aligner, BLOCK_PAIRS["cuda"], options, n_training_pairs=n_training_pairs
        )
    encoder, adapted = options.load_encoder(), None
    if options.adapt:
        # Mutual argmax gives the most precise links to learn from.
        linking = replace(options, method="argmax", threshold=None)
        linker = _build_neural_or_hybrid(linking, encoder, statistical)
        if statistical is not None:  # the calibration of the hybrid remains valid
            method = _build_neural_or_hybrid(options, encoder, statistical).method
            options = replace(options, method=method)
        pairs = chain(read_pairs(), read_bitext())
        encoder, adapted = _adapt(options, linker, pairs, progress)
    aligner = _build_neural_or_hybrid(options, encoder, statistical)
    device = next(encoder.parameters()).device.type
    return BuiltAligner(
        aligner,
        f"{options.aligner} {aligner.method} layer {aligner.layer}",
        BLOCK_PAIRS.get(device, BLOCK_PAIRS["cpu"]),
        options,
        encoder,
        n_training_pairs,
        adapted,
    )


def _check_targets(options: AlignerOptions) -> None:
    """Raise InputError for models that could not be saved, before they are trained."""
    if options.save is not None:
        from calque.word_alignment.statistical import FORMAT

        check_model_folder(options.save, FORMAT)
    if options.save_model is not None:
        from calque.word_alignment.adapt import check_new_folder

        check_new_folder(options.save_model)


def build_sweep(options: AlignerOptions) -> tuple[WordAligner, list[AlignSettings]]:
    """Build an aligner, and list the settings to try: those of the options, otherwise all."""
    from calque.word_alignment.sweep import list_choices

    # The method probability needs a calibration, which the sweep has yet to find.
    aligner = replace(options, method=None).build_neural(options.load_encoder())
    layers = [aligner.layer] if options.layer is not None else range(aligner.encoder.n_layers + 1)
    method = cast(Any, options.method)
    return aligner, list_choices(aligner.settings, list(layers), method, options.sharpness)


def choose_library() -> str:
    """Return eflomal, whose links are better, or fast-align where eflomal is not installed."""
    from calque.word_alignment.statistical import LIBRARIES

    try:
        LIBRARIES["eflomal"].load()
    except MissingExtra:
        LIBRARIES["fast-align"].load()
        warnings.warn(
            "eflomal is not installed, so fast-align is used instead "
            "(pip install 'calque[eflomal]' for better links)",
            AlignWarning,
            stacklevel=2,
        )
        return "fast-align"
    return "eflomal"


def _get_statistical(
    options: AlignerOptions,
    read_pairs: ReadPairs,
    read_bitext: ReadPairs,
    progress: Progress | None,
) -> StatisticalAligner:
    """Load the statistical aligner, or train it on the pairs and the additional bitext."""
    from calque.word_alignment.statistical import (
        DEFAULT_STEM,
        DEFAULT_SYMMETRIZATION,
        StatisticalAligner,
        check_statistical,
    )

    if options.load is not None:
        model = StatisticalAligner.load(options.load)
        if options.aligner in STATISTICAL and model.kind != options.aligner:
            problem = f"this is a model of {model.kind}, not of {options.aligner}"
            raise InputError(problem, file=options.load, fix=f"use --aligner {model.kind}")
        if options.symmetrize is not None:
            check_statistical(model.kind, options.symmetrize)
            model = replace(model, symmetrize=options.symmetrize)
        return model
    kind: Any = options.aligner if options.aligner in STATISTICAL else choose_library()
    order = _SideOrder()
    model = StatisticalAligner.train(
        chain(order.read_text(read_pairs()), order.read_bitext(read_bitext())),
        kind,
        symmetrize=options.symmetrize or DEFAULT_SYMMETRIZATION,
        stem=DEFAULT_STEM if options.stem is None else options.stem,
        progress=progress,
    )
    if order.n_swapped > SWAP_RATIO * order.n_matching:
        warnings.warn(
            "the sides of --bitext seem to be swapped (add --reverse-bitext, or drop it)",
            AlignWarning,
            stacklevel=2,
        )
    if options.save is not None:
        model.save(options.save)
    return model


class _SideOrder:
    """Counts on which side of a bitext the words of the text occur, while both are read."""

    def __init__(self) -> None:
        self._words: tuple[set[str], set[str]] = set(), set()
        self.n_matching, self.n_swapped = 0, 0

    def read_text(self, pairs: Iterable[WordPair]) -> Iterator[WordPair]:
        """Yield the pairs of the text and remember the words of each side."""
        for pair in pairs:
            for known, words in zip(self._words, pair, strict=True):
                known.update(words)
            yield pair

    def read_bitext(self, pairs: Iterable[WordPair]) -> Iterator[WordPair]:
        """Yield the pairs of the bitext and count its words that occur on one side of the text."""
        first, second = self._words[0] - self._words[1], self._words[1] - self._words[0]
        for pair in pairs:
            src, tgt = map(frozenset, pair)
            self.n_matching += len(first & src) + len(second & tgt)
            self.n_swapped += len(first & tgt) + len(second & src)
            yield pair


def _build_neural_or_hybrid(
    options: AlignerOptions, encoder: Encoder, statistical: StatisticalAligner | None
) -> WordAligner | HybridAligner:
    """Build the aligner that uses the encoder, alone or with a statistical aligner."""
    if statistical is None:
        return options.build_neural(encoder)
    from calque.word_alignment.hybrid import HybridAligner, build_hybrid_words

    words = build_hybrid_words(
        encoder,
        statistical.kind,
        method=cast(Any, options.method),
        layer=options.layer,
        encode=cast(Any, options.encode),
        threshold=options.threshold,
        batch_tokens=options.batch_tokens,
    )
    return HybridAligner(words, statistical, is_training_text=options.load is None)


def _adapt(
    options: AlignerOptions,
    aligner: WordAligner | HybridAligner,
    pairs: Iterable[WordPair],
    progress: Progress | None,
) -> tuple[Encoder, Path | None]:
    """Train a copy of the encoder on the pairs; return it, and its folder if it is kept."""
    from calque.models.inference import load_encoder
    from calque.word_alignment.adapt import adapt_encoder

    with tempfile.TemporaryDirectory(prefix="calque-adapt-") as scratch:
        folder = adapt_encoder(
            aligner,
            pairs,
            options.save_model or Path(scratch),
            steps=options.adapt_steps,
            progress=progress,
        )
        encoder: Encoder = load_encoder(folder, options.device, precision=options.precision)
        return encoder, options.save_model and folder
