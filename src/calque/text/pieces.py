"""Vocabularies of any kind as plain text: what each piece stands for, and where it may stand.

The three ways to mark where a word starts, SentencePiece's `▁x`, byte-level `Ġx` and the absence of
WordPiece's `##x`, all become a space in front: ` x`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from calque.types import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

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
