"""Transfer along training: the probe of a recipe, taken on the weights as they are at a step.

Transfer along training, read off the metrics that runs have written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from calque.errors import InputError
from calque.io.conllu import read_tagged
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.models.tag_probe import TagProbe, TransferScores
from calque.training.run import gather_weights
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


class RunProbe:
    """Takes a recipe's probe; only one process of many does, the others go on."""

    def __init__(self, settings: ProbeSection, encoder: Encoder) -> None:
        layer = round(2 / 3 * encoder.n_layers) if settings.layer is None else settings.layer
        self.settings, self.layer = settings, encoder.check_layer(layer)
        tests = settings.find_tests()
        self.probe = TagProbe(
            encoder,
            read_tagged(settings.train, settings.train_sentences),
            {name: read_tagged(path, settings.test_sentences) for name, path in tests.items()},
            source=settings.source,
            metric=settings.metric,
        )

    def describe(self) -> str:
        """Say what is probed."""
        return f"{self.probe.describe()}; layer {self.layer}, {self.settings.metric}"

    def measure(self, encoder: Encoder) -> TransferScores:
        """Score the encoder at the probe's layer."""
        return self.probe.measure(encoder, [self.layer])[self.layer]


def open_probe(run: Run) -> RunProbe | None:
    """Read the probe's files, if the recipe has one and this is the process that takes it."""
    settings = run.recipe.probe
    if settings is None or not run.accelerator.is_main_process:
        return None
    return RunProbe(settings, run.encoder)


def probe_if_due(run: Run, probe: RunProbe | None, telemetry: Telemetry) -> None:
    """Take the probe where the recipe asks for it, outside the time of training."""
    settings = run.recipe.probe
    if settings and settings.is_due(run.step, run.step == run.recipe.schedule.steps):
        with telemetry.paused():
            _take_probe(run, probe, telemetry)


def make_figures(found: TransferScores) -> dict[str, float]:
    """Name the figures of a row: the source, the mean of the others, the gap, every language."""
    figures = {PROBE_SOURCE: found.own, PROBE_OTHERS: found.others, PROBE_GAP: found.gap}
    return figures | {PROBE_LANGUAGE + name: value for name, value in found.scores.items()}


def _take_probe(run: Run, probe: RunProbe | None, telemetry: Telemetry) -> None:
    """Measure and tell transfer after a step; training goes on as if nothing had happened.

    Nothing is drawn at random, and the encoder is left in the mode it was in. Where weights are
    spread over processes, all of them take part in gathering a copy.
    """
    encoder: Encoder = run.encoder
    if run.accelerator.is_fsdp2:
        state, _ = gather_weights(run)
        if probe is not None:
            encoder = _copy_whole(run.encoder, state).to(run.accelerator.device)
    if probe is None:
        return
    with run.accelerator.autocast():
        found = probe.measure(encoder)
    telemetry.log_probe(run.step, make_figures(found))


def _copy_whole(encoder: Encoder, state: Mapping[str, Tensor]) -> Encoder:
    """Make an encoder that is not sharded, with the weights gathered."""
    with torch.random.fork_rng(devices=()):  # a new model draws weights before it is given others
        model = build_model(encoder.model.config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())  # these are there once
    assert not unexpected and set(missing) <= tied, (missing, unexpected)
    return Encoder(model, encoder.tokenizer)


class TransferPoint(NamedTuple):
    """What a probe found after a step: the score of the source, the mean of the others."""

    step: int
    source: float
    others: float

    @property
    def gap(self) -> float:
        """Subtract the others from the source."""
        return self.source - self.others


def read_curve(run: Path) -> list[TransferPoint]:
    """Read what the probe of a run found, in the order of steps; to have none is an error."""
    if not run.is_dir():
        raise InputError("no such folder", file=run, fix="give the folder of a run")
    points = [
        TransferPoint(row["step"], row[PROBE_SOURCE], row[PROBE_OTHERS])
        for row in read_metrics(run / METRICS)
        if row["kind"] == PROBE and None not in (row.get(PROBE_SOURCE), row.get(PROBE_OTHERS))
    ]
    if not points:
        fix = "train with a `probe` in the recipe"
        raise InputError("holds no transfer", file=run / METRICS, fix=fix)
    return points
