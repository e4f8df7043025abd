"""Speed and memory of preparing a large bitext and of building training batches from it.

    python benchmarks/text_pipeline.py en-de.tsv.xz en-zh.tsv.xz --gigabytes 1 --workers 8
    python benchmarks/text_pipeline.py --tiny

The lines of the files are repeated up to the size; a number at the end of both sides makes them
distinct. By default a small bitext is made of the tests' sample. Requires Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

# No heavy imports here: the processes that tokenize import this file, too.

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "tests" / "data" / "en-de.tsv"
TOKENIZER = ROOT / "src" / "calque" / "data" / "models" / "calque-mini"
BATCH_TOKENS = 131_072


def make_bitext(paths: list[Path], folder: Path, n_bytes: int) -> int:
    """Write files of equal size; return how often the shortest input was repeated."""
    n_rounds = 0
    for path in paths:
        n_left = n_bytes // len(paths)
        with open(folder / f"{path.name.split('.tsv')[0]}.tsv", "wb") as stream:
            for number, pair in read_rounds(path):
                n_left -= stream.write(f"{pair.src} {number}\t{pair.tgt} {number}\n".encode())
                if n_left <= 0:
                    break
        n_rounds = max(n_rounds, number)
    return n_rounds


def read_rounds(path: Path) -> Iterator[tuple[int, Any]]:
    from calque.io.bitext import read_bitext

    for number in count(1):
        for pair in read_bitext(path):
            yield number, pair


def make_recipe(folder: Path, tokenizer: str) -> Any:
    from calque.training.recipe_io import parse_recipe

    source = {"path": str(folder / "*.tsv"), "kind": "bitext"}
    kinds = ("masked_lm", "translation_lm")
    content = {
        "name": "benchmark",
        "tokenizer": {"path": tokenizer},
        "data": {"sources": [source]},
        "objectives": [{"kind": kind, "batch_tokens": BATCH_TOKENS} for kind in kinds],
    }
    return parse_recipe(content, "benchmark")


def prepare(options: argparse.Namespace) -> dict[str, float]:
    """Read, clean, tokenize and store the bitext."""
    from calque.training.sources import prepare_text

    recipe, folder = make_recipe(options.folder, options.tokenizer), options.folder / "prepared"
    start, cpu_start = time.perf_counter(), cpu_seconds()
    corpora = prepare_text(recipe, options.folder, folder, n_workers=options.workers)
    return {
        "pairs": sum(corpus.cleaning["n_read"] for corpus in corpora),
        "tokens": sum(sum(corpus.n_tokens) for corpus in corpora),
        "seconds": time.perf_counter() - start,
        "cpu": cpu_seconds() - cpu_start,
    }


def encode(options: argparse.Namespace, *, cached: bool) -> dict[str, float]:
    """Encode sentences in one thread, with the word cache or without it."""
    from tokenizers import Tokenizer

    from calque.io.bitext import read_bitext
    from calque.tokens.words import build_sentence_encoder, encode_whole

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(Path(options.tokenizer) / "tokenizer.json"))
    encode_block = build_sentence_encoder(tokenizer) if cached else partial(encode_whole, tokenizer)
    sentences = [
        sentence
        for path in sorted(options.folder.glob("*.tsv"))
        for pair in islice(read_bitext(path), 50_000)
        for sentence in (pair.src, pair.tgt)
    ]
    start, cpu_start, n_tokens = time.perf_counter(), cpu_seconds(), 0
    for first in range(0, len(sentences), 4096):
        n_tokens += len(encode_block(sentences[first : first + 4096]).ids)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
    return {"tokens": n_tokens, "seconds": seconds, "cpu": cpu}


def build_batches(options: argparse.Namespace, n_loaders: int) -> dict[str, float]:
    """Build batches of MLM and TLM in turn, of the fixed shape of a compiled training step."""
    import torch

    from calque.objectives import build_objective
    from calque.tokens.sampling import derive_seed
    from calque.tokens.streams import load_batches
    from calque.tokens.tokenizer import SpecialTokens
    from calque.training.data import open_stream
    from calque.training.sources import open_text

    torch.set_num_threads(1)  # as in a loading process
    recipe, folder = make_recipe(options.folder, options.tokenizer), options.folder / "prepared"
    prepared, tokenizer = open_text(folder)
    streams = [
        open_stream(
            build_objective(settings),
            prepared,
            folder,
            recipe.data,
            SpecialTokens.of(tokenizer),
            seed=derive_seed(recipe.seed, number),
            fixed_shape=True,
        ).training
        for number, settings in enumerate(recipe.objectives)
    ]
    loaders = [load_batches(stream, n_workers=n_loaders) for stream in streams]
    for loader in loaders:
        next(loader)  # the first batch waits for the start of processes
    start, cpu_start, n_tokens = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() < start + options.seconds:
        n_tokens += sum(next(loader)[1].tokens.n_real for loader in loaders)
    cpu = 0.0 if n_loaders else cpu_seconds() - cpu_start  # loaders are still running
    return {"tokens": n_tokens, "seconds": time.perf_counter() - start, "cpu": cpu}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its finished children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


STEPS: dict[str, Callable[[argparse.Namespace], dict[str, float]]] = {
    "encode without cache": partial(encode, cached=False),
    "encode with cache": partial(encode, cached=True),
    "prepare": prepare,
    "batch": partial(build_batches, n_loaders=0),
    "batch by loaders": lambda options: build_batches(options, options.loaders),
}


class MemoryWatch(threading.Thread):
    """Records the peak memory of a process and its descendants, and of their sum.

    The sum counts shared pages once; a second sum excludes the pages of mapped files, which the
    system can reclaim.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peaks = pid, dict[int, float]()
        self.total, self.without_files = 0.0, 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        while Path(f"/proc/{self.pid}/status").exists():
            sums = [0.0, 0.0]
            for pid in descend(self.pid):
                try:
                    self.peaks[pid] = read_mib(pid, "status", "VmHWM:")
                    for k, key in enumerate(("Pss:", "Pss_Anon:")):
                        sums[k] += read_mib(pid, "smaps_rollup", key)
                except (OSError, IndexError):  # the process has ended
                    continue
            self.total, self.without_files = map(max, sums, (self.total, self.without_files))
            if self.ended.wait(0.2):
                break

    def largest_child(self) -> float:
        return max((peak for pid, peak in self.peaks.items() if pid != self.pid), default=0.0)


def descend(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from descend(int(child))


def read_mib(pid: int, file: str, key: str) -> float:
    return int(Path(f"/proc/{pid}/{file}").read_text().split(key)[1].split()[0]) / 1024


def run_step(step: str, options: argparse.Namespace) -> tuple[dict[str, float], MemoryWatch]:
    """Run a step in its own process, to measure its peak memory; with --tiny, in this process."""
    if options.tiny:
        watch = MemoryWatch(os.getpid())
        watch.start()
        found = STEPS[step](options)
        watch.ended.set()
        watch.join()
        return found, watch
    command = [sys.executable, __file__, "--step", step, "--folder", str(options.folder)]
    for name in ("workers", "loaders", "seconds", "tokenizer"):
        command += [f"--{name}", str(getattr(options, name))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watch = MemoryWatch(process.pid)
        watch.start()
        output = process.communicate()[0]
    watch.join()
    if process.returncode:
        raise SystemExit(process.returncode)
    return json.loads(output.splitlines()[-1]), watch


def show(options: argparse.Namespace, n_rounds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    n_bytes = sum(path.stat().st_size for path in options.folder.glob("*.tsv"))
    title = f"{n_bytes / 1e6:,.0f} MB, {n_rounds} rounds, {options.workers} workers"
    table = Table("step", title=f"{title}, {options.loaders} loaders per objective")
    speed = ("seconds", "MB/s", "pairs/s", "tokens/s", "tokens/CPU s")
    memory = ("main MiB", "largest child MiB", "sum MiB", "without files")
    for column in (*speed, *memory):
        table.add_column(column, justify="right")
    for step in STEPS:
        found, watch = run_step(step, options)
        seconds, cpu, n_pairs = found["seconds"], found["cpu"], found.get("pairs")
        table.add_row(
            step,
            f"{seconds:.1f}",
            f"{n_bytes / seconds / 1e6:.1f}" if n_pairs else "",
            f"{n_pairs / seconds:,.0f}" if n_pairs else "",
            f"{found['tokens'] / seconds:,.0f}",
            f"{found['tokens'] / cpu:,.0f}" if cpu else "",
            f"{watch.peaks[watch.pid]:,.0f}",
            f"{watch.largest_child():,.0f}",
            f"{watch.total:,.0f}",
            f"{watch.without_files:,.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE", help="bitext files")
    parser.add_argument("--gigabytes", type=float, help="default: 1, or 0.005 without a file")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes that tokenize"
    )
    parser.add_argument(
        "--loaders", type=int, default=2, help="processes per objective that build batches"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of building batches")
    parser.add_argument("--tokenizer", default=str(TOKENIZER), help="tokenizer folder")
    parser.add_argument("--tiny", action="store_true", help="20 kB of text, in one process")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(STEPS[options.step](options)))
        return
    if options.tiny:
        options.gigabytes, options.workers, options.loaders, options.seconds = 2e-5, 1, 1, 0.1
    gigabytes = options.gigabytes or (1.0 if options.paths else 0.005)
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        n_rounds = make_bitext(options.paths or [SAMPLE], options.folder, int(gigabytes * 1e9))
        show(options, n_rounds)


if __name__ == "__main__":
    main()
