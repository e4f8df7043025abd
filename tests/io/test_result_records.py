"""Records of evaluations: valid fields, checksums, damaged lines."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from calque.errors import InputError
from calque.io.result_records import FIELDS, format_record, read_records

make_row = runpy.run_path(str(Path(__file__).parents[1] / "drawn_results.py"))["make_row"]
REQUIRED = ("model", "task", "seed", "language", "value")
OLD_FIELDS = FIELDS.keys() - {"n_records", "notes", "maps"}  # those of the first version
DEEP = "[" * 100_000 + "]" * 100_000


def write(folder: Path, *lines: bytes) -> Path:
    path = folder / "results.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def read_error(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read_records(path, REQUIRED)
    return caught.value


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [make_row(model="übung", layers={"-1": 3.5}), make_row(value=-0.25, items="items/a.npz")]
    failed = make_row(language=None, value=None, metric=None, error="out of memory\nat line 3")
    path = write(tmp_path, *map(format_record, (*rows, failed)))
    assert read_records(path, REQUIRED) == ([(1, rows[0]), (2, rows[1]), (3, failed)], False)
    without_checksums = [json.dumps(row).encode() + b"\n" for row in (*rows, failed)]
    assert read_records(write(tmp_path, *without_checksums), OLD_FIELDS)


def test_a_checksum_does_not_depend_on_the_notation(tmp_path: Path) -> None:
    line = json.loads(format_record(make_row()))
    notation = json.dumps(dict(reversed(line.items())), indent=None, separators=(" ,", ":"))
    assert read_records(write(tmp_path, notation.encode() + b"\n"), REQUIRED)[0] == [
        (1, make_row())
    ]


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    """A changed byte makes the line invalid, or leaves the record as it was."""
    row = make_row(layers={"1": 50.0}, counts={"cut": 3})
    line = format_record(row)
    for place in range(len(line) - 1):
        mask = (1, 4, 16)[place % 3]
        changed = line[:place] + bytes([line[place] ^ mask]) + line[place + 1 :]
        path = write(tmp_path, changed)
        try:
            ((_, found),) = read_records(path, REQUIRED)[0]
        except InputError:
            continue
        kept = {name: found.get(name) for name in row}
        assert kept == row, changed  # a changed space, or another name of the checksum


def test_an_incomplete_last_line(tmp_path: Path) -> None:
    lines = [format_record(make_row(seed=seed, model="übung")) for seed in (1, 2)]
    for n_cut in range(1, len(lines[1]) + 1):
        path = write(tmp_path, lines[0], lines[1][:-n_cut])
        records, is_incomplete = read_records(path, REQUIRED)
        # Without its line end alone, and without any byte, nothing is incomplete.
        assert is_incomplete == (1 < n_cut < len(lines[1]))
        assert len(records) == (2 if n_cut == 1 else 1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "this is not valid JSON: Expecting property name"),
        (b"", "this is not valid JSON"),
        (b"\xff", "the JSON is not valid UTF-8"),
        (b"[1]", "the line is not a JSON object"),
        (b'{"model": "a"}', "task is missing"),
        (b'{"value": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
        (b'{"value": 1' + b"0" * 400 + b"}", "a number of 401 digits"),
        (DEEP.encode(), "nested too deeply"),
        (b'{"model": ' + DEEP.encode() + b"}", "nested too deeply"),
        (rb'{"model": "\ud800"}', "the JSON is not valid UTF-8"),
        ({"seed": "1"}, 'seed is not a whole number: "1"'),
        ({"seed": True}, "seed is not a whole number: true"),
        ({"seed": 1.0}, "seed is not a whole number: 1.0"),
        ({"model": ""}, 'model is not a name: ""'),
        ({"model": ["a"]}, "model is not a name"),
        ({"model": "a\x1b[31m"}, "model is not a name: "),
        ({"task": "a\nb"}, "task is not a name: "),
        ({"language": "a\u202eb"}, "language is not a name: "),
        ({"language": None}, "language is not a name: null"),
        ({"metric": "m" * 5000}, "metric is not a name: "),
        ({"value": None}, "value is not a number: null"),
        ({"value": float("nan")}, "value is not a number: NaN"),
        ({"value": float("inf")}, "value is not a number: Infinity"),
        ({"value": 1e308}, "value is not a number: 1e+308"),
        ({"value": True}, "value is not a number: true"),
        ({"value": "50"}, 'value is not a number: "50"'),
        ({"metrics": {"accuracy": None}}, "metrics is not names with numbers"),
        ({"higher_is_better": None}, "higher_is_better is not true or false: null"),
        ({"higher_is_better": 1}, "higher_is_better is not true or false: 1"),
        ({"n_items": 1.5}, "n_items is not a number of items: 1.5"),
        ({"n_items": -1}, "n_items is not a number of items: -1"),
        ({"n_records": 0}, "n_records is not a number of records: 0"),
        ({"layers": {"a": 1}}, "layers is not layer numbers with scores"),
        ({"layers": {"--1": 1}}, "layers is not layer numbers with scores"),
        ({"layers": {"9" * 5000: 1}}, "layers is not layer numbers with scores"),
        ({"layers": {"1": float("nan")}}, "layers is not layer numbers with scores"),
        ({"layers": [1]}, "layers is not layer numbers with scores"),
        ({"counts": {"cut": "3"}}, "counts is not names with whole numbers"),
        ({"config": 3}, "config is not a name: 3"),
        ({"versions": "2.0"}, 'versions is not names with versions: "2.0"'),
        ({"versions": {"torch": 2}}, "versions is not names with versions"),
        ({"seconds": "long"}, 'seconds is not a number: "long"'),
        ({"error": 3}, "error is not a text: 3"),
        ({"error": ""}, 'error is not a text: ""'),
        ({"items": "../../etc/passwd"}, "items is not items/NAME.npz"),
        ({"items": "items/../../passwd.npz"}, "items is not items/NAME.npz"),
        ({"items": "/etc/passwd.npz"}, "items is not items/NAME.npz"),
        ({"items": 3}, "items is not items/NAME.npz: 3"),
        ({"notes": {"collection": 1}}, "notes is not names with texts"),
        ({"checksum": "0" * 16}, "the line was changed"),
        ({"checksum": 3}, "the line was changed"),
        ({"model": None, "error": "no"}, "model is not a name: null"),
    ],
)
def test_an_invalid_line_is_reported(
    tmp_path: Path, line: bytes | dict[str, Any], problem: str
) -> None:
    text = line if isinstance(line, bytes) else json.dumps(make_row(**line)).encode()
    path = write(tmp_path, format_record(make_row()), text, b"\n")
    error = read_error(path)
    assert problem in error.problem
    assert (error.file, error.line) == (path, 2)
    assert error.fix == "remove the line and evaluate again"
    assert len(str(error)) < 1500 and str(error).isprintable()
