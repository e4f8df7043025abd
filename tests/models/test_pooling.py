"""Pooling of words and sentences against loops."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.toy_tokenizers import encode_words as encode_pieces

from calque.models.encoder import Encoder
from calque.models.pooling import batch_words, encode_first_subwords, pool_sentences, pool_words

if TYPE_CHECKING:
    import pytest


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any),
    st.integers(0, 2**31),
)
def test_sentences_match_a_loop(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    states = torch.randn(sum(lengths), 3, generator=generator)
    keep = torch.rand(sum(lengths), generator=generator) < 0.5
    pooled = pool_sentences(states, offsets, keep)
    for row, start, stop in zip(pooled, offsets[:-1], offsets[1:], strict=True):
        mine, kept = states[start:stop], keep[start:stop]
        expected = mine[kept] if kept.any() else mine
        want = expected.mean(0) if len(expected) else torch.zeros(3)
        torch.testing.assert_close(row, want)


def test_half_precision_is_summed_in_single() -> None:
    states = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
    pooled = pool_sentences(states, torch.tensor([0, 4096]), torch.ones(4096, dtype=torch.bool))
    assert pooled.dtype == torch.float32
    assert pooled.item() == 1.0  # a bfloat16 sum of ones stops at 256


def test_gradients() -> None:
    states = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    offsets, keep = torch.tensor([0, 2, 5]), torch.tensor([True, False, False, False, False])
    assert torch.autograd.gradcheck(lambda x: pool_sentences(x, offsets, keep), states)
    words = torch.tensor([-1, 1, 1, 0, -1])
    for how in ("mean", "first"):
        assert torch.autograd.gradcheck(lambda x, how=how: pool_words(x, words, 3, how), states)


@pytest.mark.parametrize("how", ["mean", "first"])
def test_words_match_a_loop(how: str) -> None:
    states = torch.randn(9, 4)
    words = torch.tensor([-1, 2, 2, 0, 0, 0, 4, -1, 2])
    pooled = pool_words(states, words, 5, how)  # type: ignore[arg-type]
    for word in range(5):
        mine = states[words == word]
        want = torch.zeros(4) if len(mine) == 0 else mine.mean(0) if how == "mean" else mine[0]
        torch.testing.assert_close(pooled[word], want)


SENTENCES = [
    ["Guten", "Morgen", "!"],
    ["Unbelievably", "heavy", "rain", "in", "Wolkenkratzerhausen"],
    [],
    ["Où", "est", "la", "gare", "?"],
    ["Hi"],
]


def read_plainly(encoder: Encoder, words: list[str], layer: int) -> torch.Tensor:
    """Return Hugging Face's states of a sentence at the first subwords of its words."""
    pieces = encode_pieces(encoder.tokenizer, [words])[0]
    marks = encoder.tokenizer.cls_token_id, encoder.tokenizer.sep_token_id
    ids = torch.tensor([[marks[0], *pieces.ids.tolist(), marks[1]]])
    body = encoder.model.base_model
    body.set_attn_implementation("eager")
    with torch.no_grad():
        states = body(ids, output_hidden_states=True).hidden_states[layer][0]
    return states[torch.from_numpy(pieces.first_pieces()) + 1]


def test_states_are_those_of_first_subwords(tiny_encoder: Encoder) -> None:
    layers = [0, 3, 4]
    found = encode_first_subwords(tiny_encoder, batch_words(tiny_encoder, SENTENCES), layers)
    plain = Encoder(deepcopy(tiny_encoder.model), tiny_encoder.tokenizer).eval()
    for layer, states in zip(layers, found, strict=True):
        expected = torch.cat([read_plainly(plain, words, layer) for words in SENTENCES if words])
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


def test_long_sentences_are_read_in_windows(tiny_encoder: Encoder) -> None:
    words = SENTENCES[1] * 20  # many more subwords than the 128 of the model
    pieces = encode_pieces(tiny_encoder.tokenizer, [words])[0]
    room = tiny_encoder.max_tokens - 2
    assert len(pieces.ids) > 3 * room
    layout = batch_words(tiny_encoder, [SENTENCES[0], words])
    assert layout.n_windows > 4
    assert max(batch.tokens.longest for batch in layout.batches) <= tiny_encoder.max_tokens
    (states,) = encode_first_subwords(tiny_encoder, layout, [4])
    # The words of the first window, as a sentence of their own.
    n_first = int(pieces.words[room])
    first = encode_first_subwords(tiny_encoder, batch_words(tiny_encoder, [words[:n_first]]), [4])[
        0
    ]
    torch.testing.assert_close(states[3 : 3 + n_first], first, rtol=1e-4, atol=1e-5)
    assert len(states) == 3 + len(words)
    assert states.abs().sum(dim=1).min() > 0


def test_a_word_longer_than_the_model(tiny_encoder: Encoder) -> None:
    layout = batch_words(tiny_encoder, [["a", "xq" * 300, "b"]])
    assert layout.n_windows == 3
    (states,) = encode_first_subwords(tiny_encoder, layout, [2])
    assert states.shape == (3, 64)


def test_words_without_subwords_are_zero(tiny_encoder: Encoder) -> None:
    words = ["a", "\u200b", "b"]  # the normalizer deletes the zero-width space
    pieces = encode_pieces(tiny_encoder.tokenizer, [words])[0]
    assert pieces.first_pieces()[1] == -1
    layout = batch_words(tiny_encoder, [words])
    np.testing.assert_array_equal(layout.has_pieces, [True, False, True])
    (states,) = encode_first_subwords(tiny_encoder, layout, [4])
    assert states[1].abs().sum() == 0
    assert states[[0, 2]].abs().sum(dim=1).min() > 0


def test_the_order_of_batches_does_not_matter(
    tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = encode_first_subwords(tiny_encoder, batch_words(tiny_encoder, SENTENCES), [4])[0]
    monkeypatch.setattr("calque.models.pooling.BATCH_TOKENS", {"cpu": 1})
    layout = batch_words(tiny_encoder, SENTENCES)
    assert len(layout.batches) == 4
    one_by_one = encode_first_subwords(tiny_encoder, layout, [4])[0]
    torch.testing.assert_close(one_by_one, at_once, rtol=1e-4, atol=1e-5)
