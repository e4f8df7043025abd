"""Reproduce VECO on a small scale: plug-in cross-attention compared with XLM and mBART.

    python benchmarks/veco_pack.py DATA -o PACK
    python benchmarks/veco_study.py PACK -o OUT [--jobs 6] [--minutes 9] [--only scratch,en-de]
    python benchmarks/veco_study.py --report-only -o OUT
    python benchmarks/veco_study.py --tiny

Every method first pre-trains an encoder for the same number of steps on the same text with several
seeds, from scratch and from calque-mini: `xlm` is MLM + TLM, `mbart` denoising + translation,
`veco` CA-MLM + TLM. `plug`, only from calque-mini, is the first stage of VECO for all steps: only
the cross-attention is trained. Then translation of Multi30k is trained from each of these models
with the same seed, from random weights (scratch-none) and from calque-mini itself (mini-none). In
all of them the decoder shares the layers of the encoder, and the cross-attention is that of VECO,
of mBART, or random. Finally there are decoders of `plug` with its last or first layers, and one
with a random cross-attention. `--controls` adds the CONTROLS of veco_report.py. `--mini` takes
another encoder instead of calque-mini, such as the mono start of benchmarks/mono_study.py.

A run writes OUT/cells/NAME.json and is skipped if this file exists; OUT/study.json contains all of
them, so that the study can be continued on another machine. Pre-trained models stay in OUT/models,
and are trained again if they are missing and needed. Worker processes execute the runs in the order
of their importance. When the minutes are over, unfinished runs are stopped; the same command
continues them. OUT/study.md and its plots are made from the results, also later and elsewhere
(--report-only). `--tiny` without PACK packs sentences of the demo, trains tiny models for a few
steps and writes the report.

Tatoeba, AER and the probes of POS and NER are those of benchmarks/metaxlm.py, for the encoder
alone. BLEU during training is that of greedy search on validation sentences, and at the end that of
five beams on a test set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from metaxlm import MAX_LENGTH, SHAPE, TINY_SHAPE, result_path, score_model
from metaxlm_report import unpack_results
from run_queue import RunQueue, execute_runs, remove_leftovers
from tiny_data import LANGUAGES as TINY_LANGUAGES
from veco_pack import pack_tiny
from veco_report import (
    CONTROLS,
    DIRECTIONS,
    FULL,
    METHODS,
    MINI,
    NONE,
    PLUG,
    SCRATCH,
    STARTS,
    VECO,
    write_report,
)

# The recipe of a method, and the objectives of a recipe, with the same share of masked tokens.
RECIPES = {"xlm": "xlm-tlm", "mbart": "mbart", PLUG: "veco", VECO: "veco"}
RECIPES |= {"self": "veco", "veco-random": "veco", "xlm-equal": "xlm-tlm"}
RECIPES |= {"mbart-self": "mbart", "mbart-masked": "mbart"}
OBJECTIVES = {
    "xlm-tlm": "{kind: masked_lm, probability: 0.25}, {kind: translation_lm, probability: 0.25}",
    "mbart": "{kind: denoising_seq2seq}, {kind: translation, direction: both, smoothing: 0.0}",
    "veco": "{kind: cross_attention_lm, probability: 0.25}, "
    "{kind: translation_lm, probability: 0.25}",
}
MASKED_MBART = (  # as in the paper: masked text is read, and its masked words or its translation
    "{kind: denoising_seq2seq, target: masked, rate: 0.15}, "
    "{kind: translation, direction: both, smoothing: 0.0, mask_rate: 0.25}"
)
XLM_STEPS = 1.7  # steps of XLM that cost as much as one step of VECO
# The decoders that are compared in one direction.
DECODERS = {
    "last": "{{layers: {n}, which: last, tie: all, languages: {languages}}}",
    "first": "{{layers: {n}, which: first, tie: all, languages: {languages}}}",
    "fresh": "{{cross_attention: random, tie: all, languages: {languages}}}",
    FULL: "{{tie: all, languages: {languages}}}",
}
FREEZE_SHARE = 0.2  # share of the steps in the first stage, if the start is a trained model
N_POINTS = 5  # points of a learning curve
# The options that results depend on.
PRETRAINING_KEY = ("steps", "rate", "batch_tokens", "set", "tiny", "languages")
MINI_KEY = ("mini", "mini_steps", "mini_rate", "batch_tokens", "set", "tiny", "languages")
TRANSLATION_KEY = ("updates", "translation_rate", "translation_tokens", "dropout", "test")
TRANSLATION_KEY += ("shallow", "curve_lines")


def main() -> None:
    """Read the options, execute the missing runs, and write the report."""
    options = parse_options()
    if options.tiny and options.pack is None and not options.report_only:
        return run_tiny(options)
    if not options.report_only and options.pack is None:
        return print("skipped: this study needs a PACK of benchmarks/veco_pack.py, or --tiny")
    n_missing = 0 if options.report_only else do_all(options)
    write_report(options.out, options.report)
    if n_missing:
        sys.exit(f"{n_missing} runs are missing: repeat the command to continue")
    return None


def run_tiny(options: argparse.Namespace) -> None:
    """Execute VECO from scratch and translation from it, with data of the demo."""
    with tempfile.TemporaryDirectory() as folder:
        options.pack, options.out = pack_tiny(Path(folder)), Path(folder) / "out"
        options.mini = str(Path(folder) / "data" / "encoder")
        options.languages, options.seeds = ",".join(TINY_LANGUAGES), 1
        options.only = options.only or "scratch-veco,en-de-scratch-veco"
        n_missing = do_all(options)
        write_report(options.out)
        assert not n_missing, "a run failed"


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path, nargs="?", help="written by benchmarks/veco_pack.py")
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("veco"), help="folder of the results"
    )
    parser.add_argument("--mini", default="calque-mini", help="the encoder called calque-mini here")
    parser.add_argument("--only", help="runs with these prefixes, and the runs they need")
    parser.add_argument("--controls", action="store_true", help="controls from calque-mini, too")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--steps", type=int, default=700, help="steps of pre-training from scratch")
    parser.add_argument("--rate", type=float, default=8e-4, help="maximum learning rate")
    parser.add_argument(
        "--mini-steps", type=int, default=350, help="steps of pre-training calque-mini"
    )
    parser.add_argument("--mini-rate", type=float, default=3e-4)
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="per step and objective")
    parser.add_argument("--updates", type=int, default=700, help="in training of translation")
    parser.add_argument("--translation-rate", type=float, default=5e-4)
    parser.add_argument(
        "--translation-tokens", type=int, default=8192, help="of both sides together"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="in training of translation")
    parser.add_argument("--shallow", type=int, default=2, help="layers of a shallow decoder")
    parser.add_argument("--test", default="test_2016_flickr", help="test set of translation")
    parser.add_argument("--curve-lines", type=int, default=200, help="validation sentences")
    parser.add_argument("--languages", default="de,fr,ro,cs,hi,ja,zh", help="languages of Tatoeba")
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
    options.start = time.monotonic()
    if options.tiny:
        options.steps = options.mini_steps = 5
        options.updates = 2
        options.batch_tokens = options.translation_tokens = 512
        options.shallow, options.curve_lines, options.eager = 1, 2, True
    return options


# Runs.


@dataclass(frozen=True)
class Cell:
    """One run: pre-training with its scores or, with a direction, translation trained from it."""

    start: str
    method: str
    seed: int
    direction: str = ""
    decoder: str = FULL

    @property
    def name(self) -> str:
        """The name of the run: mini-veco-1, en-de-mini-veco-1, en-de-mini-veco-last-1."""
        parts = [self.direction, self.start, self.method]
        parts += [self.decoder] * (self.decoder != FULL)
        return "-".join([*filter(None, parts), str(self.seed)])

    @property
    def source(self) -> Cell | None:
        """The run that this one starts from, if any."""
        if not self.direction and self.method == "mbart-self":
            return Cell(self.start, "self", self.seed)
        if not self.direction or self.method == NONE:
            return None
        return Cell(self.start, self.method, self.seed)

    @property
    def family(self) -> tuple[str, ...]:
        """Runs of the same family can use the same compiled step."""
        if not self.direction:
            has_stages = self.method in (VECO, "veco-random")
            return self.method, self.start if has_stages else ""
        return "translation", "shallow" if self.decoder in ("last", "first") else FULL

    @property
    def priority(self) -> int:
        """Runs from calque-mini and random weights come first, and starts before their users."""
        if self.decoder != FULL:
            return 2
        if self.start == MINI or self.method == NONE:
            return int(bool(self.direction))
        return 3 + bool(self.direction)

    @property
    def order(self) -> tuple[Any, ...]:
        """The first seeds come first."""
        return self.seed, self.direction, (*METHODS, *CONTROLS).index(self.method)


def list_cells(options: argparse.Namespace) -> list[Cell]:
    """Return the requested runs, the first seeds first."""
    wanted = []
    for seed in range(1, options.seeds + 1):
        methods = [(start, method) for start in STARTS for method in METHODS]
        methods.remove((SCRATCH, PLUG))  # random weights are not worth freezing
        for start, method in methods:
            if method != NONE or (
                start == MINI and seed == 1
            ):  # calque-mini does not depend on the seed
                wanted.append(Cell(start, method, seed))
            wanted += [Cell(start, method, seed, direction) for direction in DIRECTIONS]
        if options.controls:
            controls = [Cell(MINI, method, seed) for method in CONTROLS]
            wanted += [Cell(MINI, each.method, seed, d) for each in controls for d in DIRECTIONS]
            wanted += controls
        shallow = [Cell(MINI, PLUG, seed, DIRECTIONS[0], name) for name in DECODERS if name != FULL]
        wanted += [*shallow, Cell(SCRATCH, NONE, seed, DIRECTIONS[0], "last")]
    if options.only:
        prefixes = tuple(options.only.split(","))
        wanted = [cell for cell in wanted if cell.name.startswith(prefixes)]
    return list(dict.fromkeys(wanted))


def model_folder(options: argparse.Namespace, cell: Cell) -> Path:
    """Return the folder of a pre-trained model."""
    return Path(options.out / "models" / f"{cell.name}-{run_key(options, cell)}")


def has_result(options: argparse.Namespace, cell: Cell) -> bool:
    """Return whether a run has a result with the same settings and text."""
    path = result_path(options.out, cell)  # type: ignore[arg-type]
    return path.exists() and json.loads(path.read_text())["key"] == run_key(options, cell)


def is_ready(options: argparse.Namespace, cell: Cell) -> bool:
    """Return whether the model that a run starts from exists."""
    source = cell.source
    return source is None or model_folder(options, source).exists()


def run_key(options: argparse.Namespace, cell: Cell) -> str:
    """Return a hash of everything that a result depends on."""
    names = MINI_KEY if cell.start == MINI else PRETRAINING_KEY
    names += TRANSLATION_KEY if cell.direction else ()
    settings = {name: getattr(options, name) for name in names}
    about = (options.pack / "pack.json").read_text()
    return hashlib.sha256(json.dumps([cell.name, settings, about]).encode()).hexdigest()[:16]


def do_all(options: argparse.Namespace) -> int:
    """Execute the runs without results; return how many are missing afterwards."""
    for name in ("cells", "models"):
        (options.out / name).mkdir(parents=True, exist_ok=True)
    unpack_results(options.out)
    wanted = list_cells(options)
    remove_leftovers(options.out, wanted)
    missing = [cell for cell in wanted if not has_result(options, cell)]
    to_do = list(missing)
    for cell in to_do:  # also for those that are added
        if cell.source and not is_ready(options, cell) and cell.source not in to_do:
            to_do.append(cell.source)
    print(f"{len(to_do)} runs of {len(wanted)} to do, {options.jobs} at a time", flush=True)
    execute_runs(options, RunQueue(options, to_do, partial(is_ready, options)), do_cell)
    return sum(not has_result(options, cell) for cell in wanted)


# One run.


def do_cell(options: argparse.Namespace, cell: Cell) -> None:
    """Train and score one model, and write the result."""
    import torch

    from calque.io.files import write_atomically
    from calque.models.loading import find_model
    from calque.training.loop import train

    set_batch_shape(cell)
    times = {"begin": time.perf_counter()}
    is_known = has_result(options, cell)  # only the model is needed
    is_trained = bool(cell.direction) or cell.method != NONE
    recipe, result = make_recipe(options, cell), {}
    with tempfile.TemporaryDirectory(prefix=f".{cell.name}.", dir=options.out) as scratch:
        run = Path(scratch) / "run"
        if cell.direction:
            result = train_translation(options, cell, run)
            times["train"] = time.perf_counter()
        else:
            text = options.pack / "text"
            model = (
                train(recipe, output=run, prepared=text).model
                if is_trained
                else find_model(options.mini)
            )
            times["train"] = time.perf_counter()
            if not is_known:
                encoder = model / "encoder" if (model / "encoder").is_dir() else model
                result = {"scores": score_model(options, encoder)}
            times["score"] = time.perf_counter()
            if is_trained:
                model.rename(model_folder(options, cell))
        result["speed"] = read_speed(run) if is_trained else None
    if is_known:
        return
    marks = list(times.items())
    result |= {
        name: getattr(cell, name) for name in ("start", "method", "seed", "direction", "decoder")
    } | {
        "key": run_key(options, cell),
        "steps": recipe.schedule.steps if is_trained else 0,
        "rate": recipe.optimizer.learning_rate if is_trained else 0.0,
        "batch_tokens": [each.batch_tokens for each in recipe.objectives],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": {name: round(t - before, 1) for (_, before), (name, t) in pairwise(marks)},
    }
    with write_atomically(result_path(options.out, cell)) as stream:  # type: ignore[arg-type]
        json.dump(result, stream)


def make_recipe(options: argparse.Namespace, cell: Cell) -> Any:
    """Return the recipe of a run."""
    from calque.training.recipe_io import load_recipe

    settings = translation_settings if cell.direction else pretraining_settings
    name = "translate" if cell.direction else RECIPES.get(cell.method, "xlm-tlm")
    return load_recipe(name, [*settings(options, cell), *options.set])


def common_settings(options: argparse.Namespace, start: str | None, steps: int) -> list[str]:
    """Return the changes of all recipes."""
    shape = zip(
        ("layers", "hidden", "heads", "intermediate"),
        TINY_SHAPE if options.tiny else SHAPE,
        strict=True,
    )
    return [
        f"model.start={start or 'null'}",
        *(f"model.{name}={value}" for name, value in shape),
        f"model.positions={MAX_LENGTH}",
        f"data.max_length={64 if options.tiny else MAX_LENGTH}",
        "data.validation_examples=0",  # so that nothing is compiled for them
        f"schedule.steps={steps}",
        f"schedule.warmup={max(1, steps // 8)}",
        f"telemetry.every={max(1, steps // 10)}",
        f"engine.compile={'false' if options.eager else 'auto'}",
        f"engine.workers={'auto' if options.tiny else 1}",
    ]


def list_languages(options: argparse.Namespace) -> str:
    """Return all languages as in a recipe, so that all decoders have the same tokens."""
    known = json.loads((options.pack / "pack.json").read_text())["languages"]
    return f"[{', '.join(['en', *known])}]"


def pretraining_settings(options: argparse.Namespace, cell: Cell) -> list[str]:
    """Return the changes for pre-training; only a trained start has a frozen first stage."""
    is_mini = cell.start == MINI
    steps, rate = (
        (options.mini_steps, options.mini_rate) if is_mini else (options.steps, options.rate)
    )
    if cell.method == "self":
        steps, rate = 1, 1e-12
    elif cell.method == "xlm-equal":
        steps = round(XLM_STEPS * steps)
    start = options.mini if is_mini else None
    if cell.source is not None:
        start = model_folder(options, cell.source).resolve()
    settings = common_settings(options, start, steps)
    objectives = OBJECTIVES.get(RECIPES.get(cell.method, ""), OBJECTIVES["xlm-tlm"])
    settings += [
        f"objectives=[{MASKED_MBART if cell.method == 'mbart-masked' else objectives}]",
        *(f"objectives.{n}.batch_tokens={options.batch_tokens}" for n in (0, 1)),
        f"seed={cell.seed}",
        "model.dropout=0.0",  # a short run underfits rather than overfits
        "data.alpha=0.5",
        f"optimizer.learning_rate={rate}",
        "optimizer.betas=[0.9, 0.98]",
        "checkpoints.every=1000000000",
    ]
    recipe = RECIPES.get(cell.method)
    if recipe == "mbart":
        decoder = DECODERS[FULL].format(languages=list_languages(options))
        settings.append(f"model.decoder={decoder}")
    if recipe == "veco":
        has_stages = is_mini and cell.method in (VECO, "veco-random")
        stage = max(1, round(FREEZE_SHARE * steps)) if has_stages else "null"
        frozen = [f"freeze_steps={stage}"] if is_mini else ["freeze=[]", "freeze_steps=null"]
        is_copied = is_mini and cell.method != "veco-random"
        settings += [f"model.cross_attention={'self' if is_copied else 'random'}", *frozen]
    return settings


def translation_settings(options: argparse.Namespace, cell: Cell) -> list[str]:
    """Return the changes for training of translation."""
    start = None if cell.start == SCRATCH else options.mini
    if cell.source is not None:
        start = model_folder(options, cell.source).resolve()
    decoder = DECODERS[cell.decoder].format(n=options.shallow, languages=list_languages(options))
    direction = "forward" if cell.direction == DIRECTIONS[0] else "backward"
    return [
        *common_settings(options, start, options.updates),
        f"model.decoder={decoder}",
        f"model.dropout={options.dropout}",
        f"objectives.0.direction={direction}",
        f"objectives.0.batch_tokens={options.translation_tokens}",
        f"seed={cell.seed}",
        f"optimizer.learning_rate={options.translation_rate}",
        "average={kind: none}",  # a run this short has no plateau to average over
        f"checkpoints.every={max(1, options.updates // N_POINTS)}",
    ]


def read_speed(run: Path) -> float | None:
    """Return the median of tokens per second."""
    from calque.training.telemetry import METRICS, read_metrics

    rows = read_metrics(run / METRICS)
    speeds = [row["tokens_per_second"] for row in rows if row["kind"] == "train"]
    known = [speed for speed in speeds if speed is not None]
    return float(np.median(known)) if known else None


def train_translation(options: argparse.Namespace, cell: Cell, run: Path) -> dict[str, Any]:
    """Train translation, with greedy search during training and beam search at the end.

    No checkpoints are saved, because writing them would take longer than the training.
    """
    from calque.training.run import Run
    from calque.training.telemetry import Telemetry

    recipe = make_recipe(options, cell)
    state = Run(recipe, options.pack / "pairs", run)
    state.compile_step()
    begin = time.perf_counter()
    with Telemetry(run, recipe.schedule.steps) as telemetry:
        trainer = make_trainer(options, cell, state, telemetry)
        trainer.train()
    trained = time.perf_counter()
    n_lines = options.curve_lines if options.tiny else None
    final = measure(state, cell, options.pack / "multi30k", options.test, n_lines, beams=5)
    return {
        "curve": trainer.curve,
        **final.metrics,
        "n_lines": final.n_lines,
        "signatures": [final.bleu_signature, final.chrf_signature],
        "test": options.test,
        "parts": [round(trained - begin, 1), round(time.perf_counter() - trained, 1)],
    }


def make_trainer(options: argparse.Namespace, cell: Cell, state: Any, telemetry: Any) -> Any:
    """Return a trainer that measures BLEU instead of saving checkpoints."""
    from calque.training.loop import Trainer

    recipe = state.recipe

    class CurveTrainer(Trainer):
        """Measures BLEU during training and saves nothing."""

        def __init__(self) -> None:
            super().__init__(state, telemetry)
            self.curve: list[tuple[int, float]] = []

        def after_step(self, metrics: Any) -> None:
            if state.is_finished or state.step % recipe.telemetry.every == 0:
                self.guard.check()
                self.log_step(metrics)
            if state.is_finished or state.step % recipe.checkpoints.every == 0:
                with telemetry.paused():
                    lines = options.curve_lines
                    found = measure(state, cell, options.pack / "multi30k", "val", lines, beams=1)
                self.curve.append((state.step, found.bleu))

    return CurveTrainer()


def measure(
    run: Any, cell: Cell, folder: Path, name: str, n_lines: int | None, *, beams: int
) -> Any:
    """Translate a test set with a model in training, and return its scores."""
    from calque.evaluation.tasks.machine_translation import read_test_set
    from calque.translation.bleu import score_translations
    from calque.translation.translate import Translator

    src, tgt = cell.direction.split("-")
    sources, references = read_test_set(folder / f"{name}.{src}", folder / f"{name}.{tgt}")
    run.module.eval()
    translator = Translator(run.encoder, beams=beams, tgt_lang=tgt, src_lang=src)
    with run.accelerator.autocast():
        translations = list(translator.translate(sources[:n_lines]))
    run.module.train()
    return score_translations(translations, references[:n_lines], tgt)


def set_batch_shape(cell: Cell) -> None:
    """Use the same shape in both directions, since German takes more than half of a batch."""
    from calque.objectives import generation

    generation.TRANSLATION_SIZES = (11, 11) if cell.direction else (9, 9)


if __name__ == "__main__":
    main()
