"""Words and their vectors on the way into training: read in blocks, without what is no word.

From text files to tokenised corpora on disk: read, clean, encode in parallel, store.

A prepared folder holds one sub-folder a corpus (`sideK.ids.npy`, `sideK.offsets.npy`,
`corpus.json`), the tokenizer, and `prepared.json`, which lists the corpora. Bitext with links
has three stores more (`words0`, `words1`, `links`), words with vectors have `vectors.npy`. Memory
stays constant: text streams through in blocks.

Choosing the text a tokenizer is trained on, so that small languages have a say.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from calque.errors import InputError
from calque.io.bitext import read_bitext, read_sentences
from calque.io.cleaning import (
    CleaningReport,
    CleaningRules,
    clean_pairs,
    clean_sentences,
    normalize_text,
)
from calque.io.files import PathLike, read_lines, remove_partial_files, write_atomically
from calque.io.word_vectors import VectorBlock, iterate_vectors
from calque.tokens.linked import STORES, encode_linked, read_linked
from calque.tokens.ragged import Ragged, reorder
from calque.tokens.sampling import language_probabilities
from calque.tokens.store import VECTORS, write_store, write_vector_store
from calque.tokens.tokenizer import disable_truncation_and_padding, train_tokenizer
from calque.tokens.words import WordEncoder, build_sentence_encoder
from calque.types import SentencePair

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerFast

    Matrix = npt.NDArray[np.float32]
    Flags = npt.NDArray[np.bool_]


def read_vector_blocks(
    path: PathLike, max_words: int | None = None, size: int = 1024
) -> Iterator[VectorBlock]:
    """Read the first words of a file with their vectors, `size` or a few more of them at a time."""
    rest = max_words
    for block in _join(iterate_vectors(path), size):
        if rest is not None:
            block = VectorBlock(block.words[:rest], block.matrix[:rest])
            rest -= len(block.words)
        yield block
        if rest == 0:
            return


def _join(blocks: Iterable[VectorBlock], size: int) -> Iterator[VectorBlock]:
    """Put small blocks together."""
    words: list[str] = []
    parts: list[Matrix] = []
    for block in blocks:
        words += block.words
        parts.append(block.matrix)
        if len(words) >= size:
            yield VectorBlock(words, np.concatenate(parts))
            words, parts = [], []
    if words:
        yield VectorBlock(words, np.concatenate(parts))


@dataclass(slots=True)
class WordFilter:
    """Drops words that an encoder could not tell from others, and counts them.

    They have no subwords, or the tokenizer knows them only by a special token: characters that
    are unknown to it, or fastText's `</s>`. Of equal words the first stays. A vector of zeros, as
    some programs give to words they know nothing of, teaches nothing: its word goes, too.
    """

    special: npt.NDArray[np.int64]
    report: CleaningReport
    seen: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, tokenizer: Path, report: CleaningReport) -> WordFilter:
        """Read the special tokens off `tokenizer.json`."""
        added = json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]
        special = [int(token["id"]) for token in added if token["special"]]
        return cls(np.array(special, dtype=np.int64), report)

    def select(self, block: VectorBlock, pieces: Ragged) -> tuple[Ragged, Matrix]:
        """Keep the subwords and the vectors of words worth keeping."""
        n_words = len(block.words)
        owners = np.repeat(np.arange(n_words), pieces.lengths)
        n_special = np.bincount(owners[np.isin(pieces.ids, self.special)], minlength=n_words)
        is_new = np.fromiter(map(self._note, block.words), np.bool_, n_words)
        self.report.n_read += n_words
        keep = np.ones(n_words, dtype=np.bool_)
        for reason, is_unfit in (
            ("no subwords", pieces.lengths == 0),
            ("unknown to the tokenizer", n_special > 0),
            ("duplicate", ~is_new),
            ("a vector of zeros", ~block.matrix.any(axis=1)),
        ):
            dropped = np.flatnonzero(keep & is_unfit)
            drops = ((block.words[row],) for row in dropped.tolist())
            self.report.note_drops(reason, len(dropped), drops)
            keep &= ~is_unfit
        kept = np.flatnonzero(keep)
        self.report.n_kept += len(kept)
        return reorder(pieces, kept), block.matrix[kept]

    def _note(self, word: str) -> bool:
        """Tell whether a word is new, and remember it."""
        n_before = len(self.seen)
        self.seen.add(word)
        return len(self.seen) > n_before


BLOCK = 4096
INDEX, CORPUS = "prepared.json", "corpus.json"
Example = tuple[str, ...]
Work: TypeAlias = Callable[[list[Example]], list[Ragged]]
Encode: TypeAlias = Callable[[Iterator[list[Example]], Work], Iterator[list[Ragged]]]


@dataclass(frozen=True, slots=True)
class TextSource:
    """One corpus before preparation: its files, its language or pair of languages."""

    paths: tuple[Path, ...]
    languages: tuple[str, ...]
    keep_tags: tuple[str, ...] | None = None
    exclude_tags: tuple[str, ...] = ()
    weight: float = 1.0
    # Word links of a bitext, a line for each pair.
    links: Path | None = None
    # Whether the file holds words with their vectors, and how many of the first are wanted.
    vectors: bool = False
    max_words: int | None = None

    @property
    def name(self) -> str:
        """Name the corpus by its languages, tags and paths, so that no two share a folder."""
        key: tuple[Any, ...] = (self.paths, self.keep_tags, self.exclude_tags)
        if self.links is not None:
            key = (*key, self.links)
        if self.vectors:
            key = (*key, VECTORS, self.max_words)
        digest = hashlib.sha256(repr(key).encode())
        return f"{'-'.join(self.languages)}.{digest.hexdigest()[:8]}"


@dataclass(frozen=True)
class PreparedCorpus:
    """What `corpus.json` says of a tokenised corpus."""

    name: str
    languages: tuple[str, ...]
    weight: float
    n_examples: int
    n_tokens: tuple[int, ...]
    fingerprint: str
    cleaning: dict[str, Any] = field(default_factory=dict)
    linked: bool = False
    # Of the vectors that the words have; 0 for text.
    dimensions: int = 0


class HeldOutPairs:
    """Sentence pairs that must stay out of training; counts how many it kept out.

    Texts are compared as cleaning leaves them, whether or not the rules tidy them.
    """

    def __init__(self, pairs: Iterable[Example] = ()) -> None:
        self.keys = {_tidy(pair) for pair in pairs}
        self._unspaced = set(map(_remove_spaces, self.keys))
        self.n_dropped = 0

    def digest(self) -> bytes:
        """Give bytes that change with what is held out; none if nothing is."""
        return repr(sorted(self.keys)).encode() if self.keys else b""

    def filter(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Pass on the examples that are not held out, in either direction.

        With links come sentences split into words: spaces do not count there.
        """
        for example in examples:
            if self.keys and self._holds(example):
                self.n_dropped += 1
            else:
                yield example

    def _holds(self, example: Example) -> bool:
        tidy, keys = _tidy(example[:2]), self.keys
        if len(example) > 2:
            tidy, keys = _remove_spaces(tidy), self._unspaced
        return tidy in keys or tidy[::-1] in keys


def _tidy(example: Example) -> Example:
    return tuple(map(normalize_text, example))


def _remove_spaces(example: Example) -> Example:
    return tuple("".join(text.split()) for text in example)


def read_held_out_pairs(path: Path | None) -> HeldOutPairs:
    """Read the pairs to keep out of training: a TSV whose last two columns are the sentences."""
    if path is None:
        return HeldOutPairs()
    return HeldOutPairs(tuple(line.split("\t")[-2:]) for line in read_lines(path))


def read_clean(
    source: TextSource, rules: CleaningRules, report: CleaningReport
) -> Iterator[Example]:
    """Stream a source's cleaned examples: one string each for text, two for bitext."""
    if len(source.languages) == 1:
        for path in source.paths:
            sentences = read_sentences(path)
            for sentence in clean_sentences(sentences, rules, report, source.languages[0]):
                yield (sentence,)
        return
    pairs: Iterator[SentencePair] = read_bitext(
        source.paths, keep_tags=source.keep_tags, exclude_tags=source.exclude_tags
    )
    languages = (source.languages[0], source.languages[1])
    for pair in clean_pairs(pairs, rules, report, languages):
        yield pair.src, pair.tgt


def _read_examples(
    source: TextSource, rules: CleaningRules, report: CleaningReport
) -> Iterator[Example]:
    """Stream a source's cleaned examples, with their links where it has some."""
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


def prepare_corpora(
    sources: Sequence[TextSource],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    rules: CleaningRules,
    hold_out: HeldOutPairs | None = None,
    n_workers: int = 1,
    on_progress: Callable[[str, int], None] = lambda name, n_examples: None,
) -> list[PreparedCorpus]:
    """Tokenise every source into the folder; corpora that are there already are kept.

    `on_progress` is told the corpus and how many examples it has so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # it returns when all corpora are there
    hold_out = hold_out or HeldOutPairs()
    tokenizer.save_pretrained(folder / "tokenizer")
    stamp = hashlib.sha256((folder / "tokenizer" / "tokenizer.json").read_bytes())
    stamp.update(repr(rules).encode() + hold_out.digest())
    prepared = []
    with _Encoders(folder / "tokenizer", n_workers) as encode:
        for source in sources:
            fingerprint = _fingerprint(source, stamp.hexdigest())
            corpus = _read_prepared(folder / source.name, fingerprint, source.weight)
            if corpus is None:
                job = _Job(source, folder / source.name, fingerprint, len(tokenizer))
                corpus = _prepare(job, encode, rules, hold_out, on_progress)
            prepared.append(corpus)
    _write_json(folder / INDEX, {"corpora": [corpus.name for corpus in prepared]})
    return prepared


def is_prepared(folder: Path) -> bool:
    """Tell whether all corpora of a folder are there."""
    return (folder / INDEX).exists()


def open_prepared(folder: Path) -> list[PreparedCorpus]:
    """List the corpora of a prepared folder."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return [_load_corpus(folder / name) for name in index["corpora"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"not a folder of prepared text: {error}", file=folder, fix="run `calque prepare`"
        ) from error


@dataclass(frozen=True, slots=True)
class _Job:
    source: TextSource
    folder: Path
    fingerprint: str
    vocab_size: int

    def stores(self) -> dict[str, int]:
        """Name the stores to write, each with how many different numbers it may hold."""
        sides = {f"side{side}": self.vocab_size for side in range(len(self.source.languages))}
        return sides if self.source.links is None else sides | STORES

    def work(self) -> Work:
        """Give what is done to each block of examples."""
        links = self.source.links
        return _encode_block if links is None else partial(_encode_linked_block, links)


class _Encoders:
    """A pool of processes that each hold the tokenizer; one worker means this process."""

    def __init__(self, tokenizer: Path, n_workers: int) -> None:
        self._tokenizer, self._n_workers = tokenizer, n_workers
        self._stack = ExitStack()

    def __enter__(self) -> Encode:
        if self._n_workers <= 1:
            _load_worker(self._tokenizer)
            return lambda blocks, work: map(work, blocks)
        context = multiprocessing.get_context("spawn")
        pool = context.Pool(self._n_workers, _start_worker, (self._tokenizer,))
        self._stack.enter_context(pool)
        return lambda blocks, work: _bounded_map(pool, blocks, work, 4 * self._n_workers)

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        _WORKER.clear()


def _bounded_map(
    pool: Any, blocks: Iterator[list[Example]], work: Work, ahead: int
) -> Iterator[list[Ragged]]:
    """Map in order with at most `ahead` blocks under way: a fast reader must not fill memory."""
    waiting: list[Any] = []
    for block in blocks:
        waiting.append(pool.apply_async(work, (block,)))
        if len(waiting) >= ahead:
            yield waiting.pop(0).get()
    for result in waiting:
        yield result.get()


_WORKER: dict[str, Any] = {}


def _start_worker(tokenizer: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the main process ends them
    _load_worker(tokenizer)


def _load_worker(tokenizer: Path) -> None:
    from tokenizers import Tokenizer  # its file alone: transformers takes seconds to import

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    engine = disable_truncation_and_padding(Tokenizer.from_file(str(tokenizer / "tokenizer.json")))
    _WORKER["encode"] = build_sentence_encoder(engine)
    # All that is asked of the tokenizer is its engine.
    _WORKER["words"] = WordEncoder(SimpleNamespace(backend_tokenizer=engine))  # type: ignore[arg-type]


def _encode_block(block: list[Example]) -> list[Ragged]:
    """Encode a block of examples, side by side."""
    return [_WORKER["encode"](sentences) for sentences in zip(*block, strict=True)]


def _encode_linked_block(links: Path, block: list[Example]) -> list[Ragged]:
    """Encode a block of pairs with links: sides, subwords of their words, links."""
    return encode_linked(_WORKER["words"], [(src, tgt, line) for src, tgt, line in block], links)


def _prepare(
    job: _Job,
    encode: Encode,
    rules: CleaningRules,
    hold_out: HeldOutPairs,
    on_progress: Callable[[str, int], None],
) -> PreparedCorpus:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / CORPUS).unlink(missing_ok=True)  # it must not vouch for other stores than its own
    remove_partial_files(job.folder)
    if job.source.vectors:
        corpus = _store_vectors(job, encode, on_progress)
    else:
        corpus = _store_text(job, encode, rules, hold_out, on_progress)
    _write_json(job.folder / CORPUS, asdict(corpus))
    return corpus


def _store_text(
    job: _Job,
    encode: Encode,
    rules: CleaningRules,
    hold_out: HeldOutPairs,
    on_progress: Callable[[str, int], None],
) -> PreparedCorpus:
    """Write what of the text is worth keeping."""
    report, n_held_out = CleaningReport(), hold_out.n_dropped
    examples = hold_out.filter(_read_examples(job.source, rules, report))
    n_examples, n_tokens = 0, [0] * len(job.source.languages)
    with ExitStack() as stack:
        appends = [
            stack.enter_context(write_store(job.folder / name, largest))
            for name, largest in job.stores().items()
        ]
        for arrays in encode(_blocks(examples), job.work()):
            for append, ragged in zip(appends, arrays, strict=True):
                append(ragged)
            for side in range(len(n_tokens)):
                n_tokens[side] += len(arrays[side].ids)
            n_examples += len(arrays[0].lengths)
            on_progress(job.source.name, n_examples)
    return PreparedCorpus(
        job.source.name,
        job.source.languages,
        job.source.weight,
        n_examples,
        tuple(n_tokens),
        job.fingerprint,
        report.to_dict() | {"held_out": hold_out.n_dropped - n_held_out},
        job.source.links is not None,
    )


def _store_vectors(
    job: _Job, encode: Encode, on_progress: Callable[[str, int], None]
) -> PreparedCorpus:
    """Write words, each encoded as a sentence of its own, and their vectors."""
    report = CleaningReport()
    chosen = WordFilter.of(job.folder.parent / "tokenizer" / "tokenizer.json", report)
    blocks = read_vector_blocks(job.source.paths[0], job.source.max_words)
    first = next(blocks, None)
    if first is None:
        raise InputError("holds no words", file=job.source.paths[0], fix="give other vectors")
    width, n_tokens = first.matrix.shape[1], 0
    waiting = deque([first])  # blocks whose words are being encoded

    def take_words() -> Iterator[list[Example]]:
        yield [(word,) for word in first.words]
        for block in blocks:
            waiting.append(block)
            yield [(word,) for word in block.words]

    with (
        write_store(job.folder / "side0", job.vocab_size) as append_words,
        write_vector_store(job.folder / VECTORS, width) as append_vectors,
    ):
        for (pieces,) in encode(take_words(), _encode_block):
            words, vectors = chosen.select(waiting.popleft(), pieces)
            append_words(words)
            append_vectors(vectors)
            n_tokens += len(words.ids)
            on_progress(job.source.name, report.n_kept)
    return PreparedCorpus(
        job.source.name,
        job.source.languages,
        job.source.weight,
        report.n_kept,
        (n_tokens,),
        job.fingerprint,
        report.to_dict() | {"held_out": 0},
        dimensions=width,
    )


def _blocks(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while block := list(islice(examples, BLOCK)):
        yield block


def _fingerprint(source: TextSource, stamp: str) -> str:
    """Identify a corpus by its files' sizes and times, its filters and its tokenizer."""
    paths = source.paths if source.links is None else (*source.paths, source.links)
    files = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in paths if p.exists()]
    key = repr((files, source.languages, source.keep_tags, source.exclude_tags, stamp))
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _read_prepared(folder: Path, fingerprint: str, weight: float) -> PreparedCorpus | None:
    """Find a corpus made before; only its weight may have changed since."""
    if not (folder / CORPUS).exists():
        return None
    corpus = _load_corpus(folder)
    if corpus.fingerprint != fingerprint:
        return None
    if corpus.weight != weight:
        corpus = replace(corpus, weight=weight)
        _write_json(folder / CORPUS, asdict(corpus))
    return corpus


def _load_corpus(folder: Path) -> PreparedCorpus:
    content = json.loads((folder / CORPUS).read_text(encoding="utf-8"))
    content["languages"] = tuple(content["languages"])
    content["n_tokens"] = tuple(content["n_tokens"])
    return PreparedCorpus(**content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with write_atomically(path) as stream:
        json.dump(content, stream, indent=1, ensure_ascii=False)
        stream.write("\n")


def train_tokenizer_on_sources(
    sources: Sequence[TextSource],
    rules: CleaningRules,
    hold_out: HeldOutPairs,
    *,
    vocab_size: int,
    n_characters: int,
    alpha: float,
    character_coverage: float,
    seed: int,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on a sample of the sources' text, languages rebalanced by α.

    Two passes: the first counts characters by language, the second draws sentences.
    """
    counts: Counter[str] = Counter()
    for language, sentence in _sentences(sources, rules, hold_out):
        counts[language] += len(sentence)
    shares = language_probabilities(counts, alpha)
    rates = {name: min(1.0, n_characters * shares[name] / counts[name]) for name in shares}
    generator = np.random.default_rng(seed)
    sample = {
        sentence
        for language, sentence in _sentences(sources, rules, hold_out)
        if generator.random() < rates[language]
    }
    return train_tokenizer(sorted(sample), vocab_size, character_coverage=character_coverage)


def _sentences(
    sources: Sequence[TextSource], rules: CleaningRules, hold_out: HeldOutPairs
) -> Iterator[tuple[str, str]]:
    """Stream every side of every source of text with its language."""
    for source in sources:
        if source.vectors:
            continue
        for example in hold_out.filter(read_clean(source, rules, CleaningReport())):
            yield from zip(source.languages, example, strict=True)
