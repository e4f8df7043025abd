"""Word alignment: alignment error rate (AER) against manually annotated links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.tasks.untrained import check_maps, choose_layers, find_data_folder
from calque.io.bitext import read_bitext
from calque.io.links import GoldLinks, read_gold
from calque.io.segmentation import split_on_spaces
from calque.word_alignment.neural import WordAligner
from calque.word_alignment.protocol import WordPair
from calque.word_alignment.scoring import LinkCounts, check_gold, count_layers_by_pair

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]

FOLDER = "gold_alignments"
METRICS = ("aer", "precision", "recall", "f1")


def measure(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Return AER, precision, recall and F1 of the links that `WordAligner` finds.

    Its settings are those of the model, but the spelling of words is not compared, for it is the
    encoder that is tested. Nor are links chosen by probability but by mutual argmax, because
    probabilities are valid with spelling only, and most models have none. The rates are those of a
    whole test. The words of an encoder with maps are mapped by language before they are compared.
    An item is a sentence pair and its errors.
    """
    tests = list(languages or list_languages(data))
    check_maps(encoder, tests)
    aligners = {
        name: WordAligner(encoder, languages=_sides_of(encoder, name), spelling=0.0)
        for name in tests
    }
    layer, layers = choose_layers(encoder, settings, aligners[tests[0]].layer)
    scores = []
    for n_done, (name, aligner) in enumerate(aligners.items(), start=1):
        counts = count_layers_by_pair(aligner, *read_test(data, name), layers)
        by_layer = {number: _compute_metrics(table) for number, table in counts.items()}
        n_pairs, items = counts[layer].shape[1], _list_errors(counts[layer])
        scores.append(
            LanguageScores(name, by_layer[layer], n_pairs, items, by_layer, {"layer": layer})
        )
        on_progress(n_done, len(tests))
    return scores


def list_languages(data: Path, settings: TaskSettings | None = None) -> list[str]:
    """List the language pairs of a folder with files PAIR.text and PAIR.gold."""
    found = [path.stem for path in sorted(find_data_folder(data, FOLDER).glob("*.gold"))]
    if not found:
        fix = f"pass the folder with PAIR.text and PAIR.gold, or a folder that contains {FOLDER}/"
        raise InputError("the folder has no files PAIR.gold", file=data, fix=fix)
    return found


def read_test(data: Path, name: str) -> tuple[list[WordPair], GoldLinks]:
    """Read the tokenized sentence pairs of a test and their gold links."""
    folder = find_data_folder(data, FOLDER)
    text = folder / f"{name}.text"
    gold = read_gold(folder / f"{name}.gold")
    pairs: list[WordPair] = [
        (split_on_spaces(pair.src), split_on_spaces(pair.tgt))
        for pair in read_bitext(text, "pipes")
    ]
    check_gold(gold, len(pairs), text)
    gold.check_words(pairs)
    return pairs, gold


def _sides_of(encoder: Encoder, pair: str) -> tuple[str, str] | None:
    """Return the languages of a pair if the encoder maps by language."""
    src, _, tgt = pair.partition("-")
    return None if encoder.maps is None else (src, tgt)


def _compute_metrics(counts: IntArray) -> dict[str, float]:
    total = LinkCounts(*counts.sum(axis=1).tolist())
    return {metric: 100 * float(getattr(total, metric)) for metric in METRICS}


def _list_errors(counts: IntArray) -> ItemScores:
    """Return |A| + |S| − |A ∩ S| − |A ∩ P| and |A| + |S| of every pair: their ratio is the AER."""
    n_links, n_sure, n_sure_found, n_possible_found = counts.astype(np.float64)
    below = n_links + n_sure
    return ItemScores(below - n_sure_found - n_possible_found, below)
