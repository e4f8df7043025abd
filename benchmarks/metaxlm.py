"""Reproduce MetaXLM on a small scale: grow multilingual models from monolingual ones.

    python benchmarks/metaxlm_pack.py DATA -o PACK --minilm WHEEL
    python benchmarks/metaxlm.py PACK -o OUT [--jobs 6] [--minutes 9] [--only own-xlm,minilm-kd]
    python benchmarks/metaxlm.py --report-only -o OUT
    python benchmarks/metaxlm.py --tiny

All methods are trained for the same number of steps on the same text with several seeds, from two
monolingual models: `own`, an English one that is trained here first, and `minilm`, the encoder in
PACK. Only `xlm-matched`, a control from scratch, gets the steps of the English model, too. A run
writes OUT/cells/START-METHOD-SEED.json and is skipped if this file exists; OUT/study.json contains
all of them, so that the study can be continued on another machine. Worker processes execute runs
that share a compiled step one after another, the first seeds first. When the minutes are over,
unfinished runs are stopped; the same command continues them. OUT/study.md and its plots are made
from the results, also later and elsewhere (--report-only). `--tiny` without PACK packs sentences of
the demo, trains tiny models for a few steps and writes the report.

Loss is that of masked language modeling on validation text. POS and NER are linear probes of
frozen hidden states, trained in English (accuracy, F1 of spans); Tatoeba is the mean accuracy of
both directions with mean-pooled states; AER that of mutual argmax of separately encoded sentences.
During training, POS is measured with fewer sentences at two thirds of the layers.
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
from metaxlm_pack import pack_tiny
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
from tiny_data import LANGUAGES as TINY_LANGUAGES


@dataclass(frozen=True)
class Method:
    """A recipe, the weights of the monolingual model it starts from, and its compiled step.

    With `matched`, it also gets the steps in which the monolingual model was trained.
    """

    recipe: str
    initialize: str
    dictionaries: bool = False
    prefer: str = "surface"
    average: str = "weighted"
    step: str = "mlm"
    matched: bool = False


METHODS = {
    "xlm": Method("metaxlm", "none"),
    "metaxlm": Method("metaxlm", "both"),
    "dict": Method("metaxlm-dict", "both", dictionaries=True),
    "dict-paper": Method("metaxlm-dict", "both", True, prefer="dictionary", average="plain"),
    "xlm-matched": Method("metaxlm", "none", matched=True),
    "body": Method("metaxlm", "body"),
    "embeddings": Method("metaxlm", "embeddings"),
    "frozen": Method("metaxlm-frozen", "both", step="frozen"),
    "kd": Method("xlm-kd", "none", step="kd"),
}
# Layers, hidden size, heads and intermediate size of calque-mini, and of tiny models.
SHAPE, TINY_SHAPE = (8, 384, 6, 768), (2, 32, 2, 64)
LANGUAGES = "de,fr,es,ro,cs,hi,ja,sv,pt,ru,zh,ar,tr,vi,fi"
N_VALIDATIONS, N_PROBES = 5, 10
MAX_LENGTH = 128


def main() -> None:
    """Read the options, execute the missing runs, and write the report."""
    options = parse_options()
    if options.tiny and options.pack is None and not options.report_only:
        return run_tiny(options)
    if not options.report_only and options.pack is None:
        return print("skipped: this study needs a PACK of benchmarks/metaxlm_pack.py, or --tiny")
    n_missing = 0 if options.report_only else do_all(options)
    write_report(options.out, options.report)
    if n_missing:
        sys.exit(f"{n_missing} runs are missing: repeat the command to continue")
    return None


def run_tiny(options: argparse.Namespace) -> None:
    """Execute two methods from an English model of their own, with data of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        options.pack, options.out = pack_tiny(Path(folder)), Path(folder) / "out"
        options.languages, options.seeds = ",".join(TINY_LANGUAGES), 1
        options.starts, options.methods = [OWN], ["dict-paper", "xlm-matched"]
        n_missing = do_all(options)
        write_report(options.out)
        assert not n_missing, "a run failed"
        control = json.loads(result_path(options.out, Cell(OWN, "xlm-matched", 1)).read_text())
        assert control["curves"][LOSS][-1][0] == options.steps + options.mono_steps


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path, nargs="?", help="written by benchmarks/metaxlm_pack.py")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("metaxlm"), help="folder of the results"
    )
    parser.add_argument("--starts", default=f"{OWN},{MINILM}")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--only", help="runs with these prefixes: own-xlm,minilm-kd-1")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=5e-4, help="maximum learning rate")
    parser.add_argument("--mono-steps", type=int, default=2500, help="of the English model")
    parser.add_argument("--mono-rate", type=float, default=1e-3)
    parser.add_argument("--batch-tokens", type=int, default=32_768, help="per step")
    parser.add_argument("--languages", default=LANGUAGES, help="languages of Tatoeba")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes; 1: no other process")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit")
    parser.add_argument("--eager", action="store_true", help="do not compile on a GPU")
    parser.add_argument("--set", action="append", default=[], help="change all recipes: KEY=VALUE")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models, a few steps; without PACK, the demo"
    )
    parser.add_argument("--report", type=Path, help="default: OUT/study.md")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    options.methods, options.starts = options.methods.split(","), options.starts.split(",")
    options.start = time.monotonic()
    if options.tiny:
        options.steps, options.mono_steps, options.batch_tokens = 2, 5, 512
        options.eager = True
    unknown = set(options.methods) - set(METHODS) | set(options.starts) - {OWN, MINILM}
    if unknown:
        parser.error(f"{min(unknown)} is neither a method ({', '.join(METHODS)}) nor a start")
    return options


# Runs.


@dataclass(frozen=True)
class Cell:
    """One run: a method with a seed, from one of the monolingual models."""

    start: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.start}-{self.method}-{self.seed}"

    @property
    def family(self) -> tuple[str, str]:
        """Runs of the same family can use the same compiled step."""
        return self.start, MONO if self.method == MONO else METHODS[self.method].step

    @property
    def priority(self) -> int:
        """The English model comes first, because others wait for it."""
        return int(self.method != MONO)

    @property
    def order(self) -> tuple[int, int]:
        """The first seeds come first."""
        return self.seed, list(METHODS).index(self.method if self.method in METHODS else BASE)


def list_cells(options: argparse.Namespace) -> list[Cell]:
    """Return the requested runs, the first seeds first."""
    wanted = [
        Cell(start, method, seed)
        for seed in range(1, options.seeds + 1)
        for method in METHODS
        if method in options.methods
        for start in options.starts
        if start == OWN or not METHODS[method].matched  # how MiniLM was trained is not known
    ]
    if options.only:
        prefixes = tuple(options.only.split(","))
        wanted = [cell for cell in wanted if cell.name.startswith(prefixes)]
    needs_mono = any(cell.start == OWN for cell in wanted)
    return [Cell(OWN, MONO, 1)] * needs_mono + wanted


def result_path(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json"


def count_steps(options: argparse.Namespace, cell: Cell) -> int:
    """Return the number of training steps of a run."""
    if cell.method == MONO:
        return int(options.mono_steps)
    return int(options.steps + METHODS[cell.method].matched * options.mono_steps)


def mono_folder(options: argparse.Namespace, start: str) -> Path:
    """Return the folder of the monolingual model."""
    return Path(options.out / MONO / "model" if start == OWN else options.pack / MINILM)


def is_done(options: argparse.Namespace, cell: Cell) -> bool:
    """Return whether a run has a result with the same settings and text."""
    path = result_path(options.out, cell)
    if not path.exists() or json.loads(path.read_text())["key"] != run_key(options, cell):
        return False
    return cell.method != MONO or (mono_folder(options, OWN) / "config.json").exists()


def is_ready(options: argparse.Namespace, cell: Cell) -> bool:
    """Return whether the model that a run starts from exists."""
    if cell.start != OWN or cell.method == MONO:
        return True
    return (mono_folder(options, OWN) / "config.json").exists()


def run_key(options: argparse.Namespace, cell: Cell) -> str:
    """Return a hash of everything that a result depends on."""
    names = ("steps", "rate", "batch_tokens", "set", "tiny", "languages")
    if cell.start == OWN:
        names += ("mono_steps", "mono_rate")
    settings = {name: getattr(options, name) for name in names}
    about = (options.pack / "pack.json").read_text()
    return hashlib.sha256(json.dumps([cell.name, settings, about]).encode()).hexdigest()[:16]


def do_all(options: argparse.Namespace) -> int:
    """Execute the runs without results; return how many are missing afterwards."""
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    unpack_results(options.out)
    wanted = list_cells(options)
    remove_leftovers(options.out, wanted)
    missing = [cell for cell in wanted if not is_done(options, cell)]
    if missing == [Cell(OWN, MONO, 1)]:  # no other run needs it
        missing = []
    print(f"{len(missing)} runs of {len(wanted)} to do, {options.jobs} at a time", flush=True)
    execute_runs(options, RunQueue(options, missing, partial(is_ready, options)), do_cell)
    return sum(not is_done(options, cell) for cell in wanted if cell.method != MONO)


# One run.


def do_cell(options: argparse.Namespace, cell: Cell) -> None:
    """Grow, train and score one model, and write the result."""
    import torch

    from calque.io.files import write_atomically
    from calque.training.loop import train

    times = {"begin": time.perf_counter()}
    with tempfile.TemporaryDirectory(prefix=f".{cell.name}.", dir=options.out) as scratch:
        run = Path(scratch) / "run"
        if cell.method == MONO:
            model = train(mono_recipe(options), output=run, prepared=options.pack / "english").model
            growth = scores = {}
        else:
            growth = grow_start(options, cell, Path(scratch) / "start")
            times["grow"] = time.perf_counter()
            recipe = make_recipe(options, cell, Path(scratch) / "start")
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
        "steps": count_steps(options, cell),
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
    """Write the model that a run starts from; return how its vocabulary was matched."""
    from calque.growth.grow import REPORT, grow

    method = METHODS[cell.method]
    files = sorted((options.pack / "muse").glob("*.txt")) if method.dictionaries else []
    grow(
        mono_folder(options, cell.start),
        tokenizer=options.pack / "text" / "tokenizer",
        output=out,
        dictionary=files,
        initialize=method.initialize,  # type: ignore[arg-type]
        prefer=method.prefer,  # type: ignore[arg-type]
        average=method.average,  # type: ignore[arg-type]
        seed=cell.seed,
    )
    report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    match = report["match"] or {}
    kept = {name: match.get(name) for name in ("rules", "scripts")}
    return {name: report[name] for name in ("n_rows", "n_mono_rows", "has_head")} | kept


def common_settings(options: argparse.Namespace, steps: int, rate: float) -> list[str]:
    """Return the changes of all recipes."""
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
    """Return the recipe of the English model."""
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
    """Return the recipe of a method, which starts from the grown model."""
    from calque.training.recipe_io import load_recipe

    pack = options.pack.resolve()
    settings = [f"model.start={start.resolve()}", f"seed={cell.seed}"]
    steps = count_steps(options, cell)
    settings += common_settings(options, steps, options.rate)
    settings += [
        f"probe.train={pack}/udpos/train-en.tsv",
        f"probe.test={pack}/udpos/dev-{{language}}.tsv",
        f"probe.every={max(1, steps // N_PROBES)}",
        f"probe.train_sentences={20 if options.tiny else 500}",
        f"probe.test_sentences={5 if options.tiny else 50}",
    ]
    if METHODS[cell.method].step == "kd":
        # The checkpoint of MiniLM has no LM head, so its hidden states are distilled.
        settings += [
            "tokenizer.path=null",
            f"objectives.0.teacher={mono_folder(options, cell.start).resolve()}",
            f"objectives.0.target={'tokens' if cell.start == OWN else 'states'}",
            "objectives.0.languages=[en]",
            f"engine.workers={'auto' if options.tiny else 4}",
        ]
    return load_recipe(METHODS[cell.method].recipe, [*settings, *options.set])


def publish_mono(options: argparse.Namespace, model: Path) -> None:
    """Move the English model atomically to where other runs expect it."""
    final = mono_folder(options, OWN)
    shutil.rmtree(final.parent, ignore_errors=True)
    final.parent.mkdir(parents=True)
    model.rename(final.with_name("draft"))
    final.with_name("draft").rename(final)


def read_curves(run: Path) -> dict[str, list[list[float]]]:
    """Return validation losses and transfer scores by step."""
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
    """Return the scores of a model in percent, by measure, language and layer."""
    import explicit_alignment
    import torch

    from calque.models.encoder import Encoder

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Loaded in single precision, so that all differences come from training.
    encoder = Encoder.load(folder, device=device)
    known = json.loads((options.pack / "pack.json").read_text())["tatoeba"]
    languages = [name for name in options.languages.split(",") if name in known]
    found = explicit_alignment.score_retrieval(encoder, options.pack / "tatoeba", languages)
    gold = options.pack / "gold_alignments"
    return {
        TATOEBA: found[explicit_alignment.TATOEBA],
        AER: explicit_alignment.score_alignment(encoder, gold, "separate"),
        POS: score_probe(options, encoder, POS),
        NER: score_probe(options, encoder, NER),
    }


def score_probe(options: argparse.Namespace, encoder: Any, measure: str) -> dict[str, list[float]]:
    """Return the scores of a tagging probe by language and layer."""
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
