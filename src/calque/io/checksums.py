"""Checksums of files that belong together, and of the JSON file that lists them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calque.errors import InputError
from calque.io.structured import parse_json, read_document

CHECKSUM = "sha256"


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file."""
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, CHECKSUM: digest}


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size and the SHA-256 of every file in a folder, by name."""
    return {path.name: describe_file(path) for path in sorted(folder.iterdir()) if path.is_file()}


def check_files(folder: Path, files: Mapping[str, Any], *, fix: str | None = None) -> None:
    """Raise InputError if a file is missing or differs from what `describe_files` returned."""
    for name, expected in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise InputError("the file is missing", file=path, fix=fix)
        found = describe_file(path)
        if found != expected:
            detail = "its checksum is wrong"
            if isinstance(expected, dict) and found["bytes"] != expected.get("bytes"):
                detail = f"it has {found['bytes']} bytes instead of {expected.get('bytes')}"
            raise InputError(f"the file is damaged: {detail}", file=path, fix=fix)


def format_record(content: Mapping[str, Any]) -> str:
    """Return an object as the text of a JSON file that ends with its own checksum."""
    text = json.dumps({**content, CHECKSUM: ""}, indent=1, ensure_ascii=False) + "\n"
    end = -len('"\n}\n')  # after the empty checksum's first quotation mark
    return text[:end] + hashlib.sha256(text.encode()).hexdigest() + text[end:]


def read_record(path: Path, *, fix: str | None = None) -> dict[str, Any]:
    """Read a file that `format_record` has formatted, and verify its checksum."""
    try:
        raw = read_document(path)
        content = parse_json(raw, file=path)
    except InputError as error:
        raise InputError(error.problem, file=path, fix=fix or error.fix) from error
    expected = content.pop(CHECKSUM, None) if isinstance(content, dict) else None
    if not isinstance(expected, str) or not re.fullmatch("[0-9a-f]{64}", expected):
        problem = "the file has no checksum; another version of Calque wrote it, or it is damaged"
        raise InputError(problem, file=path, fix=fix)
    if hashlib.sha256(raw.replace(expected.encode(), b"")).hexdigest() != expected:
        raise InputError("the file is damaged: its checksum is wrong", file=path, fix=fix)
    return dict(content)
