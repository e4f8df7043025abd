"""Static word vectors out of a frozen encoder: X2Static, or the mean of a word's states."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from calque.models.static import WordVectors, write_vectors
from calque.text.files import (
    PathLike,
    SkipBad,
    SkippedLines,
    check_target,
    shown,
    write_atomically,
)
from calque.tools.embedder import device_of
from calque.tools.extraction_folder import SECONDS_BETWEEN, ExtractionFolder
from calque.tools.static_corpus import CorpusReader, CorpusReport
from calque.tools.static_learners import (
    Learner,
    PoolingLearner,
    PoolingSettings,
    X2StaticLearner,
    X2StaticSettings,
)
from calque.tools.static_vocabulary import VocabularyLimits, WordCorpus, number_corpus
from calque.tools.windows import marks_of
from calque.tools.word_contexts import (
    OccurrenceBlock,
    embed_occurrences,
    find_occurrences,
    plan_block,
)
from calque.types import InputError

if TYPE_CHECKING:
    from calque.models.encoder import Encoder

Method: TypeAlias = X2StaticSettings | PoolingSettings
Advance: TypeAlias = Callable[[int], None]
# Opens what shows how far a phase is: its name, and how many sentences it has if that is known.
ShowPhase: TypeAlias = Callable[[str, int | None], AbstractContextManager[Advance]]
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Subwords a sentence, its marks included, unless the model reads fewer: as in the release.
MAX_LENGTH = 200


@dataclass(frozen=True, slots=True)
class ExtractJob:
    """What is learnt from which text; without a layer, the middle one."""

    reader: CorpusReader
    method: Method = field(default_factory=X2StaticSettings)
    limits: VocabularyLimits = field(default_factory=VocabularyLimits)
    layer: int | None = None
    max_length: int = MAX_LENGTH

    def layer_of(self, encoder: Encoder) -> int:
        """Give the layer asked for, or the middle one."""
        middle = round(encoder.n_layers / 2)
        return encoder.check_layer(middle if self.layer is None else self.layer)

    def room_of(self, encoder: Encoder) -> int:
        """Count the subwords of the text that fit between the marks."""
        n_marks = sum(mark is not None for mark in marks_of(encoder))
        room = min(self.max_length, encoder.max_tokens) - n_marks
        if room < 1:
            problem = f"max_length={self.max_length} leaves no room for text"
            raise InputError(problem, fix=f"choose more than {n_marks}")
        return room

    def describe(self, encoder: Encoder, paths: Sequence[str]) -> dict[str, Any]:
        """List all that the vectors depend on, for a run that goes on with another's work."""
        reader, method = asdict(self.reader), type(self.method).__name__.removesuffix("Settings")
        sizes = [os.path.getsize(path) if os.path.isfile(path) else None for path in paths]
        return {
            "input": [shown(path) for path in paths],
            "bytes": sizes,
            "model": str(encoder.folder),
            **reader.pop("filter"),
            **reader,
            "method": method.lower(),
            **asdict(self.method),
            **asdict(self.limits),
            "layer": self.layer_of(encoder),
            "max_length": self.max_length,
        }


@dataclass(frozen=True, slots=True)
class ExtractReport:
    """What was read and learnt: `loss` is the mean of the last epoch over its `n_targets`.

    `n_unlearnt` words were never a target: their vectors are as they were drawn.
    """

    corpus: CorpusReport
    n_bad: int
    n_empty: int
    n_cut: int
    n_lost_words: int
    n_words: int
    n_running_words: int
    layer: int
    is_resumed: bool
    n_spaced: int
    n_targets: int = 0
    n_unlearnt: int = 0
    loss: float | None = None


def extract_vectors(
    encoder: Encoder,
    paths: Sequence[str],
    output: Path,
    job: ExtractJob,
    *,
    binary: bool = False,
    resume: bool = False,
    skip_bad: Path | None = None,
    show_phase: ShowPhase = lambda name, total: nullcontext(lambda n_done: None),
    seconds_between: float = SECONDS_BETWEEN,
) -> ExtractReport:
    """Learn the vectors of a text's words and write them, the most frequent first.

    Until they are written, the work lies in `OUTPUT.partial`, and can be gone on with.
    """
    check_output(output, paths)
    layer, room = job.layer_of(encoder), job.room_of(encoder)
    settings = job.describe(encoder, paths)
    with ExtractionFolder(
        output, settings, resume=resume, seconds_between=seconds_between
    ) as folder:
        corpus = WordCorpus.open(folder.path)
        if corpus is None:
            with show_phase("reading", None) as advance:
                corpus = _read_corpus(encoder, paths, job, room, folder.path, skip_bad, advance)
        learner = make_learner(corpus, encoder, job.method)
        with show_phase("extracting", learner.n_epochs * len(corpus)) as advance:
            learn(encoder, corpus, learner, layer, folder=folder, on_sentences=advance)
        check_learnt(learner)
        matrix = learner.vectors().cpu().numpy()
        vectors = WordVectors(corpus.words, matrix, corpus.counts)
        n_spaced = write_vectors(vectors, output, binary=binary)
    return _report(corpus, learner, layer, folder.is_resumed, n_spaced)


def make_learner(corpus: WordCorpus, encoder: Encoder, method: Method) -> Learner:
    """Prepare to learn the words of a corpus."""
    device, n_dims = device_of(encoder), encoder.hidden_size
    if isinstance(method, PoolingSettings):
        return PoolingLearner(corpus, n_dims, device)
    return X2StaticLearner(corpus, n_dims, method, device)


def learn(
    encoder: Encoder,
    corpus: WordCorpus,
    learner: Learner,
    layer: int,
    *,
    folder: ExtractionFolder | None = None,
    on_sentences: Advance = lambda n_done: None,
) -> None:
    """Go through a corpus block by block; the encoder runs no further than the layer."""
    size = learner.block_sentences
    n_blocks = -(-len(corpus) // size)
    order = lru_cache(maxsize=1)(learner.order)
    start = 0
    if folder is not None and (kept := folder.read_state()) is not None:
        learner.restore(kept[0])
        start = kept[1]
        on_sentences(start // n_blocks * len(corpus) + start % n_blocks * size)

    def plan(number: int) -> tuple[int, OccurrenceBlock]:
        index = order(number // n_blocks)[number % n_blocks * size :][:size]
        found = find_occurrences(corpus, index, learner.choose(number))
        return number, plan_block(encoder, corpus, found, learner.view)

    for number, planned in _run_ahead(plan, range(start, learner.n_epochs * n_blocks)):
        block = planned.to(device_of(encoder))
        learner.absorb(number, block, embed_occurrences(encoder, block, layer, learner.view))
        if folder is not None:
            folder.save_if_due(learner.state, number + 1)
        on_sentences(len(block.n_found))


def check_learnt(learner: Learner) -> None:
    """Refuse vectors that are all as they were drawn."""
    if isinstance(learner, X2StaticLearner) and not learner.is_learnt.any():
        raise InputError(
            "no word was ever learnt: each is alone in its sentences, or was left out by chance",
            fix="give more text, raise --subsample, or take --method pooling",
        )


def check_output(path: Path, paths: Sequence[str]) -> None:
    """Refuse an output that cannot be written, before the work begins."""
    if str(path) == "-":
        raise InputError("vectors go to a file", fix="name it with -o")
    check_target(path, paths)


def _read_corpus(
    encoder: Encoder,
    paths: Sequence[str],
    job: ExtractJob,
    room: int,
    folder: Path,
    skip_bad: Path | None,
    advance: Advance,
) -> WordCorpus:
    report = CorpusReport()
    with ExitStack() as stack:
        skipped = SkippedLines(
            None if skip_bad is None else stack.enter_context(write_atomically(skip_bad))
        )

        def choose(path: PathLike) -> SkipBad | None:
            if skip_bad is None:
                return None
            return skipped if len(paths) == 1 else skipped.of(path)

        sentences = job.reader.read(paths, report, choose)
        return number_corpus(
            encoder.tokenizer,
            _tell(sentences, advance),
            folder,
            room=room,
            limits=job.limits,
            figures=lambda: {**report.to_dict(), "n_bad": skipped.n_lines},
        )


def _report(
    corpus: WordCorpus, learner: Learner, layer: int, is_resumed: bool, n_spaced: int
) -> ExtractReport:
    figures = dict(corpus.figures)
    n_bad = figures.pop("n_bad")
    n_targets, n_unlearnt, loss = 0, 0, None
    if isinstance(learner, X2StaticLearner):
        n_targets, total = int(learner.figures[0]), float(learner.figures[1])
        n_unlearnt, loss = int((~learner.is_learnt).sum()), total / max(1, n_targets)
    return ExtractReport(
        corpus=CorpusReport(**figures),
        n_bad=n_bad,
        n_empty=corpus.cut.n_empty,
        n_cut=corpus.cut.n_sentences,
        n_lost_words=corpus.cut.n_words,
        n_words=len(corpus.words),
        n_running_words=int(corpus.counts.sum()),
        layer=layer,
        is_resumed=is_resumed,
        n_spaced=n_spaced,
        n_targets=n_targets,
        n_unlearnt=n_unlearnt,
        loss=loss,
    )


def _run_ahead(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """Work on one item in another thread while the result before it is used."""
    with ThreadPoolExecutor(1) as pool:
        pending: Future[ResultT] | None = None
        for item in items:
            coming = pool.submit(work, item)
            if pending is not None:
                yield pending.result()
            pending = coming
        if pending is not None:
            yield pending.result()


def _tell(sentences: Iterable[ItemT], advance: Advance) -> Iterator[ItemT]:
    for sentence in sentences:
        yield sentence
        advance(1)
