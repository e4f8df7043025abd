"""Word similarity: do vectors find pairs of words as similar as people do (SemEval-2017, RG-65)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.algorithms.nearest import normalize_rows
from calque.errors import InputError
from calque.evaluation.metrics import harmonic_mean, pearson_correlation, spearman_correlation
from calque.evaluation.tasks.tatoeba import average_languages
from calque.io.files import read_lines
from calque.io.xtreme import short_name
from calque.types import Score

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.vectors.static import VectorFolder, VectorSpace

    Floats = npt.NDArray[np.float64]

TASK, FOLDER = "word_similarity", "word_similarity"
METRICS = ("pearson", "spearman", "harmonic_mean")
NAMES = {"english": "en", "farsi": "fa", "german": "de", "italian": "it", "spanish": "es"}
JOINERS = ("\xa0", "_", "\u200c")  # what stands for a space within a word


@dataclass(frozen=True, slots=True)
class SimilarityTest:
    """A file of pairs of words, of one language or of two, and the set that it belongs to."""

    path: Path
    collection: str
    languages: tuple[str, ...]

    @property
    def name(self) -> str:
        """The language, or the pair of them."""
        return "-".join(self.languages)


@dataclass(frozen=True, slots=True)
class WordPairs:
    """Pairs of words and how similar people find them."""

    src: list[str]
    tgt: list[str]
    gold: Floats


def score_word_similarity(
    vectors: VectorFolder,
    data: Path,
    *,
    model: str,
    languages: Sequence[str] | None = None,
    on_language: Callable[[str], None] | None = None,
) -> list[Score]:
    """Score the cosine of two words against people's judgement, by correlation.

    `languages` are languages, or pairs such as de-en; by default all that there are vectors of. A
    pair with an unknown word counts as one of mean similarity; metrics that end in `_known` leave
    such pairs out. Rows of language "mean" average over the tests of a set, which is `variant`.
    """
    scores: list[Score] = []
    for test in find_tests(data, vectors.languages, languages):
        spaces = vectors.load_pair(test.languages[0], test.languages[-1])
        pairs = read_pairs(test.path)
        cosines = compare_words(*spaces, pairs)
        scores += _list_scores(cosines, pairs.gold, model, test)
        if on_language is not None:
            on_language(test.name)
    collections = dict.fromkeys(score.variant for score in scores)
    groups = [[score for score in scores if score.variant == name] for name in collections]
    return scores + [mean for group in groups for mean in average_languages(group)]


def find_tests(
    data: Path, with_vectors: Sequence[str], languages: Sequence[str] | None = None
) -> list[SimilarityTest]:
    """List the tests of a folder and of the folders in it, a set each, that there are vectors of.

    The file's name says the languages: english.txt, de-it.txt, rg65_EN-DE.txt.
    """
    folder = _test_folder(data)
    paths = [*sorted(folder.glob("*.txt")), *sorted(folder.glob("*/*.txt"))]
    tests = [SimilarityTest(path, path.parent.name, _parse_name(path)) for path in paths]
    usable = [
        test
        for test in tests
        if len(test.languages) <= 2 and set(test.languages) <= set(with_vectors)
    ]
    if not usable:
        problem = f"no test for {' '.join(with_vectors)} here"
        fix = f"give the folder with the sets of pairs, or the one above a {FOLDER}/"
        raise InputError(problem, file=folder, fix=fix)
    if languages is None:
        return usable
    known = dict.fromkeys(name for test in usable for name in (test.name, *test.languages))
    for name in languages:
        if name not in known:
            problem = f"no test for {name!r} with vectors"
            raise InputError(problem, file=folder, fix=f"choose from: {' '.join(known)}")
    return [test for test in usable if not {test.name, *test.languages}.isdisjoint(languages)]


def read_pairs(path: Path) -> WordPairs:
    """Read lines of word TAB word TAB similarity."""
    src, tgt, gold = [], [], []
    for number, line in enumerate(read_lines(path), start=1):
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != 3 or not all(fields):
            problem = "not two words and their similarity"
            raise InputError(problem, file=path, line=number, fix="write word TAB word TAB number")
        src.append(fields[0])
        tgt.append(fields[1])
        gold.append(_parse_number(fields[2], path, number))
    if not src:
        raise InputError("holds no pairs", file=path, fix="write word TAB word TAB number")
    return WordPairs(src, tgt, np.array(gold))


def compare_words(src: VectorSpace, tgt: VectorSpace, pairs: WordPairs) -> Floats:
    """Give the cosine of each pair of words, and no number where one is unknown."""
    sides = _find_vectors(src, pairs.src), _find_vectors(tgt, pairs.tgt)
    cosines: Floats = (sides[0] * sides[1]).sum(dim=1).double().cpu().numpy()
    return cosines


def _find_vectors(space: VectorSpace, words: Sequence[str]) -> torch.Tensor:
    """Give the vectors of words, NaN for the unknown; of a phrase, the mean of its words'."""
    spelled = [_spell(space, word) for word in words]
    means = [space.rows[rows].mean(dim=0) for rows in spelled]  # of no rows, NaN
    return normalize_rows(torch.stack(means))


def _spell(space: VectorSpace, word: str) -> list[int]:
    """Find a word in one of its spellings, or else all words of a phrase; nothing if one lacks."""
    parts = word.split()
    for name in (" ".join(parts), *(joiner.join(parts) for joiner in JOINERS)):
        # Lists of pairs and vectors differ in case: as MUSE does, take what there is.
        for form in (name, name.lower(), name.capitalize(), name.title()):
            if form in space.index:
                return [space.index[form]]
    rows = [_spell(space, part) for part in parts] if len(parts) > 1 else []
    return [row for own in rows for row in own] if all(rows) else []


def _list_scores(
    cosines: Floats, gold: Floats, model: str, test: SimilarityTest
) -> Iterator[Score]:
    is_known = ~np.isnan(cosines)
    mean = cosines[is_known].mean() if is_known.any() else 0.0
    filled = np.where(is_known, cosines, mean)
    values = dict(zip(METRICS, correlate(filled, gold), strict=True))
    known = dict(zip(METRICS, correlate(cosines[is_known], gold[is_known]), strict=True))
    figures = [("coverage", float(is_known.mean()), len(gold))]
    figures += [(metric, value, len(gold)) for metric, value in values.items()]
    figures += [(f"{metric}_known", value, int(is_known.sum())) for metric, value in known.items()]
    for metric, value, n_items in figures:
        yield Score(model, TASK, test.name, metric, value, n_items, variant=test.collection)


def correlate(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Give Pearson's and Spearman's correlation and their harmonic mean, SemEval's score."""
    linear, monotone = pearson_correlation(x, y), spearman_correlation(x, y)
    return linear, monotone, harmonic_mean(linear, monotone)


def _parse_name(path: Path) -> tuple[str, ...]:
    """Read the languages off a name.

    >>> _parse_name(Path("rg65_EN-DE.txt")), _parse_name(Path("farsi.txt"))
    (('en', 'de'), ('fa',))
    """
    names = path.stem.rpartition("_")[2].lower().split("-")
    return tuple(NAMES.get(name, short_name(name)) for name in names)


def _parse_number(text: str, path: Path, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        problem = f"{text!r} is no number"
        raise InputError(problem, file=path, line=line, fix="write word TAB word TAB number")
    return value


def _test_folder(data: Path) -> Path:
    """Accept the folder itself or the one above it."""
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    inside = data / FOLDER
    return inside if inside.is_dir() else data
