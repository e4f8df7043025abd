"""Time reading and cleaning of bitext, and reading of word vectors against plain NumPy.

    OMP_NUM_THREADS=1 python benchmarks/text_reading.py [BITEXT] [--words 20000] [--hidden 300]

Bitext is compared with a bare loop over its lines; without a path, the sample of the tests is
repeated. Vectors are random numbers with six digits. Every step runs in a process of its own, so
that its peak of memory is known.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
from rich.console import Console
from rich.table import Table

from calque.io.bitext import infer_languages, read_bitext
from calque.io.cleaning import CleaningReport, CleaningRules, clean_pairs
from calque.io.word_vectors import iterate_vectors, write_word2vec

SAMPLE = Path(__file__).parent.parent / "tests" / "data" / "en-de.tsv"
N_REPETITIONS = 5000


def loop_over_lines(path: str) -> int:
    with open(path, encoding="utf-8") as stream:
        return sum(1 for _ in stream)


def read_pairs(path: str) -> int:
    return sum(1 for _ in read_bitext(path))


def read_and_clean(path: str) -> int:
    report = CleaningReport()
    for _ in clean_pairs(read_bitext(path), CleaningRules(), report, infer_languages(path)):
        pass
    return report.n_read


def read_vectors(path: str) -> int:
    return sum(len(block.words) for block in iterate_vectors(path))


def read_vectors_with_numpy(path: str) -> int:
    """Read 1,000 lines at a time with `numpy.loadtxt`, the fastest reader of NumPy."""
    n_words = 0
    with open(path, encoding="utf-8") as stream:
        hidden = int(stream.readline().split()[1])
        while lines := list(itertools.islice(stream, 1000)):
            words = [line.partition(" ")[0] for line in lines]
            columns = range(1, hidden + 1)
            np.loadtxt(lines, dtype=np.float32, comments=None, delimiter=" ", usecols=columns)
            n_words += len(words)
    return n_words


STEPS: dict[str, Callable[[str], int]] = {
    "bare loop": loop_over_lines,
    "read": read_pairs,
    "read and clean": read_and_clean,
    "read vectors": read_vectors,
    "read vectors with NumPy": read_vectors_with_numpy,
}
BITEXT_STEPS, VECTOR_STEPS = list(STEPS)[:3], list(STEPS)[3:]


def measure(step: str, path: str) -> None:
    """Print items, seconds, CPU seconds and the peak of memory, for the parent process."""
    start, cpu_start = perf_counter(), process_time()
    n_items = STEPS[step](path)
    print(n_items, perf_counter() - start, process_time() - cpu_start, peak_mib())


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()  # ru_maxrss would include the parent's memory
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def show(path: str, steps: list[str]) -> None:
    n_bytes = os.path.getsize(path)
    table = Table("step", title=f"{Path(path).name}, {n_bytes / 1e6:.1f} MB")
    for column in ("items/s", "items/CPU s", "MB/s", "CPU s", "peak MiB"):
        table.add_column(column, justify="right")
    for step in steps:
        command = [sys.executable, __file__, path, "--step", step]
        output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        n_items, seconds, cpu_seconds, peak = map(float, output.split())
        rates = (f"{n_items / span:,.0f}" for span in (seconds, cpu_seconds))
        speed = f"{n_bytes / seconds / 1e6:.0f}"
        table.add_row(step, *rates, speed, f"{cpu_seconds:.2f}", f"{peak:.0f}")
    Console().print(table)


def write_random_vectors(path: Path, n_words: int, hidden: int) -> None:
    matrix = 0.1 * np.random.default_rng(0).standard_normal((n_words, hidden), dtype=np.float32)
    write_word2vec(path, [f"word{number}" for number in range(n_words)], matrix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", help="An uncompressed bitext file.")
    parser.add_argument("--words", type=int, default=20_000, help="Number of vectors.")
    parser.add_argument("--hidden", type=int, default=300, help="Dimension of the vectors.")
    parser.add_argument("--tiny", action="store_true", help="Use tiny sizes, to test the script.")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        measure(options.step, options.path)
        return
    n_repetitions, n_words = (2, 100) if options.tiny else (N_REPETITIONS, options.words)
    with tempfile.TemporaryDirectory() as folder:
        bitext = options.path
        if bitext is None:
            bitext = str(Path(folder) / SAMPLE.name)
            Path(bitext).write_bytes(SAMPLE.read_bytes() * n_repetitions)
        show(bitext, BITEXT_STEPS)
        vectors = Path(folder) / "random.vec"
        write_random_vectors(vectors, n_words, options.hidden)
        show(str(vectors), VECTOR_STEPS)


if __name__ == "__main__":
    main()
