"""How alike words are spelled: names, numbers and loan words are often spelled as they sound.

Words are transliterated to Latin letters without accents, and compared by their sequences of three
characters. Punctuation is unlike all words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional as F

from calque.word_alignment.counts import pad_rows
from calque.word_alignment.numbered_text import WordNumbering, number_pairs

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.word_alignment.numbered_text import NumberedText
    from calque.word_alignment.pair_windows import PairWindows, WindowSide
    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]

N_CHARACTERS = 3
# Sequences of characters are hashed to this many components, so that unlike words are not quite
# orthogonal: their cosine is about 1 / √512 = 0.04.
N_COMPONENTS = 512


class Spelling:
    """The spelling of all words of some sentence pairs."""

    def __init__(self, pairs: Sequence[WordPair], device: torch.device) -> None:
        words = WordNumbering(lowercase=False)
        self._numbers = number_pairs(pairs, words, words)
        # The last row is for the padding, which has number −1.
        self._vectors = spell([*words.words, ""], device)
        is_punctuation = [not any(map(str.isalnum, word)) for word in words.words]
        self._is_punctuation = torch.tensor([*is_punctuation, False], device=device)

    def compare(self, windows: PairWindows, rows: IntArray) -> Float[Tensor, "windows src tgt"]:
        """Return the similarities of the word pairs of some windows, from −1 to 1.

        It is the cosine of their spelling, less 1 if exactly one of the two is punctuation.
        """
        src = self._find_words(self._numbers.src, windows.src, windows.owners, rows)
        tgt = self._find_words(self._numbers.tgt, windows.tgt, windows.owners, rows)
        cosines = self._vectors[src] @ self._vectors[tgt].mT
        differ = self._is_punctuation[src][:, :, None] != self._is_punctuation[tgt][:, None, :]
        return cosines - differ.float()

    def _find_words(
        self, text: NumberedText, side: WindowSide, owners: IntArray, rows: IntArray
    ) -> Int[Tensor, "windows words"]:
        """Return the numbers of the words of some windows, padded with −1."""
        of_rows = owners[rows]
        numbers = pad_rows(text.select(of_rows, *side.word_range(rows, of_rows)))
        return torch.from_numpy(numbers).to(self._vectors.device).long()


def spell(words: Sequence[str], device: torch.device | None = None) -> Float[Tensor, "words 512"]:
    """Return a unit vector for every word from its sequences of three characters.

    >>> peter, pyotr, house = spell(["Peter", "Петер", "house"])
    >>> round(float(peter @ pyotr), 2), round(float(peter @ house), 2)
    (1.0, 0.0)
    """
    latin = _Transliteration()
    forms = [f"<{word.translate(latin)}>".encode("ascii", "ignore") for word in words]
    characters = np.frombuffer(b"".join(forms), dtype=np.uint8).astype(np.uint32)
    owners = np.repeat(np.arange(len(forms)), list(map(len, forms)))
    n_sequences = max(0, len(characters) - N_CHARACTERS + 1)
    keys = np.zeros(n_sequences, dtype=np.uint32)
    for offset in range(N_CHARACTERS):
        keys = (keys << np.uint32(8)) | characters[offset : offset + n_sequences]
    is_inside = owners[:n_sequences] == owners[len(owners) - n_sequences :]
    hashes = _mix(keys[is_inside])
    signs = np.where(hashes >> np.uint32(31), np.float32(1), np.float32(-1))
    cells = owners[:n_sequences][is_inside], (hashes % N_COMPONENTS).astype(np.int64)
    vectors = torch.zeros(len(forms), N_COMPONENTS, device=device)
    indices = tuple(torch.from_numpy(index).to(device) for index in cells)
    vectors.index_put_(indices, torch.from_numpy(signs).to(device), accumulate=True)
    return F.normalize(vectors)


def _mix(keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return hash values whose low and high bits depend on all bits of the keys."""
    hashes = keys * np.uint32(0x9E3779B1)
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(0x85EBCA77)
    hashes ^= hashes >> np.uint32(13)
    return hashes


class _Transliteration(dict[int, str]):
    """Lower-case Latin letters for every character, for `str.translate`."""

    def __missing__(self, code: int) -> str:
        from anyascii import anyascii

        self[code] = latin = anyascii(chr(code)).lower()
        return latin
