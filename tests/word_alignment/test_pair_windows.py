"""Windows of long pairs, batches of windows, and links brought back to pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from calque.models.encoder import Encoder
from calque.tokens.words import WordEncoder
from calque.word_alignment.pair_windows import (
    PairLayout,
    SubwordLimits,
    WindowLinks,
    build_pair_batch,
    gather_links,
    split_pairs,
)

Row = tuple[str, str, str]


@pytest.mark.parametrize("sizes", [(40, 80), (40, 40), (12, 12)])
def test_windows_cover_every_word_and_fit(
    tiny_encoder: Encoder, demo_rows: list[Row], sizes: tuple[int, int]
) -> None:
    limits = SubwordLimits(*sizes)
    text = [" ".join(row[k] for row in demo_rows[:n]).split() for k, n in ((1, 30), (2, 22))]
    pairs = [(text[0], text[1]), (text[0][:3], text[1]), (text[1], text[0][:2]), (["a"], ["b"])]
    windows = split_pairs(WordEncoder(tiny_encoder.tokenizer), pairs, limits)
    n_src, n_tgt = windows.src.n_pieces(), windows.tgt.n_pieces()
    assert (n_src <= limits.side).all() and (n_tgt <= limits.side).all()
    assert (n_src + n_tgt <= limits.both).all()
    for number, (src, tgt) in enumerate(pairs):
        rows = np.flatnonzero(windows.owners == number)
        side, words = (windows.src, src) if len(src) >= len(tgt) else (windows.tgt, tgt)
        start = side.pieces.first_words[number]
        owned = [np.arange(side.own_first[r], side.own_stop[r]) - start for r in rows]
        assert np.concatenate(owned).tolist() == list(range(len(words)))  # each exactly once
        for r in rows:
            assert side.first[r] <= side.own_first[r] and side.own_stop[r] <= side.stop[r]


@pytest.mark.parametrize("encode", ["joint", "separate"])
def test_positions_and_slots_of_a_batch(tiny_encoder: Encoder, encode: str) -> None:
    """Each position has a subword of the word of its slot."""
    words = WordEncoder(tiny_encoder.tokenizer)
    pairs = [(["das", "Haus"], ["the", "house", "here"]), (["ja"], ["yes"])]
    layout = PairLayout.of(tiny_encoder, encode, "reset")  # type: ignore[arg-type]
    windows = split_pairs(words, pairs, layout.limits)
    batch = build_pair_batch(windows, np.array([1, 0]), layout)
    assert batch.tokens.n_real == layout.count_tokens(windows).sum()
    for side, (places, slots, width) in enumerate(
        [
            (batch.src_positions, batch.src_slots, batch.src_width),
            (batch.tgt_positions, batch.tgt_slots, batch.tgt_width),
        ]
    ):
        for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
            word = [pairs[1], pairs[0]][slot // width][side][slot % width]
            assert int(batch.tokens.ids[place]) in words.encode([[word]]).ids


def test_links_come_from_the_responsible_window(tiny_encoder: Encoder) -> None:
    """With all word pairs of every window linked, a word of the longer side is linked once."""
    text = [f"word{k % 7}" for k in range(60)]
    limits = SubwordLimits(30, 30)
    windows = split_pairs(WordEncoder(tiny_encoder.tokenizer), [(text, text[:20])], limits)
    assert len(windows) > 2
    rows = np.arange(len(windows))
    shape = (len(rows), int(windows.src.n_words.max()), int(windows.tgt.n_words.max()))
    links = torch.zeros(shape, dtype=torch.bool)
    for row in rows.tolist():
        links[row, : windows.src.n_words[row], : windows.tgt.n_words[row]] = True
    found = gather_links(windows, [WindowLinks.of(rows, links, torch.ones(shape))], 1)
    listed = found.to_lists()[0]
    assert listed == sorted(set(listed))
    assert {i for i, _ in listed} == set(range(60))
    assert {j for _, j in listed} == set(range(20))
