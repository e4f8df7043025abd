"""Time a CA-MLM step of VECO against a TLM step on the same pairs.

    python benchmarks/cross_attention.py TEXT [--shapes small,base] [--dropout 0.1]
    python benchmarks/cross_attention.py --tiny          (all of its code in a few seconds)

TEXT is a folder made by `calque prepare`. Without it, the few sentences of the tests are repeated,
which shows that everything works but not how fast it is. All steps see the same pairs, the same
model and the same token budget. The first row of a shape is TLM alone, and `ratio` is the time of a
step divided by that of TLM; the third row is CA-MLM with everything but the cross-attention frozen.
`predicted` is the ratio of operations: per weight and token 2 forward, 2 for its own gradient and 2
for that of its input. CA-MLM encodes each sentence twice, the second time with cross-attention,
whose keys have no gradient for their inputs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from denoising_alignment import (
    MAX_LENGTH,
    SHAPES,
    Rows,
    TimedStep,
    make_parser,
    make_recipe,
    measure,
    run_rounds,
)

STEPS = ("tlm", "cross_attention_lm", "cross_attention_lm, the rest frozen")


def make_step(
    name: str, shape: str, options: argparse.Namespace, text: Path, folder: Path
) -> TimedStep:
    """Return one of the steps."""
    if name == "tlm":
        return TimedStep(
            name, make_recipe(shape, {"kind": "translation_lm"}, options), text, folder
        )
    frozen = {"freeze": ["encoder.*", "!*.crossattention.*"]} if "frozen" in name else {}
    objective, model = {"kind": "cross_attention_lm"}, {"cross_attention": "self"}
    return TimedStep(
        name, make_recipe(shape, objective, options, model=model, **frozen), text, folder
    )


def predict_ratio(shape: str, step: str, probability: float) -> float:
    """Return the ratio of the operations of a step and of TLM, for rows of full length."""
    layers, hidden, _, intermediate, vocabulary, _ = SHAPES[shape]
    mixing = 2 * hidden * MAX_LENGTH
    layer = 4 * hidden**2 + 2 * hidden * intermediate + mixing
    head = probability * (hidden**2 + hidden * vocabulary)
    tlm = 6 * (layers * layer + head)
    queries, keys = 2 * hidden**2 + mixing, 2 * hidden**2
    if step == "tlm":
        return 1.0
    if "frozen" in step:  # H forward only; S backward to weights of the cross-attention only
        alone, frozen = 2 * (layers * layer + head), 4 * (layers * layer + head)
        return (alone + frozen + layers * (6 * queries + 4 * keys)) / tlm
    return (2 * tlm + layers * (6 * queries + 4 * keys)) / tlm


def measure_shape(shape: str, options: argparse.Namespace, text: Path, folder: Path) -> Rows:
    """Time all steps in turns; print a line for each."""
    steps = [
        make_step(name, shape, options, text, folder / str(number))
        for number, name in enumerate(STEPS)
    ]
    compiled = run_rounds(steps, options)
    rows, n_steps = [], options.rounds * options.steps
    for step, seconds in zip(steps, compiled, strict=True):
        row = step.describe(shape, options.dropout, seconds) | {
            "tokens_a_step": step.run.take_new_tokens() // n_steps,
            "ratio": round(median(step.times) / median(steps[0].times), 3),
            "predicted": round(predict_ratio(shape, step.name, options.probability), 3),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        step.loaders.clear()
    return rows


if __name__ == "__main__":
    measure(make_parser(__doc__.splitlines()[0], probability=0.25).parse_args(), measure_shape)
