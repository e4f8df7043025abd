"""Tasks that only look at an encoder, as outcomes with their layers and their test items.

The layer of the score is chosen without the test: the one stored with the model, or a rule that
knows the model's depth alone. `LanguageScores.layers` has the others, for curves; to take the best of
them would be to fit the test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.evaluation.metrics import find_nearest
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.tasks import alignment_error as word_alignment
from calque.evaluation.tasks import tagging_probe
from calque.evaluation.tasks import tatoeba as retrieval
from calque.sentences.embed import embed_layers
from calque.word_alignment.neural import WordAligner
from calque.word_alignment.scoring import LinkCounts, count_layers_by_pair

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder

    Progress = Callable[[int, int], None]
    Floats = npt.NDArray[np.float64]
    IntArray = npt.NDArray[np.int64]


def list_tatoeba_languages(data: Path, settings: TaskSettings) -> list[str]:
    """List the languages with sentences and their English translations."""
    return retrieval.find_languages(data)


def list_alignment_pairs(data: Path, settings: TaskSettings) -> list[str]:
    """List the pairs of languages with annotated links."""
    return word_alignment.find_pairs(data)


def list_probe_languages(data: Path, settings: TaskSettings, *, task: str) -> list[str]:
    """List the languages with tagged sentences, English first."""
    return list(tagging_probe.find_files(data, task).find_tests())


def measure_tatoeba(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None,
    settings: TaskSettings,
    seed: int | None,
    on_progress: Progress,
) -> list[LanguageScores]:
    """Find translations by cosine of mean-pooled states; an item is a sentence, both ways."""
    layer = _choose_layer(encoder, settings, encoder.retrieval_layer)
    numbers = list(range(encoder.n_layers + 1))
    names = list(languages or retrieval.find_languages(data))
    outcomes = []
    for n_done, language in enumerate(names, start=1):
        sides = [
            embed_layers(encoder, side, numbers) for side in retrieval.read_test(data, language)
        ]
        hits = {number: _find_hits(sides[0][number], sides[1][number]) for number in numbers}
        to_english, from_english = hits[layer]
        both = (to_english + from_english) / 2
        metrics = {
            "accuracy": 100 * float(both.mean()),
            "accuracy_to_english": 100 * float(to_english.mean()),
            "accuracy_from_english": 100 * float(from_english.mean()),
        }
        layers = {number: 100 * float(np.mean(found)) for number, found in hits.items()}
        items = ItemScores(both, np.ones(len(both)))
        outcomes.append(LanguageScores(language, metrics, len(both), items, layers, {"layer": layer}))
        on_progress(n_done, len(names))
    return outcomes


def measure_word_alignment(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None,
    settings: TaskSettings,
    seed: int | None,
    on_progress: Progress,
) -> list[LanguageScores]:
    """Link words with the model's own settings; an item is a pair of sentences and its errors."""
    aligner = WordAligner(encoder)
    layer = _choose_layer(encoder, settings, aligner.layer)
    names = word_alignment.find_pairs(data, languages)
    outcomes = []
    for n_done, name in enumerate(names, start=1):
        counts = _count_by_layer(aligner, data, name)
        total = {
            number: LinkCounts(*table.sum(axis=1).tolist()) for number, table in counts.items()
        }
        metrics = {name: 100 * getattr(total[layer], name) for name in word_alignment.METRICS}
        items = _list_errors(counts[layer])
        layers = {number: 100 * found.aer for number, found in total.items()}
        n_items = counts[layer].shape[1]
        outcomes.append(LanguageScores(name, metrics, n_items, items, layers, {"layer": layer}))
        on_progress(n_done, len(names))
    return outcomes


def measure_tagging_probe(
    encoder: Encoder,
    data: Path,
    *,
    task: str,
    languages: Sequence[str] | None,
    settings: TaskSettings,
    seed: int | None,
    on_progress: Progress,
) -> list[LanguageScores]:
    """Predict tags by a linear classifier of frozen states; English, its source, comes along."""
    layer = _choose_layer(encoder, settings, round(2 / 3 * encoder.n_layers))
    names = list(tagging_probe.find_files(data, task, languages).find_tests())
    done: list[str] = []

    def tell(language: str) -> None:
        done.append(language)
        on_progress(len(done), len(names))

    scores = tagging_probe.score_tagging_probe(
        encoder, data, task=task, model="", languages=languages, on_language=tell
    )
    metric = tagging_probe.MAIN_METRICS[task]
    outcomes = []
    for name in names:
        mine = [score for score in scores if score.language == name and score.metric == metric]
        layers = {score.layer or 0: 100 * score.value for score in mine}
        metrics: dict[str, float] = {metric: layers[layer]}
        outcomes.append(
            LanguageScores(name, metrics, mine[0].n_items, layers=layers, counts={"layer": layer})
        )
    return outcomes


def _choose_layer(encoder: Encoder, settings: TaskSettings, own: int) -> int:
    """Take the layer asked for, or else the model's own."""
    asked: int | None = getattr(settings, "layer", None)
    return encoder.check_layer(own if asked is None else asked)


def _find_hits(src: npt.NDArray[np.float32], tgt: npt.NDArray[np.float32]) -> tuple[Floats, Floats]:
    """Tell for every row whether its own is nearest on the other side: src → tgt, tgt → src."""
    gold = np.arange(len(src))
    there, back = find_nearest(src, tgt) == gold, find_nearest(tgt, src) == gold
    return there.astype(np.float64), back.astype(np.float64)


def _count_by_layer(aligner: WordAligner, data: Path, name: str) -> Mapping[int, IntArray]:
    """Align a test at every layer and count the links of each of its pairs."""
    pairs, gold = word_alignment.read_test(data, name)
    layers = range(aligner.encoder.n_layers + 1)
    return count_layers_by_pair(aligner, pairs, gold, layers)


def _list_errors(counts: IntArray) -> ItemScores:
    """Give |A| + |S| − |A ∩ S| − |A ∩ P| of every pair, whose sum over that of |A| + |S| is AER."""
    n_links, n_sure, n_sure_found, n_possible_found = counts.astype(np.float64)
    below = n_links + n_sure
    return ItemScores(below - n_sure_found - n_possible_found, below)
