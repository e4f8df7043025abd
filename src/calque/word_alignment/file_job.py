"""Word links of a whole file: read once, aligned block by block, written in the order of its lines.

Memory does not grow with the file. The output is a temporary file that is renamed when it is
complete; an interrupted run can be resumed and gives the same bytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, fields
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast, get_args

import numpy as np

from calque.algorithms.calibration import bin_reliability
from calque.errors import InputError, check_choice
from calque.io.bitext import BitextFormat, BitextPaths, parse_language_pair, read_bitext
from calque.io.files import (
    PathLike,
    SkippedLines,
    check_skip_list,
    display_name,
    read_chunks,
    scan_lines,
    write_atomically,
)
from calque.io.links import GoldLinks, LinkFormat, format_links, read_gold
from calque.io.resumable import (
    INPUT_SIZE,
    BlockSink,
    StreamSink,
    check_resumable_output,
    compress_block,
    open_sink,
)
from calque.io.segmentation import SPACED_WORD, get_word_splitter
from calque.io.shards import Shard, join_shard_group
from calque.types import Reliability, SentencePair
from calque.word_alignment import build
from calque.word_alignment.build import AlignerOptions, BuiltAligner
from calque.word_alignment.protocol import AlignedBlock, Aligner, AlignReport, WordPair
from calque.word_alignment.scoring import LinkCounts, check_gold, count_links, judge_links

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.types import Progress
    from calque.word_alignment.sweep import Sweep

LanguagePair: TypeAlias = str | tuple[str, str]
SplitPair: TypeAlias = Callable[[SentencePair], WordPair]

INPUT_FORMATS = ("auto", "pipes", "tsv")
# The pairs of a block are sorted by length, aligned and written together; the second limit is for
# very long lines. Blocks depend on the text alone, never on where a run was interrupted.
BLOCK_PAIRS, BLOCK_CHARACTERS = 2048, 1 << 21
SKIPPED = SentencePair("", "", "skipped")


@dataclass(frozen=True, slots=True)
class AlignResult:
    """What `align_file` did.

    The counts are those of `AlignReport`; `n_skipped` lines were invalid, and `n_resumed` pairs
    had been aligned before an interruption. `gold` compares the links with gold links,
    `reliability` does so by their scores, and `sweep` by layer, method and sharpness. In the
    processes of torchrun other than the first `is_main` is false and all counts are 0.
    """

    output: Path | None
    aligner: str
    report: AlignReport = field(default_factory=AlignReport)
    n_skipped: int = 0
    n_resumed: int = 0
    gold: LinkCounts | None = None
    reliability: Reliability | None = None
    sweep: Sweep | None = None
    n_training_pairs: int = 0
    adapted_model: Path | None = None
    is_main: bool = True

    @property
    def n_pairs(self) -> int:
        """Number of sentence pairs."""
        return self.report.n_pairs

    @property
    def n_links(self) -> int:
        """Number of links."""
        return self.report.n_links


def align_file(
    src: PathLike,
    tgt: PathLike | None = None,
    *,
    output: PathLike | None = None,
    aligner: str | Aligner | None = None,
    model: str | Path | Encoder | None = None,
    method: str | None = None,
    layer: int | None = None,
    encode: str | None = None,
    sharpness: float | None = None,
    similarity: str | None = None,
    unit: str | None = None,
    scale_first: str | None = None,
    spelling: float | None = None,
    threshold: float | None = None,
    languages: LanguagePair | None = None,
    maps: PathLike | None = None,
    tokenize: LanguagePair | None = None,
    input_format: str = "auto",
    format: str = "pharaoh",
    scores: bool = False,
    gold: PathLike | None = None,
    gold_from_one: bool = False,
    sweep: bool = False,
    dev_every: int | None = None,
    store: bool = False,
    bitext: PathLike | Sequence[PathLike] = (),
    tokenize_bitext: LanguagePair | None = None,
    reverse_bitext: bool = False,
    save: PathLike | None = None,
    load: PathLike | None = None,
    symmetrize: str | None = None,
    stem: int | None = None,
    adapt: bool = False,
    adapt_steps: int | None = None,
    save_model: PathLike | None = None,
    skip_bad: PathLike | None = None,
    resume: bool = False,
    batch_tokens: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    progress: Progress | None = None,
) -> AlignResult:
    """Link the words of the sentence pairs in a file and write one line of links per pair.

    Examples:
        >>> calque.align_file("de-en.tsv", output="links", tokenize="de-en")  # doctest: +SKIP
        AlignResult(output=PosixPath('links'), aligner='neural argmax layer 8', ...)

    Args:
        src: File with lines `source ||| target` or `source TAB target`, or the source side if
            `tgt` is given. Files may be plain, .gz, .xz or .zst; "-" is standard input.
        tgt: File with the target side, line by line.
        output: File for the links; "-" is standard output. Default: links are not written, which
            is useful with `gold`.
        aligner: "neural", "hybrid", "eflomal" or "fast-align", or any object with the method
            `align_block`. Default: hybrid with `bitext` or `load`, neural otherwise.
        model: Model folder, hub name, `calque-mini` or a loaded model. Default: calque-mini.
        method: "ot", "itermax", "argmax", "match" or "probability". Default: stored with the model.
        layer: Layer of the encoder; 0 is the embedding layer, -1 the last. Default: stored with
            the model.
        encode: "joint" (both sides in one sequence) or "separate". Default: stored with the model.
        sharpness: Factor of the cosines in optimal transport, or exponent of dot products.
            Default: stored with the model.
        similarity: "cosine", or "dot" as in XLM-Align. Default: stored with the model.
        unit: "words" (means of subwords are compared) or "subwords" (words are linked if any of
            their subwords are, as in XLM-Align). Default: stored with the model.
        scale_first: "columns", or "rows" as in XLM-Align, for optimal transport. Default: stored
            with the model.
        spelling: Weight of the similarity of spelling beside the cosine; 0 leaves the choice to the
            encoder alone. Default: stored with the model, otherwise 0.25.
        threshold: Write only links with at least this score, which is a probability if the model
            is calibrated (see `sweep` and `store`). Default: for the method "probability" the
            threshold stored with the model, and 0 for others.
        languages: Languages whose linear maps are applied, such as "de-en".
        maps: Folder with the linear maps. Default: the model folder.
        tokenize: Languages such as "de-en" if the text is not yet split into words at spaces.
        input_format: "auto", "pipes" (source ||| target) or "tsv".
        format: "pharaoh" (i-j), "jsonl" (words, links and scores) or "words" (word-word).
        scores: Write the score of every link; jsonl always has them.
        gold: File with gold links (i-j sure, ipj possible); fills `AlignResult.gold` and
            `AlignResult.reliability`.
        gold_from_one: The words in `gold` are counted from 1 instead of 0.
        sweep: Instead of writing links, score every layer, method and sharpness against `gold`,
            and calibrate the scores of the best settings.
        dev_every: With `sweep`, choose on every Nth pair and score the choice on the others.
        store: With `sweep`, store the best settings in the config.json of the model folder.
        bitext: More sentence pairs to train on, besides the file itself.
        tokenize_bitext: Languages for splitting `bitext` into words. Default: as `tokenize`.
        reverse_bitext: The first side of `bitext` is the second side of the file.
        save: Folder for the trained statistical model.
        load: Folder of a statistical model saved earlier.
        symmetrize: How eflomal's two directions are combined. Default: grow-diag-final-and.
        stem: Statistical aligners treat words with the same first `stem` letters as one word.
            Default: 5; 0 distinguishes all words.
        adapt: Train a copy of the encoder before it is used, on the links that it finds in the
            text and the bitext, together with the statistical aligner if there is one.
        adapt_steps: Number of training steps. Default: 500 on a GPU, 200 on a CPU.
        save_model: Folder for the adapted encoder, which is written to `save_model/run/model`.
        skip_bad: List invalid lines in this file and give them no links, instead of stopping.
        resume: Continue an interrupted run with the same output.
        batch_tokens: Tokens per batch. Default: chosen for the device.
        device: "auto", "cpu", "cuda", "cuda:1", ...
        precision: "fp32", "bf16", or "auto": bf16 on CUDA, fp32 elsewhere.
        progress: Called with stage, pairs done and pairs in total during the work.
    """
    check_choice("--format", format, get_args(LinkFormat))
    check_choice("--input-format", input_format, INPUT_FORMATS)
    more = (bitext,) if isinstance(bitext, str | os.PathLike) else tuple(bitext)
    options = AlignerOptions(
        aligner=aligner if isinstance(aligner, str) else "hybrid" if more or load else "neural",
        model=model,
        method=method,
        layer=layer,
        encode=encode,
        sharpness=sharpness,
        similarity=similarity,
        unit=unit,
        scale_first=scale_first,
        spelling=spelling,
        threshold=threshold,
        batch_tokens=batch_tokens,
        device=device,
        precision=precision,
        bitext=tuple(os.fspath(path) for path in more),
        save=_path(save),
        load=_path(load),
        symmetrize=symmetrize,
        stem=stem,
        adapt=adapt,
        adapt_steps=adapt_steps,
        save_model=_path(save_model),
        languages=parse_pair(languages),
        maps=None if maps is None else os.fspath(maps),
    )
    for is_given, option in (
        (reverse_bitext, "--reverse-bitext"),
        (tokenize_bitext is not None, "--tokenize-bitext"),
    ):
        if is_given and not options.bitext:
            raise InputError(f"{option} needs --bitext", fix=f"add --bitext, or drop {option}")
    split = build_splitter(parse_pair(tokenize))
    split_bitext = split if tokenize_bitext is None else build_splitter(parse_pair(tokenize_bitext))
    for path in options.bitext:
        next(scan_lines(path), None)  # a missing file is reported before any work
    job = _FileJob(
        paths=(src,) if tgt is None else (src, tgt),
        format=cast(BitextFormat, input_format),
        target=None if output is None or os.fspath(output) == "-" else Path(output),
        skip_bad=_path(skip_bad),
        resume=resume,
    )

    def read_more() -> Iterator[WordPair]:
        for path in options.bitext:
            for pair in read_bitext(path, job.format):
                yield split_bitext(SentencePair(pair.tgt, pair.src) if reverse_bitext else pair)

    if sweep:
        _check_sweep(job, options, gold, dev_every, store=store, writes=output is not None)
        known = read_gold(cast(PathLike, gold), from_one=gold_from_one)
        return _sweep(job, options, split, known, dev_every, progress, store=store)
    if dev_every is not None or store:
        option = "--dev-every" if dev_every is not None else "--store"
        raise InputError(f"{option} works with --sweep only", fix="add --sweep, or drop it")
    with join_shard_group() as shard:
        inputs = [
            os.fspath(path) for path in (*job.paths, *options.bitext, gold) if path is not None
        ]
        shard.run_on_main(
            lambda: job.check(
                shard, inputs, is_trained=options.is_trained, is_scored=gold is not None
            )
        )
        scorer = None
        if gold is not None:
            known = read_gold(gold, from_one=gold_from_one)
            scorer = _GoldScorer(known, display_name(job.paths[0]))
        if shard.n_ranks > 1:  # an invalid line must stop all processes before they start
            total = shard.run_on_main(lambda: sum(1 for _ in job.read()))
        else:
            total = None if progress is None or not job.is_rereadable else job.count_lines()
        with ExitStack() as stack:
            pairs = job.read(stack.enter_context(job.list_skipped(shard)))
            pairs = chain(list(islice(pairs, 1)), pairs)  # errors come before the model is loaded
            if aligner is None or isinstance(aligner, str):
                built = build.build_aligner(
                    options, lambda: map(split, job.read()), read_more, progress
                )
            else:
                built = BuiltAligner(aligner, type(aligner).__name__, BLOCK_PAIRS, options)
            settings = {
                INPUT_SIZE: job.input_size,
                "input": input_format,
                "skip_bad": skip_bad is not None,
                "format": format,
                "scores": scores,
                "tokenize": None if tokenize is None else "-".join(parse_pair(tokenize) or ()),
                "block_pairs": built.block_pairs,
                **(built.to_settings() if job.target is not None else {}),
            }
            sink: BlockSink = StreamSink()
            if output is not None:
                opened = open_sink(job.target, settings, resume=resume, shard=shard)
                sink = stack.enter_context(opened)
            report, n_skipped, n_resumed = write_links(
                built.aligner,
                pairs,
                sink,
                split=split,
                format=cast(LinkFormat, format),
                scores=scores,
                block_pairs=built.block_pairs,
                suffix="" if job.target is None else job.target.suffix,
                scorer=scorer,
                progress=progress if shard.is_main else None,
                n_lines=total,
            )
    return AlignResult(
        output=None if output is None else Path(output),
        aligner=built.name,
        report=report,
        n_skipped=n_skipped,
        n_resumed=n_resumed,
        gold=None if scorer is None else scorer.counts,
        reliability=None if scorer is None else scorer.measure_reliability(),
        n_training_pairs=built.n_training_pairs,
        adapted_model=built.adapted_model,
        is_main=shard.is_main,
    )


def write_links(
    aligner: Aligner,
    pairs: Iterable[SentencePair],
    sink: BlockSink,
    *,
    split: SplitPair | None = None,
    format: LinkFormat = "pharaoh",
    scores: bool = False,
    block_pairs: int = BLOCK_PAIRS,
    suffix: str = "",
    scorer: _GoldScorer | None = None,
    progress: Progress | None = None,
    n_lines: int | None = None,
) -> tuple[AlignReport, int, int]:
    """Align a stream of pairs into a sink; `suffix` is that of a compressed output file.

    Returns the counts, how many lines were skipped, and how many pairs an earlier run aligned.
    """
    split = split or build_splitter(None)
    pairs = iter(pairs)
    n_done = 0
    for block in cut_blocks(pairs, block_pairs):
        if scorer is not None:
            scorer.check_lines(n_done + len(block), pairs)
        if sink.begin_block(_encode_block(block)):
            words = [split(pair) for pair in block]
            aligned = aligner.align_block(words, n_done)
            if scorer is not None:
                scorer.score(n_done, words, aligned)
            lines = format_links(aligned.links, words, format, scores=scores)
            n_skipped = sum(pair is SKIPPED for pair in block)
            content = "".join(line + "\n" for line in lines).encode()
            sink.append(compress_block(content, suffix), (*astuple(aligned.report), n_skipped))
        n_done += len(block)
        if progress is not None:
            progress("aligning", n_done, n_lines)
    if scorer is not None:
        check_gold(scorer.gold, n_done, scorer.text)
    n_counts = len(fields(AlignReport)) + 1
    *counts, n_skipped = sink.finish(compress_block(b"", suffix)) or (0,) * n_counts
    return AlignReport(*counts), n_skipped, sink.counts_before[0] if sink.counts_before else 0


def read_pairs(
    paths: BitextPaths, format: BitextFormat = "auto", skipped: SkippedLines | None = None
) -> Iterator[SentencePair]:
    """Read one pair per line; a line reported to `skipped` gives the pair `SKIPPED`."""
    n_missing = 0

    def skip(number: int, reason: str, text: str) -> None:
        nonlocal n_missing
        n_missing += 1
        if skipped is not None:
            skipped(number, reason, text)

    for pair in read_bitext(paths, format, skip_bad=None if skipped is None else skip):
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
    """Split a stream of pairs into blocks of limited size."""
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


def build_splitter(languages: tuple[str, str] | None) -> SplitPair:
    """Return a function that splits pairs into words: by language, or at spaces if None."""
    if languages is None:
        find_words = SPACED_WORD.findall
        return lambda pair: (find_words(pair.src), find_words(pair.tgt))
    src, tgt = map(get_word_splitter, languages)
    return lambda pair: (src(pair.src), tgt(pair.tgt))


def parse_pair(languages: LanguagePair | None) -> tuple[str, str] | None:
    """Return two languages given as one string, such as "de-en", or as a pair."""
    return parse_language_pair(languages) if isinstance(languages, str) else languages


@dataclass(frozen=True, slots=True)
class _FileJob:
    """The files that are read and written."""

    paths: tuple[PathLike, ...]
    format: BitextFormat
    target: Path | None
    skip_bad: Path | None
    resume: bool

    @property
    def is_rereadable(self) -> bool:
        """Whether the input can be read twice, unlike a pipe; a missing file counts as readable."""
        files = [Path(path) for path in self.paths if os.fspath(path) != "-"]
        are_files = (path.is_file() or not path.exists() for path in files)
        return len(files) == len(self.paths) and all(are_files)

    @property
    def input_size(self) -> int | None:
        """Size of the input in bytes, if it can be read again by a resumed run."""
        return sum(map(os.path.getsize, self.paths)) if self.is_rereadable else None

    def check(
        self, shard: Shard, inputs: Sequence[str], *, is_trained: bool, is_scored: bool
    ) -> None:
        """Raise InputError for options that cannot be combined and files that cannot be written."""
        if is_trained and not self.is_rereadable:
            problem = "a pipe can be read only once, but training reads the input first"
            raise InputError(problem, fix="pass files")
        if is_trained and (self.resume or shard.n_ranks > 1):
            raise InputError(
                "training again would give different links",
                fix="train in one process with --save DIR, then align with --load DIR",
            )
        if self.resume and self.target is None:
            raise InputError("--resume needs an output file", fix="name it with -o")
        if self.resume and not self.is_rereadable:
            raise InputError("a pipe cannot be resumed, because it is read once", fix="pass files")
        if self.resume and is_scored:
            problem = "--gold cannot score links of an earlier run"
            raise InputError(problem, fix="drop --resume or --gold")
        if shard.n_ranks > 1 and (self.target is None or not self.is_rereadable):
            problem = "several processes need input files and an output file"
            raise InputError(problem, fix="pass files, and name one with -o")
        if shard.n_ranks > 1 and is_scored:
            raise InputError("--gold works in one process only", fix="run without torchrun")
        if self.target is not None:
            check_resumable_output(self.target, inputs, resume=self.resume)
        check_skip_list(self.skip_bad, inputs, self.target)

    def read(self, skipped: SkippedLines | None = None) -> Iterator[SentencePair]:
        """Read the pairs; with `skip_bad`, invalid lines are skipped, and reported if asked for."""
        if skipped is None and self.skip_bad is not None:
            skipped = SkippedLines()
        return read_pairs(self.paths, self.format, skipped)

    def count_lines(self) -> int:
        """Count the line ends of the first file, for a progress bar."""
        return sum(chunk.count(b"\n") for chunk in read_chunks(self.paths[0]))

    @contextmanager
    def list_skipped(self, shard: Shard) -> Iterator[SkippedLines | None]:
        """Collect skipped lines; when the block ends without error, write them to `skip_bad`.

        Until then they are in a file without a name, of which nothing remains after a kill.
        """
        if self.skip_bad is None or not shard.is_main:
            yield None
            return
        with tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n") as stream:
            yield SkippedLines(stream)
            stream.seek(0)
            with write_atomically(self.skip_bad) as output:
                output.writelines(stream)


class _GoldScorer:
    """Compares links with gold links block by block; `text` is the name of the input."""

    def __init__(self, gold: GoldLinks, text: str) -> None:
        self.gold, self.text, self.counts = gold, text, LinkCounts()
        self._scores = [np.zeros(0, dtype=np.float32)]
        self._is_right = [np.zeros(0, dtype=bool)]

    def check_lines(self, n_read: int, rest: Iterator[SentencePair]) -> None:
        """Raise InputError if more pairs were read than there are lines of gold links."""
        if n_read > self.gold.n_pairs:
            check_gold(self.gold, n_read + sum(1 for _ in rest), self.text)

    def score(self, first: int, words: list[WordPair], aligned: AlignedBlock) -> None:
        """Add the counts of a block that starts with pair `first`."""
        self.gold.check_words(words, first)
        known = self.gold.select(first, first + len(words))
        self.counts += count_links(aligned.links, known.sure, known.possible)
        is_sure, is_possible = judge_links(aligned.links, known)
        is_clear = is_sure | ~is_possible
        self._scores.append(aligned.links.scores[is_clear])
        self._is_right.append(is_sure[is_clear])

    def measure_reliability(self) -> Reliability:
        """Compare the scores of links with the share of sure gold links.

        Links that are only possible are neither right nor wrong, and are left out.
        """
        return bin_reliability(np.concatenate(self._scores), np.concatenate(self._is_right))


def _check_sweep(
    job: _FileJob,
    options: AlignerOptions,
    gold: PathLike | None,
    dev_every: int | None,
    *,
    store: bool,
    writes: bool,
) -> None:
    if options.aligner != "neural" or options.adapt:
        problem = "--sweep tries the layers of an encoder, and trains nothing"
        raise InputError(problem, fix="use --aligner neural without --adapt")
    if gold is None:
        raise InputError("--sweep needs gold links", fix="pass them with --gold")
    if writes or job.resume or job.skip_bad is not None:
        raise InputError("--sweep writes no files", fix="drop -o, --resume and --skip-bad")
    if options.threshold is not None:
        problem = "--sweep chooses the threshold of the probabilities itself"
        raise InputError(problem, fix="drop --threshold")
    if dev_every is not None and dev_every < 2:
        problem = f"--dev-every {dev_every} leaves no pairs for the test"
        raise InputError(problem, fix="pass 2 or more")
    if store and (not isinstance(options.model, str | Path) or not Path(options.model).is_dir()):
        problem = "--store changes the config.json of a model folder, and none was given"
        raise InputError(problem, fix="pass the folder with --model")


def _sweep(
    job: _FileJob,
    options: AlignerOptions,
    split: SplitPair,
    gold: GoldLinks,
    dev_every: int | None,
    progress: Progress | None,
    *,
    store: bool,
) -> AlignResult:
    """Score every layer, method and sharpness, and store the best ones if asked to."""
    from calque.word_alignment.sweep import store_choice, sweep_settings

    pairs = [split(pair) for pair in job.read()]
    check_gold(gold, len(pairs), display_name(job.paths[0]))
    gold.check_words(pairs)
    aligner, choices = build.build_sweep(options)
    found = sweep_settings(aligner, choices, pairs, gold, dev_every=dev_every, progress=progress)
    if store:
        store_choice(Path(cast(PathLike, options.model)), found.best)
    return AlignResult(None, "sweep", AlignReport(len(pairs)), sweep=found)


def _encode_block(block: list[SentencePair]) -> bytes:
    """Return bytes that are equal only for blocks with the same pairs."""
    texts = ("\0\0" if pair is SKIPPED else f"{pair.src}\0{pair.tgt}" for pair in block)
    return "\n".join(texts).encode()


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)
