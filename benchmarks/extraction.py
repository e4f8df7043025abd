"""Speed of static vector extraction against the bare forward to the same layer.

The bare forward runs the encoder on all sentences, tokenised and sorted beforehand; an epoch of
X2Static leaves out sentences that sub-sampling leaves without targets, unless every word is one
("all words"). Reading is done once, however many epochs follow. Rounds alternate, and each way's
best counts.

    python benchmarks/extraction.py --text wiki.de.txt --language de --threads 1
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from calque.api import load
from calque.models.encoder import Encoder
from calque.tools.embedder import device_of, run_batches
from calque.tools.static_corpus import CorpusFilter, CorpusReader
from calque.tools.static_extractor import ExtractJob, Method, learn, make_learner
from calque.tools.static_learners import BLOCK_SENTENCES, PoolingSettings, X2StaticSettings
from calque.tools.static_vocabulary import VocabularyLimits, WordCorpus, number_corpus
from calque.tools.word_contexts import OccurrenceBatch, find_occurrences, plan_batches

GOAL = 1.5


@dataclass(frozen=True)
class Timing:
    """Seconds of one run: on the wall clock, and of all cores together."""

    wall: float
    cpu: float

    @staticmethod
    def of(work: Callable[[], object]) -> Timing:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def main() -> None:
    options = parse_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    encoder = load(options.model, options.device)
    reader = CorpusReader(options.language, CorpusFilter(1, 1, options.limit))
    limits = VocabularyLimits(min_count=options.min_count)
    job = ExtractJob(reader, limits=limits, layer=options.layer)
    layer = job.layer_of(encoder)
    with tempfile.TemporaryDirectory() as scratch:
        text = options.text or write_demo(Path(scratch))
        reading = Timing.of(lambda: read_corpus(encoder, job, text, Path(scratch)))
        corpus = WordCorpus.open(Path(scratch))
        timings = measure(list_ways(encoder, corpus, layer), options.rounds)
    show(encoder, corpus, layer, {"reading and numbering": reading, **timings})


def read_corpus(encoder: Encoder, job: ExtractJob, text: str | Path, folder: Path) -> None:
    sentences, room = job.reader.read([text]), job.room_of(encoder)
    number_corpus(encoder.tokenizer, sentences, folder, room=room, limits=job.limits)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="calque-mini", help="folder of an encoder")
    parser.add_argument("--text", help="paragraphs a line; default: the demo's English sentences")
    parser.add_argument("--language", default="en")
    parser.add_argument("--layer", type=int, help="default: the middle one")
    parser.add_argument("--limit", type=int, default=2000, help="sentences")
    parser.add_argument("--min-count", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def write_demo(folder: Path) -> Path:
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    path = folder / "demo.txt"
    path.write_text("\n".join(row.split("\t")[1] for row in table.splitlines()[1:]), "utf-8")
    return path


def list_ways(encoder: Encoder, corpus: WordCorpus, layer: int) -> dict[str, Callable[[], None]]:
    def extract(method: Method) -> Callable[[], None]:
        return lambda: learn(encoder, corpus, make_learner(corpus, encoder, method), layer)

    return {
        "bare forward": bare_forward(encoder, corpus, layer),
        "x2static": extract(X2StaticSettings(n_epochs=1)),
        "x2static, all words": extract(X2StaticSettings(n_epochs=1, subsample=1)),
        "pooling": extract(PoolingSettings()),
    }


def bare_forward(encoder: Encoder, corpus: WordCorpus, layer: int) -> Callable[[], None]:
    device = device_of(encoder)
    batches: list[OccurrenceBatch] = []
    for start in range(0, len(corpus), BLOCK_SENTENCES):
        index = np.arange(start, min(start + BLOCK_SENTENCES, len(corpus)))
        found = find_occurrences(corpus, index, lambda rows, n_others: rows >= -1)
        batches += plan_batches(encoder, found, "word")

    @torch.inference_mode()
    def forward(batch: OccurrenceBatch) -> None:
        encoder(batch.tokens.to(device), [layer])

    n_workers = torch.get_num_threads() if device.type == "cpu" else 1
    return lambda: run_batches(forward, batches, n_workers)


def measure(ways: dict[str, Callable[[], None]], n_rounds: int) -> dict[str, Timing]:
    runs: dict[str, list[Timing]] = {name: [] for name in ways}
    for _ in range(n_rounds):
        for name, work in ways.items():
            runs[name].append(Timing.of(work))
    return {
        name: Timing(min(run.wall for run in mine), min(run.cpu for run in mine))
        for name, mine in runs.items()
    }


def show(encoder: Encoder, corpus: WordCorpus, layer: int, timings: dict[str, Timing]) -> None:
    bare, device = timings["bare forward"], device_of(encoder)
    n_sentences, n_words = len(corpus), len(corpus.words)
    print(
        f"{n_sentences:,} sentences, {n_words:,} words to learn, layer {layer}, {device},"
        f" {torch.get_num_threads()} threads"
    )
    print(f"{'':24}{'sentences/s':>12}{'CPU s/1,000':>13}{'÷ bare, wall':>14}{'÷ bare, CPU':>13}")
    for name, timing in timings.items():
        rate, cost = n_sentences / timing.wall, 1000 * timing.cpu / n_sentences
        ratios = f"{timing.wall / bare.wall:14.2f}{timing.cpu / bare.cpu:13.2f}"
        print(f"{name:24}{rate:12,.0f}{cost:13.2f}{ratios}")
    print(f"goal: one epoch within {GOAL} × the bare forward")


if __name__ == "__main__":
    main()
