"""Training speed: Calque's step, Hugging Face's Trainer on the same text, and the GPU's limit.

    python benchmarks/training_throughput.py TEXT [--shapes small,base] [--peer] [--profile]
    python benchmarks/training_throughput.py --tiny          # seconds on a CPU: checks the script

TEXT is a folder written by `calque prepare`; without it, the tests' few sentences are repeated,
which is enough for a check but not for a measurement. Every figure counts real tokens, not padding.
Both use the same sentences, the same model shape and the same vocabulary size.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from calque.training import start
from calque.training.loop import Trainer
from calque.training.recipe_io import parse_recipe
from calque.training.run import Run
from calque.training.sources import open_text, prepare_text

ROOT = Path(__file__).parent.parent


class Shape(NamedTuple):
    """The shape of a model, and the sizes of its batches."""

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    batch_tokens: int
    peer_rows: int


SHAPES = {
    "small": Shape(8, 384, 6, 1536, 28_096, 131_072, 1024),
    "base": Shape(12, 768, 12, 3072, 250_002, 65_536, 256),
    "tiny": Shape(1, 32, 2, 64, 28_096, 512, 4),
}


def make_recipe(shape: str, dropout: float, tokens: int | None = None) -> Any:
    """Return a recipe for MLM and TLM with a model of one shape."""
    sizes = SHAPES[shape]
    objective = {"batch_tokens": tokens or sizes.batch_tokens, "probability": 0.15}
    return parse_recipe(
        {
            "name": shape,
            "model": {
                "layers": sizes.layers,
                "hidden": sizes.hidden,
                "heads": sizes.heads,
                "intermediate": sizes.intermediate,
                "positions": 256,
                "dropout": dropout,
            },
            "objectives": [
                {"kind": "masked_lm", **objective},
                {"kind": "translation_lm", **objective},
            ],
            "schedule": {"steps": 1000, "warmup": 10},
            "optimizer": {"learning_rate": 1e-4},
        },
        "benchmark",
    )


def prepare_sample(folder: Path) -> Path:
    """Prepare the tests' sentences."""
    content = {
        "name": "sample",
        "tokenizer": {"path": "calque-mini"},
        "data": {"sources": [{"path": str(ROOT / "tests/data/en-??.tsv"), "kind": "bitext"}]},
        "objectives": [{"kind": "masked_lm"}],
    }
    prepare_text(parse_recipe(content, "sample"), ROOT, folder, n_workers=1)
    return folder


@contextmanager
def vocabulary_of(size: int) -> Iterator[None]:
    """Build models with more embeddings than the tokenizer has entries: what they cost."""
    build_config = start.build_config

    def build_wide_config(*arguments: Any) -> Any:
        config = build_config(*arguments)
        config.vocab_size = max(size, config.vocab_size)
        return config

    start.build_config = build_wide_config
    try:
        yield
    finally:
        start.build_config = build_config


def count_flops(shape: str, mean_square_length: float, mean_length: float) -> float:
    """Return floating-point operations per token, forward and backward: 6 per weight used."""
    sizes = SHAPES[shape]
    body = sizes.layers * (4 * sizes.hidden**2 + 2 * sizes.hidden * sizes.intermediate)
    head = 0.15 * (sizes.hidden**2 + sizes.hidden * sizes.vocabulary)
    attention = sizes.layers * 2 * sizes.hidden * mean_square_length / mean_length
    return 6 * (body + head + attention)


def measure_matmul(n: int, n_calls: int = 20) -> float:
    """Return the rate of matrix products of random numbers, in FLOP/s."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    synchronize()
    begin = time.perf_counter()
    for _ in range(n_calls):
        a @ b
    synchronize()
    return n_calls * 2 * n**3 / (time.perf_counter() - begin)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_calque(
    text: Path, shape: str, dropout: float, *, tokens: int | None, n_steps: int, profile: bool
) -> dict[str, Any]:
    """Time whole training steps, with batches built by the usual workers."""
    recipe = make_recipe(shape, dropout, tokens)
    with tempfile.TemporaryDirectory() as folder, vocabulary_of(SHAPES[shape].vocabulary):
        run = Run(recipe, text, Path(folder))
        trainer = Trainer(run)
        run.compile_step()
        loaders = run.open_loaders()
        begin = time.perf_counter()
        for _ in range(6):
            trainer.take_step(loaders)
        synchronize()
        compile_seconds = time.perf_counter() - begin
        run.take_new_tokens()
        begin = time.perf_counter()
        for _ in range(n_steps):
            trainer.take_step(loaders)
        synchronize()
        seconds = time.perf_counter() - begin
        speed = run.take_new_tokens() / seconds
        trainer.guard.check()
        flops = count_flops(shape, *length_moments(loaders))
        if profile:
            show_profile(trainer, loaders)
        loaders.clear()
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "who": "calque",
        "shape": shape,
        "dropout": dropout,
        "batch_tokens": recipe.objectives[0].batch_tokens,
        "tokens_per_second": round(speed),
        "tflops": round(speed * flops / 1e12, 4),
        "compile_seconds": round(compile_seconds, 1),
        "step_ms": round(1000 * seconds / n_steps, 2),
        "memory_gib": round(memory / 2**30, 1),
    }


def length_moments(loaders: Any) -> tuple[float, float]:
    """Return the mean squared and the mean sequence length of the next batches."""
    lengths = torch.cat(
        [b.tokens.offsets.diff() for loader in loaders for _, b in islice(loader, 2)]
    ).double()
    lengths = lengths[lengths > 0]
    return float(lengths.square().mean()), float(lengths.mean())


def show_profile(trainer: Trainer, loaders: Any) -> None:
    """Print the operations in which a step spends its time."""
    from torch.profiler import ProfilerActivity, profile

    activities, time_of = [ProfilerActivity.CPU], "self_cpu_time_total"
    if torch.cuda.is_available():
        activities, time_of = [*activities, ProfilerActivity.CUDA], "self_device_time_total"
    with profile(activities=activities) as profiler:
        for _ in range(3):
            trainer.take_step(loaders)
        synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -getattr(row, time_of))
    total = sum(getattr(row, time_of) for row in rows)
    print(f"time of a step: {total / 3000:.2f} ms")
    for row in rows[:26]:
        own = getattr(row, time_of)
        print(f"{own / total:6.1%} {own / 3000:8.3f} ms {row.count // 3:5d} {row.key[:100]}")


def measure_peer(text: Path, shape: str, *, compiled: bool, n_steps: int) -> dict[str, Any]:
    """Time Hugging Face's Trainer on the same sentences: padded batches, bf16, fused AdamW."""
    from transformers import DataCollatorForLanguageModeling, TrainingArguments
    from transformers import Trainer as PeerTrainer

    prepared, tokenizer = open_text(text)
    with vocabulary_of(SHAPES[shape].vocabulary):
        encoder = start.build_encoder(make_recipe(shape, 0.1), tokenizer)
    encoder.model.set_attn_implementation("sdpa")
    on_gpu = torch.cuda.is_available()
    collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.15, pad_to_multiple_of=64 if compiled else 8
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=SHAPES[shape].peer_rows,
            max_steps=n_steps,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            optim="adamw_torch_fused",
            train_sampling_strategy="group_by_length",
            dataloader_num_workers=8 if on_gpu else 0,
            torch_compile=compiled,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        clock = TokenClock(skip=n_steps // 3)
        trainer = PeerTrainer(
            encoder.model,
            arguments,
            train_dataset=peer_rows(text, prepared),
            data_collator=collator,
            callbacks=[clock],
        )
        training_step = trainer.training_step

        def count_and_train(model: Any, inputs: Any, *rest: Any) -> Any:
            clock.count(inputs["attention_mask"])
            return training_step(model, inputs, *rest)

        trainer.training_step = count_and_train  # type: ignore[method-assign]
        trainer.train()
    return {
        "who": "HF Trainer" + (" + torch.compile" if compiled else ""),
        "shape": shape,
        "dropout": 0.1,
        "rows": SHAPES[shape].peer_rows,
        "tokens_per_second": round(clock.speed()),
    }


def peer_rows(text: Path, prepared: Any) -> list[dict[str, Any]]:
    """Return single sentences and pairs of the same corpora, half of each, for padded batches."""
    from calque.tokens.store import TokenStore

    rows = []
    for corpus in prepared:
        src, tgt = (TokenStore.open(text / corpus.name / f"side{side}") for side in (0, 1))
        for k in range(min(1000, len(src))):
            a = src.ids[src.offsets[k] : src.offsets[k + 1]].tolist()
            b = tgt.ids[tgt.offsets[k] : tgt.offsets[k + 1]].tolist()
            pair = [0, *a, 2, 2, *b, 2]
            single = [0, *(a if k % 2 else b), 2]
            rows += [{"input_ids": ids} for ids in (pair, single) if len(ids) <= 128]
    return rows


class TokenClock:
    """A callback of Trainer that counts real tokens and time after the first steps."""

    def __init__(self, skip: int) -> None:
        self.skip, self.n_steps, self.n_tokens, self.begin, self.end = skip, 0, 0, 0.0, 0.0

    def count(self, mask: torch.Tensor) -> None:
        if self.n_steps == self.skip:
            synchronize()
            self.begin = time.perf_counter()
        if self.n_steps >= self.skip:
            self.n_tokens = self.n_tokens + mask.sum()  # type: ignore[assignment]
        self.n_steps += 1

    def speed(self) -> float:
        return float(self.n_tokens) / (self.end - self.begin)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.end = time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every shape, and print a line for each measurement."""
    n = 64 if options.tiny else 8192
    rate = measure_matmul(n)
    print(f"matrix products {n}^3 in bf16: {rate / 1e12:.4g} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        for number, dropout in enumerate(options.dropouts.split(",")):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            torch._dynamo.reset()
            row = measure_calque(
                options.text,
                shape,
                float(dropout),
                tokens=options.tokens,
                n_steps=options.steps,
                profile=options.profile and number == 0,
            )
            row["share_of_matmul"] = round(row["tflops"] * 1e12 / rate, 3)
            rows.append(row)
            print(json.dumps(row), flush=True)
        if options.peer:
            for compiled in (False, True) if options.peer_compiled else (False,):
                torch._dynamo.reset()
                n_steps = 3 if options.tiny else 60
                rows.append(measure_peer(options.text, shape, compiled=compiled, n_steps=n_steps))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--shapes", default="small,base")
    parser.add_argument("--dropouts", default="0.1,0")
    parser.add_argument("--tokens", type=int, help="Tokens per micro-batch.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peer", action="store_true", help="Measure Hugging Face's Trainer, too.")
    parser.add_argument("--peer-compiled", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="Run all code in seconds on a CPU.")
    parser.add_argument("--out", type=Path, help="File for the results, one JSON object per line.")
    options = parser.parse_args()
    if options.tiny:
        options.shapes, options.dropouts, options.steps = "tiny", "0.1", 2
        options.peer = options.profile = True
    elif not torch.cuda.is_available():
        print("skipped: this needs a CUDA GPU (or --tiny)")
        return
    with tempfile.TemporaryDirectory() as folder:
        options.text = options.text or prepare_sample(Path(folder))
        rows = measure_all(options)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
