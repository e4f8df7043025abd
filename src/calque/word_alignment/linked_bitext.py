"""What making links removed, by filter, bitext by bitext: the figures and their file.

Bitexts to be linked: what they are called, their words, and links that are there already.

Linked bitext out of raw bitext: words, links, filters, and an account of what each removed.

The data step of Wu and Dredze (2020): fast_align in both directions, grow-diag-final-and, no links
between identical words, one-to-one links only, no pairs without links. Each bitext becomes
`NAME.text` (`words ||| words`) and `NAME.links` (lines of `i-j`), as recipes read them; what was
removed stands in `report.json`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO, TypeAlias

import numpy as np

from calque.algorithms.symmetrize import (
    drop_pairs,
    mark_identical,
    mark_linked_pairs,
    mark_one_to_one,
    select_links,
)
from calque.errors import InputError, MissingExtra
from calque.io.bitext import Format, languages_of, read_bitext
from calque.io.cleaning import normalize_text
from calque.io.files import MAGIC, PathLike, SkippedLines, read_lines, shown, write_atomically
from calque.io.links import format_pharaoh
from calque.io.segmentation import find_splitter, split_on_spaces
from calque.tokens.linked import FULL_WEIGHT, MAX_WORDS, pack_links, unpack_links
from calque.types import Links, SentencePair
from calque.word_alignment.counts import Vocabulary
from calque.word_alignment.file_job import SKIPPED, cut_blocks, read_in_step
from calque.word_alignment.protocol import AlignedBlock, Aligner, AlignReport, WordPair
from calque.word_alignment.statistical import (
    DEFAULT_SYMMETRIZATION,
    LIBRARIES,
    StatisticalAligner,
    StatisticalKind,
    check_statistical,
)

if TYPE_CHECKING:
    from calque.io.segmentation import Splitter


REPORT = "report.json"
FORMAT = "calque links 1"


@dataclass(slots=True)
class LinkReport:
    """Counts of pairs and links, in the order in which they were dropped.

    Of the pairs read, `n_bad` could not be, `n_other_tags` were not asked for, `n_empty` have an
    empty side, the words of `n_unfit` cannot be written as `a ||| b` (they hold `|||` or white
    space, or are more than 4,095), and `n_unlinked` were left without links. Of the links found,
    `n_identical` join two equal words, and `n_many` a word that has others. `n_long` and `n_cut`
    are those of `AlignReport`.
    """

    n_read: int = 0
    n_bad: int = 0
    n_other_tags: int = 0
    n_empty: int = 0
    n_unfit: int = 0
    n_links: int = 0
    n_identical: int = 0
    n_many: int = 0
    n_unlinked: int = 0
    n_long: int = 0
    n_cut: int = 0

    @property
    def n_usable(self) -> int:
        """How many pairs were aligned."""
        return self.n_read - self.n_bad - self.n_other_tags - self.n_empty - self.n_unfit

    @property
    def n_kept(self) -> int:
        """How many pairs were written."""
        return self.n_usable - self.n_unlinked

    @property
    def n_kept_links(self) -> int:
        """How many links were written."""
        return self.n_links - self.n_identical - self.n_many

    @classmethod
    def total(cls, reports: Iterable[Self]) -> Self:
        """Add reports up."""
        rows = [[getattr(report, field.name) for field in fields(cls)] for report in reports]
        return cls(*map(sum, zip(*rows, strict=True)))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Take the counts that `to_dict` gave."""
        return cls(**{field.name: int(content[field.name]) for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, ready for JSON: counts, and shares of the pairs or links before."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        shares = {
            "share_identical": share(self.n_identical, self.n_links),
            "share_many": share(self.n_many, self.n_links),
            "share_kept_links": share(self.n_kept_links, self.n_links),
            "share_kept": share(self.n_kept, self.n_read),
        }
        kept = {"n_kept_links": self.n_kept_links, "n_kept": self.n_kept}
        return counts | kept | {name: round(value, 6) for name, value in shares.items()}


def share(part: int, whole: int) -> float:
    """Give a part of a whole; of nothing, nothing."""
    return part / whole if whole else 0.0


def read_entries(folder: Path) -> dict[str, Any]:
    """Read what is reported of the bitexts in a folder, of those that are still there."""
    path = folder / REPORT
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
        is_ours = content["format"] == FORMAT
        for entry in content["bitexts"].values() if is_ours else ():
            LinkReport.from_dict(entry)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise InputError("not a report of links", file=path, fix="write to another folder")
    return {
        name: entry
        for name, entry in content["bitexts"].items()
        if (folder / f"{name}.text").exists()
    }


def write_entries(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write what was done with every bitext in a folder, and the sum of it."""
    total = LinkReport.total(map(LinkReport.from_dict, entries.values()))
    bitexts = {name: entries[name] for name in sorted(entries)}
    content = {"format": FORMAT, "bitexts": bitexts, "total": total.to_dict()}
    with write_atomically(folder / REPORT) as stream:
        stream.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")


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


# A bitext, what is being done with it, how many of its pairs are done, and of how many.
OnProgress: TypeAlias = Callable[[str, str, int, int | None], None]
Say: TypeAlias = Callable[[str], None]
# Finds the links of a block: its pairs, their words, and the number of the first.
FindLinks: TypeAlias = Callable[[list[SentencePair], list[WordPair], int], AlignedBlock]

BLOCK_PAIRS = 8192
STEP_PAIRS = 4096  # between two calls of `on_progress`
N_TAGS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LinkRules:
    """Which pairs and links are kept, and whether links are written with their scores.

    Tags are the third column of a TSV. What is dropped by default is what the paper drops.
    """

    include_tags: tuple[str, ...] | None = None
    exclude_tags: tuple[str, ...] = ()
    keep_identical: bool = False
    keep_many: bool = False
    keep_empty: bool = False
    scores: bool = False


@dataclass(frozen=True, slots=True)
class _Job:
    """What is done with every bitext."""

    folder: Path
    aligner: StatisticalKind | Aligner
    symmetrize: str
    rules: LinkRules
    skip_bad: bool
    block_pairs: int
    on_progress: OnProgress
    say: Say


def make_links(
    bitexts: Sequence[BitextSource],
    folder: PathLike,
    *,
    aligner: StatisticalKind | Aligner = "fast-align",
    symmetrize: str = DEFAULT_SYMMETRIZATION,
    rules: LinkRules | None = None,
    skip_bad: PathLike | None = None,
    overwrite: bool = False,
    block_pairs: int = BLOCK_PAIRS,
    on_progress: OnProgress = lambda name, phase, n_done, n_pairs: None,
    say: Say = lambda note: None,
) -> dict[str, LinkReport]:
    """Write the linked text of bitexts into a folder, and tell by name what was dropped of each.

    `find_bitexts` makes bitexts out of files. fast-align and eflomal are trained on each bitext
    anew. All input is looked through before the work; bad lines are listed in `skip_bad` or are
    errors. A bitext that is done stays, whatever happens to the next. `say` hears of oddities.
    """
    job = _Job(
        Path(folder),
        aligner,
        symmetrize,
        rules or LinkRules(),
        skip_bad is not None,
        block_pairs,
        on_progress,
        say,
    )
    _check_output(job.folder, bitexts, overwrite=overwrite)
    _check_skipped(skip_bad, job.folder, bitexts)
    if isinstance(aligner, str) and any(bitext.links is None for bitext in bitexts):
        check_statistical(aligner, symmetrize)
        LIBRARIES[aligner].load()
    n_lines = _check_input(job, bitexts, skip_bad)
    reports = {}
    with _make_folder(job.folder):
        for bitext in bitexts:
            reports[bitext.name] = _make_one(job, bitext, n_lines[bitext.name])
    return reports


def filter_links(
    links: Links, pairs: Sequence[WordPair], rules: LinkRules, report: LinkReport
) -> tuple[Links, Sequence[int]]:
    """Filter the links of pairs, and tell which pairs are left; `report` counts along.

    The links are those of the pairs left, numbered anew.
    """
    report.n_links += len(links.pairs)
    if not rules.keep_identical:
        # One vocabulary for both sides, and as written: "Die" and "die" are not identical.
        words = Vocabulary(lowercase=False)
        src, tgt = (words.learn(pair[side] for pair in pairs) for side in (0, 1))
        identical = mark_identical(links, (src.ids, src.offsets), (tgt.ids, tgt.offsets))
        report.n_identical += int(identical.sum())
        links = select_links(links, ~identical)
    if not rules.keep_many:
        single = mark_one_to_one(links)
        report.n_many += int((~single).sum())
        links = select_links(links, single)
    if rules.keep_empty:
        return links, range(links.n_pairs)
    linked = mark_linked_pairs(links)
    report.n_unlinked += int((~linked).sum())
    return drop_pairs(links, linked), np.flatnonzero(linked).tolist()


def _make_one(job: _Job, bitext: BitextSource, n_lines: int) -> LinkReport:
    """Write the linked text of one bitext."""
    report, name = LinkReport(), bitext.name
    with tempfile.TemporaryDirectory(prefix=".calque-", dir=job.folder) as draft:
        paths = [Path(draft) / f"{name}.{kind}" for kind in ("text", "links")]
        with ExitStack() as stack:
            text, lines = (stack.enter_context(write_atomically(path)) for path in paths)
            for pairs, words, aligned in _align(job, bitext, n_lines, report, Path(draft)):
                report.n_long += aligned.report.n_long
                report.n_cut += aligned.report.n_cut
                links, kept = filter_links(aligned.links, words, job.rules, report)
                text.writelines(f"{pairs[k].src} ||| {pairs[k].tgt}\n" for k in kept)
                found = format_pharaoh(links, scores=job.rules.scores)
                lines.writelines(f"{line}\n" for line in found)
        # Without its links an older text is refused by whoever reads it; with others' it is not.
        (job.folder / paths[1].name).unlink(missing_ok=True)
        for path in paths:
            os.replace(path, job.folder / path.name)
    entries = read_entries(job.folder)
    write_entries(job.folder, entries | {name: _describe(job, bitext) | report.to_dict()})
    return report


def _align(
    job: _Job, bitext: BitextSource, n_lines: int, report: LinkReport, draft: Path
) -> Iterator[tuple[list[SentencePair], list[WordPair], AlignedBlock]]:
    """Give the pairs of a bitext that can be linked, their words and their links, by blocks."""
    readable = read_usable(
        bitext,
        report,
        skip_bad=job.skip_bad,
        include_tags=job.rules.include_tags,
        exclude_tags=job.rules.exclude_tags,
    )
    pairs, find = _choose_links(job, bitext, readable, draft)
    first = 0
    for block in cut_blocks(pairs, job.block_pairs):
        words: list[WordPair] = [(pair.src.split(" "), pair.tgt.split(" ")) for pair in block]
        yield block, words, find(block, words, first)
        first += len(block)
        n_pairs = report.n_usable if report.n_read == n_lines else n_lines
        job.on_progress(bitext.name, "linking", first, n_pairs)


def _choose_links(
    job: _Job, bitext: BitextSource, pairs: Iterator[SentencePair], draft: Path
) -> tuple[Iterator[SentencePair], FindLinks]:
    """Give the pairs of a bitext and what finds their links: a file, a model, or training."""
    if bitext.links is not None:
        return pairs, lambda pairs, words, first: _parse_given(pairs, words, bitext)
    if not isinstance(job.aligner, str):
        aligner = job.aligner
        return pairs, lambda pairs, words, first: aligner.align_block(words, first)
    model, staged = _train(job, bitext.name, pairs, draft)
    return (
        read_bitext(staged, "pipes"),
        lambda pairs, words, first: model.training_block(first, first + len(pairs)),
    )


def _train(
    job: _Job, name: str, pairs: Iterator[SentencePair], draft: Path
) -> tuple[StatisticalAligner, Path]:
    """Train an aligner on pairs, and keep these in a file: raw text is split into words once."""
    assert isinstance(job.aligner, str)
    staged = draft / "staged"
    with write_atomically(staged) as stream:
        model = StatisticalAligner.train(
            _write_along(pairs, stream, lambda n: job.on_progress(name, "reading", n, None)),
            job.aligner,
            symmetrize=job.symmetrize,
            on_phase=lambda phase: job.on_progress(name, phase, 0, None),
        )
    return model, staged


def _write_along(
    pairs: Iterator[SentencePair], stream: TextIO, on_pairs: Callable[[int], None]
) -> Iterator[WordPair]:
    for number, pair in enumerate(pairs):
        if number % STEP_PAIRS == 0:
            on_pairs(number)
        stream.write(f"{pair.src} ||| {pair.tgt}\n")
        yield pair.src.split(" "), pair.tgt.split(" ")


def _parse_given(
    pairs: Sequence[SentencePair], words: Sequence[WordPair], bitext: BitextSource
) -> AlignedBlock:
    """Read the links that pairs carry as their tags: the number of the line, a tab, and them."""
    assert bitext.links is not None
    numbers, lines = zip(*((pair.tag or "").split("\t", 1) for pair in pairs), strict=True)
    n_src, n_tgt = (np.array([len(pair[side]) for pair in words]) for side in (0, 1))
    try:
        packed = pack_links(lines, n_src, n_tgt, bitext.links, list(map(int, numbers)))
    except InputError as error:
        fix = error.fix
        if "words" in error.problem:
            fix = f"these are the words of --split {bitext.split}: is it what the links count?"
        raise InputError(error.problem, file=error.file, line=error.line, fix=fix) from None
    src, tgt, weights = unpack_links(packed.ids.astype(np.int64))
    owners = np.repeat(np.arange(len(pairs)), packed.lengths)
    scores = (weights / FULL_WEIGHT).astype(np.float32)
    links = Links(owners, src, tgt, scores, len(pairs))
    return AlignedBlock(links, AlignReport(len(pairs), len(src)))


def _describe(job: _Job, bitext: BitextSource) -> dict[str, Any]:
    """Say how a bitext was linked."""
    found: dict[str, Any] = {
        "files": [Path(path).name for path in bitext.paths],
        "languages": None if bitext.languages is None else "-".join(bitext.languages),
        "split": bitext.split,
    }
    if bitext.links is not None:
        found["links"] = Path(bitext.links).name
    elif isinstance(job.aligner, str):
        found |= {"aligner": job.aligner, "symmetrize": job.symmetrize}
    else:
        details = (getattr(job.aligner, name, None) for name in ("method", "layer"))
        known = (str(detail) for detail in details if detail is not None)
        found["aligner"] = " ".join([type(job.aligner).__name__, *known])
    return found | asdict(job.rules)


def _check_output(folder: Path, bitexts: Sequence[BitextSource], *, overwrite: bool) -> None:
    """Refuse to write where something stands, and over what is to be read."""
    if folder.exists() and not folder.is_dir():
        raise InputError("a file", file=folder, fix="name a folder")
    read_entries(folder)
    inputs = {
        os.path.realpath(path)
        for bitext in bitexts
        for path in (*bitext.paths, bitext.links)
        if path is not None
    }
    for bitext in bitexts:
        for path in (folder / f"{bitext.name}.{kind}" for kind in ("text", "links")):
            if os.path.realpath(path) in inputs:
                raise InputError("both read and written", file=path, fix="name another folder")
            if path.exists() and not overwrite:
                fix = "add --overwrite, or name another folder or only the bitexts still to do"
                raise InputError("exists", file=path, fix=fix)


def _check_skipped(
    skip_bad: PathLike | None, folder: Path, bitexts: Sequence[BitextSource]
) -> None:
    """Refuse a list of bad lines that stands where the linked text is to be."""
    names = [f"{bitext.name}.{kind}" for bitext in bitexts for kind in ("text", "links")]
    written = {os.path.realpath(path) for path in (folder, *(folder / n for n in [*names, REPORT]))}
    if skip_bad is not None and os.path.realpath(skip_bad) in written:
        raise InputError("both -o and --skip-bad", file=shown(skip_bad), fix="name another file")


class _ListedLines(SkippedLines):
    """Lists bad lines with the bitext that they stand in."""

    def __init__(self, stream: TextIO, place: str) -> None:
        super().__init__(stream)
        self.place = place

    def __call__(self, number: int, reason: str, text: str) -> None:
        if self.stream is not None:
            self.stream.write(f"{self.place}\t")
        super().__call__(number, reason, text)


def _check_input(
    job: _Job, bitexts: Sequence[BitextSource], skip_bad: PathLike | None
) -> Mapping[str, int]:
    """Look through all input, so that bad lines are known before the work; count the lines."""
    n_lines, tags = {}, _TagCheck(job.rules)
    with ExitStack() as stack:
        stream = None if skip_bad is None else stack.enter_context(write_atomically(skip_bad))
        for bitext in bitexts:
            number = 0
            listed = None if stream is None else _ListedLines(stream, bitext.place)
            for number, (pair, _) in enumerate(bitext.read_lines(listed), start=1):
                tags.see(pair)
                if number % STEP_PAIRS == 0:
                    job.on_progress(bitext.name, "checking", number, None)
            n_lines[bitext.name] = number
            if number == 0:
                raise InputError("no sentence pairs", file=bitext.place, fix="leave it out")
    tags.report(job.say)
    return n_lines


class _TagCheck:
    """Looks for tags that no pair has: text excluded by a tag with a slip would stay."""

    def __init__(self, rules: LinkRules) -> None:
        self.missing = {*(rules.include_tags or ()), *rules.exclude_tags}
        self.seen: dict[str, None] = {}

    def see(self, pair: SentencePair) -> None:
        """Take note of a pair's tag."""
        if self.missing and pair.tag is not None and pair is not SKIPPED:
            self.missing.discard(pair.tag)
            if len(self.seen) < N_TAGS_SHOWN:
                self.seen[pair.tag] = None

    def report(self, say: Say) -> None:
        """Tell which tags were not met."""
        if self.missing:
            known = ", ".join(self.seen) or "none (they are the third column of a TSV)"
            tags = ", ".join(map(repr, sorted(self.missing)))
            say(f"no pair has the tag {tags}; tags there are: {known}")


@contextmanager
def _make_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and take it away again if nothing comes to be in it."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise InputError(problem, file=folder, fix="write elsewhere") from error
    try:
        yield
    except BaseException:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        raise
