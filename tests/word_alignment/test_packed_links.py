"""Packed links: parsed as by a plain parser, and symmetrized as pair by pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calque.algorithms.symmetrize import SYMMETRIZATIONS
from calque.types import Links
from calque.word_alignment import packed_links
from calque.word_alignment.packed_links import PackedLinks, read_pharaoh, symmetrize_links

LinkLists = list[list[tuple[int, int]]]
LinkSet = set[tuple[int, int]]
cells = st.sets(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=12)


def pack(links: LinkLists) -> Links:
    ends = np.array([link for pair in links for link in pair])
    counts = np.array([len(pair) for pair in links], dtype=np.int64)
    return PackedLinks.of([(ends, counts)]).select(0, len(links))


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    "links",
    [
        [],
        [[]],
        [[], [(0, 0)], []],
        [[(0, 12), (3, 1), (1023, 1000)], [], [], [(5, 5)], [(0, 1), (0, 2), (1, 0)]],
    ],
)
def test_reads_what_is_written(
    links: LinkLists, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_links, "CHUNK_BYTES", chunk)
    lines = (" ".join(f"{i}-{j}" for i, j in pair[::-1]) + "\n" for pair in links)
    (tmp_path / "links").write_text("".join(lines))
    packed = read_pharaoh(tmp_path / "links")
    assert len(packed) == len(links)
    assert packed.select(0, len(links)).to_lists() == [sorted(pair) for pair in links]
    if links:
        assert packed.select(1, len(links)).to_lists() == [sorted(pair) for pair in links[1:]]


@pytest.mark.parametrize("method", SYMMETRIZATIONS)
@settings(max_examples=25)
@given(both=st.lists(st.tuples(cells, cells), max_size=8), budget=st.integers(1, 500))
def test_symmetrized_as_pair_by_pair(
    method: str, both: list[tuple[LinkSet, LinkSet]], budget: int
) -> None:
    forward, backward = ([sorted(pair[side]) for pair in both] for side in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_links, "BATCH_CELLS", budget)
        found = symmetrize_links(pack(forward), pack(backward), method)
    assert found.n_pairs == len(both)
    expected = []
    for one, other in both:
        matrices = torch.zeros(2, 1, 7, 10, dtype=torch.bool)
        for matrix, links in zip(matrices, (one, other), strict=True):
            for i, j in links:
                matrix[0, i, j] = True
        joined = SYMMETRIZATIONS[method](matrices[0], matrices[1])[0]
        expected.append([(i, j) for i, j in joined.nonzero().tolist()])
    assert found.to_lists() == expected
    scores = [
        ((link in one) + (link in other)) / 2
        for (one, other), links in zip(both, expected, strict=True)
        for link in links
    ]
    assert found.scores.tolist() == scores
    assert found.scores.dtype == np.float32
