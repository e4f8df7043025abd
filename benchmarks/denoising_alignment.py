"""Time a step of denoising word alignment (XLM-Align) against a TLM step on the same pairs.

    python benchmarks/denoising_alignment.py TEXT [--shapes small,base] [--layer auto,5] [--share 1]
    python benchmarks/denoising_alignment.py --tiny          (all of its code in a few seconds)

TEXT is a folder made by `calque prepare`. Without it, the few sentences of the tests are repeated,
which shows that everything works but not how fast it is. Both objectives see the same pairs, the
same model and the same token budget. The first row of a shape is TLM alone, and `ratio` is the time
of a step divided by that of TLM. `predicted` is the ratio of operations: 2 per weight forward
without gradients, 6 with gradients. Rounds alternate between the steps, so that a drifting clock
does not favor one of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from calque.training import start
from calque.training.loop import Trainer
from calque.training.recipe_io import parse_recipe
from calque.training.run import Run
from calque.training.sources import prepare_text

ROOT = Path(__file__).parent.parent
MAX_LENGTH = 128
# layers, hidden size, heads, intermediate size, vocabulary, tokens per micro-batch
SHAPES = {
    "tiny": (2, 32, 2, 64, 38_400, 1_024),
    "cpu": (4, 128, 2, 512, 38_400, 4_096),
    "small": (8, 384, 6, 1536, 38_400, 131_072),
    "base": (12, 768, 12, 3072, 250_002, 65_536),
}
Rows = list[dict[str, Any]]


def describe_model(shape: str, dropout: float) -> dict[str, Any]:
    """Return the model section of a recipe."""
    layers, hidden, heads, intermediate, _, _ = SHAPES[shape]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": intermediate}
    return {**sizes, "positions": 256, "dropout": dropout}


def make_recipe(
    shape: str, objective: dict[str, Any], options: argparse.Namespace, **sections: Any
) -> Any:
    """Return the recipe of one shape with one objective."""
    budget = options.tokens or SHAPES[shape][5]
    content: dict[str, Any] = {
        "name": shape,
        "model": describe_model(shape, options.dropout),
        "data": {"max_length": MAX_LENGTH},
        "objectives": [{"batch_tokens": budget, "probability": options.probability, **objective}],
        "schedule": {"steps": 1000, "warmup": 10},
        "optimizer": {"learning_rate": 1e-4},
    }
    model = content["model"] | sections.pop("model", {})
    return parse_recipe(content | {"model": model} | sections, "benchmark")


class TimedStep:
    """One objective with a run of its own, and the times of its steps in milliseconds."""

    def __init__(self, name: str, recipe: Any, text: Path, folder: Path) -> None:
        self.name, self.times = name, list[float]()
        self.run = Run(recipe, text, folder)
        self.trainer = Trainer(self.run)
        self.run.compile_step()
        self.loaders = self.run.open_loaders()

    def take_steps(self, n_steps: int) -> None:
        """Time some steps."""
        self.times.append(time_calls(lambda: self.trainer.take_step(self.loaders), n_steps))

    def warm_up(self, n_steps: int) -> float:
        """Compile; return the seconds it took."""
        self.take_steps(n_steps)
        self.run.take_new_tokens()
        return self.times.pop() * n_steps / 1000

    def time_labels(self, n_steps: int) -> float:
        """Return the time of self-labeling alone, on one batch."""
        engine, (objective,) = self.run.accelerator, self.run.objectives
        batch = next(self.loaders[0])[1].to(engine.device)

        def label() -> None:
            with engine.autocast():
                objective.prepare(self.run.encoder, batch)

        return time_calls(label, n_steps)

    def describe(self, shape: str, dropout: float, compile_seconds: float) -> dict[str, Any]:
        """Return the columns that all rows have."""
        self.trainer.guard.check()
        return {
            "who": self.name,
            "shape": shape,
            "dropout": dropout,
            "step_ms": round(median(self.times), 2),
            "spread_ms": round(max(self.times) - min(self.times), 2),
            "compile_seconds": round(compile_seconds, 1),
        }


def time_calls(function: Callable[[], object], n_calls: int) -> float:
    """Return the mean time of a call in milliseconds."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(n_calls):
        function()
    synchronize()
    return 1000 * (time.perf_counter() - begin) / n_calls


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_rounds(steps: Sequence[TimedStep], options: argparse.Namespace) -> list[float]:
    """Run all steps in turn; return the seconds that each of them needed to compile."""
    compiled = [step.warm_up(options.warmup) for step in steps]
    for _ in range(options.rounds):
        for step in steps:
            step.take_steps(options.steps)
    return compiled


@contextmanager
def vocabulary_of(size: int) -> Iterator[None]:
    """Build new models with this vocabulary size instead of that of the tokenizer."""
    build_config = start.build_config

    def build(*arguments: Any) -> Any:
        config = build_config(*arguments)
        config.vocab_size = size
        return config

    with mock.patch.object(start, "build_config", build):
        yield


def predict_ratio(
    shape: str, layer: int, share: float, moments: tuple[float, float], probability: float
) -> float:
    """Return the ratio of the operations of both steps."""
    layers, hidden, _, intermediate, vocabulary, _ = SHAPES[shape]
    mean_square, mean = moments
    by_layer = 4 * hidden**2 + 2 * hidden * intermediate + 2 * hidden * mean_square / mean
    head = probability * (hidden**2 + hidden * vocabulary)
    pointer = probability * 2 * hidden**2 + hidden * MAX_LENGTH
    tlm = 6 * (layers * by_layer + head)
    labels = 2 * share * (layer * by_layer + hidden * MAX_LENGTH)
    return 1 + (labels + 6 * pointer) / tlm


def length_moments(loaders: Any) -> tuple[float, float]:
    """Return the mean squared and the mean sequence length of the next batches."""
    batches = [batch for loader in loaders for _, batch in islice(loader, 2)]
    lengths = torch.cat([batch.tokens.offsets.diff() for batch in batches]).double()
    lengths = lengths[lengths > 0]
    return float(lengths.square().mean()), float(lengths.mean())


def measure_shape(shape: str, options: argparse.Namespace, text: Path, folder: Path) -> Rows:
    """Time TLM and the objective with every layer and share; print a line for each."""
    n_layers, rows = SHAPES[shape][0], []
    positions = {"positions": "continue"}
    tlm = make_recipe(shape, {"kind": "translation_lm", **positions}, options)
    steps = [TimedStep("tlm", tlm, text, folder / "tlm")]
    choices: list[tuple[int, float]] = []
    for word in options.layer.split(","):
        layer = round(10 / 12 * n_layers) if word == "auto" else int(word)
        for share in map(float, options.share.split(",")):
            objective = {
                "kind": "denoising_alignment",
                "label_layer": layer,
                "label_share": share,
                "similarity": options.similarity,
                **positions,
            }
            name = f"denoising_alignment, layer {layer}, share {share:g}"
            recipe = make_recipe(shape, objective, options)
            steps.append(TimedStep(name, recipe, text, folder / str(len(steps))))
            choices.append((layer, share))
    compiled = run_rounds(steps, options)
    moments = length_moments(steps[0].loaders)
    for number, (step, seconds) in enumerate(zip(steps, compiled, strict=True)):
        row = step.describe(shape, options.dropout, seconds)
        if number:
            layer, share = choices[number - 1]
            predicted = predict_ratio(shape, layer, share, moments, options.probability)
            row |= {
                "ratio": round(median(step.times) / median(steps[0].times), 3),
                "predicted": round(predicted, 3),
                "label_ms": round(step.time_labels(options.steps), 2),
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
    for step in steps:
        step.loaders.clear()
    return rows


def make_parser(description: str, probability: float) -> argparse.ArgumentParser:
    """Return a parser of the options that both benchmarks of objectives have."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--shapes", default="small,base" if on_gpu else "cpu")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--probability", type=float, default=probability)
    parser.add_argument("--tokens", type=int, help="tokens per batch")
    parser.add_argument("--warmup", type=int, default=6 if on_gpu else 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10 if on_gpu else 2, help="steps per round")
    parser.add_argument("--out", type=Path, help="file for the rows, one JSON object per line")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, one step")
    return parser


def measure(
    options: argparse.Namespace,
    measure_one: Callable[[str, argparse.Namespace, Path, Path], Rows],
) -> None:
    """Measure all shapes and write the rows."""
    if options.tiny:
        options.shapes, options.rounds, options.steps = "tiny", 1, 1
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = options.text or prepare_sample(folder / "text")
        for shape in options.shapes.split(","):
            torch._dynamo.reset()
            with vocabulary_of(SHAPES[shape][4]):
                rows += measure_one(shape, options, text, folder / shape)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare_sample(folder: Path) -> Path:
    """Prepare the sentences of the tests."""
    content = {
        "name": "sample",
        "tokenizer": {"path": "calque-mini"},
        "data": {"sources": [{"path": str(ROOT / "tests/data/en-??.tsv"), "kind": "bitext"}]},
        "objectives": [{"kind": "masked_lm"}],
    }
    prepare_text(parse_recipe(content, "sample"), ROOT, folder, n_workers=1)
    return folder


def main() -> None:
    """Read the options and measure."""
    parser = make_parser(__doc__.splitlines()[0], probability=0.15)
    parser.add_argument("--layer", default="auto", help="label layers; auto means 10/12")
    parser.add_argument("--share", default="1", help="fractions of the pairs to label")
    parser.add_argument("--similarity", default="dot", choices=["dot", "cosine"])
    measure(parser.parse_args(), measure_shape)


if __name__ == "__main__":
    main()
