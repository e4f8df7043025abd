"""Bitext with word links: read and cleaned together with its links, and encoded by word.

Words are separated by white space. The links of a pair are one line in Pharaoh format: `i-j`,
counted from 0, or `i-j:0.5` with a weight. A stored link is one integer (see `pack_links`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from calque.errors import InputError
from calque.io.bitext import read_bitext
from calque.io.cleaning import CleaningReport, CleaningRules, clean_pairs, normalize_text
from calque.io.files import PathLike, display_name, read_lines
from calque.io.links import parse_links
from calque.tokens.ragged import Ragged
from calque.types import SentencePair

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.tokens.words import WordEncoder

    IntArray: TypeAlias = npt.NDArray[np.int64]

# Source, target, and "N<tab>LINKS": the line number in the file of links, and the links.
LinkedExample: TypeAlias = tuple[str, str, str]

WORD_BITS, WEIGHT_BITS = 12, 8
MAX_WORDS = (1 << WORD_BITS) - 1
FULL_WEIGHT = (1 << WEIGHT_BITS) - 1
# The stores besides those of the two sides, with the number of different values in each.
STORES = {"words0": 1 << 16, "words1": 1 << 16, "links": 1 << 32}


def read_linked(
    paths: Sequence[PathLike],
    links: PathLike,
    rules: CleaningRules,
    report: CleaningReport,
    languages: tuple[str, str],
    *,
    keep_tags: Collection[str] | None = None,
    exclude_tags: Collection[str] = (),
) -> Iterator[LinkedExample]:
    """Yield the cleaned pairs with their links, still as text (see `LinkedExample`).

    Pairs whose number of words is changed by normalization are dropped and counted, too.
    """
    chosen = (
        SentencePair(pair.src, pair.tgt, f"{number}\t{line}")
        for number, pair, line in _read_pairs_and_links(paths, links)
        if (keep_tags is None or pair.tag in keep_tags) and pair.tag not in exclude_tags
    )
    # Cleaning does not change the tag of a pair, which holds the links here.
    for pair in clean_pairs(_drop_bad_pairs(chosen, rules, report), rules, report, languages):
        yield pair.src, pair.tgt, pair.tag or ""


def _read_pairs_and_links(
    paths: Sequence[PathLike], links: PathLike
) -> Iterator[tuple[int, SentencePair, str]]:
    pairs, lines = read_bitext(paths), read_lines(links)
    for number, (pair, line) in enumerate(zip_longest(pairs, lines), start=1):
        if pair is None or line is None:
            n_longer = number + sum(1 for _ in (lines if pair is None else pairs))
            n_pairs, n_lines = (number - 1, n_longer) if pair is None else (n_longer, number - 1)
            text = display_name(paths[0])
            raise InputError(
                f"the file has {n_lines} lines of links, but {text} has {n_pairs} pairs",
                file=display_name(links),
                line=number,
                fix="write one line of links per pair, an empty line for a pair without links",
            )
        yield number, pair, line


def _drop_bad_pairs(
    pairs: Iterator[SentencePair], rules: CleaningRules, report: CleaningReport
) -> Iterator[SentencePair]:
    """Drop pairs whose word numbers could not be stored or would not survive cleaning."""
    for pair in pairs:
        reason = _find_problem(pair.src, rules) or _find_problem(pair.tgt, rules)
        if reason is None:
            yield pair
        else:
            report.n_read += 1
            report.add_dropped(reason, 1, [(pair.src, pair.tgt)])


def _find_problem(text: str, rules: CleaningRules) -> str | None:
    if len(text) > MAX_WORDS and len(text.split()) > MAX_WORDS:
        return "too many words"
    if text.isprintable() or not rules.normalize:  # normalization does not change the words
        return None
    changes = len(normalize_text(text).split()) != len(text.split())
    return "words changed by tidying" if changes else None


def encode_linked(
    encoder: WordEncoder, block: Sequence[LinkedExample], file: PathLike
) -> list[Ragged]:
    """Encode pairs: the subwords of both sides, their number per word, and the links.

    `file` is the file of links, for error messages.
    """
    srcs, tgts, cells = zip(*block, strict=True)
    src, tgt = (encoder.encode([text.split() for text in side]) for side in (srcs, tgts))
    numbers, lines = zip(*(cell.split("\t", 1) for cell in cells), strict=True)
    links = pack_links(lines, src.n_words, tgt.n_words, file, [int(n) for n in numbers])
    sides = [Ragged(_narrow(side.ids, np.uint32), side.lengths) for side in (src, tgt)]
    words = [Ragged(_narrow(side.n_pieces, np.uint16), side.n_words) for side in (src, tgt)]
    return [*sides, *words, links]


def pack_links(
    lines: Sequence[str],
    n_src: IntArray,
    n_tgt: IntArray,
    file: PathLike,
    numbers: Sequence[int],
) -> Ragged:
    """Parse lines of links into integers: source word << 20 | target word << 8 | weight.

    Weights are stored as 1 to 255, which means 1. Of repeated links the largest weight is kept.
    `numbers` are the line numbers in the file, for error messages.

    >>> packed = pack_links(["0-1 1-0:0.5"], np.array([2]), np.array([2]), "links", [1])
    >>> [unpacked.tolist() for unpacked in unpack_links(packed.ids)]
    [[0, 1], [1, 0], [255, 128]]
    """
    found = parse_links(lines, file, numbers=numbers)
    fix = "count the words from 0, as separated by white space"
    found.check_bounds(n_src, n_tgt, file, numbers=numbers, fix=fix)
    weights = np.where(np.isnan(found.scores), 1.0, found.scores)
    outside = (weights < 0) | (weights > 1)
    if outside.any():
        k = int(outside.argmax())
        problem = f"the weight {weights[k]:g} of a link is not between 0 and 1"
        raise InputError(problem, file=display_name(file), line=numbers[found.lines[k]])
    owner, src, tgt = found.lines, found.src, found.tgt
    levels = np.clip(np.rint(FULL_WEIGHT * weights), 1, FULL_WEIGHT).astype(np.int64)
    packed = np.sort(((owner << WORD_BITS | src) << WORD_BITS | tgt) << WEIGHT_BITS | levels)
    packed = packed[
        np.diff(packed >> WEIGHT_BITS, append=-1) != 0
    ]  # the largest weight of each link
    owner = packed >> (2 * WORD_BITS + WEIGHT_BITS)
    ids = _narrow(packed & np.iinfo(np.uint32).max, np.uint32)
    return Ragged(ids, np.bincount(owner, minlength=len(lines)))


def unpack_links(packed: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return the source words, the target words and the weights from 1 to 255."""
    words = packed >> WEIGHT_BITS
    return words >> WORD_BITS, words & MAX_WORDS, packed & FULL_WEIGHT


def _narrow(numbers: IntArray, dtype: type[np.unsignedinteger]) -> IntArray:
    """Convert to a smaller type, because these arrays are sent between processes.

    Larger values are cut: no model can read a word of more than 65,535 subwords.
    """
    return np.minimum(numbers, np.iinfo(dtype).max).astype(dtype)
