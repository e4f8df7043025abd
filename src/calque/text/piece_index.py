"""Finding text among the pieces of a tokenizer: as written, normalised, or spelled out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from calque.text.pieces import Vocabulary, is_whole, normalize_text
from calque.text.scripts import COMMON, UNSPACED, script_of
from calque.text.tokenization import keeps_spaces, lift_limits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# A script is the tokenizer's own from this share of its pieces on; English BERT has 1.6 % Han.
OWN_SHARE = 0.03


class PieceIndex:
    """Finds text among the pieces of a tokenizer, of which `own_scripts` have more than a few."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.vocabulary = Vocabulary.of(tokenizer)
        self._backend = lift_limits(tokenizer.backend_tokenizer)
        self._space = " " * keeps_spaces(tokenizer)
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
        spellings = (" " + word, word) if script_of(word) in UNSPACED else (" " + word,)
        found = [
            find(each) for each in spellings for find in (self.find_exact, self.find_normalized)
        ]
        return next((number for number in found if number is not None), None)

    def is_known(self, word: str) -> bool:
        """Tell whether a word is one piece; without spaces between words, a piece a character."""
        if self.find_word(word) is not None:
            return True
        if script_of(word) not in UNSPACED:
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
    counts = Counter(map(script_of, filter(None, vocabulary.texts)))
    return {script for script, n in counts.items() if n >= OWN_SHARE * counts.total()} | {COMMON}
