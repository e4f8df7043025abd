"""`calque` with an aligner that needs no model: python toy_align.py align FILE …

TOY_BLOCK sets the pairs a block, TOY_DELAY the seconds a block takes. With TOY_STOP_RANK and
TOY_STOP_BLOCK that process of several is killed when it comes to its block of that number.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import numpy as np

from calque.cli import align_job as aligners
from calque.cli import run
from calque.cli.align_job import ChosenAligner
from calque.cli.aligner_options import AlignerOptions
from calque.types import Links
from calque.word_alignment.protocol import AlignedBlock, AlignReport, WordPair

WINDOW = 50


class ToyAligner:
    """Links word i with word i; scores tell in which company a pair was aligned.

    A real encoder's last digits depend on the other pairs of a block too.
    """

    method = "toy"

    def __init__(self, layer: int = 1, delay: float = 0.0) -> None:
        self.layer, self.delay, self.n_blocks = layer, delay, 0

    def with_layer(self, layer: int) -> ToyAligner:
        return ToyAligner(layer, self.delay)

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        time.sleep(self.delay)
        stop = (os.environ.get("TOY_STOP_RANK"), os.environ.get("TOY_STOP_BLOCK"))
        if stop == (os.environ.get("RANK"), str(self.n_blocks)):
            os.kill(os.getpid(), signal.SIGKILL)
        self.n_blocks += 1
        company = crc32(repr([(list(src), list(tgt)) for src, tgt in pairs]).encode()) % 10_000
        lengths = np.array([min(len(src), len(tgt)) for src, tgt in pairs], dtype=np.int64)
        words = np.concatenate([np.arange(n) for n in [0, *lengths.tolist()]]).astype(np.int64)
        shifted = np.maximum(words - (self.layer - 1), 0)  # the further up, the more is wrong
        owners = np.repeat(np.arange(len(pairs)), lengths)
        scores = np.full(len(words), company / 10_000, dtype=np.float32)
        longest = np.array([max(len(src), len(tgt)) for src, tgt in pairs], dtype=np.int64)
        is_long = longest > WINDOW
        report = AlignReport(
            n_pairs=len(pairs),
            n_links=len(words),
            n_empty=int((lengths == 0).sum()),
            n_long=int(is_long.sum()),
            n_windows=int(np.ceil(longest[is_long] / WINDOW).sum()),
        )
        return AlignedBlock(Links(owners, words, shifted, scores, len(pairs)), report)


@contextmanager
def choose_aligner(
    options: AlignerOptions,
    read_pairs: Callable[[], Iterator[WordPair]],
    read_bitext: Callable[[], Iterator[WordPair]],
) -> Iterator[ChosenAligner]:
    layer = 1 if options.layer is None else options.layer
    aligner = ToyAligner(layer, float(os.environ.get("TOY_DELAY", "0")))
    n_pairs = int(os.environ.get("TOY_BLOCK", "8"))
    yield ChosenAligner(aligner, "toy", n_pairs, lambda: {"method": options.method, "layer": layer})


def choose_sweep(options: AlignerOptions) -> tuple[dict[str, ToyAligner], list[int]]:
    return {"ot": ToyAligner(), "argmax": ToyAligner()}, [1, 2]


if __name__ == "__main__":
    aligners.choose_aligner = choose_aligner
    aligners.choose_sweep = choose_sweep
    sys.exit(run())
