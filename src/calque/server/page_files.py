"""The files of the page, compressed once and read again when they change."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from calque.server.folder_files import list_files

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
# Files of other packages that the page uses.
SHARED = {"base.css": Path(str(resources.files("calque.report"))) / "base.css"}
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page as it is sent."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


def find_page_file(name: str, folder: Path = FOLDER) -> PageFile | None:
    """Return the file of the page with a name such as `views/align.js`, or None.

    The name is looked up in a list of the folder's files; it is never made into a path.
    """
    path = SHARED.get(name) or list_files(folder, _has_media_type).get(name)
    return None if path is None else _read(path, path.stat().st_mtime_ns)


def _has_media_type(name: str) -> bool:
    return Path(name).suffix in MEDIA_TYPES


@lru_cache(maxsize=64)
def _read(path: Path, modified: int) -> PageFile:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return PageFile(content, gzip.compress(content, mtime=0), MEDIA_TYPES[path.suffix], etag)
