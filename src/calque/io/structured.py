"""Read JSON and NumPy files from outside: whatever is wrong with them is an InputError."""

from __future__ import annotations

import io
import json
import lzma
import math
import os
import re
import warnings
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import numpy as np
from numpy.lib import format

from calque.errors import InputError, explain_os_error, first_line
from calque.io.files import PathLike, display_name, read_chunks

if TYPE_CHECKING:
    import numpy.typing as npt

ContentT = TypeVar("ContentT", dict[str, Any], list[Any])

# Largest document or archive that is read as a whole, after decompression.
MAX_DOCUMENT_BYTES = 256 << 20
MAX_DIGITS = 20  # of a whole number, enough for 64 bits
# What NumPy raises for damaged files.
MALFORMED = (
    ValueError,
    EOFError,
    MemoryError,
    OverflowError,
    SyntaxError,
    RecursionError,
    TokenError,
    TypeError,
)
JSON_NAMES: dict[type, str] = {dict: "a JSON object", list: "a JSON list"}
ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(
    text: str | bytes, *, file: object, line: int | None = None, fix: str | None = None
) -> Any:
    """Parse a JSON document, or one line of a file that has one document per line."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        content = json.loads(text, parse_int=_parse_whole_number)
        if ESCAPED_SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()  # fails for half of a pair
        return content
    except RecursionError as error:
        raise InputError("the JSON is nested too deeply", file=file, line=line, fix=fix) from error
    except UnicodeError as error:
        raise InputError("the JSON is not valid UTF-8", file=file, line=line, fix=fix) from error
    except ValueError as error:
        problem = f"this is not valid JSON: {first_line(error)}"
        raise InputError(problem, file=file, line=line, fix=fix) from error


def read_json(path: Path, kind: type[ContentT], *, fix: str | None = None) -> ContentT:
    """Read a JSON file that holds an object (`kind` is dict) or a list.

    Args:
        path: The file.
        kind: `dict` or `list`.
        fix: How to fix a file that is missing or wrong.
    """
    content = parse_json(read_document(path, fix=fix), file=path, fix=fix)
    if not isinstance(content, kind):
        raise InputError(f"the file does not hold {JSON_NAMES[kind]}", file=path, fix=fix)
    return content


def read_document(path: PathLike, *, fix: str | None = None) -> bytes:
    """Read a whole file, decompressed, if it is not larger than `MAX_DOCUMENT_BYTES`."""
    content = bytearray()
    try:
        for chunk in read_chunks(path):
            content += chunk
            if len(content) > MAX_DOCUMENT_BYTES:
                problem = f"the file is larger than {MAX_DOCUMENT_BYTES:,} bytes"
                raise InputError(problem, file=display_name(path), fix="use a smaller file")
    except InputError as error:
        raise InputError(error.problem, file=error.file, fix=fix or error.fix) from error
    return bytes(content)


def read_array(path: Path, *, mapped: bool = False, fix: str | None = None) -> npt.NDArray[Any]:
    """Read a .npy file, or map it into memory if it may be too large to be read.

    The size in its header is compared with the size of the file before memory is taken.
    """
    try:
        with open(path, "rb") as stream:
            shape, is_fortran, dtype = _read_header(stream, os.fstat(stream.fileno()).st_size)
            order: Literal["F", "C"] = "F" if is_fortran else "C"
            array = np.memmap(stream, dtype, "r", stream.tell(), shape, order)
    except OSError as error:
        raise explain_os_error(error, path, fix=fix) from error
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
                raise ValueError(f"it decompresses to {n_bytes:,} bytes")
            return {
                member.filename.removesuffix(".npy"): _read_member(archive, member)
                for member in members
            }
    except OSError as error:
        raise explain_os_error(error, path, fix=fix) from error
    except (*MALFORMED, zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError) as error:
        problem = f"this is not a valid .npz file: {first_line(error)}"
        raise InputError(problem, file=path, fix=fix) from error


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    raw = archive.read(member)
    stream = io.BytesIO(raw)
    shape, is_fortran, dtype = _read_header(stream, len(raw))
    flat = np.frombuffer(raw, dtype, math.prod(shape), stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C").copy(order="K")


def _read_header(stream: BinaryIO, n_bytes: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array; raise ValueError unless as much as it announces follows."""
    readers = {(1, 0): format.read_array_header_1_0, (2, 0): format.read_array_header_2_0}
    version = format.read_magic(stream)
    if version not in readers:
        raise ValueError("its version is unknown")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers of other forms, which may be damaged
        shape, is_fortran, dtype = readers[version](stream)
    if min(shape, default=0) < 0 or dtype.hasobject or not dtype.itemsize:
        raise ValueError("its shape or type is not allowed")
    if stream.tell() + math.prod(shape) * dtype.itemsize > n_bytes:
        raise ValueError("it is shorter than its header announces")
    return shape, is_fortran, dtype


def _parse_whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)
