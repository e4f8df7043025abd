"""Files inside the folders that the server was started with.

Requests name things (a run, a language, a file of the page). A name is only looked up in a list
that was made from a folder; it is never made into a path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MAX_DEPTH = 4
MAX_FILES = 2_000


def list_files(folder: Path, is_wanted: Callable[[str], bool]) -> dict[str, Path]:
    """Return files below a folder by their relative names, such as `a/metrics.jsonl`.

    Symbolic links and hidden folders are left out, and so is what is more than a few folders deep.
    """
    found: dict[str, Path] = {}
    for place, folders, names in os.walk(folder):
        relative = Path(place).relative_to(folder)
        is_deep = len(relative.parts) >= MAX_DEPTH
        folders[:] = [] if is_deep else sorted(n for n in folders if not n.startswith("."))
        for name in sorted(filter(is_wanted, names)):
            path = Path(place, name)
            if path.is_file() and not path.is_symlink() and len(found) < MAX_FILES:
                found[(relative / name).as_posix()] = path
    return found
