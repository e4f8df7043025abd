"""The hybrid aligner: its evidence by hand, and each of its parts alone."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from calque.models.encoder import Encoder
from calque.tokens.words import WordEncoder
from calque.types import Links
from calque.word_alignment.counts import LinkLexicon
from calque.word_alignment.hybrid import (
    CALIBRATIONS,
    HybridAligner,
    HybridWeights,
    StatisticalEvidence,
    build_hybrid_words,
)
from calque.word_alignment.neural import WordAligner
from calque.word_alignment.numbered_text import WordNumbering
from calque.word_alignment.pair_windows import SubwordLimits, split_pairs
from calque.word_alignment.statistical import StatisticalAligner

systran_align = pytest.importorskip("systran_align")
Row = tuple[str, str, str]
Pair = tuple[list[str], list[str]]
PAIRS: list[Pair] = [(["das", "Haus"], ["the", "house"]), (["Haus", "x"], ["house"])]


def links_of(*links: tuple[int, int, int]) -> Links:
    table = np.array(links, dtype=np.int64).reshape(-1, 3)
    scores = np.ones(len(table), dtype=np.float32)
    return Links(table[:, 0], table[:, 1], table[:, 2], scores, len(PAIRS))


@pytest.fixture
def lexicon() -> LinkLexicon:
    # das–the 3 times, Haus–house 4 times, Haus–the once.
    src, tgt = WordNumbering(["das", "haus"]), WordNumbering(["the", "house"])
    counts = np.array([3, 1, 4], dtype=np.float32)
    return LinkLexicon(src, tgt, np.array([0, 2, 3], dtype=np.int64), counts)


def score(
    lexicon: LinkLexicon, encoder: Encoder, leave_out: bool, weights: HybridWeights
) -> np.ndarray:
    links = [links_of((0, 0, 0), (0, 1, 1), (1, 0, 0)), links_of((0, 1, 1))]
    evidence = StatisticalEvidence(PAIRS, lexicon, links, leave_out=leave_out, weights=weights)
    windows = split_pairs(WordEncoder(encoder.tokenizer), PAIRS, SubwordLimits(50, 100))
    return evidence.score(windows, np.array([0, 1])).numpy()


def test_lexicon_scores_by_hand(lexicon: LinkLexicon, tiny_encoder: Encoder) -> None:
    weights = HybridWeights(links=0.0, count=0.5, total=1.0)
    found = score(lexicon, tiny_encoder, False, weights)
    # p(house | Haus) ∝ 4.5 / 6, p(Haus | house) ∝ 4.5 / 5: the mean of their logarithms.
    assert found[0, 1, 1] == pytest.approx((np.log(4.5 / 6) + np.log(4.5 / 5)) / 2)
    assert found[0, 0, 1] == pytest.approx((np.log(0.5 / 4) + np.log(0.5 / 5)) / 2)
    # An unknown word was never linked, so it has totals of 0.
    assert found[1, 1, 0] == pytest.approx((np.log(0.5 / 1) + np.log(0.5 / 5)) / 2)


def test_links_of_the_pair_itself_are_left_out(lexicon: LinkLexicon, tiny_encoder: Encoder) -> None:
    weights = HybridWeights(links=0.0, count=0.5, total=1.0)
    found = score(lexicon, tiny_encoder, True, weights)
    # Both directions link Haus–house here: one less of 4 (and of 5, and of 4).
    assert found[0, 1, 1] == pytest.approx((np.log(3.5 / 5) + np.log(3.5 / 4)) / 2)
    # One direction of two links das–the: half less of 3 (and of 3, and of 4).
    assert found[0, 0, 0] == pytest.approx((np.log(3.0 / 3.5) + np.log(3.0 / 4.5)) / 2)


def test_links_add_by_direction(lexicon: LinkLexicon, tiny_encoder: Encoder) -> None:
    bare = score(lexicon, tiny_encoder, False, HybridWeights(links=0.0))
    linked = score(lexicon, tiny_encoder, False, HybridWeights(links=4.0))
    expected = np.zeros((2, 2, 2), dtype=np.float32)
    expected[0, 0, 0], expected[0, 1, 1], expected[1, 0, 0] = 2, 4, 2
    np.testing.assert_allclose(linked - bare, expected, atol=1e-6)


@pytest.fixture(scope="module")
def bitext(demo_rows: list[Row]) -> list[Pair]:
    return [(row[2].split(), row[1].split()) for row in demo_rows if row[0] == "de"] * 4


@pytest.fixture(scope="module")
def statistical(bitext: list[Pair]) -> StatisticalAligner:
    return StatisticalAligner.train(bitext, "fast-align")


def test_links_with_a_large_weight_decide(
    tiny_encoder: Encoder, statistical: StatisticalAligner, bitext: list[Pair]
) -> None:
    hybrid = HybridAligner(
        build_hybrid_words(tiny_encoder, "fast-align", method="match"),
        statistical,
        is_training_text=True,
        weights=HybridWeights(links=1e4, lexicon=0.0),
    )
    found = hybrid.align_block(bitext[10:20], 10).links.to_lists()
    linked = statistical.training_block(10, 20).links.to_lists()
    for some, theirs in zip(found, linked, strict=True):
        mine = {(i, j) for i, j in theirs if [a for a, _ in theirs].count(i) == 1}
        mine = {(i, j) for i, j in mine if [b for _, b in theirs].count(j) == 1}
        assert mine <= set(some)  # the one-to-one links


def test_without_evidence_the_links_are_those_of_the_encoder(
    tiny_encoder: Encoder, statistical: StatisticalAligner, bitext: list[Pair]
) -> None:
    weights = HybridWeights(lexicon=0.0, links=0.0)
    words = build_hybrid_words(tiny_encoder, "fast-align", method="argmax")
    hybrid = HybridAligner(words, statistical, weights=weights)
    alone = WordAligner(tiny_encoder, method="argmax").align(bitext[:20])
    assert hybrid.align(bitext[:20]) == alone


def test_only_calibrated_models_are_linked_by_probability(tiny_encoder: Encoder) -> None:
    other = deepcopy(tiny_encoder)  # the fixture is shared
    assert build_hybrid_words(other, "eflomal").method == "argmax"
    calibration = {"slope": 0.7, "intercept": -0.5, "threshold": 0.3}
    other.config.calque = {"alignment": {"method": "argmax", "calibration": calibration}}
    words = build_hybrid_words(other, "eflomal")
    assert (words.method, words.settings.calibration) == ("probability", CALIBRATIONS["eflomal"])
    assert build_hybrid_words(other, "eflomal", method="match").method == "match"


@pytest.mark.parametrize("kind", CALIBRATIONS)
def test_scores_are_calibrated_for_the_statistical_aligner(
    tiny_encoder: Encoder, statistical: StatisticalAligner, bitext: list[Pair], kind: Any
) -> None:
    statistical = replace(statistical, kind=kind)
    words = build_hybrid_words(tiny_encoder, kind, method="probability", threshold=0.2)
    found = HybridAligner(words, statistical, is_training_text=True).align_block(bitext[:20]).links
    words.settings = replace(words.settings, calibration=None, threshold=0.0)
    raw = HybridAligner(words, statistical, is_training_text=True).align_block(bitext[:20]).links
    calibration = CALIBRATIONS[kind]
    log_odds = np.log(raw.scores / (1 - raw.scores).clip(min=1e-6))
    expected = 1 / (1 + np.exp(-(calibration.slope * log_odds + calibration.intercept)))
    np.testing.assert_allclose(found.scores, expected[expected >= 0.2], rtol=1e-3)
    assert 20 < len(found.scores) < len(raw.scores)


def test_blocks_of_the_training_text_do_not_matter(
    tiny_encoder: Encoder, statistical: StatisticalAligner, bitext: list[Pair]
) -> None:
    hybrid = HybridAligner(
        build_hybrid_words(tiny_encoder, "fast-align"), statistical, is_training_text=True
    )
    whole = hybrid.align_block(bitext[:40]).links.to_lists()
    assert hybrid.align_block(bitext[25:40], 25).links.to_lists() == whole[25:40]


def test_long_pairs_keep_their_evidence_in_windows(
    tiny_encoder: Encoder, statistical: StatisticalAligner, bitext: list[Pair]
) -> None:
    long = ([w for s, _ in bitext[:20] for w in s], [w for _, t in bitext[:20] for w in t])
    hybrid = HybridAligner(tiny_encoder, statistical)
    block = hybrid.align_block([bitext[0], long])
    assert block.report.n_long == 1
    assert len(block.links.to_lists()[1]) > 20
    assert torch.isfinite(torch.from_numpy(block.links.scores)).all()
