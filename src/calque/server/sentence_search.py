"""Search for the nearest sentences in several languages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.io.files import display_name, read_lines
from calque.sentences.embed import normalize_vectors

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.io.files import PathLike

    Vectors = npt.NDArray[np.float32]

MAX_SENTENCES = 500_000


@dataclass(frozen=True, slots=True)
class SearchSentence:
    """A sentence that can be found, its language, and its line in the file, counted from 1."""

    language: str
    text: str
    line: int


class SentenceIndex:
    """Sentences and their vectors of length one."""

    def __init__(
        self, sentences: Sequence[SearchSentence], embed: Callable[[list[str]], Vectors]
    ) -> None:
        self.sentences = sentences
        self.languages = list(dict.fromkeys(sentence.language for sentence in sentences))
        self._vectors = normalize_vectors(embed([sentence.text for sentence in sentences]))
        names = np.array([sentence.language for sentence in sentences])
        self._rows = {language: np.flatnonzero(names == language) for language in self.languages}

    def check(self, languages: Collection[str] | None) -> None:
        """Raise InputError if there are no sentences in one of these languages."""
        for language in languages or ():
            if language not in self.languages:
                fix = f"choose from: {', '.join(self.languages)}"
                raise InputError(f"there are no sentences in {language!r}", fix=fix)

    def find(
        self, vector: Vectors, n: int, languages: Collection[str] | None = None
    ) -> list[tuple[SearchSentence, float]]:
        """Return the n nearest sentences of each language with their cosines, the best first."""
        scores = self._vectors @ normalize_vectors(vector[None])[0]
        found = []
        for language in dict.fromkeys(languages or self.languages):
            rows = self._rows[language]
            best = rows[np.argsort(-scores[rows], kind="stable")[:n]]
            found += [(self.sentences[row], float(scores[row])) for row in best.tolist()]
        return sorted(found, key=lambda match: -match[1])


def read_search_sentences(files: Sequence[str] | None) -> list[SearchSentence]:
    """Read the sentences of some files, by default those of the package.

    A file is given as LANGUAGE=FILE with one sentence per line, or as FILE with lines of a
    language, a tab and a sentence. Empty lines are left out.
    """
    if files is None:
        return _read_demo_sentences()
    found: list[SearchSentence] = []
    for file in files:
        language, equals, path = file.partition("=")
        is_named = bool(equals) and "/" not in language
        found += _read_sentences(path if is_named else file, language if is_named else None)
        if len(found) > MAX_SENTENCES:
            raise InputError(
                f"there are more than {MAX_SENTENCES:,} sentences", file=file, fix="pass fewer"
            )
    if not found:
        raise InputError("the files have no sentences", fix="pass other files (--sentences)")
    return found


def _read_sentences(file: PathLike, language: str | None) -> list[SearchSentence]:
    found = []
    for number, line in enumerate(read_lines(file), start=1):
        name, tab, text = (language, "\t", line) if language else line.partition("\t")
        if not tab and line.strip():
            raise InputError(
                "the line has no tab",
                file=display_name(file),
                line=number,
                fix="write a language, a tab and a sentence, or pass LANGUAGE=FILE",
            )
        if text.strip():
            found.append(SearchSentence(name.strip(), text.strip(), number))
    return found


def _read_demo_sentences() -> list[SearchSentence]:
    """Read the sentences of `calque demo`: translations in eight languages, and English."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    found: dict[tuple[str, str], SearchSentence] = {}
    for number, line in enumerate(table.splitlines()[1:], start=2):
        language, english, text = line.split("\t")
        for name, sentence in (("en", english), (language, text)):
            found.setdefault((name, sentence), SearchSentence(name, sentence, number))
    return list(found.values())
