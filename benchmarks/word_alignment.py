"""Speed of word alignment: Calque, simalign, awesome-align, eflomal and fast_align side by side.

All align the same pairs on one thread, the encoders with the same model at the same layer. "Encoder
only" is the forward pass up to that layer on Calque's sorted batches, which is the lower limit.
Rounds alternate and medians are reported; CPU seconds include those of child processes.

    pip install -r benchmarks/peers/requirements.txt    (missing packages are left out)
    python benchmarks/word_alignment.py --pairs de-en.txt --n 1000
    python benchmarks/word_alignment.py --device cuda --n 50000
    python benchmarks/word_alignment.py --tiny          (all of its code in a few seconds)
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
from calque.word_alignment.neural import BLOCK_PAIRS, WordAligner
from calque.word_alignment.pair_windows import PairLayout, build_pair_batch, split_pairs

ENCODINGS, METHODS = ("separate", "joint"), ("itermax", "argmax", "ot")
WARM_UP_PAIRS = 16  # also the pairs with which the start-up time of a command is measured


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: wall-clock time, and CPU time of all cores and child processes."""

    wall: float
    cpu: float

    def __sub__(self, other: Timing) -> Timing:
        return Timing(self.wall - other.wall, self.cpu - other.cpu)


@dataclass(frozen=True)
class Row:
    """The timings of all rounds with some pairs."""

    n_pairs: int
    rounds: list[Timing]

    def cost(self, clock: str) -> float:
        """Return the median seconds per pair of a clock, wall or cpu."""
        return statistics.median(getattr(timing, clock) for timing in self.rounds) / self.n_pairs

    def ratio(self, other: Row, clock: str) -> float:
        """Return the median ratio of the seconds per pair to those of another row."""
        both = zip(self.rounds, other.rounds, strict=True)
        ratios = [getattr(mine, clock) / getattr(theirs, clock) for mine, theirs in both]
        return statistics.median(ratios) * other.n_pairs / self.n_pairs


def main() -> None:
    options = parse_options()
    if not options.tiny:
        restart_with_threads(options.threads)
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    is_cuda = options.device.startswith("cuda")
    n_pairs = options.n or (40 if options.tiny else 50_000 if is_cuda else 500)
    n_rounds = 1 if options.tiny else options.rounds
    pairs = read_pairs(options.pairs, n_pairs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare_model(options.model, Path(scratch) / "model", tiny=options.tiny)
        encoder = calque.load(folder, options.device)
        job = Job(folder, WordAligner(encoder).layer, options.device, Path(scratch))
        describe(encoder, job, pairs, options.threads)
        ways = list_ways(job, encoder)
        counts = {name: options.peer_n if name in PEERS else len(pairs) for name in ways}
        rows = measure(ways, pairs, counts, n_rounds)
        if not is_cuda:
            rows["calque align FILE -o OUT, itermax"] = measure_command(
                job, pairs, n_rounds, tiny=options.tiny
            )
    clock = "wall" if is_cuda else "cpu"
    show(rows)
    show_ratios(rows, clock)
    show_limit(encoder, job, pairs, rows, clock, tiny=options.tiny)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="model; default: a random 6 × 384 encoder")
    parser.add_argument("--pairs", help="`a ||| b` or TSV; default: demo sentences")
    parser.add_argument("--n", type=int, help="number of pairs; default: 500, or 50,000 on CUDA")
    parser.add_argument("--peer-n", type=int, default=500, help="pairs for other aligners")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a few pairs, one round, a tiny model")
    return parser.parse_args()


def restart_with_threads(n_threads: int) -> None:
    """Start again with the variables that numeric libraries read when they are imported."""
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
    """Join sentences of the demo until the two sides have about twice this many words together."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    lines = (line.split("\t")[1:] for line in table.splitlines()[1:])
    sentences = [(foreign.split(), english.split()) for english, foreign in lines]
    spaced = [(src, tgt) for src, tgt in sentences if 2 * len(src) >= len(tgt)]
    dice = random.Random(0)
    pairs = []
    for _ in range(n):
        src, tgt = dice.choice(spaced)
        most = 2 * dice.gauss(n_words - 4, n_words / 5)  # the last sentence exceeds it
        while len(src) + len(tgt) < most:
            more = dice.choice(spaced)
            src, tgt = src + more[0], tgt + more[1]
        pairs.append((src, tgt))
    return pairs


def prepare_model(name: str | None, folder: Path, *, tiny: bool) -> Path:
    """Return the folder of a model, or save a random encoder: weights do not change the speed."""
    if name is not None:
        return find_model(name)
    from transformers import XLMRobertaConfig

    tokenizer = load_tokenizer(find_model("calque-mini"))
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32 if tiny else 384,
        num_hidden_layers=2 if tiny else 6,
        num_attention_heads=2 if tiny else 12,
        intermediate_size=64 if tiny else 1536,
        max_position_embeddings=514,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Encoder(build_model(config), tokenizer).save(folder)
    return folder


def list_ways(job: Job, encoder: Encoder) -> dict[str, Way]:
    """Return the ways to align by name; those that do not work are left out with a message."""
    ways: dict[str, Way] = {}
    for encode in ENCODINGS:
        ways[f"encoder only, {encode}"] = encoder_only(job, encoder, encode)
        for method in METHODS:
            ways[f"Calque, {encode}, {method}"] = calque_way(encoder, encode, method)
    for name, make in PEERS.items():
        try:
            ways[name] = make(job)
            ways[name](make_pairs(WARM_UP_PAIRS))()
        except Exception as error:  # noqa: BLE001 (not installed, or cannot read this model)
            print(f"left out: {name} ({type(error).__name__}: {error})")
            ways.pop(name, None)
    return ways


def encoder_only(job: Job, encoder: Encoder, encode: Any) -> Way:
    aligner = WordAligner(encoder, encode=encode)
    layout = PairLayout.of(encoder, encode, aligner.settings.positions)
    device = device_of(encoder)

    def prepare(pairs: Sequence[Pair]) -> Run:
        batches = []
        for start in range(0, len(pairs), BLOCK_PAIRS):
            windows = split_pairs(aligner._words, pairs[start : start + BLOCK_PAIRS], layout.limits)
            for rows in batch_by_length(layout.count_tokens(windows), BATCH_TOKENS[device.type]):
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
    """Warm up every way, then time them in alternation."""
    for way in ways.values():
        way(pairs[:WARM_UP_PAIRS])()
    some = {name: pairs[: counts[name]] for name in ways}
    runs = {name: way(some[name]) for name, way in ways.items()}
    rows = {name: Row(len(some[name]), []) for name in ways}
    for _ in range(n_rounds):
        for name, run in runs.items():
            rows[name].rounds.append(clock(run))
    return rows


def measure_command(job: Job, pairs: Sequence[Pair], n_rounds: int, *, tiny: bool) -> Row:
    """Time the whole command, minus its time for a few pairs; with --tiny, call its function."""
    whole = write_pairs(job.scratch / "all.txt", pairs[WARM_UP_PAIRS:])
    few = write_pairs(job.scratch / "few.txt", pairs[:WARM_UP_PAIRS])
    links = job.scratch / "links"
    command = [sys.executable, "-m", "calque", "align", "-o", str(links)]
    options = {"model": str(job.folder), "device": job.device, "layer": job.layer}
    options |= {"method": METHODS[0], "encode": ENCODINGS[0]}
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]

    def align(text: Path) -> None:
        links.unlink(missing_ok=True)
        if tiny:
            calque.align_file(text, output=links, **options)
            return
        done = subprocess.run([*command, str(text)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"calque align failed:\n{done.stderr}")

    rounds = []
    for _ in range(n_rounds):
        start_up = clock(lambda: align(few))
        rounds.append(clock(lambda: align(whole)) - start_up)
    return Row(len(pairs) - 2 * WARM_UP_PAIRS, rounds)


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
    print("\n| | pairs | pairs/s | CPU ms per pair |\n|---|---|---|---|")
    for name, row in rows.items():
        rate, cost = 1 / row.cost("wall"), 1000 * row.cost("cpu")
        print(f"| {name} | {row.n_pairs:,} | {rate:,.1f} | {cost:.3g} |")


def show_ratios(rows: dict[str, Row], clock: str) -> None:
    measured = {"cpu": "CPU seconds", "wall": "time"}[clock]
    print(f"\n| {measured} per pair | ratio | goal |\n|---|---|---|")
    for name, row in rows.items():
        if name.lower().startswith("calque"):
            encode = "joint" if "joint" in name else "separate"
            ratio = row.ratio(rows[f"encoder only, {encode}"], clock)
            print(f"| {name} ÷ encoder only | {ratio:.2f} | ≤ 1.25 |")
    mine, goal = rows["Calque, separate, itermax"], {"cpu": "≥ 2.5", "wall": "≥ 20"}[clock]
    for name in filter(rows.__contains__, PEERS):
        ratio = rows[name].ratio(mine, clock)
        shown = goal if name.startswith("simalign") else ""
        print(f"| {name} ÷ Calque, separate, itermax | {ratio:.3g} | {shown} |")


def show_limit(
    encoder: Encoder,
    job: Job,
    pairs: Sequence[Pair],
    rows: dict[str, Row],
    clock: str,
    *,
    tiny: bool,
) -> None:
    """Compare the encoder alone with the rate of matrix products, counting only these."""
    config, rate = encoder.model.config, measure_matmul(encoder, tiny=tiny)
    print(f"\nmatrix products: {rate / 1e9:,.0f} GFLOP/s in {device_of(encoder).type} ", end="")
    print(f"{next(encoder.parameters()).dtype}".replace("torch.", ""))
    weights = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    for encode in ENCODINGS:
        layout = PairLayout.of(encoder, encode, "continue")  # type: ignore[arg-type]
        windows = split_pairs(WordAligner(encoder)._words, pairs, layout.limits)
        n_tokens = layout.count_tokens(windows).mean()
        done = 2 * weights * job.layer * n_tokens / rows[f"encoder only, {encode}"].cost(clock)
        share = f"{done / rate:.0%} of this rate"
        print(f"encoder only, {encode}: {n_tokens:.1f} tokens per pair, {share}")


def measure_matmul(encoder: Encoder, *, tiny: bool) -> float:
    """Return the rate of large matrix products in the encoder's precision, in FLOP/s."""
    weight = next(encoder.parameters())
    size, n_times = (64, 1) if tiny else (8192, 20) if weight.is_cuda else (2048, 3)
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
