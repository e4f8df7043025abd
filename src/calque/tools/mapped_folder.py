"""A folder of word vectors in one space: a file a language, the maps, and why each was chosen."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from calque.align.mapping import Step
from calque.models.static import WordVectors, write_vectors
from calque.text.files import check_place, write_atomically
from calque.tools.map_trials import MapSettings
from calque.tools.space_mapper import MappedSpaces, SpaceMap
from calque.types import InputError, first_line

MAPS, REPORT = "maps.safetensors", "report.json"
SUFFIXES = ("vec", "bin")
DRAFT = ".calque-map-"


def check_folder(folder: Path, overwrite: bool, files: Iterable[str] = ()) -> None:
    """Refuse a folder that holds something, above all the vectors to be mapped, before the work."""
    check_place(folder)
    for file in files if folder.exists() else ():
        if os.path.exists(file) and os.path.samefile(Path(file).parent, folder):
            raise InputError("is read from the folder to write to", file=file, fix="give a new one")
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise InputError("this folder is not empty", file=folder, fix="give a new one")


def write_mapped(
    mapped: MappedSpaces,
    spaces: Mapping[str, WordVectors],
    folder: Path,
    settings: MapSettings,
    *,
    binary: bool = False,
    on_language: Callable[[str], None] = lambda language: None,
) -> int:
    """Write `de.vec` and so on (`de.bin` if binary), the maps and the report, or nothing.

    Vectors of an earlier map of other languages go: they would not be of this space. Gives the
    number of words whose spaces had to become no-break spaces.
    """
    with _draft(folder) as draft:
        n_spaced = 0
        for language, vectors in spaces.items():
            on_language(language)
            path = draft / f"{language}.{SUFFIXES[binary]}"
            n_spaced += write_vectors(mapped.apply(language, vectors), path, binary=binary)
        _write_maps(mapped, draft, settings)
    return n_spaced


def _write_maps(mapped: MappedSpaces, folder: Path, settings: MapSettings) -> None:
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


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Give a folder whose files take their places when the block ends well, the report's last."""
    is_new, draft = not folder.exists(), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=folder))
        yield draft
        older = _list_older(folder)
        (folder / REPORT).unlink(missing_ok=True)
        names = sorted((path.name for path in draft.iterdir()), key=REPORT.__eq__)
        for name in {*older} - {*names}:
            (folder / name).unlink(missing_ok=True)
        for name in names:
            os.replace(draft / name, folder / name)
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise InputError(problem, file=folder, fix="write elsewhere") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _list_older(folder: Path) -> list[str]:
    """Name the vectors that an earlier report in this folder speaks of."""
    try:
        report = json.loads((folder / REPORT).read_text("utf-8"))
        languages = [str(each["language"]) for each in report["languages"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    stems = [f"{language}.{suffix}" for language in languages for suffix in SUFFIXES]
    names = [stem + end for stem in stems for end in ("", ".counts")]
    return [name for name in names if Path(name).name == name]


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
