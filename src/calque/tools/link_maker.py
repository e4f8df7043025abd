"""Linked bitext out of raw bitext: words, links, filters, and an account of what each removed.

The data step of Wu and Dredze (2020): fast_align in both directions, grow-diag-final-and, no links
between identical words, one-to-one links only, no pairs without links. Each bitext becomes
`NAME.text` (`words ||| words`) and `NAME.links` (lines of `i-j`), as recipes read them; what was
removed stands in `report.json`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np

from calque.align.link_filters import (
    drop_pairs,
    mark_identical,
    mark_linked_pairs,
    mark_one_to_one,
    select_links,
)
from calque.text.bitext import read_bitext
from calque.text.files import PathLike, SkippedLines, shown, write_atomically
from calque.text.linked_bitext import FULL_WEIGHT, pack_links, unpack_links
from calque.text.links import format_pharaoh
from calque.tools.aligning import AlignedBlock, Aligner, AlignReport, WordPair
from calque.tools.link_report import REPORT, LinkReport, read_entries, write_entries
from calque.tools.link_sources import BitextSource, read_usable
from calque.tools.link_writer import SKIPPED, cut_blocks
from calque.tools.statistical_aligner import (
    DEFAULT_SYMMETRIZATION,
    LIBRARIES,
    StatisticalAligner,
    StatisticalKind,
    check_statistical,
)
from calque.tools.word_ids import Vocabulary
from calque.types import InputError, Links, SentencePair

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
