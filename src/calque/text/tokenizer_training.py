"""Choosing the text a tokenizer is trained on, so that small languages have a say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from calque.text.cleaning import CleaningReport, CleaningRules
from calque.text.preparation import HoldOut, TextSource, read_clean
from calque.text.sampling import language_probabilities
from calque.text.tokenization import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def train_on_sources(
    sources: Sequence[TextSource],
    rules: CleaningRules,
    hold_out: HoldOut,
    *,
    vocab_size: int,
    n_characters: int,
    alpha: float,
    character_coverage: float,
    seed: int,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on a sample of the sources' text, languages rebalanced by α.

    Two passes: the first counts characters by language, the second draws sentences.
    """
    counts: Counter[str] = Counter()
    for language, sentence in _sentences(sources, rules, hold_out):
        counts[language] += len(sentence)
    shares = language_probabilities(counts, alpha)
    rates = {name: min(1.0, n_characters * shares[name] / counts[name]) for name in shares}
    generator = np.random.default_rng(seed)
    sample = {
        sentence
        for language, sentence in _sentences(sources, rules, hold_out)
        if generator.random() < rates[language]
    }
    return train_tokenizer(sorted(sample), vocab_size, character_coverage=character_coverage)


def _sentences(
    sources: Sequence[TextSource], rules: CleaningRules, hold_out: HoldOut
) -> Iterator[tuple[str, str]]:
    """Stream every side of every source of text with its language."""
    for source in sources:
        if source.vectors:
            continue
        for example in hold_out.filter(read_clean(source, rules, CleaningReport())):
            yield from zip(source.languages, example, strict=True)
