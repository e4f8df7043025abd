"""Comparing runs: rows of metrics, tensors of checkpoints, and a run that is interrupted."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from calque.training.loop import Interrupted, Trainer, train
from calque.training.recipe import Recipe
from calque.training.telemetry import read_metrics

TIMES = {"seconds", "tokens_per_second"}


def read_rows(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the metrics of a run without the time it took."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if kind in (None, row["kind"])]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def read_weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights, optimizer moments and averages of a checkpoint or a model."""
    return {
        f"{file.relative_to(folder)}: {name}": value
        for file in sorted(folder.rglob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same_tensors(left: Path, right: Path) -> None:
    one, other = read_tensors(left), read_tensors(right)
    assert one.keys() == other.keys() != set()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_run(left: Path, right: Path, step: int) -> None:
    """Compare metrics, the last checkpoint and the finished model, bit for bit."""
    assert read_rows(left) == read_rows(right)
    for name in (f"step-{step:08d}", "model"):
        assert_same_tensors(left / name, right / name)


def assert_close_runs(left: Path, right: Path, *, rel: float = 1e-5) -> None:
    """Compare all metrics to a relative tolerance, and counts of tokens exactly."""
    rows, others = read_rows(left), read_rows(right)
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert (row.pop("kind"), row.get("tokens")) == (other.pop("kind"), other.get("tokens"))
        assert row == pytest.approx(other, rel=rel)


def do_at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    """Call a function while a step is taken."""
    take_step = Trainer.take_step

    def watched(self: Trainer, loaders: Any) -> Any:
        if self.run.step + 1 == step:
            act()
        return take_step(self, loaders)

    monkeypatch.setattr(Trainer, "take_step", watched)


def interrupt_at(
    monkeypatch: pytest.MonkeyPatch, step: int, recipe: Recipe, text: Path, run: Path
) -> None:
    """Train until a signal arrives in a step."""
    with monkeypatch.context() as patch:
        do_at_step(patch, step, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted, match=f"stopped and saved at step {step}; .*--resume"):
            train(recipe, output=run, prepared=text)
