"""Linked bitext from raw bitext: words, links, filters, and a report of what each filter removed.

This is the data preparation of Wu and Dredze (2020): fast_align in both directions,
grow-diag-final-and, no links between identical words, one-to-one links only, no pairs without
links. Each bitext becomes `NAME.text` (`words ||| words`) and `NAME.links` (lines of `i-j`), as
recipes read them, and an entry in `report.json`.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO, TypeAlias, cast

import numpy as np

from calque.algorithms.symmetrize import (
    SYMMETRIZATIONS,
    keep_pairs,
    mark_identical,
    mark_linked_pairs,
    mark_one_to_one,
    select_links,
)
from calque.errors import InputError, MissingExtra, check_choice
from calque.io.bitext import BitextFormat, infer_languages, read_bitext
from calque.io.cleaning import normalize_text
from calque.io.files import (
    MAGIC_BYTES,
    PathLike,
    SkippedLines,
    check_skip_list,
    display_name,
    read_lines,
    write_atomically,
)
from calque.io.links import format_pharaoh
from calque.io.outputs import open_draft
from calque.io.segmentation import get_word_splitter, split_on_spaces
from calque.io.structured import read_json
from calque.tokens.linked import FULL_WEIGHT, MAX_WORDS, pack_links, unpack_links
from calque.types import Links, SentencePair
from calque.word_alignment.build import BLOCK_PAIRS as ENCODER_BLOCK_PAIRS
from calque.word_alignment.file_job import (
    SKIPPED,
    LanguagePair,
    cut_blocks,
    parse_pair,
    read_pairs,
)
from calque.word_alignment.numbered_text import WordNumbering
from calque.word_alignment.protocol import (
    AlignedBlock,
    Aligner,
    AlignReport,
    AlignWarning,
    WordPair,
)
from calque.word_alignment.statistical import (
    DEFAULT_STEM,
    DEFAULT_SYMMETRIZATION,
    LIBRARIES,
    StatisticalAligner,
    StatisticalKind,
    check_statistical,
)

if TYPE_CHECKING:
    from calque.io.segmentation import WordSplitter
    from calque.models.encoder import Encoder
    from calque.types import Progress

# Finds the links of a block, given its pairs, their words, and the number of the first pair.
FindLinks: TypeAlias = Callable[[list[SentencePair], list[WordPair], int], AlignedBlock]

REPORT = "report.json"
FORMAT = "calque links 1"
ALIGNERS = ("fast-align", "eflomal", "neural")
INPUT_FORMATS = ("auto", "pipes", "tsv", "moses")
SUFFIXES = re.compile(r"\.(?:tsv|txt|text)$")
BLOCK_PAIRS = 8192
PROGRESS_PAIRS = 4096  # between two reports of progress
N_TAGS_SHOWN = 8


@dataclass(slots=True)
class LinkReport:
    """Counts of pairs and links, in the order in which they were dropped.

    Of the pairs read, `n_bad` are invalid lines, `n_other_tags` have tags that were not asked for,
    `n_empty` have an empty side, `n_unfit` cannot be written as `a ||| b` (their words contain
    `|||` or white space, or are more than 4,095), and `n_unlinked` have no links left. Of the links
    found, `n_identical` link two equal words, and `n_many` a word with several links. `n_long` and
    `n_cut` are those of `AlignReport`.
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
        """Number of pairs that were aligned."""
        return self.n_read - self.n_bad - self.n_other_tags - self.n_empty - self.n_unfit

    @property
    def n_kept(self) -> int:
        """Number of pairs that were written."""
        return self.n_usable - self.n_unlinked

    @property
    def n_kept_links(self) -> int:
        """Number of links that were written."""
        return self.n_links - self.n_identical - self.n_many

    @classmethod
    def total(cls, reports: Iterable[Self]) -> Self:
        """Return the sum of reports."""
        rows = [[getattr(report, field.name) for field in fields(cls)] for report in reports]
        return cls(*map(sum, zip(*rows, strict=True)))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return the counts in the result of `to_dict`."""
        return cls(**{field.name: int(content[field.name]) for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Return the counts, and shares of the pairs or links before, as plain values."""
        shares = {
            "share_identical": share(self.n_identical, self.n_links),
            "share_many": share(self.n_many, self.n_links),
            "share_kept_links": share(self.n_kept_links, self.n_links),
            "share_kept": share(self.n_kept, self.n_read),
        }
        kept = {"n_kept_links": self.n_kept_links, "n_kept": self.n_kept}
        return asdict(self) | kept | {name: round(value, 6) for name, value in shares.items()}


@dataclass(frozen=True, slots=True)
class LinkedBitext:
    """What `link_bitext` wrote: the folder, and a report for every bitext by its name."""

    output: Path
    reports: dict[str, LinkReport]

    @property
    def total(self) -> LinkReport:
        """The sum of all reports."""
        return LinkReport.total(self.reports.values())


@dataclass(frozen=True, slots=True)
class LinkRules:
    """Which pairs and links are kept, and whether links are written with their scores.

    Tags are the third column of a TSV file. The defaults are those of Wu and Dredze (2020).
    """

    include_tags: tuple[str, ...] | None = None
    exclude_tags: tuple[str, ...] = ()
    keep_identical: bool = False
    keep_many: bool = False
    keep_empty: bool = False
    scores: bool = False


def link_bitext(
    bitexts: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    aligner: str | Aligner | None = None,
    links: PathLike | Sequence[PathLike] = (),
    symmetrize: str | None = None,
    stem: int | None = None,
    languages: LanguagePair | None = None,
    leave_out: Collection[str] = (),
    tokenized: bool | None = None,
    input_format: str = "auto",
    include_tags: Collection[str] | None = None,
    exclude_tags: Collection[str] = (),
    keep_identical: bool = False,
    keep_many: bool = False,
    keep_empty: bool = False,
    scores: bool = False,
    skip_bad: PathLike | None = None,
    overwrite: bool = False,
    model: str | Path | Encoder | None = None,
    device: str = "auto",
    block_pairs: int | None = None,
    progress: Progress | None = None,
) -> LinkedBitext:
    """Link the words of bitexts and write what is worth training on into a folder.

    All input is checked first. A bitext that is finished stays, whatever happens to the next.

    Examples:
        >>> calque.link_bitext("en-de.tsv", "linked").total.n_kept  # doctest: +SKIP
        28

    Args:
        bitexts: Files with lines `source TAB target` or `source ||| target`, or the two sides of
            one bitext, such as news.en and news.de.
        output: Folder for `NAME.text`, `NAME.links` and `report.json`.
        aligner: "fast-align" (the default) or "eflomal", which are trained on each bitext, or
            "neural", or any object with the method `align_block`.
        links: Files with links found earlier, one for each bitext, instead of an aligner.
        symmetrize: How eflomal's two directions are combined. Default: grow-diag-final-and.
        stem: Statistical aligners treat words with the same first `stem` letters as one word.
            Default: 5; 0 distinguishes all words, as Wu and Dredze (2020) do.
        languages: Languages of the two sides, such as "de-en". Default: inferred from file names.
        leave_out: Languages whose bitexts are left out.
        tokenized: The words of the input are separated by spaces. Default: true with `links`;
            otherwise text is split by the rules of its languages.
        input_format: "auto", "pipes" (source ||| target), "tsv" or "moses" (two sides).
        include_tags: Use only pairs with these tags (third column of a TSV file).
        exclude_tags: Use no pairs with these tags.
        keep_identical: Keep links between identical words.
        keep_many: Keep links that are not one-to-one.
        keep_empty: Keep pairs without links.
        scores: Write the scores of links, which recipes use as weights.
        skip_bad: List invalid lines in this file and leave them out, instead of stopping.
        overwrite: Replace the output of an earlier run.
        model: Model folder, hub name, `calque-mini` or a loaded model, for the neural aligner.
        device: "auto", "cpu", "cuda", "cuda:1", ... for the neural aligner.
        block_pairs: Pairs that are aligned together. Default: chosen for the aligner.
        progress: Called with bitext and stage, pairs done and pairs in total.
    """
    check_choice("--input-format", input_format, INPUT_FORMATS)
    check_choice("--symmetrize", symmetrize, SYMMETRIZATIONS)
    if aligner is None or isinstance(aligner, str):
        check_choice("--aligner", aligner, ALIGNERS)
    given = _to_list(links)
    conflicts = [
        (given and aligner, "--aligner cannot be used with --links", "drop one of the two"),
        (given and symmetrize, "--symmetrize cannot be used with --links", "drop one of the two"),
        (
            aligner == "neural" and symmetrize,
            "--symmetrize cannot be used with --aligner neural",
            "drop it",
        ),
        (
            stem is not None and (given or aligner == "neural"),
            "--stem is for training fast-align or eflomal",
            "drop it",
        ),
        (model and aligner != "neural", "--model needs an encoder", "add --aligner neural"),
    ]
    for is_conflict, problem, fix in conflicts:
        if is_conflict:
            raise InputError(problem, fix=fix)
    sources = find_bitexts(
        _to_list(bitexts),
        languages=parse_pair(languages),
        tokenized=tokenized,
        format=cast(BitextFormat, input_format),
        links=given,
        leave_out=leave_out,
    )
    if skip_bad is not None:
        paths = [*(path for source in sources for path in source.paths), *given]
        check_skip_list(Path(skip_bad), [os.fspath(path) for path in paths])
    rules = LinkRules(
        None if include_tags is None else tuple(include_tags),
        tuple(exclude_tags),
        keep_identical,
        keep_many,
        keep_empty,
        scores,
    )
    chosen: Any = aligner or "fast-align"
    if aligner == "neural":
        from calque.models.encoder import Encoder
        from calque.models.inference import load_encoder
        from calque.word_alignment.neural import WordAligner

        encoder = model if isinstance(model, Encoder) else load_encoder(model, device)
        chosen = WordAligner(encoder)
        kind = next(encoder.parameters()).device.type
        block_pairs = block_pairs or ENCODER_BLOCK_PAIRS.get(kind, ENCODER_BLOCK_PAIRS["cpu"])
    linker = _Linker(
        Path(output),
        chosen,
        symmetrize or DEFAULT_SYMMETRIZATION,
        DEFAULT_STEM if stem is None else stem,
        rules,
        skip_bad,
        block_pairs or BLOCK_PAIRS,
        progress or (lambda stage, done, total: None),
    )
    return LinkedBitext(linker.folder, linker.link(sources, overwrite=overwrite))


def filter_links(
    links: Links, pairs: Sequence[WordPair], rules: LinkRules, report: LinkReport
) -> tuple[Links, Sequence[int]]:
    """Return the links to keep and the numbers of the pairs to keep; `report` is updated.

    The links are numbered by the pairs that are kept.
    """
    report.n_links += len(links.pairs)
    if not rules.keep_identical:
        # One numbering for both sides, and as written: "Die" and "die" are not identical.
        words = WordNumbering(lowercase=False)
        src, tgt = (words.add(pair[side] for pair in pairs) for side in (0, 1))
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
    return keep_pairs(links, linked), np.flatnonzero(linked).tolist()


@dataclass(frozen=True, slots=True)
class BitextSource:
    """A bitext in one file or two, and how its words are found.

    With `tokenized`, words are separated by spaces; otherwise text is split by the rules of its
    languages. `links` is a file with one line of links for each pair.
    """

    paths: tuple[PathLike, ...]
    languages: tuple[str, str] | None = None
    tokenized: bool = False
    format: BitextFormat = "auto"
    links: PathLike | None = None

    @property
    def name(self) -> str:
        """Name of the linked text, from which recipes can infer its languages.

        >>> BitextSource(("news.tsv.xz",), ("en", "de")).name
        'en-de.news'
        >>> BitextSource(("data/hansards.en-fr.tsv",), ("en", "fr")).name
        'hansards.en-fr'
        """
        stem = Path(self.paths[0]).name
        for suffix in MAGIC_BYTES:
            stem = stem.removesuffix(suffix)
        stem = SUFFIXES.sub("", stem) or stem
        if self.languages is None or infer_languages(f"{stem}.text") == self.languages:
            return stem
        if len(self.paths) == 2:
            stem = stem.removesuffix(f".{self.languages[0]}")
        return f"{'-'.join(self.languages)}.{stem}"

    @property
    def file(self) -> str:
        """Name of the file in messages."""
        return display_name(self.paths[0])

    def read_lines(self, skipped: SkippedLines | None) -> Iterator[tuple[SentencePair, str]]:
        """Read every pair with its line of links, which is empty if no links are given.

        An invalid line that is reported to `skipped` gives the pair `SKIPPED`.
        """
        pairs = read_pairs(self.paths, self.format, skipped)
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
                    f"the file has {n_lines} lines of links, but {self.file} has {n_pairs} pairs",
                    file=display_name(self.links),
                    line=number,
                    fix="write one line of links per pair, an empty line if it has none",
                )
            yield pair, line

    def read_usable(
        self, report: LinkReport, rules: LinkRules | None = None, *, skip_bad: bool = False
    ) -> Iterator[SentencePair]:
        """Read the pairs that can be linked, their words joined by spaces; count the others.

        The tag of a pair is the number of its line, a tab, and its line of links.
        """
        split_src, split_tgt = self.find_splitters()
        rules = rules or LinkRules()
        lines = self.read_lines(SkippedLines() if skip_bad else None)
        for number, (pair, links) in enumerate(lines, start=1):
            report.n_read += 1
            if pair is SKIPPED:
                report.n_bad += 1
            elif pair.tag in rules.exclude_tags or (
                rules.include_tags is not None and pair.tag not in rules.include_tags
            ):
                report.n_other_tags += 1
            else:
                src, tgt = " ".join(split_src(pair.src)), " ".join(split_tgt(pair.tgt))
                if not src or not tgt:
                    report.n_empty += 1
                elif not (_is_writable(src) and _is_writable(tgt)):
                    report.n_unfit += 1
                else:
                    yield SentencePair(src, tgt, f"{number}\t{links}")
        if not report.n_usable:
            raise InputError(
                f"none of its {report.n_read:,} pairs can be linked",
                file=self.file,
                fix=f"{report.n_empty:,} have an empty side, {report.n_other_tags:,} other tags, "
                f"{report.n_bad + report.n_unfit:,} cannot be read",
            )

    def find_splitters(self) -> tuple[WordSplitter, WordSplitter]:
        """Return what splits each side into words; raise InputError for an unsupported language.

        Text is normalized before it is split, because recipes normalize it too: later, that could
        remove words that links refer to. Text with links must stay as it is.
        """
        if self.links is not None and self.tokenized:
            return split_on_spaces, split_on_spaces
        if self.tokenized:
            return (lambda text: normalize_text(text).split(),) * 2
        if self.languages is None:
            raise InputError(
                "the languages cannot be inferred from the file name",
                file=self.file,
                fix="add --languages en-de, or --tokenized if words are separated by spaces",
            )
        try:
            src, tgt = map(get_word_splitter, self.languages)
        except MissingExtra:
            raise
        except InputError as error:
            fix = "separate the words by spaces and add --tokenized, or use --leave-out"
            raise InputError(error.problem, file=self.file, fix=fix) from None
        if self.links is not None:
            return src, tgt
        return lambda text: src(normalize_text(text)), lambda text: tgt(normalize_text(text))


def find_bitexts(
    files: Sequence[PathLike],
    *,
    languages: tuple[str, str] | None = None,
    tokenized: bool | None = None,
    format: BitextFormat = "auto",
    links: Sequence[PathLike] = (),
    leave_out: Collection[str] = (),
) -> list[BitextSource]:
    """Return the bitexts in files; two files named after two languages are sides of one bitext.

    The arguments are those of `link_bitext`.
    """
    for file in files:
        if str(file) == "-" or (Path(file).exists() and not Path(file).is_file()):
            kind = "a directory" if Path(file).is_dir() else "a pipe, which has no name for links"
            raise InputError(f"this is {kind}", file=display_name(file), fix="pass files")
    groups = [tuple(files)] if _are_sides(files, format) else [(file,) for file in files]
    if links and len(links) != len(groups):
        problem = f"there are {len(links)} files of links for {len(groups)} bitexts"
        raise InputError(problem, fix="pass one file of links per bitext, in the same order")
    given: Sequence[PathLike | None] = links or [None] * len(groups)
    sources = [
        BitextSource(
            group,
            languages or infer_languages(group),
            bool(links) if tokenized is None else tokenized,
            "moses" if len(group) == 2 else format,
            links_file,
        )
        for group, links_file in zip(groups, given, strict=True)
    ]
    sources = [source for source in sources if not {*leave_out} & {*(source.languages or ())}]
    if not sources:
        raise InputError("--leave-out removes all bitexts", fix="leave out fewer languages")
    for source in sources:
        source.find_splitters()
    name, n_times = Counter(source.name for source in sources).most_common(1)[0]
    if n_times > 1:
        problem = f"the output of {n_times} bitexts would have the same name, {name}"
        raise InputError(problem, fix="rename all but one")
    return sources


def share(part: int, whole: int) -> float:
    """Return a part divided by the whole, or 0 if there is nothing."""
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class _Linker:
    """Links bitexts into a folder, all with the same aligner and rules."""

    folder: Path
    aligner: StatisticalKind | Aligner
    symmetrize: str
    stem: int
    rules: LinkRules
    skip_bad: PathLike | None
    block_pairs: int
    progress: Progress

    def link(self, bitexts: Sequence[BitextSource], *, overwrite: bool) -> dict[str, LinkReport]:
        """Check all input, then write the linked text of every bitext."""
        self._check_output(bitexts, overwrite=overwrite)
        if isinstance(self.aligner, str) and any(bitext.links is None for bitext in bitexts):
            check_statistical(self.aligner, self.symmetrize)
            LIBRARIES[self.aligner].load()
        n_lines = self._check_input(bitexts)
        with open_draft(self.folder) as draft:
            return {
                bitext.name: self._link_one(bitext, n_lines[bitext.name], draft)
                for bitext in bitexts
            }

    def _link_one(self, bitext: BitextSource, n_lines: int, draft: Path) -> LinkReport:
        """Write the linked text of one bitext."""
        report, name = LinkReport(), bitext.name
        paths = [draft / f"{name}.{kind}" for kind in ("text", "links")]
        with ExitStack() as stack:
            text, lines = (stack.enter_context(write_atomically(path)) for path in paths)
            pairs, find_links = self._choose_links(bitext, report, draft)
            n_done = 0
            for block in cut_blocks(pairs, self.block_pairs):
                words: list[WordPair] = [(p.src.split(" "), p.tgt.split(" ")) for p in block]
                aligned = find_links(block, words, n_done)
                report.n_long += aligned.report.n_long
                report.n_cut += aligned.report.n_cut
                links, kept = filter_links(aligned.links, words, self.rules, report)
                text.writelines(f"{block[k].src} ||| {block[k].tgt}\n" for k in kept)
                found = format_pharaoh(links, scores=self.rules.scores)
                lines.writelines(f"{line}\n" for line in found)
                n_done += len(block)
                total = report.n_usable if report.n_read == n_lines else n_lines
                self.progress(f"{name}: linking", n_done, total)
        # Readers reject a text without links; old text with new links they could not detect.
        (self.folder / paths[1].name).unlink(missing_ok=True)
        for path in paths:
            os.replace(path, self.folder / path.name)
        entries = _read_report(self.folder) | {name: self._describe(bitext) | report.to_dict()}
        _write_report(self.folder, entries)
        return report

    def _choose_links(
        self, bitext: BitextSource, report: LinkReport, draft: Path
    ) -> tuple[Iterator[SentencePair], FindLinks]:
        """Return the pairs of a bitext and what finds their links: a file, an aligner, training."""
        pairs = bitext.read_usable(report, self.rules, skip_bad=self.skip_bad is not None)
        if bitext.links is not None:
            return pairs, lambda pairs, words, first: _parse_given(pairs, words, bitext)
        aligner = self.aligner
        if not isinstance(aligner, str):
            return pairs, lambda pairs, words, first: aligner.align_block(words, first)
        staged = draft / "staged"  # raw text is split into words only once
        with write_atomically(staged) as stream:
            model = StatisticalAligner.train(
                self._write_words(pairs, stream, bitext.name),
                aligner,
                symmetrize=self.symmetrize,
                stem=self.stem,
                progress=lambda stage, done, total: self.progress(
                    f"{bitext.name}: {stage}", done, total
                ),
            )
        return (
            read_bitext(staged, "pipes"),
            lambda pairs, words, first: model.training_block(first, first + len(pairs)),
        )

    def _write_words(
        self, pairs: Iterator[SentencePair], stream: TextIO, name: str
    ) -> Iterator[WordPair]:
        """Yield the words of pairs while writing them to a stream."""
        for number, pair in enumerate(pairs):
            if number % PROGRESS_PAIRS == 0:
                self.progress(f"{name}: reading", number, None)
            stream.write(f"{pair.src} ||| {pair.tgt}\n")
            yield pair.src.split(" "), pair.tgt.split(" ")

    def _describe(self, bitext: BitextSource) -> dict[str, Any]:
        """Return how a bitext was linked, for the report."""
        entry: dict[str, Any] = {
            "files": [Path(path).name for path in bitext.paths],
            "languages": None if bitext.languages is None else "-".join(bitext.languages),
            "split": "spaces" if bitext.tokenized else "rules",
        }
        if bitext.links is not None:
            entry["links"] = Path(bitext.links).name
        elif isinstance(self.aligner, str):
            entry |= {
                "aligner": self.aligner,
                "symmetrize": self.symmetrize,
                "stem": self.stem,
            }
        else:
            details = (getattr(self.aligner, name, None) for name in ("method", "layer"))
            known = (str(detail) for detail in details if detail is not None)
            entry["aligner"] = " ".join([type(self.aligner).__name__, *known])
        return entry | asdict(self.rules)

    def _check_output(self, bitexts: Sequence[BitextSource], *, overwrite: bool) -> None:
        """Raise InputError if the output would replace the input or, unasked, older output."""
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError("this is a file", file=self.folder, fix="name a folder")
        _read_report(self.folder)
        paths = [self.folder / f"{b.name}.{kind}" for b in bitexts for kind in ("text", "links")]
        written = {os.path.realpath(path) for path in (*paths, self.folder, self.folder / REPORT)}
        if self.skip_bad is not None and os.path.realpath(self.skip_bad) in written:
            problem = "the same path is given for -o and --skip-bad"
            raise InputError(problem, file=self.skip_bad, fix="name another file")
        inputs = {
            os.path.realpath(path)
            for b in bitexts
            for path in (*b.paths, b.links)
            if path is not None
        }
        for path in paths:
            if os.path.realpath(path) in inputs:
                problem = "the file would be both input and output"
                raise InputError(problem, file=path, fix="name another folder")
            if path.exists() and not overwrite:
                fix = "add --overwrite, name another folder, or pass only the remaining bitexts"
                raise InputError("the file exists", file=path, fix=fix)

    def _check_input(self, bitexts: Sequence[BitextSource]) -> Mapping[str, int]:
        """Read all input, so that invalid lines are known before the work; count the lines."""
        n_lines: dict[str, int] = {}
        missing = {*(self.rules.include_tags or ()), *self.rules.exclude_tags}
        known: dict[str, None] = {}
        with ExitStack() as stack:
            stream = None
            if self.skip_bad is not None:
                stream = stack.enter_context(write_atomically(self.skip_bad))
            for bitext in bitexts:
                number = 0
                skipped = None if stream is None else _SkippedLines(stream, bitext.file)
                for number, (pair, _) in enumerate(bitext.read_lines(skipped), start=1):
                    if missing and pair.tag is not None and pair is not SKIPPED:
                        missing.discard(pair.tag)
                        if len(known) < N_TAGS_SHOWN:
                            known[pair.tag] = None
                    if number % PROGRESS_PAIRS == 0:
                        self.progress(f"{bitext.name}: checking", number, None)
                n_lines[bitext.name] = number
                if number == 0:
                    problem = "the file has no sentence pairs"
                    raise InputError(problem, file=bitext.file, fix="leave it out")
        if missing:  # probably a typing error: text with the intended tag would stay
            tags = ", ".join(map(repr, sorted(missing)))
            others = ", ".join(known) or "none (tags are the third column of a TSV file)"
            message = f"no pair has the tag {tags}; the tags in the text are: {others}"
            warnings.warn(message, AlignWarning, stacklevel=4)
        return n_lines


class _SkippedLines(SkippedLines):
    """Lists invalid lines with the name of their file."""

    def __init__(self, stream: TextIO, file: str) -> None:
        super().__init__(stream)
        self.file = file

    def __call__(self, number: int, reason: str, text: str) -> None:
        if self.stream is not None:
            self.stream.write(f"{self.file}\t")
        super().__call__(number, reason, text)


def _parse_given(
    pairs: Sequence[SentencePair], words: Sequence[WordPair], bitext: BitextSource
) -> AlignedBlock:
    """Read the links in the tags of pairs: the number of the line, a tab, and the links."""
    assert bitext.links is not None
    numbers, lines = zip(*((pair.tag or "").split("\t", 1) for pair in pairs), strict=True)
    n_src, n_tgt = (np.array([len(pair[side]) for pair in words]) for side in (0, 1))
    try:
        packed = pack_links(lines, n_src, n_tgt, bitext.links, list(map(int, numbers)))
    except InputError as error:
        fix = error.fix
        if "words" in error.problem:
            how = "at spaces" if bitext.tokenized else "by the rules of the languages"
            fix = f"the text is split into words {how}: check --tokenized"
        raise InputError(error.problem, file=error.file, line=error.line, fix=fix) from None
    src, tgt, weights = unpack_links(packed.ids.astype(np.int64))
    owners = np.repeat(np.arange(len(pairs)), packed.lengths)
    scores = (weights / FULL_WEIGHT).astype(np.float32)
    links = Links(owners, src, tgt, scores, len(pairs))
    return AlignedBlock(links, AlignReport(len(pairs), len(src)))


def _read_report(folder: Path) -> dict[str, Any]:
    """Read the entries of the bitexts that are still in a folder."""
    path = folder / REPORT
    if not path.exists():
        return {}
    try:
        content = read_json(path, dict)
        is_report = content["format"] == FORMAT
        for entry in content["bitexts"].values() if is_report else ():
            LinkReport.from_dict(entry)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        is_report = False
    if not is_report:
        problem = "the file is not a report of linked bitext"
        raise InputError(problem, file=path, fix="write to another folder")
    bitexts = content["bitexts"].items()
    return {name: entry for name, entry in bitexts if (folder / f"{name}.text").exists()}


def _write_report(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the entries of all bitexts in a folder, and their sum."""
    total = LinkReport.total(map(LinkReport.from_dict, entries.values()))
    bitexts = {name: entries[name] for name in sorted(entries)}
    content = {"format": FORMAT, "bitexts": bitexts, "total": total.to_dict()}
    with write_atomically(folder / REPORT) as stream:
        stream.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")


def _are_sides(files: Sequence[PathLike], format: BitextFormat) -> bool:
    """Return whether files are the two sides of one bitext, such as news.en and news.de."""
    if format == "moses" and len(files) != 2:
        problem = f"the format moses needs two files, but there are {len(files)}"
        raise InputError(problem, fix="pass the two sides of one bitext")
    are_whole = any(SUFFIXES.search(str(f)) or infer_languages(f) is not None for f in files)
    is_named = len(files) == 2 and infer_languages(files) is not None and not are_whole
    return format == "moses" or (format == "auto" and is_named)


def _is_writable(text: str) -> bool:
    """Return whether a reader of `a ||| b` lines would find the same words again."""
    if text.count(" ") >= MAX_WORDS or "|||" in text:
        return False
    # A byte order mark at the start of a file is removed by readers.
    return text.isprintable() or (text[0] != "\ufeff" and text.split() == text.split(" "))


def _to_list(paths: PathLike | Sequence[PathLike]) -> list[PathLike]:
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)
