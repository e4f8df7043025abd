"""A grid on one GPU: two runs in parallel give the results of one after the other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from calque.cli import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TAGGED = Path(__file__).parents[1] / "data" / "tagged"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "ud"
    folder.mkdir(parents=True)
    for name in ("en_ewt-train.conllu", "en_ewt-dev.conllu", "fr_gsd-dev.conllu"):
        shutil.copy(TAGGED / name, folder / name.replace("-", "-ud-", 1))
    return folder.parent


def evaluate(data: Path, out: Path, jobs: str) -> dict[tuple[str, ...], float]:
    options = ["--tasks", "pos,pos_probe", "--data", str(data), "--seeds", "2", "--jobs", jobs]
    models = ["calque-mini", "random:calque-mini"]
    assert run(["evaluate", *models, *options, "--device", "cuda", "-o", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert all(row["memory_mb"] > 0 and row["device"] not in ("cpu", None) for row in rows)
    names = ("model", "task", "language", "seed")
    return {tuple(str(row[name]) for name in names): row["value"] for row in rows}


def test_two_seeds_at_a_time(data: Path, tmp_path: Path) -> None:
    alone = evaluate(data, tmp_path / "alone", "1")
    together = evaluate(data, tmp_path / "together", "2")
    assert alone.keys() == together.keys()
    assert len(alone) == 2 * (2 * 2 + 1 + 2)  # languages × (seeds of a tagger, of a probe)
    for key, value in alone.items():
        assert together[key] == pytest.approx(value, abs=1.5), key  # bfloat16, summed in any order
    seeds = [[v for (_, task, _, s), v in alone.items() if (task, s) == ("pos", n)] for n in "12"]
    assert seeds[0] != seeds[1]


def test_memory_decides_how_many(data: Path, tmp_path: Path) -> None:
    assert (
        evaluate(data, tmp_path / "auto", "auto").keys()
        == evaluate(data, tmp_path / "here", "0").keys()
    )
