"""Sentence retrieval on Tatoeba: find each sentence's translation among a thousand others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.evaluation.metrics import retrieval_accuracy
from calque.io.files import read_lines
from calque.io.xtreme import long_name, short_name
from calque.sentences.embed import embed_layers
from calque.types import Score

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.encoder import Encoder
    from calque.models.language_maps import LanguageMaps

    Vectors = npt.NDArray[np.float32]

TASK, MEAN, ENGLISH = "tatoeba", "mean", "en"
# XTREME reports the first.
METRICS = ("accuracy_to_english", "accuracy_from_english")


def score_tatoeba(
    encoder: Encoder,
    data: Path,
    *,
    model: str,
    languages: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    center: bool = False,
    neutral: bool = False,
    maps: bool = False,
    on_language: Callable[[str], None] | None = None,
) -> list[Score]:
    """Score retrieval both ways by cosine of mean-pooled states, per language and layer.

    With `center`, the mean of each side is subtracted first: it uses the test sentences, but
    not which of them belong together. With `neutral`, vectors are what `embed` gives: the
    model's own layer and neutral space. With `maps`, they are mapped by language first; one that
    has no map is an error. Rows of language "mean" average over the languages.
    """
    known = require_maps(encoder, neutral) if maps else None
    if layers is None and known is not None:
        layers = known.layers
    numbers, finish = _choose_layers(encoder, layers, neutral)
    variant = "neutral" if neutral else "centered" if center else "raw"
    variant = f"mapped, {variant}" if maps else variant
    finish = _center if center else finish
    names = [short_name(name) for name in languages or find_languages(data)]
    if known is not None:
        check_languages(known, [*names, ENGLISH], numbers)
    tests = {name: read_test(data, name) for name in names}
    scores: list[Score] = []
    for language, (src, eng) in tests.items():
        found = _score_pair(encoder, src, eng, numbers, (model, language), finish, known)
        scores += [replace(score, variant=variant) for score in found]
        if on_language is not None:
            on_language(language)
    return [*scores, *average_languages(scores)]


def find_languages(data: Path) -> list[str]:
    """List the languages of a folder in LASER's layout, `tatoeba.xxx-eng.xxx` beside `.eng`."""
    names = [path.suffix[1:] for path in sorted(_test_folder(data).glob("tatoeba.*-eng.*"))]
    found = [short_name(name) for name in names if name != "eng"]
    if not found:
        raise InputError(
            "no tatoeba.xxx-eng.xxx here",
            file=data,
            fix="give the folder data/tatoeba/v1 of LASER, or the one above a tatoeba/",
        )
    return found


def read_test(data: Path, language: str) -> tuple[list[str], list[str]]:
    """Read the sentences of a language and their English translations."""
    code, folder = long_name(language), _test_folder(data)
    src_path, eng_path = (folder / f"tatoeba.{code}-eng.{side}" for side in (code, "eng"))
    if not src_path.exists():
        known = " ".join(find_languages(data))
        raise InputError(f"no test for {language!r}", file=src_path, fix=f"choose from: {known}")
    src, eng = list(read_lines(src_path)), list(read_lines(eng_path))
    if len(src) != len(eng) or not src:
        raise InputError(
            f"{len(src)} lines, but {len(eng)} in {eng_path.name}",
            file=src_path,
            fix="the files must pair line by line",
        )
    return src, eng


def average_languages(scores: Iterable[Score]) -> list[Score]:
    """Average over languages, each counting the same, by model, layer and metric."""
    groups: dict[tuple[str, int | None, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.model, score.layer, score.metric), []).append(score)
    return [
        Score(
            model=model,
            task=group[0].task,
            language=MEAN,
            metric=metric,
            value=float(np.mean([score.value for score in group])),
            n_items=sum(score.n_items for score in group),
            layer=layer,
            variant=group[0].variant,
        )
        for (model, layer, metric), group in groups.items()
    ]


def _score_pair(
    encoder: Encoder,
    src: list[str],
    eng: list[str],
    layers: Sequence[int],
    names: tuple[str, str],
    finish: Callable[[Vectors], Vectors],
    maps: LanguageMaps | None = None,
) -> Iterator[Score]:
    model, language = names
    src_vectors, eng_vectors = (embed_layers(encoder, side, layers) for side in (src, eng))
    for layer in layers:
        sides = src_vectors[layer], eng_vectors[layer]
        if maps is not None:
            sides = (maps.apply(sides[0], language, layer), maps.apply(sides[1], ENGLISH, layer))
        values = retrieval_accuracy(*map(finish, sides))
        for metric, value in zip(METRICS, values, strict=True):
            yield Score(model, TASK, language, metric, value, len(src), layer)


def require_maps(encoder: Encoder, neutral: bool = False) -> LanguageMaps:
    """Give an encoder's maps; to have none is an error here."""
    if encoder.maps is None:
        raise InputError("this model was loaded without maps", fix="load it with maps=True")
    if neutral:
        raise InputError("a neutral space is of states that are not mapped", fix="drop one of both")
    return encoder.maps


def check_languages(maps: LanguageMaps, names: Iterable[str], layers: Iterable[int]) -> None:
    """Refuse languages and layers without a map, and say which of the languages have one."""
    known, names = {maps.pivot, *maps.languages}, list(dict.fromkeys(names))
    missing = [name for name in names if name not in known]
    if missing:
        mapped = ",".join(name for name in names if name in known and name != maps.pivot)
        fix = f"choose languages: {mapped}" if mapped else "fit maps of these languages"
        raise InputError(f"no map of {' '.join(missing)}", fix=fix)
    for layer in layers:
        maps.check(maps.pivot, layer)


def _choose_layers(
    encoder: Encoder, layers: Sequence[int] | None, neutral: bool
) -> tuple[list[int], Callable[[Vectors], Vectors]]:
    if neutral:
        if encoder.neutral is None:
            raise InputError("this model has no neutral space", fix="run `calque neutralize`")
        return [encoder.neutral.layer], encoder.neutral.apply
    numbers = range(encoder.n_layers + 1) if layers is None else layers
    return [encoder.check_layer(number) for number in numbers], lambda vectors: vectors


def _center(vectors: Vectors) -> Vectors:
    mean: Vectors = vectors.mean(axis=0)
    return vectors - mean


def _test_folder(data: Path) -> Path:
    """Accept the folder itself or the one above it."""
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    inside = data / "tatoeba"
    return inside if inside.is_dir() else data
