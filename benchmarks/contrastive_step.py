"""Time steps of the explicit alignment objectives against the encoder alone.

    python benchmarks/contrastive_step.py [TEXT] [--shapes mini,base] [--modes compiled,eager]
        [--objectives weak,strong] [--pairs 128]
    python benchmarks/contrastive_step.py --tiny          (all of its code in a few seconds)

TEXT is a folder made by `calque prepare` from linked bitext. Without it, sentences and links are
random. All steps see the same pairs, packed in the same way, and the same model; a step is forward
and backward, without the optimizer. The first row is the encoder alone, with the mean square of its
last states as the loss. `ratio` is the time of a step divided by that of the encoder alone, the
median over rounds in which all steps take turns. `+ λ` adds the distance to the pretrained weights.
The last rows are the alternatives: plain Hugging Face with padding and cross-entropy over the
batch, and sentence-transformers if it is installed. On a GPU steps are also compiled, as in
training: about half a minute each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from denoising_alignment import synchronize, vocabulary_of
from torch import Tensor
from torch.nn import functional as F

from calque.models.encoder import Encoder
from calque.models.loading import find_model
from calque.objectives import build_objective
from calque.objectives.base import Objective, ObjectiveSettings
from calque.objectives.regularization import PretrainedWeights
from calque.tokens.linked import pack_links
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.streams import BatchStream, StreamPosition
from calque.tokens.tokenizer import SpecialTokens, load_tokenizer
from calque.training.data import choose_shape, open_stream
from calque.training.recipe_io import parse_recipe
from calque.training.sources import open_text
from calque.training.start import build_encoder
from calque.training.step import TrainStep
from calque.types import LossTerms

# layers, hidden size, heads, intermediate size, vocabulary
SHAPES = {
    "tiny": (1, 32, 2, 64, 38_400),
    "cpu": (2, 128, 2, 256, 38_400),
    "mini": (8, 384, 6, 768, 38_400),
    "base": (12, 768, 12, 3072, 250_002),
}
WORDS = {"kind": "word_contrastive"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "weak": WORDS | {"negatives": "weak"},
    "strong": WORDS | {"negatives": "strong"},
    "weak-queue": WORDS | {"negatives": "weak", "queue": 4096},
    "strong-queue": WORDS | {"negatives": "strong", "queue": 4096},
    "l2": {"kind": "l2"},
    "sentences": {"kind": "sentence_contrastive"},
}
MAX_LENGTH = 96
SEED = 1
Example = tuple[Ragged, ...]


class EncoderOnly(Objective):
    """The encoder alone, with a loss that costs nothing."""

    def __init__(self) -> None:
        super().__init__(ObjectiveSettings(kind="encoder"))

    def forward(self, encoder: Encoder, batch: Any) -> LossTerms:
        """Return the mean square of the last states."""
        (states,) = encoder(batch.tokens, [encoder.n_layers])
        return LossTerms(states.float().square().mean(), {})


class StepTimer:
    """Takes steps on its own batches and records how long they take."""

    def __init__(self, name: str, step: Callable[[Any], Tensor], batches: Sequence[Any]) -> None:
        self.name, self.step, self.batches = name, step, cycle(batches)
        self.n_batches, self.loss = len(batches), float("nan")
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def take_steps(self, n_steps: int) -> None:
        """Time some steps."""
        synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in islice(self.batches, n_steps):
            loss = self.step(batch)
        synchronize()
        self.wall.append(1000 * (time.perf_counter() - wall) / n_steps)
        self.cpu.append((time.process_time() - cpu) / n_steps)
        self.loss = float(loss)

    def warm_up(self) -> float:
        """Compile for all batches; return the seconds it took."""
        self.take_steps(2 * self.n_batches)
        self.cpu.clear()
        return self.wall.pop() * 2 * self.n_batches / 1000


def read_examples(text: Path, n_pairs: int, n_batches: int) -> tuple[list[Example], BatchShape]:
    """Return the first batches of linked bitext, and their shape in a compiled step."""
    prepared, tokenizer = open_text(text)
    objective = build_objective(make_settings(OBJECTIVES["weak"], n_pairs))
    section = parse_recipe(recipe_of("cpu", 0.0, {"kind": "masked_lm"}), "benchmark").data
    stream = open_stream(
        objective,
        prepared,
        text,
        section,
        SpecialTokens.of(tokenizer),
        seed=SEED,
        fixed_shape=True,
    ).training
    plain = BatchStream(stream.corpora, stream.limits, lambda sides, _: sides, SEED)
    iterator = plain.iterate(StreamPosition(), lambda number: True)
    examples = [sides for _, sides in islice(iterator, 4 * n_batches) if sides is not None]
    collate: Any = stream.collate
    return choose_alike(examples, n_batches), collate.shape


def draw_examples(
    n_pairs: int, n_batches: int, vocabulary: int
) -> tuple[list[Example], BatchShape]:
    """Return random sentences of 4 to 30 words, two thirds of them linked."""
    generator = np.random.default_rng(SEED)
    examples = [draw_batch(generator, n_pairs, vocabulary) for _ in range(4 * n_batches)]
    lengths = np.stack([np.concatenate([e[side].lengths for e in examples]) for side in (0, 1)], 1)
    objective = build_objective(make_settings(OBJECTIVES["weak"], n_pairs))
    shape, _ = choose_shape(objective, lengths + 2, 4, MAX_LENGTH)
    return choose_alike(examples, n_batches), shape


def choose_alike(examples: Sequence[Example], n_batches: int) -> list[Example]:
    """Return batches with the most common capacity for links, the shape of a compiled step."""
    capacities = Counter((len(example[4].ids) - 1).bit_length() for example in examples)
    usual = capacities.most_common(1)[0][0]
    alike = [e for e in examples if (len(e[4].ids) - 1).bit_length() == usual]
    return alike[:n_batches]


def draw_batch(generator: np.random.Generator, n_pairs: int, vocabulary: int) -> Example:
    """Return both sides, the subword counts of their words, and one-to-one links."""
    n_words = generator.integers(4, 31, size=(2, n_pairs))
    pieces = [[1 + generator.poisson(0.4, n) for n in side] for side in n_words]
    sides = [[generator.integers(5, vocabulary, sum(p)) for p in side] for side in pieces]
    lines = []
    for n_src, n_tgt in n_words.T:
        n_links = max(1, 2 * min(n_src, n_tgt) // 3)
        i, j = (generator.choice(n, n_links, replace=False) for n in (n_src, n_tgt))
        lines.append(" ".join(f"{src}-{tgt}" for src, tgt in zip(i, j, strict=True)))
    links = pack_links(lines, *n_words, "random", range(n_pairs))
    return (*map(Ragged.of, (*sides, *pieces)), links)


def make_settings(objective: dict[str, Any], n_pairs: int) -> Any:
    """Return the settings of an objective; the token budget fits all pairs."""
    sizes = {"batch_examples": n_pairs, "batch_tokens": 2 * MAX_LENGTH * n_pairs}
    content = recipe_of("cpu", 0.0, objective | sizes)
    return parse_recipe(content, "benchmark").objectives[0]


def recipe_of(shape: str, dropout: float, objective: dict[str, Any]) -> dict[str, Any]:
    layers, hidden, heads, intermediate, _ = SHAPES[shape]
    return {
        "name": shape,
        "model": {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "intermediate": intermediate,
            "positions": 128,
            "dropout": dropout,
        },
        "data": {"max_length": MAX_LENGTH},
        "objectives": [objective],
    }


def make_encoder(shape: str, dropout: float, tokenizer: Any, device: str) -> Encoder:
    """Return an encoder of a shape with random weights."""
    recipe = parse_recipe(recipe_of(shape, dropout, {"kind": "masked_lm"}), "benchmark")
    with vocabulary_of(SHAPES[shape][4]):
        return build_encoder(recipe, tokenizer).to(device).train()


def make_step(module: Any, device: str) -> Callable[[Any], Tensor]:
    """Return a step of a module that returns its loss first: forward (bf16 on a GPU), backward."""

    def step(batch: Any) -> Tensor:
        module.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss: Tensor = module(batch)[0]
        loss.backward()
        return loss.detach()

    return step


def make_timers(
    encoder: Encoder,
    examples: Sequence[Example],
    shape: BatchShape | None,
    options: argparse.Namespace,
) -> list[StepTimer]:
    """Return the encoder alone, and the objectives with and without the regularizer."""
    device = next(encoder.parameters()).device.type
    special_tokens, reference = (
        SpecialTokens.of(encoder.tokenizer),
        PretrainedWeights.of(encoder, "device"),
    )
    made: list[tuple[str, Objective, list[Any]]] = []
    for name in options.objectives.split(","):
        for weight in (0.0, 1.0):
            content = OBJECTIVES[name] | {"parameter_weight": weight}
            settings = make_settings(content, options.pairs)
            objective: Any = build_objective(settings)
            objective.add_weights(encoder.hidden_size, torch.Generator().manual_seed(SEED))
            objective.pretrained = reference if weight else None  # one copy for all
            collate = objective.build_collator(special_tokens, shape)
            batches = [collate(example, torch.Generator()).to(device) for example in examples]
            made.append((name + (" + λ" if weight else ""), objective, batches))
    first = made[0][2]
    for name, _, batches in made:
        for one, other in zip(first, batches, strict=True):
            assert torch.equal(one.tokens.ids, other.tokens.ids), f"{name}: other tokens"
    found = []
    for name, objective, batches in [("encoder alone", EncoderOnly(), first), *made]:
        module = TrainStep(encoder, [objective]).to(device).train()
        if shape is not None:
            module.compile_objectives()
        step = make_step(module, device)
        found.append(StepTimer(name, step, [[batch] for batch in batches]))
    return found


class InBatchCrossEntropy(torch.nn.Module):
    """Plain Hugging Face on padded sentences, as in most scripts."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, sides: Sequence[dict[str, Tensor]]) -> tuple[Tensor]:
        """Return the cross-entropy of finding the translation among all sentences of the batch."""
        src, tgt = (F.normalize(self._pool(side), dim=-1) for side in sides)
        with torch.autocast(src.device.type, enabled=False):
            scores = src.float() @ tgt.float().T / 0.05
        return (F.cross_entropy(scores, torch.arange(len(scores), device=scores.device)),)

    def _pool(self, side: dict[str, Tensor]) -> Tensor:
        states = self.body(**side).last_hidden_state
        mask = side["attention_mask"][..., None].to(states.dtype)
        return (states * mask).sum(dim=1) / mask.sum(dim=1)


class _Loss(torch.nn.Module):
    """A loss of sentence-transformers with the interface of the other modules."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, sides: Sequence[dict[str, Tensor]]) -> tuple[Tensor]:
        return (self.loss([dict(side) for side in sides], None),)


def pad_examples(
    example: Example, special_tokens: SpecialTokens, device: str
) -> list[dict[str, Tensor]]:
    """Return the padded sentences of both sides."""
    cls_id, sep_id, pad_id = special_tokens.cls_id, special_tokens.sep_id, special_tokens.pad_id
    padded = []
    for side in example[:2]:
        rows = np.split(side.ids, np.cumsum(side.lengths)[:-1])
        width = int(side.lengths.max()) + 2
        ids = np.full((len(rows), width), pad_id)
        for number, row in enumerate(rows):
            ids[number, : len(row) + 2] = [cls_id, *row, sep_id]
        tokens = torch.from_numpy(ids).to(device)
        padded.append({"input_ids": tokens, "attention_mask": (tokens != pad_id).long()})
    return padded


def make_peers(
    shape: str, dropout: float, tokenizer: Any, examples: Sequence[Example], device: str
) -> Iterator[StepTimer]:
    """Return the alternatives, on a model of the same shape with the library's own attention."""
    encoder = make_encoder(shape, dropout, tokenizer, device)
    encoder.model.set_attn_implementation("sdpa")
    special_tokens = SpecialTokens.of(tokenizer)
    batches = [pad_examples(example, special_tokens, device) for example in examples]
    body = encoder.family.get_body(encoder.model)
    module = InBatchCrossEntropy(body).train()
    yield StepTimer("Hugging Face, padded sentences", make_step(module, device), batches)
    try:
        from sentence_transformers import SentenceTransformer, losses, models
    except ImportError:
        return
    with tempfile.TemporaryDirectory() as folder:
        encoder.save(Path(folder))
        part = models.Transformer(folder)
    pooling = models.Pooling(encoder.hidden_size, "mean")
    model = SentenceTransformer(modules=[part, pooling], device=device)
    loss = _Loss(losses.MultipleNegativesRankingLoss(model)).train()
    yield StepTimer("sentence-transformers", make_step(loss, device), batches)


def measure(timers: Sequence[StepTimer], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all steps in turns, every other round in reverse, and compare with the first."""
    warm = [timer.warm_up() for timer in timers]
    for number in range(options.rounds):
        for timer in timers if number % 2 == 0 else reversed(timers):
            timer.take_steps(options.steps)
    base = timers[0]
    return [
        {
            "who": timer.name,
            "step_ms": round(median(timer.wall), 2),
            "spread_ms": round(max(timer.wall) - min(timer.wall), 2),
            "ratio": round(compare(timer.wall, base.wall), 3),
            "cpu_seconds": round(median(timer.cpu), 4),
            "cpu_ratio": round(compare(timer.cpu, base.cpu), 3),
            "warm_up_seconds": round(seconds, 1),
            "loss": round(timer.loss, 4),
        }
        for timer, seconds in zip(timers, warm, strict=True)
    ]


def compare(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios by round, which cancels slowdowns of whole rounds."""
    return median(a / b for a, b in zip(times, base, strict=True))


def measure_shape(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one shape in every mode."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.text is None:
        tokenizer = load_tokenizer(find_model("calque-mini"))
        examples, fixed = draw_examples(options.pairs, options.batches, len(tokenizer))
    else:
        tokenizer = open_text(options.text)[1]
        examples, fixed = read_examples(options.text, options.pairs, options.batches)
    rows = []
    for mode in options.modes.split(","):
        torch._dynamo.reset()
        encoder = make_encoder(shape, options.dropout, tokenizer, device)
        encoder.use_fused_layers = mode == "compiled" and encoder.can_fuse
        layout = fixed if mode == "compiled" else None
        timers = make_timers(encoder, examples, layout, options)
        if mode == "eager":
            timers += make_peers(shape, options.dropout, tokenizer, examples, device)
        about = {"shape": shape, "mode": mode, "device": device, **describe(examples)}
        measured = [about | row for row in measure(timers, options)]
        print_table(measured)
        rows += measured
    return rows


def describe(examples: Sequence[Example]) -> dict[str, float]:
    """Return the mean size of a batch."""
    counts = [(len(e[0].lengths), len(e[0].ids) + len(e[1].ids), len(e[4].ids)) for e in examples]
    names = ("pairs", "tokens", "links")
    return {name: round(float(n), 1) for name, n in zip(names, np.mean(counts, 0), strict=True)}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of one shape and mode."""
    first = rows[0]
    print(
        f"\n{first['shape']}, {first['mode']} on {first['device']}: {first['pairs']:.0f} pairs,"
        f" {first['tokens']:.0f} tokens, {first['links']:.0f} links"
    )
    print(f"{'':32}{'ms':>10}{'± ms':>9}{'ratio':>8}{'CPU s':>9}{'ratio':>8}{'warm-up s':>11}")
    for row in rows:
        print(
            f"{row['who']:32}{row['step_ms']:10.2f}{row['spread_ms']:9.2f}{row['ratio']:8.3f}"
            f"{row['cpu_seconds']:9.4f}{row['cpu_ratio']:8.3f}{row['warm_up_seconds']:11.1f}",
            flush=True,
        )


def main() -> None:
    """Read the options and measure."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--shapes", default="mini,base" if on_gpu else "cpu")
    parser.add_argument("--modes", default="compiled,eager" if on_gpu else "eager")
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--pairs", type=int, default=128 if on_gpu else 32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batches", type=int, default=8 if on_gpu else 2, help="different batches")
    parser.add_argument("--rounds", type=int, default=10 if on_gpu else 5)
    parser.add_argument("--steps", type=int, default=16 if on_gpu else 2, help="steps per round")
    parser.add_argument("--out", type=Path, help="file for the rows, one JSON object per line")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, few pairs, one step")
    options = parser.parse_args()
    if options.tiny:
        options.shapes, options.pairs, options.batches = "tiny", 4, 1
        options.rounds, options.steps = 1, 1
    # All steps share the encoder's code, which is compiled for each of them.
    torch._dynamo.config.recompile_limit = 128
    rows = [row for shape in options.shapes.split(",") for row in measure_shape(shape, options)]
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
