"""Lexicon induction: how often the nearest word of the other language is a correct translation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.tasks.untrained import find_data_folder
from calque.io.dictionaries import Entry, read_dictionary
from calque.vectors.lexicon import (
    PRECISION_AT,
    DictionaryScores,
    LexiconSettings,
    WordTranslator,
    score_dictionary,
)

if TYPE_CHECKING:
    from calque.evaluation.settings import TaskSettings
    from calque.vectors.static import VectorFolder

FOLDER = "muse"
TEST_SUFFIX = ".5000-6500.txt"  # of MUSE; its 5,000 most frequent words are for training
SETTINGS = (LexiconSettings("csls"), LexiconSettings("nn"))


def measure(
    vectors: VectorFolder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings | None = None,
    seed: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Translate the words of MUSE's test dictionaries by nearest neighbors (nn) and by CSLS.

    Words without a vector, or without a translation that has one, count as wrong; metrics that end
    in `_known` leave them out. An item is a source word; its score is 1 if CSLS finds a correct
    translation first.
    """
    pairs = find_pairs(data, vectors.languages, languages)
    found: dict[str, LanguageScores] = {}
    for pair in pairs:
        if pair in found:
            continue
        src, _, tgt = pair.partition("-")
        spaces = vectors.load_pair(src, tgt)
        translators = [WordTranslator.build(*spaces, method) for method in SETTINGS]
        found[pair] = _measure_pair(translators, data, pair)
        # Both directions need the same comparison of all words.
        if f"{tgt}-{src}" in pairs and src != tgt:
            reverse = [translator.reverse() for translator in translators]
            found[f"{tgt}-{src}"] = _measure_pair(reverse, data, f"{tgt}-{src}")
        on_progress(len(found), len(pairs))
    return [found[pair] for pair in pairs]


def find_pairs(
    data: Path, with_vectors: Sequence[str], languages: Sequence[str] | None = None
) -> list[str]:
    """List the pairs that have a test dictionary and vectors of both languages.

    `languages` are pairs such as de-en, or languages, which stand for all pairs that contain them.
    """
    folder = find_data_folder(data, FOLDER)
    known = [p.name.removesuffix(TEST_SUFFIX) for p in sorted(folder.glob(f"*-*{TEST_SUFFIX}"))]
    if not known:
        fix = f"pass the folder with MUSE's dictionaries, or a folder that contains {FOLDER}/"
        raise InputError(f"the folder has no files xx-yy{TEST_SUFFIX}", file=data, fix=fix)
    usable = [pair for pair in known if set(pair.split("-")) <= set(with_vectors)]
    # MUSE's en-en checks its data, not vectors: it must be named explicitly.
    bilingual = [pair for pair in usable if len(set(pair.split("-"))) == 2]
    if languages is None:
        if not bilingual:
            problem = f"there is no test for any two of {' '.join(with_vectors)}"
            fix = "name vector files after their languages: de.vec, en.vec"
            raise InputError(problem, file=folder, fix=fix)
        return bilingual
    found = {
        name: [pair for pair in bilingual if name in pair.split("-")]
        or [pair for pair in usable if pair == name]
        for name in languages
    }
    for name, pairs in found.items():
        if not pairs:
            problem = f"there is no test for {name!r} with vectors of both languages"
            raise InputError(problem, file=folder, fix=f"choose from: {' '.join(usable)}")
    return list(dict.fromkeys(pair for pairs in found.values() for pair in pairs))


def _measure_pair(translators: Sequence[WordTranslator], data: Path, pair: str) -> LanguageScores:
    path = find_data_folder(data, FOLDER) / f"{pair}{TEST_SUFFIX}"
    entries = list(read_dictionary(path))
    scores = score_dictionary(translators, entries)
    metrics = {}
    for method in ("csls", "nn"):
        for k in PRECISION_AT:
            metrics[f"precision_at_{k}_{method}"] = 100 * scores.precision(method, k)
    for method in ("csls", "nn"):
        for k in PRECISION_AT:
            name = f"precision_at_{k}_{method}_known"
            metrics[name] = 100 * scores.precision(method, k, known=True)
    metrics["coverage"] = 100 * scores.coverage
    items = _list_hits(scores, translators[0], entries)
    counts = {"unknown_src": scores.n_unknown_src, "unknown_tgt": scores.n_unknown_tgt}
    return LanguageScores(pair, metrics, scores.n_words, items, counts=counts)


def _list_hits(
    scores: DictionaryScores, translator: WordTranslator, entries: Sequence[Entry]
) -> ItemScores:
    """Return 1 or 0 for every source word in the order of the dictionary."""
    words = list(dict.fromkeys(word for word, _ in entries))
    src_rows = translator.src.look_up(word for word, _ in entries)
    tgt_rows = translator.tgt.look_up(word for _, word in entries)
    known = np.unique(src_rows[(src_rows >= 0) & (tgt_rows >= 0)])  # the words that have ranks
    hit_rows = known[scores.ranks["csls"] < 1]
    hits = np.isin(translator.src.look_up(words), hit_rows).astype(np.float64)
    return ItemScores(hits, np.ones(len(words)))
