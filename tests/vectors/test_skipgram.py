"""Skip-gram vectors of the study of static vectors: pairs, loss, words with the same contexts."""

from __future__ import annotations

import math
import sys
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def skipgram(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import skipgram

    yield skipgram
    del sys.modules["skipgram"]


def test_pairs_are_those_of_windows_within_sentences(skipgram: Any) -> None:
    sentences = [[1, 2, 3, 4], [5], [6, 7]]
    ids = np.array([word for sentence in sentences for word in sentence])
    owners = np.repeat(np.arange(3), [len(sentence) for sentence in sentences])
    settings = skipgram.SkipgramSettings(window=3)
    found = skipgram.find_pairs(ids, owners, settings, np.random.default_rng(0))
    reach = np.random.default_rng(0).integers(1, 3, len(ids), endpoint=True)
    expected = [
        (int(ids[i]), int(ids[j]))
        for i, j in permutations(range(len(ids)), 2)
        if owners[i] == owners[j] and abs(i - j) <= reach[i]
    ]
    assert len(set(reach.tolist())) > 1
    assert sorted(map(tuple, found.tolist())) == sorted(expected)


def test_loss(skipgram: Any) -> None:
    rows = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (4, 5, 2)]
    centers, contexts, negatives = rows[0], rows[1][:4], rows[2]
    total = 0.0
    for center, context in zip(centers.tolist(), contexts.tolist(), strict=True):
        dot = sum(a * b for a, b in zip(center, context, strict=True))
        total -= math.log(1 / (1 + math.exp(-dot)))
        for negative in negatives.tolist():
            dot = sum(a * b for a, b in zip(center, negative, strict=True))
            total -= 0.5 * math.log(1 / (1 + math.exp(dot)))
    loss = skipgram.skipgram_loss(centers, contexts, negatives, 0.5)
    assert loss.item() == pytest.approx(total / 4, rel=1e-5)


def test_words_with_the_same_contexts_are_neighbors(skipgram: Any) -> None:
    random = Random(0)
    topics = {"cat": "fur purr paw tail", "dog": "fur purr paw tail", "car": "road fuel gear wheel"}
    sentences = []
    for _ in range(400):
        word, context = random.choice(list(topics.items()))
        sentences.append([word, *random.sample(context.split(), 3)])
    sentences.append(["once"])
    settings = skipgram.SkipgramSettings(width=12, n_epochs=25, subsample=1.0, batch_pairs=256)
    vectors = skipgram.learn_skipgram(sentences, settings)
    assert "once" not in vectors.words and len(vectors) == 11
    cat, dog, car = (vectors.matrix[vectors.index[word]] for word in topics)

    def cosine(a: Any, b: Any) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    assert cosine(cat, dog) > 0.9 > cosine(cat, car) + 0.3
