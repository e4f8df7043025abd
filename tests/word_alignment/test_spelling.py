"""The similarity of spelling, against scikit-learn's counts of character sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from anyascii import anyascii

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.tokens.words import WordEncoder
from calque.word_alignment.neural import AlignSettings, WordAligner
from calque.word_alignment.pair_windows import PairLayout, split_pairs
from calque.word_alignment.protocol import WordPair
from calque.word_alignment.spelling import Spelling, spell


def compare(encoder: Encoder, pairs: list[WordPair], rows: list[int]) -> np.ndarray:
    layout = PairLayout.of(encoder, "joint", "reset")
    windows = split_pairs(WordEncoder(encoder.tokenizer), pairs, layout.limits)
    return Spelling(pairs, torch.device("cpu")).compare(windows, np.array(rows)).numpy()


def test_vectors_are_those_of_counted_sequences(demo_rows: list[tuple[str, str, str]]) -> None:
    """Hashing adds noise of about 1 / √512 to the cosine of unlike words."""
    text = pytest.importorskip("sklearn.feature_extraction.text")
    words = sorted({word for row in demo_rows[::7] for side in row[1:] for word in side.split()})
    forms = [f"<{anyascii(word).lower()}>" for word in words]
    counter = text.CountVectorizer(analyzer="char", ngram_range=(3, 3), lowercase=False)
    counts = counter.fit_transform(forms).toarray().astype(float)
    counts /= np.linalg.norm(counts, axis=1, keepdims=True)
    expected, vectors = counts @ counts.T, spell(words).numpy()
    found = vectors @ vectors.T
    assert len(words) > 300
    np.testing.assert_allclose(np.diag(found), 1, rtol=1e-6)
    # A word with a sequence twice may lose it to another one of the opposite sign.
    errors = (found - expected)[~np.eye(len(words), dtype=bool)]
    assert abs(errors.mean()) < 0.002
    assert 0.02 < errors.std() < 0.06
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.8


def test_words_in_other_scripts_are_transliterated() -> None:
    vectors = spell(["Москва", "Moskva", "μόσχα", "Łódź", "LODZ", "", "\n", "東京"]).numpy()
    assert vectors[0] @ vectors[1] == pytest.approx(1)
    assert vectors[3] @ vectors[4] == pytest.approx(1)
    assert 0.2 < vectors[0] @ vectors[2] < 0.9  # <moskva> and <moscha>
    assert not vectors[5].any()
    assert np.linalg.norm(vectors[7]) == pytest.approx(1)
    assert spell([]).shape == (0, 512)


def test_similarities_by_hand(tiny_encoder: Encoder) -> None:
    pairs: list[WordPair] = [(["Anna", "—", "1984"], ["1984", "Анна"]), ([], ["x"]), (["?"], ["?"])]
    found = compare(tiny_encoder, pairs, [0, 1])  # the pair with an empty side has no window
    np.testing.assert_allclose(found[0], [[0, 1], [-1, -1], [1, 0]], atol=0.15)
    assert found[0, 0, 1] == found[0, 2, 0] == found[1, 0, 0] == pytest.approx(1)
    assert (found[1, 1:] <= 0).all()


def test_windows_of_long_pairs(tiny_encoder: Encoder) -> None:
    """Every window compares its own words."""
    words = [f"word{number}" for number in range(90)]
    pairs: list[WordPair] = [(["Anna"], ["Anna"]), (words, words[::-1])]
    layout = PairLayout.of(tiny_encoder, "joint", "reset")
    windows = split_pairs(WordEncoder(tiny_encoder.tokenizer), pairs, layout.limits)
    assert len(windows) > 3
    vectors = spell(words).numpy()
    found = compare(tiny_encoder, pairs, list(range(len(windows))))
    for row in range(1, len(windows)):
        src = slice(windows.src.first[row] - 1, windows.src.stop[row] - 1)
        tgt = slice(windows.tgt.first[row] - 1, windows.tgt.stop[row] - 1)
        expected = vectors[src] @ vectors[::-1][tgt].T
        part = found[row, : expected.shape[0], : expected.shape[1]]
        np.testing.assert_allclose(part, expected, atol=1e-6)


def test_names_are_linked_by_their_spelling(tiny_encoder: Encoder) -> None:
    """The encoder is random: alone, it links names and commas to anything."""
    names = ["Tolstoi", "Berlin", ",", "Kathmandu", "Beethoven", "Chopin"]
    other = ["Шопен", ",", "Бетховен", "Толстой", "काठमांडू", "Берлин"]
    gold = [(0, 3), (1, 5), (2, 1), (3, 4), (4, 2), (5, 0)]
    (alone,), (spelled,) = (
        WordAligner(tiny_encoder, method="argmax", layer=2, spelling=weight).align([(names, other)])
        for weight in (0.0, 1.0)
    )
    assert len(set(alone) & set(gold)) <= 3
    assert len(set(spelled) & set(gold)) >= 5


def test_weight_is_added_to_the_cosines(tiny_encoder: Encoder) -> None:
    """Scores are softmaxes of the sum."""
    pair: WordPair = (["a", "Berlin"], ["Berlin", "the"])
    scores = {}
    for weight in (0.0, 0.5):
        aligner = WordAligner(tiny_encoder, method="argmax", layer=1, spelling=weight)
        aligner.settings = AlignSettings("probability", 1, threshold=0.0, spelling=weight)
        links = aligner.align_block([pair]).links
        scores[weight] = np.log(links.scores.reshape(2, 2))
    spelled = compare(tiny_encoder, [pair], [0])[0]
    # Differences of log odds within the table do not depend on the normalization.
    shifts = 20 * 0.5 * spelled
    expected = [shifts[0, 0] + shifts[1, 1] - shifts[0, 1] - shifts[1, 0]]
    found = scores[0.5] - scores[0.0]
    assert found[0, 0] + found[1, 1] - found[0, 1] - found[1, 0] == pytest.approx(expected[0], 1e-3)


def test_settings(tiny_encoder: Encoder, tiny_folder: Path) -> None:
    assert WordAligner(tiny_encoder).settings.spelling == 0.25
    for options in ({"similarity": "dot"}, {"unit": "subwords"}):
        assert WordAligner(tiny_encoder, **options).settings.spelling == 0  # type: ignore[arg-type]
        with pytest.raises(InputError, match="cosines of words only"):
            WordAligner(tiny_encoder, spelling=0.1, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="from 0 to 1"):
        WordAligner(tiny_encoder, spelling=1.5)
