"""What a CA-MLM step of VECO costs beside a TLM step on the same pairs, timed in one run.

    python benchmarks/cross_attention.py TEXT [--shapes small,base] [--dropout 0.1]

TEXT is a folder made by `calque prepare`; without it, the tests' few sentences are repeated, which
shows that all works but not how fast it is. All steps see the same pairs, model and budget of
tokens. The first row of a shape is TLM alone, and `ratio` is a step's time over its time; the third
is CA-MLM while all but the cross-attention is frozen. `predicted` is what the operations say: of a
weight 2 a token forward, 2 for its own gradient and 2 for that of its input. CA-MLM reads each
sentence twice, the second time with a cross-attention more, whose keys' inputs have no gradient.
Rounds alternate between the steps, so that a clock that drifts does not favor one of them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import training_throughput as throughput
from denoising_alignment import MAX_LENGTH, Contender

from calque.training.recipe import check_recipe

STEPS = ("tlm", "cross_attention_lm", "cross_attention_lm, the rest frozen")


def make_recipe(shape: str, step: str, options: argparse.Namespace) -> Any:
    """Describe training of one shape with one of the objectives."""
    layers, hidden, heads, intermediate, _, budget = throughput.SHAPES[shape]
    kind = "translation_lm" if step == "tlm" else "cross_attention_lm"
    content: dict[str, Any] = {
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
        "objectives": [
            {
                "kind": kind,
                "batch_tokens": options.tokens or budget,
                "probability": options.probability,
            }
        ],
        "schedule": {"steps": 1000, "warmup": 10},
        "optimizer": {"learning_rate": 1e-4},
    }
    if step != "tlm":
        content["model"]["cross_attention"] = "self"
    if "frozen" in step:
        content["freeze"] = ["encoder.*", "!*.crossattention.*"]
    return check_recipe(content, "benchmark")


def predict_ratio(shape: str, step: str, probability: float) -> float:
    """Compare the operations of a step with those of TLM's, a token and a row of attention each."""
    layers, hidden, _, intermediate, vocabulary, _ = throughput.SHAPES[shape]
    mixing = 2 * hidden * MAX_LENGTH
    layer = 4 * hidden**2 + 2 * hidden * intermediate + mixing
    head = probability * (hidden**2 + hidden * vocabulary)
    tlm = 6 * (layers * layer + head)
    asking, asked = 2 * hidden**2 + mixing, 2 * hidden**2
    if step == "tlm":
        return 1.0
    if "frozen" in step:  # one way forward; back through S, to weights of the cross-attention alone
        alone, frozen = 2 * (layers * layer + head), 4 * (layers * layer + head)
        return (alone + frozen + layers * (6 * asking + 4 * asked)) / tlm
    return (2 * tlm + layers * (6 * asking + 4 * asked)) / tlm


def measure_shape(shape: str, options: argparse.Namespace, text: Path) -> list[dict[str, Any]]:
    """Time all steps in turns, and print a line for each."""
    throughput.widen_vocabulary(throughput.SHAPES[shape][4])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        contenders = [
            Contender(step, make_recipe(shape, step, options), text, Path(folder) / str(number))
            for number, step in enumerate(STEPS)
        ]
        compiled = [contender.warm_up(options.warmup) for contender in contenders]
        for _ in range(options.rounds):
            for contender in contenders:
                contender.take_steps(options.steps)
        tlm = median(contenders[0].times)
        n_taken = options.rounds * options.steps
        for contender, seconds in zip(contenders, compiled, strict=True):
            row = {
                "who": contender.name,
                "shape": shape,
                "dropout": options.dropout,
                "step_ms": round(median(contender.times), 2),
                "spread_ms": round(max(contender.times) - min(contender.times), 2),
                "tokens_a_step": contender.trainer.watch.take_tokens() // n_taken,
                "ratio": round(median(contender.times) / tlm, 3),
                "predicted": round(predict_ratio(shape, contender.name, options.probability), 3),
                "compile_seconds": round(seconds, 1),
            }
            contender.trainer.watch.check()
            rows.append(row)
            print(json.dumps(row), flush=True)
        if options.profile:
            throughput.show_profile(contenders[1].trainer, contenders[1].loaders)
        for contender in contenders:
            contender.loaders.clear()
    return rows


def main() -> None:
    """Read the options, and choose shapes that this machine can bear."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--shapes", default="small,base" if on_gpu else "tiny")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--probability", type=float, default=0.25)
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
