"""Records of evaluations, the lines of results.jsonl, and the scores of their test items.

A record has the scores of one model in one language of a task with one seed, or the error of a
failed run. The last field of a line, `checksum`, is a hash of the others; older files have none.
Everything is checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from calque.errors import UNPRINTABLE, InputError
from calque.io.structured import parse_json, read_archive, read_document

Record: TypeAlias = dict[str, Any]
Floats: TypeAlias = npt.NDArray[np.float64]

CHECKSUM = "checksum"
# What the hashes of a record's `config` are made of, which are joined by hyphens.
CONFIG_PARTS = ("settings or languages", "data", "model")
# The score of a record and that of its items must agree within this many points.
TOLERANCE = 1e-3
MAX_NAME = 4096  # characters; a model may have a path as its name
MAX_NUMBER = 1e9  # far beyond any score, and its powers do not overflow
FILE_FIX = "pass folders or .jsonl files written by `calque evaluate -o`"
FIX = "remove the line and evaluate again"
ITEMS_FIX = "evaluate the model again"


def is_name(value: object) -> bool:
    r"""Return whether a value is a name that can be shown in tables, pages and terminals.

    >>> is_name("calque-mini"), is_name(""), is_name("red\x1b[31m")
    (True, False, False)
    """
    is_short = isinstance(value, str) and 0 < len(value) <= MAX_NAME
    return is_short and not UNPRINTABLE.search(str(value))


def _is_number(value: object) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and abs(value) <= MAX_NUMBER  # type: ignore[arg-type]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_mapping(
    is_key: Callable[[str], object], is_value: Callable[[object], bool]
) -> Callable[[Any], bool]:
    def is_valid(value: object) -> bool:
        return isinstance(value, dict) and all(is_key(k) and is_value(v) for k, v in value.items())

    return is_valid


# What the value of a field must be, in words and as a check; other fields are ignored.
NAME = ("a name", is_name)
NUMBER = ("a number", _is_number)
WHOLE = ("a whole number", _is_whole)
TRUTH = ("true or false", lambda value: isinstance(value, bool))
FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": NAME,
    "task": NAME,
    "language": NAME,
    "seed": WHOLE,
    "metric": NAME,
    "value": NUMBER,
    "metrics": ("names with numbers", _is_mapping(is_name, _is_number)),
    "n_items": ("a number of items", lambda value: _is_whole(value) and value >= 0),
    "n_records": ("a number of records", lambda value: _is_whole(value) and value > 0),
    "layers": (
        "layer numbers with scores",
        _is_mapping(re.compile(r"-?[0-9]{1,4}").fullmatch, _is_number),
    ),
    "counts": ("names with whole numbers", _is_mapping(is_name, _is_whole)),
    "setting": NAME,
    "source": NAME,
    "maps": TRUTH,
    "higher_is_better": TRUTH,
    "config": NAME,
    "versions": ("names with versions", _is_mapping(is_name, is_name)),
    "seconds": NUMBER,
    "memory_mb": NUMBER,
    "device": NAME,
    "time": NAME,
    "error": ("a text", lambda value: isinstance(value, str) and bool(value)),
    # In the folder of the results; nothing outside it is ever read or removed.
    "items": (
        "items/NAME.npz",
        lambda value: is_name(value) and bool(re.fullmatch(r"items/[^/\\]+\.npz", value)),
    ),
    "notes": ("names with texts", _is_mapping(is_name, lambda value: isinstance(value, str))),
}
# Fields that may be null, and fields that a failed run may lack or have as null.
NULLABLE = frozenset({"seed", "setting", "source", "memory_mb", "device", "error", "items"})
NULL_IF_FAILED = frozenset({"language", "metric", "value", "higher_is_better"})


def format_record(record: Record) -> bytes:
    """Return a record as a line of JSON with its checksum."""
    line = json.dumps({**record, CHECKSUM: _hash_record(record)}, ensure_ascii=False)
    return line.encode() + b"\n"


def read_records(path: Path, required: Collection[str]) -> tuple[list[tuple[int, Record]], bool]:
    """Read the records of a file with their line numbers.

    Also return whether the last line is incomplete: it has no line end and is no record.

    Args:
        path: The file.
        required: Fields that every record must have.

    Raises:
        InputError: Another line is not a record, or was changed after it was written.
    """
    if path.exists() and not path.is_file():  # a pipe, for example, may have no end
        raise InputError("this is not a file", file=path, fix="pass another path")
    lines = read_document(path, fix=FILE_FIX).split(b"\n")
    last = lines.pop()
    numbered = enumerate(lines, start=1)
    records = [(number, _parse_record(line, required, path, number)) for number, line in numbered]
    if last:
        try:
            number = len(lines) + 1
            records.append((number, _parse_record(last, required, path, number)))
        except InputError:
            return records, True
    return records, False


def load_items(path: Path) -> dict[str, Floats]:
    """Read the arrays of a file of items: LANGUAGE.num and LANGUAGE.den."""
    arrays = read_archive(path, fix=ITEMS_FIX)
    for name, array in arrays.items():
        if array.dtype != np.float64 or array.ndim != 1 or not len(array):
            problem = f"the array {name} is not a list of numbers"
            raise InputError(problem, file=path, fix=ITEMS_FIX)
        if not (np.abs(array) <= MAX_NUMBER).all():
            raise InputError(f"the array {name} has invalid numbers", file=path, fix=ITEMS_FIX)
    return arrays


def select_items(
    arrays: dict[str, Floats], language: str, value: float, path: Path
) -> tuple[Floats, Floats]:
    """Return numerators and denominators of a language; they must give the score of its record."""
    names = [f"{language}.{part}" for part in ("num", "den")]
    for name in names:
        if name not in arrays:
            raise InputError(f"the array {name} is missing", file=path, fix=ITEMS_FIX)
    above, below = (arrays[name] for name in names)
    if above.shape != below.shape:
        problem = f"the item arrays of {language} differ in length"
        raise InputError(problem, file=path, fix=ITEMS_FIX)
    total = float(below.sum())
    score = 100 * float(above.sum()) / total if total else 0.0
    if abs(score - value) > TOLERANCE:
        problem = f"{language}: the items give {score:.4f}, but the record has {value:.4f}"
        raise InputError(problem, file=path, fix=ITEMS_FIX)
    return above, below


def _parse_record(line: bytes, required: Collection[str], path: Path, number: int) -> Record:
    record = parse_json(line, file=path, line=number, fix=FIX)
    if not isinstance(record, dict):
        problem = "the line is not a JSON object"
    else:
        checksum = record.pop(CHECKSUM, None)
        is_intact = checksum is None or checksum == _hash_record(record)
        problem = _find_problem(record, required) if is_intact else "the line was changed"
    if problem:
        raise InputError(problem, file=path, line=number, fix=FIX)
    return record  # type: ignore[no-any-return]


def _find_problem(record: Record, required: Collection[str]) -> str:
    """Return what is wrong with a record, or an empty string."""
    unknown = frozenset() if record.get("error") is None else NULL_IF_FAILED
    for name in required:
        if name not in record and name not in unknown:
            return f"{name} is missing"
    for name, (wanted, is_valid) in FIELDS.items():
        value = record.get(name)
        if name not in record or (value is None and name in NULLABLE | unknown):
            continue
        if not is_valid(value):
            shown = "" if isinstance(value, dict | list) else f": {json.dumps(value)}"
            return f"{name} is not {wanted}{shown}"
    return ""


def _hash_record(record: Record) -> str:
    """Return a hash that depends on the content only, not on how it is written as JSON."""
    try:
        text = json.dumps(record, sort_keys=True)
    except RecursionError:  # a field that no version of Calque writes
        return ""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
