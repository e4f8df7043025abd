"""Speed of word alignment, side by side: Calque, simalign, awesome-align, eflomal, fast_align.

All align the same pairs on one thread, the encoders with the same model at the same layer. "Bare
forward" is the encoder alone, up to that layer, on the sorted batches that Calque makes: the limit.
Rounds alternate and medians count; CPU seconds include those of child processes.

    pip install -r benchmarks/peers/requirements.txt    (what is not installed is left out)
    python benchmarks/word_alignment.py --pairs de-en.txt --n 1000
    python benchmarks/word_alignment.py --device cuda --n 50000
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from peers.word_aligners import PEERS, Job, Pair, Run, Way, write_pairs
from transformers.utils import logging as transformers_logging

import calque
from calque.io.bitext import read_bitext
from calque.models.encoder import Encoder
from calque.models.inference import BATCH_TOKENS, device_of
from calque.models.loading import build_model, find_model
from calque.tokens.ragged import batch_by_length
from calque.tokens.tokenizer import load_tokenizer
from calque.word_alignment.neural import BLOCK_PAIRS, PairLayout, WordAligner, build_pair_batch
from calque.word_alignment.pair_windows import cut_pairs

ENCODINGS, METHODS = ("separate", "joint"), ("itermax", "argmax", "ot")
FEW = 16  # pairs to warm up with, and to know the start-up of a command by


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: on the wall clock, and of all cores and child processes together."""

    wall: float
    cpu: float

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.wall - other.wall, self.cpu - other.cpu)


@dataclass(frozen=True)
class Row:
    """How long some pairs took, round by round."""

    n_pairs: int
    rounds: list[Timing]

    def cost(self, clock: str) -> float:
        """Seconds a pair, by the wall clock or of CPU."""
        return statistics.median(getattr(timing, clock) for timing in self.rounds) / self.n_pairs

    def ratio(self, other: Row, clock: str) -> float:
        """How many times as much as the other a pair took, in the same round."""
        both = zip(self.rounds, other.rounds, strict=True)
        ratios = [getattr(mine, clock) / getattr(theirs, clock) for mine, theirs in both]
        return statistics.median(ratios) * other.n_pairs / self.n_pairs


def main() -> None:
    options = parse_options()
    restart_with_threads(options.threads)
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    is_cuda = options.device.startswith("cuda")
    pairs = read_pairs(options.pairs, options.n or (50_000 if is_cuda else 500))
    with tempfile.TemporaryDirectory() as scratch:
        folder = find_model(options.model, Path(scratch) / "model")
        encoder = calque.load(folder, options.device)
        job = Job(folder, WordAligner(encoder).layer, options.device, Path(scratch))
        describe(encoder, job, pairs, options.threads)
        ways = list_ways(job, encoder)
        counts = {name: options.peer_n if name in PEERS else len(pairs) for name in ways}
        rows = measure(ways, pairs, counts, options.rounds)
        if not is_cuda:
            rows["calque align FILE -o OUT, itermax"] = measure_command(job, pairs, options.rounds)
    clock = "wall" if is_cuda else "cpu"
    show(rows)
    show_ratios(rows, clock)
    show_limit(encoder, job, pairs, rows, clock)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name; default: a random 6 × 384 encoder")
    parser.add_argument("--pairs", help="`a ||| b` or TSV; default: the demo's words, ~20 a side")
    parser.add_argument("--n", type=int, help="pairs; default: 500, or 50,000 on CUDA")
    parser.add_argument("--peer-n", type=int, default=500, help="of these, for other aligners")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def restart_with_threads(n_threads: int) -> None:
    """Begin again with the variables that numeric libraries read as they are imported."""
    names = ("OMP", "MKL", "OPENBLAS", "RAYON")
    wanted = {f"{name}_NUM_THREADS": str(n_threads) for name in names}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})


def read_pairs(path: str | None, n: int) -> list[Pair]:
    if path is None:
        return make_pairs(n)
    words = ((pair.src.split(), pair.tgt.split()) for pair in read_bitext(path))
    return list(islice(filter(all, words), n))


def make_pairs(n: int, n_words: int = 20) -> list[Pair]:
    """Join sentences of the demo until both sides together have about twice so many words."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    lines = (line.split("\t")[1:] for line in table.splitlines()[1:])
    sentences = [(foreign.split(), english.split()) for english, foreign in lines]
    spaced = [(src, tgt) for src, tgt in sentences if 2 * len(src) >= len(tgt)]
    dice = random.Random(0)
    pairs = []
    for _ in range(n):
        src, tgt = dice.choice(spaced)
        most = 2 * dice.gauss(n_words - 4, n_words / 5)  # the last sentence goes beyond it
        while len(src) + len(tgt) < most:
            more = dice.choice(spaced)
            src, tgt = src + more[0], tgt + more[1]
        pairs.append((src, tgt))
    return pairs


def find_model(name: str | None, folder: Path) -> Path:
    """Find a folder, or make a random encoder: weights do not change the speed."""
    if name is not None:
        return find_model(name)
    from transformers import XLMRobertaConfig

    tokenizer = load_tokenizer(find_model("calque-mini"))
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Encoder(build_model(config), tokenizer).save(folder)
    return folder


def list_ways(job: Job, encoder: Encoder) -> dict[str, Way]:
    """Name the ways to align; those that are not installed are left out with a word."""
    ways: dict[str, Way] = {}
    for encode in ENCODINGS:
        ways[f"bare forward, {encode}"] = bare_forward(job, encoder, encode)
        for method in METHODS:
            ways[f"Calque, {encode}, {method}"] = calque_way(encoder, encode, method)
    for name, make in PEERS.items():
        try:
            ways[name] = make(job)
            ways[name](make_pairs(FEW))()
        except Exception as error:  # noqa: BLE001 (not installed, or cannot read this model)
            print(f"left out: {name} ({type(error).__name__}: {error})")
            ways.pop(name, None)
    return ways


def bare_forward(job: Job, encoder: Encoder, encode: Any) -> Way:
    aligner = WordAligner(encoder, encode=encode)
    layout = PairLayout.of(encoder, encode, aligner.settings.positions)
    device = device_of(encoder)

    def prepare(pairs: Sequence[Pair]) -> Run:
        batches = []
        for start in range(0, len(pairs), BLOCK_PAIRS):
            windows = cut_pairs(aligner._words, pairs[start : start + BLOCK_PAIRS], layout.room)
            for rows in batch_by_length(layout.n_tokens(windows), BATCH_TOKENS[device.type]):
                batches.append(build_pair_batch(windows, rows, layout).to(device).tokens)

        @torch.inference_mode()
        def run() -> None:
            for batch in batches:
                encoder(batch, [job.layer])

        return run

    return prepare


def calque_way(encoder: Encoder, encode: Any, method: Any) -> Way:
    aligner = WordAligner(encoder, method=method, encode=encode)
    return lambda pairs: lambda: aligner.align(pairs)


def measure(
    ways: dict[str, Way], pairs: Sequence[Pair], counts: dict[str, int], n_rounds: int
) -> dict[str, Row]:
    """Warm every way up, then let them take turns."""
    for way in ways.values():
        way(pairs[:FEW])()
    some = {name: pairs[: counts[name]] for name in ways}
    runs = {name: way(some[name]) for name, way in ways.items()}
    rows = {name: Row(len(some[name]), []) for name in ways}
    for _ in range(n_rounds):
        for name, run in runs.items():
            rows[name].rounds.append(clock(run))
    return rows


def measure_command(job: Job, pairs: Sequence[Pair], n_rounds: int) -> Row:
    """Time the whole command, less what it takes for a few pairs."""
    whole = write_pairs(job.scratch / "all.txt", pairs[FEW:])
    few = write_pairs(job.scratch / "few.txt", pairs[:FEW])
    links = job.scratch / "links"
    command = [sys.executable, "-m", "calque", "align", "-o", str(links)]
    options = {"model": job.folder, "device": job.device, "layer": job.layer}
    options |= {"method": METHODS[0], "encode": ENCODINGS[0]}
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]

    def align(text: Path) -> None:
        links.unlink(missing_ok=True)
        done = subprocess.run([*command, str(text)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"calque align failed:\n{done.stderr}")

    rounds = []
    for _ in range(n_rounds):
        start_up = clock(lambda: align(few))
        rounds.append(clock(lambda: align(whole)) - start_up)
    return Row(len(pairs) - 2 * FEW, rounds)


def clock(run: Run) -> Timing:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), cpu_seconds()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Timing(time.perf_counter() - wall, cpu_seconds() - cpu)


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def describe(encoder: Encoder, job: Job, pairs: Sequence[Pair], n_threads: int) -> None:
    n_words = [statistics.mean(len(pair[side]) for pair in pairs) for side in (0, 1)]
    config = encoder.model.config
    shape = f"{config.num_hidden_layers} × {config.hidden_size} × {config.intermediate_size}"
    print(
        f"{len(pairs):,} pairs of {n_words[0]:.1f} and {n_words[1]:.1f} words; {config.model_type} "
        f"{shape}, layer {job.layer}; {job.device}, threads: {n_threads}, torch {torch.__version__}"
    )


def show(rows: dict[str, Row]) -> None:
    print("\n| | pairs | pairs/s | CPU ms a pair |\n|---|---|---|---|")
    for name, row in rows.items():
        rate, cost = 1 / row.cost("wall"), 1000 * row.cost("cpu")
        print(f"| {name} | {row.n_pairs:,} | {rate:,.1f} | {cost:.3g} |")


def show_ratios(rows: dict[str, Row], clock: str) -> None:
    measured = {"cpu": "CPU seconds", "wall": "time"}[clock]
    print(f"\n| {measured} a pair | ratio | goal |\n|---|---|---|")
    for name, row in rows.items():
        if name.lower().startswith("calque"):
            encode = "joint" if "joint" in name else "separate"
            ratio = row.ratio(rows[f"bare forward, {encode}"], clock)
            print(f"| {name} ÷ bare forward | {ratio:.2f} | ≤ 1.25 |")
    mine, goal = rows["Calque, separate, itermax"], {"cpu": "≥ 2.5", "wall": "≥ 20"}[clock]
    for name in filter(rows.__contains__, PEERS):
        ratio = rows[name].ratio(mine, clock)
        shown = goal if name.startswith("simalign") else ""
        print(f"| {name} ÷ Calque, separate, itermax | {ratio:.3g} | {shown} |")


def show_limit(
    encoder: Encoder, job: Job, pairs: Sequence[Pair], rows: dict[str, Row], clock: str
) -> None:
    """Compare the bare forward with the matrix rate: operations of the products alone."""
    config, rate = encoder.model.config, measure_matmul(encoder)
    print(f"\nmatrix products: {rate / 1e9:,.0f} GFLOP/s in {device_of(encoder).type} ", end="")
    print(f"{next(encoder.parameters()).dtype}".replace("torch.", ""))
    weights = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    for encode in ENCODINGS:
        layout = PairLayout.of(encoder, encode, "continue")  # type: ignore[arg-type]
        windows = cut_pairs(WordAligner(encoder)._words, pairs, layout.room)
        n_tokens = layout.n_tokens(windows).mean()
        done = 2 * weights * job.layer * n_tokens / rows[f"bare forward, {encode}"].cost(clock)
        print(f"bare forward, {encode}: {n_tokens:.1f} tokens a pair, {done / rate:.0%} of it")


def measure_matmul(encoder: Encoder) -> float:
    """Measure the rate of large products in the encoder's own precision, in FLOP/s."""
    weight = next(encoder.parameters())
    size, n_times = (8192, 20) if weight.is_cuda else (2048, 3)
    a, b = (torch.randn(size, size, dtype=weight.dtype, device=weight.device) for _ in range(2))

    def multiply() -> None:
        for _ in range(n_times):
            a @ b

    multiply()
    timings = [clock(multiply) for _ in range(3)]
    seconds = min(timing.wall if weight.is_cuda else timing.cpu for timing in timings)
    return n_times * 2 * size**3 / seconds


if __name__ == "__main__":
    main()
