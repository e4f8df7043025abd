"""Word similarity: correlation of cosines with human judgments (SemEval-2017, RG-65)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.algorithms.nearest import normalize_rows
from calque.errors import InputError
from calque.evaluation.metrics import harmonic_mean, pearson_correlation, spearman_correlation
from calque.evaluation.records import LanguageScores
from calque.evaluation.tasks.untrained import find_data_folder
from calque.io.files import read_lines
from calque.io.xtreme import two_letter_code

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.evaluation.settings import TaskSettings
    from calque.vectors.static import VectorFolder, VectorSpace

    Floats = npt.NDArray[np.float64]

FOLDER = "word_similarity"
NAMES = {"english": "en", "farsi": "fa", "german": "de", "italian": "it", "spanish": "es"}
JOINERS = ("\xa0", "_", "\u200c")  # characters used for a space within a word
FORMAT = "write lines of word TAB word TAB number"


@dataclass(frozen=True, slots=True)
class SimilarityTest:
    """A file of word pairs in one or two languages, and the collection it belongs to."""

    path: Path
    collection: str
    languages: tuple[str, ...]

    @property
    def name(self) -> str:
        """The language or the language pair."""
        return "-".join(self.languages)


@dataclass(frozen=True, slots=True)
class WordPairs:
    """Pairs of words and their similarity as judged by people."""

    src: list[str]
    tgt: list[str]
    gold: Floats


def measure(
    vectors: VectorFolder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings | None = None,
    seed: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Return correlations of cosines with human judgments; the main metric is SemEval's.

    That is the harmonic mean of Pearson's and Spearman's correlation. A pair with an unknown word
    gets the mean cosine; metrics that end in `_known` leave such pairs out. A correlation is not a
    ratio of sums, so there are no scores of items. A language that occurs in several collections
    is named language:collection.
    """
    tests = find_tests(data, vectors.languages, languages)
    n_collections = Counter(test.name for test in tests)
    scores = []
    for n_done, test in enumerate(tests, start=1):
        spaces = vectors.load_pair(test.languages[0], test.languages[-1])
        pairs = read_pairs(test.path)
        name = test.name if n_collections[test.name] == 1 else f"{test.name}:{test.collection}"
        metrics = _compute_metrics(compare_words(*spaces, pairs), pairs.gold)
        notes = {"collection": test.collection}
        scores.append(LanguageScores(name, metrics, len(pairs.gold), notes=notes))
        on_progress(n_done, len(tests))
    return scores


def find_tests(
    data: Path, with_vectors: Sequence[str], languages: Sequence[str] | None = None
) -> list[SimilarityTest]:
    """List the tests in a folder and its subfolders in languages that have vectors.

    Every subfolder is a collection. File names contain the languages: english.txt, de-it.txt,
    rg65_EN-DE.txt. `languages` are languages or pairs such as de-en.
    """
    folder = find_data_folder(data, FOLDER)
    paths = [*sorted(folder.glob("*.txt")), *sorted(folder.glob("*/*.txt"))]
    tests = [SimilarityTest(path, path.parent.name, _parse_name(path)) for path in paths]
    usable = [
        test
        for test in tests
        if len(test.languages) <= 2 and set(test.languages) <= set(with_vectors)
    ]
    if not usable:
        problem = f"the folder has no test for {' '.join(with_vectors)}"
        fix = f"pass the folder with the collections, or a folder that contains {FOLDER}/"
        raise InputError(problem, file=folder, fix=fix)
    if languages is None:
        return usable
    known = dict.fromkeys(name for test in usable for name in (test.name, *test.languages))
    for name in languages:
        if name not in known:
            problem = f"there is no test for {name!r} with vectors"
            raise InputError(problem, file=folder, fix=f"choose from: {' '.join(known)}")
    return [test for test in usable if not {test.name, *test.languages}.isdisjoint(languages)]


def read_pairs(path: Path) -> WordPairs:
    """Read lines of word TAB word TAB similarity."""
    src, tgt, gold = [], [], []
    for number, line in enumerate(read_lines(path), start=1):
        fields = [field.strip() for field in line.split("\t")]
        if len(fields) != 3 or not all(fields):
            problem = "the line is not two words and their similarity"
            raise InputError(problem, file=path, line=number, fix=FORMAT)
        src.append(fields[0])
        tgt.append(fields[1])
        try:
            gold.append(float(fields[2]))
        except ValueError:
            gold.append(math.nan)
        if not math.isfinite(gold[-1]):
            problem = f"{fields[2]!r} is not a number"
            raise InputError(problem, file=path, line=number, fix=FORMAT)
    if not src:
        raise InputError("the file has no word pairs", file=path, fix=FORMAT)
    return WordPairs(src, tgt, np.array(gold))


def compare_words(src: VectorSpace, tgt: VectorSpace, pairs: WordPairs) -> Floats:
    """Return the cosine of each pair of words; NaN if a word is unknown."""
    sides = _find_vectors(src, pairs.src), _find_vectors(tgt, pairs.tgt)
    cosines: Floats = (sides[0] * sides[1]).sum(dim=1).double().cpu().numpy()
    return cosines


def correlate(x: Floats, y: Floats) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation and their harmonic mean."""
    pearson, spearman = pearson_correlation(x, y), spearman_correlation(x, y)
    return {
        "harmonic_mean": harmonic_mean(pearson, spearman),
        "pearson": pearson,
        "spearman": spearman,
    }


def _compute_metrics(cosines: Floats, gold: Floats) -> dict[str, float]:
    is_known = ~np.isnan(cosines)
    mean = cosines[is_known].mean() if is_known.any() else 0.0
    metrics = correlate(np.where(is_known, cosines, mean), gold)
    known = correlate(cosines[is_known], gold[is_known])
    metrics |= {f"{name}_known": value for name, value in known.items()}
    metrics["coverage"] = float(is_known.mean())
    return {name: 100 * value for name, value in metrics.items()}


def _find_vectors(space: VectorSpace, words: Sequence[str]) -> torch.Tensor:
    """Return the vectors of words, NaN for unknown ones; of a phrase, the mean of its words'."""
    rows_of_words = [_find_rows(space, word) for word in words]
    means = [space.rows[rows].mean(dim=0) for rows in rows_of_words]  # the mean of no rows is NaN
    return normalize_rows(torch.stack(means))


def _find_rows(space: VectorSpace, word: str) -> list[int]:
    """Find a word, or else all words of a phrase; return nothing if one of them is unknown."""
    parts = word.split()
    for name in (" ".join(parts), *(joiner.join(parts) for joiner in JOINERS)):
        # Word lists and vectors differ in case: try several forms, as MUSE does.
        for form in (name, name.lower(), name.capitalize(), name.title()):
            if form in space.index:
                return [space.index[form]]
    rows = [_find_rows(space, part) for part in parts] if len(parts) > 1 else []
    return [row for found in rows for row in found] if all(rows) else []


def _parse_name(path: Path) -> tuple[str, ...]:
    """Return the languages in a file name.

    >>> _parse_name(Path("rg65_EN-DE.txt")), _parse_name(Path("farsi.txt"))
    (('en', 'de'), ('fa',))
    """
    names = path.stem.rpartition("_")[2].lower().split("-")
    return tuple(NAMES.get(name, two_letter_code(name)) for name in names)
