"""Bitexts to be linked: what they are called, their words, and links that are there already."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from calque.text.bitext import Format, languages_of
from calque.text.cleaning import normalize_text
from calque.text.files import MAGIC, PathLike, SkippedLines, read_lines, shown
from calque.text.linked_bitext import MAX_WORDS
from calque.text.segmentation import find_splitter, split_on_spaces
from calque.tools.link_writer import SKIPPED, read_in_step
from calque.types import InputError, MissingExtra, SentencePair

if TYPE_CHECKING:
    from calque.text.segmentation import Splitter
    from calque.tools.link_report import LinkReport

Split: TypeAlias = Literal["rules", "spaces"]

SUFFIXES = re.compile(r"\.(?:tsv|txt|text)$")


@dataclass(frozen=True, slots=True)
class BitextSource:
    """A bitext, or its two sides, with how its words are found.

    `split` says whether raw text is split by the `rules` of its languages or words stand apart
    by `spaces` already. `links` is a file with a line of links for each of its lines.
    """

    paths: tuple[PathLike, ...]
    languages: tuple[str, str] | None = None
    split: Split = "rules"
    format: Format = "auto"
    links: PathLike | None = None

    @property
    def name(self) -> str:
        """What its linked text is called: a name from which recipes can read its languages.

        >>> BitextSource(("news.tsv.xz",), ("en", "de")).name
        'en-de.news'
        >>> BitextSource(("data/hansards.en-fr.tsv",), ("en", "fr")).name
        'hansards.en-fr'
        """
        stem = Path(self.paths[0]).name
        for suffix in MAGIC:
            stem = stem.removesuffix(suffix)
        stem = SUFFIXES.sub("", stem) or stem
        if self.languages is None or languages_of(f"{stem}.text") == self.languages:
            return stem
        if len(self.paths) == 2:
            stem = stem.removesuffix(f".{self.languages[0]}")
        return f"{'-'.join(self.languages)}.{stem}"

    @property
    def place(self) -> str:
        """What messages call it."""
        return shown(self.paths[0])

    def read_lines(self, skipped: SkippedLines | None) -> Iterator[tuple[SentencePair, str]]:
        """Read the pairs as they stand with their lines of links, empty where none are given.

        Bad pairs are `SKIPPED` if there is someone to tell of them.
        """
        pairs = read_in_step(self.paths, self.format, skipped)
        if self.links is None:
            yield from ((pair, "") for pair in pairs)
            return
        lines = read_lines(self.links)
        for number, (pair, line) in enumerate(zip_longest(pairs, lines), start=1):
            if pair is None or line is None:
                n_longer = number + sum(1 for _ in (lines if pair is None else pairs))
                n_pairs, n_lines = (
                    (number - 1, n_longer) if pair is None else (n_longer, number - 1)
                )
                raise InputError(
                    f"{n_lines} lines of links, but {self.place} has {n_pairs} pairs",
                    file=shown(self.links),
                    line=number,
                    fix="write a line of links for every pair, an empty one where there are none",
                )
            yield pair, line

    def find_splitters(self) -> tuple[Splitter, Splitter]:
        """Give what splits each side into words, or refuse a language that cannot be split."""
        if self.links is not None and self.split == "spaces":  # words must stay as they are counted
            return split_on_spaces, split_on_spaces
        if self.split == "spaces":
            return _split_tidied(str.split), _split_tidied(str.split)
        if self.languages is None:
            raise InputError(
                "its name does not tell its languages",
                file=self.place,
                fix="give --languages en-de, or --split spaces if its words stand apart",
            )
        try:
            src, tgt = map(find_splitter, self.languages)
        except MissingExtra:
            raise
        except InputError as error:
            ways = "give --split spaces, or leave it out with --leave-out"
            fix = (error.fix or "").replace("do without --tokenize", ways)
            raise InputError(error.problem, file=self.place, fix=fix) from None
        return (src, tgt) if self.links is not None else (_split_tidied(src), _split_tidied(tgt))


def find_bitexts(
    files: Sequence[PathLike],
    *,
    languages: tuple[str, str] | None = None,
    split: Split | None = None,
    format: Format = "auto",
    links: Sequence[PathLike] = (),
    leave_out: Collection[str] = (),
) -> list[BitextSource]:
    """Make bitexts out of files; two that are named after two languages are sides of one.

    Without a word on `languages` the names tell them. Words are split by rules or, where links
    are given, at the spaces between them, unless `split` says otherwise. Bitexts of a language in
    `leave_out` are.
    """
    for file in files:
        if str(file) == "-" or (Path(file).exists() and not Path(file).is_file()):
            problem = "a folder" if Path(file).is_dir() else "a pipe has no name to call links by"
            raise InputError(problem, file=shown(file), fix="give files")
    groups = [tuple(files)] if _are_sides(files, format) else [(file,) for file in files]
    if links and len(links) != len(groups):
        problem = f"{len(links)} files of links for {len(groups)} bitexts"
        raise InputError(problem, fix="give as many, in the same order")
    beside: Sequence[PathLike | None] = links or [None] * len(groups)
    sources = [
        BitextSource(
            group,
            languages or languages_of(group),
            split or ("spaces" if links else "rules"),
            "moses" if len(group) == 2 else format,
            given,
        )
        for group, given in zip(groups, beside, strict=True)
    ]
    sources = [source for source in sources if not {*leave_out} & {*(source.languages or ())}]
    if not sources:
        raise InputError("all bitexts are left out", fix="leave out less")
    for source in sources:
        source.find_splitters()
    name, n_times = Counter(source.name for source in sources).most_common(1)[0]
    if n_times > 1:
        raise InputError(f"{n_times} bitexts would be called {name}", fix="rename all but one")
    return sources


def read_usable(
    source: BitextSource,
    report: LinkReport,
    *,
    skip_bad: bool = False,
    include_tags: Collection[str] | None = None,
    exclude_tags: Collection[str] = (),
) -> Iterator[SentencePair]:
    """Give the pairs that can be linked, their words joined by spaces; `report` counts the others.

    The tag of a pair is the number of its line, a tab, and its links where they are given.
    """
    split_src, split_tgt = source.find_splitters()
    is_empty = True
    lines = source.read_lines(SkippedLines() if skip_bad else None)
    for number, (pair, links) in enumerate(lines, start=1):
        report.n_read += 1
        if pair is SKIPPED:
            report.n_bad += 1
        elif not _has_tag(pair, include_tags, exclude_tags):
            report.n_other_tags += 1
        else:
            src, tgt = " ".join(split_src(pair.src)), " ".join(split_tgt(pair.tgt))
            if not src or not tgt:
                report.n_empty += 1
            elif not (_can_be_written(src) and _can_be_written(tgt)):
                report.n_unfit += 1
            else:
                is_empty = False
                yield SentencePair(src, tgt, f"{number}\t{links}")
    if is_empty:
        raise InputError(
            f"none of its {report.n_read:,} pairs can be linked",
            file=source.place,
            fix=f"{report.n_empty:,} have an empty side, {report.n_other_tags:,} other tags, "
            f"{report.n_bad + report.n_unfit:,} cannot be read",
        )


def _has_tag(
    pair: SentencePair, include_tags: Collection[str] | None, exclude_tags: Collection[str]
) -> bool:
    """Tell whether a pair is wanted, by its tag."""
    return (include_tags is None or pair.tag in include_tags) and pair.tag not in exclude_tags


def _are_sides(files: Sequence[PathLike], format: Format) -> bool:
    """Tell two sides of a bitext, such as news.en and news.de, from two bitexts."""
    if format == "moses" and len(files) != 2:
        raise InputError(f"{len(files)} file(s) given as moses", fix="give the two sides")
    are_whole = any(SUFFIXES.search(str(f)) or languages_of(f) is not None for f in files)
    is_named = len(files) == 2 and languages_of(files) is not None and not are_whole
    return format == "moses" or (format == "auto" and is_named)


def _split_tidied(split: Splitter) -> Splitter:
    """Tidy text before it is split: done later, it would remove words that have been counted."""
    return lambda text: split(normalize_text(text))


def _can_be_written(text: str) -> bool:
    """Tell whether a reader of `a ||| b` lines would find the same words again."""
    if text.count(" ") >= MAX_WORDS or "|||" in text:
        return False
    # A mark of byte order at the start of a file is taken away.
    return text.isprintable() or (text[0] != "\ufeff" and text.split() == text.split(" "))
