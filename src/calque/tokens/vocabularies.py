"""Vocabularies of any kind as plain text: what each piece stands for, and where it may stand.

The three ways to mark where a word starts, SentencePiece's `▁x`, byte-level `Ġx` and the absence of
WordPiece's `##x`, all become a space in front: ` x`.

Finding text among the pieces of a tokenizer: as written, normalised, or spelled out.

Text of one tokenizer read by another: which pieces they share, and where both cut alike.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from calque.errors import InputError
from calque.io.segmentation import COMMON_SCRIPT, UNSPACED_SCRIPTS, find_script
from calque.tokens.ragged import Ragged, ranges
from calque.tokens.tokenizer import disable_truncation_and_padding, keeps_leading_space

if TYPE_CHECKING:
    import numpy.typing as npt
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    IntArray = npt.NDArray[np.int64]
    Bytes = npt.NDArray[np.uint8]

# Tokens that do the same in every model, whatever they are called, in the order of looking.
ROLES: dict[str, tuple[str, ...]] = {
    "cls": ("cls", "bos"),
    "sep": ("sep", "eos"),
    "pad": ("pad",),
    "unk": ("unk",),
    "mask": ("mask",),
    "bos": ("bos", "cls"),
    "eos": ("eos", "sep"),
}
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
HALF_CHARACTER = re.compile("[\udc80-\udcff]")
# Categories of marks that a space stands before, rather than after.
OPENING = ("Ps", "Pi")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The pieces of a tokenizer, by id.

    `texts` begin with a space where a word starts, and are None for special tokens and for ids
    without a token. Bytes that are no whole character are lone surrogates in them, which no other
    text has. Pieces that are `lone` are cut off wherever they stand: their space means nothing.
    """

    tokens: list[str]
    texts: list[str | None]
    lone: frozenset[int]
    roles: dict[str, int]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
        """Read the vocabulary of a tokenizer; a kind that is not known is an error."""
        backend = tokenizer.backend_tokenizer
        by_token = tokenizer.get_vocab()
        tokens = [""] * (max(by_token.values(), default=-1) + 1)
        for token, number in by_token.items():
            tokens[number] = token
        added = {int(number): token for number, token in tokenizer.added_tokens_decoder.items()}
        special = {number for number, token in added.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        read = _choose_reader(backend)
        texts = [
            None if not token or number in special else token if number in added else read(token)
            for number, token in enumerate(tokens)
        ]
        lone = {number for number in added if number not in special}
        if _is_word_piece(backend):
            lone |= _find_lone(backend, texts)
        return cls(tokens, texts, frozenset(lone), _find_roles(tokenizer))


def is_whole(text: str) -> bool:
    """Tell whether a piece's text consists of whole characters."""
    return HALF_CHARACTER.search(text) is None


def place_mark(text: str) -> str:
    """Give a lone piece as it mostly stands: after a space if it opens, else right after a word.

    >>> [place_mark(text) for text in (" (", "«", " ,", "中")]
    [' (', ' «', ',', '中']
    """
    surface = text.removeprefix(" ")
    opens = surface and unicodedata.category(surface[0]) in OPENING
    return " " + surface if opens else surface


def normalize_text(text: str) -> str:
    """Undo what only looks different, and capitals: NFKC, small letters; a space in front stays.

    >>> [normalize_text(text) for text in (" Straße", "ＡＢＣ", "ﬁn", "İ")]
    [' straße', 'abc', 'fin', 'i̇']
    """
    if text.isascii():
        return text.lower()
    space, surface = text[: text[0] == " "], text[text[0] == " " :]
    form = unicodedata.normalize("NFKC", surface).lower()
    # Some signs become a space and an accent: that would be taken for the start of a word.
    return text if form.startswith(" ") else space + form


def _find_roles(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Give the id of each role; where a tokenizer has no `bos`, its `cls` does that work."""
    found = {}
    for role, names in ROLES.items():
        ids = (getattr(tokenizer, f"{name}_token_id", None) for name in names)
        if (number := next((each for each in ids if each is not None), None)) is not None:
            found[role] = int(number)
    return found


def _choose_reader(backend: Tokenizer) -> Callable[[str], str | None]:
    """Find out how the vocabulary marks where words start."""
    kind = type(backend.model).__name__
    layout = json.dumps(
        [_describe(part) for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder)],
        ensure_ascii=False,
    )
    if _is_word_piece(backend):
        prefix = backend.model.continuing_subword_prefix
        return lambda token: token[len(prefix) :] if token.startswith(prefix) else " " + token
    if '"ByteLevel"' in layout:
        return _read_byte_level
    if "▁" in layout:
        known = backend.get_vocab()
        return lambda token: _read_sentence_piece(token, known)
    raise InputError(
        f"a {kind} vocabulary whose word starts are marked in no known way",
        fix="use WordPiece, SentencePiece or byte-level BPE",
    )


def _describe(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _is_word_piece(backend: Tokenizer) -> bool:
    return type(backend.model).__name__ == "WordPiece"


def _read_sentence_piece(token: str, known: Container[str]) -> str | None:
    if match := BYTE_PIECE.fullmatch(token):
        text = bytes([int(match[1], 16)]).decode("utf-8", "surrogateescape")
        # Most of ASCII stands beside the characters themselves, which are the ones in use then.
        return None if text.replace(" ", "▁") in known else text
    return token.replace("▁", " ")


def _read_byte_level(token: str) -> str:
    try:
        content = token.translate(_byte_of_character()).encode("latin-1")
    except UnicodeEncodeError:  # a token of plain text among those of bytes
        return token
    return content.decode("utf-8", "surrogateescape")


@cache
def _byte_of_character() -> dict[int, int]:
    """Invert GPT-2's table: printable bytes stand for themselves, the others for U+0100 and on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {0x100 + k: byte for k, byte in enumerate(others)}


def _find_lone(backend: Tokenizer, texts: list[str | None]) -> set[int]:
    """Find the single characters that a WordPiece tokenizer cuts off inside a word, too."""
    lone = set()
    for number, text in enumerate(texts):
        if text is not None and len(text) == 2 and text[0] == " " and _is_cut(backend, text[1]):
            lone.add(number)
    return lone


def _is_cut(backend: Tokenizer, character: str) -> bool:
    between = f"a{character}a"
    if backend.normalizer is not None:
        between = backend.normalizer.normalize_str(between)
    parts = between.split()
    if backend.pre_tokenizer is not None:
        parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(between)]
    return len(parts) == 3


# A script is the tokenizer's own from this share of its pieces on; English BERT has 1.6 % Han.
OWN_SHARE = 0.03


class PieceIndex:
    """Finds text among the pieces of a tokenizer, of which `own_scripts` have more than a few."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.vocabulary = Vocabulary.of(tokenizer)
        self._backend = disable_truncation_and_padding(tokenizer.backend_tokenizer)
        self._space = " " * keeps_leading_space(tokenizer)
        self._exact = _number_texts(self.vocabulary)
        self._normal: dict[str, int] = {}
        for text, number in sorted(self._exact.items(), key=lambda item: item[1]):
            if is_whole(text):
                self._normal.setdefault(normalize_text(text), number)
        self.own_scripts = _find_own_scripts(self.vocabulary)

    def find_exact(self, text: str) -> int | None:
        """Find a piece by its text."""
        return self._exact.get(text)

    def find_normalized(self, text: str) -> int | None:
        """Find a piece whatever its case and compatibility forms; small letters go first."""
        if not is_whole(text):
            return None
        form = normalize_text(text)
        found = self._exact.get(form)
        return self._normal.get(form) if found is None else found

    def find_folded(self, text: str) -> int | None:
        """Find the piece that the tokenizer's own normaliser makes of a text."""
        if self._backend.normalizer is None or not is_whole(text):
            return None
        surface = text.removeprefix(" ")
        form = self._backend.normalizer.normalize_str(surface).replace("▁", " ").strip(" ")
        if not form or " " in form or form == surface:
            return None
        return self.find_normalized(text[: text[0] == " "] + form)

    def find_word(self, word: str) -> int | None:
        """Find a word that is one piece."""
        spellings = (" " + word, word) if find_script(word) in UNSPACED_SCRIPTS else (" " + word,)
        found = [
            find(each) for each in spellings for find in (self.find_exact, self.find_normalized)
        ]
        return next((number for number in found if number is not None), None)

    def is_known(self, word: str) -> bool:
        """Tell whether a word is one piece; without spaces between words, a piece a character."""
        if self.find_word(word) is not None:
            return True
        if find_script(word) not in UNSPACED_SCRIPTS:
            return False
        return all(self.find_word(character) is not None for character in word)

    def spell(self, words: Iterable[str]) -> dict[str, list[int]]:
        """Give the pieces of words: one where there is such a piece, none where one is unknown."""
        spelled = {}
        for word in dict.fromkeys(words):
            number = self.find_word(word)
            spelled[word] = [] if number is None else [number]
        split = [word for word, ids in spelled.items() if not ids]
        encodings = self._backend.encode_batch_fast(
            [self._space + word for word in split], add_special_tokens=False
        )
        unknown = self.vocabulary.roles.get("unk")
        for word, encoding in zip(split, encodings, strict=True):
            ids = [number for number in encoding.ids if self.vocabulary.texts[number] != " "]
            spelled[word] = [] if unknown in ids else ids
        return spelled


def _number_texts(vocabulary: Vocabulary) -> dict[str, int]:
    """Number texts by their pieces; of several, those that are used: lone ones, then the first.

    BERT has a `##,` that it never uses, since it cuts commas off.
    """
    numbers: dict[str, int] = {}
    for number in sorted(vocabulary.lone):
        surface = (vocabulary.texts[number] or "").removeprefix(" ")
        numbers.setdefault(" " + surface, number)
        numbers.setdefault(surface, number)
    for number, text in enumerate(vocabulary.texts):
        if text is not None:
            numbers.setdefault(text, number)
    return numbers


def _find_own_scripts(vocabulary: Vocabulary) -> set[str]:
    """Find the scripts of more than a few pieces."""
    counts = Counter(map(find_script, filter(None, vocabulary.texts)))
    return {script for script, n in counts.items() if n >= OWN_SHARE * counts.total()} | {
        COMMON_SCRIPT
    }


# What stands for pieces that spell nothing known, such as `<unk>`.
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
SPACE = ord(" ")


@dataclass(frozen=True, slots=True)
class Retokenization:
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
    def identity(cls, pieces: Ragged) -> Self:
        """Read with the same tokenizer: every piece is a segment."""
        numbers = np.arange(len(pieces.ids))
        return cls(pieces, numbers, numbers, len(numbers))

    def lone(self) -> npt.NDArray[np.bool_]:
        """Tell which segments are a single piece in both tokenizations."""
        counts = [np.bincount(side, minlength=self.n_segments) for side in (self.src, self.tgt)]
        is_lone: npt.NDArray[np.bool_] = (counts[0] == 1) & (counts[1] == 1)
        return is_lone


class Retokenizer:
    """Spells what one tokenizer's ids say, and reads it with another tokenizer."""

    def __init__(self, src: PreTrainedTokenizerFast, tgt: PreTrainedTokenizerFast) -> None:
        spelled = [
            UNKNOWN if text is None else _encode(text) for text in _place_marks(Vocabulary.of(src))
        ]
        self._bytes = np.frombuffer(b"".join(spelled), dtype=np.uint8)
        self._lengths = np.array([len(piece) for piece in spelled], dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._reader = _read_marks_as_text(tgt)

    def retokenize(self, sentences: Ragged) -> Retokenization:
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
        return Retokenization(
            tgt,
            _number_segments(cuts, ends, is_blank, np.repeat(last, sentences.lengths)),
            _number_segments(cuts, tgt_ends, tgt_blank, np.repeat(last, tgt.lengths)),
            len(cuts),
        )


def match_vocabularies(
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
    return disable_truncation_and_padding(engine)


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
