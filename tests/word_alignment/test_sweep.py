"""The sweep over layers, methods and sharpness: its choice, its test pairs, and what is stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import calque
from calque.algorithms.calibration import Calibration, fit_calibration
from calque.errors import InputError
from calque.io.links import build_links, read_gold
from calque.models.encoder import Encoder
from calque.tokens.words import WordEncoder
from calque.types import Links
from calque.word_alignment.neural import AlignSettings, WordAligner, compare_words
from calque.word_alignment.pair_windows import PairLayout, build_pair_batch, split_pairs
from calque.word_alignment.scoring import LinkCounts, count_links
from calque.word_alignment.sweep import Sweep, list_choices, store_choice, sweep_settings

CALIBRATION = Calibration(slope=0.7, intercept=-0.5, threshold=0.3)
GOLD = Path(__file__).parents[1] / "data" / "gold"
Pair = tuple[list[str], list[str]]


@pytest.fixture
def pairs() -> list[Pair]:
    lines = (GOLD / "en-fr.text").read_text().splitlines()
    return [(src.split(), tgt.split()) for src, tgt in (line.split(" ||| ") for line in lines)]


def test_choices() -> None:
    choices = list_choices(AlignSettings(), [3, 4])
    by_hand = [(m, 20.0) for m in ("itermax", "argmax", "match", "probability")]
    by_hand += [("ot", s) for s in (5.0, 10.0, 20.0, 40.0)]
    assert {(c.layer, c.method, c.sharpness) for c in choices} == {
        (layer, *rest) for layer in (3, 4) for rest in by_hand
    }
    assert len(choices) == 16
    assert not any(c.calibration for c in list_choices(AlignSettings(calibration=CALIBRATION), [3]))
    assert [c.sharpness for c in list_choices(AlignSettings(), [3], "ot", 7.0)] == [7.0]
    assert list_choices(AlignSettings(similarity="dot"), [3], "ot")[0].sharpness == 1.0


def test_the_best_of_equal_choices_has_the_lowest_layer() -> None:
    def counts(n_right: int) -> LinkCounts:
        return LinkCounts(4, 4, n_right, n_right)

    choices = [AlignSettings(layer=layer) for layer in (3, 2, 1)]
    assert Sweep(dict(zip(choices, map(counts, (3, 3, 2)), strict=True)), 1).best.layer == 2


def test_choices_are_scored_as_single_aligners(tiny_encoder: Encoder, pairs: list[Pair]) -> None:
    gold = read_gold(GOLD / "en-fr.gold")
    aligner = WordAligner(tiny_encoder)
    choices = list_choices(aligner.settings, [0, 2])
    sweep = sweep_settings(aligner, choices, pairs, gold, dev_every=2)
    assert len(set(sweep.counts.values())) > 4
    for choice, counts in sweep.counts.items():
        single = WordAligner(
            tiny_encoder,
            method=choice.method,
            layer=choice.layer,
            sharpness=choice.sharpness,
            calibration=choice.calibration,
        )
        found = single.align_block(pairs[::2]).links
        assert counts == count_links(found, *read_some(range(0, len(pairs), 2)))
        if choice == sweep.best:
            rest = single.align_block(pairs[1::2]).links
            assert sweep.test == count_links(rest, *read_some(range(1, len(pairs), 2)))
    assert (sweep.n_pairs, sweep.n_test_pairs) == ((len(pairs) + 1) // 2, len(pairs) // 2)
    assert sweep_settings(aligner, choices[:1], pairs, gold).test is None


@pytest.mark.parametrize("method", ["argmax", "probability"])
def test_the_best_settings_are_calibrated(
    tiny_encoder: Encoder, pairs: list[Pair], method: Any
) -> None:
    """The calibration fits all word pairs but possible links, scored without the sweep."""
    aligner, layer = WordAligner(tiny_encoder, spelling=0.0), 2
    choices = list_choices(aligner.settings, [layer], method)
    sweep = sweep_settings(aligner, choices, pairs, read_gold(GOLD / "en-fr.gold"), dev_every=2)
    best = sweep.best
    assert best.calibration is not None and best.method == method
    sure, possible = (set(map(tuple, rows_of(links))) for links in read_some(range(0, 20, 2)))
    clear, is_sure = [], []
    for number, pair in enumerate(pairs[::2]):
        scores = score_all(tiny_encoder, pair, layer)
        for (i, j), score in np.ndenumerate(scores):
            if (number, i, j) in sure or (number, i, j) not in possible:
                clear.append(score)
                is_sure.append((number, i, j) in sure)
    expected = fit_calibration(np.array(clear, dtype=np.float32), np.array(is_sure))
    assert best.calibration.slope == pytest.approx(expected.slope, rel=1e-3)
    assert best.calibration.intercept == pytest.approx(expected.intercept, rel=1e-3)
    # No other threshold has a lower AER.
    aer = []
    for threshold in (best.calibration.threshold, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5):
        found = WordAligner(
            tiny_encoder,
            layer=layer,
            method="probability",
            calibration=best.calibration,
            threshold=threshold,
            spelling=0.0,
        ).align_block(pairs[::2])
        aer.append(count_links(found.links, *read_some(range(0, len(pairs), 2))).aer)
    assert aer[0] == min(aer) < max(aer)


def rows_of(links: Links) -> list[tuple[int, int, int]]:
    return list(zip(links.pairs.tolist(), links.src.tolist(), links.tgt.tolist(), strict=True))


def score_all(encoder: Encoder, pair: Pair, layer: int) -> np.ndarray:
    """Return the scores of all word pairs, by hand from the cosines."""
    settings = AlignSettings(layer=layer)
    layout = PairLayout.of(encoder, settings.encode, settings.positions)
    windows = split_pairs(WordEncoder(encoder.tokenizer), [pair], layout.limits)
    batch = build_pair_batch(windows, np.array([0]), layout)
    with torch.no_grad():
        (states,) = encoder(batch.tokens, [layer])
    cosines, _ = compare_words(states, batch)
    logits = 20 * cosines[0].double()
    return (logits.softmax(0) * logits.softmax(1)).sqrt().numpy()


def read_some(numbers: range) -> tuple[Links, Links]:
    """Return the sure and the possible links of some lines, without the code of the sweep."""
    sure, possible = [], []
    lines = (GOLD / "en-fr.gold").read_text().splitlines()
    for place, number in enumerate(numbers):
        for link in lines[number].split():
            is_sure = "-" in link
            i, j = map(int, link.split("-" if is_sure else "p"))
            possible.append((place, i, j))
            if is_sure:
                sure.append((place, i, j))
    return build_links(sorted(sure), len(numbers)), build_links(sorted(possible), len(numbers))


def test_too_few_pairs_for_a_test(tiny_encoder: Encoder, pairs: list[Pair]) -> None:
    aligner, gold = WordAligner(tiny_encoder), read_gold(GOLD / "en-fr.gold").take([0])
    with pytest.raises(InputError, match="1 are for development and none for the test"):
        sweep_settings(aligner, [aligner.settings], pairs[:1], gold, dev_every=5)


def test_the_choice_is_stored_with_the_model(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder, "model")
    before = json.loads(Path("model/config.json").read_text())
    text = GOLD / "en-fr.text"
    result = calque.align_file(
        text,
        gold=GOLD / "en-fr.gold",
        model="model",
        sweep=True,
        method="ot",
        similarity="dot",
        unit="subwords",
        encode="joint",
        dev_every=2,
        store=True,
        device="cpu",
    )
    assert result.sweep is not None
    stored = AlignSettings.of(Encoder.load(Path("model")))
    assert stored == result.sweep.best and stored.calibration is not None
    assert (stored.similarity, stored.unit, stored.encode) == ("dot", "subwords", "joint")
    after = json.loads(Path("model/config.json").read_text())
    assert {k: v for k, v in after.items() if k != "calque"} == {
        k: v for k, v in before.items() if k != "calque"
    }
    assert "n_iterations" not in after["calque"]["alignment"]
    # Links by default are now those of the choice.
    plain = calque.align_file(text, model="model", device="cpu")
    assert plain.aligner == f"neural ot layer {stored.layer}"


def test_other_settings_of_the_model_are_kept(tmp_path: Path) -> None:
    content = {"a": 1, "calque": {"languages": ["de"], "alignment": {"method": "match"}}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    store_choice(tmp_path, AlignSettings(layer=3, calibration=CALIBRATION))
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "a": 1,
        "calque": {
            "languages": ["de"],
            "alignment": {
                "method": "itermax",
                "layer": 3,
                "encode": "separate",
                "positions": "continue",
                "sharpness": 20.0,
                "calibration": {"slope": 0.7, "intercept": -0.5, "threshold": 0.3},
            },
        },
    }
