"""What a result was made from, as short hashes of bytes: a changed file cannot go unnoticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from calque.types import InputError

DIGITS = 10


def hash_values(values: object) -> str:
    """Name anything that JSON can say.

    >>> hash_values({"b": 1, "a": None}) == hash_values({"a": None, "b": 1})
    True
    """
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """Name the contents of files, each with what it is called, in whatever order they come."""
    digests = []
    for name, path in files:
        try:
            with open(path, "rb") as stream:
                digests.append((name, hashlib.file_digest(stream, "sha256").hexdigest()))
        except OSError as error:
            raise InputError(str(error.strerror).lower(), file=path) from error
    return hash_values(sorted(digests))


def find_data(data: Path, patterns: Sequence[str]) -> list[tuple[str, Path]]:
    """List the files of a task beneath the user's folder, in `xtreme/` there, or right in it.

    A set's own folder stands for the one above: what is learnt from may lie beside it.
    """
    roots = (data, data / "xtreme")
    found = [(path.relative_to(r), path) for r in roots for p in patterns for path in r.glob(p)]
    if not found and any(pattern.startswith(f"{data.name}/**") for pattern in patterns):
        return find_data(data.parent, patterns)
    if not found:
        inside = [pattern.partition("/")[::2] for pattern in patterns]
        # A pattern of any depth is for a folder of the right name, not for whatever is there.
        inside = [(f, p) for f, p in inside if f == data.name or "**" not in p]
        found = [
            (Path(f, path.relative_to(data)), path) for f, p in inside for path in data.glob(p)
        ]
    return sorted({(str(name), path) for name, path in found if path.is_file()})
