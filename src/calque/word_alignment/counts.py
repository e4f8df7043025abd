"""Words as numbers, and sentences as arrays of them: what statistical aligners count.

Sentence pairs longer than a statistical aligner takes, cut into overlapping parts.

Word links of many sentence pairs in little memory, and two directions of them made one.

How often words were linked to one another, and the translation probabilities that follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.io.outputs import read_array, read_words, write_words
from calque.tokens.ragged import ranges
from calque.types import Links
from calque.word_alignment.protocol import AlignedBlock, AlignReport

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]
    Ends = npt.NDArray[np.uint16]  # parts are short
    FloatArray = npt.NDArray[np.float32]

UNKNOWN = -1
CHUNK_PAIRS = 10_000


class Vocabulary:
    """The words of a language, numbered in the order they were first met.

    With `lowercase`, words that differ in case only are one.
    """

    def __init__(self, words: Iterable[str] = (), *, lowercase: bool = True) -> None:
        self.lowercase, self.words = lowercase, list(words)
        self._numbers = _Numbers(self.words, lowercase)

    def __len__(self) -> int:
        return len(self.words)

    def learn(self, sentences: Iterable[Sequence[str]]) -> NumberedText:
        """Number the words of sentences; a new word gets the next number."""
        sides = list(sentences)
        return _lay_out(sides, map(self._numbers.__getitem__, chain.from_iterable(sides)))

    def find(self, sentences: Iterable[Sequence[str]]) -> NumberedText:
        """Number the words of sentences by what is known; a word never met is −1."""
        sides = list(sentences)
        known = self._numbers.get
        words = chain.from_iterable(sides)
        if self.lowercase:
            return _lay_out(sides, (known(w, known(w.lower(), UNKNOWN)) for w in words))
        return _lay_out(sides, (known(word, UNKNOWN) for word in words))


@dataclass(frozen=True, slots=True)
class NumberedText:
    """Sentences laid end to end; the words of sentence k are `ids[offsets[k]:offsets[k + 1]]`."""

    ids: npt.NDArray[np.int32]
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """Count the words of every sentence."""
        return np.diff(self.offsets)

    def cut(self, rows: IntArray, first: IntArray, stop: IntArray) -> NumberedText:
        """Take words `first` to `stop` of the sentences asked for."""
        begins, lengths = self.offsets[rows] + first, stop - first
        chunks = (slice(low, low + CHUNK_PAIRS) for low in range(0, len(rows), CHUNK_PAIRS))
        ids = [self.ids[ranges(begins[chunk], lengths[chunk])] for chunk in chunks]
        return NumberedText(np.concatenate([self.ids[:0], *ids]), starts_of(lengths))

    def sentences(self, start: int = 0, stop: int | None = None) -> Iterator[list[int]]:
        """Give the words of consecutive sentences as lists."""
        stop = len(self) if stop is None else min(stop, len(self))
        for low in range(start, stop, CHUNK_PAIRS):
            bounds = self.offsets[low : min(low + CHUNK_PAIRS, stop) + 1]
            ids = self.ids[bounds[0] : bounds[-1]].tolist()
            yield from (ids[i:j] for i, j in pairwise((bounds - bounds[0]).tolist()))


@dataclass(frozen=True, slots=True)
class NumberedPairs:
    """The two sides of sentence pairs."""

    src: NumberedText
    tgt: NumberedText

    def __len__(self) -> int:
        return len(self.src)


def number_pairs(pairs: Iterable[WordPair], src: Vocabulary, tgt: Vocabulary) -> NumberedPairs:
    """Number the words of sentence pairs, and put the new ones into the vocabularies."""
    iterator = iter(pairs)
    parts: list[tuple[NumberedText, NumberedText]] = []
    while chunk := list(islice(iterator, CHUNK_PAIRS)):
        parts.append((src.learn(pair[0] for pair in chunk), tgt.learn(pair[1] for pair in chunk)))
    return NumberedPairs(_join(part[0] for part in parts), _join(part[1] for part in parts))


def find_pairs(pairs: Sequence[WordPair], src: Vocabulary, tgt: Vocabulary) -> NumberedPairs:
    """Number the words of sentence pairs by what is known; other words are −1."""
    return NumberedPairs(src.find(pair[0] for pair in pairs), tgt.find(pair[1] for pair in pairs))


def starts_of(lengths: npt.NDArray[Any]) -> IntArray:
    """Say where sequences of these lengths begin when laid end to end, and where the last ends.

    >>> starts_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


class _Numbers(dict[str, int]):
    """Numbers by form; a form looked up for the first time gets one.

    Forms are kept as they were written, so that most words need not be lower-cased again.
    """

    def __init__(self, words: list[str], lowercase: bool) -> None:
        super().__init__((word, number) for number, word in enumerate(words))
        self.words, self.lowercase = words, lowercase

    def __missing__(self, form: str) -> int:
        word = form.lower() if self.lowercase else form
        number = self.get(word)
        if number is None:
            number = self[word] = len(self.words)
            self.words.append(word)
        self[form] = number
        return number


def _lay_out(sides: list[Sequence[str]], numbers: Iterable[int]) -> NumberedText:
    lengths = np.array(list(map(len, sides)), dtype=np.int64)
    return NumberedText(np.array(list(numbers), dtype=np.int32), starts_of(lengths))


def _join(texts: Iterable[NumberedText]) -> NumberedText:
    parts = list(texts)
    ids = [np.zeros(0, dtype=np.int32), *(part.ids for part in parts)]
    lengths = [np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)]
    return NumberedText(np.concatenate(ids), starts_of(np.concatenate(lengths)))


# eflomal gives no links to a sentence of 1,024 words or more, and says nothing; fast_align's time
# grows with the cube of the length.
LONGEST = 1023


@dataclass(frozen=True, slots=True)
class Seams:
    """Which parts belong to which pairs; those of pair p are parts `starts[p]:starts[p + 1]`.

    A pair with an empty side has no part, a short one has one, and is it. Of the others the rows
    of `cuts` tell, part by part: its number, where it begins in the source and in the target, and
    from where to where its links count in each.
    """

    starts: IntArray
    cuts: IntArray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def count_parts(self, start: int, stop: int) -> IntArray:
        """Count the parts of some pairs."""
        return np.diff(self.starts[start : stop + 1])

    def sew(self, links: Links, start: int, stop: int) -> Links:
        """Make the links of the parts of some pairs links of the pairs."""
        first, last = int(self.starts[start]), int(self.starts[stop])
        owners = np.repeat(np.arange(stop - start), self.count_parts(start, stop))
        pairs, src, tgt, scores = owners[links.pairs], links.src, links.tgt, links.scores
        low, high = np.searchsorted(self.cuts[:, 0], [first, last])
        if low < high:
            begin_src, begin_tgt, *own = _spread(self.cuts[low:high], first, last)[:, links.pairs]
            src, tgt = src + begin_src, tgt + begin_tgt
            is_own = (src >= own[0]) & (src < own[1]) & (tgt >= own[2]) & (tgt < own[3])
            order = np.lexsort((tgt[is_own], src[is_own], pairs[is_own]))
            kept = np.flatnonzero(is_own)[order]
            pairs, src, tgt, scores = pairs[kept], src[kept], tgt[kept], scores[kept]
        return Links(pairs, src, tgt, scores, stop - start)

    def write(self, folder: Path) -> None:
        """Write the seams into a folder."""
        np.save(folder / "seams.starts.npy", self.starts)
        np.save(folder / "seams.cuts.npy", self.cuts)

    @classmethod
    def read(cls, folder: Path) -> Seams:
        """Read the seams from a folder."""
        return cls(read_array(folder / "seams.starts.npy"), read_array(folder / "seams.cuts.npy"))


def cut_long(pairs: NumberedPairs) -> tuple[NumberedPairs, Seams]:
    """Cut the pairs that have too many words on a side, and leave out the empty ones."""
    n_src, n_tgt = pairs.src.lengths, pairs.tgt.lengths
    is_filled = (n_src > 0) & (n_tgt > 0)
    is_long = is_filled & (np.maximum(n_src, n_tgt) > LONGEST)
    whole = np.flatnonzero(is_filled & ~is_long)
    zeros = np.zeros_like(whole)
    held = [np.stack([whole, zeros, n_src[whole], zeros, n_tgt[whole]], axis=1)]
    n_parts, own = is_filled.astype(np.int64), [np.zeros((0, 4), dtype=np.int64)]
    for number in np.flatnonzero(is_long).tolist():
        ranges, own_ranges = _cut(int(n_src[number]), int(n_tgt[number]))
        held.append(np.insert(ranges, 0, number, axis=1))
        own.append(own_ranges)
        n_parts[number] = len(ranges)
    table = np.concatenate(held)
    table = table[np.argsort(table[:, 0], kind="stable")]
    rows, s0, s1, t0, t1 = table.T
    cut = NumberedPairs(pairs.src.cut(rows, s0, s1), pairs.tgt.cut(rows, t0, t1))
    places = np.flatnonzero(is_long[rows])
    begins = [places, s0[places], t0[places]]
    cuts = np.concatenate([np.stack(begins, axis=1), np.concatenate(own)], axis=1)
    return cut, Seams(starts_of(n_parts), cuts)


def _cut(n_src: int, n_tgt: int) -> tuple[IntArray, IntArray]:
    """Cut both sides in step into segments; a part is two of them, and shares each with the next.

    The links of a word count in the part that has it nearer to its middle. That goes by the longer
    side: the other one may have fewer words than there are parts.
    """
    # A part may have a word more at each end than two segments, where they begin within words.
    n_segments = -(-max(n_src, n_tgt) // ((LONGEST - 2) // 2))
    src, own_src = _segment(n_src, n_segments)
    tgt, own_tgt = _segment(n_tgt, n_segments)
    if n_src < n_tgt:
        own_src = src
    else:
        own_tgt = tgt
    return np.concatenate([src, tgt], axis=1), np.concatenate([own_src, own_tgt], axis=1)


def _segment(n_words: int, n_segments: int) -> tuple[IntArray, IntArray]:
    """Give the words that each part holds, and those in its middle."""
    cuts = np.linspace(0, n_words, n_segments + 1)
    first, stop = np.floor(cuts[:-2]).astype(np.int64), np.ceil(cuts[2:]).astype(np.int64)
    middles = ((cuts[:-1] + cuts[1:]) / 2).astype(np.int64)
    middles[0], middles[-1] = 0, n_words
    return np.stack([first, stop], axis=1), np.stack([middles[:-1], middles[1:]], axis=1)


def _spread(cuts: IntArray, first: int, last: int) -> IntArray:
    """Give the columns of `cuts` for all parts in a range; one that is whole counts everywhere."""
    columns = np.zeros((6, last - first), dtype=np.int64)
    columns[[3, 5]] = np.iinfo(np.int64).max
    columns[:, cuts[:, 0] - first] = cuts[:, 1:].T
    return columns


CHUNK_BYTES = 1 << 24
# Links are symmetrized in padded batches of so many cells.
BATCH_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedLinks:
    """Row k of `ends` is a link (source, target); those of pair p are at offsets p and p + 1."""

    ends: Ends
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @staticmethod
    def of(tables: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> PackedLinks:
        """Pack tables of links, each given with how many of them its pairs have."""
        ends, counts = [np.zeros((0, 2), dtype=np.uint16)], [np.zeros(0, dtype=np.int64)]
        for table, some in tables:
            ends.append(table.reshape(-1, 2).astype(np.uint16))
            counts.append(some)
        return PackedLinks(np.concatenate(ends), starts_of(np.concatenate(counts)))

    def select(self, start: int, stop: int) -> Links:
        """Unpack the links of some pairs, in the order of pair, source and target."""
        counts = np.diff(self.offsets[start : stop + 1])
        ends = self.ends[int(self.offsets[start]) : int(self.offsets[stop])].astype(np.int64)
        pairs = np.repeat(np.arange(stop - start), counts)
        order = np.lexsort((ends[:, 1], ends[:, 0], pairs))
        scores = np.ones(len(ends), dtype=np.float32)
        return Links(pairs[order], ends[order, 0], ends[order, 1], scores, stop - start)


@dataclass(frozen=True, slots=True)
class FoundLinks:
    """What an aligner found: forward and backward links, or one set of both made one already.

    They are those of the parts that sentence pairs were cut into, which are most often whole.
    """

    packed: tuple[PackedLinks, ...]
    seams: Seams

    def __len__(self) -> int:
        return len(self.seams)

    def directions(self, start: int, stop: int) -> tuple[Links, Links] | None:
        """Give the links of some pairs by direction, if they are known."""
        if len(self.packed) == 1:
            return None
        forward, backward = (
            self.seams.sew(links, start, stop) for links in self._select(start, stop)
        )
        return forward, backward

    def join(self, start: int, stop: int, symmetrize: str) -> AlignedBlock:
        """Give one set of links for some pairs, and what was met."""
        first, *others = self._select(start, stop)
        links = symmetrize_links(first, others[0], symmetrize) if others else first
        links = self.seams.sew(links, start, stop)
        n_parts = self.seams.count_parts(start, stop)
        is_long = n_parts > 1
        report = AlignReport(
            n_pairs=len(n_parts),
            n_links=len(links.pairs),
            n_empty=int((n_parts == 0).sum()),
            n_long=int(is_long.sum()),
            n_windows=int(n_parts[is_long].sum()),
        )
        return AlignedBlock(links, report)

    def write(self, folder: Path) -> None:
        """Write the links into a folder."""
        self.seams.write(folder)
        for number, links in enumerate(self.packed):
            np.save(folder / f"links.{number}.ends.npy", links.ends)
            np.save(folder / f"links.{number}.offsets.npy", links.offsets)

    @classmethod
    def read(cls, folder: Path, n_sets: int) -> FoundLinks:
        """Map the links in a folder, without reading them all."""
        packed = (
            PackedLinks(
                read_array(folder / f"links.{number}.ends.npy", mapped=True),
                read_array(folder / f"links.{number}.offsets.npy", mapped=True),
            )
            for number in range(n_sets)
        )
        return cls(tuple(packed), Seams.read(folder))

    def _select(self, start: int, stop: int) -> list[Links]:
        first, last = self.seams.starts[[start, stop]].tolist()
        return [links.select(first, last) for links in self.packed]


def read_pharaoh(path: Path) -> PackedLinks:
    """Read a file of `i-j` links, a line a pair, as aligners write them by the million."""
    return PackedLinks.of(map(_parse_pharaoh, _read_whole_lines(path)))


def symmetrize_links(forward: Links, backward: Links, method: str) -> Links:
    """Make two directions one; a link of one direction only scores ½, one of both scores 1."""
    rows = [_symmetrize_batch(*batch, method) for batch in _batch_by_size(forward, backward)]
    empty = np.zeros((0, 3), dtype=np.int64), np.zeros(0, dtype=np.float32)
    cells = np.concatenate([empty[0], *(found for found, _ in rows)])
    scores = np.concatenate([empty[1], *(found for _, found in rows)])
    order = np.lexsort(cells.T[::-1])
    pairs, src, tgt = cells[order].T
    return Links(pairs, src, tgt, scores[order], forward.n_pairs)


def _batch_by_size(forward: Links, backward: Links) -> Iterator[tuple[IntArray, list[IntArray]]]:
    """Group pairs of like size: their numbers, and a table (row, src, tgt) for each direction."""
    sizes = np.zeros(forward.n_pairs, dtype=np.int64)
    for links in (forward, backward):
        np.maximum.at(sizes, links.pairs, np.maximum(links.src, links.tgt) + 1)
    order = np.argsort(-sizes, kind="stable")
    order = order[: np.count_nonzero(sizes)]
    rank = np.empty(forward.n_pairs, dtype=np.int64)
    rank[order] = np.arange(len(order))
    tables = []
    for links in (forward, backward):
        table = np.stack([rank[links.pairs], links.src, links.tgt], axis=1)
        tables.append(table[np.argsort(table[:, 0], kind="stable")])
    start = 0
    while start < len(order):
        stop = min(len(order), start + max(1, BATCH_CELLS // int(sizes[order[start]]) ** 2))
        bounds = (np.searchsorted(table[:, 0], [start, stop]) for table in tables)
        taken = [table[slice(*bound)] for table, bound in zip(tables, bounds, strict=True)]
        yield order[start:stop], [table - [start, 0, 0] for table in taken]
        start = stop


def _symmetrize_batch(
    pairs: IntArray, tables: list[IntArray], method: str
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    import torch

    from calque.algorithms.symmetrize import SYMMETRIZATIONS

    shape = np.max([table.max(axis=0, initial=-1) for table in tables], axis=0) + 1
    matrices = []
    for table in tables:
        matrix = torch.zeros(len(pairs), *shape[1:].tolist(), dtype=torch.bool)
        matrix[tuple(torch.from_numpy(column) for column in table.T)] = True
        matrices.append(matrix)
    forward, backward = matrices
    cells = SYMMETRIZATIONS[method](forward, backward).nonzero()
    where = tuple(cells.T)
    scores = (forward[where].float() + backward[where].float()) / 2
    found = cells.numpy()
    found[:, 0] = pairs[found[:, 0]]
    return found, scores.numpy()


def _parse_pharaoh(text: bytes) -> tuple[IntArray, IntArray]:
    """Give the links of some lines, and how many each line has."""
    codes = np.frombuffer(text, dtype=np.uint8)
    dashes, line_ends = (np.flatnonzero(codes == ord(sign)) for sign in "-\n")
    # NumPy finds a number in a text of line ends alone.
    numbers = text.replace(b"-", b" ") if len(dashes) else b""
    links = np.fromstring(numbers, dtype=np.int64, sep=" ")
    return links, np.diff(np.searchsorted(dashes, line_ends), prepend=0)


def _read_whole_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk + stream.readline()


# The count that every pair of words is given beforehand; eflomal's own.
ALPHA = 0.001
CHUNK_PAIRS_LEXICON_COUNTS = 100_000


@dataclass(frozen=True, eq=False, repr=False)
class Lexicon:
    """Counts of linked word pairs, by the sorted key `source · target words + target`."""

    src: Vocabulary
    tgt: Vocabulary
    keys: IntArray
    counts: FloatArray

    @staticmethod
    def count(
        src: Vocabulary, tgt: Vocabulary, pairs: NumberedPairs, found: Sequence[PackedLinks]
    ) -> Lexicon:
        """Count linked words; with two directions of links, a link of one of them counts ½."""
        tables = [_count_keys(pairs, links, len(tgt)) for links in found]
        keys = np.unique(np.concatenate([keys for keys, _ in tables]))
        counts = np.zeros(len(keys), dtype=np.float32)
        for some, numbers in tables:
            counts[np.searchsorted(keys, some)] += (numbers / len(found)).astype(np.float32)
        return Lexicon(src, tgt, keys, counts)

    def write(self, folder: Path) -> None:
        """Write words and counts into a folder."""
        write_words(folder / "src.words.json", self.src.words)
        write_words(folder / "tgt.words.json", self.tgt.words)
        np.save(folder / "lexicon.keys.npy", self.keys)
        np.save(folder / "lexicon.counts.npy", self.counts)

    @classmethod
    def read(cls, folder: Path, *, lowercase: bool) -> Lexicon:
        """Read words and counts from a folder."""
        src, tgt = (
            Vocabulary(read_words(folder / f"{side}.words.json"), lowercase=lowercase)
            for side in ("src", "tgt")
        )
        keys, counts = (read_array(folder / f"lexicon.{name}.npy") for name in ("keys", "counts"))
        return cls(src, tgt, keys, counts)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def src_totals(self) -> FloatArray:
        """Count the links of every source word."""
        return self._totals(self.keys // max(1, len(self.tgt)), len(self.src))

    @cached_property
    def tgt_totals(self) -> FloatArray:
        """Count the links of every target word."""
        return self._totals(self.keys % max(1, len(self.tgt)), len(self.tgt))

    def log_probabilities(
        self, pairs: Sequence[WordPair], alpha: float = ALPHA
    ) -> tuple[FloatArray, FloatArray]:
        """Give log p(target | source) and log p(source | target), both [pairs, src, tgt].

        p(t | s) = (c(s, t) + α) / (c(s) + α·V), with V the target words known and one for all
        others. So a source word never met makes all target words equally likely. Places beyond
        the end of a sentence hold what unknown words get.
        """
        src = pad_rows(self.src.find(pair[0] for pair in pairs))[:, :, None]
        tgt = pad_rows(self.tgt.find(pair[1] for pair in pairs))[:, None, :]
        joint = np.log(self.look_up(src, tgt) + np.float32(alpha))
        # The last place of the totals is that of unknown words, whose number is −1.
        src_totals = np.append(self.src_totals, np.float32(0)) + alpha * (len(self.tgt) + 1)
        tgt_totals = np.append(self.tgt_totals, np.float32(0)) + alpha * (len(self.src) + 1)
        forward, backward = joint - np.log(src_totals)[src], joint - np.log(tgt_totals)[tgt]
        return forward.astype(np.float32), backward.astype(np.float32)

    def look_up(self, src: npt.NDArray[np.int32], tgt: npt.NDArray[np.int32]) -> FloatArray:
        """Count how often source and target words, given by number, were linked."""
        keys = np.where((src < 0) | (tgt < 0), UNKNOWN, src.astype(np.int64) * len(self.tgt) + tgt)
        if len(self.keys) == 0:
            return np.zeros(keys.shape, dtype=np.float32)
        places = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        counts: FloatArray = np.where(self.keys[places] == keys, self.counts[places], np.float32(0))
        return counts

    def _totals(self, words: IntArray, n_words: int) -> FloatArray:
        return np.bincount(words, self.counts, minlength=n_words).astype(np.float32)


def pad_rows(text: NumberedText) -> npt.NDArray[np.int32]:
    """Lay sentences out as rows of equal length, filled up with −1."""
    lengths = text.lengths
    rows = np.full((len(text), int(lengths.max(initial=0))), UNKNOWN, dtype=np.int32)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = text.ids
    return rows


def _count_keys(
    pairs: NumberedPairs, links: PackedLinks, n_tgt_words: int
) -> tuple[IntArray, IntArray]:
    """Count linked words, some sentence pairs at a time: links take more room than words."""
    keys, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for start in range(0, len(pairs), CHUNK_PAIRS_LEXICON_COUNTS):
        found = links.select(start, min(start + CHUNK_PAIRS_LEXICON_COUNTS, len(pairs)))
        src = pairs.src.ids[pairs.src.offsets[found.pairs + start] + found.src]
        tgt = pairs.tgt.ids[pairs.tgt.offsets[found.pairs + start] + found.tgt]
        some = np.unique(src.astype(np.int64) * n_tgt_words + tgt, return_counts=True)
        both, places = np.unique(np.concatenate([keys, some[0]]), return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, some[1]])).astype(np.int64)
        keys = both
    return keys, counts
