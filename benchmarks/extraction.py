"""Speed of static vector extraction compared with the bare forward pass to the same layer.

The bare forward pass runs the encoder on all sentences, tokenized and sorted before; an epoch of
X2Static skips sentences that subsampling leaves without targets, unless every word is a target
("all words"). Reading is done once for all epochs, and so is the initialization of the vectors,
which is not measured. Rounds alternate, and the best of each counts. Blocks are planned while
others are encoded: use at least ten thousand sentences to see this.

With --host the encoder costs nothing and states have one dimension: what remains is the time that
each of the two threads needs to keep a device busy, without the operators of the device.

    python benchmarks/extraction.py --text wiki.de.txt --language de --threads 1
    python benchmarks/extraction.py --text wiki.de.txt --language de --threads 1 --host
    python benchmarks/extraction.py --tiny
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

from calque.models.encoder import Encoder
from calque.models.inference import BATCH_TOKENS, device_of, load_encoder, run_batches
from calque.types import TokenBatch
from calque.vectors.corpus import (
    CorpusFilter,
    CorpusReader,
    VocabularyLimits,
    WordCorpus,
    number_corpus,
)
from calque.vectors.extract import MAX_LENGTH, create_learner, learn
from calque.vectors.occurrences import (
    OccurrenceBatch,
    OccurrenceBlock,
    embed_occurrences,
    find_occurrences,
    plan_block,
)
from calque.vectors.x2static import BLOCK_SENTENCES, X2StaticSettings

GOAL = 1.5
METHODS: dict[str, X2StaticSettings | None] = {
    "x2static": X2StaticSettings(n_epochs=1),
    "x2static, all words": X2StaticSettings(n_epochs=1, subsample=1),
    # So few targets and negatives that launching the operators dominates.
    "x2static, few targets": X2StaticSettings(n_epochs=1, subsample=3e-8, n_negatives=1),
    "pooling": None,
}
Prepare = Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Timing:
    """Wall-clock seconds of one run, and CPU seconds of all cores."""

    wall: float
    cpu: float

    @staticmethod
    def measure(work: Callable[[], object]) -> Timing:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def main() -> None:
    options = parse_options()
    if options.tiny:
        options.limit, options.rounds, options.threads = 20, 1, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    encoder = load_encoder(options.model, options.device)
    middle = round(encoder.n_layers / 2)
    layer = encoder.check_layer(middle if options.layer is None else options.layer)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        reader = CorpusReader(options.language, CorpusFilter(1, 1, options.limit))
        sentences = reader.read([options.text or write_demo(folder)])
        max_subwords = min(MAX_LENGTH, encoder.max_tokens) - 2
        limits = VocabularyLimits(min_count=options.min_count)
        reading = Timing.measure(
            lambda: number_corpus(
                encoder.tokenizer, sentences, folder, max_subwords=max_subwords, limits=limits
            )
        )
        corpus = WordCorpus.open(folder)
        assert corpus is not None
        if options.host or options.tiny:
            show_host(FreeEncoder(encoder), corpus, options.rounds)
        if not options.host:
            timings = measure(list_programs(encoder, corpus, layer), options.rounds)
            show(encoder, corpus, layer, {"reading and numbering": reading, **timings})


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="calque-mini", help="folder of an encoder")
    parser.add_argument(
        "--text", help="one paragraph per line; default: the English sentences of the demo"
    )
    parser.add_argument("--language", default="en")
    parser.add_argument("--layer", type=int, help="default: the middle layer")
    parser.add_argument("--limit", type=int, default=2000, help="sentences")
    parser.add_argument("--min-count", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: the default of torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host", action="store_true", help="measure the threads separately")
    parser.add_argument("--tiny", action="store_true", help="20 sentences, once")
    return parser.parse_args()


def write_demo(folder: Path) -> Path:
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    path = folder / "demo.txt"
    path.write_text("\n".join(row.split("\t")[1] for row in table.splitlines()[1:]), "utf-8")
    return path


def list_programs(encoder: Encoder, corpus: WordCorpus, layer: int) -> dict[str, Prepare]:
    def extract(method: X2StaticSettings | None) -> Callable[[], None]:
        learner = create_learner(corpus, encoder, method)
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


def measure(programs: dict[str, Prepare], n_rounds: int) -> dict[str, Timing]:
    runs: dict[str, list[Timing]] = {name: [] for name in programs}
    for _ in range(n_rounds):
        for name, prepare in programs.items():
            runs[name].append(Timing.measure(prepare()))
    return {
        name: Timing(min(run.wall for run in mine), min(run.cpu for run in mine))
        for name, mine in runs.items()
    }


class FreeEncoder(torch.nn.Module):
    """A substitute for an encoder; its states have one dimension and cost nothing."""

    hidden_size = 1

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.tokenizer = encoder.tokenizer
        self.states = torch.nn.Parameter(torch.randn(1 << 18, 1), requires_grad=False)

    def forward(self, tokens: TokenBatch, layers: list[int]) -> list[torch.Tensor]:
        return [self.states[: len(tokens.ids)]]

    def check_finite(self, states: torch.Tensor, layer: int) -> None:
        """Do nothing: the states are finite."""


def show_host(encoder: FreeEncoder, corpus: WordCorpus, n_rounds: int) -> None:
    """Print the CPU microseconds per sentence of each thread, with batches for a GPU."""
    print(f"{len(corpus):,} sentences, microseconds per sentence, best of {n_rounds}")
    print(f"{'':24}{'planning':>10}{'learning':>10}")
    for name, method in METHODS.items():
        runs = [time_host(encoder, corpus, method) for _ in range(n_rounds)]
        planning, learning = (1e6 * min(times) / len(corpus) for times in zip(*runs, strict=True))
        print(f"{name:24}{planning:10.2f}{learning:10.2f}")


def time_host(
    encoder: FreeEncoder, corpus: WordCorpus, method: X2StaticSettings | None
) -> tuple[float, float]:
    learner = create_learner(corpus, encoder, method)
    times, order, size = [time.thread_time()], learner.order(0), learner.block_sentences
    blocks: list[OccurrenceBlock] = []
    for number, start in enumerate(range(0, len(corpus), size)):
        found = find_occurrences(corpus, order[start : start + size], learner.choose(number))
        blocks.append(plan_block(encoder, corpus, found, learner.view, BATCH_TOKENS["cuda"]))
    times.append(time.thread_time())
    for number, block in enumerate(blocks):
        learner.update(number, block, embed_occurrences(encoder, block, 0, learner.view))
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
