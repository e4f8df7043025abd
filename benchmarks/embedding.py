"""Speed of sentence embedding, side by side: Calque, plain transformers, sentence-transformers.

All embed the same sentences at the last layer of the same model; "bare forward" is the encoder
alone on sorted batches that were tokenized before. bf16 is measured on CPUs with instructions for
it. Rounds alternate, and the best of each counts.

    python benchmarks/embedding.py --text sentences.txt --threads 1
    python benchmarks/embedding.py --tiny
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from calque.io.files import read_lines
from calque.models.encoder import Encoder
from calque.models.inference import has_fast_bf16
from calque.models.loading import build_model, find_model
from calque.sentences.embed import embed_sentences
from calque.tokens.tokenizer import load_tokenizer

Embed = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one run, and CPU seconds of all cores."""

    wall: float
    cpu: float


def main() -> None:
    options = parse_options()
    if options.tiny:
        options.limit, options.rounds, options.threads = 8, 1, 1
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    limit = options.limit or (2000 if options.text else 100)
    sentences = read_sentences(options.text, limit)
    with tempfile.TemporaryDirectory() as scratch:
        folder = locate_model(options, Path(scratch))
        programs = list_programs(folder, sentences, options.batch_size)
        check_agreement(programs)
        show(measure(programs, options.rounds), len(sentences))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="calque-mini", help="folder of an encoder")
    parser.add_argument("--tokenizer", help="folder: a random 6 × 384 encoder with this tokenizer")
    parser.add_argument("--text", help="one sentence per line; default: those of the demo")
    parser.add_argument("--limit", type=int, help="sentences; default: 2000, or 100 of the demo")
    parser.add_argument("--threads", type=int, default=0, help="0: the default of torch")
    parser.add_argument("--batch-size", type=int, default=32, help="of the other programs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="8 sentences, once")
    return parser.parse_args()


def read_sentences(path: str | None, limit: int) -> list[str]:
    if path is not None:
        return [line for line in read_lines(path) if line.strip()][:limit]
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    return [part for line in table.splitlines()[1:] for part in line.split("\t")[1:]][:limit]


def locate_model(options: argparse.Namespace, scratch: Path) -> Path:
    if options.tokenizer is None:
        return find_model(options.model)
    from transformers import XLMRobertaConfig

    tokenizer = load_tokenizer(options.tokenizer)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    Encoder(build_model(config), tokenizer).save(scratch)
    return scratch


def list_programs(folder: Path, sentences: list[str], batch_size: int) -> dict[str, Embed]:
    """Return the programs to compare; all but the bare forward return vectors."""
    encoder = Encoder.load(folder)
    programs: dict[str, Embed] = {
        "calque": lambda: embed_sentences(encoder, sentences, layer=-1),
        "transformers, input order": plain_loop(folder, sentences, batch_size),
        "bare forward, sorted": bare_forward(folder, sentences, batch_size),
    }
    if has_fast_bf16():
        half = Encoder.load(folder, dtype=torch.bfloat16)
        programs["calque, bf16"] = lambda: embed_sentences(half, sentences, layer=-1)
    if importlib.util.find_spec("sentence_transformers") is None:
        print("sentence-transformers is not installed and left out")
    else:
        programs["sentence-transformers"] = sentence_transformers(folder, sentences, batch_size)
    return programs


def plain_loop(folder: Path, sentences: list[str], batch_size: int) -> Embed:
    from transformers import AutoModel

    tokenizer = load_tokenizer(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed() -> np.ndarray:
        parts = []
        for batch in slices(sentences, batch_size):
            inputs = tokenizer(
                batch, padding=True, return_tensors="pt", return_special_tokens_mask=True
            )
            text = (1 - inputs.pop("special_tokens_mask"))[..., None]
            states = model(**inputs).last_hidden_state
            parts.append((states * text).sum(1) / text.sum(1))
        return torch.cat(parts).numpy()

    return embed


def bare_forward(folder: Path, sentences: list[str], batch_size: int) -> Embed:
    from transformers import AutoModel

    tokenizer = load_tokenizer(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    in_order = sorted(sentences, key=lambda text: len(tokenizer(text)["input_ids"]))
    batches = [
        tokenizer(batch, padding=True, return_tensors="pt")
        for batch in slices(in_order, batch_size)
    ]

    @torch.inference_mode()
    def embed() -> None:
        for batch in batches:
            model(**batch)

    return embed


def sentence_transformers(folder: Path, sentences: list[str], batch_size: int) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")  # adds mean pooling by itself
    return lambda: model.encode(sentences, batch_size=batch_size, show_progress_bar=False)


def slices(items: Sequence[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def check_agreement(programs: dict[str, Embed]) -> None:
    """Run everything once, and check that two programs return the same vectors."""
    results = {name: embed() for name, embed in programs.items()}
    difference = np.abs(results["calque"] - results["transformers, input order"]).max()
    if difference > 1e-3:
        raise SystemExit(f"the vectors differ by {difference:.2g}")


def measure(programs: dict[str, Embed], n_rounds: int) -> dict[str, Timing]:
    runs: dict[str, list[Timing]] = {name: [] for name in programs}
    for _ in range(n_rounds):
        for name, embed in programs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            embed()
            timing = Timing(time.perf_counter() - wall, time.process_time() - cpu)
            runs[name].append(timing)
    return {
        name: Timing(min(run.wall for run in mine), min(run.cpu for run in mine))
        for name, mine in runs.items()
    }


def show(timings: dict[str, Timing], n_sentences: int) -> None:
    print(f"{n_sentences:,} sentences, {torch.get_num_threads()} threads")
    print(f"{'':28}{'sentences/s':>12}{'CPU s/1,000':>13}{'CPU ÷ calque':>14}")
    for name, timing in timings.items():
        rate, cost = n_sentences / timing.wall, 1000 * timing.cpu / n_sentences
        print(f"{name:28}{rate:12,.0f}{cost:13.2f}{timing.cpu / timings['calque'].cpu:14.2f}")


if __name__ == "__main__":
    main()
