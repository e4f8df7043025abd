"""Sentence retrieval on Tatoeba: find the translation of each sentence among all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.algorithms.margin import MARGIN_NEIGHBORS
from calque.errors import InputError
from calque.evaluation.metrics import retrieval_hits
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.tasks.plug_in_retrieval import (
    check_retrieval_plug_in,
    embed_with_translations,
    missing_translations,
)
from calque.evaluation.tasks.untrained import check_maps, choose_layers, find_data_folder
from calque.io.files import read_lines
from calque.io.xtreme import TRANSLATED_TESTS, three_letter_code, two_letter_code
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

    With `settings.similarity` "margin", cosines are divided by those with the nearest neighbors;
    with `settings.center`, the mean vector of each side is subtracted. Both use the test sentences
    but not their pairing. With `settings.neutral`, vectors are those of `Model.embed`:
    in the language-neutral space stored with the model. Vectors of an encoder with maps are
    mapped by language first. With `settings.plug` "in", vectors are [H ; S] of VECO, where S reads
    a machine translation of the sentence. An item is a sentence; its score is the mean of both
    directions.
    """
    names = [two_letter_code(name) for name in languages or list_languages(data, settings)]
    check_maps(encoder, [*names, ENGLISH])
    layer, layers, finish = _choose_vectors(encoder, settings)
    tests = {name: read_test(data, name) for name in names}
    translations: dict[str, tuple[list[str], list[str]]] = {}
    if settings.plug == "in":
        translations = {name: read_translations(data, name) for name in names}
    neighbors = MARGIN_NEIGHBORS if settings.similarity == "margin" else None
    scores = []
    for n_done, (name, sentences) in enumerate(tests.items(), start=1):
        counts = {"layer": layer}
        if translations:
            veco = check_retrieval_plug_in(encoder, settings)
            pairs = list(zip(sentences, translations[name], strict=True))
            sides = [embed_with_translations(veco, *pair, layers)[0] for pair in pairs]
            counts |= _count_missing(translations[name])
        else:
            sides = [embed_layers(encoder, side, layers) for side in sentences]
        hits = {}
        for number in layers:
            src, eng = (side[number] for side in sides)
            if encoder.maps is not None:
                src = encoder.maps.apply(src, name, number)
                eng = encoder.maps.apply(eng, ENGLISH, number)
            hits[number] = retrieval_hits(finish(src), finish(eng), neighbors)
        by_layer = {number: _compute_metrics(*found) for number, found in hits.items()}
        both = (hits[layer][0] + hits[layer][1]) / 2
        items = ItemScores(both, np.ones(len(both)))
        scores.append(LanguageScores(name, by_layer[layer], len(both), items, by_layer, counts))
        on_progress(n_done, len(tests))
    return scores


def list_languages(data: Path, settings: TaskSettings | None = None) -> list[str]:
    """List the languages of a folder with LASER's files tatoeba.xxx-eng.xxx and .eng.

    With plug=in they must also be in `translate-test`.
    """
    folder = find_data_folder(data, FOLDER)
    paths = sorted(folder.glob("tatoeba.*-eng.*"))
    found = [two_letter_code(path.suffix[1:]) for path in paths if path.suffix != ".eng"]
    if not found:
        raise InputError(
            "the folder has no files tatoeba.xxx-eng.xxx",
            file=data,
            fix="pass the folder data/tatoeba/v1 of LASER, or a folder that contains tatoeba/",
        )
    if settings is not None and settings.plug == "in":
        translated = [name for name in found if all(p.exists() for p in _paths(data, name, True))]
        if not translated:
            raise missing_translations(folder / TRANSLATED_TESTS, paths[0].name)
        return translated
    return found


def read_test(data: Path, language: str) -> tuple[list[str], list[str]]:
    """Read the sentences of a language and their English translations."""
    src_path, eng_path = _paths(data, language)
    if not src_path.exists():
        known = " ".join(list_languages(data))
        problem = f"there is no test for {language!r}"
        raise InputError(problem, file=src_path, fix=f"choose from: {known}")
    src, eng = list(read_lines(src_path)), list(read_lines(eng_path))
    if not src and not eng:
        raise InputError("the file is empty", file=src_path, fix="write one sentence per line")
    if len(src) != len(eng):
        raise InputError(
            f"the file has {len(src)} lines, but {eng_path.name} has {len(eng)}",
            file=src_path,
            fix="line n of both files must be translations of each other",
        )
    return src, eng


def read_translations(data: Path, language: str) -> tuple[list[str], list[str]]:
    """Read the machine translations of both sides of a test; a line may be empty."""
    paths = _paths(data, language, is_translated=True)
    found = []
    for path, sentences in zip(paths, read_test(data, language), strict=True):
        if not path.exists():
            raise missing_translations(path.parent, path.name)
        lines = list(read_lines(path))
        if len(lines) != len(sentences):
            problem = f"there are {len(lines)} translations of {len(sentences)} sentences"
            raise InputError(problem, file=path, fix="write one line for every sentence, in order")
        found.append(lines)
    return found[0], found[1]


def _paths(data: Path, language: str, is_translated: bool = False) -> tuple[Path, Path]:
    """Return the files of both sides of a test, or those with their machine translations."""
    code, folder = three_letter_code(language), find_data_folder(data, FOLDER)
    if is_translated:
        folder /= TRANSLATED_TESTS
    return folder / f"tatoeba.{code}-eng.{code}", folder / f"tatoeba.{code}-eng.eng"


def _count_missing(sides: tuple[list[str], list[str]]) -> dict[str, int]:
    """Count the pairs of which one side has no translation."""
    n_missing = sum(not (src.strip() and eng.strip()) for src, eng in zip(*sides, strict=True))
    return {"without_translation": n_missing} if n_missing else {}


def _choose_vectors(
    encoder: Encoder, settings: TaskSettings
) -> tuple[int, list[int], Callable[[Vectors], Vectors]]:
    """Return the layer of the score, all layers, and a function applied to pooled vectors."""
    if settings.plug == "in":
        check_retrieval_plug_in(encoder, settings)
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
