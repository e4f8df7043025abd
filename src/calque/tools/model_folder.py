"""A folder of plain files with a list of them, written whole or not at all, and checked when read.

The list, `manifest.json`, has the settings of the model and the size and SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.types import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

MANIFEST = "manifest.json"


def write_model_folder(
    folder: Path, format: str, settings: dict[str, Any], fill: Callable[[Path], object]
) -> None:
    """Write what `fill` puts into a folder, and the list; an older model there is replaced."""
    from calque.training.checkpoints import write_folder

    folder = Path(folder)
    if folder.exists() and not _may_replace(folder, format):
        raise InputError("exists and is no model", file=folder, fix="choose a new folder")

    def fill_and_list(draft: Path) -> None:
        fill(draft)
        files = {path.name: _describe(path) for path in sorted(draft.iterdir())}
        manifest = {"format": format, **settings, "files": files}
        text = json.dumps(manifest, ensure_ascii=False, indent=2) + "\n"
        (draft / MANIFEST).write_text(text, "utf-8")

    write_folder(folder, fill_and_list)


def read_model_folder(folder: Path, format: str) -> dict[str, Any]:
    """Check a folder against its list, and give the list."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if manifest.get("format") != format:
        problem = f"holds {manifest.get('format') or 'something else'}, not {format}"
        raise InputError(problem, file=folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise InputError("is missing", file=path, fix="copy or train the model again")
        found = _describe(path)
        if found != expected:
            problem = f"is damaged: {found['bytes']:,} bytes, written as {expected['bytes']:,}"
            if found["bytes"] == expected["bytes"]:
                problem = "is damaged: not what was written"
            raise InputError(problem, file=path, fix="copy or train the model again")
    return manifest


def write_words(path: Path, words: list[str]) -> None:
    """Write words as a JSON list, one a line; whatever a word contains, it comes back."""
    text = json.dumps(words, ensure_ascii=False, indent=0)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def read_words(path: Path) -> list[str]:
    """Read words that were written so."""
    words: list[str] = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    return words


def read_array(path: Path, *, mapped: bool = False) -> npt.NDArray[Any]:
    """Read a NumPy array, or map it where it is too large to be read whole."""
    found: npt.NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    return found


def _may_replace(folder: Path, format: str) -> bool:
    """Tell whether a folder has nothing in it but a model of the same format."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if MANIFEST not in names:
        return not names
    manifest = _read_manifest(folder)
    return manifest.get("format") == format and names <= {MANIFEST, *manifest["files"]}


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        problem = f"has no {MANIFEST}" if folder.is_dir() else "is no folder"
        raise InputError(problem, file=folder, fix="name the folder of a saved model")
    try:
        manifest = json.loads(path.read_bytes())
        names = list(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("is no list of a model's files", file=path) from error
    if any(Path(name).name != name for name in names):
        raise InputError("names files outside its folder", file=path)
    return dict(manifest)


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
