"""What `calque align` reads, checks and scores against."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from calque.text.bitext import Format, read_bitext
from calque.text.files import (
    SkippedLines,
    check_list,
    open_list,
    scan_lines,
    shown,
    write_atomically,
)
from calque.text.links import GoldLinks, read_gold
from calque.tools.link_writer import (
    LinkLayout,
    LinkSink,
    LinkStream,
    check_output,
    open_sink,
    read_in_step,
)
from calque.tools.resumable_file import Settings, read_settings, working_folder
from calque.tools.shards import Shard
from calque.types import InputError, SentencePair

if TYPE_CHECKING:
    from calque.tools.aligning import AlignedBlock, WordPair


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
        from calque.tasks.word_alignment import check_gold

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
        from calque.tasks.metrics import LinkCounts

        self.gold, self.counts, self.n_pairs = gold, LinkCounts(), 0

    def __call__(self, first: int, words: list[WordPair], aligned: AlignedBlock) -> None:
        """Take the links of a block that begins with pair `first`."""
        from calque.tasks.metrics import count_links

        self.n_pairs = first + len(words)
        if self.n_pairs > self.gold.n_pairs:
            return  # said at the end, with the number of pairs
        self.gold.check_words(words, first)
        known = self.gold.select(first, self.n_pairs)
        self.counts += count_links(aligned.links, known.sure, known.possible)

    def check(self) -> GoldTally:
        """Refuse gold links of more or fewer pairs than there were."""
        from calque.tasks.word_alignment import check_gold

        check_gold(self.gold, self.n_pairs, "the input")
        return self
