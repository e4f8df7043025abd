"""Skip-gram vectors with negative sampling (Mikolov et al., 2013), for benchmarks/static_study.py.

Windows, subsampling and the distribution of negatives are those of word2vec. Unlike there, pairs
are learned in batches with Adam, and the pairs of a batch share their negatives, each of which has
the weight n_negatives / n_shared: the expected loss is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from calque.vectors.static import WordVectors
from calque.vectors.x2static import keep_probabilities


@dataclass(frozen=True)
class SkipgramSettings:
    """The defaults are those of word2vec, except for the optimizer."""

    width: int = 300
    window: int = 5
    n_negatives: int = 10
    subsample: float = 1e-3
    n_epochs: int = 10
    min_count: int = 5
    learning_rate: float = 2e-2
    batch_pairs: int = 8192
    n_shared: int = 128
    chunk_words: int = 1_000_000
    seed: int = 1


def learn_skipgram(
    sentences: Sequence[Sequence[str]], settings: SkipgramSettings, device: str = "cpu"
) -> WordVectors:
    """Return the vectors of all words that occur often enough, the most frequent first."""
    found = Counter(chain.from_iterable(sentences)).most_common()
    words = [word for word, n in found if n >= settings.min_count]
    counts = np.array([n for _, n in found[: len(words)]])
    number_of = {word: number for number, word in enumerate(words)}
    known = [[number_of[word] for word in each if word in number_of] for each in sentences]
    ids = np.array(list(chain.from_iterable(known)), dtype=np.int64)
    owners = np.repeat(np.arange(len(known)), [len(each) for each in known])
    generator = np.random.default_rng(settings.seed)
    torch_generator = torch.Generator().manual_seed(settings.seed)
    tables = [torch.nn.Embedding(len(words), settings.width, sparse=True) for _ in range(2)]
    with torch.no_grad():
        edge = 0.5 / settings.width
        tables[0].weight.uniform_(-edge, edge, generator=torch_generator)
        tables[1].weight.zero_()
    inner, outer = (table.to(device) for table in tables)
    optimizer = torch.optim.SparseAdam([*inner.parameters(), *outer.parameters()])
    cumulative = np.cumsum(counts**0.75)
    keep = keep_probabilities(counts, settings.subsample)
    n_words = settings.n_epochs * len(ids)
    n_done = 0
    for _ in range(settings.n_epochs):
        for start in range(0, len(ids), settings.chunk_words):
            chunk = slice(start, start + settings.chunk_words)
            is_kept = generator.random(len(ids[chunk])) < keep[ids[chunk]]
            pairs = find_pairs(ids[chunk][is_kept], owners[chunk][is_kept], settings, generator)
            rate = settings.learning_rate * max(1e-2, 1 - n_done / n_words)
            for group in optimizer.param_groups:
                group["lr"] = rate
            for batch in cut_batches(pairs, settings, generator):
                draws = generator.random(settings.n_shared) * cumulative[-1]
                negatives = torch.from_numpy(np.searchsorted(cumulative, draws)).to(device)
                centers, contexts = (torch.from_numpy(side).to(device) for side in batch.T)
                optimizer.zero_grad()
                weight = settings.n_negatives / settings.n_shared
                skipgram_loss(inner(centers), outer(contexts), outer(negatives), weight).backward()
                optimizer.step()
            n_done += len(ids[chunk])
    return WordVectors(words, inner.weight.detach().cpu().numpy())


def skipgram_loss(
    centers: torch.Tensor, contexts: torch.Tensor, negatives: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return the mean over pairs of −log σ(c · o) − weight · Σ log σ(−c · n)."""
    positive = F.softplus(-(centers * contexts).sum(dim=1))
    negative = F.softplus(centers @ negatives.T).sum(dim=1)
    return (positive + weight * negative).mean()


def find_pairs(
    ids: np.ndarray[Any, Any],
    owners: np.ndarray[Any, Any],
    settings: SkipgramSettings,
    generator: np.random.Generator,
) -> np.ndarray[Any, Any]:
    """Return center and context of all pairs within a sentence and a window of random size."""
    reach = generator.integers(1, settings.window, len(ids), endpoint=True)
    parts = []
    for distance in range(1, settings.window + 1):
        same = owners[distance:] == owners[:-distance]
        left, right = ids[:-distance], ids[distance:]
        for center, context, far in (
            (left, right, reach[:-distance]),
            (right, left, reach[distance:]),
        ):
            is_pair = same & (far >= distance)
            parts.append(np.stack([center[is_pair], context[is_pair]], axis=1))
    return np.concatenate(parts)


def cut_batches(
    pairs: np.ndarray[Any, Any], settings: SkipgramSettings, generator: np.random.Generator
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield all pairs in random order."""
    order = generator.permutation(len(pairs))
    for start in range(0, len(pairs), settings.batch_pairs):
        yield pairs[order[start : start + settings.batch_pairs]]
