"""Weights of models: only safetensors files in the model's own folder are ever opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.io.structured import read_json
from calque.io.tensor_files import read_shapes, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
WEIGHTS, INDEX = f"model{SUFFIX}", f"model{SUFFIX}.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
COPY_AGAIN = "copy the checkpoint again; its files are truncated or do not belong together"


def list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model: one, or those that its index names.

    Names are checked, not the targets of links: the hub's cache consists of links.

    Raises:
        InputError: There are no weights, only a pickle, or the index names anything else than
            safetensors files in its folder.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise _missing_weights(folder)
    index = folder / INDEX
    weight_map = read_json(index, dict, fix=COPY_AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError("the index names no files", file=index, fix=COPY_AGAIN)
    names = list(dict.fromkeys(map(str, weight_map.values())))
    for name in names:
        if not name.endswith(SUFFIX) or {"/", "\\", "\0"} & {*name}:
            problem = f"the index names {name!r}, but Calque loads safetensors files of this folder"
            raise InputError(problem, file=index, fix="convert the weights to safetensors")
        if not (folder / name).is_file():
            raise InputError(f"the file {name} is missing", file=folder, fix=COPY_AGAIN)
    return [folder / name for name in names]


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights of a model, not only its configuration."""
    return any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a model by name, mapped into memory; all of them are finite."""
    weights = {}
    for path in list_weight_files(folder):
        weights.update(read_tensors(path, fix=COPY_AGAIN)[0])
    return weights


def read_weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the weights of a model by name; only the headers are read."""
    shapes = {}
    for path in list_weight_files(folder):
        shapes.update(read_shapes(path, fix=COPY_AGAIN))
    return shapes


def _missing_weights(folder: Path) -> InputError:
    files = sorted(folder.iterdir())
    names = [path.name for path in files if path.name.lower().endswith(PICKLES)]
    if names:
        return InputError(
            f"{names[0]} is a pickle, which can run code; Calque loads safetensors only",
            file=folder,
            fix="convert it with the convert script of safetensors and remove the pickle",
        )
    fix = "give the model's folder; a model that the hub only has as a pickle must be converted"
    return InputError(f"this folder has no {WEIGHTS}", file=folder, fix=fix)
