"""A folder of word vectors in one space: a file a language, the maps, and why each was chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from calque.align.mapping import Step
from calque.models.static import WordVectors, write_vectors
from calque.text.files import write_atomically
from calque.tools.map_trials import MapSettings
from calque.tools.space_mapper import MappedSpaces, SpaceMap
from calque.types import InputError, first_line

MAPS, REPORT = "maps.safetensors", "report.json"


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that holds something, before the work."""
    if folder.exists() and not folder.is_dir():
        raise InputError("is not a folder", file=folder, fix="give another name")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise InputError("this folder is not empty", file=folder, fix="give a new one")


def write_mapped(
    mapped: MappedSpaces,
    spaces: Mapping[str, WordVectors],
    folder: Path,
    settings: MapSettings,
    *,
    binary: bool = False,
    on_language: Callable[[str], None] = lambda language: None,
) -> None:
    """Write `de.vec` and so on (`de.bin` if binary), the maps, and the report last."""
    folder.mkdir(parents=True, exist_ok=True)
    for language, vectors in spaces.items():
        on_language(language)
        path = folder / f"{language}.{'bin' if binary else 'vec'}"
        write_vectors(mapped.apply(language, vectors), path, binary=binary)
    tensors = {
        f"{language}.{name}": tensor.cpu().contiguous().clone()
        for language, space_map in mapped.maps.items()
        for name, tensor in (("mean", space_map.mean), ("weight", space_map.weight))
    }
    steps = {"steps": " ".join(settings.steps)}
    with write_atomically(folder / MAPS, binary=True) as stream:
        stream.write(save(tensors, steps))
    with write_atomically(folder / REPORT) as text:
        report = {
            "pivot": mapped.pivot,
            "space": settings.space,
            "seed": settings.seed,
            "languages": [asdict(report) for report in mapped.reports],
        }
        text.write(json.dumps(report, ensure_ascii=False, indent=1) + "\n")


def read_maps(folder: Path) -> dict[str, SpaceMap]:
    """Read the maps of a folder, for vectors that were not there when they were found."""
    path = folder / MAPS
    if not path.is_file():
        raise InputError("no maps here", file=folder, fix="give a folder that `calque map` wrote")
    try:
        with safe_open(path, framework="pt") as stored:
            steps = tuple(cast(Step, step) for step in stored.metadata()["steps"].split())
            names: list[str] = list(stored.keys())
            languages = [name.removesuffix(".mean") for name in names if name.endswith(".mean")]
            return {
                language: SpaceMap(
                    stored.get_tensor(f"{language}.mean"),
                    stored.get_tensor(f"{language}.weight"),
                    steps,
                )
                for language in languages
            }
    except (SafetensorError, KeyError, TypeError) as error:
        raise InputError(first_line(error), file=path, fix="map the vectors again") from error
