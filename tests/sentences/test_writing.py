"""calque-mini reads capitals, titles and sentences in lower case."""

from __future__ import annotations

import numpy as np

import calque


def test_translations_are_found(demo_rows: list[tuple[str, str, str]]) -> None:
    """Among the 25 sentences of every language of the demo."""
    model = calque.load(device="cpu")
    languages = np.array([language for language, _, _ in demo_rows])
    vectors = model.embed([text for _, text, _ in demo_rows])
    for way, least in ((str.upper, 0.9), (str.title, 0.9), (str.lower, 0.95)):
        similarity = vectors @ model.embed([way(text) for _, _, text in demo_rows]).T
        similarity[languages[:, None] != languages] = -1
        found = similarity.argmax(axis=0) == np.arange(len(demo_rows))
        assert found.mean() >= least, way


def test_capitals_are_not_cut_into_letters() -> None:
    tokenizer = calque.load(device="cpu").tokenizer
    assert tokenizer.tokenize("SAVE THE CHANGES")[:2] == ["▁SAVE", "▁THE"]
    assert len(tokenizer.tokenize("DIE REGIERUNG HILFT NICHT")) <= 8
    assert tokenizer.tokenize("Save the changes") == ["▁Save", "▁the", "▁changes"]
