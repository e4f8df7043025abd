"""Word links of a whole bitext, block by block in constant memory, in the order of its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field, fields

from calque.io.bitext import Format, Paths, read_bitext
from calque.io.files import SkippedLines
from calque.io.links import LinkFormat, format_links
from calque.io.outputs import (
    LinkSink,
    Settings,
    pack_block,
)
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


def _identify(block: list[SentencePair]) -> bytes:
    """Give bytes that two blocks share only if all their pairs are the same."""
    texts = ("\0\0" if pair is SKIPPED else f"{pair.src}\0{pair.tgt}" for pair in block)
    return "\n".join(texts).encode()


N_FIGURES = len(fields(AlignReport)) + 1
