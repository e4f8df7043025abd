"""Shared code of the tasks that measure a model as it is, without training it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError

if TYPE_CHECKING:
    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder


def choose_layers(encoder: Encoder, settings: TaskSettings, best: int) -> tuple[int, list[int]]:
    """Return the layer of the score and all layers to measure.

    The score's layer never depends on the test, since the best layer on a test would overestimate
    the model: it is the layer asked for, the model's own best layer, or the measured layer that
    is nearest to it. By default all layers are measured, with maps all that have maps.
    """
    numbers: Iterable[int] = range(encoder.n_layers + 1)
    if settings.layers:
        numbers = settings.layers
    elif encoder.maps is not None:
        numbers = encoder.maps.layers
    layers = list(dict.fromkeys(encoder.check_layer(number) for number in numbers))
    if settings.layer is not None:
        layer = encoder.check_layer(settings.layer)
    else:
        layer = min(layers, key=lambda number: abs(number - best))
    layers = list(dict.fromkeys([*layers, layer]))
    if encoder.maps is not None:
        for number in layers:
            encoder.maps.check(encoder.maps.pivot, number)
    return layer, layers


def check_maps(encoder: Encoder, tests: Iterable[str]) -> None:
    """Raise an InputError if an encoder with maps has none for a language or pair."""
    maps = encoder.maps
    if maps is None:
        return
    tests = list(dict.fromkeys(tests))
    known = {maps.pivot, *maps.languages}
    missing = [test for test in tests if not set(test.split("-")) <= known]
    if missing:
        usable = ",".join(test for test in tests if test not in missing and test != maps.pivot)
        fix = f"use --languages {usable}" if usable else "train maps for these languages"
        raise InputError(f"there are no maps for {' '.join(missing)}", fix=fix)


def find_data_folder(data: Path, name: str) -> Path:
    """Return the folder `name` in the data folder, or the data folder itself if there is none."""
    if not data.is_dir():
        raise InputError("the folder does not exist", file=data, fix="check --data")
    inside = data / name
    return inside if inside.is_dir() else data
