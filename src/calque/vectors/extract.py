"""Extract static word vectors from a frozen encoder and a corpus of one language."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from calque.errors import InputError, explain_os_error, first_line
from calque.io.files import (
    PathLike,
    SkipBad,
    check_output_file,
    check_skip_list,
    display_name,
    open_skip_list,
    write_atomically,
)
from calque.io.locks import lock_output
from calque.io.resumable import (
    add_resume_note,
    check_own_files,
    check_same_settings,
    partial_folder,
    unfinished_run_error,
    warn_of_damage,
)
from calque.io.structured import read_json
from calque.io.tensor_files import read_tensors
from calque.io.word_vectors import counts_path
from calque.models.inference import device_of, load_encoder
from calque.tokens.tokenizer import boundary_ids
from calque.types import count_progress
from calque.vectors.corpus import (
    CONTENTS,
    PIECES,
    SENTENCES,
    CorpusFilter,
    CorpusReader,
    CorpusReport,
    VocabularyLimits,
    WordCorpus,
    number_corpus,
)
from calque.vectors.occurrences import (
    OccurrenceBlock,
    embed_occurrences,
    find_occurrences,
    plan_block,
)
from calque.vectors.static import WordVectors
from calque.vectors.x2static import (
    PoolingLearner,
    StaticLearner,
    X2StaticLearner,
    X2StaticSettings,
)

if TYPE_CHECKING:
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.types import Progress

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

METHODS = ("x2static", "pooling")
MAX_LENGTH = 200  # as in the release of X2Static
SETTINGS, STATE, DRAFT = "settings.json", "state.safetensors", "state.draft"
OWN_FILES = re.compile(
    rf"({SENTENCES}|{PIECES})\.(ids|offsets)\.npy|\.calque-\w+\.partial"
    r"|\.tmp\w+"  # what safetensors was writing
    rf"|{re.escape(CONTENTS)}|{re.escape(SETTINGS)}|{re.escape(STATE)}|{re.escape(DRAFT)}"
)
# The state of 200,000 words with 768 dimensions is 1.8 GB.
SECONDS_BETWEEN_SAVES = 300.0


@dataclass(frozen=True, slots=True)
class ExtractResult:
    """Where the vectors were written, what was read, and what was learned.

    `loss` is the mean over the `n_targets` of the last epoch. `n_unlearned` words were never a
    target, so that their vectors are random. `n_truncated` sentences lost `n_lost_words` words, and
    `n_empty` sentences were left without words; `n_skipped` lines were invalid.
    """

    output: Path
    corpus: CorpusReport
    n_skipped: int
    n_empty: int
    n_truncated: int
    n_lost_words: int
    n_words: int
    n_running_words: int
    layer: int
    is_resumed: bool
    n_spaced: int
    n_targets: int = 0
    n_unlearned: int = 0
    loss: float | None = None


def extract_vectors(
    corpus: PathLike | Sequence[PathLike],
    *,
    language: str,
    output: PathLike,
    method: str = "x2static",
    model: str | Path | Encoder | None = None,
    layer: int | None = None,
    context: str = "others",
    epochs: int = 5,
    negatives: int = 10,
    subsample: float = 5e-6,
    learning_rate: float = 1e-3,
    batch_sentences: int = 128,
    seed: int = 0,
    max_words: int = 200_000,
    min_count: int = 10,
    max_length: int = MAX_LENGTH,
    keep_case: bool = False,
    tokenized: bool = False,
    sentence_lines: bool = False,
    min_tokens: int = 7,
    min_sentences: int = 2,
    max_sentences: int = 1_000_000,
    no_filter: bool = False,
    binary: bool = False,
    resume: bool = False,
    skip_bad: PathLike | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> ExtractResult:
    """Learn one vector per word from the hidden states of an encoder, and write the vectors.

    The output is in word2vec format with the most frequent word first; OUTPUT.counts has the word
    counts. Until it is written, the work is kept in OUTPUT.partial and can be resumed.

    Args:
        corpus: One or several files of one language; plain, .gz, .xz, .zst, or "-".
        language: Language code, which decides how sentences and words are split.
        output: Output file.
        method: `x2static` (Gupta and Jaggi, 2021) or `pooling` (the mean state of a word).
        model: Model folder, hub name, `calque-mini` (the default) or a loaded model.
        layer: Layer: 0 is the embedding layer, -1 the last. Default: the middle layer.
        context: `others` (all tokens of the sentence but the word) or `all`.
        epochs: Number of passes over the text.
        negatives: Number of negative samples per word.
        subsample: t, where a word of frequency f is used with probability √(t/f) + t/f.
        learning_rate: Learning rate of Adam, which is constant.
        batch_sentences: Sentences per step.
        seed: Random seed.
        max_words: Maximum number of words that get a vector.
        min_count: Minimum number of occurrences of a word.
        max_length: Maximum number of tokens per sentence, including special tokens.
        keep_case: Do not convert the text to lower case.
        tokenized: Words are separated by spaces.
        sentence_lines: A line is a sentence, and blank lines end paragraphs. Default: a line is a
            paragraph.
        min_tokens: Drop sentences with fewer words.
        min_sentences: Drop paragraphs with fewer sentences.
        max_sentences: Stop after this many sentences; 0 means never.
        no_filter: Keep all sentences of all paragraphs.
        binary: Write the binary word2vec format instead of text.
        resume: Continue an interrupted run with the same output.
        skip_bad: Skip invalid lines and list them in this file.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        progress: Called with the stage, the sentences done and their number.

    Examples:
        >>> calque.extract_vectors("wiki.de.txt", language="de", output="de.vec")  # doctest: +SKIP
        ExtractResult(output=PosixPath('de.vec'), ...)
    """
    output = Path(output)
    files = [corpus] if isinstance(corpus, str | os.PathLike) else list(corpus)
    paths = [os.fspath(path) for path in files]
    skip_list = None if skip_bad is None else Path(skip_bad)
    if method not in METHODS:
        raise InputError(f"there is no method {method!r}", fix=f"choose from: {', '.join(METHODS)}")
    if str(output) == "-":
        raise InputError("vectors cannot be written to standard output", fix="name a file with -o")
    check_output_file(output, paths)
    for written in (output, counts_path(output)):
        check_skip_list(skip_list, paths, written)
    settings = None
    if method == "x2static":
        any_context: Any = context
        settings = X2StaticSettings(
            any_context, negatives, subsample, learning_rate, batch_sentences, epochs, seed
        )
    bounds = CorpusFilter(min_tokens, min_sentences, max_sentences or None)
    reader = CorpusReader(
        language,
        CorpusFilter.off() if no_filter else bounds,
        sentence_lines=sentence_lines,
        tokenized=tokenized,
        keep_case=keep_case,
    )
    limits = VocabularyLimits(max_words, min_count)
    encoder = load_encoder(model, device)
    number = encoder.check_layer(round(encoder.n_layers / 2) if layer is None else layer)
    n_special = sum(token is not None for token in boundary_ids(encoder.tokenizer))
    max_subwords = min(max_length, encoder.max_tokens) - n_special
    if max_subwords < 1:
        raise InputError(
            f"max_length={max_length} leaves no room for text", fix=f"choose more than {n_special}"
        )
    reader_settings = asdict(reader)
    run_settings: dict[str, Any] = {
        "input": [display_name(path) for path in paths],
        "bytes": [os.path.getsize(path) if os.path.isfile(path) else None for path in paths],
        "model": str(encoder.folder),
        **reader_settings.pop("filter"),
        **reader_settings,
        "method": method,
        **({} if settings is None else asdict(settings)),
        **asdict(limits),
        "layer": number,
        "max_length": max_length,
    }
    with ExtractionFolder(output, run_settings, resume=resume) as folder:
        words = WordCorpus.open(folder.path)
        if words is None:
            (folder.path / STATE).unlink(missing_ok=True)
            words = _read_corpus(
                encoder, paths, reader, limits, max_subwords, folder.path, skip_list, progress
            )
        learner = create_learner(words, encoder, settings)
        learn(encoder, words, learner, number, folder=folder, progress=progress)
        check_learned(learner)
        vectors = WordVectors(words.words, learner.vectors().cpu().numpy(), words.counts)
        n_spaced = vectors.save(output, binary=binary)
    return _report(output, words, learner, number, folder.is_resumed, n_spaced)


def create_learner(
    corpus: WordCorpus, encoder: Encoder, settings: X2StaticSettings | None
) -> StaticLearner:
    """Return the learner of X2Static or, without settings, of mean pooling."""
    device, n_dims = device_of(encoder), encoder.hidden_size
    if settings is None:
        return PoolingLearner(corpus, n_dims, device)
    return X2StaticLearner(corpus, n_dims, settings, device)


def learn(
    encoder: Encoder,
    corpus: WordCorpus,
    learner: StaticLearner,
    layer: int,
    *,
    folder: ExtractionFolder | None = None,
    progress: Progress | None = None,
) -> None:
    """Learn from a corpus block by block; the encoder runs up to the given layer."""
    size = learner.block_sentences
    n_blocks = -(-len(corpus) // size)
    order = lru_cache(maxsize=1)(learner.order)
    advance = count_progress(progress, "extracting", learner.n_epochs * len(corpus))
    start = 0
    if folder is not None and (saved := folder.read_state()) is not None:
        learner.restore(saved[0])
        start = saved[1]
        advance(start // n_blocks * len(corpus) + start % n_blocks * size)

    def plan(number: int) -> tuple[int, OccurrenceBlock]:
        index = order(number // n_blocks)[number % n_blocks * size :][:size]
        found = find_occurrences(corpus, index, learner.choose(number))
        return number, plan_block(encoder, corpus, found, learner.view)

    for number, planned in _run_ahead(plan, range(start, learner.n_epochs * n_blocks)):
        block = planned.to(device_of(encoder))
        learner.update(number, block, embed_occurrences(encoder, block, layer, learner.view))
        if folder is not None:
            folder.save_if_due(learner.state, number + 1)
        advance(len(block.n_found))


def check_learned(learner: StaticLearner) -> None:
    """Raise InputError if all vectors still have their initial values."""
    if isinstance(learner, X2StaticLearner) and not learner.is_learned.any():
        raise InputError(
            "no word was ever a target: each is alone in its sentences, or was left out by chance",
            fix="use more text, raise --subsample, or choose --method pooling",
        )


def _read_corpus(
    encoder: Encoder,
    paths: Sequence[str],
    reader: CorpusReader,
    limits: VocabularyLimits,
    max_subwords: int,
    folder: Path,
    skip_list: Path | None,
    progress: Progress | None,
) -> WordCorpus:
    report, advance = CorpusReport(), count_progress(progress, "reading", None)
    with ExitStack() as stack:
        skipped = open_skip_list(skip_list, stack)

        def skip_bad(path: PathLike) -> SkipBad | None:
            return skipped if skipped is None or len(paths) == 1 else skipped.of(path)

        def read() -> Iterator[list[str]]:
            for sentence in reader.read(paths, report, skip_bad):
                yield sentence
                advance(1)

        return number_corpus(
            encoder.tokenizer,
            read(),
            folder,
            max_subwords=max_subwords,
            limits=limits,
            get_counts=lambda: asdict(report) | {"n_bad": skipped.n_lines if skipped else 0},
        )


def _report(
    output: Path,
    corpus: WordCorpus,
    learner: StaticLearner,
    layer: int,
    is_resumed: bool,
    n_spaced: int,
) -> ExtractResult:
    counts = dict(corpus.counts_read)
    n_skipped = counts.pop("n_bad")
    n_targets, n_unlearned, loss = 0, 0, None
    if isinstance(learner, X2StaticLearner):
        n_targets, total = int(learner.totals[0]), float(learner.totals[1])
        n_unlearned, loss = int((~learner.is_learned).sum()), total / max(1, n_targets)
    return ExtractResult(
        output=output,
        corpus=CorpusReport(**counts),
        n_skipped=n_skipped,
        n_empty=corpus.truncated.n_empty,
        n_truncated=corpus.truncated.n_sentences,
        n_lost_words=corpus.truncated.n_words,
        n_words=len(corpus.words),
        n_running_words=int(corpus.counts.sum()),
        layer=layer,
        is_resumed=is_resumed,
        n_spaced=n_spaced,
        n_targets=n_targets,
        n_unlearned=n_unlearned,
        loss=loss,
    )


def _run_ahead(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Iterator[ResultT]:
    """Compute the next result in another thread while the current one is used."""
    with ThreadPoolExecutor(1) as pool:
        pending: Future[ResultT] | None = None
        for item in items:
            following = pool.submit(work, item)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


class ExtractionFolder:
    """`OUTPUT.partial/`: the numbered corpus, and from time to time the state of the learner.

    It is removed when the work is done, or if it fails before there is anything worth keeping.
    """

    def __init__(self, target: Path, settings: Mapping[str, Any], *, resume: bool = False) -> None:
        self.path, self.settings = partial_folder(target), dict(settings)
        self._saved_at = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(lock_output(self.path))
            self.is_resumed = self._open(resume)
            self._stack = stack.pop_all()

    def __enter__(self) -> ExtractionFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        has_state = self.is_resumed or (self.path / STATE).exists()
        has_corpus = (self.path / CONTENTS).exists() and not isinstance(error, InputError)
        with self._stack:  # unlocks the output
            if error is None or not (has_state or has_corpus):
                # First, so that the rest is not resumed if the process is killed here.
                (self.path / CONTENTS).unlink(missing_ok=True)
                shutil.rmtree(self.path, ignore_errors=True)
            elif isinstance(error, KeyboardInterrupt):
                add_resume_note(error, self.path)

    def save_if_due(self, state: Callable[[], Mapping[str, Tensor]], n_blocks: int) -> None:
        """Save the state after `n_blocks` blocks, unless one was saved a short time ago."""
        if time.monotonic() - self._saved_at < SECONDS_BETWEEN_SAVES:
            return
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state().items()}
        try:
            metadata = {"blocks": str(n_blocks), "digest": _digest_state(tensors, n_blocks)}
            save_file(tensors, self.path / DRAFT, metadata)
            with open(self.path / DRAFT, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(self.path / DRAFT, self.path / STATE)
        except (OSError, SafetensorError) as error:
            fix = "free some space, then use --resume"
            raise InputError(first_line(error), file=self.path / STATE, fix=fix) from error
        self._saved_at = time.monotonic()

    def read_state(self) -> tuple[dict[str, Tensor], int] | None:
        """Return the saved state and its number of blocks; None if it is missing or damaged."""
        path = self.path / STATE
        if not path.exists():
            return None
        try:
            tensors, metadata = read_tensors(path)
            n_blocks = int(metadata.get("blocks", "0")[:18])
            if metadata.get("digest") != _digest_state(tensors, n_blocks):
                raise InputError("the file is damaged", file=path)
        except (InputError, ValueError):
            warn_of_damage(path, "the file is damaged, and the vectors are learned from the start")
            return None
        return tensors, n_blocks

    def _open(self, resume: bool) -> bool:
        """Create the folder, or return True if it has a run to resume."""
        check_own_files(self.path, OWN_FILES)
        if (self.path / CONTENTS).exists():
            try:
                found = read_json(self.path / SETTINGS, dict)
            except InputError:
                warn_of_damage(self.path, "the run cannot be resumed and starts again")
            else:
                if not resume:
                    raise unfinished_run_error(self.path)
                check_same_settings(found, self.settings, self.path)
                return True
        try:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            raise explain_os_error(error, self.path) from error
        with write_atomically(self.path / SETTINGS) as stream:
            json.dump(self.settings, stream)
        return False


def _digest_state(tensors: Mapping[str, Tensor], n_blocks: int) -> str:
    digest = hashlib.blake2b(str(n_blocks).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
