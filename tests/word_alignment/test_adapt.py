"""A short training before aligning, on the text to be aligned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.inference import has_fast_bf16
from calque.training.recipe_io import load_recipe
from calque.word_alignment import adapt
from calque.word_alignment.adapt import adapt_encoder
from calque.word_alignment.hybrid import HybridAligner
from calque.word_alignment.neural import Encoding, WordAligner
from calque.word_alignment.protocol import WordPair
from calque.word_alignment.statistical import StatisticalAligner

Row = tuple[str, str, str]


@pytest.fixture
def pairs(demo_rows: list[Row]) -> list[WordPair]:
    return [(row[2].split(), row[1].split()) for row in demo_rows[:100]]


@pytest.mark.slow
def test_adapts_a_copy(tiny_folder: Path, pairs: list[WordPair], tmp_path: Path) -> None:
    encoder = Encoder.load(tiny_folder)
    before = {name: value.clone() for name, value in encoder.named_parameters()}
    found = adapt_encoder(WordAligner(encoder), pairs, tmp_path, steps=4, learning_rate=1e-3)
    adapted = Encoder.load(found)
    changed = [
        name
        for name, value in adapted.named_parameters()
        if not torch.equal(value, before[name].to(value.dtype))
    ]
    assert len(changed) > 10
    assert all(torch.equal(value, before[name]) for name, value in encoder.named_parameters())
    assert WordAligner(adapted).align(pairs[:3])


@pytest.mark.slow
@pytest.mark.parametrize("encode", ["joint", "separate"])
def test_linked_words_become_more_similar(
    encode: Encoding, tiny_folder: Path, pairs: list[WordPair], tmp_path: Path
) -> None:
    pytest.importorskip("systran_align")
    statistical = StatisticalAligner.train(pairs, "fast-align")
    words = WordAligner(Encoder.load(tiny_folder), method="argmax", encode=encode, layer=2)
    hybrid = HybridAligner(words, statistical, is_training_text=True)
    taught = [set(links) for links in hybrid.align(pairs)]
    folder = adapt_encoder(hybrid, pairs, tmp_path, steps=25, learning_rate=3e-3)
    settings: Any = load_recipe(str(tmp_path / "run" / "recipe.yaml")).objectives[0]
    assert (settings.joint, settings.separate) == (encode == "joint", encode == "separate")
    assert settings.layer == 2

    def count_found(encoder: Encoder) -> int:
        aligner = WordAligner(encoder, method="argmax", encode=encode, layer=2)
        found = [set(links) for links in aligner.align(pairs)]
        return sum(len(a & b) for a, b in zip(found, taught, strict=True))

    assert count_found(Encoder.load(folder)) > 1.5 * count_found(words.encoder)


def test_the_text_is_linked_in_blocks_until_there_is_enough(
    tiny_encoder: Encoder,
    pairs: list[WordPair],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapt, "BLOCK_PAIRS", 7)
    pytest.importorskip("systran_align")
    statistical = StatisticalAligner.train(pairs, "fast-align")
    words = WordAligner(tiny_encoder, method="argmax")
    hybrid = HybridAligner(words, statistical, is_training_text=True)
    n_words = sum(len(src) + len(tgt) for src, tgt in pairs[:20])
    adapt._link_text(hybrid, iter(pairs), tmp_path, n_words, None)
    lines = (tmp_path / adapt.TEXT).read_text(encoding="utf-8").splitlines()
    assert lines == ["\t".join(map(" ".join, pair)) for pair in pairs[:21]]
    expected = [" ".join(f"{i}-{j}" for i, j in links) for links in hybrid.align(pairs)[:21]]
    assert (tmp_path / adapt.LINKS).read_text().splitlines() == expected


def test_bf16_is_used_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("avx512_bf16", "amx_bf16"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: {name: True})
        assert has_fast_bf16()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_bf16": False})
    assert not has_fast_bf16()
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # older versions of PyTorch
    assert not has_fast_bf16()


def test_an_empty_text_adapts_nothing(tiny_encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no sentence pairs to adapt the encoder to"):
        adapt_encoder(WordAligner(tiny_encoder), [], tmp_path / "new", steps=2)
