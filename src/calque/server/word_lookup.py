"""Look up a word and its neighbors in mapped word vectors of several languages."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.vectors.static import VectorFolder, VectorSpace, check_same_width

if TYPE_CHECKING:
    from torch import Tensor

# Words of each language, the most frequent ones.
MAX_WORDS = 50_000


class WordLookup:
    """Word vectors of several languages in one space; a language is loaded when it is used."""

    def __init__(self, folder: Path) -> None:
        found = VectorFolder(folder)
        root = folder.resolve()
        self._files = {
            language: path
            for language, path in found.files.items()
            if path.is_file() and path.resolve().is_relative_to(root)
        }
        if not self._files:
            raise InputError(
                "the word vectors are outside of this folder", file=folder, fix="copy them into it"
            )
        self._spaces: dict[str, VectorSpace] = {}
        self._lock = threading.Lock()

    @property
    def languages(self) -> list[str]:
        """Languages of the vectors."""
        return list(self._files)

    def find(self, word: str, language: str, n: int) -> dict[str, list[tuple[str, float]]] | None:
        """Return the n nearest words of every other language, or None if the word is unknown.

        Raises:
            InputError: There are no vectors of the language.
        """
        if language not in self._files:
            fix = f"choose from: {', '.join(self._files)}"
            raise InputError(f"there are no vectors of {language!r}", fix=fix)
        space = self._load(language)
        spellings = (word, word.lower(), word.capitalize())
        row = next((space.index[each] for each in spellings if each in space.index), None)
        if row is None:
            return None
        others = [name for name in self._files if name != language]
        return {name: self._find_nearest(space, row, self._load(name), n) for name in others}

    def _load(self, language: str) -> VectorSpace:
        with self._lock:
            if language not in self._spaces:
                self._spaces[language] = VectorSpace.load(self._files[language], MAX_WORDS)
            return self._spaces[language]

    @staticmethod
    def _find_nearest(
        src: VectorSpace, row: int, tgt: VectorSpace, n: int
    ) -> list[tuple[str, float]]:
        check_same_width(src, tgt)
        scores: Tensor = tgt.rows @ src.rows[row]
        best = scores.topk(min(n, len(tgt)))
        return [
            (tgt.words[index], float(score))
            for index, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
