"""What self-labelling and the pointer add to a TLM step: both steps, timed in one run.

    python benchmarks/denoising_alignment.py TEXT [--shapes small,base] [--layer auto,5] [--share 1]

TEXT is a folder made by `calque prepare`; without it, the tests' few sentences are repeated, which
shows that all works but not how fast it is. Both objectives see the same pairs, the same model and
the same budget of tokens; the first row of a shape is TLM alone, and `ratio` is a step's time over
its time. `predicted` is what the operations say: 2 a weight forward without gradients, 6 with.
Rounds alternate between the steps, so that a clock that drifts does not favor one of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import training_throughput as throughput

from calque.training import loop
from calque.training.recipe import check_recipe

# A shape for a machine without a GPU: it shows that all works, and the ratio on a CPU.
throughput.SHAPES["tiny"] = (4, 128, 2, 512, 18_304, 4_096)
MAX_LENGTH = 128


def make_recipe(shape: str, objective: dict[str, Any], options: argparse.Namespace) -> Any:
    """Describe training of one shape with one objective."""
    layers, hidden, heads, intermediate, _, budget = throughput.SHAPES[shape]
    common = {
        "batch_tokens": options.tokens or budget,
        "probability": options.probability,
        "positions": "continue",
    }
    return check_recipe(
        {
            "name": shape,
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "intermediate": intermediate,
                "positions": 256,
                "dropout": options.dropout,
            },
            "data": {"max_length": MAX_LENGTH},
            "objectives": [common | objective],
            "schedule": {"steps": 1000, "warmup": 10},
            "optimizer": {"learning_rate": 1e-4},
        },
        "benchmark",
    )


def count_operations(
    shape: str, moments: tuple[float, float], probability: float
) -> tuple[float, float, float]:
    """Multiply-adds a token: those of a forward pass a layer, of the head, and of the pointer."""
    _, hidden, _, intermediate, vocabulary, _ = throughput.SHAPES[shape]
    square, mean = moments
    layer = 4 * hidden**2 + 2 * hidden * intermediate + 2 * hidden * square / mean
    head = probability * (hidden**2 + hidden * vocabulary)
    pointer = probability * 2 * hidden**2 + hidden * MAX_LENGTH
    return layer, head, pointer


def predict_ratio(
    shape: str, layer: int, share: float, moments: tuple[float, float], probability: float
) -> float:
    """Compare the operations of both steps."""
    layers, hidden = throughput.SHAPES[shape][:2]
    by_layer, head, pointer = count_operations(shape, moments, probability)
    tlm = 6 * (layers * by_layer + head)
    labels = 2 * share * (layer * by_layer + hidden * MAX_LENGTH)
    return 1 + (labels + 6 * pointer) / tlm


class Contender:
    """One objective with a trainer of its own, ready to take steps."""

    def __init__(self, name: str, recipe: Any, text: Path, folder: Path) -> None:
        self.name, self.times, self.n_tokens = name, [], 0
        self.trainer = loop.Trainer(recipe, text, folder)
        self.trainer.compile_step()
        self.loaders = self.trainer._open_loaders()

    def take_steps(self, n_steps: int) -> None:
        """Time some steps."""
        wait()
        start = time.perf_counter()
        for _ in range(n_steps):
            self.trainer._take_step(self.loaders)
        wait()
        self.times.append(1000 * (time.perf_counter() - start) / n_steps)

    def warm_up(self, n_steps: int) -> float:
        """Compile, and give the seconds it took."""
        self.take_steps(n_steps)
        self.trainer.watch.take_tokens()
        return self.times.pop() * n_steps / 1000

    def time_labels(self, n_steps: int) -> float:
        """Time self-labelling alone, on one batch, in milliseconds."""
        engine, (objective,) = self.trainer.accelerator, self.trainer.module.objectives
        batch = next(self.loaders[0])[1].to(engine.device)
        wait()
        start = time.perf_counter()
        for _ in range(n_steps):
            with engine.autocast():
                objective.prepare(self.trainer.encoder, batch)
        wait()
        return 1000 * (time.perf_counter() - start) / n_steps


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_contenders(
    shape: str, options: argparse.Namespace, text: Path, folder: Path
) -> list[tuple[Contender, int | None, float]]:
    """TLM alone, and the objective with every layer and share asked for."""
    n_layers = throughput.SHAPES[shape][0]
    tlm = make_recipe(shape, {"kind": "translation_lm"}, options)
    found: list[tuple[Contender, int | None, float]] = [
        (Contender("tlm", tlm, text, folder / "tlm"), None, 0.0)
    ]
    for word in options.layer.split(","):
        layer = round(10 / 12 * n_layers) if word == "auto" else int(word)
        for share in map(float, options.share.split(",")):
            objective = {
                "kind": "denoising_alignment",
                "label_layer": layer,
                "label_share": share,
                "similarity": options.similarity,
            }
            name = f"denoising_alignment, layer {layer}, share {share:g}"
            recipe = make_recipe(shape, objective, options)
            found.append((Contender(name, recipe, text, folder / name), layer, share))
    return found


def measure_shape(shape: str, options: argparse.Namespace, text: Path) -> list[dict[str, Any]]:
    """Time all contenders in turns, and print a line for each."""
    throughput.widen_vocabulary(throughput.SHAPES[shape][4])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        contenders = make_contenders(shape, options, text, Path(folder))
        compiled = [contender.warm_up(options.warmup) for contender, _, _ in contenders]
        for _ in range(options.rounds):
            for contender, _, _ in contenders:
                contender.take_steps(options.steps)
        moments = throughput.length_moments(contenders[0][0].loaders)
        tlm = median(contenders[0][0].times)
        for (contender, layer, share), seconds in zip(contenders, compiled, strict=True):
            row = {
                "who": contender.name,
                "shape": shape,
                "dropout": options.dropout,
                "step_ms": round(median(contender.times), 2),
                "spread_ms": round(max(contender.times) - min(contender.times), 2),
                "compile_seconds": round(seconds, 1),
            }
            if layer is not None:
                predicted = predict_ratio(shape, layer, share, moments, options.probability)
                row |= {
                    "ratio": round(median(contender.times) / tlm, 3),
                    "predicted": round(predicted, 3),
                    "label_ms": round(contender.time_labels(options.steps), 2),
                }
            contender.trainer.watch.check()
            rows.append(row)
            print(json.dumps(row), flush=True)
        if options.profile:
            for contender, _, _ in contenders[:2]:
                print(contender.name)
                throughput.show_profile(contender.trainer, contender.loaders)
        for contender, _, _ in contenders:
            contender.loaders.clear()
    return rows


def main() -> None:
    """Read the options, and choose shapes that this machine can bear."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--shapes", default="small,base" if on_gpu else "tiny")
    parser.add_argument("--layer", default="auto", help="label layers, or auto: ten twelfths")
    parser.add_argument("--share", default="1", help="shares of the pairs to label")
    parser.add_argument("--similarity", default="dot", choices=["dot", "cosine"])
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--probability", type=float, default=0.15)
    parser.add_argument("--tokens", type=int, help="tokens of a batch")
    parser.add_argument("--warmup", type=int, default=6 if on_gpu else 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10 if on_gpu else 2, help="steps a round")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = options.text or throughput.prepare_sample(Path(folder))
        rows = []
        for shape in options.shapes.split(","):
            torch._dynamo.reset()
            rows += measure_shape(shape, options, text)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
