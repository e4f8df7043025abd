"""The sentences of a file, each once, on disk: streamed in order, or read one by one.

Vectors to mine with: of stored sentences, embedded so that a kill cannot spoil it, or given.

Translations out of two texts that were not translated line by line: bitext mining.
"""

from __future__ import annotations

import hashlib
import math
import os
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, get_args

import numpy as np

from calque.algorithms.margin import Cut, Margin, MinedPairs, Retrieval, choose_cut, mine_pairs
from calque.algorithms.nearest import EXACT, UnitRows, find_neighbors
from calque.errors import InputError, first_line
from calque.io.bitext import has_ids, read_id_pairs, split_id
from calque.io.files import BadLine, PathLike, SkipBad, refuse, scan_lines, shown
from calque.io.outputs import ResumableFile
from calque.sentences.embed import BLOCK_SENTENCES, EmbedReport, choose_output, embed_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder


class SentenceStore:
    """Distinct sentences in the order of a file; blank lines and repetitions are only counted.

    It takes 16 bytes of memory a line, and as much disk as the file unpacked. Sentences are the
    same if they are so without the space around them.
    """

    def __init__(
        self,
        file: PathLike,
        spool: Path,
        *,
        ids: bool | None = None,
        skip_bad: SkipBad | None = None,
    ) -> None:
        """Read the file into `spool`; `ids` says that lines are `id ⇥ sentence`, None to look.

        A line that cannot be decoded is an error, or goes to `skip_bad` and is blank.
        """
        self.file, self.spool, self.skip_bad = file, spool, skip_bad
        self.ids = has_ids(file) if ids is None else ids
        offsets, hashes, is_blank, self.digest = self._copy()
        self.n_lines, self.n_empty = len(hashes), int(is_blank.sum())
        filled = np.flatnonzero(~is_blank)
        _, first, self._groups = np.unique(hashes[filled], return_index=True, return_inverse=True)
        order = np.argsort(first)
        self._rank = np.empty(len(order), dtype=np.int64)  # of a group, its row among the kept
        self._rank[order] = np.arange(len(order))
        self._filled = filled
        self.lines: npt.NDArray[np.int64] = filled[first[order]]  # of a row, its line from 0
        self.n_duplicates = len(filled) - len(self.lines)
        self._starts, self._stops = offsets[self.lines], offsets[self.lines + 1]
        self._handle: int | None = None

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[str]:
        """Give the distinct sentences."""
        return (self[row][1] for row in range(len(self)))

    def __getitem__(self, row: int) -> tuple[str, str]:
        """Give the name, if it has one, and the sentence of a row."""
        if self._handle is None:
            self._handle = os.open(self.spool, os.O_RDONLY)
        start, stop = int(self._starts[row]), int(self._stops[row])
        line = os.pread(self._handle, stop - start, start).decode().removesuffix("\n")
        return self._split(line)

    def close(self) -> None:
        """Let go of the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def find(self, wanted: Collection[str]) -> dict[str, int]:
        """Find the rows of names, or of sentences where they have none; one absent is left out.

        A repeated sentence has the row of its first occurrence, whichever of its names is asked.
        """
        found: dict[str, int] = {}
        groups = iter(self._groups.tolist())
        with open(self.spool, encoding="utf-8", newline="\n") as stream:
            for line in stream:
                name, sentence = self._split(line.removesuffix("\n"))
                if not sentence:
                    continue
                row = int(self._rank[next(groups)])
                key = name if self.ids else sentence
                if key in wanted:
                    found[key] = row
        return found

    def _read(self, line: str | BadLine, number: int) -> tuple[str, str]:
        if not isinstance(line, str):
            refuse(line, self.file, number, self.skip_bad)
            return "", ""
        return split_id(line, self.file, number) if self.ids else ("", line.strip())

    def _split(self, line: str) -> tuple[str, str]:
        if not self.ids:
            return "", line
        name, _, sentence = line.partition("\t")
        return name, sentence

    def _copy(
        self,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_], str]:
        """Write the file out plainly; give where lines begin, their hashes and which are blank."""
        offsets, hashes, blank = array("q", [0]), array("q"), bytearray()
        digest, place = hashlib.blake2b(digest_size=16), 0
        with open(self.spool, "wb") as stream:
            for number, line in enumerate(scan_lines(self.file), start=1):
                name, sentence = self._read(line, number)
                content = (f"{name}\t{sentence}\n" if self.ids else f"{sentence}\n").encode()
                stream.write(content)
                digest.update(content)
                place += len(content)
                offsets.append(place)
                hashes.append(hash(sentence))  # 64 bits: two of 10 million agree once in 10⁵ runs
                blank.append(not sentence)
        kinds = np.frombuffer(blank, dtype=np.bool_)
        places, keys = (np.frombuffer(part, dtype=np.int64) for part in (offsets, hashes))
        return places, keys, kinds, digest.hexdigest()


BLOCK_ROWS = 4096


def embed_store(
    encoder: Encoder,
    store: SentenceStore,
    folder: Path,
    *,
    layer: int | None = None,
    raw: bool = False,
    resume: bool = False,
    on_block: Callable[[int], None] | None = None,
) -> tuple[npt.NDArray[np.float32], int]:
    """Embed stored sentences into a file of `folder`; give it, and how many were in windows.

    The file is named after the model, the text and the choices, so that with `resume` a whole one
    is taken as it is, and one half-done is gone on with.
    """
    name = _name_vectors(encoder, store, layer, raw)
    path = folder / f"{name}.f32"
    n_long = 0
    if not (resume and path.exists()):
        settings: dict[str, str | int | float | bool | None] = {
            "pairs": len(store),
            "vectors": name,
        }
        with ResumableFile(path, settings, resume=resume) as file:
            for block in _cut(store):
                if file.wants("\n".join(block).encode()):
                    file.append(*_embed(encoder, block, layer, raw))
                if on_block is not None:
                    on_block(len(block))
            n_long = EmbedReport(*file.finish()).n_long
    elif on_block is not None:
        on_block(len(store))
    array = np.memmap(path, dtype="<f4", mode="r").reshape(-1, encoder.hidden_size)
    return array, n_long


def open_vectors(path: Path, n_lines: int | None = None) -> npt.NDArray[Any]:
    """Map a .npy file of vectors into memory; it must have a row for each of so many lines."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        problem = (error.strerror or first_line(error)).lower()
        raise InputError(problem, file=path, fix="check the path") from error
    except ValueError as error:
        fix = "make it with calque embed or numpy.save"
        raise InputError("not a whole .npy file of numbers", file=path, fix=fix) from error
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind != "f":
        raise InputError("not a table of vectors", file=path, fix="make it with calque embed")
    if n_lines is not None and len(array) != n_lines:
        problem = f"{len(array):,} vectors for {n_lines:,} lines"
        raise InputError(problem, file=path, fix="embed the same file, line by line")
    return array


def usable_rows(
    array: npt.NDArray[Any],
    file: object,
    lines: npt.NDArray[np.int64] | None = None,
    device: Any = "cpu",
) -> tuple[UnitRows, npt.NDArray[np.int64]]:
    """Give the vectors of some lines that are not zero, and which of them these are."""
    n_rows = len(array if lines is None else lines)
    kept: list[npt.NDArray[np.int64]] = []
    for start in range(0, n_rows, BLOCK_ROWS):
        part = slice(start, start + BLOCK_ROWS)
        lengths = np.square(array[part if lines is None else lines[part]], dtype=np.float32).sum(1)
        if not np.isfinite(lengths).all():
            row = start + int(np.argmin(np.isfinite(lengths)))
            row = row if lines is None else int(lines[row])
            raise InputError(
                f"vector {row + 1} is not finite", file=file, fix="embed the text again"
            )
        kept.append(start + np.flatnonzero(lengths))
    rows = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    if lines is None and len(rows) == n_rows:
        return UnitRows(array, None, device), rows
    return UnitRows(array, rows if lines is None else lines[rows], device), rows


def _embed(
    encoder: Encoder, sentences: list[str], layer: int | None, raw: bool
) -> tuple[bytes, tuple[int, ...]]:
    """Give the vectors of some sentences as bytes, and the figures of their report."""
    number, finish = choose_output(encoder, layer, raw)
    content, report = b"", EmbedReport()
    for block in embed_blocks(encoder, sentences, [number]):
        content += finish(block.vectors[number]).astype("<f4", copy=False).tobytes()
        report += block.report
    return content, astuple(report)


def _cut(store: SentenceStore) -> Iterator[list[str]]:
    sentences = iter(store)
    for _ in range(math.ceil(len(store) / BLOCK_SENTENCES)):
        yield list(islice(sentences, BLOCK_SENTENCES))


def _name_vectors(encoder: Encoder, store: SentenceStore, layer: int | None, raw: bool) -> str:
    files = sorted(Path(encoder.folder).glob("*.safetensors"))
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    told = repr((stamps, layer, raw, store.digest, len(store)))
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


MARGINS: tuple[str, ...] = get_args(Margin)
RETRIEVALS: tuple[str, ...] = get_args(Retrieval)
DECIMALS = 6


@dataclass(frozen=True, slots=True)
class MiningSettings:
    """How neighbors are found and pairs chosen; see `calque.algorithms.margin`."""

    margin: Margin = "ratio"
    retrieval: Retrieval = "max"
    k: int = 4
    index: str = EXACT
    probes: int = 16

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name, value, known in (
            ("margin", self.margin, MARGINS),
            ("retrieval", self.retrieval, RETRIEVALS),
        ):
            if value not in known:
                raise InputError(f"no {name} {value!r}", fix=f"choose from: {', '.join(known)}")
        if self.k < 1 or self.probes < 1:
            raise InputError(f"k={self.k}, probes={self.probes}", fix="give 1 or more")


@dataclass(frozen=True, slots=True)
class Side:
    """One language of a search: its vectors, and whose they are.

    `rows` has the row of `store` of every vector. Without a store, sentences go by the number of
    their line.
    """

    vectors: UnitRows
    rows: npt.NDArray[np.int64]
    store: SentenceStore | None = None

    def show(self, place: int) -> tuple[str, str]:
        """Give the name, if there is one, and the text of a sentence."""
        row = int(self.rows[place])
        return ("", str(row + 1)) if self.store is None else self.store[row]


def mine(
    src: Side,
    tgt: Side,
    settings: MiningSettings | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> MinedPairs:
    """Find the pairs of sentences that may be translations, the most likely first."""
    settings = settings or MiningSettings()
    if not len(src.vectors) or not len(tgt.vectors):
        raise InputError("a side without sentences", fix="give other files")
    if src.vectors.width != tgt.vectors.width:
        problem = f"vectors of {src.vectors.width} and {tgt.vectors.width} numbers"
        raise InputError(problem, fix="embed both texts with the same model")
    k = min(settings.k, len(src.vectors), len(tgt.vectors))
    near = find_neighbors(
        src.vectors, tgt.vectors, k, index=settings.index, probes=settings.probes, on_rows=on_rows
    )
    return mine_pairs(near, settings.margin, settings.retrieval)


def locate_gold(gold: PathLike, texts: Sequence[SentenceStore | int]) -> set[tuple[int, int]]:
    """Find the rows of a list of true pairs, by names or sentences, in the two texts.

    Of vectors alone, which are given by their number, pairs are those of lines. One that is not
    there is an error, which no one should have to wait for until the text is embedded.
    """
    entries = list(read_id_pairs(gold))
    if not entries:
        raise InputError("holds no pairs", file=shown(gold), fix="give another list")
    found = [
        _locate(text, {entry[column] for entry in entries}) for column, text in enumerate(texts)
    ]
    for number, entry in enumerate(entries, start=1):
        for name, known, text in zip(entry, found, texts, strict=True):
            if name not in known:
                file = "the vectors" if isinstance(text, int) else shown(text.file)
                problem, fix = f"{name[:40]!r} is not in {file}", "list pairs of these texts"
                raise InputError(problem, file=shown(gold), line=number, fix=fix)
    return {(found[0][entry[0]], found[1][entry[1]]) for entry in entries}


def choose_threshold(pairs: MinedPairs, src: Side, tgt: Side, gold: set[tuple[int, int]]) -> Cut:
    """Find the score to cut at, by the rows of true pairs."""
    chosen = zip(src.rows[pairs.src].tolist(), tgt.rows[pairs.tgt].tolist(), strict=True)
    is_gold = np.fromiter((pair in gold for pair in chosen), np.bool_, len(pairs))
    return choose_cut(pairs.scores, is_gold, len(gold))


def write_pairs(stream: TextIO, pairs: MinedPairs, src: Side, tgt: Side) -> int:
    """Write `score ⇥ source ⇥ target` lines, and the names after them where there are any.

    A tab inside a sentence becomes a space; how many sentences had one is given back.
    """
    n_tabs = 0
    for score, left, right in zip(
        pairs.scores.tolist(), pairs.src.tolist(), pairs.tgt.tolist(), strict=True
    ):
        shown_pair = src.show(left), tgt.show(right)
        n_tabs += sum("\t" in text for _, text in shown_pair)
        texts = [text.replace("\t", " ") for _, text in shown_pair]
        names = [name for name, _ in shown_pair] if any(name for name, _ in shown_pair) else []
        stream.write("\t".join([f"{score:.{DECIMALS}f}", *texts, *names]) + "\n")
    return n_tabs


def _locate(text: SentenceStore | int, wanted: set[str]) -> dict[str, int]:
    if not isinstance(text, int):
        return text.find(wanted)
    known = range(1, text + 1)
    return {name: int(name) - 1 for name in wanted if name.isdecimal() and int(name) in known}
