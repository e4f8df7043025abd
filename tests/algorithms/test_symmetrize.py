"""Symmetrization and link filters: by hand, systran-align's links, references in pure Python."""

from __future__ import annotations

import struct
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms.symmetrize import (
    SYMMETRIZATIONS,
    grow_diag,
    grow_diag_final,
    grow_diag_final_and,
    intersection,
    keep_pairs,
    mark_identical,
    mark_linked_pairs,
    mark_one_to_one,
    select_links,
    union,
)
from calque.types import Links

Link = tuple[int, int]
GROWING = ["grow-diag", "grow-diag-final", "grow-diag-final-and"]


def draw_matrix(*drawing: str) -> Tensor:
    """Lines of dots, and letters where there is a link."""
    return torch.tensor([[[cell != "." for cell in line] for line in drawing]])


def draw_batch(n_pairs: int, shape: tuple[int, int], density: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n_pairs, *shape, generator=generator) < density for _ in range(2)]


def list_links(matrix: Tensor) -> set[Link]:
    return {(i, j) for i, j in matrix.nonzero().tolist()}


def test_added_links_count_at_once() -> None:
    # 1-1 touches 0-0 and lets 2-0 in; 2-1 comes too late: both its words are linked by then.
    forward = draw_matrix("x.", "..", ".x")
    backward = draw_matrix("x.", ".x", "x.")
    assert torch.equal(grow_diag(forward, backward), draw_matrix("x.", ".x", "x."))


def test_the_order_of_the_scan_matters() -> None:
    # The same with the sides exchanged: 0-2 is not beside a link when its turn comes, 1-2 is.
    forward = draw_matrix("x..", "..x")
    backward = draw_matrix("x.x", ".x.")
    assert torch.equal(grow_diag(forward, backward), draw_matrix("x..", ".xx"))


def test_growth_takes_several_passes() -> None:
    # From 3-0 only 2-1 can be reached, then 1-2, then 0-3: against the scan, one a pass.
    forward = draw_matrix("...x", "..x.", ".x..", "x...")
    backward = draw_matrix("....", "....", "....", "x...")
    assert torch.equal(grow_diag(forward, backward), forward)


def test_the_final_steps_differ() -> None:
    forward = draw_matrix(
        "x....",
        ".....",
        "...x.",  # far from 0-0, both words new: both final steps take it
        "...x.",  # one word new: only grow-diag-final takes it
    )
    backward = draw_matrix(
        "x.b..",  # the source word is linked
        ".....",
        "....b",  # backward comes after forward, which has linked 2
        ".....",
    )
    grown = draw_matrix("x....", ".....", ".....", ".....")
    assert torch.equal(grow_diag(forward, backward), grown)
    both_new = draw_matrix("x....", ".....", "...x.", ".....")
    assert torch.equal(grow_diag_final_and(forward, backward), both_new)
    one_new = draw_matrix("x.x..", ".....", "...xx", "...x.")
    assert torch.equal(grow_diag_final(forward, backward), one_new)


def test_forward_comes_first() -> None:
    forward, backward = draw_matrix("x..", "..."), draw_matrix("..x", "...")
    assert torch.equal(grow_diag_final_and(forward, backward), forward)
    assert torch.equal(grow_diag_final_and(backward, forward), backward)


def write_probabilities(path: Path, table: dict[str, dict[str, float]]) -> None:
    """Write p(column | row) as systran-align does: version 2, the words, then the rows."""
    words = list(
        dict.fromkeys(["<eps>", "|||", *table, *(w for row in table.values() for w in row)])
    )
    ids = {word: number for number, word in enumerate(words, 1)}
    parts = [struct.pack("<2I", 2, len(words)), *(word.encode() + b"\0" for word in words)]
    parts.append(struct.pack("<I", len(table) + 2))
    for word, row in table.items():
        parts.append(struct.pack("<2I", ids[word], len(row)))
        parts.extend(struct.pack("<If", ids[other], value) for other, value in row.items())
    path.write_bytes(b"".join(parts))


def make_degenerate(name: str, choices: Tensor, n_others: Tensor) -> dict[str, dict[str, float]]:
    """Probabilities with which word k of pair p, `{name}p.k`, can only come from its choice."""
    table: dict[str, dict[str, float]] = {"<eps>": {}}
    other = "t" if name == "s" else "s"
    for pair, row in enumerate(choices.tolist()):
        for word, choice in enumerate(row):
            source = f"{other}{pair}.{choice}" if choice < n_others[pair] else "<eps>"
            table.setdefault(source, {})[f"{name}{pair}.{word}"] = 1.0
    return table


def test_same_links_as_systran_align(tmp_path: Path) -> None:
    """No two pairs share a word, so every direction can be made to say what we want."""
    systran_align = pytest.importorskip("systran_align")
    generator = torch.Generator().manual_seed(0)
    n_pairs, longest = 500, 9
    n_src, n_tgt = torch.randint(1, longest + 1, (2, n_pairs), generator=generator)

    def choose(n_others: Tensor) -> Tensor:
        """The diagonal or any word; a place past the end is the empty word."""
        anywhere = torch.randint(0, longest + 2, (n_pairs, longest), generator=generator)
        near = torch.rand(n_pairs, longest, generator=generator) < 0.5
        chosen = torch.where(near, torch.arange(longest), anywhere)
        return chosen.where(chosen < n_others[:, None], longest)

    src_of, tgt_of = choose(n_src), choose(n_tgt)
    write_probabilities(tmp_path / "forward", make_degenerate("t", src_of, n_src))
    write_probabilities(tmp_path / "backward", make_degenerate("s", tgt_of, n_tgt))
    aligner = systran_align.Aligner(str(tmp_path / "forward"), str(tmp_path / "backward"))
    answers = aligner.align_batch(
        [[f"s{pair}.{i}" for i in range(n)] for pair, n in enumerate(n_src.tolist())],
        [[f"t{pair}.{j}" for j in range(n)] for pair, n in enumerate(n_tgt.tolist())],
    )

    places = torch.arange(longest)
    real = (places[:, None] < n_src[:, None, None]) & (places < n_tgt[:, None, None])
    forward = (src_of[:, None, :] == places[:, None]) & real
    backward = (tgt_of[:, :, None] == places) & real
    found = [list_links(matrix) for matrix in grow_diag_final_and(forward, backward)]
    assert found == [set(answer["alignments"]) for answer in answers]
    for other in (
        grow_diag,
        grow_diag_final,
        union,
        intersection,
    ):  # so the test can tell them apart
        assert not torch.equal(other(forward, backward), grow_diag_final_and(forward, backward))


def symmetrize_plainly(name: str, forward: set[Link], backward: set[Link]) -> set[Link]:
    """Koehn et al.'s pseudo-code for one pair, candidates in the order of source and target."""
    links = forward & backward

    def are_linked(link: Link) -> tuple[bool, bool]:
        return any(i == link[0] for i, _ in links), any(j == link[1] for _, j in links)

    def touches(link: Link) -> bool:
        return any(max(abs(i - link[0]), abs(j - link[1])) == 1 for i, j in links)

    before = None
    while before != links:
        before = set(links)
        for link in sorted((forward | backward) - before):
            if not all(are_linked(link)) and touches(link):
                links.add(link)
    for candidates in (forward, backward):
        for link in sorted(candidates):
            if name == "grow-diag-final" and not all(are_linked(link)):
                links.add(link)
            if name == "grow-diag-final-and" and not any(are_linked(link)):
                links.add(link)
    return links


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("density", [0.08, 0.2, 0.5])
def test_same_links_as_one_pair_at_a_time(name: str, density: float) -> None:
    forward, backward = draw_batch(150, (7, 9), density, seed=4)
    found = SYMMETRIZATIONS[name](forward, backward)
    for pair in range(len(forward)):
        expected = symmetrize_plainly(name, list_links(forward[pair]), list_links(backward[pair]))
        assert list_links(found[pair]) == expected


SHAPES = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(st.integers(1, 4), SHAPES, st.floats(0, 1), st.integers(0, 1000))
def test_methods_are_nested(n: int, shape: tuple[int, int], density: float, seed: int) -> None:
    forward, backward = draw_batch(n, shape, density, seed)
    matrices = [f(forward, backward) for f in (intersection, grow_diag, grow_diag_final_and, union)]
    for smaller, larger in pairwise(matrices):
        assert (smaller <= larger).all()


@given(st.integers(1, 4), SHAPES, st.floats(0, 1), st.integers(0, 1000))
def test_every_linkable_word_is_linked(
    n: int, shape: tuple[int, int], density: float, seed: int
) -> None:
    forward, backward = draw_batch(n, shape, density, seed)
    everything = union(forward, backward)
    final = grow_diag_final(forward, backward)  # any word with a link of the union has one
    for dim in (1, 2):
        assert torch.equal(final.any(dim=dim), everything.any(dim=dim))
    final_and = grow_diag_final_and(forward, backward)  # any link of the union has a linked word
    linked = final_and.any(dim=2)[:, :, None] | final_and.any(dim=1)[:, None, :]
    assert linked[everything].all()


@pytest.mark.parametrize("name", SYMMETRIZATIONS)
@given(shape=SHAPES, density=st.floats(0, 1), seed=st.integers(0, 1000))
def test_other_pairs_and_padding_change_nothing(
    name: str, shape: tuple[int, int], density: float, seed: int
) -> None:
    symmetrize = SYMMETRIZATIONS[name]
    forward, backward = draw_batch(3, shape, density, seed)
    copies = forward.clone(), backward.clone()
    together = symmetrize(forward, backward)
    assert torch.equal(forward, copies[0]) and torch.equal(backward, copies[1])
    assert torch.equal(symmetrize(forward.flip(0), backward.flip(0)), together.flip(0))
    padded = [torch.nn.functional.pad(matrix, (0, 2, 0, 3)) for matrix in (forward, backward)]
    expected = torch.nn.functional.pad(together, (0, 2, 0, 3))
    assert torch.equal(symmetrize(*padded), expected)
    alone = [symmetrize(forward[[pair]], backward[[pair]]) for pair in range(3)]
    assert torch.equal(torch.cat(alone), together)


@given(SHAPES, st.floats(0, 1), st.integers(0, 1000))
def test_equal_directions_stay_equal(shape: tuple[int, int], density: float, seed: int) -> None:
    forward, _ = draw_batch(2, shape, density, seed)
    for symmetrize in SYMMETRIZATIONS.values():
        assert torch.equal(symmetrize(forward, forward), forward)


def test_names() -> None:
    forward, backward = draw_batch(50, (6, 6), 0.2, seed=2)
    assert torch.equal(SYMMETRIZATIONS["forward"](forward, backward), forward)
    assert torch.equal(SYMMETRIZATIONS["backward"](forward, backward), backward)
    results = [function(forward, backward) for function in SYMMETRIZATIONS.values()]
    assert len({result.numpy().tobytes() for result in results}) == len(SYMMETRIZATIONS) == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", SYMMETRIZATIONS)
def test_same_links_on_the_gpu(name: str) -> None:
    forward, backward = draw_batch(2000, (20, 25), 0.06, seed=6)
    found = SYMMETRIZATIONS[name](forward.cuda(), backward.cuda())
    assert torch.equal(found.cpu(), SYMMETRIZATIONS[name](forward, backward))


# Filters.

Table = list[set[tuple[int, int]]]

tables = st.lists(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8), max_size=6)


def links_of(table: Table) -> Links:
    rows = sorted((pair, i, j) for pair, links in enumerate(table) for i, j in links)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    scores = np.linspace(0, 1, len(rows), dtype=np.float32)
    return Links(columns[0], columns[1], columns[2], scores, len(table))


def table_of(links: Links) -> Table:
    return [set(found) for found in links.to_lists()]


def number(sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Number words of one letter by their code point."""
    words = [ord(word) for sentence in sentences for word in sentence.split()]
    lengths = [len(sentence.split()) for sentence in sentences]
    return np.array(words, dtype=np.int64), np.cumsum([0, *lengths])


def keep_one_to_one(links: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Count the links of every word."""
    src, tgt = Counter(i for i, _ in links), Counter(j for _, j in links)
    return {(i, j) for i, j in links if src[i] == tgt[j] == 1}


def test_identical_words_by_hand() -> None:
    src, tgt = number(["a b c", "x", "d e"]), number(["b a", "x y", "E d e"])
    links = links_of([{(0, 0), (0, 1), (1, 0), (2, 1)}, {(0, 0), (0, 1)}, {(0, 1), (1, 0), (1, 2)}])
    # Pair 0: a-b a-a b-b c-a; pair 1: x-x x-y; pair 2: d-d e-E e-e
    expected = [False, True, True, False, True, False, True, False, True]
    assert mark_identical(links, src, tgt).tolist() == expected


def test_one_to_one_by_hand() -> None:
    links = links_of([{(0, 0), (1, 1), (1, 2)}, {(0, 2), (1, 2), (2, 0), (3, 3)}, set(), {(1, 1)}])
    assert table_of(select_links(links, mark_one_to_one(links))) == [
        {(0, 0)},
        {(2, 0), (3, 3)},
        set(),
        {(1, 1)},
    ]


def test_a_chain_of_links_is_dropped() -> None:
    links = links_of([{(0, 0), (1, 0), (1, 1), (2, 1), (3, 2)}])
    assert table_of(select_links(links, mark_one_to_one(links))) == [{(3, 2)}]


def test_pairs_by_hand() -> None:
    links = links_of([set(), {(0, 1), (2, 0)}, set(), {(4, 4)}, set()])
    linked = mark_linked_pairs(links)
    assert linked.tolist() == [False, True, False, True, False]
    left = keep_pairs(links, linked)
    assert table_of(left) == [{(0, 1), (2, 0)}, {(4, 4)}]
    assert left.scores.tolist() == links.scores.tolist()
    assert table_of(keep_pairs(links, ~linked)) == [set(), set(), set()]


def test_the_order_of_the_filters_matters() -> None:
    """Tom links with Tom and, wrongly, with schob: without the first, schob is one-to-one."""
    src, tgt = number(["T p"]), number(["T s"])
    links = links_of([{(0, 0), (0, 1)}])
    identical = mark_identical(links, src, tgt)
    first = select_links(links, ~identical)
    assert table_of(select_links(first, mark_one_to_one(first))) == [{(0, 1)}]
    single = mark_one_to_one(links)
    assert table_of(select_links(links, single & ~identical)) == [set()]


@given(tables)
def test_one_to_one_by_counting(table: Table) -> None:
    links = links_of(table)
    found = select_links(links, mark_one_to_one(links))
    assert table_of(found) == list(map(keep_one_to_one, table))


@given(tables)
def test_one_to_one_uses_no_word_twice_and_is_idempotent(table: Table) -> None:
    links = links_of(table)
    found = select_links(links, mark_one_to_one(links))
    for side in (found.src, found.tgt):
        words = list(zip(found.pairs.tolist(), side.tolist(), strict=True))
        assert len(set(words)) == len(words)
    assert mark_one_to_one(found).all()
    assert all(left <= before for left, before in zip(table_of(found), table, strict=True))


@given(tables, st.lists(st.text("ab", min_size=6, max_size=6), min_size=12, max_size=12))
def test_identical_words_by_comparing(table: Table, sentences: list[str]) -> None:
    words = [" ".join(sentence) for sentence in sentences]
    src, tgt = words[: len(table)], words[6 : 6 + len(table)]
    links = links_of(table)
    identical = mark_identical(links, number(src), number(tgt))
    expected = [
        {(i, j) for i, j in found if a.split()[i] == b.split()[j]}
        for found, a, b in zip(table, src, tgt, strict=True)
    ]
    assert table_of(select_links(links, identical)) == expected


@given(tables)
def test_keeping_pairs_does_not_change_them(table: Table) -> None:
    links = links_of(table)
    left = keep_pairs(links, mark_linked_pairs(links))
    assert table_of(left) == [found for found in table if found]
    assert mark_linked_pairs(left).all()


def test_long_sentences_do_not_collide() -> None:
    """Word 1 of pair 0 must not be taken for a word of pair 1, however long sentences are."""
    links = links_of([{(1, 70_000)}, {(0, 1), (70_000, 0)}])
    assert mark_one_to_one(links).all()


@pytest.mark.parametrize("n_pairs", [0, 2])
def test_no_links_at_all(n_pairs: int) -> None:
    links = links_of([set()] * n_pairs)
    assert mark_one_to_one(links).tolist() == []
    assert mark_identical(links, number(["a"] * n_pairs), number(["a"] * n_pairs)).tolist() == []
    assert keep_pairs(links, mark_linked_pairs(links)).n_pairs == 0
