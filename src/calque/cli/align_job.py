"""Notices a bitext whose sides come in another order than those of the text beside it.

Aligners that learn from a bitext before they align: statistical, hybrid, adapted.

Which word aligner `calque align` was asked for, ready to work.

What `calque align` reads, checks and scores against.
"""

from __future__ import annotations

import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from calque.cli.aligner_options import LEARNERS, METHODS, AlignerOptions
from calque.errors import InputError, MissingExtra
from calque.io.bitext import Format, read_bitext
from calque.io.files import SkippedLines, check_list, open_list, scan_lines, shown, write_atomically
from calque.io.links import GoldLinks, read_gold
from calque.io.outputs import (
    LinkSink,
    LinkStream,
    Settings,
    Shard,
    check_output,
    fingerprint,
    open_sink,
    read_settings,
    working_folder,
)
from calque.types import SentencePair
from calque.word_alignment.file_job import LinkLayout, read_in_step

if TYPE_CHECKING:
    from calque.word_alignment.protocol import AlignedBlock, Aligner, WordPair
    from calque.word_alignment.scoring import LayeredAligner
    from calque.word_alignment.statistical import StatisticalAligner

    ReadPairs = Callable[[], Iterator[WordPair]]

MARGIN = 2  # so many times as many words on the other side as on their own


class SideCheck:
    """Passes pairs of words on, and counts on which side of the bitext the text's words stand."""

    def __init__(self) -> None:
        self._words: tuple[set[str], set[str]] = set(), set()
        self.n_straight, self.n_crossed = 0, 0

    @property
    def is_crossed(self) -> bool:
        """Whether the sides of the bitext seem to be the other way round."""
        return self.n_crossed > MARGIN * self.n_straight

    def pass_text(self, pairs: Iterable[WordPair]) -> Iterator[WordPair]:
        """Take note of the words of either side; words of both sides tell nothing."""
        for pair in pairs:
            for known, words in zip(self._words, pair, strict=True):
                known.update(words)
            yield pair

    def pass_bitext(self, pairs: Iterable[WordPair]) -> Iterator[WordPair]:
        """Count the words that stand where the text has them, and on the other side."""
        first, second = self._words[0] - self._words[1], self._words[1] - self._words[0]
        for pair in pairs:
            src, tgt = map(frozenset, pair)
            self.n_straight += len(first & src) + len(second & tgt)
            self.n_crossed += len(first & tgt) + len(second & src)
            yield pair


STATISTICAL = ("eflomal", "fast-align")


def get_statistical(
    options: AlignerOptions, read_pairs: ReadPairs, read_bitext: ReadPairs
) -> StatisticalAligner:
    """Load the statistical aligner, or train it on the pairs and the bitext beside them."""
    from calque.cli.console import show_phases
    from calque.word_alignment.statistical import StatisticalAligner

    if options.load is not None:
        model = StatisticalAligner.load(options.load)
        if options.aligner in STATISTICAL and model.kind != options.aligner:
            fix = f"give --aligner {model.kind}"
            raise InputError(f"a model of {model.kind}", file=options.load, fix=fix)
        return model
    kind: Any = options.aligner if options.aligner in STATISTICAL else choose_library()
    symmetrize = options.symmetrize or "grow-diag-final-and"
    check = SideCheck()
    pairs = chain(check.pass_text(read_pairs()), check.pass_bitext(read_bitext()))
    with show_phases(kind) as on_phase:
        model = StatisticalAligner.train(pairs, kind, symmetrize=symmetrize, on_phase=on_phase)
    if check.is_crossed:
        fix = "add --reverse-bitext, or drop it"
        print(f"warning: --bitext has its sides the other way round ({fix})", file=sys.stderr)
    if options.save is not None:
        model.save(options.save)
        print(f"{options.save}: {kind} trained on {model.n_pairs:,} pairs", file=sys.stderr)
    return model


def make_statistical(options: AlignerOptions, model: StatisticalAligner) -> Aligner:
    """Give what aligns: the model itself, or its links of the text it was trained on."""
    from calque.word_alignment.statistical import TrainingText

    return model if options.load is not None else TrainingText(model)


def choose_library() -> str:
    """Prefer eflomal, whose links are better, where it is installed."""
    from calque.word_alignment.statistical import import_eflomal, import_systran_align

    try:
        import_eflomal()
    except MissingExtra:
        import_systran_align()
        hint = "pip install 'calque[eflomal]' gives better links"
        print(f"eflomal is not installed: fast-align stands in for it ({hint})", file=sys.stderr)
        return "fast-align"
    return "eflomal"


@contextmanager
def adapt(options: AlignerOptions, encoder: Any, pairs: ReadPairs) -> Iterator[Any]:
    """Give the encoder after a short training on the pairs, or as it is if none is asked for."""
    from calque.api import load
    from calque.word_alignment.adapt import Adaptation

    if not options.adapt:
        yield encoder
        return
    with tempfile.TemporaryDirectory(prefix="calque-adapt-") as folder:
        job = Adaptation(options.save_model or Path(folder), options.adapt_steps)
        found = job.train(encoder, pairs(), lambda text: print(text, file=sys.stderr))
        if options.save_model is not None:
            print(f"{found}: the adapted model", file=sys.stderr)
        yield load(found, options.device)


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
    statistical = None
    if options.aligner in LEARNERS:
        statistical = get_statistical(options, read_pairs, read_bitext)
        if options.aligner != "hybrid":
            found = make_statistical(options, statistical)
            yield ChosenAligner(found, options.aligner, BLOCK_PAIRS["cuda"], _settings(options))
            return

    def read_all() -> Iterator[WordPair]:
        return chain(read_pairs(), read_bitext())

    with adapt(options, _load(options), read_all) as encoder:
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


def _load(options: AlignerOptions) -> Any:
    from calque.api import load

    maps = None if options.map_from is None else options.maps or True
    return load(options.model, options.device, maps=maps)


def _make_neural(encoder: Any, method: str | None, options: AlignerOptions) -> LayeredAligner:
    from calque.word_alignment.neural import WordAligner

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
    from calque.word_alignment.hybrid import HybridAligner, make_words

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


@dataclass(frozen=True, slots=True)
class AlignJob:
    """What is read and where it goes."""

    paths: tuple[str, ...]
    input_format: Format
    output: Path | None
    skip_bad: Path | None
    gold: Path | None
    gold_from_one: bool
    resume: bool
    bitext: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """All files that are read."""
        return (*self.paths, *self.bitext, *(() if self.gold is None else (str(self.gold),)))

    @property
    def can_reread(self) -> bool:
        """Whether the input is files, rather than pipes that give their text once."""
        files = [Path(path) for path in self.paths if path != "-"]
        are_files = (path.is_file() or not path.exists() for path in files)
        return len(files) == len(self.paths) and all(are_files)

    @property
    def target(self) -> Path | None:
        """The file to write, if it is one."""
        return None if self.output is None or str(self.output) == "-" else self.output

    @property
    def place(self) -> str:
        """Where the links go, in words."""
        return str(self.target or ("standard output" if self.prints_links else "no links kept"))

    @property
    def unfinished(self) -> Path | None:
        """The folder of an unfinished run, if there is one."""
        folder = None if self.target is None else working_folder(self.target)
        return None if folder is None or read_settings(folder) is None else folder

    @property
    def prints_links(self) -> bool:
        """Whether the links go to standard output."""
        return self.target is None and (self.gold is None or self.output is not None)

    def check(self, shard: Shard, *, learns: bool = False) -> None:
        """Refuse what does not go together; `learns` if an aligner is trained on the text."""
        if learns and not self.can_reread:
            raise InputError("a pipe is read once, and training reads it first", fix="give files")
        if learns and (self.resume or shard.n_ranks > 1):
            raise InputError(
                "training again would give other links",
                fix="train in one process with --save DIR, then align with --load DIR",
            )
        if self.resume and self.target is None:
            raise InputError("--resume needs a file to go on with", fix="name it with -o")
        if self.resume and not self.can_reread:
            raise InputError("a pipe cannot be resumed: it is read once", fix="give files")
        if self.resume and self.gold is not None:
            raise InputError("--gold scores what one run aligns", fix="drop --resume or --gold")
        if shard.n_ranks > 1 and (self.target is None or not self.can_reread):
            raise InputError("several processes need files", fix="give files, and name one with -o")
        if shard.n_ranks > 1 and self.gold is not None:
            raise InputError("--gold scores what one process aligns", fix="do without torchrun")

    def prepare(self) -> int | None:
        """Look at the output and the whole input before the work, so that bad lines are known.

        The answer is how many pairs there are, if that can be known.
        """
        if self.target is not None:
            check_output(self.target, self.inputs, resume=self.resume)
        check_list(self.skip_bad, self.inputs, self.target)
        return sum(1 for _ in self.read_again()) if self.can_reread else None

    def check_sweep(self) -> None:
        """Refuse what does not go with a sweep."""
        if self.gold is None:
            raise InputError("--sweep scores against gold links", fix="give them with --gold")
        if self.output is not None or self.resume or self.skip_bad is not None:
            raise InputError("--sweep writes no files", fix="drop -o, --resume and --skip-bad")

    def read_again(self) -> Iterator[SentencePair]:
        """Read the pairs; bad ones, if they are to be skipped, are listed at another time."""
        return self.read(None if self.skip_bad is None else SkippedLines())

    def read(self, skipped: SkippedLines | None) -> Iterator[SentencePair]:
        """Read the pairs; a bad one that is skipped has no words."""
        return read_in_step(self.paths, self.input_format, skipped)

    def read_and_list(self, shard: Shard, stack: ExitStack) -> Iterator[SentencePair]:
        """Read the pairs; the main process lists those that are skipped."""
        if self.skip_bad is None or not shard.is_main:
            return self.read_again()
        if self.can_reread:
            # At the end, so that nothing half-written is left if this takes hours and is killed.
            return chain(self.read_again(), self._list_bad_lines(self.skip_bad))
        return self.read(open_list(self.skip_bad, stack))

    def open_sink(self, settings: Settings, shard: Shard) -> AbstractContextManager[LinkSink]:
        """Open what the links go to: a file, standard output or, with --gold alone, nothing."""
        if self.target is None and not self.prints_links:
            return nullcontext(LinkStream())
        return open_sink(self.target, settings, resume=self.resume, shard=shard)

    def _list_bad_lines(self, path: Path) -> Iterator[SentencePair]:
        with write_atomically(path) as stream:
            deque(self.read(SkippedLines(stream)), maxlen=0)
        yield from ()

    def read_gold(self, n_pairs: int | None) -> GoldLinks | None:
        """Read the gold links, if any; there must be as many lines as pairs, if that is known."""
        from calque.word_alignment.scoring import check_gold

        if self.gold is None:
            return None
        found = read_gold(self.gold, from_one=self.gold_from_one)
        if n_pairs is not None:
            check_gold(found, n_pairs, shown(self.paths[0]))
        return found


def check_readable(path: str) -> None:
    """Refuse a file that cannot be opened, before any work."""
    for _ in scan_lines(path):
        break


@dataclass(frozen=True, slots=True)
class BitextFiles:
    """More text to learn from: its files, how it is split into words, which side comes first.

    `languages` are in the order of the text to be aligned.
    """

    paths: tuple[str, ...]
    format: Format
    languages: tuple[str, str] | None
    is_reversed: bool

    def read(self) -> Iterator[WordPair]:
        """Read the pairs of all files, as the text to be aligned has its sides."""
        layout = LinkLayout(languages=self.languages)
        for path in self.paths:
            for pair in read_bitext(path, self.format):
                turned = SentencePair(pair.tgt, pair.src) if self.is_reversed else pair
                yield layout.split(turned)


class GoldTally:
    """Compares links with the gold while they are made."""

    def __init__(self, gold: GoldLinks) -> None:
        from calque.word_alignment.scoring import LinkCounts

        self.gold, self.counts, self.n_pairs = gold, LinkCounts(), 0

    def __call__(self, first: int, words: list[WordPair], aligned: AlignedBlock) -> None:
        """Take the links of a block that begins with pair `first`."""
        from calque.word_alignment.scoring import count_links

        self.n_pairs = first + len(words)
        if self.n_pairs > self.gold.n_pairs:
            return  # said at the end, with the number of pairs
        self.gold.check_words(words, first)
        known = self.gold.select(first, self.n_pairs)
        self.counts += count_links(aligned.links, known.sure, known.possible)

    def check(self) -> GoldTally:
        """Refuse gold links of more or fewer pairs than there were."""
        from calque.word_alignment.scoring import check_gold

        check_gold(self.gold, self.n_pairs, "the input")
        return self
