"""Vocabularies of any kind as plain text, searching them, and retokenization between two of them.

The three ways to mark the start of a word, SentencePiece's `▁x`, byte-level `Ġx` and WordPiece's
`x` (as opposed to `##x`), all become a leading space: ` x`.
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
from typing import TYPE_CHECKING, Self

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
    BoolArray = npt.NDArray[np.bool_]

# Special tokens by their role in a model, each with the attributes to look for in this order.
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
PARTIAL_CHARACTER = re.compile("[\udc80-\udcff]")
# Unicode categories of opening punctuation, which a space precedes.
OPENING_PUNCTUATION = ("Ps", "Pi")
# A script belongs to a tokenizer if it has this fraction of its pieces; English BERT has 1.6 % Han.
OWN_SCRIPT_SHARE = 0.03
# Replaces pieces that have no text, such as `<unk>`.
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
SPACE = ord(" ")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The pieces of a tokenizer by id.

    `texts` have a leading space where a word starts, and are None for special tokens and for ids
    without a token. Bytes that are not a whole character appear as lone surrogates. Pieces that
    are `standalone` are split off wherever they occur: their leading space has no meaning.
    """

    tokens: list[str]
    texts: list[str | None]
    standalone: frozenset[int]
    roles: dict[str, int]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
        """Read the vocabulary of a tokenizer; raise InputError if its kind is not known."""
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
        standalone = {number for number in added if number not in special}
        if _is_word_piece(backend):
            standalone |= {
                number
                for number, text in enumerate(texts)
                if text and len(text) == 2 and text[0] == " " and _is_split_off(backend, text[1])
            }
        roles = {}
        for role, names in ROLES.items():
            ids = [getattr(tokenizer, f"{name}_token_id", None) for name in names]
            if found := [int(number) for number in ids if number is not None]:
                roles[role] = found[0]
        return cls(tokens, texts, frozenset(standalone), roles)


def has_whole_characters(text: str) -> bool:
    """Return whether the text of a piece consists of whole characters."""
    return PARTIAL_CHARACTER.search(text) is None


def guess_spacing(text: str) -> str:
    """Return a standalone piece with its usual spacing: a space only before opening punctuation.

    >>> [guess_spacing(text) for text in (" (", "«", " ,", "中")]
    [' (', ' «', ',', '中']
    """
    surface = text.removeprefix(" ")
    opens = surface and unicodedata.category(surface[0]) in OPENING_PUNCTUATION
    return " " + surface if opens else surface


def normalize_piece(text: str) -> str:
    """Return a piece in NFKC and lower case; a leading space is kept.

    >>> [normalize_piece(text) for text in (" Straße", "ＡＢＣ", "ﬁn", "İ")]
    [' straße', 'abc', 'fin', 'i̇']
    """
    if text.isascii():
        return text.lower()
    space, surface = text[: text[0] == " "], text[text[0] == " " :]
    form = unicodedata.normalize("NFKC", surface).lower()
    # NFKC turns some signs into a space and an accent, which would look like the start of a word.
    return text if form.startswith(" ") else space + form


def _choose_reader(backend: Tokenizer) -> Callable[[str], str | None]:
    """Return the function from a token to its text, which depends on how word starts are marked."""
    if _is_word_piece(backend):
        prefix = backend.model.continuing_subword_prefix
        return lambda token: token[len(prefix) :] if token.startswith(prefix) else " " + token
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    settings = json.dumps(
        [None if part is None else json.loads(part.__getstate__()) for part in parts],
        ensure_ascii=False,
    )
    if '"ByteLevel"' in settings:
        return _read_byte_level
    if "▁" in settings:
        known = backend.get_vocab()
        return lambda token: _read_sentence_piece(token, known)
    raise InputError(
        f"the {type(backend.model).__name__} vocabulary marks the start of words in no known way",
        fix="use WordPiece, SentencePiece or byte-level BPE",
    )


def _is_word_piece(backend: Tokenizer) -> bool:
    return type(backend.model).__name__ == "WordPiece"


def _read_sentence_piece(token: str, known: Container[str]) -> str | None:
    if match := BYTE_PIECE.fullmatch(token):
        text = bytes([int(match[1], 16)]).decode("utf-8", "surrogateescape")
        # The bytes of most ASCII characters are unused, because the characters are pieces, too.
        return None if text.replace(" ", "▁") in known else text
    return token.replace("▁", " ")


def _read_byte_level(token: str) -> str:
    try:
        content = token.translate(_byte_of_character()).encode("latin-1")
    except UnicodeEncodeError:  # an added token of plain text
        return token
    return content.decode("utf-8", "surrogateescape")


@cache
def _byte_of_character() -> dict[int, int]:
    """Invert GPT-2's table: printable bytes represent themselves, the others are U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {0x100 + k: byte for k, byte in enumerate(others)}


def _is_split_off(backend: Tokenizer, character: str) -> bool:
    """Return whether the tokenizer separates a character even inside a word."""
    text = f"a{character}a"
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    parts = text.split()
    if backend.pre_tokenizer is not None:
        parts = [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return len(parts) == 3


class PieceIndex:
    """Finds texts among the pieces of a tokenizer.

    `own_scripts` are the scripts that have more than a few pieces.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.vocabulary = Vocabulary.of(tokenizer)
        self._backend = disable_truncation_and_padding(tokenizer.backend_tokenizer)
        self._space = " " * keeps_leading_space(tokenizer)
        self._exact = _number_texts(self.vocabulary)
        self._normalized: dict[str, int] = {}
        for text, number in sorted(self._exact.items(), key=lambda item: item[1]):
            if has_whole_characters(text):
                self._normalized.setdefault(normalize_piece(text), number)
        counts = Counter(map(find_script, filter(None, self.vocabulary.texts)))
        least = OWN_SCRIPT_SHARE * counts.total()
        self.own_scripts = {script for script, n in counts.items() if n >= least} | {COMMON_SCRIPT}

    def find_exact(self, text: str) -> int | None:
        """Return the id of the piece with this text."""
        return self._exact.get(text)

    def find_normalized(self, text: str) -> int | None:
        """Return the id of the piece with this text up to case and NFKC, lower case first."""
        if not has_whole_characters(text):
            return None
        form = normalize_piece(text)
        found = self._exact.get(form)
        return self._normalized.get(form) if found is None else found

    def find_by_normalizer(self, text: str) -> int | None:
        """Return the id of the piece that the tokenizer's own normalizer makes of a text."""
        if self._backend.normalizer is None or not has_whole_characters(text):
            return None
        surface = text.removeprefix(" ")
        form = self._backend.normalizer.normalize_str(surface).replace("▁", " ").strip(" ")
        if not form or " " in form or form == surface:
            return None
        return self.find_normalized(text[: text[0] == " "] + form)

    def find_word(self, word: str) -> int | None:
        """Return the id of a word that is a single piece."""
        texts = (" " + word, word) if find_script(word) in UNSPACED_SCRIPTS else (" " + word,)
        for text in texts:
            for find in (self.find_exact, self.find_normalized):
                if (number := find(text)) is not None:
                    return number
        return None

    def is_known(self, word: str) -> bool:
        """Return whether a word is one piece or, in scripts without spaces, one per character."""
        if self.find_word(word) is not None:
            return True
        if find_script(word) not in UNSPACED_SCRIPTS:
            return False
        return all(self.find_word(character) is not None for character in word)

    def tokenize_words(self, words: Iterable[str]) -> dict[str, list[int]]:
        """Return the ids of words; a single id if possible, none if a part of it is unknown."""
        ids_of = {}
        for word in dict.fromkeys(words):
            number = self.find_word(word)
            ids_of[word] = [] if number is None else [number]
        others = [word for word, ids in ids_of.items() if not ids]
        encodings = self._backend.encode_batch_fast(
            [self._space + word for word in others], add_special_tokens=False
        )
        unknown = self.vocabulary.roles.get("unk")
        for word, encoding in zip(others, encodings, strict=True):
            ids = [number for number in encoding.ids if self.vocabulary.texts[number] != " "]
            ids_of[word] = [] if unknown in ids else ids
        return ids_of


def _number_texts(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the id of every text; standalone pieces take precedence, then lower ids.

    BERT has a piece `##,` that is never used, since BERT splits commas off.
    """
    numbers: dict[str, int] = {}
    for number in sorted(vocabulary.standalone):
        surface = (vocabulary.texts[number] or "").removeprefix(" ")
        numbers.setdefault(" " + surface, number)
        numbers.setdefault(surface, number)
    for number, text in enumerate(vocabulary.texts):
        if text is not None:
            numbers.setdefault(text, number)
    return numbers


def match_vocabularies(
    src: PreTrainedTokenizerFast, tgt: PreTrainedTokenizerFast
) -> tuple[IntArray, IntArray]:
    """Return the ids of pieces that two tokenizers share, each paired at most once.

    The leading space is part of the text, except for standalone pieces: these are compared with
    their usual spacing.
    """
    numbers, others = (_number_by_usual_spacing(Vocabulary.of(each)) for each in (src, tgt))
    pairs = sorted((number, others[text]) for text, number in numbers.items() if text in others)
    array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return array[:, 0], array[:, 1]


def _number_by_usual_spacing(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the id of every text, where standalone pieces have their usual spacing."""
    numbers: dict[str, int] = {}
    for number in sorted(vocabulary.standalone):
        numbers.setdefault(guess_spacing(vocabulary.texts[number] or ""), number)
    unused = {text.removeprefix(" ") for text in numbers}  # BERT has `##(`, but splits `(` off
    for number, text in enumerate(vocabulary.texts):
        if text is not None and text not in unused and number not in vocabulary.standalone:
            numbers.setdefault(text, number)
    return numbers


@dataclass(frozen=True, slots=True)
class Retokenization:
    """The same sentences in the pieces of another tokenizer, and the segments of both.

    A segment is a shortest stretch of text whose ends are piece boundaries in both tokenizations;
    none crosses a sentence. `src` and `tgt` are the segment numbers of all pieces of the first and
    of the other tokenizer.
    """

    pieces: Ragged
    src: IntArray
    tgt: IntArray
    n_segments: int

    @classmethod
    def identity(cls, pieces: Ragged) -> Self:
        """Return the retokenization by the same tokenizer: every piece is a segment."""
        numbers = np.arange(len(pieces.ids))
        return cls(pieces, numbers, numbers, len(numbers))

    def one_to_one(self) -> BoolArray:
        """Return which segments are a single piece in both tokenizations."""
        counts = [np.bincount(side, minlength=self.n_segments) for side in (self.src, self.tgt)]
        is_single: BoolArray = (counts[0] == 1) & (counts[1] == 1)
        return is_single


class Retokenizer:
    """Converts the ids of one tokenizer to text, and encodes that with another tokenizer."""

    def __init__(self, src: PreTrainedTokenizerFast, tgt: PreTrainedTokenizerFast) -> None:
        from tokenizers import Tokenizer

        contents = [
            UNKNOWN if text is None else text.encode("utf-8", "surrogateescape")
            for text in _texts_with_usual_spacing(Vocabulary.of(src))
        ]
        self._bytes = np.frombuffer(b"".join(contents), dtype=np.uint8)
        self._lengths = np.array([len(content) for content in contents], dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        # In this copy, `<mask>` and other special tokens are ordinary text.
        tokenizer: Tokenizer = Tokenizer.from_str(tgt.backend_tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        self._tokenizer = disable_truncation_and_padding(tokenizer)

    def retokenize(self, sentences: Ragged) -> Retokenization:
        """Retokenize sentences; one whose pieces are not valid UTF-8 gets no pieces."""
        n_bytes = self._lengths[sentences.ids]
        content = self._bytes[ranges(self._starts[sentences.ids], n_bytes)]
        ends, is_blank, last = _locate_pieces(content, n_bytes, sentences.lengths)
        stops = np.concatenate([[0], np.cumsum(n_bytes)])[np.cumsum(sentences.lengths)]
        texts = _decode_sentences(content.tobytes(), stops)
        encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        tgt = Ragged.of([encoding.ids for encoding in encodings])
        offsets = np.array(list(chain.from_iterable(one.offsets for one in encodings)), np.int64)
        tgt_ends, tgt_blank = _locate_offsets(texts, offsets.reshape(-1, 2), tgt.lengths, last)
        common = np.intersect1d(ends[~is_blank], tgt_ends[~tgt_blank])
        boundaries = np.union1d(common, last)
        return Retokenization(
            tgt,
            _number_segments(boundaries, ends, is_blank, np.repeat(last, sentences.lengths)),
            _number_segments(boundaries, tgt_ends, tgt_blank, np.repeat(last, tgt.lengths)),
            len(boundaries),
        )


def _texts_with_usual_spacing(vocabulary: Vocabulary) -> list[str | None]:
    """Return the texts of pieces, with the usual spacing where the tokenizer does not record it.

    BERT splits punctuation off with or without a space. Other tokenizers would encode `so , what`
    quite differently from `so, what`.
    """
    return [
        guess_spacing(text) if text and number in vocabulary.standalone and text != token else text
        for number, (text, token) in enumerate(
            zip(vocabulary.texts, vocabulary.tokens, strict=True)
        )
    ]


def _decode_sentences(content: bytes, stops: IntArray) -> list[str]:
    """Return the text of every sentence; an empty one where the bytes are not valid UTF-8."""
    texts = []
    for start, stop in pairwise([0, *stops.tolist()]):
        try:
            texts.append(content[start:stop].decode("utf-8").removeprefix(" "))
        except UnicodeDecodeError:
            texts.append("")
    return texts


def _locate_pieces(
    content: npt.NDArray[np.uint8], n_bytes: IntArray, lengths: IntArray
) -> tuple[IntArray, BoolArray, IntArray]:
    """Return the end of every piece, which pieces complete no character, and the sentence ends.

    Positions count characters except spaces, which tokenizers assign to either neighbor, plus one
    between sentences, so that sentences do not share positions. A character counts at its last
    byte.
    """
    continues = (content & 0xC0) == 0x80
    is_counted = ~np.append(continues[1:], False)[: len(content)] & (content != SPACE)
    counts = np.concatenate([[0], np.cumsum(is_counted)])
    ends = counts[np.cumsum(n_bytes)]
    is_blank = np.diff(ends, prepend=0) == 0
    numbers = np.arange(len(lengths))
    totals = np.concatenate([[0], ends])[np.cumsum(lengths)]
    return ends + np.repeat(numbers, lengths), is_blank, totals + numbers


def _locate_offsets(
    texts: Sequence[str], offsets: IntArray, lengths: IntArray, last: IntArray
) -> tuple[IntArray, BoolArray]:
    """Return the same ends and flags as `_locate_pieces`, from the character offsets of pieces."""
    characters = np.frombuffer("".join(texts).encode("utf-32-le"), dtype="<u4")
    counts = np.concatenate([[0], np.cumsum(characters != SPACE)])
    begins = np.cumsum([0, *map(len, texts)])[:-1]
    starts, ends = counts[offsets.T + np.repeat(begins, lengths)]
    shifts = np.repeat(np.concatenate([[0], last + 1])[: len(lengths)] - counts[begins], lengths)
    return ends + shifts, starts == ends


def _number_segments(
    boundaries: IntArray, ends: IntArray, is_blank: BoolArray, last: IntArray
) -> IntArray:
    """Return the segment in which each piece ends; blank pieces belong to the following segment."""
    following = np.searchsorted(boundaries, ends, side="right")
    numbers = np.where(is_blank, following, np.searchsorted(boundaries, ends))
    segments: IntArray = np.minimum(numbers, np.searchsorted(boundaries, last))
    return segments
