"""MetaXLM in small: what a cross-lingual model gains by growing out of a monolingual one.

    python benchmarks/metaxlm_pack.py DATA -o PACK --minilm WHEEL
    python benchmarks/metaxlm.py PACK -o OUT [--jobs 6] [--minutes 9] [--only own-xlm,minilm-kd]
    python benchmarks/metaxlm.py --report-only -o OUT

Every method is trained for the same steps on the same text from its own start, with several seeds,
out of two monolingual models: `own`, an English one that is trained here first, and `minilm`, the
encoder in PACK. A run leaves OUT/cells/START-METHOD-SEED.json, and one whose file is there is not
made again; OUT/study.json is all of them, from which OUT/cells is filled again on another machine.
Worker processes take the runs that share a compiled step one after the other, the first seeds
first; when the minutes are over, what is still running is given up, and the same command goes on.
OUT/study.md and the pictures are made of the results, also elsewhere and later (--report-only).

Loss is that of masked language modelling on text kept aside. POS and NER are linear probes of
frozen states, learnt from English (accuracy, F1 of spans); Tatoeba is the accuracy in both
directions, averaged, of mean-pooled states; AER that of mutual argmax of sentences read apart.
Along training, POS is measured with fewer sentences, at the layer two thirds up.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from metaxlm_report import (
    AER,
    BASE,
    LOSS,
    MINILM,
    MONO,
    NER,
    OWN,
    POS,
    TATOEBA,
    unpack_results,
    write_report,
)
from run_queue import RunQueue, execute_runs, remove_leftovers


@dataclass(frozen=True)
class Method:
    """A recipe, what of the monolingual model it starts with, and what compiled step it needs."""

    recipe: str
    initialize: str
    dictionaries: bool = False
    step: str = "mlm"


METHODS = {
    "xlm": Method("metaxlm", "none"),
    "metaxlm": Method("metaxlm", "both"),
    "dict": Method("metaxlm-dict", "both", dictionaries=True),
    "body": Method("metaxlm", "body"),
    "embeddings": Method("metaxlm", "embeddings"),
    "frozen": Method("metaxlm-frozen", "both", step="frozen"),
    "kd": Method("xlm-kd", "none", step="kd"),
}
# layers, hidden, heads, intermediate: calque-mini's.
SHAPE, TINY_SHAPE = (8, 384, 6, 768), (2, 32, 2, 64)
LANGUAGES = "de,fr,es,ro,cs,hi,ja,sv,pt,ru,zh,ar,tr,vi,fi"
N_VALIDATIONS, N_PROBES = 5, 10
MAX_LENGTH = 128


def main() -> None:
    """Read the options, make the runs that are missing, and write the report."""
    options = parse_options()
    if not options.report_only and options.pack is None:
        return print("needs a folder PACK of benchmarks/metaxlm_pack.py: skipped")
    n_missing = 0 if options.report_only else do_all(options)
    write_report(options.out, options.report)
    if n_missing:
        sys.exit(f"{n_missing} runs are missing: the same command does them")
    return None


def parse_options() -> argparse.Namespace:
    """Say what there is to choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path, nargs="?", help="made by benchmarks/metaxlm_pack.py")
    parser.add_argument("-o", "--out", type=Path, default=Path("metaxlm"), help="results go here")
    parser.add_argument("--starts", default=f"{OWN},{MINILM}")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--only", help="runs whose names begin so: own-xlm,minilm-kd-1")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=5e-4, help="the highest learning rate")
    parser.add_argument("--mono-steps", type=int, default=2500, help="of the English model")
    parser.add_argument("--mono-rate", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=32_768, help="a step")
    parser.add_argument("--languages", default=LANGUAGES, help="those of Tatoeba")
    parser.add_argument("--jobs", type=int, default=1, help="workers; 1: this process")
    parser.add_argument("--minutes", type=float, default=1e6, help="then it stops")
    parser.add_argument("--eager", action="store_true", help="do not compile on a GPU")
    parser.add_argument("--set", action="append", default=[], help="changes all recipes: KEY=VALUE")
    parser.add_argument("--tiny", action="store_true", help="a few steps of tiny models")
    parser.add_argument("--report", type=Path, help="by default OUT/study.md")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    options.methods, options.starts = options.methods.split(","), options.starts.split(",")
    options.start = time.monotonic()
    if options.tiny:
        options.steps, options.mono_steps, options.batch_tokens = 5, 5, 512
        options.eager = True
    unknown = set(options.methods) - set(METHODS) | set(options.starts) - {OWN, MINILM}
    if unknown:
        parser.error(f"{min(unknown)} is neither a method ({', '.join(METHODS)}) nor a start")
    return options


# What there is to run.


@dataclass(frozen=True)
class Cell:
    """One run: from which model, by which method, with which seed."""

    start: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.start}-{self.method}-{self.seed}"

    @property
    def family(self) -> tuple[str, str]:
        """Name what runs share that can use the same compiled step."""
        return self.start, MONO if self.method == MONO else METHODS[self.method].step

    @property
    def priority(self) -> int:
        """Put an English model of its own first: others wait for it."""
        return int(self.method != MONO)

    @property
    def order(self) -> tuple[int, int]:
        """Put the first seeds first."""
        return self.seed, list(METHODS).index(self.method if self.method in METHODS else BASE)


def list_cells(options: argparse.Namespace) -> list[Cell]:
    """List the runs asked for, the first seeds first."""
    wanted = [
        Cell(start, method, seed)
        for seed in range(1, options.seeds + 1)
        for method in METHODS
        if method in options.methods
        for start in options.starts
    ]
    if options.only:
        prefixes = tuple(options.only.split(","))
        wanted = [cell for cell in wanted if cell.name.startswith(prefixes)]
    needs_mono = any(cell.start == OWN for cell in wanted)
    return [Cell(OWN, MONO, 1)] * needs_mono + wanted


def result_path(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def mono_folder(options: argparse.Namespace, start: str) -> Path:
    """Give the folder of the monolingual model."""
    return Path(options.out / MONO / "model" if start == OWN else options.pack / MINILM)


def is_done(options: argparse.Namespace, cell: Cell) -> bool:
    """Tell whether a run's result is there, and of the same settings and text."""
    path = result_path(options.out, cell)
    if not path.exists() or json.loads(path.read_text())["key"] != run_key(options, cell):
        return False
    return cell.method != MONO or (mono_folder(options, OWN) / "config.json").exists()


def is_ready(options: argparse.Namespace, cell: Cell) -> bool:
    """Tell whether a run's start is there: the English model of one's own comes first."""
    if cell.start != OWN or cell.method == MONO:
        return True
    return (mono_folder(options, OWN) / "config.json").exists()


def run_key(options: argparse.Namespace, cell: Cell) -> str:
    """Identify all that a result depends on."""
    names = ("steps", "rate", "batch_tokens", "set", "tiny", "languages")
    if cell.start == OWN:
        names += ("mono_steps", "mono_rate")
    settings = {name: getattr(options, name) for name in names}
    about = (options.pack / "pack.json").read_text()
    return hashlib.sha256(json.dumps([cell.name, settings, about]).encode()).hexdigest()[:16]


def do_all(options: argparse.Namespace) -> int:
    """Make the runs whose results are missing; count those that are missing still."""
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    unpack_results(options.out)
    wanted = list_cells(options)
    remove_leftovers(options.out, wanted)
    missing = [cell for cell in wanted if not is_done(options, cell)]
    if missing == [Cell(OWN, MONO, 1)]:  # nothing is left that needs it
        missing = []
    print(f"{len(missing)} runs of {len(wanted)} to do, {options.jobs} at a time", flush=True)
    execute_runs(options, RunQueue(options, missing, partial(is_ready, options)), do_cell)
    return sum(not is_done(options, cell) for cell in wanted if cell.method != MONO)


# One run.


def do_cell(options: argparse.Namespace, cell: Cell) -> None:
    """Grow, train and score one run, and write its result."""
    import torch

    from calque.io.files import write_atomically
    from calque.training.loop import train

    times = {"begin": time.perf_counter()}
    with tempfile.TemporaryDirectory(prefix=f".{cell.name}.", dir=options.out) as place:
        run = Path(place) / "run"
        if cell.method == MONO:
            model = train(mono_recipe(options), output=run, prepared=options.pack / "english").model
            growth = scores = {}
        else:
            growth = grow_start(options, cell, Path(place) / "start")
            times["grow"] = time.perf_counter()
            recipe = make_recipe(options, cell, Path(place) / "start")
            model = train(recipe, output=run, prepared=options.pack / "text").model
        times["train"] = time.perf_counter()
        if cell.method == MONO:
            publish_mono(options, model)
        else:
            scores = score_model(options, model)
        times["score"] = time.perf_counter()
        curves = read_curves(run)
    marks = list(times.items())
    result = {
        "start": cell.start,
        "method": cell.method,
        "seed": cell.seed,
        "key": run_key(options, cell),
        "steps": options.mono_steps if cell.method == MONO else options.steps,
        "rate": options.mono_rate if cell.method == MONO else options.rate,
        "batch_tokens": options.batch_tokens,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": {name: round(t - before, 1) for (_, before), (name, t) in pairwise(marks)},
        "growth": growth,
        "curves": curves,
        "scores": scores,
    }
    with write_atomically(result_path(options.out, cell)) as stream:
        json.dump(result, stream)


def grow_start(options: argparse.Namespace, cell: Cell, out: Path) -> dict[str, Any]:
    """Make the model that a run starts from, and say how its vocabulary was matched."""
    from calque.growth.grow import REPORT, grow

    method = METHODS[cell.method]
    files = sorted((options.pack / "muse").glob("*.txt")) if method.dictionaries else []
    grow(
        mono_folder(options, cell.start),
        options.pack / "text" / "tokenizer",
        out,
        dictionaries=files,
        initialize=method.initialize,  # type: ignore[arg-type]
        seed=cell.seed,
    )
    report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    match = report["match"] or {}
    kept = {name: match.get(name) for name in ("rules", "scripts")}
    return {name: report[name] for name in ("n_rows", "n_mono_rows", "has_head")} | kept


def common_settings(options: argparse.Namespace, steps: int, rate: float) -> list[str]:
    """Give what all recipes are changed in."""
    batches = {"batch_tokens": options.batch_tokens, "batch_examples": "null"}
    return [
        *(f"objectives.0.{name}={value}" for name, value in batches.items()),
        "model.dropout=0.0",  # a short run underfits rather than overfits
        f"data.max_length={64 if options.tiny else MAX_LENGTH}",
        f"data.validation_examples={2 if options.tiny else 100}",
        f"optimizer.learning_rate={rate}",
        f"schedule.steps={steps}",
        f"schedule.warmup={max(1, steps // 10)}",
        "checkpoints.every=1000000000",
        f"checkpoints.validate_every={max(1, steps // N_VALIDATIONS)}",
        f"telemetry.every={max(1, steps // 20)}",
        f"engine.compile={'false' if options.eager else 'auto'}",
    ]


def mono_recipe(options: argparse.Namespace) -> Any:
    """Shorten the recipe of the English model."""
    from calque.training.recipe_io import load_recipe

    shape = zip(
        ("layers", "hidden", "heads", "intermediate"),
        TINY_SHAPE if options.tiny else SHAPE,
        strict=True,
    )
    settings = [f"model.{name}={value}" for name, value in shape]
    settings.append(f"model.positions={MAX_LENGTH}")
    settings += common_settings(options, options.mono_steps, options.mono_rate)
    chosen = [setting for setting in options.set if not setting.startswith("probe")]
    return load_recipe("meta-pretrain", [*settings, *chosen])


def make_recipe(options: argparse.Namespace, cell: Cell, start: Path) -> Any:
    """Shorten a method's recipe, and let it start from the grown model."""
    from calque.training.recipe_io import load_recipe

    pack = options.pack.resolve()
    settings = [f"model.start={start.resolve()}", f"seed={cell.seed}"]
    settings += common_settings(options, options.steps, options.rate)
    settings += [
        f"probe.train={pack}/udpos/train-en.tsv",
        f"probe.test={pack}/udpos/dev-{{language}}.tsv",
        f"probe.every={max(1, options.steps // N_PROBES)}",
        f"probe.train_sentences={20 if options.tiny else 500}",
        f"probe.test_sentences={5 if options.tiny else 50}",
    ]
    if METHODS[cell.method].step == "kd":
        # MiniLM's checkpoint has no head: its states teach.
        settings += [
            "tokenizer.path=null",
            f"objectives.0.teacher={mono_folder(options, cell.start).resolve()}",
            f"objectives.0.target={'tokens' if cell.start == OWN else 'states'}",
            "objectives.0.languages=[en]",
            f"engine.workers={'auto' if options.tiny else 4}",
        ]
    return load_recipe(METHODS[cell.method].recipe, [*settings, *options.set])


def publish_mono(options: argparse.Namespace, model: Path) -> None:
    """Put the English model where the others look for it, whole."""
    final = mono_folder(options, OWN)
    shutil.rmtree(final.parent, ignore_errors=True)
    final.parent.mkdir(parents=True)
    model.rename(final.with_name("draft"))
    final.with_name("draft").rename(final)


def read_curves(run: Path) -> dict[str, list[list[float]]]:
    """Read the losses on text kept aside, and the transfer, by step."""
    from calque.training.telemetry import METRICS, read_metrics

    rows = read_metrics(run / METRICS)
    names = ("loss/masked_lm", "loss/distillation/mlm")
    losses = [
        [row["step"], row[name]]
        for row in rows
        for name in names
        if row["kind"] == "validation" and name in row
    ]
    transfer = [[r["step"], r["source"], r["others"]] for r in rows if r["kind"] == "probe"]
    speeds = [r["tokens_per_second"] for r in rows if r["kind"] == "train"]
    speed = float(np.median([speed for speed in speeds if speed is not None]))
    return {LOSS: losses, "transfer": transfer, "tokens_per_second": [[0, speed]]}


def score_model(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Give the scores of a model in percent: by measure and language, layer after layer."""
    import explicit_alignment as earlier
    import torch

    from calque.models.encoder import Encoder

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # In single precision, so that the differences are those of training.
    encoder = Encoder.load(folder, device=device)
    known = json.loads((options.pack / "pack.json").read_text())["tatoeba"]
    languages = [name for name in options.languages.split(",") if name in known]
    found = earlier.score_retrieval(encoder, options.pack / "tatoeba", languages)
    gold = options.pack / "gold_alignments"
    return {
        TATOEBA: found[earlier.TATOEBA],
        AER: earlier.score_alignment(encoder, gold, "separate"),
        POS: score_probe(options, encoder, POS),
        NER: score_probe(options, encoder, NER),
    }


def score_probe(options: argparse.Namespace, encoder: Any, measure: str) -> dict[str, list[float]]:
    """Score a tagging probe at all layers."""
    from calque.evaluation.settings import TaskSettings
    from calque.evaluation.tasks import tagging_probe as task

    name = {POS: task.POS, NER: task.NER}[measure]
    sizes = {"train_sentences": 2000, "test_sentences": 200}
    if options.tiny:
        sizes = {"train_sentences": 20, "test_sentences": 5}
    scores = task.measure(encoder, options.pack, task=name, settings=TaskSettings(), **sizes)
    return {
        each.language: [next(iter(metrics.values())) for metrics in each.layers.values()]
        for each in scores
    }


if __name__ == "__main__":
    main()
