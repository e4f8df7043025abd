"""Choose layer, method and sharpness of the neural aligner by gold links, and store the choice.

The same gold links calibrate the scores of the choice, so that they are probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from calque.algorithms.calibration import Calibration, fit_calibration
from calque.errors import InputError
from calque.io.files import write_atomically
from calque.io.links import GoldLinks
from calque.io.structured import read_json
from calque.word_alignment.neural import METHODS, AlignSettings
from calque.word_alignment.scoring import LinkCounts, count_links, judge_links

if TYPE_CHECKING:
    from calque.types import Links, Progress
    from calque.word_alignment.neural import Method
    from calque.word_alignment.protocol import AlignedBlock, WordPair

# Tried for optimal transport. The links of other methods do not depend on the sharpness, or hardly.
SHARPNESS = {"cosine": (5.0, 10.0, 20.0, 40.0), "dot": (1.0, 2.0, 5.0, 10.0)}
# Probabilities that are tried as the threshold of links.
THRESHOLDS = [percent / 100 for percent in range(1, 100)]
BLOCK_PAIRS = 256
# Always stored, so that config.json tells how the model is used; others if not the default.
STORED = ("method", "layer", "encode", "positions", "sharpness")


class SweepAligner(Protocol):
    """An aligner that links pairs with each of several settings in one pass."""

    def align_each(
        self, pairs: Sequence[WordPair], settings: Sequence[AlignSettings]
    ) -> list[AlignedBlock]:
        """Return one block per setting."""
        ...


@dataclass(frozen=True, slots=True)
class Sweep:
    """Settings with their counts on `n_pairs` development pairs; the best are calibrated.

    `test` has the counts of the best settings on the other pairs, `n_test_pairs` of them.
    """

    counts: dict[AlignSettings, LinkCounts]
    n_pairs: int
    test: LinkCounts | None = None
    n_test_pairs: int = 0

    @property
    def best(self) -> AlignSettings:
        """The settings with the lowest AER; of equal ones, the first at the lowest layer."""
        return min(self.counts, key=lambda choice: (self.counts[choice].aer, choice.layer))


def list_choices(
    base: AlignSettings,
    layers: Sequence[int],
    method: Method | None = None,
    sharpness: float | None = None,
) -> list[AlignSettings]:
    """List the settings to try; a given method or sharpness is the only one tried."""
    sharp = SHARPNESS[base.similarity] if sharpness is None else (sharpness,)
    return [
        replace(base, layer=layer, method=name, sharpness=value, calibration=None)
        for layer in layers
        for name in (METHODS if method is None else (method,))
        for value in (sharp if name == "ot" else (base.sharpness,))
    ]


def sweep_settings(
    aligner: SweepAligner,
    choices: Sequence[AlignSettings],
    pairs: Sequence[WordPair],
    gold: GoldLinks,
    *,
    dev_every: int | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Score settings on gold links, and calibrate the scores of the best.

    With `dev_every`, every so many pairs, from the first, are for development: the best settings
    there are then scored on the others.
    """
    step = dev_every or 1
    dev = range(0, len(pairs), step)
    dev_pairs, dev_gold = [pairs[n] for n in dev], gold.take(dev)
    others = [choice for choice in choices if choice.method != "probability"]
    by_probability = [choice for choice in choices if choice.method == "probability"]
    found = _count(aligner, others, dev_pairs, dev_gold, progress)
    counts = dict(zip(others, found, strict=True))
    counts |= calibrate(aligner, by_probability, dev_pairs, dev_gold, progress)
    best = Sweep(counts, len(dev)).best
    if best.calibration is None:
        (own,) = calibrate(aligner, [best], dev_pairs, dev_gold, progress)
        calibrated = replace(best, calibration=own.calibration)
        counts = {calibrated if key == best else key: value for key, value in counts.items()}
    sweep = Sweep(counts, len(dev))
    if step == 1:
        return sweep
    rest = [n for n in range(len(pairs)) if n % step]
    if not dev or not rest:
        problem = f"of {len(pairs)} pairs, {len(dev)} are for development and none for the test"
        raise InputError(problem, fix="pass more pairs, or leave out --dev-every")
    (test,) = _count(aligner, [sweep.best], [pairs[n] for n in rest], gold.take(rest), progress)
    return replace(sweep, test=test, n_test_pairs=len(rest))


def calibrate(
    aligner: SweepAligner,
    choices: Sequence[AlignSettings],
    pairs: Sequence[WordPair],
    gold: GoldLinks,
    progress: Progress | None = None,
) -> dict[AlignSettings, LinkCounts]:
    """Return settings whose scores are calibrated, for the method "probability", and their counts.

    A calibration is fitted to all word pairs of the sentence pairs, not only to those that would be
    linked. Its threshold is the one with the lowest AER. Gold links that are only possible are
    neither right nor wrong: they do not take part in the fit.
    """
    everything = [
        replace(choice, method="probability", calibration=None, threshold=0.0) for choice in choices
    ]
    judged = [JudgedScores() for _ in choices]
    for start in range(0, len(pairs) if choices else 0, BLOCK_PAIRS):
        block = pairs[start : start + BLOCK_PAIRS]
        known = gold.select(start, start + len(block))
        for scores, found in zip(judged, aligner.align_each(block, everything), strict=True):
            scores.add(found.links, known)
        if progress is not None:
            progress("calibrating", start + len(block), len(pairs))
    counts = {}
    for choice, scores in zip(choices, judged, strict=True):
        calibration, of_links = scores.calibrate()
        settings = replace(choice, method="probability", calibration=calibration)
        counts[settings] = of_links
    return counts


class JudgedScores:
    """The scores of all word pairs of a text, and which of these are gold links."""

    def __init__(self) -> None:
        self.scores = [np.zeros(0, dtype=np.float32)]
        self.is_sure, self.is_possible = [np.zeros(0, dtype=bool)], [np.zeros(0, dtype=bool)]
        self.n_sure = 0

    def add(self, links: Links, gold: GoldLinks) -> None:
        """Add all word pairs of some sentence pairs."""
        is_sure, is_possible = judge_links(links, gold)
        self.scores.append(links.scores)
        self.is_sure.append(is_sure)
        self.is_possible.append(is_possible)
        self.n_sure += len(gold.sure.pairs)

    def calibrate(self) -> tuple[Calibration, LinkCounts]:
        """Return the calibration with the best threshold, and the counts of its links."""
        scores, is_sure, is_possible = map(
            np.concatenate, (self.scores, self.is_sure, self.is_possible)
        )
        is_clear = is_sure | ~is_possible
        fitted = fit_calibration(scores[is_clear], is_sure[is_clear])
        calibration = Calibration(round(fitted.slope, 4), round(fitted.intercept, 4))
        probabilities = calibration.apply(torch.from_numpy(scores)).numpy()

        def count(threshold: float) -> LinkCounts:
            links = probabilities >= threshold
            found = (links, links & is_sure, links & is_possible)
            n_links, n_sure_found, n_possible_found = (int(group.sum()) for group in found)
            return LinkCounts(n_links, self.n_sure, n_sure_found, n_possible_found)

        counts = {threshold: count(threshold) for threshold in THRESHOLDS}
        best = min(counts, key=lambda threshold: counts[threshold].aer)
        return replace(calibration, threshold=best), counts[best]


def store_choice(folder: Path, settings: AlignSettings) -> None:
    """Store settings in the config.json of a model, where `AlignSettings.of` finds them."""
    path = folder / "config.json"
    config = read_json(path, dict, fix="pass the folder of a model")
    defaults = {field.name: field.default for field in fields(AlignSettings)}
    values = asdict(settings)
    kept = {k: v for k, v in values.items() if k in STORED or v != defaults[k]}
    config["calque"] = (config.get("calque") or {}) | {"alignment": kept}
    with write_atomically(path) as stream:
        stream.write(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _count(
    aligner: SweepAligner,
    choices: Sequence[AlignSettings],
    pairs: Sequence[WordPair],
    gold: GoldLinks,
    progress: Progress | None,
) -> list[LinkCounts]:
    """Return the counts of every choice."""
    counts = [LinkCounts() for _ in choices]
    for start in range(0, len(pairs) if choices else 0, BLOCK_PAIRS):
        block = pairs[start : start + BLOCK_PAIRS]
        known = gold.select(start, start + len(block))
        for k, found in enumerate(aligner.align_each(block, choices)):
            counts[k] += count_links(found.links, known.sure, known.possible)
        if progress is not None:
            progress("aligning", start + len(block), len(pairs))
    return counts
