"""Reading results: truncated files, invalid rows, and items that do not match."""

from __future__ import annotations

import gzip
import json
import os
import runpy
from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.report.results import (
    failure_notes,
    file_notes,
    mixture_notes,
    read_items,
    read_results,
)

DRAWN = runpy.run_path(str(Path(__file__).parents[1] / "drawn_results.py"))
make_row, write_rows = DRAWN["make_row"], DRAWN["write_rows"]


def test_rows_as_they_were_written(tmp_path: Path) -> None:
    rows = DRAWN["draw_results"](tmp_path, {"a": 60, "b": 50})
    found = read_results([tmp_path])
    assert [row.value for row in found.rows] == [row["value"] for row in rows]
    assert found.models == ["a", "b"] and found.tasks == ["pos", "ner"]
    assert (found.n_truncated, found.n_duplicates, found.failures) == (0, 0, [])
    above, below = read_items(found.rows[0]) or ((), ())
    assert 100 * sum(above) / sum(below) == pytest.approx(found.rows[0].value)
    assert found.rows[0].layers[4] == pytest.approx(found.rows[0].value)
    assert read_results([tmp_path / "results.jsonl"]).rows == found.rows


def test_a_truncated_line_is_counted(tmp_path: Path) -> None:
    write_rows(tmp_path, [make_row(seed=1), make_row(seed=2)])
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    for cut in (1, 40, len(whole) // 2 - 1):
        path.write_bytes(whole[:-cut])
        found = read_results([tmp_path])
        # Without its line end alone a row is still whole.
        assert (len(found.rows), found.n_truncated) == ((2, 0) if cut == 1 else (1, 1))
    (note,) = file_notes(found)
    assert note.startswith("1 truncated last line")


def test_truncated_inside_a_character(tmp_path: Path) -> None:
    line = json.dumps(make_row(model="übung"), ensure_ascii=False).encode()
    (tmp_path / "results.jsonl").write_bytes(line + b"\n" + line[: line.index(b"\xbc")])
    assert read_results([tmp_path]).n_truncated == 1


def test_no_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such file .*calque evaluate"):
        read_results([tmp_path])


def test_compressed_results(tmp_path: Path) -> None:
    write_rows(tmp_path, [make_row()])
    text = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl.gz").write_bytes(gzip.compress(text))
    found = [read_results([path]).rows for path in (tmp_path, tmp_path / "results.jsonl.gz")]
    assert found[0] == found[1] != []


def test_a_path_that_is_neither_a_file_nor_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder" / "results.jsonl").mkdir(parents=True)
    for name in ("pipe", "folder"):
        with pytest.raises(InputError, match="this is not a file"):
            read_results([tmp_path / name])


def test_the_last_of_several_rows_for_one_cell_counts(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "1", [make_row(value=1.0), make_row(seed=2)])
    second = write_rows(tmp_path / "2", [make_row(value=2.0)])
    found = read_results([first, second, first / ".." / "1"])
    assert found.n_duplicates == 3
    found = read_results([first, second, second])
    assert found.n_duplicates == 1
    assert [row.value for row in found.rows] == [2.0, 50.0]
    assert file_notes(found) == ["1 row repeated for the same cell; the last one counts"]


def test_a_failure_is_dropped_after_a_success(tmp_path: Path) -> None:
    failed = make_row(language=None, value=None, metric=None, error="out of memory\nat line 3")
    write_rows(tmp_path, [failed, make_row(), failed | {"seed": 2}, make_row(model="b", seed=3)])
    found = read_results([tmp_path])
    assert [(each.seed, each.error[:13]) for each in found.failures] == [(2, "out of memory")]
    assert failure_notes(found, ["base", "b"], ["pos"]) == [
        "1 cell failed: base, pos, seed 2: out of memory",
        "3 cells missing: base, pos, seed 3; b, pos, seed 1; b, pos, seed 2",
    ]


def test_settings_data_and_versions_must_agree(tmp_path: Path) -> None:
    alike = [make_row(), make_row(model="b", config="aa-bb-other")]
    rows = read_results([write_rows(tmp_path / "1", alike)]).rows
    assert mixture_notes("pos", rows) == []
    other = [
        make_row(model="b", config="ax-bb-cc"),
        make_row(model="c", config="aa-bx-cc", versions={"calque": "0.1.0", "torch": "2.12"}),
        make_row(model="d", setting="features", n_items=7),
    ]
    rows = read_results([write_rows(tmp_path / "2", [*alike[:1], *other])]).rows
    notes = mixture_notes("pos", rows)
    assert notes == [
        "pos: the scores were made with different transfer settings (zero-shot; features)",
        "pos: the scores were made with different data",
        "pos: the scores were made with different versions of torch",
        "pos: the number of test items differs in de",
    ]
    notes = mixture_notes("pos", rows[:2])
    assert notes == ["pos: the scores were made with different settings or languages"]


def test_one_name_for_two_models_is_reported(tmp_path: Path) -> None:
    """Two folders can use one name for different weights, which are not seeds of one model."""
    for number, weights in ((1, "old"), (2, "new")):
        row = DRAWN["make_row"](model="m", seed=number, config=f"aa-bb-{weights}")
        base = DRAWN["make_row"](model="base", seed=number)
        DRAWN["write_rows"](tmp_path / weights, [row, base])
    rows = read_results([tmp_path / "old", tmp_path / "new"]).rows
    assert mixture_notes("pos", rows) == ["pos: several models have the name m"]
    assert mixture_notes("pos", [row for row in rows if row.seed == 1]) == []


def test_items_of_another_row_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    write_rows(tmp_path, [make_row(items="items/a.npz")])
    (row,) = read_results([tmp_path]).rows
    assert row.items is not None
    with pytest.raises(InputError, match="no such file"):
        read_items(row)
    bad = {
        "the array de.num is missing": {"fr.num": np.ones(2), "fr.den": np.ones(2)},
        "differ in length": {"de.num": np.ones(2), "de.den": np.ones(3)},
        "the items give 100.0000, but the record has 50.0000": {
            "de.num": np.ones(2),
            "de.den": np.ones(2),
        },
        "de.num has invalid numbers": {"de.num": np.array([np.nan]), "de.den": np.ones(1)},
        "de.den has invalid numbers": {"de.num": np.ones(1), "de.den": np.array([1e300])},
        "de.num is not a list of numbers": {"de.num": np.array(["a"]), "de.den": np.ones(1)},
        "de.den is not a list of numbers": {"de.num": np.ones(1), "de.den": np.zeros(0)},
        "not a valid .npz file": {"de.num": np.array([{}]), "de.den": np.ones(1)},
    }
    for number, (problem, arrays) in enumerate(bad.items()):
        path = tmp_path / "items" / f"{number}.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        write_rows(tmp_path, [make_row(items=f"items/{number}.npz")])
        (row,) = read_results([tmp_path]).rows
        with pytest.raises(InputError, match=problem) as caught:
            read_items(row)
        assert caught.value.file == path
