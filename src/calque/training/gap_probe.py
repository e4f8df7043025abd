"""The transfer gap during training: measured by the recipe's probe, read from finished runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from calque.errors import InputError
from calque.io.conllu import read_tagged
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.models.tag_probe import TagProbe, TransferScores
from calque.training.telemetry import (
    METRICS,
    PROBE,
    PROBE_GAP,
    PROBE_LANGUAGE,
    PROBE_OTHERS,
    PROBE_SOURCE,
    read_metrics,
)

if TYPE_CHECKING:
    from torch import Tensor

    from calque.training.recipe import ProbeSection
    from calque.training.run import Run
    from calque.training.telemetry import Telemetry


class TransferPoint(NamedTuple):
    """Scores of a probe after a step, in percent: the source, and the mean of the others."""

    step: int
    source: float
    others: float

    @property
    def gap(self) -> float:
        """The source's score minus the mean of the others."""
        return self.source - self.others


def transfer_gap(runs: Iterable[str | Path]) -> dict[str, list[TransferPoint]]:
    """Return how far other languages are behind the source language, step by step.

    Args:
        runs: Folders of runs whose recipes have a `probe`.

    Examples:
        >>> calque.transfer_gap(["runs/metaxlm"])["runs/metaxlm"][-1].gap    # doctest: +SKIP
        18.3
    """
    return {str(run): _read_curve(Path(run)) for run in dict.fromkeys(runs)}


class GapProbe:
    """The probe of a recipe: a tagger trained on frozen states of one language."""

    def __init__(self, settings: ProbeSection, encoder: Encoder) -> None:
        self.settings, self.layer = settings, encoder.choose_layer("words", settings.layer)
        tests = settings.find_tests()
        self.probe = TagProbe(
            encoder,
            read_tagged(settings.train, settings.train_sentences),
            {name: read_tagged(path, settings.test_sentences) for name, path in tests.items()},
            source=settings.source,
            metric=settings.metric,
        )

    def describe(self) -> str:
        """Return a line about what is measured."""
        return f"{self.probe.describe()}; layer {self.layer}, {self.settings.metric}"

    def measure(self, encoder: Encoder) -> TransferScores:
        """Return the scores of the encoder at the probe's layer."""
        return self.probe.measure(encoder, [self.layer])[self.layer]


def open_probe(run: Run) -> GapProbe | None:
    """Read the probe's files on the main process; None on others and without a probe."""
    settings = run.recipe.probe
    if settings is None or not run.accelerator.is_main_process:
        return None
    return GapProbe(settings, run.encoder)


def measure_gap(run: Run, probe: GapProbe | None, telemetry: Telemetry) -> None:
    """Measure transfer after a step and record it; training is not affected.

    Nothing is drawn at random, and the encoder stays in its mode. Where weights are sharded, all
    processes take part in gathering a copy.
    """
    encoder: Encoder = run.encoder
    if run.accelerator.is_fsdp2:
        state, _ = run.gather_weights()
        if probe is not None:
            encoder = _copy_unsharded(run.encoder, state).to(run.accelerator.device)
    if probe is None:
        return
    with run.accelerator.autocast():
        found = probe.measure(encoder)
    metrics = {PROBE_SOURCE: found.own, PROBE_OTHERS: found.others, PROBE_GAP: found.gap}
    metrics |= {PROBE_LANGUAGE + name: value for name, value in found.scores.items()}
    telemetry.log_probe(run.step, metrics)


def _copy_unsharded(encoder: Encoder, state: Mapping[str, Tensor]) -> Encoder:
    """Return an encoder that is not sharded, with gathered weights."""
    with torch.random.fork_rng(devices=()):  # a new model draws weights, which are then replaced
        model = build_model(encoder.model.config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())  # these are gathered once
    assert not unexpected and set(missing) <= tied, (missing, unexpected)
    return Encoder(model, encoder.tokenizer)


def _read_curve(run: Path) -> list[TransferPoint]:
    if not run.is_dir():
        raise InputError("there is no such folder", file=run, fix="pass the folder of a run")
    points = [
        TransferPoint(row["step"], 100 * row[PROBE_SOURCE], 100 * row[PROBE_OTHERS])
        for row in read_metrics(run / METRICS)
        if row["kind"] == PROBE and None not in (row.get(PROBE_SOURCE), row.get(PROBE_OTHERS))
    ]
    if not points:
        raise InputError(
            "the run has no transfer scores",
            file=run / METRICS,
            fix="train with a `probe` in the recipe",
        )
    return points
