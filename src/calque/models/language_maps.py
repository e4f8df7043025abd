"""Linear maps of states, by language and layer, into the space of one language (the pivot)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from calque.errors import InputError
from calque.io.structured import read_json
from calque.io.tensor_files import read_tensors

if TYPE_CHECKING:
    from jaxtyping import Float


StatesT = TypeVar("StatesT", Tensor, npt.NDArray[np.float32])

TENSORS_FILE, ABOUT_FILE = "maps.safetensors", "maps.json"
FORMAT = 1
FIT_AGAIN = "fit or copy the maps again"
# In place of a path: the maps in the model's own folder.
OWN_FOLDER = "beside"
# In place of a path, where the maps in a model's folder are used by default: no maps.
NO_MAPS = "none"


@dataclass(frozen=True, slots=True)
class LanguageMaps:
    """Matrices W that map states h of a language at a layer into the space of the `pivot`: h W.

    `maps[k, n]` is for `languages[k]` and `layers[n]`. `about` describes how they were computed.
    """

    maps: Float[Tensor, "languages layers hidden hidden"]
    languages: tuple[str, ...]
    layers: tuple[int, ...]
    pivot: str
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_languages, n_layers, n_rows, n_columns = self.maps.shape
        if (n_languages, n_layers) != (len(self.languages), len(self.layers)):
            raise ValueError(f"maps of shape {self.maps.shape} for {self.languages}, {self.layers}")
        if n_rows != n_columns:
            raise ValueError(f"maps must be square, not {n_rows} × {n_columns}")

    @property
    def hidden_size(self) -> int:
        """The size of the states that are mapped."""
        return int(self.maps.shape[-1])

    def find(self, language: str, layer: int) -> Float[Tensor, "hidden hidden"] | None:
        """Return the map of a language at a layer; None for the pivot, which is not mapped."""
        self.check(language, layer)
        if language == self.pivot:
            return None
        return self.maps[self.languages.index(language), self.layers.index(layer)]

    def apply(self, states: StatesT, language: str, layer: int) -> StatesT:
        """Return mapped states or vectors; those of the pivot are returned unchanged.

        The map is linear, so that words and sentences may be pooled before.
        """
        matrix = self.find(language, layer)
        if matrix is None:
            return states
        if isinstance(states, Tensor):
            W = matrix.to(states.device)
            wide = states.to(torch.promote_types(states.dtype, W.dtype))
            return (wide @ W).to(states.dtype)
        mapped: npt.NDArray[np.float32] = states @ matrix.cpu().numpy()
        return mapped.astype(states.dtype)

    def apply_by_layer(
        self, states: Sequence[StatesT], language: str, layers: Sequence[int]
    ) -> list[StatesT]:
        """Return the states of several layers, each mapped with the map of its layer."""
        pairs = zip(states, layers, strict=True)
        return [self.apply(of_layer, language, layer) for of_layer, layer in pairs]

    def check(self, language: str, layer: int | None = None) -> None:
        """Raise an error for a language or a layer without a map."""
        if language != self.pivot and language not in self.languages:
            known = " ".join(self.languages)
            fix = f"use one of {known}, or {self.pivot}, which needs no map"
            raise InputError(f"there is no map of {language!r}", fix=fix)
        if layer is not None and layer not in self.layers:
            known = " ".join(map(str, self.layers))
            raise InputError(f"there is no map of layer {layer}", fix=f"use one of layers {known}")

    def to(self, device: torch.device | str) -> LanguageMaps:
        """Return the same maps on a device."""
        return replace(self, maps=self.maps.to(device))

    def save(self, folder: Path) -> None:
        """Write the maps into a model's folder: one tensor per language and layer, and a list."""
        from safetensors.torch import save_file

        tensors = {
            f"{language}.{layer}": self.maps[k, n].to("cpu", torch.float32).contiguous()
            for k, language in enumerate(self.languages)
            for n, layer in enumerate(self.layers)
        }
        save_file(tensors, folder / TENSORS_FILE)
        content = {
            "format": FORMAT,
            "pivot": self.pivot,
            "languages": list(self.languages),
            "layers": list(self.layers),
            "hidden_size": self.hidden_size,
            "about": self.about,
        }
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (folder / ABOUT_FILE).write_text(text, encoding="utf-8")


def has_maps(folder: Path) -> bool:
    """Return whether there are maps in a folder."""
    return any((folder / name).is_file() for name in (TENSORS_FILE, ABOUT_FILE))


def load_maps(path: Path, hidden_size: int, n_layers: int) -> LanguageMaps:
    """Read the maps in a folder, for a model of the given hidden size and number of layers."""
    folder = path.parent if path.name == TENSORS_FILE else path
    content, path = _read_about(folder / ABOUT_FILE), folder / TENSORS_FILE
    fix = "fit maps to this model with `calque train linear-map`"
    if content["hidden_size"] != hidden_size:
        problem = f"the maps have size {content['hidden_size']}, but the model has {hidden_size}"
        raise InputError(problem, file=path, fix=fix)
    beyond = [layer for layer in content["layers"] if not 0 <= layer <= n_layers]
    if beyond:
        problem = f"there is a map of layer {beyond[0]}, but the last layer is {n_layers}"
        raise InputError(problem, file=path, fix=fix)
    return LanguageMaps(
        _read_tensors(path, content["languages"], content["layers"], hidden_size),
        tuple(content["languages"]),
        tuple(content["layers"]),
        content["pivot"],
        content["about"],
    )


def _read_about(path: Path) -> dict[str, Any]:
    """Read and check the list of maps."""
    if not path.is_file():
        fix = f"give a folder with {ABOUT_FILE} and {TENSORS_FILE} from `calque train linear-map`"
        raise InputError("there are no maps in this folder", file=path.parent, fix=fix)
    content = read_json(path, dict, fix=FIT_AGAIN)
    languages, layers = content.get("languages"), content.get("layers")
    is_valid = (
        content.get("format") == FORMAT
        and isinstance(content.get("pivot"), str)
        and isinstance(content.get("about"), dict)
        and type(content.get("hidden_size")) is int
        and _is_list_of(languages, str)
        and _is_list_of(layers, int)
    )
    if not is_valid:
        raise InputError("this is not a list of maps", file=path, fix=FIT_AGAIN)
    return content


def _is_list_of(values: object, kind: type) -> bool:
    """Return whether a value is a list of distinct values of one type, at least one."""
    if not isinstance(values, list) or not values:
        return False
    return all(type(value) is kind for value in values) and len({*values}) == len(values)


def _read_tensors(
    path: Path, languages: list[str], layers: list[int], hidden: int
) -> Float[Tensor, "languages layers hidden hidden"]:
    tensors, _ = read_tensors(path, fix=FIT_AGAIN)
    maps = []
    for name in (f"{language}.{layer}" for language in languages for layer in layers):
        if name not in tensors:
            raise InputError(f"there is no map {name}", file=path, fix=FIT_AGAIN)
        if tensors[name].shape != (hidden, hidden):
            problem = f"the map {name} has the shape {list(tensors[name].shape)}"
            raise InputError(problem, file=path, fix=FIT_AGAIN)
        maps.append(tensors[name].float())
    return torch.stack(maps).view(len(languages), len(layers), hidden, hidden)
