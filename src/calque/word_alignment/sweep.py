"""Choose layer, method and sharpness of the neural aligner by gold links, and store the choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from calque.errors import InputError
from calque.io.files import write_atomically
from calque.io.links import GoldLinks
from calque.io.structured import read_json
from calque.word_alignment.neural import METHODS, AlignSettings
from calque.word_alignment.scoring import LinkCounts, count_links

if TYPE_CHECKING:
    from calque.types import Progress
    from calque.word_alignment.neural import Method
    from calque.word_alignment.protocol import AlignedBlock, WordPair

# Only optimal transport depends on the sharpness.
SHARPNESS = {"cosine": (5.0, 10.0, 20.0, 40.0), "dot": (1.0, 2.0, 5.0, 10.0)}
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
    """Settings with their counts on `n_pairs` development pairs.

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
        replace(base, layer=layer, method=name, sharpness=value)
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
    """Score settings on gold links.

    With `dev_every`, every so many pairs, from the first, are for development: the best settings
    there are then scored on the others.
    """
    step = dev_every or 1
    dev = range(0, len(pairs), step)
    counts = _count(aligner, choices, [pairs[n] for n in dev], gold.take(dev), progress)
    sweep = Sweep(dict(zip(choices, counts, strict=True)), len(dev))
    if step == 1:
        return sweep
    rest = [n for n in range(len(pairs)) if n % step]
    if not dev or not rest:
        problem = f"of {len(pairs)} pairs, {len(dev)} are for development and none for the test"
        raise InputError(problem, fix="pass more pairs, or leave out --dev-every")
    (test,) = _count(aligner, [sweep.best], [pairs[n] for n in rest], gold.take(rest), progress)
    return replace(sweep, test=test, n_test_pairs=len(rest))


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
    for start in range(0, len(pairs), BLOCK_PAIRS):
        block = pairs[start : start + BLOCK_PAIRS]
        known = gold.select(start, start + len(block))
        for k, found in enumerate(aligner.align_each(block, choices)):
            counts[k] += count_links(found.links, known.sure, known.possible)
        if progress is not None:
            progress("aligning", start + len(block), len(pairs))
    return counts
