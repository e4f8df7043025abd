"""Alignment error rates against plain sets and values by hand; sweeps over layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.cli import run
from calque.errors import InputError
from calque.io.links import GoldLinks, build_links
from calque.models.encoder import Encoder
from calque.types import Links
from calque.word_alignment import scoring
from calque.word_alignment.neural import WordAligner
from calque.word_alignment.scoring import (
    LinkCounts,
    check_gold,
    count_layers,
    count_layers_by_pair,
    count_links,
    count_links_by_pair,
    find_best_layer,
    judge_links,
)

Triple = tuple[int, int, int]


def links_of(rows: set[Triple], n_pairs: int) -> Links:
    return build_links(sorted(rows), n_pairs)


def test_error_rate_by_hand() -> None:
    # Two pairs in the manner of WPT-2003. Links A: 4 and 3; sure: 3 and 2; possible in all: 5, 3.
    sure = {(0, 0, 0), (0, 1, 1), (0, 2, 3), (1, 0, 1), (1, 1, 0)}
    possible = sure | {(0, 2, 2), (0, 3, 3), (1, 1, 1)}
    found = {(0, 0, 0), (0, 1, 1), (0, 2, 2), (0, 3, 0), (1, 0, 1), (1, 1, 1), (1, 2, 2)}
    counts = count_links(links_of(found, 2), links_of(sure, 2), links_of(possible, 2))
    # In S: 0-0, 1-1 of the first and 0-1 of the second. In P besides: 2-2 and 1-1.
    assert counts == LinkCounts(n_links=7, n_sure=5, n_sure_found=3, n_possible_found=5)
    assert counts.precision == pytest.approx(5 / 7)
    assert counts.recall == pytest.approx(3 / 5)
    assert counts.f1 == pytest.approx(2 * (5 / 7) * (3 / 5) / (5 / 7 + 3 / 5))
    assert counts.aer == pytest.approx(1 - (3 + 5) / (7 + 5))


triples = st.sets(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 5)))


@given(triples, triples, triples)
def test_counts_match_plain_sets(found: set[Triple], sure: set[Triple], more: set[Triple]) -> None:
    possible = sure | more
    want = LinkCounts(len(found), len(sure), len(found & sure), len(found & possible))
    # Whether the sure links are listed among the possible ones or not, they are possible.
    for others in (possible, more):
        links, *gold = (links_of(rows, 4) for rows in (found, sure, others))
        assert count_links(links, *gold) == want
        is_sure, is_possible = judge_links(links, GoldLinks(*gold, "gold"))
        assert is_sure.tolist() == [link in sure for link in sorted(found)]
        assert is_possible.tolist() == [link in possible for link in sorted(found)]
    assert 0 <= want.aer <= 1
    assert sum((count_part(found, sure, possible, k) for k in range(4)), LinkCounts()) == want
    if not more - sure:  # without possible links the error rate is 1 − F1
        assert want.aer == pytest.approx(1 - want.f1)


def count_part(found: set[Triple], sure: set[Triple], possible: set[Triple], k: int) -> LinkCounts:
    groups = ({(0, i, j) for pair, i, j in rows if pair == k} for rows in (found, sure, possible))
    return count_links(*(links_of(rows, 1) for rows in groups))


def test_a_link_named_twice_counts_once() -> None:
    twice = build_links([(0, 1, 1), (0, 1, 1)], 1)
    assert count_links(twice, twice, twice) == LinkCounts(1, 1, 1, 1)


def test_rates_of_nothing() -> None:
    nothing, something = build_links([], 1), build_links([(0, 0, 0)], 1)
    empty = count_links(nothing, nothing, nothing)
    assert (empty.precision, empty.recall, empty.f1, empty.aer) == (1, 1, 1, 0)
    silent = count_links(nothing, something, something)
    assert (silent.precision, silent.recall, silent.f1, silent.aer) == (1, 0, 0, 1)
    wrong = count_links(something, build_links([(0, 1, 1)], 1), build_links([(0, 1, 1)], 1))
    assert (wrong.precision, wrong.recall, wrong.f1, wrong.aer) == (0, 0, 0, 1)


def test_words_far_apart_do_not_overflow() -> None:
    far = build_links([(10**6, 10**8, 10**8), (10**6, 10**8, 10**8 + 1)], 10**6 + 1)
    assert count_links(far, far, far) == LinkCounts(2, 2, 2, 2)


def test_links_of_other_pairs_are_an_error() -> None:
    one, two = build_links([], 1), build_links([], 2)
    with pytest.raises(InputError, match="links of 2 pairs, but gold links of 1"):
        count_links(two, one, one)


def test_counts_by_pair() -> None:
    def links(*rows: Triple) -> Links:
        return build_links(rows, 3)

    mine = links((0, 0, 0), (0, 1, 1), (2, 5, 0))
    sure, possible = links((0, 0, 0), (2, 1, 1)), links((0, 1, 1), (2, 1, 1))
    by_pair = count_links_by_pair(mine, sure, possible)
    assert by_pair.tolist() == [[2, 0, 1], [1, 0, 1], [1, 0, 0], [2, 0, 0]]
    assert count_links(mine, sure, possible) == LinkCounts(3, 2, 1, 2)
    assert count_links_by_pair(links(), links(), links()).sum() == 0


def test_layers_in_blocks(tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(["a", "b"], ["a", "b"])] * 5
    sure = build_links([(k, i, i) for k in range(5) for i in range(2)], 5)
    gold = GoldLinks(sure, sure, "gold")
    aligner = WordAligner(tiny_encoder, method="argmax")
    whole = count_layers_by_pair(aligner, pairs, gold, [0, 2])
    monkeypatch.setattr(scoring, "BLOCK_PAIRS", 2)
    for layer, table in count_layers_by_pair(aligner, pairs, gold, [0, 2]).items():
        np.testing.assert_array_equal(table, whole[layer])
    counts = count_layers(aligner, pairs, gold, [0, 2])
    single = aligner.with_layer(2).align_block(pairs).links
    assert counts[2] == count_links(single, sure, sure)
    assert counts[0].aer == 0  # identical words at the embedding layer


def test_best_layer() -> None:
    scores = {2: 0.5, 0: 0.5, 1: 0.7}
    assert find_best_layer(scores, higher_is_better=True) == 1
    assert find_best_layer(scores, higher_is_better=False) == 0


def test_gold_of_another_text() -> None:
    gold = GoldLinks(build_links([], 3), build_links([], 3), "gold")
    check_gold(gold, 3, "text")
    with pytest.raises(InputError, match="gold: the file has 3 lines, but text has 4 pairs"):
        check_gold(gold, 4, "text")


def test_no_links_have_no_reliability(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, gold, plot = (tmp_path / name for name in ("de-en.text", "de-en.gold", "plot.svg"))
    text.write_text("a b ||| x y\n")
    gold.write_text("0-0\n")
    options = ["--gold", str(gold), "--threshold", "1", "--reliability", str(plot)]
    assert run(["align", str(text), "--model", str(tiny_folder), *options]) == 2
    assert "there are no links whose scores could be compared" in capsys.readouterr().err
    assert not plot.exists()
