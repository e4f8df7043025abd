"""Symmetrization: hand-worked cases, systran-align's links, a plain reference, properties."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

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
    union,
)

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


def test_growth_counts_at_once() -> None:
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
def test_more_and_more_links(n: int, shape: tuple[int, int], density: float, seed: int) -> None:
    forward, backward = draw_batch(n, shape, density, seed)
    matrices = [f(forward, backward) for f in (intersection, grow_diag, grow_diag_final_and, union)]
    for smaller, larger in pairwise(matrices):
        assert (smaller <= larger).all()


@given(st.integers(1, 4), SHAPES, st.floats(0, 1), st.integers(0, 1000))
def test_no_word_is_forgotten(n: int, shape: tuple[int, int], density: float, seed: int) -> None:
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
def test_pairs_and_padding_change_nothing(
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
def test_agreement_is_left_alone(shape: tuple[int, int], density: float, seed: int) -> None:
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
