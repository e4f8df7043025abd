"""Output folders that appear complete or not at all, and model folders with checksums.

A model folder is a folder of plain files with a `manifest.json` that holds the model's settings and
the size and SHA-256 of every file; these are verified when the folder is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from calque.errors import DISK_FULL, FIXES, InputError, explain_os_error
from calque.io.checksums import check_files, describe_files
from calque.io.files import sync_path
from calque.io.locks import (
    LOCK,
    PARTIAL,
    REPLACED,
    UNFINISHED,
    hidden_path,
    lock_output,
    remove_folder,
)
from calque.io.structured import read_json

MANIFEST = "manifest.json"
FREE_SPACE = "free some space or choose another folder"
AGAIN = "copy or train the model again"


def write_folder(folder: Path, fill: Callable[[Path], object], *, fix: str = FREE_SPACE) -> None:
    """Call `fill` to write a new folder, which is renamed to `folder` when it is complete.

    An existing folder of that name is replaced in the end. Files and folders get the permissions
    that the umask allows, also those of libraries that allow less.

    Args:
        folder: The folder.
        fill: Called with an empty folder.
        fix: What users can do if the disk is full.
    """
    final = Path(os.path.realpath(folder))
    draft = hidden_path(final, PARTIAL)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with lock_output(final):
            UNFINISHED.add(draft)
            try:
                draft.mkdir()
                mode = draft.stat().st_mode
                fill(draft)
                _set_permissions(draft, mode)
                for path in (*draft.rglob("*"), draft):
                    sync_path(path)
                _publish(draft, final)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
                UNFINISHED.discard(draft)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in DISK_FULL:
            fix = FIXES.get(error.errno, fix)
        raise InputError(f"the folder cannot be written: {error}", file=folder, fix=fix) from error


@contextmanager
def open_draft(folder: Path) -> Iterator[Path]:
    """Lock a folder, and yield a hidden folder in it for files that are moved out when complete.

    What is left in the hidden folder is removed. A new folder is removed if nothing was written.
    """
    is_new, name = not folder.exists(), folder / "draft"
    draft = hidden_path(name, PARTIAL)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_output(folder, hidden_path(name, LOCK)):
            UNFINISHED.add(draft)
            try:
                draft.mkdir()
                yield draft
            finally:
                shutil.rmtree(draft, ignore_errors=True)
                UNFINISHED.discard(draft)
    except OSError as error:
        raise explain_os_error(error, error.filename or folder) from error
    finally:
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _set_permissions(folder: Path, mode: int) -> None:
    """Set the permissions of all files and folders; `mode` is that of a new folder."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(mode if path.is_dir() else mode & 0o666)


def _publish(draft: Path, final: Path) -> None:
    """Rename a complete folder to its final name; an older one is moved aside, then removed."""
    aside = hidden_path(final, REPLACED)
    if final.exists():
        final.rename(aside)
    draft.rename(final)
    sync_path(final.parent)
    if aside.exists():
        remove_folder(aside, final)


def write_model_folder(
    folder: Path, format: str, settings: dict[str, Any], fill: Callable[[Path], object]
) -> None:
    """Write a model folder with the files that `fill` writes and their manifest.

    An existing model of the same format is replaced; any other folder is an InputError.
    """
    folder = Path(folder)
    check_model_folder(folder, format)

    def fill_and_list(draft: Path) -> None:
        fill(draft)
        manifest = {"format": format, **settings, "files": describe_files(draft)}
        text = json.dumps(manifest, ensure_ascii=False, indent=2) + "\n"
        (draft / MANIFEST).write_text(text, "utf-8")

    write_folder(folder, fill_and_list)


def check_model_folder(folder: Path, format: str) -> None:
    """Raise InputError if a path exists and is not a model folder of the format."""
    if folder.exists() and not _is_replaceable(folder, format):
        problem = "the path exists and is not a model of this kind"
        raise InputError(problem, file=folder, fix="choose a new folder")


def read_model_folder(folder: Path, format: str) -> dict[str, Any]:
    """Verify the files of a model folder and return its manifest."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if manifest.get("format") != format:
        found = manifest.get("format") or "another kind of model"
        raise InputError(f"the folder holds {found} instead of {format}", file=folder)
    check_files(folder, manifest["files"], fix=AGAIN)
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
    manifest = read_json(path, dict, fix=AGAIN)
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise InputError("the file is not the manifest of a model", file=path, fix=AGAIN)
    if any(Path(name).name != name for name in files):
        raise InputError("the manifest names files outside its folder", file=path, fix=AGAIN)
    return manifest


def write_word_list(path: Path, words: list[str]) -> None:
    """Write words as a JSON list, one per line; words may hold any characters."""
    text = json.dumps(words, ensure_ascii=False, indent=0)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def read_word_list(path: Path) -> list[str]:
    """Read words that `write_word_list` wrote."""
    try:
        words: list[str] = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
        "".join(words)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError("the file is not a list of words", file=path, fix=AGAIN) from error
    return words


def fingerprint(folder: Path) -> str:
    """Return a hash of the names and contents of the files in a folder, to tell models apart."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "blake2b")
        total.update(path.name.encode() + b"\0" + digest.digest())
    return total.hexdigest()
