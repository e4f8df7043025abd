"""Output folders that appear complete or not at all, and model folders with checksums.

A model folder is a folder of plain files with a `manifest.json` that holds the model's settings and
the size and SHA-256 of every file; these are verified when the folder is read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError

from calque.errors import InputError
from calque.io.files import UNFINISHED, sync_path

if TYPE_CHECKING:
    import numpy.typing as npt

MANIFEST = "manifest.json"
# Hidden siblings of a folder: being written, moved aside for its replacement, being removed.
PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"


def write_folder(final: Path, fill: Callable[[Path], object]) -> None:
    """Call `fill` to write a new folder, which is renamed to `final` when it is complete.

    An existing folder of that name is replaced in the end.
    """
    draft = _hidden_sibling(final, PARTIAL)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(final.parent)
        shutil.rmtree(draft, ignore_errors=True)
        UNFINISHED.add(draft)
        draft.mkdir()
        fill(draft)
        for path in (*draft.rglob("*"), draft):
            sync_path(path)
        _publish(draft, final)
    except (OSError, SafetensorError) as error:
        fix = "free some space or choose another folder; earlier checkpoints are intact"
        raise InputError(f"the folder cannot be written: {error}", file=final, fix=fix) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        UNFINISHED.discard(draft)


def remove_folder(folder: Path) -> None:
    """Remove a folder; it is hidden first, so that a crash never leaves half of it visible."""
    hidden = folder
    if folder.suffix not in (PARTIAL, DELETED):
        hidden = _hidden_sibling(folder, DELETED)
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _publish(draft: Path, final: Path) -> None:
    """Rename a complete folder to its final name; an older one is moved aside, then removed."""
    aside = _hidden_sibling(final, REPLACED)
    if final.exists():
        final.rename(aside)
    draft.rename(final)
    sync_path(final.parent)
    if aside.exists():
        remove_folder(aside)


def _remove_leftovers(run: Path) -> None:
    """Remove what a killed process left, and restore a checkpoint that it had moved aside."""
    for leftover in run.glob(".step-*.*"):
        final = run / leftover.stem.removeprefix(".")
        if leftover.suffix == REPLACED and not final.exists():
            leftover.rename(final)
        else:
            remove_folder(leftover)


def _hidden_sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.stem.removeprefix('.')}{suffix}")


def write_model_folder(
    folder: Path, format: str, settings: dict[str, Any], fill: Callable[[Path], object]
) -> None:
    """Write a model folder with the files that `fill` writes and their manifest.

    An existing model of the same format is replaced; any other folder is an InputError.
    """
    folder = Path(folder)
    if folder.exists() and not _is_replaceable(folder, format):
        problem = "the path exists and is not a model of this kind"
        raise InputError(problem, file=folder, fix="choose a new folder")

    def fill_and_list(draft: Path) -> None:
        fill(draft)
        files = {path.name: _describe(path) for path in sorted(draft.iterdir())}
        manifest = {"format": format, **settings, "files": files}
        text = json.dumps(manifest, ensure_ascii=False, indent=2) + "\n"
        (draft / MANIFEST).write_text(text, "utf-8")

    write_folder(folder, fill_and_list)


def read_model_folder(folder: Path, format: str) -> dict[str, Any]:
    """Verify the files of a model folder and return its manifest."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if manifest.get("format") != format:
        found = manifest.get("format") or "another kind of model"
        raise InputError(f"the folder holds {found} instead of {format}", file=folder)
    again = "copy or train the model again"
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise InputError("the file is missing", file=path, fix=again)
        found = _describe(path)
        if found != expected:
            detail = "its checksum is wrong"
            if found["bytes"] != expected["bytes"]:
                detail = f"it has {found['bytes']:,} bytes instead of {expected['bytes']:,}"
            raise InputError(f"the file is damaged: {detail}", file=path, fix=again)
    return manifest


def _is_replaceable(folder: Path, format: str) -> bool:
    """Return whether a folder is empty or holds a model of the same format and nothing else."""
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
        problem = f"the folder has no {MANIFEST}" if folder.is_dir() else "no such folder"
        raise InputError(problem, file=folder, fix="pass the folder of a saved model")
    fix = "copy or train the model again"
    try:
        manifest = json.loads(path.read_bytes())
        names = list(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("the file is not the manifest of a model", file=path, fix=fix) from error
    if any(Path(name).name != name for name in names):
        raise InputError("the manifest names files outside its folder", file=path, fix=fix)
    return dict(manifest)


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_word_list(path: Path, words: list[str]) -> None:
    """Write words as a JSON list, one per line; words may hold any characters."""
    text = json.dumps(words, ensure_ascii=False, indent=0)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def read_word_list(path: Path) -> list[str]:
    """Read words that `write_word_list` wrote."""
    words: list[str] = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    return words


def read_array(path: Path, *, mapped: bool = False) -> npt.NDArray[Any]:
    """Read a NumPy array, or map it into memory if it may be too large to be read."""
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    return array


def fingerprint(folder: Path) -> str:
    """Return a hash of the names and contents of the files in a folder, to tell models apart."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "blake2b")
        total.update(path.name.encode() + b"\0" + digest.digest())
    return total.hexdigest()
