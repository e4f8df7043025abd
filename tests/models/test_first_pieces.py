from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.encoder import Encoder
from calque.models.pooling import encode_words, lay_out_words
from calque.tokens.tokenizer import encode_words as encode_pieces

if TYPE_CHECKING:
    import pytest

SENTENCES = [
    ["Guten", "Morgen", "!"],
    ["Unbelievably", "heavy", "rain", "in", "Wolkenkratzerhausen"],
    [],
    ["Où", "est", "la", "gare", "?"],
    ["Hi"],
]


def read_plainly(encoder: Encoder, words: list[str], layer: int) -> torch.Tensor:
    """What Hugging Face's own forward makes of a sentence, at the words' first subwords."""
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
    found = encode_words(tiny_encoder, lay_out_words(tiny_encoder, SENTENCES), layers)
    plain = Encoder(deepcopy(tiny_encoder.model), tiny_encoder.tokenizer).eval()
    for layer, states in zip(layers, found, strict=True):
        expected = torch.cat([read_plainly(plain, words, layer) for words in SENTENCES if words])
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)


def test_long_sentences_are_read_in_windows(tiny_encoder: Encoder) -> None:
    words = SENTENCES[1] * 20  # many more subwords than the 128 of the model
    pieces = encode_pieces(tiny_encoder.tokenizer, [words])[0]
    room = tiny_encoder.max_tokens - 2
    assert len(pieces.ids) > 3 * room
    layout = lay_out_words(tiny_encoder, [SENTENCES[0], words])
    assert layout.n_windows > 4
    assert max(batch.tokens.longest for batch in layout.batches) <= tiny_encoder.max_tokens
    (states,) = encode_words(tiny_encoder, layout, [4])
    # The words of the first window, as a sentence of their own.
    n_first = int(pieces.words[room])
    first = encode_words(tiny_encoder, lay_out_words(tiny_encoder, [words[:n_first]]), [4])[0]
    torch.testing.assert_close(states[3 : 3 + n_first], first, rtol=1e-4, atol=1e-5)
    assert len(states) == 3 + len(words)
    assert states.abs().sum(dim=1).min() > 0


def test_a_word_longer_than_the_model(tiny_encoder: Encoder) -> None:
    layout = lay_out_words(tiny_encoder, [["a", "xq" * 300, "b"]])
    assert layout.n_windows == 3
    (states,) = encode_words(tiny_encoder, layout, [2])
    assert states.shape == (3, 64)


def test_words_without_subwords_are_zero(tiny_encoder: Encoder) -> None:
    words = ["a", "\u200b", "b"]  # the normalizer deletes the zero-width space
    pieces = encode_pieces(tiny_encoder.tokenizer, [words])[0]
    assert pieces.first_pieces()[1] == -1
    layout = lay_out_words(tiny_encoder, [words])
    np.testing.assert_array_equal(layout.has_pieces, [True, False, True])
    (states,) = encode_words(tiny_encoder, layout, [4])
    assert states[1].abs().sum() == 0
    assert states[[0, 2]].abs().sum(dim=1).min() > 0


def test_the_order_of_batches_does_not_matter(
    tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = encode_words(tiny_encoder, lay_out_words(tiny_encoder, SENTENCES), [4])[0]
    monkeypatch.setattr("calque.models.pooling.BATCH_TOKENS", {"cpu": 1})
    layout = lay_out_words(tiny_encoder, SENTENCES)
    assert len(layout.batches) == 4
    one_by_one = encode_words(tiny_encoder, layout, [4])[0]
    torch.testing.assert_close(one_by_one, at_once, rtol=1e-4, atol=1e-5)
