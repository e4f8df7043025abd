"""Word links of a whole bitext, block by block in constant memory, in the order of its lines."""

from __future__ import annotations

import gzip
import lzma
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import BinaryIO, Protocol

from calque.io.bitext import Format, Paths, read_bitext
from calque.io.files import SkippedLines, check_target
from calque.io.links import LinkFormat, format_links
from calque.io.outputs import ResumableFile, Settings, Shard, check_unfinished
from calque.io.segmentation import find_splitter, split_on_spaces
from calque.types import SentencePair
from calque.word_alignment.protocol import AlignedBlock, Aligner, AlignReport, WordPair

# A block is what is aligned, sorted by length, and written at once; the second bound is for
# huge lines. Where blocks end depends on the text alone, never on where a run was interrupted.
BLOCK_PAIRS, BLOCK_CHARACTERS = 2048, 1 << 21
SKIPPED = SentencePair("", "", "skipped")


@dataclass(frozen=True, slots=True)
class LinkLayout:
    """How words are found in the input, and how links look in the output."""

    format: LinkFormat = "pharaoh"
    scores: bool = False
    languages: tuple[str, str] | None = None
    block_pairs: int = BLOCK_PAIRS

    def split(self, pair: SentencePair) -> WordPair:
        """Split a pair into words: at its spaces, or by the rules of its languages."""
        if self.languages is None:
            return split_on_spaces(pair.src), split_on_spaces(pair.tgt)
        src, tgt = map(find_splitter, self.languages)
        return src(pair.src), tgt(pair.tgt)

    def to_settings(self) -> Settings:
        """Give what the bytes of the output depend on."""
        return {
            "format": self.format,
            "scores": self.scores,
            "tokenize": None if self.languages is None else "-".join(self.languages),
            "block_pairs": self.block_pairs,
        }


@dataclass(frozen=True, slots=True)
class LinkTotals:
    """What was written; `n_before` of the pairs by runs that were interrupted."""

    report: AlignReport = field(default_factory=AlignReport)
    n_skipped: int = 0
    n_before: int = 0


class LinkSink(Protocol):
    """A place that blocks of links go to."""

    figures_before: tuple[int, ...]

    def wants(self, content: bytes) -> bool:
        """Take note of the next block of the input, and tell whether its links are wanted."""
        ...

    def append(self, content: bytes, figures: tuple[int, ...]) -> None:
        """Take the links of that block."""
        ...

    def finish(self, empty: bytes = b"") -> tuple[int, ...]:
        """Give the sum of all figures."""
        ...


class LinkStream:
    """Links to a stream, such as standard output, or without one to nowhere."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self.stream = stream
        self.figures: tuple[int, ...] = ()
        self.figures_before: tuple[int, ...] = ()

    def wants(self, content: bytes) -> bool:
        """Want every block."""
        return True

    def append(self, content: bytes, figures: tuple[int, ...]) -> None:
        """Write a block at once, for whoever reads at the other end."""
        before = self.figures or (0,) * len(figures)
        self.figures = tuple(map(sum, zip(before, figures, strict=True)))
        if self.stream is not None:
            self.stream.write(content)
            self.stream.flush()

    def finish(self, empty: bytes = b"") -> tuple[int, ...]:
        """Give the sum of all figures."""
        return self.figures


Observer = Callable[[int, list[WordPair], AlignedBlock], None]


def write_links(
    aligner: Aligner,
    pairs: Iterable[SentencePair],
    sink: LinkSink,
    layout: LinkLayout | None = None,
    *,
    suffix: str = "",
    observe: Observer | None = None,
    on_block: Callable[[int], None] | None = None,
) -> LinkTotals:
    """Align a stream of pairs into a sink; a file's suffix decides its compression.

    `observe` is shown the number of the first pair of a block, its words and its links;
    `on_block` is told how many pairs have passed.
    """
    layout = layout or LinkLayout()
    first = 0
    for block in cut_blocks(pairs, layout.block_pairs):
        if sink.wants(_identify(block)):
            words = [layout.split(pair) for pair in block]
            aligned = aligner.align_block(words, first)
            if observe is not None:
                observe(first, words, aligned)
            lines = format_links(aligned.links, words, layout.format, scores=layout.scores)
            n_skipped = sum(pair is SKIPPED for pair in block)
            content = "".join(line + "\n" for line in lines).encode()
            sink.append(pack_block(content, suffix), (*astuple(aligned.report), n_skipped))
        first += len(block)
        if on_block is not None:
            on_block(len(block))
    *report, n_skipped = sink.finish(pack_block(b"", suffix)) or (0,) * N_FIGURES
    n_before = sink.figures_before[0] if sink.figures_before else 0
    return LinkTotals(AlignReport(*report), n_skipped, n_before)


def read_in_step(
    paths: Paths, format: Format = "auto", skipped: SkippedLines | None = None
) -> Iterator[SentencePair]:
    """Read pairs, with `SKIPPED` where a line was bad, so that pair k stays line k."""
    n_missing = 0

    def note(number: int, reason: str, text: str) -> None:
        nonlocal n_missing
        n_missing += 1
        if skipped is not None:
            skipped(number, reason, text)

    for pair in read_bitext(paths, format, skip_bad=None if skipped is None else note):
        while n_missing:
            n_missing -= 1
            yield SKIPPED
        yield pair
    while n_missing:
        n_missing -= 1
        yield SKIPPED


def cut_blocks(
    pairs: Iterable[SentencePair],
    max_pairs: int = BLOCK_PAIRS,
    max_characters: int = BLOCK_CHARACTERS,
) -> Iterator[list[SentencePair]]:
    """Cut a stream of pairs into blocks of bounded size."""
    block: list[SentencePair] = []
    n_characters = 0
    for pair in pairs:
        block.append(pair)
        n_characters += len(pair.src) + len(pair.tgt)
        if len(block) == max_pairs or n_characters >= max_characters:
            yield block
            block, n_characters = [], 0
    if block:
        yield block


def pack_block(content: bytes, suffix: str) -> bytes:
    """Compress a block on its own: .gz, .xz and .zst files may hold many such members.

    So a file that a kill has cut into two runs is the same as one made in one go.
    """
    if suffix == ".gz":
        return gzip.compress(content, 6, mtime=0)
    if suffix == ".xz":
        return lzma.compress(content)
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return content


def check_output(path: Path, paths: Iterable[str], *, resume: bool) -> None:
    """Refuse an output that cannot be written, before the work begins."""
    check_target(path, paths)
    check_unfinished(path, resume)


def open_sink(
    path: Path | None, settings: Settings, *, resume: bool = False, shard: Shard | None = None
) -> AbstractContextManager[LinkSink]:
    """Open standard output (no path), a file that can be resumed, or a device or pipe as it is."""
    if path is not None and (path.is_file() or not path.exists()):
        return ResumableFile(path, settings, resume=resume, shard=shard)
    return _open_stream(path)


@contextmanager
def _open_stream(path: Path | None) -> Iterator[LinkStream]:
    if path is None:
        sys.stdout.flush()
        yield LinkStream(sys.stdout.buffer)
        return
    with open(path, "wb") as stream:
        yield LinkStream(stream)


def _identify(block: list[SentencePair]) -> bytes:
    """Give bytes that two blocks share only if all their pairs are the same."""
    texts = ("\0\0" if pair is SKIPPED else f"{pair.src}\0{pair.tgt}" for pair in block)
    return "\n".join(texts).encode()


N_FIGURES = len(fields(AlignReport)) + 1
