"""Training speed on one GPU: Calque's step, the same in plain Hugging Face Trainer, and the limits.

    python benchmarks/training_throughput.py TEXT [--shapes small,base] [--peer] [--profile]

TEXT is a folder made by `calque prepare`; without it, the tests' few sentences are repeated, which
shows that all works but not how fast it is. Every figure counts real tokens: padding is not work.
The same prepared sentences, the same model shape and the same vocabulary size for both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from calque.training import loop
from calque.training import start as setup
from calque.training.recipe import check_recipe

ROOT = Path(__file__).parent.parent
SHAPES = {
    # layers, hidden, heads, intermediate, vocabulary, tokens of a micro-batch
    "small": (8, 384, 6, 1536, 24_000, 131_072),
    "base": (12, 768, 12, 3072, 250_002, 65_536),
}


def make_recipe(shape: str, dropout: float, tokens: int | None = None, steps: int = 1000) -> Any:
    """Describe MLM + TLM training of one shape."""
    layers, hidden, heads, intermediate, _, budget = SHAPES[shape]
    objective = {"batch_tokens": tokens or budget, "probability": 0.15}
    return check_recipe(
        {
            "name": shape,
            "model": {
                "layers": layers,
                "hidden": hidden,
                "heads": heads,
                "intermediate": intermediate,
                "positions": 256,
                "dropout": dropout,
            },
            "objectives": [
                {"kind": "masked_lm", **objective},
                {"kind": "translation_lm", **objective},
            ],
            "schedule": {"steps": steps, "warmup": 10},
            "optimizer": {"learning_rate": 1e-4},
        },
        "benchmark",
    )


def prepare_sample(folder: Path) -> Path:
    """Prepare the tests' sentences, for want of text."""
    content = {
        "name": "sample",
        "tokenizer": {"path": str(ROOT / "src/calque/data/models/calque-mini")},
        "data": {"sources": [{"path": str(ROOT / "tests/data/en-??.tsv"), "kind": "bitext"}]},
        "objectives": [{"kind": "masked_lm"}],
    }
    setup.prepare_text(check_recipe(content, "sample"), ROOT, folder, say=print, n_workers=1)
    return folder


def widen_vocabulary(size: int) -> None:
    """Give models more rows than the tokenizer has entries: the cost of a large vocabulary."""
    plain = getattr(setup, "_plain_config", setup.make_config)
    setup._plain_config = plain  # type: ignore[attr-defined]

    def make_config(*arguments: Any) -> Any:
        config = plain(*arguments)
        config.vocab_size = size
        return config

    setup.make_config = make_config


def count_flops(shape: str, mean_square_length: float, mean_length: float) -> float:
    """Floating-point operations a token needs, forward and backward: 6 a weight it meets."""
    layers, hidden, _, intermediate, vocabulary, _ = SHAPES[shape]
    body = layers * (4 * hidden**2 + 2 * hidden * intermediate)
    head = 0.15 * (hidden**2 + hidden * vocabulary)
    attention = layers * 2 * hidden * mean_square_length / mean_length
    return 6 * (body + head + attention)


def measure_matmul() -> float:
    """Measure the GPU's matrix rate on random data, in FLOP/s."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - start)


def measure_calque(
    text: Path, shape: str, dropout: float, *, tokens: int | None, n_steps: int, profile: bool
) -> dict[str, Any]:
    """Time whole training steps, batches built by the usual workers."""
    widen_vocabulary(SHAPES[shape][4])
    with tempfile.TemporaryDirectory() as folder:
        trainer = loop.Trainer(make_recipe(shape, dropout, tokens), text, Path(folder))
        trainer.compile_step()
        loaders = trainer._open_loaders()
        started = time.perf_counter()
        for _ in range(6):
            trainer._take_step(loaders)
        torch.cuda.synchronize()
        compiled = time.perf_counter() - started
        trainer.watch.take_tokens()
        start = time.perf_counter()
        for _ in range(n_steps):
            trainer._take_step(loaders)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        speed = trainer.watch.take_tokens() / seconds
        trainer.watch.check()
        lengths = length_moments(loaders)
        flops = count_flops(shape, *lengths)
        if profile:
            show_profile(trainer, loaders)
    return {
        "who": "calque",
        "shape": shape,
        "dropout": dropout,
        "batch_tokens": tokens or SHAPES[shape][5],
        "tokens_per_second": round(speed),
        "tflops": round(speed * flops / 1e12, 1),
        "compile_seconds": round(compiled, 1),
        "step_ms": round(1000 * seconds / n_steps, 2),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def length_moments(loaders: Any) -> tuple[float, float]:
    """Mean squared and mean sequence length of the next batches."""
    lengths = torch.cat(
        [b.tokens.offsets.diff() for loader in loaders for _, b in islice(loader, 2)]
    ).double()
    lengths = lengths[lengths > 0]
    return float(lengths.square().mean()), float(lengths.mean())


def show_profile(trainer: Any, loaders: Any) -> None:
    """Print which kernels a step spends its time in."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            trainer._take_step(loaders)
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"device time of a step: {total / 3000:.2f} ms")
    for row in rows[:26]:
        own = row.self_device_time_total
        print(f"{own / total:6.1%} {own / 3000:8.3f} ms {row.count // 3:5d} {row.key[:100]}")


def measure_trainer(text: Path, shape: str, *, compiled: bool, n_steps: int) -> dict[str, Any]:
    """Time Hugging Face Trainer on the same sentences: padded batches, bf16, fused AdamW."""
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    widen_vocabulary(SHAPES[shape][4])
    recipe = make_recipe(shape, 0.1)
    prepared, tokenizer = setup.open_text(text)
    encoder = setup.build_encoder(recipe, tokenizer)
    encoder.model.set_attn_implementation("sdpa")
    rows = peer_rows(text, prepared, tokenizer)
    n_rows = 1024 if shape == "small" else 256
    collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.15, pad_to_multiple_of=64 if compiled else 8
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=n_rows,
            max_steps=n_steps,
            bf16=True,
            optim="adamw_torch_fused",
            train_sampling_strategy="group_by_length",
            dataloader_num_workers=8,
            torch_compile=compiled,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        clock = _Clock(skip=n_steps // 3)
        trainer = Trainer(
            encoder.model, arguments, train_dataset=rows, data_collator=collator, callbacks=[clock]
        )
        inner = trainer.training_step

        def counting(model: Any, inputs: Any, *rest: Any) -> Any:
            clock.count(inputs["attention_mask"])
            return inner(model, inputs, *rest)

        trainer.training_step = counting  # type: ignore[method-assign]
        trainer.train()
    return {
        "who": "HF Trainer" + (" + torch.compile" if compiled else ""),
        "shape": shape,
        "dropout": 0.1,
        "rows": n_rows,
        "tokens_per_second": round(clock.speed()),
    }


def peer_rows(text: Path, prepared: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Half single sentences, half pairs, of the same corpora, for the padded trainer."""
    from calque.tokens.store import TokenStore

    rows = []
    for corpus in prepared:
        src, tgt = (TokenStore.open(text / corpus.name / f"side{side}") for side in (0, 1))
        for k in range(min(1000, len(src))):
            a = src.ids[src.offsets[k] : src.offsets[k + 1]].tolist()
            b = tgt.ids[tgt.offsets[k] : tgt.offsets[k + 1]].tolist()
            pair = [0, *a, 2, 2, *b, 2]
            one = [0, *(a if k % 2 else b), 2]
            rows += [{"input_ids": ids} for ids in (pair, one) if len(ids) <= 128]
    return rows


class _Clock:
    """A trainer callback that counts real tokens and time after the warm-up steps."""

    def __init__(self, skip: int) -> None:
        self.skip, self.n_steps, self.n_tokens, self.start, self.stop = skip, 0, 0, 0.0, 0.0

    def count(self, mask: torch.Tensor) -> None:
        if self.n_steps == self.skip:
            torch.cuda.synchronize()
            self.start = time.perf_counter()
        if self.n_steps >= self.skip:
            self.n_tokens = self.n_tokens + mask.sum()  # type: ignore[assignment]
        self.n_steps += 1

    def speed(self) -> float:
        return float(self.n_tokens) / (self.stop - self.start)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.stop = time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def main() -> None:
    """Read the options, and skip what cannot run here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--shapes", default="small,base")
    parser.add_argument("--dropouts", default="0.1,0")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-compiled", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA GPU, and there is none here: skipped")
        return
    with tempfile.TemporaryDirectory() as folder:
        options.text = options.text or prepare_sample(Path(folder))
        measure_all(options)


def measure_all(options: argparse.Namespace) -> None:
    """Measure every shape, and print a line for each."""
    rate = measure_matmul()
    print(f"matmul 8192^3 bf16: {rate / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    for shape in options.shapes.split(","):
        for number, dropout in enumerate(options.dropouts.split(",")):
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
                rows.append(measure_trainer(options.text, shape, compiled=compiled, n_steps=60))
                print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
