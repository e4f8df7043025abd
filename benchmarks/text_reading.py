"""Time the reading and cleaning of a bitext file, beside a bare loop over its lines.

Without a path, it reads the tests' sample, repeated.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

from rich.console import Console
from rich.table import Table

from calque.io.bitext import languages_of, read_bitext
from calque.io.cleaning import CleaningReport, CleaningRules, clean_pairs

SAMPLE = Path(__file__).parent.parent / "tests" / "data" / "en-de.tsv"
N_REPETITIONS = 5000


def loop_over_lines(path: str) -> int:
    with open(path, encoding="utf-8") as stream:
        return sum(1 for _ in stream)


def read_pairs(path: str) -> int:
    return sum(1 for _ in read_bitext(path))


def read_and_clean(path: str) -> int:
    report = CleaningReport()
    for _ in clean_pairs(read_bitext(path), CleaningRules(), report, languages_of(path)):
        pass
    return report.n_read


STEPS: dict[str, Callable[[str], int]] = {
    "bare loop": loop_over_lines,
    "read": read_pairs,
    "read and clean": read_and_clean,
}


def measure(step: str, path: str) -> None:
    """Print pairs, seconds, CPU seconds and the peak of memory, for the parent to read."""
    start, cpu_start = perf_counter(), process_time()
    n_pairs = STEPS[step](path)
    print(n_pairs, perf_counter() - start, process_time() - cpu_start, peak_mib())


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()  # ru_maxrss would include the parent's memory
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def show(path: str) -> None:
    n_bytes = os.path.getsize(path)
    table = Table("step", title=f"{Path(path).name}, {n_bytes / 1e6:.1f} MB")
    for column in ("pairs/s", "pairs/CPU s", "MB/s", "CPU s", "peak MiB"):
        table.add_column(column, justify="right")
    for step in STEPS:  # each in its own process: the peak of memory is a process's
        command = [sys.executable, __file__, path, "--step", step]
        output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        n_pairs, seconds, cpu_seconds, peak = map(float, output.split())
        rates = (f"{n_pairs / span:,.0f}" for span in (seconds, cpu_seconds))
        speed = f"{n_bytes / seconds / 1e6:.0f}"
        table.add_row(step, *rates, speed, f"{cpu_seconds:.2f}", f"{peak:.0f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", help="an uncompressed bitext file")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        measure(args.step, args.path)
    elif args.path:
        show(args.path)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / SAMPLE.name
            path.write_bytes(SAMPLE.read_bytes() * N_REPETITIONS)
            show(str(path))


if __name__ == "__main__":
    main()
