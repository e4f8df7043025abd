"""A small corpus of English sentences."""

from __future__ import annotations

import pytest

from calque.models.encoder import Encoder
from calque.vectors.corpus import VocabularyLimits, WordCorpus, number_corpus

Row = tuple[str, str, str]


@pytest.fixture(scope="session")
def sentences(demo_rows: list[Row]) -> list[list[str]]:
    """English sentences of the demo, in words."""
    texts = list(dict.fromkeys(row[1] for row in demo_rows))[:60]
    return [text.lower().replace(".", " .").split() for text in texts]


@pytest.fixture(scope="session")
def corpus(
    tiny_encoder: Encoder, sentences: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> WordCorpus:
    folder = tmp_path_factory.mktemp("corpus")
    return number_corpus(
        tiny_encoder.tokenizer,
        sentences,
        folder,
        max_subwords=126,
        limits=VocabularyLimits(min_count=3),
    )
