"""Linear maps of a model's states, by language and layer, to where those of one language lie."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from calque.errors import InputError, first_line

if TYPE_CHECKING:
    from jaxtyping import Float


StatesT = TypeVar("StatesT", Tensor, npt.NDArray[np.float32])

TENSORS, ABOUT = "maps.safetensors", "maps.json"
FORMAT = 1
# What stands for the maps in the model's own folder, where a path to others could.
BESIDE = "beside"


@dataclass(frozen=True, slots=True)
class LanguageMaps:
    """What takes states of a language at a layer to the space of the `pivot`: h W.

    `maps[k, n]` is for `languages[k]` and `layers[n]`. `about` says how they were found.
    """

    maps: Float[Tensor, "languages layers hidden hidden"]
    languages: tuple[str, ...]
    layers: tuple[int, ...]
    pivot: str
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_languages, n_layers, n_rows, n_columns = self.maps.shape
        if (n_languages, n_layers) != (len(self.languages), len(self.layers)):
            raise ValueError(f"{self.maps.shape} maps for {self.languages} × {self.layers}")
        if n_rows != n_columns:
            raise ValueError(f"maps of {n_rows} × {n_columns}")

    @property
    def hidden_size(self) -> int:
        """Give the width of the states that are mapped."""
        return int(self.maps.shape[-1])

    def find(self, language: str, layer: int) -> Float[Tensor, "hidden hidden"] | None:
        """Give the map of a language at a layer; None for the pivot, which stays where it is."""
        self.check(language, layer)
        if language == self.pivot:
            return None
        return self.maps[self.languages.index(language), self.layers.index(layer)]

    def apply(self, states: StatesT, language: str, layer: int) -> StatesT:
        """Map states or vectors, in their last dimension; those of the pivot are given back.

        A mean of mapped states is the mapped mean: words and sentences may be pooled before.
        """
        found = self.find(language, layer)
        if found is None:
            return states
        if isinstance(states, Tensor):
            W = found.to(states.device)
            wide = states.to(torch.promote_types(states.dtype, W.dtype))
            return (wide @ W).to(states.dtype)
        mapped: npt.NDArray[np.float32] = states @ found.cpu().numpy()
        return mapped.astype(states.dtype)

    def check(self, language: str, layer: int | None = None) -> None:
        """Refuse a language or a layer that has no map."""
        if language != self.pivot and language not in self.languages:
            known = " ".join(self.languages)
            fix = f"there are maps of {known}; {self.pivot} needs none"
            raise InputError(f"no map of {language!r}", fix=fix)
        if layer is not None and layer not in self.layers:
            known = " ".join(map(str, self.layers))
            raise InputError(f"no map of layer {layer}", fix=f"there are maps of layers {known}")

    def to(self, device: torch.device | str) -> LanguageMaps:
        """Give the same maps on a device."""
        return replace(self, maps=self.maps.to(device))

    def save(self, folder: Path) -> None:
        """Write them beside a model's other files: a tensor a language and layer, and a list."""
        from safetensors.torch import save_file

        tensors = {
            f"{language}.{layer}": self.maps[k, n].to("cpu", torch.float32).contiguous()
            for k, language in enumerate(self.languages)
            for n, layer in enumerate(self.layers)
        }
        save_file(tensors, folder / TENSORS)
        content = {
            "format": FORMAT,
            "pivot": self.pivot,
            "languages": list(self.languages),
            "layers": list(self.layers),
            "hidden_size": self.hidden_size,
            "about": self.about,
        }
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        (folder / ABOUT).write_text(text, encoding="utf-8")


def load_maps(place: Path, hidden_size: int, n_layers: int) -> LanguageMaps:
    """Read the maps in a folder, for a model of that width and depth."""
    folder = place.parent if place.name == TENSORS else place
    content, path = _read_about(folder / ABOUT), folder / TENSORS
    if content["hidden_size"] != hidden_size:
        raise InputError(
            f"maps states of {content['hidden_size']}, the model's have {hidden_size}",
            file=path,
            fix="fit maps to this model: `calque train linear-map`",
        )
    beyond = [layer for layer in content["layers"] if not 0 <= layer <= n_layers]
    if beyond:
        raise InputError(
            f"maps layer {beyond[0]}, the model's last is {n_layers}",
            file=path,
            fix="fit maps to this model: `calque train linear-map`",
        )
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
        fix = f"name a folder with {ABOUT} and {TENSORS}, as `calque train linear-map` makes"
        raise InputError("there are no maps here", file=path.parent, fix=fix)
    kinds = {"pivot": str, "languages": list, "layers": list, "hidden_size": int, "about": dict}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        is_known = content["format"] == FORMAT
        is_typed = all(isinstance(content[name], kind) for name, kind in kinds.items())
        is_typed &= all(isinstance(name, str) for name in content["languages"])
        is_typed &= all(isinstance(layer, int) for layer in content["layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"cannot be read: {first_line(error)}", file=path, fix="fit or copy the maps again"
        ) from error
    if not (is_known and is_typed):
        raise InputError("is no list of maps", file=path, fix="fit or copy the maps again")
    return dict(content)


def _read_tensors(
    path: Path, languages: list[str], layers: list[int], hidden: int
) -> Float[Tensor, "languages layers hidden hidden"]:
    from safetensors import SafetensorError, safe_open

    maps = torch.empty(len(languages), len(layers), hidden, hidden)
    try:
        with safe_open(path, framework="pt") as file:
            for k, language in enumerate(languages):
                for n, layer in enumerate(layers):
                    tensor = file.get_tensor(f"{language}.{layer}")
                    if tensor.shape != (hidden, hidden):
                        raise ValueError(f"{language}.{layer} is of shape {list(tensor.shape)}")
                    maps[k, n] = tensor
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"cannot be read: {first_line(error)}", file=path, fix="fit or copy the maps again"
        ) from error
    if not maps.isfinite().all():
        raise InputError("holds numbers that are not finite", file=path, fix="fit the maps again")
    return maps
