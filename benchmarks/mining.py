"""Mining two sets of vectors: `calque mine` beside FAISS's flat index and the bare products.

    OMP_NUM_THREADS=2 python benchmarks/mining.py
    python benchmarks/mining.py --tiny

Each program runs in a process of its own on the same files: wall and CPU seconds and peak memory
are those of the process, including its imports. The bare products, which every exact search needs,
are the limit. The vectors are random, except that half of the sources have a translation near them;
the fraction of these pairs that is found is shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BLOCK = 4096
NOISE = 0.8  # of a translation, relative to the vector


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=100_000, help="per language")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--index", default="IVF1024,Flat", help="an approximate index")
    parser.add_argument("--only", nargs="*", choices=list(PROGRAMS))
    parser.add_argument("--run", choices=list(PROGRAMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="100 sentences in this process")
    options = parser.parse_args()
    if options.tiny:
        options.sentences, options.width, options.index = 100, 16, "IVF2,Flat"
        options.only = options.only or available()
    if options.run:
        run_program(options.run, options.folder, options.index)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_vectors(Path(folder), options.sentences, options.width)
        compare(Path(folder), options)


def available() -> list[str]:
    """Return the programs that need no package that is not installed."""
    has_faiss = importlib.util.find_spec("faiss") is not None
    return list(PROGRAMS) if has_faiss else ["bare products", "calque mine"]


def run_program(name: str, folder: Path, index: str) -> None:
    """Run one program and write the resources that this process has used."""
    PROGRAMS[name](folder, index)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {"cpu": usage.ru_utime + usage.ru_stime, "memory": usage.ru_maxrss / 1024}
    (folder / "figures.json").write_text(json.dumps(figures))


def make_vectors(folder: Path, n_sentences: int, width: int) -> None:
    """Write vectors of two languages; the first half of the targets are translations."""
    random = np.random.default_rng(0)
    src = random.standard_normal((n_sentences, width), dtype=np.float32)
    tgt = random.standard_normal((n_sentences, width), dtype=np.float32)
    order = random.permutation(n_sentences)[: n_sentences // 2]
    tgt[: len(order)] = src[order] + NOISE * tgt[: len(order)]
    for name, array in (("src", src), ("tgt", tgt), ("order", order)):
        np.save(folder / f"{name}.npy", array)


def compare(folder: Path, options: argparse.Namespace) -> None:
    size = f"{options.sentences:,} × {options.sentences:,} sentences, {options.width} numbers each"
    print(f"{size}; {os.environ.get('OMP_NUM_THREADS', 'all')} threads\n")
    print(f"{'':22}{'wall s':>8}{'CPU s':>8}{'× limit':>9}{'MiB':>8}{'found':>9}")
    limit = None
    for name in options.only or PROGRAMS:
        (folder / "pairs.tsv").unlink(missing_ok=True)
        started = time.perf_counter()
        if options.tiny:
            run_program(name, folder, options.index)
        else:
            command = [sys.executable, __file__, "--run", name, "--folder", str(folder)]
            command += ["--index", options.index]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        wall = time.perf_counter() - started
        figures = json.loads((folder / "figures.json").read_text())
        limit = limit or figures["cpu"]
        ratio = f"{figures['cpu'] / limit:.2f}"
        print(
            f"{name:22}{wall:8.1f}{figures['cpu']:8.1f}{ratio:>9}{figures['memory']:8.0f}"
            f"{share_found(folder):>9}",
            flush=True,
        )


def share_found(folder: Path) -> str:
    """Return the fraction of the true pairs that were found."""
    if not (folder / "pairs.tsv").exists():
        return "–"
    order = np.load(folder / "order.npy")
    true = {(int(src) + 1, row + 1) for row, src in enumerate(order)}
    with open(folder / "pairs.tsv") as stream:
        found = {tuple(map(int, line.split("\t")[1:])) for line in stream}
    return f"{100 * len(true & found) / len(true):.2f} %"


def multiply(folder: Path, index: str) -> None:
    """Compute only the products, in blocks."""
    import torch

    src, tgt = (torch.from_numpy(np.load(folder / f"{side}.npy")) for side in ("src", "tgt"))
    buffer = torch.empty(BLOCK * BLOCK)
    for rows in src.split(BLOCK):
        for columns in tgt.split(BLOCK):
            out = buffer[: len(rows) * len(columns)].view(len(rows), len(columns))
            torch.mm(rows, columns.mT, out=out)


def run_calque(folder: Path, index: str = "exact") -> None:
    """Run the whole command."""
    from calque.cli import run

    files = [str(folder / f"{side}.npy") for side in ("src", "tgt")]
    output = str(folder / "pairs.tsv")
    code = run(["mine", *files, "-o", output, "--index", index, "--device", "cpu"])
    if code:
        raise SystemExit(code)


def run_faiss(folder: Path, index: str) -> None:
    """Search FAISS's flat index in both directions, and compute the same margins."""
    import faiss

    from calque.algorithms.margin import mine_pairs
    from calque.algorithms.nearest import Neighbors

    sides = [np.load(folder / f"{side}.npy") for side in ("src", "tgt")]
    for side in sides:
        faiss.normalize_L2(side)
    found: list[np.ndarray] = []
    for queries, keys in (sides, sides[::-1]):
        flat = faiss.IndexFlatIP(keys.shape[1])
        flat.add(keys)
        found += flat.search(queries, 4)
    pairs = mine_pairs(Neighbors(*found))
    with open(folder / "pairs.tsv", "w") as stream:
        for score, src, tgt in zip(pairs.scores, pairs.src, pairs.tgt, strict=True):
            stream.write(f"{score:.6f}\t{src + 1}\t{tgt + 1}\n")


PROGRAMS = {
    "bare products": multiply,
    "calque mine": lambda folder, index: run_calque(folder),
    "FAISS IndexFlatIP": run_faiss,
    "calque mine --index": run_calque,
}

if __name__ == "__main__":
    main()
