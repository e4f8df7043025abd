"""VECO in small: a plug-in cross-attention beside XLM and mBART, for understanding and translation.

    python benchmarks/veco_pack.py DATA -o PACK
    python benchmarks/veco_study.py PACK -o OUT [--jobs 6] [--minutes 9] [--only scratch,en-de]
    python benchmarks/veco_study.py --report-only -o OUT

First every method pre-trains an encoder for the same steps on the same text, with several seeds,
from scratch and from calque-mini: `xlm` is MLM + TLM, `mbart` denoising + translation, `veco`
CA-MLM + TLM; `plug`, from calque-mini only, is VECO's first stage to the end, in which nothing but
the cross-attention learns. Then Multi30k is learnt from each of them, of the same seed, and from
random weights (scratch-none) and calque-mini itself (mini-none): the encoder's layers are shared
with the decoder in all alike, and its cross-attention is VECO's, mBART's, or random. At last come
decoders of `plug`: of its last or first layers, and one whose cross-attention is drawn anew.

A run leaves OUT/cells/NAME.json, and one whose file is there is not made again; OUT/study.json is
all of them, from which OUT/cells is filled again on another machine. Pre-trained models stay in
OUT/models, and are trained again where they are missing and needed. Worker processes take the runs
one after the other, the most important first; when the minutes are over, what is still running is
given up, and the same command goes on. OUT/study.md and the pictures are made of the results, also
elsewhere and later (--report-only).

Tatoeba, AER and probes of POS and NER are as in benchmarks/metaxlm.py, of the encoder alone. BLEU
along training is that of a greedy search on validation sentences, in the end that of five beams on
a test.
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
from veco_report import (
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

# The recipe of a method, and a recipe's objectives: as many tokens each, as much of it hidden.
RECIPES = {"xlm": "xlm-tlm", "mbart": "mbart", PLUG: "veco", VECO: "veco"}
OBJECTIVES = {
    "xlm-tlm": "{kind: masked_lm, probability: 0.25}, {kind: translation_lm, probability: 0.25}",
    "mbart": "{kind: denoising_seq2seq}, {kind: translation, direction: both, smoothing: 0.0}",
    "veco": "{kind: cross_attention_lm, probability: 0.25}, "
    "{kind: translation_lm, probability: 0.25}",
}
# The decoders that are compared, on one direction.
DECODERS = {
    "last": "{{layers: {n}, which: last, tie: all, languages: {languages}}}",
    "first": "{{layers: {n}, which: first, tie: all, languages: {languages}}}",
    "fresh": "{{cross_attention: random, tie: all, languages: {languages}}}",
    FULL: "{{tie: all, languages: {languages}}}",
}
FREEZE_SHARE = 0.2  # of the steps, the first stage of a start that knows something
N_POINTS = 5  # of a learning curve
# What results depend on.
PRETRAINING_KEY = ("steps", "rate", "batch_tokens", "set", "tiny", "languages")
MINI_KEY = ("mini", "mini_steps", "mini_rate", "batch_tokens", "set", "tiny", "languages")
TRANSLATION_KEY = ("updates", "translation_rate", "translation_tokens", "dropout", "test")
TRANSLATION_KEY += ("shallow", "curve_lines")


def main() -> None:
    """Read the options, make the runs that are missing, and write the report."""
    options = parse_options()
    if not options.report_only and options.pack is None:
        return print("needs a folder PACK of benchmarks/veco_pack.py: skipped")
    n_missing = 0 if options.report_only else do_all(options)
    write_report(options.out, options.report)
    if n_missing:
        sys.exit(f"{n_missing} runs are missing: the same command does them")
    return None


def parse_options() -> argparse.Namespace:
    """Say what there is to choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path, nargs="?", help="made by benchmarks/veco_pack.py")
    parser.add_argument("-o", "--out", type=Path, default=Path("veco"), help="results go here")
    parser.add_argument("--mini", default="calque-mini", help="the encoder to start from")
    parser.add_argument("--only", help="runs whose names begin so, and what they need")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=700, help="of pre-training from scratch")
    parser.add_argument("--rate", type=float, default=8e-4, help="the highest learning rate")
    parser.add_argument("--mini-steps", type=int, default=350, help="of pre-training calque-mini")
    parser.add_argument("--mini-rate", type=float, default=3e-4)
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="a step and objective")
    parser.add_argument("--updates", type=int, default=700, help="of translation")
    parser.add_argument("--translation-rate", type=float, default=5e-4)
    parser.add_argument("--translation-tokens", type=int, default=8192, help="of both sides")
    parser.add_argument("--dropout", type=float, default=0.1, help="of translation")
    parser.add_argument("--shallow", type=int, default=2, help="layers of a shallow decoder")
    parser.add_argument("--test", default="test_2016_flickr", help="the test of translation")
    parser.add_argument("--curve-lines", type=int, default=200, help="of the validation text")
    parser.add_argument("--languages", default="de,fr,ro,cs,hi,ja,zh", help="of Tatoeba")
    parser.add_argument("--jobs", type=int, default=1, help="workers; 1: this process")
    parser.add_argument("--minutes", type=float, default=1e6, help="then it stops")
    parser.add_argument("--eager", action="store_true", help="do not compile on a GPU")
    parser.add_argument("--set", action="append", default=[], help="changes all recipes: KEY=VALUE")
    parser.add_argument("--tiny", action="store_true", help="a few steps of tiny models")
    parser.add_argument("--report", type=Path, help="by default OUT/study.md")
    parser.add_argument("--report-only", action="store_true")
    options = parser.parse_args()
    options.start = time.monotonic()
    if options.tiny:
        options.steps = options.mini_steps = options.updates = 5
        options.batch_tokens = options.translation_tokens = 512
        options.shallow, options.curve_lines, options.eager = 1, 5, True
    return options


# What there is to run.


@dataclass(frozen=True)
class Cell:
    """One run: a pre-training with its scores, or with a direction a translation learnt from it."""

    start: str
    method: str
    seed: int
    direction: str = ""
    decoder: str = FULL

    @property
    def name(self) -> str:
        """Name the run: mini-veco-1, en-de-mini-veco-1, en-de-mini-veco-last-1."""
        parts = [self.direction, self.start, self.method]
        parts += [self.decoder] * (self.decoder != FULL)
        return "-".join([*filter(None, parts), str(self.seed)])

    @property
    def source(self) -> Cell | None:
        """Give the pre-training that a translation starts from, if there is one."""
        if not self.direction or self.method == NONE:
            return None
        return Cell(self.start, self.method, self.seed)

    @property
    def family(self) -> tuple[str, ...]:
        """Name what runs share that can use the same compiled step."""
        if not self.direction:
            return self.method, self.start if self.method == VECO else ""
        return "translation", "shallow" if self.decoder in ("last", "first") else FULL

    @property
    def priority(self) -> int:
        """Put calque-mini and random weights first, and a start before what is learnt from it."""
        if self.decoder != FULL:
            return 2
        if self.start == MINI or self.method == NONE:
            return int(bool(self.direction))
        return 3 + bool(self.direction)

    @property
    def order(self) -> tuple[Any, ...]:
        """Put the first seeds first."""
        return self.seed, self.direction, METHODS.index(self.method)


def list_cells(options: argparse.Namespace) -> list[Cell]:
    """List the runs asked for, the first seeds first."""
    wanted = []
    for seed in range(1, options.seeds + 1):
        methods = [(start, method) for start in STARTS for method in METHODS]
        methods.remove((SCRATCH, PLUG))  # there is nothing to keep
        for start, method in methods:
            if method != NONE or (start == MINI and seed == 1):  # nothing is drawn in mini itself
                wanted.append(Cell(start, method, seed))
            wanted += [Cell(start, method, seed, direction) for direction in DIRECTIONS]
        shallow = [Cell(MINI, PLUG, seed, DIRECTIONS[0], name) for name in DECODERS if name != FULL]
        wanted += [*shallow, Cell(SCRATCH, NONE, seed, DIRECTIONS[0], "last")]
    if options.only:
        prefixes = tuple(options.only.split(","))
        wanted = [cell for cell in wanted if cell.name.startswith(prefixes)]
    return list(dict.fromkeys(wanted))


def model_folder(options: argparse.Namespace, cell: Cell) -> Path:
    """Give the folder of a pre-trained model."""
    return Path(options.out / "models" / f"{cell.name}-{run_key(options, cell)}")


def has_result(options: argparse.Namespace, cell: Cell) -> bool:
    """Tell whether a run's result is there, and of the same settings and text."""
    path = result_path(options.out, cell)  # type: ignore[arg-type]
    return path.exists() and json.loads(path.read_text())["key"] == run_key(options, cell)


def is_ready(options: argparse.Namespace, cell: Cell) -> bool:
    """Tell whether what a run starts from is there."""
    source = cell.source
    return source is None or model_folder(options, source).exists()


def run_key(options: argparse.Namespace, cell: Cell) -> str:
    """Identify all that a result depends on."""
    names = MINI_KEY if cell.start == MINI else PRETRAINING_KEY
    names += TRANSLATION_KEY if cell.direction else ()
    settings = {name: getattr(options, name) for name in names}
    about = (options.pack / "pack.json").read_text()
    return hashlib.sha256(json.dumps([cell.name, settings, about]).encode()).hexdigest()[:16]


def do_all(options: argparse.Namespace) -> int:
    """Make the runs whose results are missing; count those that are missing still."""
    for name in ("cells", "models"):
        (options.out / name).mkdir(parents=True, exist_ok=True)
    unpack_results(options.out)
    wanted = list_cells(options)
    remove_leftovers(options.out, wanted)
    missing = [cell for cell in wanted if not has_result(options, cell)]
    needed = [cell.source for cell in missing if cell.source and not is_ready(options, cell)]
    to_do = list(dict.fromkeys([*missing, *filter(None, needed)]))
    print(f"{len(to_do)} runs of {len(wanted)} to do, {options.jobs} at a time", flush=True)
    execute_runs(options, RunQueue(options, to_do, partial(is_ready, options)), do_cell)
    return sum(not has_result(options, cell) for cell in wanted)


# One run.


def do_cell(options: argparse.Namespace, cell: Cell) -> None:
    """Train and score one run, and write its result."""
    import torch

    from calque.io.files import write_atomically
    from calque.models.loading import find_model
    from calque.training.loop import train

    set_room(cell)
    times = {"begin": time.perf_counter()}
    is_known = has_result(options, cell)  # the model alone is wanted
    is_trained = bool(cell.direction) or cell.method != NONE
    recipe, result = make_recipe(options, cell), {}
    with tempfile.TemporaryDirectory(prefix=f".{cell.name}.", dir=options.out) as place:
        run = Path(place) / "run"
        if cell.direction:
            result = learn_translation(options, cell, run)
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
    """Shorten the recipe of a run, and let it start where it should."""
    from calque.training.recipe_io import load_recipe

    settings = translation_settings if cell.direction else pretraining_settings
    name = "translate" if cell.direction else RECIPES.get(cell.method, "xlm-tlm")
    return load_recipe(name, [*settings(options, cell), *options.set])


def common_settings(options: argparse.Namespace, start: str | None, steps: int) -> list[str]:
    """Give what all recipes are changed in."""
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
        "data.validation_examples=0",  # nor is anything compiled for them
        f"schedule.steps={steps}",
        f"schedule.warmup={max(1, steps // 8)}",
        f"telemetry.every={max(1, steps // 10)}",
        f"engine.compile={'false' if options.eager else 'auto'}",
        f"engine.workers={'auto' if options.tiny else 1}",
    ]


def list_languages(options: argparse.Namespace) -> str:
    """Name all languages as a recipe does: so all decoders have the same tokens."""
    known = json.loads((options.pack / "pack.json").read_text())["languages"]
    return f"[{', '.join(['en', *known])}]"


def pretraining_settings(options: argparse.Namespace, cell: Cell) -> list[str]:
    """Give what a pre-training is: a stage of cross-attention alone only where there is a start."""
    is_mini = cell.start == MINI
    steps, rate = (
        (options.mini_steps, options.mini_rate) if is_mini else (options.steps, options.rate)
    )
    settings = common_settings(options, options.mini if is_mini else None, steps)
    settings += [
        f"objectives=[{OBJECTIVES.get(RECIPES.get(cell.method, ''), OBJECTIVES['xlm-tlm'])}]",
        *(f"objectives.{n}.batch_tokens={options.batch_tokens}" for n in (0, 1)),
        f"seed={cell.seed}",
        "model.dropout=0.0",  # a short run underfits rather than overfits
        "data.alpha=0.5",
        f"optimizer.learning_rate={rate}",
        "optimizer.betas=[0.9, 0.98]",
        "checkpoints.every=1000000000",
    ]
    if cell.method == "mbart":
        decoder = DECODERS[FULL].format(languages=list_languages(options))
        settings.append(f"model.decoder={decoder}")
    if cell.method in (PLUG, VECO):
        stage = max(1, round(FREEZE_SHARE * steps)) if is_mini and cell.method == VECO else "null"
        frozen = [f"freeze_steps={stage}"] if is_mini else ["freeze=[]", "freeze_steps=null"]
        settings += [f"model.cross_attention={'self' if is_mini else 'random'}", *frozen]
    return settings


def translation_settings(options: argparse.Namespace, cell: Cell) -> list[str]:
    """Give what a translation is learnt by."""
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
        "average={kind: none}",  # so short a curve has no plateau to average over
        f"checkpoints.every={max(1, options.updates // N_POINTS)}",
    ]


def read_speed(run: Path) -> float | None:
    """Give the usual tokens a second."""
    from calque.training.telemetry import METRICS, read_metrics

    rows = read_metrics(run / METRICS)
    speeds = [row["tokens_per_second"] for row in rows if row["kind"] == "train"]
    known = [speed for speed in speeds if speed is not None]
    return float(np.median(known)) if known else None


def learn_translation(options: argparse.Namespace, cell: Cell, run: Path) -> dict[str, Any]:
    """Train a translation, score it quickly along the way, and in the end by a proper search.

    Nothing is saved: so many checkpoints would take longer to write than to make.
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
    """Build a trainer that measures BLEU where it would save a checkpoint."""
    from calque.training.loop import Trainer

    recipe = state.recipe

    class CurveTrainer(Trainer):
        """Measures BLEU during training, and saves nothing."""

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
    """Translate a test set by a model in training, and score it."""
    from calque.evaluation.tasks.machine_translation import measure_translation, read_test_set
    from calque.translation.translate import Translator

    src, tgt = cell.direction.split("-")
    sources, references = read_test_set(folder / f"{name}.{src}", folder / f"{name}.{tgt}")
    run.module.eval()
    translator = Translator(run.encoder, beams=beams, tgt_lang=tgt, src_lang=src)
    with run.accelerator.autocast():
        found = measure_translation(translator, sources[:n_lines], references[:n_lines])
    run.module.train()
    return found


def set_room(cell: Cell) -> None:
    """Let both directions share a compiled step: German takes more than its half of a batch."""
    from calque.objectives import generation as translation

    translation.HALF = (11, 11) if cell.direction else (9, 9)


if __name__ == "__main__":
    main()
