"""Bitext mining: find translations in two texts that are not parallel (Artetxe & Schwenk, 2019)."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import shutil
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, get_args

import numpy as np

from calque.algorithms.margin import (
    MARGIN_NEIGHBORS,
    Margin,
    MinedPairs,
    Retrieval,
    ThresholdScore,
    find_best_threshold,
    mine_pairs,
)
from calque.algorithms.nearest import EXACT_INDEX, UnitRows, check_faiss_index, find_neighbors
from calque.errors import DISK_FULL, InputError, explain_os_error
from calque.io.bitext import has_sentence_ids, read_id_pairs, split_sentence_id
from calque.io.files import (
    PathLike,
    SkipBad,
    SkippedLines,
    check_output_file,
    check_skip_list,
    display_name,
    open_skip_list,
    report_bad_line,
    scan_lines,
    write_atomically,
)
from calque.io.locks import lock_output
from calque.io.resumable import (
    INPUT_SIZE,
    ResumableFile,
    add_resume_note,
    check_own_files,
    unfinished_run_error,
    warn_of_damage,
)
from calque.io.structured import read_array
from calque.models.inference import choose_device, device_of, load_encoder
from calque.sentences.embed import BLOCK_SENTENCES, EmbedCounts, choose_output, embed_blocks
from calque.types import count_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.types import Progress

    IntArray = npt.NDArray[np.int64]
    Vectors = npt.NDArray[np.float32]

# Names in OUTPUT.mining: copies of the texts, and vectors, complete or not.
OWN_FILES = re.compile(r"(src|tgt)\.txt|[0-9a-f-]+\.f32(\.partial)?|\.calque-.*")
# Vectors checked for zeros at once.
CHECK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class MineResult:
    """Where the pairs were written and how many, and what was left out.

    `n_src` and `n_tgt` sentences were compared; `n_below` pairs scored less than `threshold`.
    `dev_score` tells how well the threshold found with development pairs separates them.
    """

    output: Path
    n_pairs: int
    n_src: int
    n_tgt: int
    threshold: float | None
    n_below: int
    dev_score: ThresholdScore | None
    n_duplicates: int
    n_empty: int
    n_skipped: int
    n_zero: int
    n_long: int
    n_with_tabs: int


def mine(
    src: PathLike,
    tgt: PathLike,
    *,
    output: PathLike,
    model: str | Path | Encoder | None = None,
    vectors: tuple[PathLike, PathLike] | None = None,
    threshold: float | None = None,
    dev: PathLike | None = None,
    margin: str = "ratio",
    retrieval: str = "max",
    neighbors: int = MARGIN_NEIGHBORS,
    index: str = EXACT_INDEX,
    probes: int = 16,
    ids: bool = False,
    layer: int | None = None,
    raw: bool = False,
    resume: bool = False,
    skip_bad: PathLike | None = None,
    device: str = "auto",
    precision: str = "auto",
    progress: Progress | None = None,
) -> MineResult:
    """Find sentences of two texts that translate each other, and write them, best first.

    A line of the output is `score TAB source TAB target`, followed by the ids of the two sentences
    if they have any. The score compares the cosine of a pair with those of its nearest neighbors
    (Artetxe & Schwenk, 2019). Until the output is complete, sentences and vectors are kept in
    OUTPUT.mining, from which an interrupted run can be resumed.

    Args:
        src: Text with one sentence, or `id TAB sentence`, per line; plain, .gz, .xz or .zst.
            Or a .npy file of vectors: then the output has line numbers instead of sentences.
        tgt: The same for the other language.
        output: Output file.
        model: Model folder, hub name, `calque-mini` (the default) or a loaded model.
        vectors: .npy files with the vectors of the lines of both texts, as `embed_file` writes.
        threshold: Keep only pairs with at least this score.
        dev: File with true pairs, `id TAB id` or `sentence TAB sentence`, by which the threshold
            with the best F1 is chosen.
        margin: `ratio`, `distance`, or `absolute` (the cosine itself).
        retrieval: `max` (each sentence at most once), `intersect`, `forward` or `backward`.
        neighbors: Number of nearest neighbors for the margin.
        index: `exact`, or a FAISS index for millions of sentences, such as `IVF1024,Flat`.
        probes: Number of lists of a FAISS index that are searched.
        ids: Lines are `id TAB sentence`. Default: inferred, for ids like those of BUCC.
        layer: Layer: 0 is the embedding layer, -1 the last. Default: the model's best layer.
        raw: Ignore the language-neutral space stored with the model.
        resume: Continue an interrupted run with the same output.
        skip_bad: Skip invalid lines and list them in this file.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        precision: `fp32`, `bf16`, or `auto`: bf16 on CUDA, fp32 elsewhere.
        progress: Called with the stage, the sentences done and their number.

    Examples:
        >>> calque.mine("news.de", "news.en", output="de-en.tsv").n_pairs  # doctest: +SKIP
        1207
    """
    files, output = (os.fspath(src), os.fspath(tgt)), Path(output)
    inputs = [*files, *(os.fspath(path) for path in (*(vectors or ()), *([dev] if dev else [])))]
    _check_options(margin, retrieval, neighbors, probes)
    _check_inputs(inputs, threshold, dev is not None, vectors is not None)
    check_output_file(output, inputs)
    skip_list = None if skip_bad is None else Path(skip_bad)
    check_skip_list(skip_list, inputs, output)
    with ExitStack() as stack:
        skipped = open_skip_list(skip_list, stack)
        folder = stack.enter_context(_open_working_folder(output, resume))
        if progress is not None:
            progress("reading", 0, None)
        stores = [] if files[0].endswith(".npy") else _read_texts(files, folder, ids, skipped)
        for store in stores:
            stack.callback(store.close)
        sides = None
        if vectors is not None or not stores:
            sides = _open_sides(vectors or files, stores, device)
        gold = set[tuple[int, int]]()
        if dev is not None:
            gold = locate_gold(dev, stores or [len(side.vectors.array) for side in sides or ()])
        n_long = 0
        if sides is None:
            encoder = load_encoder(model, device, precision=precision)
            check_faiss_index(index, encoder.hidden_size)
            sides, n_long = _embed_sides(encoder, stores, folder, layer, raw, resume, progress)
        pairs = _search(*sides, margin, retrieval, neighbors, index, probes, progress)
        score = None
        if dev is not None:
            score = _choose_threshold(pairs, *sides, gold)
            if not score.n_correct:
                raise InputError(
                    f"none of the {score.n_gold:,} pairs is among the {len(pairs):,} pairs found",
                    file=dev,
                    fix="use a better model, or other development pairs",
                )
            threshold = score.threshold
        kept = pairs if threshold is None else pairs.above(threshold)
        with write_atomically(output) as stream:
            n_with_tabs = _write_pairs(stream, kept, *sides)
        n_src, n_tgt = (len(side.vectors) for side in sides)
        n_rows = sum(map(len, stores)) or sum(len(side.vectors.array) for side in sides)
        return MineResult(
            output=output,
            n_pairs=len(kept),
            n_src=n_src,
            n_tgt=n_tgt,
            threshold=threshold,
            n_below=len(pairs) - len(kept),
            dev_score=score,
            n_duplicates=sum(store.n_duplicates for store in stores),
            n_empty=sum(store.n_empty for store in stores),
            n_skipped=0 if skipped is None else skipped.n_lines,
            n_zero=n_rows - n_src - n_tgt,
            n_long=n_long,
            n_with_tabs=n_with_tabs,
        )


def _check_options(margin: str, retrieval: str, neighbors: int, probes: int) -> None:
    for name, value, choices in (
        ("margin", margin, get_args(Margin)),
        ("retrieval", retrieval, get_args(Retrieval)),
    ):
        if value not in choices:
            problem = f"there is no {name} {value!r}"
            raise InputError(problem, fix=f"choose from: {', '.join(choices)}")
    for name, number in (("neighbors", neighbors), ("probes", probes)):
        if number < 1:
            raise InputError(f"{name} is {number}", fix="choose 1 or more")


def _check_inputs(
    inputs: list[str], threshold: float | None, has_dev: bool, has_vectors: bool
) -> None:
    """Raise InputError for options that exclude each other and input that can be read only once."""
    if threshold is not None and has_dev:
        raise InputError(
            "a threshold and development pairs are both given",
            fix="drop --threshold or --dev",
        )
    if threshold is not None and math.isnan(threshold):
        raise InputError("the threshold is not a number", fix="choose a number")
    if "-" in inputs:
        raise InputError("standard input cannot be mined", fix="name a file")
    are_vectors = [name.endswith(".npy") for name in inputs[:2]]
    if any(are_vectors) and (has_vectors or not all(are_vectors)):
        raise InputError(
            "text and vectors are mixed",
            fix="name two texts (and --vectors SRC.npy TGT.npy), or two .npy files",
        )


@contextmanager
def _open_working_folder(output: Path, resume: bool) -> Iterator[Path]:
    """Create OUTPUT.mining; keep it for a later run only if the block fails after embedding."""
    folder = output.with_name(f"{output.name}.mining")
    with lock_output(folder):
        check_own_files(folder, OWN_FILES)
        if folder.exists() and not resume:
            raise unfinished_run_error(folder)
        try:
            folder.mkdir(exist_ok=True)
            yield folder
        except BaseException as error:
            if not any(folder.glob("*.f32*")):  # there are no vectors yet
                shutil.rmtree(folder, ignore_errors=True)
            elif isinstance(error, KeyboardInterrupt):
                add_resume_note(error, folder)
            elif isinstance(error, InputError):
                kept = f"the vectors are kept in {folder}: continue with --resume"
                fix = kept if error.fix is None else f"{error.fix}; {kept}"
                raise InputError(
                    error.problem, file=error.file, line=error.line, fix=fix
                ) from error
            if isinstance(error, OSError) and error.errno in (
                errno.EACCES,
                errno.EPERM,
                *DISK_FULL,
            ):
                raise explain_os_error(error, error.filename or folder) from error
            raise
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class SearchSide:
    """Vectors of one language; vector k is of sentence `rows[k]` of `store`.

    Without a store, `rows[k]` is the number of a line, counted from 0.
    """

    vectors: UnitRows
    rows: IntArray
    store: SentenceStore | None = None

    def describe(self, number: int) -> tuple[str, str]:
        """Return the id, or "", and the sentence of a vector."""
        row = int(self.rows[number])
        return ("", str(row + 1)) if self.store is None else self.store[row]


def _read_texts(
    files: tuple[str, str], folder: Path, ids: bool, skipped: SkippedLines | None
) -> list[SentenceStore]:
    stores = []
    for name, file in zip(("src", "tgt"), files, strict=True):
        skip_bad = None if skipped is None else skipped.of(file)
        store = SentenceStore(file, folder / f"{name}.txt", ids=ids or None, skip_bad=skip_bad)
        if not len(store):
            raise InputError("the file has no sentences", file=file, fix="choose another file")
        stores.append(store)
    return stores


def _open_sides(
    files: tuple[PathLike, PathLike], stores: Sequence[SentenceStore], device: str
) -> tuple[SearchSide, SearchSide]:
    """Map given vectors, of the lines of texts or without texts."""
    torch_device, sides = choose_device(device), []
    for number, file in enumerate(files):
        store = stores[number] if stores else None
        vectors = open_vectors(file, None if store is None else store.n_lines)
        lines = None if store is None else store.lines
        sides.append(SearchSide(*_drop_zeros(vectors, file, lines, torch_device), store))
    return sides[0], sides[1]


def _embed_sides(
    encoder: Encoder,
    stores: Sequence[SentenceStore],
    folder: Path,
    layer: int | None,
    raw: bool,
    resume: bool,
    progress: Progress | None,
) -> tuple[tuple[SearchSide, SearchSide], int]:
    """Embed both texts; also return how many sentences were split into windows."""
    sides, n_long = [], 0
    advance = count_progress(progress, "embedding", sum(map(len, stores)))
    for store in stores:
        path, n_split = embed_store(
            encoder, store, folder, layer=layer, raw=raw, resume=resume, advance=advance
        )
        vectors = np.memmap(path, dtype="<f4", mode="r").reshape(-1, encoder.hidden_size)
        rows = _drop_zeros(vectors, store.file, None, device_of(encoder))
        sides.append(SearchSide(*rows, store))
        n_long += n_split
    return (sides[0], sides[1]), n_long


def _search(
    src: SearchSide,
    tgt: SearchSide,
    margin: str,
    retrieval: str,
    neighbors: int,
    index: str,
    probes: int,
    progress: Progress | None,
) -> MinedPairs:
    """Return candidate pairs, the highest score first."""
    if not len(src.vectors) or not len(tgt.vectors):
        raise InputError("all vectors of one side are zero", fix="choose other files")
    if src.vectors.width != tgt.vectors.width:
        raise InputError(
            f"the vectors have {src.vectors.width} and {tgt.vectors.width} dimensions",
            fix="embed both texts with the same model",
        )
    n_sentences = len(src.vectors) + len(tgt.vectors)
    found = find_neighbors(
        src.vectors,
        tgt.vectors,
        min(neighbors, len(src.vectors), len(tgt.vectors)),
        index=index,
        probes=probes,
        on_rows=count_progress(progress, "comparing", n_sentences),
    )
    return mine_pairs(found, margin, retrieval)  # type: ignore[arg-type]


def _choose_threshold(
    pairs: MinedPairs, src: SearchSide, tgt: SearchSide, gold: set[tuple[int, int]]
) -> ThresholdScore:
    """Return the threshold with the best F1 against the rows of true pairs."""
    candidates = zip(src.rows[pairs.src].tolist(), tgt.rows[pairs.tgt].tolist(), strict=True)
    is_gold = np.fromiter((pair in gold for pair in candidates), np.bool_, len(pairs))
    return find_best_threshold(pairs.scores, is_gold, len(gold))


def _write_pairs(stream: TextIO, pairs: MinedPairs, src: SearchSide, tgt: SearchSide) -> int:
    """Write `score TAB source TAB target`, and the ids if there are any.

    A tab inside a sentence becomes a space. Return the number of sentences that had one.
    """
    n_with_tabs = 0
    for score, left, right in zip(
        pairs.scores.tolist(), pairs.src.tolist(), pairs.tgt.tolist(), strict=True
    ):
        names, texts = zip(src.describe(left), tgt.describe(right), strict=True)
        n_with_tabs += sum("\t" in text for text in texts)
        columns = [f"{score:.6f}", *(text.replace("\t", " ") for text in texts)]
        stream.write("\t".join([*columns, *names] if any(names) else columns) + "\n")
    return n_with_tabs


def locate_gold(gold: PathLike, texts: Sequence[SentenceStore | int]) -> set[tuple[int, int]]:
    """Return the rows of a list of true pairs, given by ids or sentences, in the two texts.

    Vectors without text are given by their number, and pairs of them by line numbers. A pair that
    is not in the texts raises InputError, before the texts are embedded.
    """
    entries = list(read_id_pairs(gold))
    if not entries:
        raise InputError(
            "the file has no pairs", file=display_name(gold), fix="choose another file"
        )
    found = [
        _locate(text, {entry[column] for entry in entries}) for column, text in enumerate(texts)
    ]
    for number, entry in enumerate(entries, start=1):
        for name, rows, text in zip(entry, found, texts, strict=True):
            if name not in rows:
                file = "the vectors" if isinstance(text, int) else display_name(text.file)
                raise InputError(
                    f"{name[:40]!r} is not in {file}",
                    file=display_name(gold),
                    line=number,
                    fix="list pairs of these texts",
                )
    return {(found[0][entry[0]], found[1][entry[1]]) for entry in entries}


def _locate(text: SentenceStore | int, names: set[str]) -> dict[str, int]:
    if not isinstance(text, int):
        return text.find(names)
    numbers = range(1, text + 1)
    return {name: int(name) - 1 for name in names if name.isdecimal() and int(name) in numbers}


def open_vectors(path: PathLike, n_lines: int | None = None) -> npt.NDArray[Any]:
    """Map a .npy file of vectors into memory, and check that it has a row for each line."""
    vectors = read_array(Path(path), mapped=True, fix="write it with calque embed or numpy.save")
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise InputError(
            "this is not a matrix of floating-point numbers",
            file=path,
            fix="write it with calque embed",
        )
    if n_lines is not None and len(vectors) != n_lines:
        raise InputError(
            f"there are {len(vectors):,} vectors for {n_lines:,} lines",
            file=path,
            fix="embed the same file, line by line",
        )
    return vectors


def _drop_zeros(
    vectors: npt.NDArray[Any], file: object, lines: IntArray | None, device: Any
) -> tuple[UnitRows, IntArray]:
    """Return the vectors (of some lines) that are not zero, and which of them these are."""
    n_rows = len(vectors if lines is None else lines)
    kept: list[IntArray] = []
    for start in range(0, n_rows, CHECK_ROWS):
        part = slice(start, start + CHECK_ROWS)
        block = vectors[part if lines is None else lines[part]]
        lengths = np.square(block, dtype=np.float32).sum(1)
        if not np.isfinite(lengths).all():
            row = start + int(np.argmin(np.isfinite(lengths)))
            number = 1 + (row if lines is None else int(lines[row]))
            raise InputError(
                f"vector {number} is not finite", file=file, fix="embed the text again"
            )
        kept.append(start + np.flatnonzero(lengths))
    rows = np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64)
    if lines is None and len(rows) == n_rows:
        return UnitRows(vectors, None, device), rows
    return UnitRows(vectors, rows if lines is None else lines[rows], device), rows


def embed_store(
    encoder: Encoder,
    store: SentenceStore,
    folder: Path,
    *,
    layer: int | None = None,
    raw: bool = False,
    resume: bool = False,
    advance: Callable[[int], None] = lambda n_sentences: None,
) -> tuple[Path, int]:
    """Embed stored sentences into a file; also return how many were split into windows.

    The file is named after the model, the text, the options and its content, so that with `resume`
    a complete file is used as it is, a damaged one is replaced, and an incomplete one is continued.
    """
    name = _hash_inputs(encoder, store, layer, raw)
    for path in sorted(folder.glob(f"{name}-*.f32")) if resume else ():
        if path.stem == f"{name}-{_hash_file(path)}":
            advance(len(store))
            return path, 0
        warn_of_damage(path, "the vectors are damaged and are computed again")
        path.unlink()
    path = folder / f"{name}.f32"
    with ResumableFile(path, {INPUT_SIZE: len(store), "vectors": name}, resume=resume) as file:
        sentences = iter(store)
        while block := list(islice(sentences, BLOCK_SENTENCES)):
            if file.begin_block("\n".join(block).encode()):
                file.append(*_embed(encoder, block, layer, raw))
            advance(len(block))
        counts = EmbedCounts(*file.finish())
    return path.rename(path.with_stem(f"{name}-{_hash_file(path)}")), counts.n_long


def _hash_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _embed(
    encoder: Encoder, sentences: list[str], layer: int | None, raw: bool
) -> tuple[bytes, tuple[int, ...]]:
    """Return the vectors of sentences as bytes, and their counts."""
    number, transform = choose_output(encoder, layer, raw)
    content, counts = b"", EmbedCounts()
    for block in embed_blocks(encoder, sentences, [number]):
        content += transform(block.vectors[number]).astype("<f4", copy=False).tobytes()
        counts += block.counts
    return content, astuple(counts)


def _hash_inputs(encoder: Encoder, store: SentenceStore, layer: int | None, raw: bool) -> str:
    files = sorted(Path(encoder.folder).glob("*.safetensors"))
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    dtype = next(encoder.parameters()).dtype
    inputs = repr((stamps, str(dtype), layer, raw, store.digest, len(store)))
    return hashlib.blake2b(inputs.encode(), digest_size=8).hexdigest()


class SentenceStore:
    """The distinct sentences of a file, in its order; blank lines and repetitions are counted.

    It uses 16 bytes of memory per line, and as much disk space as the uncompressed file. Sentences
    that differ only in surrounding white space are the same.
    """

    def __init__(
        self,
        file: PathLike,
        spool: Path,
        *,
        ids: bool | None = None,
        skip_bad: SkipBad | None = None,
    ) -> None:
        """Copy a file to `spool`.

        Args:
            file: The text.
            spool: The copy, which is read from then on.
            ids: Whether lines are `id TAB sentence`; None to look at the first line.
            skip_bad: Called with invalid lines, which are treated as blank.
        """
        self.file, self.spool = file, spool
        self.ids = has_sentence_ids(file) if ids is None else ids
        offsets, hashes, is_blank, self.digest = self._copy(skip_bad)
        self.n_lines, self.n_empty = len(hashes), int(is_blank.sum())
        filled = np.flatnonzero(~is_blank)
        _, first, self._groups = np.unique(hashes[filled], return_index=True, return_inverse=True)
        order = np.argsort(first)
        self._rows = np.empty(len(order), dtype=np.int64)  # the row of every group of equal lines
        self._rows[order] = np.arange(len(order))
        self.lines: IntArray = filled[first[order]]  # the line of every row, counted from 0
        self.n_duplicates = len(filled) - len(self.lines)
        self._starts, self._stops = offsets[self.lines], offsets[self.lines + 1]
        self._handle: int | None = None

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the distinct sentences."""
        return (self[row][1] for row in range(len(self)))

    def __getitem__(self, row: int) -> tuple[str, str]:
        """Return the id, or "", and the sentence of a row."""
        if self._handle is None:
            self._handle = os.open(self.spool, os.O_RDONLY)
        start, stop = int(self._starts[row]), int(self._stops[row])
        line = os.pread(self._handle, stop - start, start).decode().removesuffix("\n")
        return self._split(line)

    def close(self) -> None:
        """Close the copy."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def find(self, names: Collection[str]) -> dict[str, int]:
        """Return the rows of ids, or of sentences if there are no ids; unknown ones are left out.

        All ids of a repeated sentence have the row of its first occurrence.
        """
        found: dict[str, int] = {}
        groups = iter(self._groups.tolist())
        with open(self.spool, encoding="utf-8", newline="\n") as stream:
            for line in stream:
                name, sentence = self._split(line.removesuffix("\n"))
                if not sentence:
                    continue
                row = int(self._rows[next(groups)])
                key = name if self.ids else sentence
                if key in names:
                    found[key] = row
        return found

    def _split(self, line: str) -> tuple[str, str]:
        if not self.ids:
            return "", line
        name, _, sentence = line.partition("\t")
        return name, sentence

    def _copy(
        self, skip_bad: SkipBad | None
    ) -> tuple[IntArray, IntArray, npt.NDArray[np.bool_], str]:
        """Write the copy; return where lines start, their hashes, which are blank, and a digest."""
        offsets, hashes, blank = array("q", [0]), array("q"), bytearray()
        digest, end = hashlib.blake2b(digest_size=16), 0
        with open(self.spool, "wb") as stream:
            for number, line in enumerate(scan_lines(self.file), start=1):
                name = sentence = ""
                if not isinstance(line, str):
                    report_bad_line(line, self.file, number, skip_bad)
                elif self.ids:
                    name, sentence = split_sentence_id(line, self.file, number)
                else:
                    sentence = line.strip()
                content = (f"{name}\t{sentence}\n" if self.ids else f"{sentence}\n").encode()
                stream.write(content)
                digest.update(content)
                end += len(content)
                offsets.append(end)
                hashes.append(hash(sentence))  # 64 bits: 10 million lines collide once in 10⁵ runs
                blank.append(not sentence)
        is_blank = np.frombuffer(blank, dtype=np.bool_)
        starts, keys = (np.frombuffer(part, dtype=np.int64) for part in (offsets, hashes))
        return starts, keys, is_blank, digest.hexdigest()
