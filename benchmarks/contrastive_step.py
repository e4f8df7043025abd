"""What alignment adds to the encoder's own work: whole steps over bare ones, timed in one run.

    python benchmarks/contrastive_step.py [TEXT] [--shapes mini,base] [--modes compiled,eager]
        [--objectives weak,strong] [--pairs 128]

TEXT is a folder made by `calque prepare` from linked bitext; without it, sentences and links are
drawn at random. All contenders see the same pairs, packed the same way, and the same model; a step
is forward and backward, without the optimizer. The first row is the encoder alone, with the mean
square of its last states for a loss: the two sentences of every pair through the network and back.
`ratio` is a step's time over that one's, the median over rounds in which all contenders take turns.
`+ λ` adds the distance to the pre-trained weights. The last rows are what one would use instead:
plain Hugging Face with padding and cross-entropy over the batch, by hand, and sentence-transformers
where it is installed. On a GPU steps are also compiled, as in training: about half a minute each.
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
import training_throughput as throughput
from torch import Tensor
from torch.nn import functional as F

from calque.models.encoder import Encoder
from calque.models.loading import find_folder
from calque.objectives import build_objective
from calque.objectives.base import Marks, Objective, ObjectiveSettings
from calque.objectives.regression import PretrainedWeights
from calque.tokens.linked import pack_links
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.streams import BatchStream, Place
from calque.tokens.tokenizer import load_tokenizer
from calque.training import data
from calque.training import start as setup
from calque.training.recipe import check_recipe
from calque.training.step import TrainStep
from calque.types import LossTerms

# layers, hidden, heads, intermediate, vocabulary
SHAPES = {
    "tiny": (2, 128, 2, 256, 18_304),
    "mini": (8, 384, 6, 768, 18_304),
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


class Bare(Objective):
    """The encoder's own work, on the tokens of any batch."""

    def __init__(self) -> None:
        super().__init__(ObjectiveSettings(kind="bare"))

    def forward(self, encoder: Encoder, batch: Any) -> LossTerms:
        """Give a loss that costs nothing."""
        (states,) = encoder(batch.tokens, [encoder.n_layers])
        return LossTerms(states.float().square().mean(), {})


class Contender:
    """Something that takes steps on batches of its own, and how long it took."""

    def __init__(self, name: str, step: Callable[[Any], Tensor], batches: Sequence[Any]) -> None:
        self.name, self.step, self.batches = name, step, cycle(batches)
        self.n_batches, self.loss = len(batches), float("nan")
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def take_steps(self, n_steps: int) -> None:
        """Time some steps."""
        wait()
        wall, cpu = time.perf_counter(), time.process_time()
        for batch in islice(self.batches, n_steps):
            loss = self.step(batch)
        wait()
        self.wall.append(1000 * (time.perf_counter() - wall) / n_steps)
        self.cpu.append((time.process_time() - cpu) / n_steps)
        self.loss = float(loss)

    def warm_up(self) -> float:
        """Compile for all batches, and give the seconds it took."""
        self.take_steps(2 * self.n_batches)
        self.cpu.clear()
        return self.wall.pop() * 2 * self.n_batches / 1000


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Text.


def read_examples(text: Path, n_pairs: int, n_batches: int) -> tuple[list[Example], BatchShape]:
    """Take the first batches of linked bitext, and the shape that a compiled step has for them."""
    prepared, tokenizer = setup.open_text(text)
    objective = build_objective(make_settings(OBJECTIVES["weak"], n_pairs))
    section = check_recipe(recipe_of("tiny", 0.0, {"kind": "masked_lm"}), "benchmark").data
    stream = data.open_stream(
        objective,
        prepared,
        text,
        section,
        Marks.of(tokenizer),
        seed=SEED,
        fixed_shape=True,
    ).training
    plain = BatchStream(stream.corpora, stream.plan, lambda sides, _: sides, SEED)
    walk = plain.walk(Place(), lambda number: True)
    examples = [sides for _, sides in islice(walk, 4 * n_batches) if sides is not None]
    return choose_alike(examples, n_batches), stream.collate.shape


def draw_examples(
    n_pairs: int, n_batches: int, vocabulary: int
) -> tuple[list[Example], BatchShape]:
    """Draw sentences of 4 to 30 words, of some subwords each, two thirds of them linked."""
    generator = np.random.default_rng(SEED)
    examples = [draw_batch(generator, n_pairs, vocabulary) for _ in range(4 * n_batches)]
    lengths = np.stack([np.concatenate([e[side].lengths for e in examples]) for side in (0, 1)], 1)
    objective = build_objective(make_settings(OBJECTIVES["weak"], n_pairs))
    shape, _ = data._plan(objective, lengths + 2, 4, MAX_LENGTH)
    return choose_alike(examples, n_batches), shape


def choose_alike(examples: Sequence[Example], n_batches: int) -> list[Example]:
    """Choose batches with room for as many links as most have: a compiled step has that shape."""
    room = Counter((len(example[4].ids) - 1).bit_length() for example in examples)
    usual = room.most_common(1)[0][0]
    alike = [e for e in examples if (len(e[4].ids) - 1).bit_length() == usual]
    return alike[:n_batches]


def draw_batch(generator: np.random.Generator, n_pairs: int, vocabulary: int) -> Example:
    """Draw both sides, the subwords of their words, and links of one word with one."""
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
    """Check the settings of an objective; tokens are as many as the pairs can have."""
    sizes = {"batch_examples": n_pairs, "batch_tokens": 2 * MAX_LENGTH * n_pairs}
    content = recipe_of("tiny", 0.0, objective | sizes)
    return check_recipe(content, "benchmark").objectives[0]


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


# Steps.


def make_encoder(shape: str, dropout: float, tokenizer: Any, device: str) -> Encoder:
    """Make an encoder of a shape with random weights."""
    throughput.widen_vocabulary(SHAPES[shape][4])
    recipe = check_recipe(recipe_of(shape, dropout, {"kind": "masked_lm"}), "benchmark")
    return setup.build_encoder(recipe, tokenizer).to(device).train()


def go_through(module: Any, device: str) -> Callable[[Any], Tensor]:
    """Make a step of a module that gives a loss first: forward in bf16 on a GPU, and backward."""

    def step(batch: Any) -> Tensor:
        module.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss: Tensor = module(batch)[0]
        loss.backward()
        return loss.detach()

    return step


def make_contenders(
    encoder: Encoder,
    examples: Sequence[Example],
    shape: BatchShape | None,
    options: argparse.Namespace,
) -> list[Contender]:
    """Make the bare step and those of the objectives, without and with the regulariser."""
    device = next(encoder.parameters()).device.type
    marks, reference = Marks.of(encoder.tokenizer), PretrainedWeights.of(encoder, "device")
    made: list[tuple[str, Objective, list[Any]]] = []
    for name in options.objectives.split(","):
        for weight in (0.0, 1.0):
            content = OBJECTIVES[name] | {"parameter_weight": weight}
            settings = make_settings(content, options.pairs)
            objective: Any = build_objective(settings)
            objective.add_weights(encoder.hidden_size, torch.Generator().manual_seed(SEED))
            objective.pretrained = reference if weight else None  # one copy for all
            collate = objective.make_collate(marks, shape)
            batches = [collate(example, torch.Generator()).to(device) for example in examples]
            made.append((name + (" + λ" if weight else ""), objective, batches))
    first = made[0][2]
    for name, _, batches in made:
        for one, other in zip(first, batches, strict=True):
            assert torch.equal(one.tokens.ids, other.tokens.ids), f"{name}: other tokens"
    found = []
    for name, objective, batches in [("bare", Bare(), first), *made]:
        module = TrainStep(encoder, [objective]).to(device).train()
        if shape is not None:
            module.compile_objectives()
        step = go_through(module, device)
        found.append(Contender(name, step, [[batch] for batch in batches]))
    return found


# Peers.


class InBatchCrossEntropy(torch.nn.Module):
    """Plain Hugging Face on padded sentences: what most scripts do, and sentence-transformers."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, sides: Sequence[dict[str, Tensor]]) -> tuple[Tensor]:
        """Encode both sides, average, and find each sentence's translation among all."""
        src, tgt = (F.normalize(self._pool(side), dim=-1) for side in sides)
        with torch.autocast(src.device.type, enabled=False):
            scores = src.float() @ tgt.float().T / 0.05
        return (F.cross_entropy(scores, torch.arange(len(scores), device=scores.device)),)

    def _pool(self, side: dict[str, Tensor]) -> Tensor:
        states = self.body(**side).last_hidden_state
        mask = side["attention_mask"][..., None].to(states.dtype)
        return (states * mask).sum(dim=1) / mask.sum(dim=1)


class _Loss(torch.nn.Module):
    """A loss of sentence-transformers, called like the other modules."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, sides: Sequence[dict[str, Tensor]]) -> tuple[Tensor]:
        return (self.loss([dict(side) for side in sides], None),)


def pad_examples(example: Example, marks: Marks, device: str) -> list[dict[str, Tensor]]:
    """Lay the sentences of either side out in rows that are as long as the longest."""
    padded = []
    for side in example[:2]:
        rows = np.split(side.ids, np.cumsum(side.lengths)[:-1])
        width = int(side.lengths.max()) + 2
        ids = np.full((len(rows), width), marks.pad)
        for number, row in enumerate(rows):
            ids[number, : len(row) + 2] = [marks.first, *row, marks.last]
        tokens = torch.from_numpy(ids).to(device)
        padded.append({"input_ids": tokens, "attention_mask": (tokens != marks.pad).long()})
    return padded


def make_peers(
    shape: str, dropout: float, tokenizer: Any, examples: Sequence[Example], device: str
) -> Iterator[Contender]:
    """Make the peers, on a model of the same shape with the library's own attention."""
    encoder = make_encoder(shape, dropout, tokenizer, device)
    encoder.model.set_attn_implementation("sdpa")
    marks = Marks.of(tokenizer)
    batches = [pad_examples(example, marks, device) for example in examples]
    body = encoder.family.body_of(encoder.model)
    module = InBatchCrossEntropy(body).train()
    yield Contender("Hugging Face, padded sentences", go_through(module, device), batches)
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
    yield Contender("sentence-transformers", go_through(loss, device), batches)


# Measuring.


def measure(contenders: Sequence[Contender], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all contenders in turns, every other round backwards, and compare with the first."""
    warm = [contender.warm_up() for contender in contenders]
    for number in range(options.rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            contender.take_steps(options.steps)
    bare = contenders[0]
    return [
        {
            "who": contender.name,
            "step_ms": round(median(contender.wall), 2),
            "spread_ms": round(max(contender.wall) - min(contender.wall), 2),
            "ratio": round(compare(contender.wall, bare.wall), 3),
            "cpu_seconds": round(median(contender.cpu), 4),
            "cpu_ratio": round(compare(contender.cpu, bare.cpu), 3),
            "warm_up_seconds": round(seconds, 1),
            "loss": round(contender.loss, 4),
        }
        for contender, seconds in zip(contenders, warm, strict=True)
    ]


def compare(mine: Sequence[float], base: Sequence[float]) -> float:
    """Give the median of the rounds' ratios: what slows a whole round cancels."""
    return median(a / b for a, b in zip(mine, base, strict=True))


def measure_shape(shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one shape, as training runs it on this machine and without compiling."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.text is None:
        tokenizer = load_tokenizer(find_folder("calque-mini"))
        examples, fixed = draw_examples(options.pairs, options.batches, len(tokenizer))
    else:
        tokenizer = setup.open_text(options.text)[1]
        examples, fixed = read_examples(options.text, options.pairs, options.batches)
    rows = []
    for mode in options.modes.split(","):
        torch._dynamo.reset()
        encoder = make_encoder(shape, options.dropout, tokenizer, device)
        encoder.fuses = mode == "compiled" and encoder.can_fuse
        layout = fixed if mode == "compiled" else None
        contenders = make_contenders(encoder, examples, layout, options)
        if mode == "eager":
            contenders += make_peers(shape, options.dropout, tokenizer, examples, device)
        about = {"shape": shape, "mode": mode, "device": device, **describe(examples)}
        measured = [about | row for row in measure(contenders, options)]
        print_table(measured)
        rows += measured
    return rows


def describe(examples: Sequence[Example]) -> dict[str, float]:
    """Say how large a batch is on average."""
    counts = [(len(e[0].lengths), len(e[0].ids) + len(e[1].ids), len(e[4].ids)) for e in examples]
    names = ("pairs", "tokens", "links")
    return {name: round(float(n), 1) for name, n in zip(names, np.mean(counts, 0), strict=True)}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows of one shape and mode."""
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
    """Read the options, and choose what this machine can bear."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--shapes", default="mini,base" if on_gpu else "tiny")
    parser.add_argument("--modes", default="compiled,eager" if on_gpu else "eager")
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--pairs", type=int, default=128 if on_gpu else 32)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batches", type=int, default=8 if on_gpu else 2, help="different ones")
    parser.add_argument("--rounds", type=int, default=10 if on_gpu else 5)
    parser.add_argument("--steps", type=int, default=16 if on_gpu else 2, help="steps a round")
    parser.add_argument("--out", type=Path, help="a line of JSON for each row")
    options = parser.parse_args()
    # All contenders share the encoder's code, which is compiled for each of them.
    torch._dynamo.config.recompile_limit = 128
    rows = [row for shape in options.shapes.split(",") for row in measure_shape(shape, options)]
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
