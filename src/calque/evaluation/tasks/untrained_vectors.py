"""Tasks of static vectors in one space, as outcomes with their test items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.tasks import lexicon_induction, word_similarity
from calque.io.dictionaries import Entry, read_dictionary
from calque.vectors.lexicon import WordTranslator

if TYPE_CHECKING:
    from calque.evaluation.settings import TaskSettings
    from calque.vectors.lexicon import DictionaryScores
    from calque.vectors.static import VectorFolder

    Progress = Callable[[int, int], None]

CSLS, NEAREST = "csls", "nn"


def measure_lexicon_induction(
    vectors: VectorFolder,
    data: Path,
    *,
    languages: Sequence[str] | None,
    settings: TaskSettings,
    seed: int | None,
    on_progress: Progress,
) -> list[LanguageScores]:
    """Translate MUSE's test words; an item is a source word, wrong if it has no vector."""
    names = lexicon_induction.find_pairs(data, vectors.languages, languages)
    outcomes = []
    for n_done, pair in enumerate(names, start=1):
        src, _, tgt = pair.partition("-")
        spaces = vectors.load_pair(src, tgt)
        translators = [WordTranslator.make(*spaces, how) for how in lexicon_induction.SETTINGS]
        entries = list(read_dictionary(lexicon_induction.find_test(data, pair)))
        scores = lexicon_induction.score_dictionary(translators, entries)
        outcomes.append(_describe_dictionary(pair, scores, translators[0], entries))
        on_progress(n_done, len(names))
    return outcomes


def measure_word_similarity(
    vectors: VectorFolder,
    data: Path,
    *,
    languages: Sequence[str] | None,
    settings: TaskSettings,
    seed: int | None,
    on_progress: Progress,
) -> list[LanguageScores]:
    """Correlate cosines with people's judgement; a correlation is no ratio, so it has no items."""
    scores = word_similarity.score_word_similarity(vectors, data, model="", languages=languages)
    tests = list(dict.fromkeys((s.language, s.variant) for s in scores if s.language != "mean"))
    n_sets = Counter(language for language, _ in tests)
    outcomes = []
    for n_done, (language, collection) in enumerate(tests, start=1):
        mine = {s.metric: s for s in scores if (s.language, s.variant) == (language, collection)}
        main = mine.pop("harmonic_mean")
        metrics = {"harmonic_mean": 100 * main.value}
        metrics |= {metric: 100 * score.value for metric, score in mine.items()}
        name = language if n_sets[language] == 1 else f"{language}:{collection}"
        outcomes.append(LanguageScores(name, metrics, main.n_items))
        on_progress(n_done, len(tests))
    return outcomes


def _describe_dictionary(
    pair: str, scores: DictionaryScores, translator: WordTranslator, entries: Sequence[Entry]
) -> LanguageScores:
    metrics = {"precision_at_1_csls": 100 * scores.precision(CSLS, 1)}
    for method in (CSLS, NEAREST):
        for k in lexicon_induction.AT:
            metrics[f"precision_at_{k}_{method}"] = 100 * scores.precision(method, k)
    metrics["precision_at_1_csls_known"] = 100 * scores.precision(CSLS, 1, known=True)
    metrics["coverage"] = 100 * scores.coverage
    items = _list_hits(scores, translator, entries)
    counts = {"unknown_src": scores.n_unknown_src, "unknown_tgt": scores.n_unknown_tgt}
    return LanguageScores(pair, metrics, scores.n_words, items, counts=counts)


def _list_hits(scores: DictionaryScores, translator: WordTranslator, entries: Sequence[Entry]) -> ItemScores:
    """Give every source word's hit in the dictionary's order, the same for all vectors."""
    words = list(dict.fromkeys(word for word, _ in entries))
    src_rows = translator.src.look_up(word for word, _ in entries)
    tgt_rows = translator.tgt.look_up(word for _, word in entries)
    known = np.unique(src_rows[(src_rows >= 0) & (tgt_rows >= 0)])  # the words that have ranks
    hit_rows = known[scores.ranks[CSLS] < 1]
    hits = np.isin(translator.src.look_up(words), hit_rows).astype(np.float64)
    return ItemScores(hits, np.ones(len(words)))
