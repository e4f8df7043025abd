"""From text files to tokenized corpora on disk: read, clean, encode in parallel, store.

A prepared folder has a subfolder per corpus (`sideK.ids.npy`, `sideK.offsets.npy`, `corpus.json`),
the tokenizer, and `prepared.json`, which lists the corpora. Bitext with links has three more stores
(`words0`, `words1`, `links`); words with vectors have `vectors.npy`. The JSON files have the
checksums of the others. Text is processed in blocks, so that memory use is constant.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from calque.errors import InputError
from calque.io.bitext import read_bitext, read_sentences
from calque.io.checksums import check_files, describe_files, format_record, read_record
from calque.io.cleaning import (
    CleaningReport,
    CleaningRules,
    clean_pairs,
    clean_sentences,
    normalize_text,
)
from calque.io.files import PathLike, read_lines, write_atomically
from calque.io.outputs import write_folder
from calque.io.processes import block_stop_signals, run_in_thread, start_worker
from calque.io.word_vectors import VectorBlock, iterate_vectors
from calque.tokens.linked import STORES, encode_linked, read_linked
from calque.tokens.ragged import Ragged, reorder
from calque.tokens.sampling import language_probabilities
from calque.tokens.store import VECTORS, write_store, write_vector_store
from calque.tokens.tokenizer import (
    disable_truncation_and_padding,
    train_tokenizer,
    write_tokenizer,
)
from calque.tokens.words import WordEncoder, build_sentence_encoder

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    from calque.types import Progress

    Matrix = npt.NDArray[np.float32]

BLOCK = 4096
INDEX, CORPUS = "prepared.json", "corpus.json"
TOKENIZER, TOKENIZER_RECIPE = "tokenizer", "tokenizer_recipe.json"
PREPARE = "run `calque prepare`"
Example = tuple[str, ...]
Work: TypeAlias = Callable[[list[Example]], list[Ragged]]
Encode: TypeAlias = Callable[[Iterator[list[Example]], Work], Iterator[list[Ragged]]]


@dataclass(frozen=True, slots=True)
class TextSource:
    """One corpus before preparation: its files and its language or pair of languages.

    `links` is a file of word links, one line per pair. With `vectors` the file has words with their
    vectors, of which the first `max_words` are used.
    """

    paths: tuple[Path, ...]
    languages: tuple[str, ...]
    keep_tags: tuple[str, ...] | None = None
    exclude_tags: tuple[str, ...] = ()
    weight: float = 1.0
    links: Path | None = None
    vectors: bool = False
    max_words: int | None = None

    @property
    def name(self) -> str:
        """Return a name by languages, tags and paths, so that no two corpora share a folder."""
        key: tuple[Any, ...] = (self.paths, self.keep_tags, self.exclude_tags)
        if self.links is not None:
            key = (*key, self.links)
        if self.vectors:
            key = (*key, VECTORS, self.max_words)
        digest = hashlib.sha256(repr(key).encode())
        return f"{'-'.join(self.languages)}.{digest.hexdigest()[:8]}"


@dataclass(frozen=True)
class PreparedCorpus:
    """The description of a tokenized corpus in `corpus.json`.

    `dimensions` is the size of the vectors of a corpus of words, and 0 for text. `files` are the
    sizes and checksums of the stores.
    """

    name: str
    languages: tuple[str, ...]
    weight: float
    n_examples: int
    n_tokens: tuple[int, ...]
    fingerprint: str
    cleaning: dict[str, Any] = field(default_factory=dict)
    linked: bool = False
    dimensions: int = 0
    files: dict[str, Any] = field(default_factory=dict)


class HeldOutPairs:
    """Sentence pairs that must not be used for training; counts the examples that were dropped.

    Texts are compared after normalization, even if the cleaning rules do not normalize.
    """

    def __init__(self, pairs: Iterable[Example] = ()) -> None:
        self.keys = {_normalize(pair) for pair in pairs}
        self._unspaced_keys = set(map(_remove_spaces, self.keys))
        self.n_dropped = 0

    def digest(self) -> bytes:
        """Return bytes that identify the held-out pairs; none if there are no pairs."""
        return repr(sorted(self.keys)).encode() if self.keys else b""

    def filter(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Yield the examples that are not held out, in either direction.

        Spaces are ignored in examples with links, whose sentences are split into words.
        """
        for example in examples:
            if self.keys and self._contains(example):
                self.n_dropped += 1
            else:
                yield example

    def _contains(self, example: Example) -> bool:
        key, keys = _normalize(example[:2]), self.keys
        if len(example) > 2:
            key, keys = _remove_spaces(key), self._unspaced_keys
        return key in keys or key[::-1] in keys


def _normalize(example: Example) -> Example:
    return tuple(map(normalize_text, example))


def _remove_spaces(example: Example) -> Example:
    return tuple("".join(text.split()) for text in example)


def read_held_out_pairs(path: Path | None) -> HeldOutPairs:
    """Read pairs to exclude from training: a TSV file whose last two columns are the sentences."""
    if path is None:
        return HeldOutPairs()
    return HeldOutPairs(tuple(line.split("\t")[-2:]) for line in read_lines(path))


def prepare_corpora(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    rules: CleaningRules,
    held_out: HeldOutPairs | None = None,
    n_workers: int = 1,
    progress: Progress | None = None,
) -> list[PreparedCorpus]:
    """Tokenize every source into the folder; up-to-date corpora in the folder are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # written again when all corpora are complete
    held_out = held_out or HeldOutPairs()
    save_tokenizer(tokenizer, folder / TOKENIZER)
    stamp = hashlib.sha256((folder / TOKENIZER / "tokenizer.json").read_bytes())
    stamp.update(repr(rules).encode() + held_out.digest())
    prepared: list[PreparedCorpus] = []
    try:
        with _start_encoder(folder / TOKENIZER, n_workers) as encode:
            for source in sources:
                fingerprint = _fingerprint(source, stamp.hexdigest())
                corpus = _find_prepared(folder / source.name, fingerprint, source.weight)
                if corpus is None:
                    writer = _CorpusWriter(source, folder, len(tokenizer), encode, progress)
                    corpus = writer.write(fingerprint, rules, held_out)
                prepared.append(corpus)
    except KeyboardInterrupt as interruption:
        complete = f"{len(prepared)} of {len(sources)} corpora are complete"
        interruption.add_note(f"{complete}; the same command prepares the others")
        raise
    index = {"corpora": [corpus.name for corpus in prepared]}
    _write_record(folder / INDEX, index | {"tokenizer": describe_files(folder / TOKENIZER)})
    return prepared


def save_tokenizer(
    tokenizer: PreTrainedTokenizerFast, folder: Path, recipe: Mapping[str, Any] | None = None
) -> None:
    """Write a tokenizer completely or not at all, unless the folder has it.

    `recipe` is what a trained tokenizer depends on, to notice when that changes.
    """
    content = tokenizer.backend_tokenizer.to_str(pretty=True)
    file = folder / "tokenizer.json"
    if recipe is None and file.is_file() and file.read_bytes() == content.encode():
        return

    def write(draft: Path) -> None:
        write_tokenizer(tokenizer, draft)
        if recipe is not None:
            record = format_record({"recipe": recipe, "files": describe_files(draft)})
            (draft / TOKENIZER_RECIPE).write_text(record, encoding="utf-8")

    write_folder(folder, write)


def is_trained_by(folder: Path, recipe: Mapping[str, Any]) -> bool:
    """Return whether a folder has an intact tokenizer that was trained with this recipe."""
    try:
        record = read_record(folder / TOKENIZER_RECIPE)
        check_files(folder, record["files"])
    except InputError:
        return False
    return bool(record["recipe"] == recipe)


def is_prepared(folder: Path) -> bool:
    """Return whether a folder has all its corpora."""
    return (folder / INDEX).exists()


def open_prepared(folder: Path) -> list[PreparedCorpus]:
    """Return the corpora of a prepared folder."""
    try:
        index = read_record(folder / INDEX)
        return [_read_corpus(folder / name) for name in index["corpora"]]
    except (InputError, KeyError, TypeError) as error:
        problem = f"this is not a folder of prepared text: {error}"
        raise InputError(problem, file=folder, fix=PREPARE) from error


def verify_prepared(folder: Path, progress: Progress | None = None) -> None:
    """Raise InputError if a file of a prepared folder is damaged; all of them are read."""
    corpora = open_prepared(folder)
    check_files(folder / TOKENIZER, read_record(folder / INDEX)["tokenizer"], fix=PREPARE)
    for number, corpus in enumerate(corpora, start=1):
        check_files(folder / corpus.name, corpus.files, fix=PREPARE)
        if progress is not None:
            progress("verifying the text", number, len(corpora))


def _fingerprint(source: TextSource, stamp: str) -> str:
    """Identify a corpus by the sizes and times of its files, its filters and its tokenizer."""
    paths = source.paths if source.links is None else (*source.paths, source.links)
    files = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths if p.exists()]
    key = repr((files, source.languages, source.keep_tags, source.exclude_tags, stamp))
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _find_prepared(folder: Path, fingerprint: str, weight: float) -> PreparedCorpus | None:
    """Return an intact corpus that was prepared before, with the new weight."""
    try:
        corpus = _read_corpus(folder)
        check_files(folder, corpus.files)
    except InputError:
        return None
    if corpus.fingerprint != fingerprint:
        return None
    if corpus.weight != weight:
        corpus = replace(corpus, weight=weight)
        _write_record(folder / CORPUS, asdict(corpus))
    return corpus


def _read_corpus(folder: Path) -> PreparedCorpus:
    content = read_record(folder / CORPUS)
    content["languages"] = tuple(content["languages"])
    content["n_tokens"] = tuple(content["n_tokens"])
    return PreparedCorpus(**content)


def _write_record(path: Path, content: Mapping[str, Any]) -> None:
    with write_atomically(path) as stream:
        stream.write(format_record(content))


@dataclass(frozen=True, slots=True)
class _CorpusWriter:
    """Writes the stores of one source and their description."""

    source: TextSource
    prepared_folder: Path
    vocab_size: int
    encode: Encode
    progress: Progress | None

    @property
    def folder(self) -> Path:
        return self.prepared_folder / self.source.name

    def write(
        self, fingerprint: str, rules: CleaningRules, held_out: HeldOutPairs
    ) -> PreparedCorpus:
        """Write all files of the corpus; `corpus.json` comes last and confirms the others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / CORPUS).unlink(missing_ok=True)
        stored = self._write_vectors() if self.source.vectors else self._write_text(rules, held_out)
        corpus = PreparedCorpus(
            name=self.source.name,
            languages=self.source.languages,
            weight=self.source.weight,
            fingerprint=fingerprint,
            linked=self.source.links is not None,
            files=describe_files(self.folder),
            **stored,
        )
        _write_record(self.folder / CORPUS, asdict(corpus))
        return corpus

    def _write_text(self, rules: CleaningRules, held_out: HeldOutPairs) -> dict[str, Any]:
        """Write the cleaned text and return its counts."""
        report, n_held_out = CleaningReport(), held_out.n_dropped
        examples = held_out.filter(_read_examples(self.source, rules, report))
        n_sides, links = len(self.source.languages), self.source.links
        n_examples, n_tokens = 0, [0] * n_sides
        sizes = {f"side{side}": self.vocab_size for side in range(n_sides)}
        work: Work = _encode_block
        if links is not None:
            sizes |= STORES
            work = partial(_encode_linked_block, links)
        with ExitStack() as stack:
            appends = [
                stack.enter_context(write_store(self.folder / name, size))
                for name, size in sizes.items()
            ]
            for arrays in self.encode(_split_blocks(examples), work):
                for append, ragged in zip(appends, arrays, strict=True):
                    append(ragged)
                for side in range(n_sides):
                    n_tokens[side] += len(arrays[side].ids)
                n_examples += len(arrays[0].lengths)
                self._report(n_examples)
        return {
            "n_examples": n_examples,
            "n_tokens": tuple(n_tokens),
            "cleaning": report.to_dict() | {"held_out": held_out.n_dropped - n_held_out},
        }

    def _write_vectors(self) -> dict[str, Any]:
        """Write words, each encoded as a sentence of its own, with their vectors."""
        report, path = CleaningReport(), self.source.paths[0]
        words = WordFilter.of(self.prepared_folder / TOKENIZER / "tokenizer.json", report)
        blocks = read_vector_blocks(path, self.source.max_words)
        first = next(blocks, None)
        if first is None:
            raise InputError("the file has no words", file=path, fix="use other vectors")
        width, n_tokens = first.matrix.shape[1], 0
        waiting = deque([first])  # blocks whose words are being encoded

        def take_words() -> Iterator[list[Example]]:
            yield [(word,) for word in first.words]
            for block in blocks:
                waiting.append(block)
                yield [(word,) for word in block.words]

        with (
            write_store(self.folder / "side0", self.vocab_size) as append_words,
            write_vector_store(self.folder / VECTORS, width) as append_vectors,
        ):
            for (pieces,) in self.encode(take_words(), _encode_block):
                kept, vectors = words.select(waiting.popleft(), pieces)
                append_words(kept)
                append_vectors(vectors)
                n_tokens += len(kept.ids)
                self._report(report.n_kept)
        return {
            "n_examples": report.n_kept,
            "n_tokens": (n_tokens,),
            "cleaning": report.to_dict() | {"held_out": 0},
            "dimensions": width,
        }

    def _report(self, n_examples: int) -> None:
        if self.progress is not None:
            self.progress(f"preparing {self.source.name}", n_examples, None)


def _split_blocks(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while block := list(islice(examples, BLOCK)):
        yield block


def _read_examples(
    source: TextSource, rules: CleaningRules, report: CleaningReport
) -> Iterator[Example]:
    """Yield a source's cleaned examples, with links if it has any."""
    if source.links is None:
        return read_clean(source, rules, report)
    return read_linked(
        source.paths,
        source.links,
        rules,
        report,
        (source.languages[0], source.languages[1]),
        keep_tags=source.keep_tags,
        exclude_tags=source.exclude_tags,
    )


def read_clean(
    source: TextSource, rules: CleaningRules, report: CleaningReport
) -> Iterator[Example]:
    """Yield a source's cleaned examples: one string per sentence, two per pair."""
    if len(source.languages) == 1:
        for path in source.paths:
            sentences = read_sentences(path)
            for sentence in clean_sentences(sentences, rules, report, source.languages[0]):
                yield (sentence,)
        return
    pairs = read_bitext(source.paths, keep_tags=source.keep_tags, exclude_tags=source.exclude_tags)
    languages = (source.languages[0], source.languages[1])
    for pair in clean_pairs(pairs, rules, report, languages):
        yield pair.src, pair.tgt


@contextmanager
def _start_encoder(tokenizer: Path, n_workers: int) -> Iterator[Encode]:
    """Yield a function that maps blocks in processes with the tokenizer, or in this process."""
    if n_workers <= 1:
        _load_worker(tokenizer)
        try:
            yield lambda blocks, work: map(work, blocks)
        finally:
            _WORKER.clear()
        return
    context = multiprocessing.get_context("spawn")
    with block_stop_signals():
        executor = ProcessPoolExecutor(n_workers, context, _start_worker, (tokenizer,))
    try:
        yield lambda blocks, work: _map_in_order(executor, blocks, work, 4 * n_workers)
    except BrokenProcessPool as error:
        raise InputError(
            "a process that tokenizes has ended, perhaps for lack of memory",
            fix="use fewer --workers; a script must call this under if __name__ == '__main__'",
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _map_in_order(
    executor: ProcessPoolExecutor, blocks: Iterator[list[Example]], work: Work, max_pending: int
) -> Iterator[list[Ragged]]:
    """Map in order with a limited number of pending blocks, so that reading cannot fill memory."""
    pending: deque[Future[list[Ragged]]] = deque()
    for block in blocks:
        with block_stop_signals():  # a process may be started here
            pending.append(executor.submit(work, block))
        if len(pending) >= max_pending:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


_WORKER: dict[str, Any] = {}


def _start_worker(tokenizer: Path) -> None:
    start_worker()
    _load_worker(tokenizer)


def _load_worker(tokenizer: Path) -> None:
    from tokenizers import Tokenizer  # not from transformers, which takes seconds to import

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    backend = disable_truncation_and_padding(Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
    _WORKER["encode"] = build_sentence_encoder(backend)
    # WordEncoder uses only the backend of a tokenizer.
    _WORKER["words"] = WordEncoder(SimpleNamespace(backend_tokenizer=backend))  # type: ignore[arg-type]


def _encode_block(block: list[Example]) -> list[Ragged]:
    """Encode the sides of a block of examples."""
    return [_WORKER["encode"](sentences) for sentences in zip(*block, strict=True)]


def _encode_linked_block(links: Path, block: list[Example]) -> list[Ragged]:
    """Encode a block of pairs with links: sides, subword counts of their words, links."""
    return encode_linked(_WORKER["words"], [(src, tgt, line) for src, tgt, line in block], links)


def read_vector_blocks(
    path: PathLike, max_words: int | None = None, size: int = 1024
) -> Iterator[VectorBlock]:
    """Yield the first words of a file with their vectors in blocks of at least `size` words."""
    words: list[str] = []
    parts: list[Matrix] = []
    n_left = max_words
    for block in iterate_vectors(path):
        taken = block.words[:n_left]
        words += taken
        parts.append(block.matrix[:n_left])
        if n_left is not None:
            n_left -= len(taken)
        if len(words) >= size or n_left == 0:
            yield VectorBlock(words, np.concatenate(parts))
            words, parts = [], []
        if n_left == 0:
            return
    if words:
        yield VectorBlock(words, np.concatenate(parts))


@dataclass(slots=True)
class WordFilter:
    """Drops words that an encoder cannot distinguish from others, and counts them.

    These are words without subwords, and words with a special token, such as unknown characters or
    fastText's `</s>`. Of equal words the first is kept. Words whose vector is zero, which some
    programs give to words without data, are dropped, too.
    """

    special_ids: npt.NDArray[np.int64]
    report: CleaningReport
    seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, tokenizer: Path, report: CleaningReport) -> WordFilter:
        """Read the special tokens from `tokenizer.json`."""
        added = json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]
        special = [int(token["id"]) for token in added if token["special"]]
        return cls(np.array(special, dtype=np.int64), report)

    def select(self, block: VectorBlock, pieces: Ragged) -> tuple[Ragged, Matrix]:
        """Return the subwords and the vectors of the words to keep."""
        n_words = len(block.words)
        owners = np.repeat(np.arange(n_words), pieces.lengths)
        n_special = np.bincount(owners[np.isin(pieces.ids, self.special_ids)], minlength=n_words)
        is_new = np.fromiter(map(self._add, block.words), np.bool_, n_words)
        self.report.n_read += n_words
        keep = np.ones(n_words, dtype=np.bool_)
        for reason, is_bad in (
            ("no subwords", pieces.lengths == 0),
            ("unknown to the tokenizer", n_special > 0),
            ("duplicate", ~is_new),
            ("a vector of zeros", ~block.matrix.any(axis=1)),
        ):
            dropped = np.flatnonzero(keep & is_bad)
            drops = ((block.words[row],) for row in dropped.tolist())
            self.report.add_dropped(reason, len(dropped), drops)
            keep &= ~is_bad
        kept = np.flatnonzero(keep)
        self.report.n_kept += len(kept)
        return reorder(pieces, kept), block.matrix[kept]

    def _add(self, word: str) -> bool:
        """Return whether a word is new, and remember it."""
        n_before = len(self.seen)
        self.seen.add(word)
        return len(self.seen) > n_before


def train_tokenizer_on_sources(
    sources: Sequence[TextSource],
    rules: CleaningRules,
    held_out: HeldOutPairs,
    *,
    vocab_size: int,
    n_characters: int,
    alpha: float,
    character_coverage: float,
    seed: int,
    progress: Progress | None = None,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on a sample of the sources' text, with languages rebalanced by α.

    The text is read twice: to count characters per language, and to draw sentences.
    """
    counts: Counter[str] = Counter()
    for language, sentence in _read_text(
        sources, rules, held_out, "counting characters for the tokenizer", progress
    ):
        counts[language] += len(sentence)
    shares = language_probabilities(counts, alpha)
    rates = {name: min(1.0, n_characters * shares[name] / counts[name]) for name in shares}
    generator = np.random.default_rng(seed)
    sample = {
        sentence
        for language, sentence in _read_text(
            sources, rules, held_out, "drawing sentences for the tokenizer", progress
        )
        if generator.random() < rates[language]
    }
    if progress is not None:
        progress("training the tokenizer", 0, None)
    train = partial(
        train_tokenizer, sorted(sample), vocab_size, character_coverage=character_coverage
    )
    return run_in_thread(train)


def _read_text(
    sources: Sequence[TextSource],
    rules: CleaningRules,
    held_out: HeldOutPairs,
    stage: str,
    progress: Progress | None,
) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of every side of all sources of text."""
    n_examples = 0
    for source in sources:
        if source.vectors:
            continue
        for example in held_out.filter(read_clean(source, rules, CleaningReport())):
            yield from zip(source.languages, example, strict=True)
            n_examples += 1
            if progress is not None and n_examples % BLOCK == 0:
                progress(stage, n_examples, None)
