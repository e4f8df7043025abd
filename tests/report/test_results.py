"""Reading results: what a killed run left, what is no row, whose items they are."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calque.errors import InputError
from calque.report.results import (
    describe_failures,
    describe_files,
    describe_mixtures,
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
    assert (found.n_torn, found.n_duplicates, found.failures) == (0, 0, [])
    above, below = read_items(found.rows[0]) or ((), ())
    assert 100 * sum(above) / sum(below) == pytest.approx(found.rows[0].value)
    assert found.rows[0].layers[4] == pytest.approx(found.rows[0].value)
    assert read_results([tmp_path / "results.jsonl"]).rows == found.rows


def test_a_line_cut_off_by_a_kill_is_counted(tmp_path: Path) -> None:
    write_rows(tmp_path, [make_row(seed=1), make_row(seed=2)])
    path = tmp_path / "results.jsonl"
    whole = path.read_bytes()
    for cut in (1, 40, len(whole) // 2 - 1):
        path.write_bytes(whole[:-cut])
        found = read_results([tmp_path])
        # Without its line end alone a row is still whole.
        assert (len(found.rows), found.n_torn) == ((2, 0) if cut == 1 else (1, 1))
    (note,) = describe_files(found)
    assert note.startswith("1 last line cut off")


def test_cut_inside_a_letter(tmp_path: Path) -> None:
    line = json.dumps(make_row(model="übung"), ensure_ascii=False).encode()
    (tmp_path / "results.jsonl").write_bytes(line + b"\n" + line[: line.index(b"\xbc")])
    assert read_results([tmp_path]).n_torn == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON"),
        ("", "is no JSON"),
        ("[1]", "is no row of results"),
        ('{"model": "a"}', "seed 'missing' is neither"),
        (make_row(seed="1"), "seed '1' is neither a whole number nor null"),
        (make_row(seed=True), "seed True is neither"),
        (make_row(model=""), "model '' is no name"),
        (make_row(language=None), "language None is no name"),
        (make_row(value=None), "value None is no number"),
        (make_row(value=float("nan")), "value nan is no number"),
        (make_row(higher_is_better=None), "higher_is_better is neither true nor false"),
        (make_row(n_items=1.5), "n_items 1.5 is no whole number"),
        (make_row(layers={"a": 1}), "layers are no scores by number"),
        (make_row(layers=[1]), "layers are no scores by number"),
        (make_row(config=3), "config 3 is no text"),
        (make_row(items="../../etc/passwd"), "lie elsewhere"),
        (make_row(items="/etc/passwd"), "lie elsewhere"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | dict[str, Any], problem: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "results.jsonl").write_text(json.dumps(make_row()) + f"\n{text}\n")
    with pytest.raises(InputError, match=problem) as caught:
        read_results([tmp_path])
    assert (caught.value.file, caught.value.line) == (tmp_path / "results.jsonl", 2)


def test_no_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No such file .*calque evaluate"):
        read_results([tmp_path])


def test_of_rows_for_one_cell_the_last_counts(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "1", [make_row(value=1.0), make_row(seed=2)])
    second = write_rows(tmp_path / "2", [make_row(value=2.0)])
    found = read_results([first, second, first / ".." / "1"])
    assert found.n_duplicates == 3
    found = read_results([first, second, second])
    assert found.n_duplicates == 1
    assert [row.value for row in found.rows] == [2.0, 50.0]
    assert describe_files(found) == ["1 row given again: the last one counts"]


def test_a_failure_is_forgotten_once_it_worked(tmp_path: Path) -> None:
    failed = make_row(language=None, value=None, metric=None, error="out of memory\nat line 3")
    write_rows(tmp_path, [failed, make_row(), failed | {"seed": 2}, make_row(model="b", seed=3)])
    found = read_results([tmp_path])
    assert [(each.seed, each.error[:13]) for each in found.failures] == [(2, "out of memory")]
    assert describe_failures(found, ["base", "b"], ["pos"]) == [
        "1 cell failed: base, pos, seed 2: out of memory",
        "3 cells missing: base, pos, seed 3; b, pos, seed 1; b, pos, seed 2",
    ]


def test_settings_data_and_versions_must_agree(tmp_path: Path) -> None:
    alike = [make_row(), make_row(model="b", config="aa-bb-other")]
    rows = read_results([write_rows(tmp_path / "1", alike)]).rows
    assert describe_mixtures("pos", rows) == []
    other = [
        make_row(model="b", config="ax-bb-cc"),
        make_row(model="c", config="aa-bx-cc", versions={"calque": "0.1.0", "torch": "2.12"}),
        make_row(model="d", setting="features", n_items=7),
    ]
    rows = read_results([write_rows(tmp_path / "2", [*alike[:1], *other])]).rows
    notes = describe_mixtures("pos", rows)
    assert notes == [
        "pos: the setting of the scores differ (zero-shot; features): not made alike",
        "pos: the data of the scores differ: not made alike",
        "pos: scores were made with other versions of torch",
        "pos: the test items differ in number in de",
    ]
    notes = describe_mixtures("pos", rows[:2])
    assert notes == ["pos: the settings of the scores differ: not made alike"]


def test_one_name_for_two_models_is_said(tmp_path: Path) -> None:
    """Seeds of other weights under the same name, as two folders can hold them, are not one's."""
    for number, weights in ((1, "old"), (2, "new")):
        row = DRAWN["make_row"](model="m", seed=number, config=f"aa-bb-{weights}")
        base = DRAWN["make_row"](model="base", seed=number)
        DRAWN["write_rows"](tmp_path / weights, [row, base])
    rows = read_results([tmp_path / "old", tmp_path / "new"]).rows
    assert describe_mixtures("pos", rows) == [
        "pos: more than one model is called m: not one's seeds"
    ]
    assert describe_mixtures("pos", [row for row in rows if row.seed == 1]) == []


def test_items_that_are_not_the_row_s(tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    write_rows(tmp_path, [make_row(items="items/a.npz")])
    (row,) = read_results([tmp_path]).rows
    assert row.items is not None
    with pytest.raises(InputError, match="is no file of items"):
        read_items(row)
    bad = {
        "holds no de.num": {"fr.num": np.ones(2), "fr.den": np.ones(2)},
        "unequal or empty": {"de.num": np.ones(2), "de.den": np.ones(3)},
        "the items give 100.0000, the row 50.0000": {"de.num": np.ones(2), "de.den": np.ones(2)},
        "the items give nan": {"de.num": np.array([np.nan]), "de.den": np.ones(1)},
        "is no file of items": {"de.num": np.array([{}]), "de.den": np.ones(1)},
    }
    for number, (problem, arrays) in enumerate(bad.items()):
        path = tmp_path / "items" / f"{number}.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        write_rows(tmp_path, [make_row(items=f"items/{number}.npz")])
        (row,) = read_results([tmp_path]).rows
        with pytest.raises(InputError, match=problem) as caught:
            read_items(row)
        assert caught.value.file == path
