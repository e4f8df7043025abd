"""Text of one tokenizer read by another: which pieces they share, and where both cut alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Self

import numpy as np

from calque.text.batching import Ragged, ranges
from calque.text.pieces import Vocabulary, place_mark
from calque.text.tokenization import lift_limits

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    IntArray = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]

# What stands for pieces that spell nothing known, such as `<unk>`.
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
SPACE = ord(" ")


@dataclass(frozen=True, slots=True)
class Rereading:
    """The same sentences in the pieces of another tokenizer, and the segments of both.

    A segment is the shortest stretch of text that begins and ends with a piece in either
    tokenization; none crosses a sentence. `src` and `tgt` number the segment of every piece of the
    first and of the other tokenizer.
    """

    pieces: Ragged
    src: IntArray
    tgt: IntArray
    n_segments: int

    @classmethod
    def of_itself(cls, pieces: Ragged) -> Self:
        """Read with the same tokenizer: every piece is a segment."""
        numbers = np.arange(len(pieces.ids))
        return cls(pieces, numbers, numbers, len(numbers))

    def lone(self) -> npt.NDArray[np.bool_]:
        """Tell which segments are a single piece in both tokenizations."""
        counts = [np.bincount(side, minlength=self.n_segments) for side in (self.src, self.tgt)]
        is_lone: npt.NDArray[np.bool_] = (counts[0] == 1) & (counts[1] == 1)
        return is_lone


class Rereader:
    """Spells what one tokenizer's ids say, and reads it with another tokenizer."""

    def __init__(self, src: PreTrainedTokenizerFast, tgt: PreTrainedTokenizerFast) -> None:
        spelled = [
            UNKNOWN if text is None else _encode(text) for text in _place_marks(Vocabulary.of(src))
        ]
        self._bytes = np.frombuffer(b"".join(spelled), dtype=np.uint8)
        self._lengths = np.array([len(piece) for piece in spelled], dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._reader = _read_marks_as_text(tgt)

    def reread(self, sentences: Ragged) -> Rereading:
        """Cut sentences anew. One whose pieces make up no text has none of the other's pieces."""
        n_bytes = self._lengths[sentences.ids]
        spelled = self._bytes[ranges(self._starts[sentences.ids], n_bytes)]
        ends, is_blank, last = _measure_pieces(spelled, n_bytes, sentences.lengths)
        stops = np.concatenate([[0], np.cumsum(n_bytes)])[np.cumsum(sentences.lengths)]
        texts = _cut(spelled.tobytes(), stops)
        encodings = [self._reader.encode(text, add_special_tokens=False) for text in texts]
        tgt = Ragged.of([encoding.ids for encoding in encodings])
        offsets = np.array(list(chain.from_iterable(one.offsets for one in encodings)), np.int64)
        tgt_ends, tgt_blank = _measure_offsets(texts, offsets.reshape(-1, 2), tgt.lengths, last)
        common = np.intersect1d(ends[~is_blank], tgt_ends[~tgt_blank])
        cuts = np.union1d(common, last)
        return Rereading(
            tgt,
            _number_segments(cuts, ends, is_blank, np.repeat(last, sentences.lengths)),
            _number_segments(cuts, tgt_ends, tgt_blank, np.repeat(last, tgt.lengths)),
            len(cuts),
        )


def match_pieces(
    src: PreTrainedTokenizerFast, tgt: PreTrainedTokenizerFast
) -> tuple[IntArray, IntArray]:
    """Pair the pieces of two vocabularies that spell the same, each with at most one.

    Where a word starts is part of the spelling, but for marks that a tokenizer cuts off anyway:
    those are paired as they mostly stand.
    """
    mine, theirs = (_number_spellings(Vocabulary.of(each)) for each in (src, tgt))
    both = sorted((number, theirs[text]) for text, number in mine.items() if text in theirs)
    array = np.array(both, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _number_spellings(vocabulary: Vocabulary) -> dict[str, int]:
    """Give the piece of each spelling; of several, one that is cut off anyway, or the first."""
    numbers: dict[str, int] = {}
    for number in sorted(vocabulary.lone):
        numbers.setdefault(place_mark(vocabulary.texts[number] or ""), number)
    never = {text.removeprefix(" ") for text in numbers}  # BERT has a `##(`, but cuts `(` off
    for number, text in enumerate(vocabulary.texts):
        if text is not None and text not in never and number not in vocabulary.lone:
            numbers.setdefault(text, number)
    return numbers


def _place_marks(vocabulary: Vocabulary) -> list[str | None]:
    """Give the texts of pieces as they mostly stand, where a tokenizer does not tell.

    BERT's cuts marks off, space or not. Others would hardly know `so , what` for `so, what`.
    """
    return [
        place_mark(text) if text and number in vocabulary.lone and text != token else text
        for number, (text, token) in enumerate(
            zip(vocabulary.texts, vocabulary.tokens, strict=True)
        )
    ]


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _read_marks_as_text(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Copy a tokenizer's engine; in the copy `<mask>` and its like are ordinary characters."""
    from tokenizers import Tokenizer

    engine: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    engine.encode_special_tokens = True
    return lift_limits(engine)


def _cut(spelled: bytes, stops: IntArray) -> list[str]:
    """Give the text of every sentence; none where the bytes are no text."""
    texts = []
    for start, stop in pairwise([0, *stops.tolist()]):
        try:
            texts.append(spelled[start:stop].decode("utf-8").removeprefix(" "))
        except UnicodeDecodeError:
            texts.append("")
    return texts


def _measure_pieces(
    spelled: Bytes, n_bytes: IntArray, lengths: IntArray
) -> tuple[IntArray, npt.NDArray[np.bool_], IntArray]:
    """Say where pieces end, which of them end no character, and where sentences end.

    Places count characters but spaces, which tokenizers give to either neighbour; and one more
    between sentences, so that each has places of its own. A character counts at its last byte.
    """
    goes_on = (spelled & 0xC0) == 0x80
    is_counted = ~np.append(goes_on[1:], False)[: len(spelled)] & (spelled != SPACE)
    counts = np.concatenate([[0], np.cumsum(is_counted)])
    ends = counts[np.cumsum(n_bytes)]
    is_blank = np.diff(ends, prepend=0) == 0
    numbers = np.arange(len(lengths))
    totals = np.concatenate([[0], ends])[np.cumsum(lengths)]
    return ends + np.repeat(numbers, lengths), is_blank, totals + numbers


def _measure_offsets(
    texts: Sequence[str], offsets: IntArray, lengths: IntArray, last: IntArray
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Say likewise where pieces end of which a tokenizer has told the characters."""
    characters = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4")
    counts = np.concatenate([[0], np.cumsum(characters != SPACE)])
    begins = np.cumsum([0, *map(len, texts)])[:-1]
    starts, ends = counts[offsets.T + np.repeat(begins, lengths)]
    moved = np.repeat(np.concatenate([[0], last + 1])[: len(lengths)] - counts[begins], lengths)
    return ends + moved, starts == ends


def _number_segments(
    cuts: IntArray, ends: IntArray, is_blank: npt.NDArray[np.bool_], last: IntArray
) -> IntArray:
    """Find the segment a piece ends in; one that ends no character goes with what follows it."""
    following = np.searchsorted(cuts, ends, side="right")
    numbers = np.where(is_blank, following, np.searchsorted(cuts, ends))
    segments: IntArray = np.minimum(numbers, np.searchsorted(cuts, last))
    return segments
