"""Occurrences of words compared with the states of Hugging Face."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.vectors.reference import compute_states

from calque.models.encoder import Encoder
from calque.vectors.corpus import (
    WordCorpus,
)
from calque.vectors.occurrences import embed_occurrences, find_occurrences, plan_block


@pytest.mark.parametrize("layer", [0, 2, 4])
@pytest.mark.parametrize("view", ["word", "others", "all"])
@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_views_of_an_occurrence(
    tiny_encoder: Encoder,
    corpus: WordCorpus,
    sentences: list[list[str]],
    layer: int,
    view: str,
    batch_tokens: int,
) -> None:
    index = np.array([4, 0, 9, 7])
    found = find_occurrences(corpus, index, lambda rows, n_others: (rows >= 0) & (n_others > 0))
    block = plan_block(tiny_encoder, corpus, found, view, batch_tokens)
    vectors = embed_occurrences(tiny_encoder, block, layer, view)
    expected, rows = [], []
    for number in index:
        states, spans = compute_states(tiny_encoder, sentences[number], layer)
        for word, span in zip(sentences[number], spans, strict=True):
            if word not in corpus.words:
                continue
            rows.append(corpus.words.index(word))
            others = [k for k in range(1, len(states) - 1) if k not in span]
            chosen = {"word": span, "others": others, "all": range(len(states))}[view]
            expected.append(states[list(chosen)].mean(0))
    assert found.rows.tolist() == rows
    torch.testing.assert_close(vectors, torch.stack(expected), atol=1e-5, rtol=1e-4)


def test_tokens_of_a_block(
    tiny_encoder: Encoder, corpus: WordCorpus, sentences: list[list[str]]
) -> None:
    """Sentences have the ids and positions of Hugging Face; those without targets are left out."""
    wanted = 2
    found = find_occurrences(corpus, np.arange(20), lambda rows, n_others: rows == wanted)
    block = plan_block(tiny_encoder, corpus, found, "word", batch_tokens=30)
    batches, laid_out = block.batches(), []
    for batch in batches:
        offsets = batch.tokens.offsets.tolist()
        assert batch.tokens.longest == max(np.diff(offsets))
        assert batch.tokens.n_real == offsets[-1]
        for first, end in itertools.pairwise(offsets):
            assert batch.tokens.positions[first:end].tolist() == list(range(end - first))
            laid_out.append(batch.tokens.ids[first:end].tolist())
    word = corpus.words[wanted]
    texts = [" ".join(words) for words in sentences[:20] if word in words]
    expected = [tiny_encoder.tokenizer(text)["input_ids"] for text in texts]
    assert len(texts) > len(batches) > 1
    assert sorted(laid_out) == sorted(expected)
    assert block.rows.tolist() == [wanted] * sum(text.split().count(word) for text in texts)


def test_a_block_without_occurrences(tiny_encoder: Encoder, corpus: WordCorpus) -> None:
    found = find_occurrences(corpus, np.arange(9), lambda rows, n_others: rows > len(corpus.words))
    block = plan_block(tiny_encoder, corpus, found, "others")
    assert block.batches() == []
    assert embed_occurrences(tiny_encoder, block, 2, "others").shape == (
        0,
        tiny_encoder.hidden_size,
    )
