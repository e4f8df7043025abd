"""A short training before aligning, on the text to be aligned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from calque.models.encoder import Encoder
from calque.word_alignment.adapt import adapt_encoder
from calque.word_alignment.neural import WordAligner

Row = tuple[str, str, str]


@pytest.mark.slow
def test_adapts_a_copy(tiny_folder: Path, demo_rows: list[Row], tmp_path: Path) -> None:
    encoder = Encoder.load(tiny_folder)
    pairs = [(row[2].split(), row[1].split()) for row in demo_rows[:100]]
    before = {name: value.clone() for name, value in encoder.named_parameters()}
    found = adapt_encoder(encoder, pairs, tmp_path, steps=4, learning_rate=1e-3)
    adapted = Encoder.load(found)
    changed = [
        name
        for name, value in adapted.named_parameters()
        if not torch.equal(value, before[name].to(value.dtype))
    ]
    assert len(changed) > 10
    assert all(torch.equal(value, before[name]) for name, value in encoder.named_parameters())
    assert WordAligner(adapted).align(pairs[:3])
    assert len((tmp_path / "bitext.tsv").read_text().splitlines()) == 100
