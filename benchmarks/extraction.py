"""Speed of static vector extraction against the bare forward to the same layer.

The bare forward runs the encoder on all sentences, tokenised and sorted beforehand; an epoch of
X2Static leaves out sentences that sub-sampling leaves without targets, unless every word is one
("all words"). Reading is done once, however many epochs follow, and so is making the table, which
is not timed. Rounds alternate, and each way's best counts. Blocks are planned while others are
encoded: give some ten thousand sentences to see it.

With --host the encoder costs nothing and states have one dimension: what is left is the time that
each of the two threads needs to keep a device busy, the device's own operators aside.

    python benchmarks/extraction.py --text wiki.de.txt --language de --threads 1
    python benchmarks/extraction.py --text wiki.de.txt --language de --threads 1 --host
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from calque.api import load
from calque.models.encoder import Encoder
from calque.models.inference import BATCH_TOKENS, device_of, run_batches
from calque.types import TokenBatch
from calque.vectors.corpus import (
    CorpusFilter,
    CorpusReader,
    VocabularyLimits,
    WordCorpus,
    number_corpus,
)
from calque.vectors.x2static import (
    BLOCK_SENTENCES,
    ExtractJob,
    Learner,
    Method,
    OccurrenceBatch,
    OccurrenceBlock,
    PoolingSettings,
    X2StaticSettings,
    embed_occurrences,
    find_occurrences,
    learn,
    make_learner,
    plan_block,
)

GOAL = 1.5
METHODS: dict[str, Method] = {
    "x2static": X2StaticSettings(n_epochs=1),
    "x2static, all words": X2StaticSettings(n_epochs=1, subsample=1),
    # So few targets, and a negative each, that computing costs little beside being told to.
    "x2static, few targets": X2StaticSettings(n_epochs=1, subsample=3e-8, n_negatives=1),
    "pooling": PoolingSettings(),
}
Prepare = Callable[[], Callable[[], None]]


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
        if options.host:
            show_host(FreeEncoder(encoder), corpus, options.rounds)
            return
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
    parser.add_argument("--host", action="store_true", help="time the threads on their own")
    return parser.parse_args()


def write_demo(folder: Path) -> Path:
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    path = folder / "demo.txt"
    path.write_text("\n".join(row.split("\t")[1] for row in table.splitlines()[1:]), "utf-8")
    return path


def list_ways(encoder: Encoder, corpus: WordCorpus, layer: int) -> dict[str, Prepare]:
    def extract(method: Method) -> Callable[[], None]:
        learner = make_learner(corpus, encoder, method)
        return lambda: learn(encoder, corpus, learner, layer)

    bare = bare_forward(encoder, corpus, layer)
    names = ("x2static", "x2static, all words", "pooling")
    return {
        "bare forward": lambda: bare,
        **{name: partial(extract, METHODS[name]) for name in names},
    }


def bare_forward(encoder: Encoder, corpus: WordCorpus, layer: int) -> Callable[[], None]:
    device = device_of(encoder)
    batches: list[OccurrenceBatch] = []
    for start in range(0, len(corpus), BLOCK_SENTENCES):
        index = np.arange(start, min(start + BLOCK_SENTENCES, len(corpus)))
        found = find_occurrences(corpus, index, lambda rows, n_others: rows >= -1)
        batches += plan_block(encoder, corpus, found, "word").batches()

    @torch.inference_mode()
    def forward(batch: OccurrenceBatch) -> None:
        encoder(batch.tokens.to(device), [layer])

    n_workers = torch.get_num_threads() if device.type == "cpu" else 1
    return lambda: run_batches(forward, batches, n_workers)


def measure(ways: dict[str, Prepare], n_rounds: int) -> dict[str, Timing]:
    runs: dict[str, list[Timing]] = {name: [] for name in ways}
    for _ in range(n_rounds):
        for name, prepare in ways.items():
            runs[name].append(Timing.of(prepare()))
    return {
        name: Timing(min(run.wall for run in mine), min(run.cpu for run in mine))
        for name, mine in runs.items()
    }


class FreeEncoder(torch.nn.Module):
    """Stands for an encoder; its states have one dimension and cost nothing."""

    hidden_size = 1

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.tokenizer = encoder.tokenizer
        self.states = torch.nn.Parameter(torch.randn(1 << 18, 1), requires_grad=False)

    def forward(self, tokens: TokenBatch, layers: list[int]) -> list[torch.Tensor]:
        return [self.states[: len(tokens.ids)]]


def show_host(encoder: FreeEncoder, corpus: WordCorpus, n_rounds: int) -> None:
    """Print the CPU microseconds a sentence of either thread, in batches of a GPU's size."""
    print(f"{len(corpus):,} sentences, microseconds a sentence, best of {n_rounds}")
    print(f"{'':24}{'planning':>10}{'learning':>10}")
    for name, method in METHODS.items():
        runs = [time_host(encoder, corpus, method) for _ in range(n_rounds)]
        planning, learning = (1e6 * min(times) / len(corpus) for times in zip(*runs, strict=True))
        print(f"{name:24}{planning:10.2f}{learning:10.2f}")


def time_host(encoder: FreeEncoder, corpus: WordCorpus, method: Method) -> tuple[float, float]:
    learner: Learner = make_learner(corpus, encoder, method)
    times, order, size = [time.thread_time()], learner.order(0), learner.block_sentences
    blocks: list[OccurrenceBlock] = []
    for number, start in enumerate(range(0, len(corpus), size)):
        found = find_occurrences(corpus, order[start : start + size], learner.choose(number))
        blocks.append(plan_block(encoder, corpus, found, learner.view, BATCH_TOKENS["cuda"]))
    times.append(time.thread_time())
    for number, block in enumerate(blocks):
        learner.absorb(number, block, embed_occurrences(encoder, block, 0, learner.view))
    times.append(time.thread_time())
    return times[1] - times[0], times[2] - times[1]


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
