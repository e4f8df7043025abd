"""Sentence retrieval on Tatoeba: find the translation of each sentence among all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.evaluation.metrics import retrieval_hits
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.tasks.untrained import check_maps, choose_layers, find_data_folder
from calque.io.files import read_lines
from calque.io.xtreme import three_letter_code, two_letter_code
from calque.sentences.embed import embed_layers

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder

    Vectors = npt.NDArray[np.float32]
    Floats = npt.NDArray[np.float64]

FOLDER, ENGLISH = "tatoeba", "en"


def measure(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Return retrieval accuracies in both directions by cosine of mean-pooled hidden states.

    With `settings.center`, the mean vector of each side is subtracted, which uses the test
    sentences but not their pairing. With `settings.neutral`, vectors are those of `Model.embed`:
    in the language-neutral space stored with the model. Vectors of an encoder with maps are
    mapped by language first. An item is a sentence; its score is the mean of both directions.
    """
    names = [two_letter_code(name) for name in languages or list_languages(data)]
    check_maps(encoder, [*names, ENGLISH])
    layer, layers, finish = _choose_vectors(encoder, settings)
    tests = {name: read_test(data, name) for name in names}
    scores = []
    for n_done, (name, sentences) in enumerate(tests.items(), start=1):
        sides = [embed_layers(encoder, side, layers) for side in sentences]
        hits = {}
        for number in layers:
            src, eng = (side[number] for side in sides)
            if encoder.maps is not None:
                src = encoder.maps.apply(src, name, number)
                eng = encoder.maps.apply(eng, ENGLISH, number)
            hits[number] = retrieval_hits(finish(src), finish(eng))
        by_layer = {number: _compute_metrics(*found) for number, found in hits.items()}
        both = (hits[layer][0] + hits[layer][1]) / 2
        items = ItemScores(both, np.ones(len(both)))
        scores.append(
            LanguageScores(name, by_layer[layer], len(both), items, by_layer, {"layer": layer})
        )
        on_progress(n_done, len(tests))
    return scores


def list_languages(data: Path, settings: TaskSettings | None = None) -> list[str]:
    """List the languages of a folder with LASER's files tatoeba.xxx-eng.xxx and .eng."""
    paths = sorted(find_data_folder(data, FOLDER).glob("tatoeba.*-eng.*"))
    found = [two_letter_code(path.suffix[1:]) for path in paths if path.suffix != ".eng"]
    if not found:
        raise InputError(
            "the folder has no files tatoeba.xxx-eng.xxx",
            file=data,
            fix="pass the folder data/tatoeba/v1 of LASER, or a folder that contains tatoeba/",
        )
    return found


def read_test(data: Path, language: str) -> tuple[list[str], list[str]]:
    """Read the sentences of a language and their English translations."""
    code, folder = three_letter_code(language), find_data_folder(data, FOLDER)
    src_path, eng_path = (folder / f"tatoeba.{code}-eng.{side}" for side in (code, "eng"))
    if not src_path.exists():
        known = " ".join(list_languages(data))
        problem = f"there is no test for {language!r}"
        raise InputError(problem, file=src_path, fix=f"choose from: {known}")
    src, eng = list(read_lines(src_path)), list(read_lines(eng_path))
    if len(src) != len(eng) or not src:
        raise InputError(
            f"the file has {len(src)} lines, but {eng_path.name} has {len(eng)}",
            file=src_path,
            fix="line n of both files must be translations of each other",
        )
    return src, eng


def _choose_vectors(
    encoder: Encoder, settings: TaskSettings
) -> tuple[int, list[int], Callable[[Vectors], Vectors]]:
    """Return the layer of the score, all layers, and a function applied to pooled vectors."""
    if settings.neutral:
        if encoder.neutral is None:
            problem = "the model has no language-neutral space"
            raise InputError(problem, fix="create it with `calque neutralize`")
        if encoder.maps is not None:
            problem = "a language-neutral space cannot be combined with maps"
            raise InputError(problem, fix="use one of the two")
        return encoder.neutral.layer, [encoder.neutral.layer], encoder.neutral.apply
    layer, layers = choose_layers(encoder, settings, encoder.choose_layer("sentences"))
    return layer, layers, _center if settings.center else lambda vectors: vectors


def _center(vectors: Vectors) -> Vectors:
    mean: Vectors = vectors.mean(axis=0)
    return vectors - mean


def _compute_metrics(to_english: Floats, from_english: Floats) -> dict[str, float]:
    return {
        "accuracy": 100 * float(np.mean((to_english + from_english) / 2)),
        "accuracy_to_english": 100 * float(to_english.mean()),  # the figure that XTREME reports
        "accuracy_from_english": 100 * float(from_english.mean()),
    }
