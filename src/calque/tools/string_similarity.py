"""Words that look alike across languages: names, numbers, punctuation, cognates."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calque.tools.lexicon_counts import pad_rows
from calque.tools.word_ids import Vocabulary, find_pairs, number_pairs

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.tools.aligning import WordPair

    IntArray = npt.NDArray[np.int64]

MIN_PREFIX = 4
# Characters beyond this many are not compared.
MAX_CHARACTERS = 32


def same_string(pairs: Sequence[WordPair]) -> npt.NDArray[np.float32]:
    """Say how much alike the words of sentence pairs look, [pairs, src, tgt], from 0 to 1.

    1 for equal words, whatever their case, and for equal digits in words without letters, in
    whatever script. Otherwise the share that a common beginning of at least four characters has
    of the longer word. Places beyond the end of a sentence hold 0.

    >>> same_string([(["1,500", "Nationen"], ["nations", "1.500"])])[0].round(2).tolist()
    [[0.0, 1.0], [0.75, 0.0]]
    """
    folded = [([w.casefold() for w in src], [w.casefold() for w in tgt]) for src, tgt in pairs]
    words = Vocabulary(lowercase=False)
    number_pairs(folded, words, words)
    numbered = find_pairs(folded, words, words)
    src, tgt = pad_rows(numbered.src)[:, :, None], pad_rows(numbered.tgt)[:, None, :]
    looks = _Looks.of(words.words)
    is_word = (src >= 0) & (tgt >= 0)
    alike: npt.NDArray[np.float32] = ((src == tgt) & is_word).astype(np.float32)
    alike[(looks.digits[src] == looks.digits[tgt]) & (looks.digits[src] > 0) & is_word] = 1
    is_near = (looks.prefixes[src] == looks.prefixes[tgt]) & (looks.prefixes[src] > 0)
    cells = np.nonzero(is_near & is_word & (alike == 0))
    alike[cells] = looks.share_prefix(src[cells[0], cells[1], 0], tgt[cells[0], 0, cells[2]])
    return alike


@dataclass(frozen=True, slots=True)
class _Looks:
    """What is compared of words: characters, and numbers for beginnings and digits, 0 for none."""

    characters: npt.NDArray[np.uint32]
    lengths: IntArray
    prefixes: IntArray
    digits: IntArray

    @classmethod
    def of(cls, words: list[str]) -> _Looks:
        characters = np.zeros((len(words), MAX_CHARACTERS), dtype=np.uint32)
        if words:
            codes = np.array(words, dtype=f"<U{MAX_CHARACTERS}").view(np.uint32)
            characters = codes.reshape(len(words), MAX_CHARACTERS)
        beginnings = [word[:MIN_PREFIX] if len(word) >= MIN_PREFIX else "" for word in words]
        lengths = np.array(list(map(len, words)), dtype=np.int64)
        return cls(characters, lengths, _number(beginnings), _number(list(map(_digits, words))))

    def share_prefix(
        self, first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        """Give the share of the longer word that two words have in common at their beginnings."""
        are_equal = self.characters[first] == self.characters[second]
        longer = np.maximum(self.lengths[first], self.lengths[second])
        n_equal = np.logical_and.accumulate(are_equal, axis=1).sum(axis=1)
        shorter = np.minimum(self.lengths[first], self.lengths[second])
        share: npt.NDArray[np.float32] = (np.minimum(n_equal, shorter) / longer).astype(np.float32)
        return share


def _digits(word: str) -> str:
    """Give the digits of a word that has no letters."""
    if not any(map(str.isdigit, word)) or any(map(str.isalpha, word)):
        return ""
    return "".join(str(unicodedata.digit(character)) for character in word if character.isdigit())


def _number(texts: list[str]) -> IntArray:
    """Number texts from 1, equal ones alike; the empty text is 0."""
    numbers: dict[str, int] = {"": 0}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], dtype=np.int64)
