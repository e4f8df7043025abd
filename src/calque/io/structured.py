"""Read JSON and NumPy files from outside: whatever is wrong with them is an InputError."""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.lib import format

from calque.errors import InputError, first_line

if TYPE_CHECKING:
    import numpy.typing as npt

ContentT = TypeVar("ContentT", dict[str, Any], list[Any])

# Largest document or archive that is read as a whole, after decompression.
MAX_DOCUMENT_BYTES = 256 << 20
MAX_DIGITS = 20  # of a whole number, enough for 64 bits
# What NumPy raises for damaged files.
MALFORMED = (ValueError, EOFError, MemoryError, OverflowError, SyntaxError, RecursionError)
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, *, file: object, line: int | None = None) -> Any:
    """Parse a JSON document, or one line of a file that has one document per line."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        content = json.loads(text, parse_int=_parse_whole_number)
        if ESCAPED_SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()  # fails for half of a pair
    except RecursionError as error:
        raise InputError("the JSON is nested too deeply", file=file, line=line) from error
    except UnicodeError as error:
        raise InputError("the JSON is not valid UTF-8", file=file, line=line) from error
    except ValueError as error:
        problem = f"this is not valid JSON: {first_line(error)}"
        raise InputError(problem, file=file, line=line) from error
    return content


def read_json(path: Path, kind: type[ContentT], *, fix: str | None = None) -> ContentT:
    """Read a JSON file that holds an object (`kind` is dict) or a list.

    Args:
        path: The file.
        kind: `dict` or `list`.
        fix: How to fix a file that is missing or wrong.
    """
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise InputError(f"the file is larger than {MAX_DOCUMENT_BYTES:,} bytes", file=path)
        raw = path.read_bytes()
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise InputError(problem, file=path, fix=fix) from error
    try:
        content = parse_json(raw, file=path)
    except InputError as error:
        raise InputError(error.problem, file=path, fix=fix) from error
    if not isinstance(content, kind):
        name = "object" if kind is dict else "list"
        raise InputError(f"the file does not hold a JSON {name}", file=path, fix=fix)
    return content


def read_array(path: Path, *, mapped: bool = False, fix: str | None = None) -> npt.NDArray[Any]:
    """Read a .npy file, or map it into memory if it may be too large to be read.

    The size in its header is compared with the size of the file before memory is taken.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive")
    except OSError as error:
        raise InputError((error.strerror or str(error)).lower(), file=path, fix=fix) from error
    except MALFORMED as error:
        problem = f"this is not a valid .npy file: {first_line(error)}"
        raise InputError(problem, file=path, fix=fix) from error
    return array if mapped else np.array(array)


def read_archive(path: Path, *, fix: str | None = None) -> dict[str, npt.NDArray[Any]]:
    """Read all arrays of a .npz file; their sizes are checked before they are decompressed."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            n_bytes = sum(member.file_size for member in members)
            if n_bytes > MAX_DOCUMENT_BYTES:
                raise InputError(f"the archive decompresses to {n_bytes:,} bytes", file=path)
            return {
                member.filename.removesuffix(".npy"): _read_member(archive, member)
                for member in members
            }
    except OSError as error:
        raise InputError((error.strerror or str(error)).lower(), file=path, fix=fix) from error
    except (*MALFORMED, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        problem = f"this is not a valid .npz file: {first_line(error)}"
        raise InputError(problem, file=path, fix=fix) from error


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    raw = archive.read(member)
    stream = io.BytesIO(raw)
    readers = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}
    version = format.read_magic(stream)
    if version not in readers:
        raise ValueError(f"{member.filename} has an unknown version")
    shape, is_fortran, dtype = readers[version](stream)
    # Unlike np.load, this takes no memory for a size that is only in the header.
    flat = np.frombuffer(raw, dtype, math.prod(shape), stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _parse_whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
