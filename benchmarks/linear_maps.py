"""Time and memory of linear maps compared with the forward pass of the encoder.

    python benchmarks/linear_maps.py [--shapes mini,base] [--solvers procrustes] [--languages 8]
        [--pairs 128] [--rounds 5] [--total 0] [--json FILE]
    python benchmarks/linear_maps.py --tiny

Sentences and links are random: every pair has 30 tokens per side and 10 links. `forward` computes
the states of linked words at all layers. The other rows use these states: a closed form adds them
to its sums, from batches of one language; `gradient` takes a step on a batch of all languages
(loss, gradient, Adam, orthogonal step). `ratio` is the time divided by that of the forward pass, as
the median over alternating rounds; `1M pairs` extrapolates to one pass over a million pairs.
`solve` is measured for one language and multiplied by their number. With --total N, the states of
one batch are added until N pairs are counted, which shows that memory does not grow. `peak` is the
peak memory of the process or of the GPU, including all solvers.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import XLMRobertaConfig

from calque.algorithms.procrustes import PairSums, solve_least_squares, solve_procrustes
from calque.models.encoder import Encoder
from calque.models.loading import build_model, find_model
from calque.objectives.linear_map import LinearMap, LinearMapSettings, LinkStates, PairRoles
from calque.objectives.linked_words import WordPairBatch
from calque.tokens.ragged import Ragged
from calque.tokens.tokenizer import SpecialTokens, load_tokenizer

# layers, hidden, heads, intermediate, vocabulary
SHAPES = {
    "tiny": (2, 128, 2, 256, 18_304),
    "mini": (8, 384, 6, 768, 18_304),
    "base": (12, 768, 12, 3072, 250_002),
}
N_TOKENS, N_LINKS = 30, 10


def build_encoder(shape: str, device: torch.device) -> Encoder:
    """Return an encoder with random weights."""
    layers, hidden, heads, intermediate, vocabulary = SHAPES[shape]
    config = XLMRobertaConfig(
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=130,
        type_vocab_size=1,
        pad_token_id=1,
    )
    tokenizer = load_tokenizer(find_model("calque-mini"))
    encoder = Encoder(build_model(config), tokenizer).to(device).eval().requires_grad_(False)
    return encoder.to(torch.bfloat16) if device.type == "cuda" else encoder


def draw_batch(encoder: Encoder, n_pairs: int) -> WordPairBatch:
    """Return pairs whose words have one subword each; equal positions are linked."""
    generator = np.random.default_rng(0)
    lengths = np.full(n_pairs, N_TOKENS)
    sides = [Ragged(generator.integers(10, 10_000, lengths.sum()), lengths) for _ in range(2)]
    words = Ragged(np.ones(lengths.sum(), dtype=np.int64), lengths)
    positions = np.tile(np.arange(N_LINKS), n_pairs)
    links = Ragged(positions << 20 | positions << 8 | 255, np.full(n_pairs, N_LINKS))
    languages = Ragged(np.zeros(n_pairs, dtype=np.int64), np.ones(n_pairs, dtype=np.int64))
    collate = LinearMap(LinearMapSettings()).build_collator(
        SpecialTokens.of(encoder.tokenizer), None
    )
    batch = collate((*sides, words, words, links, languages), torch.Generator())
    return batch.to(next(encoder.parameters()).device)


class Contenders:
    """The kinds of work to be compared, each as a function without arguments."""

    def __init__(self, shape: str, options: argparse.Namespace, device: torch.device) -> None:
        n_languages, n_pairs, solvers = options.languages, options.pairs, options.solvers.split(",")
        self.encoder = build_encoder(shape, device)
        self.batch = draw_batch(self.encoder, n_pairs)
        names = [f"en-x{number:02d}" for number in range(n_languages)]
        self.objective, self.roles = LinearMap(LinearMapSettings()), PairRoles.of(names, "en")
        self.linked: LinkStates = self.read()
        mixed = torch.arange(n_pairs * N_LINKS, device=device) % n_languages
        self.mixed = replace(self.linked, languages=mixed)
        self.sums: dict[str, PairSums] = {}
        self.works: dict[str, Callable[[], Any]] = {"forward": self.read}
        for name in solvers:
            self.works[name] = self.start_steps(names) if name == "gradient" else self.sum_up(name)

    def sum_up(self, solver: str) -> Callable[[], None]:
        stack, gram = (len(self.roles.languages), len(self.linked.src)), solver == "least_squares"
        self.sums[solver] = PairSums.zeros(
            stack, self.encoder.hidden_size, gram=gram, device=self.linked.src.device
        )
        return lambda: self.add(solver)

    def start_steps(self, names: list[str]) -> Callable[[], None]:
        self.objective.start(self.encoder, names)
        self.optimizer = torch.optim.Adam([self.objective.maps], lr=1e-4)
        return self.take_step

    def read(self) -> LinkStates:
        return self.objective.encode_links(self.encoder, self.batch, self.roles)

    def add(self, solver: str) -> None:
        sums = self.sums[solver]
        for language, rows in enumerate(self.linked.split(len(sums.weights))):
            for layer in range(sums.weights.shape[1]) if len(rows) else ():
                src, tgt = self.linked.src[layer, rows], self.linked.tgt[layer, rows]
                sums.add((language, layer), src, tgt, self.linked.weights[rows])

    def take_step(self) -> None:
        self.optimizer.zero_grad()
        self.objective(self.encoder, self.mixed).loss.backward()
        self.optimizer.step()
        self.objective.after_step()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(work: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that some work takes."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in GB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(shape: str, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure all kinds of work at one shape."""
    contenders = Contenders(shape, options, device)
    times: dict[str, list[float]] = {name: [] for name in contenders.works}
    for number in range(options.rounds + 1):  # the first round is a warm-up
        for name, work in contenders.works.items():
            seconds = clock(work, device)
            times[name] += [seconds] if number else []
    growth = {
        solver: count_on(contenders, solver, options, device)
        for solver in (contenders.sums if options.total else ())
    }
    cpu, solve, sizes = torch.device("cpu"), {}, {}
    for solver, sums in contenders.sums.items():
        own = sums.select(0)
        solve[solver] = clock(partial(solve_one, own), cpu) * options.languages
        sizes[solver] = sum(tensor.nbytes for tensor in sums.tensors()) / 1e9
    if "gradient" in times:  # maps, the best of them, gradient, two moments
        sizes["gradient"] = 5 * contenders.objective.maps.nbytes / 1e9
    return {
        "shape": shape,
        "languages": options.languages,
        "pairs": options.pairs,
        "seconds": {name: median(values) for name, values in times.items()},
        "solve_seconds": solve,
        "sums_gb": sizes,
        "peak_gb": peak_memory(device),
        "growth": growth,
    }


def count_on(
    contenders: Contenders, solver: str, options: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Add the same states many times; return the seconds and the growth of memory."""
    before, start = peak_memory(device), time.perf_counter()
    for _ in range(-(-options.total // options.pairs)):
        contenders.add(solver)
    wait(device)
    return {
        "pairs": options.total,
        "seconds": time.perf_counter() - start,
        "more_memory_gb": peak_memory(device) - before,
    }


def solve_one(sums: PairSums) -> torch.Tensor:
    """Solve the maps of one language on the CPU."""
    if sums.gram is None:
        return solve_procrustes(sums.cross.cpu())
    return solve_least_squares(sums.gram.cpu(), sums.cross.cpu())


def tabulate(found: dict[str, Any], device: torch.device) -> Table:
    layers, hidden = SHAPES[found["shape"]][:2]
    title = f"{found['languages']} languages × {layers + 1} layers × {hidden}² on {device.type}"
    table = Table(title=f"{title}; peak {found['peak_gb']:.2f} GB")
    for name in ("", "ms per batch", "µs per link", "ratio", "1M pairs, s", "solve, s", "sums, GB"):
        table.add_column(name, justify="right" if name else "left")
    forward = found["seconds"]["forward"]
    for name, seconds in found["seconds"].items():
        by_pair = seconds / found["pairs"]
        solve, size = (found[key].get(name) for key in ("solve_seconds", "sums_gb"))
        table.add_row(
            name,
            f"{1e3 * seconds:,.1f}",
            f"{1e6 * by_pair / N_LINKS:,.1f}",
            f"{seconds / forward:.3f}",
            f"{1e6 * by_pair:,.0f}",
            "" if solve is None else f"{solve:,.1f}",
            "" if size is None else f"{size:.2f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="mini")
    parser.add_argument("--solvers", default="procrustes,least_squares,gradient")
    parser.add_argument("--languages", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=128, help="pairs per batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--total", type=int, default=0, help="pairs to add at the end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few pairs")
    options = parser.parse_args()
    if options.tiny:
        options.shapes, options.languages, options.pairs = "tiny", 2, 8
        options.rounds, options.total = 1, 16
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console, rows = Console(), []
    for shape in options.shapes.split(","):
        found = measure(shape, options, device)
        rows.append(found)
        console.print(tabulate(found, device))
        for solver, grown in found["growth"].items():
            print(
                f"{solver}: {grown['pairs']:,} pairs counted in {grown['seconds']:.1f} s; "
                f"{grown['more_memory_gb']:.3f} GB more memory"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
