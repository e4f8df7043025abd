"""Lexicon induction: how often a word's translation is the nearest word of the other language."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.evaluation.tasks.tatoeba import average_languages
from calque.io.dictionaries import read_dictionary
from calque.types import Score
from calque.vectors.lexicon import (
    AT,
    DictionaryScores,
    LexiconSettings,
    WordTranslator,
    score_dictionary,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.vectors.static import VectorFolder

    IntArray = npt.NDArray[np.int64]

TASK, FOLDER = "lexicon_induction", "muse"
TEST_SUFFIX = ".5000-6500.txt"  # MUSE's; the 5,000 more frequent words are for training
METHODS = ("nn", "csls")
SETTINGS = (LexiconSettings("nn"), LexiconSettings("csls"))


def score_lexicon_induction(
    vectors: VectorFolder,
    data: Path,
    *,
    model: str,
    languages: Sequence[str] | None = None,
    on_language: Callable[[str], None] | None = None,
) -> list[Score]:
    """Score vectors on MUSE's test dictionaries, each in its own direction, by nn and CSLS.

    `languages` are pairs such as de-en, or languages, which stand for all pairs they are in; by
    default all pairs of languages that there are vectors of. Metrics that end in `_known` leave
    out words without a vector, or without a translation that has one; the others count them as
    wrong. Rows of language "mean" average over the pairs.
    """
    scores: list[Score] = []
    for pairs in _group_directions(find_pairs(data, vectors.languages, languages)):
        src, _, tgt = pairs[0].partition("-")
        spaces = vectors.load_pair(src, tgt)
        translators = [WordTranslator.make(*spaces, settings) for settings in SETTINGS]
        for pair in pairs:
            if pair != pairs[0]:
                translators = [translator.reverse() for translator in translators]
            entries = read_dictionary(find_test(data, pair))
            scores += _list_scores(score_dictionary(translators, entries), model, pair)
            if on_language is not None:
                on_language(pair)
    by_method = [[score for score in scores if score.variant == method] for method in METHODS]
    return scores + [mean for group in by_method for mean in average_languages(group)]


def find_pairs(
    data: Path, with_vectors: Sequence[str], languages: Sequence[str] | None = None
) -> list[str]:
    """List the tests, `xx-yy.5000-6500.txt`, of two languages with vectors, or those asked for."""
    folder = _test_folder(data)
    known = [p.name.removesuffix(TEST_SUFFIX) for p in sorted(folder.glob(f"*-*{TEST_SUFFIX}"))]
    if not known:
        fix = f"give the folder with MUSE's dictionaries, or the one above a {FOLDER}/"
        raise InputError(f"no xx-yy{TEST_SUFFIX} here", file=data, fix=fix)
    usable = [pair for pair in known if set(pair.split("-")) <= set(with_vectors)]
    # MUSE's en-en is a check of its data, not of vectors: it has to be asked for by name.
    between = [pair for pair in usable if len(set(pair.split("-"))) == 2]
    if languages is None:
        if not between:
            problem = f"no test for any two of {' '.join(with_vectors)}"
            raise InputError(problem, file=folder, fix="name vectors xx.vec after their languages")
        return between
    found = {
        name: [pair for pair in between if name in pair.split("-")]
        or [p for p in usable if p == name]
        for name in languages
    }
    for name, pairs in found.items():
        if not pairs:
            problem = f"no test for {name!r} with vectors of both languages"
            raise InputError(problem, file=folder, fix=f"choose from: {' '.join(usable)}")
    return list(dict.fromkeys(pair for pairs in found.values() for pair in pairs))


def find_test(data: Path, pair: str) -> Path:
    """Name the file of a pair's test."""
    return _test_folder(data) / f"{pair}{TEST_SUFFIX}"


def _group_directions(pairs: Sequence[str]) -> list[list[str]]:
    """Put the two directions of a pair together, since they are scored from one comparison.

    >>> _group_directions(["de-en", "de-fr", "en-de"])
    [['de-en', 'en-de'], ['de-fr']]
    """
    groups: dict[frozenset[str], list[str]] = {}
    for pair in pairs:
        groups.setdefault(frozenset(pair.split("-")), []).append(pair)
    return list(groups.values())


def _list_scores(result: DictionaryScores, model: str, pair: str) -> Iterator[Score]:
    for method in METHODS:
        figures = {"coverage": (result.coverage, result.n_words)}
        for k in AT:
            name = f"precision_at_{k}"
            figures[name] = (result.precision(method, k), result.n_words)
            figures[f"{name}_known"] = (result.precision(method, k, known=True), result.n_known)
        for metric, (value, n_items) in figures.items():
            yield Score(model, TASK, pair, metric, value, n_items, variant=method)


def _test_folder(data: Path) -> Path:
    """Accept the folder itself or the one above it."""
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    inside = data / FOLDER
    return inside if inside.is_dir() else data
