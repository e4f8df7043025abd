"""`calque` with an aligner that needs no model: python toy_align.py align FILE ...

TOY_BLOCK sets the pairs per block and TOY_DELAY the seconds per block. With TOY_STOP_RANK and
TOY_STOP_BLOCK, the process of that rank kills itself when it reaches its block of that number.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch

from calque.cli import run
from calque.io.links import build_links
from calque.types import Links
from calque.word_alignment import build
from calque.word_alignment.build import AlignerOptions, BuiltAligner
from calque.word_alignment.protocol import AlignedBlock, AlignReport, WordPair

if TYPE_CHECKING:
    from calque.word_alignment.neural import AlignSettings

WINDOW = 50


class ToyAligner:
    """Links word i with word i; scores depend on the pairs that are aligned together.

    The last digits of a real encoder's scores depend on them too.
    """

    method = "toy"

    def __init__(self, layer: int = 1, delay: float = 0.0) -> None:
        self.layer, self.delay, self.n_blocks = layer, delay, 0

    def with_layer(self, layer: int) -> ToyAligner:
        return ToyAligner(layer, self.delay)

    def align_each(
        self, pairs: Sequence[WordPair], settings: Sequence[AlignSettings]
    ) -> list[AlignedBlock]:
        blocks = []
        for choice in settings:
            block = self.with_layer(choice.layer or 0).align_block(pairs)
            if choice.method == "probability":
                block = replace(block, links=score_all(block.links, pairs, choice))
            blocks.append(block)
        return blocks

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        time.sleep(self.delay)
        stop = (os.environ.get("TOY_STOP_RANK"), os.environ.get("TOY_STOP_BLOCK"))
        if stop == (os.environ.get("RANK"), str(self.n_blocks)):
            os.kill(os.getpid(), signal.SIGKILL)
        self.n_blocks += 1
        checksum = crc32(repr([(list(src), list(tgt)) for src, tgt in pairs]).encode()) % 10_000
        lengths = np.array([min(len(src), len(tgt)) for src, tgt in pairs], dtype=np.int64)
        words = np.concatenate([np.arange(n) for n in [0, *lengths.tolist()]]).astype(np.int64)
        shifted = np.maximum(words - (self.layer - 1), 0)  # higher layers: more errors
        owners = np.repeat(np.arange(len(pairs)), lengths)
        scores = np.full(len(words), checksum / 10_000, dtype=np.float32)
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


def score_all(links: Links, pairs: Sequence[WordPair], choice: AlignSettings) -> Links:
    """Score the links of the toy 0.9 and all other word pairs 0.1, and keep the likely ones."""
    found = set(zip(links.pairs.tolist(), links.src.tolist(), links.tgt.tolist(), strict=True))
    cells = [
        (number, i, j)
        for number, (src, tgt) in enumerate(pairs)
        for i in range(len(src))
        for j in range(len(tgt))
    ]
    scores = torch.tensor([0.9 if cell in found else 0.1 for cell in cells])
    scores = scores if choice.calibration is None else choice.calibration.apply(scores)
    kept = np.flatnonzero((scores >= choice.min_score).numpy())
    rows = [cells[k] for k in kept.tolist()]
    return build_links(rows, len(pairs), scores[kept].tolist())


class ToyBuilt(BuiltAligner):
    def to_settings(self) -> dict[str, str | int | None]:
        return {"method": self.options.method, "layer": self.aligner.layer}  # type: ignore[attr-defined]


def build_aligner(options: AlignerOptions, *_: object) -> BuiltAligner:
    layer = 1 if options.layer is None else options.layer
    aligner = ToyAligner(layer, float(os.environ.get("TOY_DELAY", "0")))
    return ToyBuilt(aligner, "toy", int(os.environ.get("TOY_BLOCK", "8")), options)


def build_sweep(options: AlignerOptions) -> tuple[ToyAligner, list[AlignSettings]]:
    from calque.word_alignment.neural import AlignSettings
    from calque.word_alignment.sweep import list_choices

    return ToyAligner(), list_choices(AlignSettings(), [1, 2])


if __name__ == "__main__":
    build.build_aligner = build_aligner  # type: ignore[assignment]
    build.build_sweep = build_sweep  # type: ignore[assignment]
    sys.exit(run())
