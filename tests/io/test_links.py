"""Links: round trips, gold links, and errors that name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.links import (
    build_links,
    format_links,
    format_pharaoh,
    parse_links,
    read_gold,
    read_links,
    select_pairs,
)
from calque.types import Links

GOLD = Path(__file__).parents[1] / "data" / "gold"
PAIRS = [
    (["das", "Haus"], ["the", "big", "house"]),
    ([], ["empty"]),
    (["Wolken-kratzer"], ["sky", "scraper"]),
]
LINKS = build_links([(0, 0, 0), (0, 1, 2), (2, 0, 0), (2, 0, 1)], 3, [0.5, 0.93456, 1, 0])


def triples(links: Links) -> list[tuple[int, int, int]]:
    columns = (column.tolist() for column in (links.pairs, links.src, links.tgt))
    return list(zip(*columns, strict=True))


def test_formats() -> None:
    assert format_links(LINKS, PAIRS) == ["0-0 1-2", "", "0-0 0-1"]
    assert format_links(LINKS, PAIRS, scores=True) == [
        "0-0:0.5000 1-2:0.9346",
        "",
        "0-0:1.0000 0-1:0.0000",
    ]
    assert format_links(LINKS, PAIRS, "words") == [
        "das-the Haus-house",
        "",
        "Wolken-kratzer-sky Wolken-kratzer-scraper",
    ]
    assert format_links(LINKS, PAIRS, "words", scores=True)[0] == "das-the:0.5000 Haus-house:0.9346"


def test_control_characters_do_not_reach_the_terminal() -> None:
    words = [(["\x1b[2J", "x" * 1000], ["\x9b1m", "", "\u202eabc"]), *PAIRS[1:]]
    shown = f"\\x1b[2J-\\x9b1m {'x' * 1000}-\\u202eabc"
    assert format_links(LINKS, words, "words")[0] == shown


def test_json_holds_words_links_and_scores() -> None:
    rows = [json.loads(line) for line in format_links(LINKS, PAIRS, "jsonl")]
    assert rows == [
        {
            "src": ["das", "Haus"],
            "tgt": ["the", "big", "house"],
            "links": [[0, 0, 0.5], [1, 2, 0.9346]],
        },
        {"src": [], "tgt": ["empty"], "links": []},
        {
            "src": ["Wolken-kratzer"],
            "tgt": ["sky", "scraper"],
            "links": [[0, 0, 1.0], [0, 1, 0.0]],
        },
    ]
    (line,) = format_links(build_links([], 1), [(["日本"], ["Japon"])], "jsonl")
    assert "日本" in line


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(InputError, match="choose from: pharaoh, jsonl, words"):
        format_links(LINKS, PAIRS, "xml")  # type: ignore[arg-type]


@given(st.lists(st.sets(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=9)))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, sets: list[set[tuple[int, int]]]
) -> None:
    rows = [(number, i, j) for number, pairs in enumerate(sets) for i, j in sorted(pairs)]
    links = build_links(rows, len(sets), [k / 16 for k in range(len(rows))])
    path = tmp_path_factory.mktemp("links") / "links.txt"
    path.write_text("".join(line + "\n" for line in format_pharaoh(links, scores=True)))
    found = read_links(path)
    assert found.n_pairs == len(sets)
    assert triples(found) == rows
    np.testing.assert_allclose(found.scores, links.scores, atol=1e-4)
    assert found.to_lists() == [sorted(pairs) for pairs in sets]


def test_links_are_sorted(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("1-1:0.25 0-5 0-0:0.5\n\n2-0\n")
    links = read_links(tmp_path / "l")
    assert triples(links) == [(0, 0, 0), (0, 0, 5), (0, 1, 1), (2, 2, 0)]
    assert links.scores.tolist() == [0.5, 1, 0.25, 1]


def test_gold_of_wpt_2003() -> None:
    gold = read_gold(GOLD / "en-fr.gold")
    # "order , please ." and "a le ordre .": 3-3 and 0-2 are sure, eight more are possible.
    first = gold.select(0, 1)
    assert triples(first.sure) == [(0, 0, 2), (0, 3, 3)]
    assert len(first.possible.src) == 10
    assert set(triples(first.sure)) <= set(triples(first.possible))
    text = (GOLD / "en-fr.gold").read_text()
    assert gold.n_pairs == len(text.splitlines()) == 20
    assert len(gold.sure.src) == text.count("-")
    assert len(gold.possible.src) == text.count("-") + text.count("p")


def test_sure_and_possible_links(tmp_path: Path) -> None:
    (tmp_path / "g").write_text("1-1 1-2:0.9 2p1:x 2?2 1-1 1p1\n\n")
    gold = read_gold(tmp_path / "g", from_one=True)
    assert triples(gold.sure) == [(0, 0, 0), (0, 0, 1)]
    assert triples(gold.possible) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert gold.n_pairs == 2


def test_select_pairs() -> None:
    part = select_pairs(LINKS, 1, 3)
    assert (triples(part), part.n_pairs) == ([(1, 0, 0), (1, 0, 1)], 2)
    assert select_pairs(LINKS, 2, 9).n_pairs == 1
    assert triples(select_pairs(LINKS, 0, 1)) == [(0, 0, 0), (0, 1, 2)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("0-0 1", "g, line 2: '1' is not a link (write i-j"),
        ("0-0 -1-2", "'-1-2' is not a link"),
        ("1--2", "'1--2' is not a link"),
        ("٣-٤", "is not a link"),
        ("1/2", "'1/2' is not a link"),
        ("9999999999-0", "is not a link"),
    ],
)
def test_invalid_links(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "g").write_text(f"0-0\n{line}\n")
    for read in (read_gold, read_links):
        with pytest.raises(InputError) as error:
            read(tmp_path / "g")
        assert problem in str(error.value)


def test_invalid_scores_and_words_counted_from_one(tmp_path: Path) -> None:
    (tmp_path / "g").write_text("0-0:high\n")
    read_gold(tmp_path / "g")
    with pytest.raises(InputError, match="g, line 1: '0-0:high' is not a link"):
        read_links(tmp_path / "g")
    with pytest.raises(
        InputError, match=r"line 1: '0-0:high' is not a link .* words counted from 1"
    ):
        read_gold(tmp_path / "g", from_one=True)


def test_links_outside_the_pair(tmp_path: Path) -> None:
    (tmp_path / "g").write_text("0-0\n0-0 2p1\n")
    gold = read_gold(tmp_path / "g")
    pairs = [(["a"], ["b"]), (["a", "b", "c"], ["d", "e"])]
    gold.check_words(pairs)
    gold.check_words(pairs[1:], first=1)
    with pytest.raises(InputError, match=r"g, line 2: the link 2-1 .* has 3 and 1 words"):
        gold.check_words([pairs[0], (["a", "b", "c"], ["d"])])
    with pytest.raises(InputError, match=r"g, line 2: .*has 2 and 2 words"):
        gold.check_words([(["a", "b"], ["d", "e"])], first=1)


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(0, 10**8),
                st.sampled_from("-p?"),
                st.integers(0, 10**8),
                st.none() | st.floats(allow_nan=False, allow_infinity=False),
            )
        )
    ),
    st.booleans(),
    st.booleans(),
)
def test_parser_against_plain_python(rows: list, from_one: bool, sure_only: bool) -> None:
    """Lines of plain links are parsed in bulk, others link by link; both give the same."""
    if sure_only:
        rows = [[(i, "-", j, None) for i, _, j, _ in row] for row in rows]
    lines = [
        " ".join(
            f"{i + from_one}{kind}{j + from_one}" + (f":{score!r}" if score is not None else "")
            for i, kind, j, score in row
        )
        for row in rows
    ]
    found = parse_links(lines, "file", from_one=from_one, possible=True)
    flat = [(n, *link) for n, row in enumerate(rows) for link in row]
    columns = list(zip(*flat, strict=True)) or [()] * 5
    assert found.lines.tolist() == list(columns[0])
    assert found.src.tolist() == list(columns[1])
    assert found.is_sure.tolist() == [kind == "-" for kind in columns[2]]
    assert found.tgt.tolist() == list(columns[3])
    np.testing.assert_array_equal(
        found.scores, [np.nan if score is None else score for score in columns[4]]
    )


@pytest.mark.parametrize("cell", ["0p0", "0-0:", "0-0:x", "0-0:nan", "0-0:inf", "0-0-0", "-0-0"])
def test_parser_errors_name_the_given_line(cell: str) -> None:
    with pytest.raises(
        InputError, match=rf"^f, line 9: '{cell}' is not a link \(write i-j or i-j:"
    ):
        parse_links(["0-0 1-1", f"0-0 {cell}"], "f", numbers=[7, 9])
