"""Calibration of the hybrid aligner's scores, and whether it carries over to other languages.

    python benchmarks/hybrid_calibration.py DATA [--model calque-mini] [--aligner eflomal]
    python benchmarks/hybrid_calibration.py --tiny          (all of its code in a few seconds)

DATA has gold_alignments/PAIR.text and PAIR.gold, and bitext/en-XX.tsv.xz. The statistical aligner
of each language pair is trained on the text of the gold links and on some pairs of the bitext. The
last line is the calibration for CALIBRATIONS in word_alignment/hybrid.py, fitted on every fifth
pair. The rows show AER and the expected calibration error (ECE) of the other pairs; "left out" is
the ECE with a calibration that is fitted on the other language pairs alone.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tiny_data import write_data

import calque
from calque.algorithms.calibration import Calibration, bin_reliability
from calque.evaluation.tasks.alignment_error import read_test
from calque.io.bitext import read_bitext
from calque.io.links import GoldLinks, take_pairs
from calque.models.encoder import Encoder
from calque.types import Links, SentencePair
from calque.word_alignment.file_job import build_splitter
from calque.word_alignment.hybrid import HybridAligner, build_hybrid_words
from calque.word_alignment.protocol import WordPair
from calque.word_alignment.scoring import count_links, judge_links
from calque.word_alignment.statistical import StatisticalAligner
from calque.word_alignment.sweep import JudgedScores

EVERY = 5  # pairs for development


@dataclass(frozen=True)
class Part:
    """The development or the test pairs of a language pair.

    `chosen` are the links of mutual argmax, and `scored` are all word pairs with their raw scores.
    """

    chosen: Links
    scored: Links
    gold: GoldLinks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--model", default="calque-mini")
    parser.add_argument("--aligner", default="eflomal", help="eflomal or fast-align")
    parser.add_argument("--pairs", type=int, default=25_000, help="pairs of each bitext")
    parser.add_argument("--tiny", action="store_true", help="a few pairs and a tiny model")
    options = parser.parse_args()
    if options.tiny:
        with tempfile.TemporaryDirectory() as scratch:
            options.model = str(write_data(Path(scratch)))
            options.data, options.aligner = Path(scratch), "fast-align"
            measure(options)
    elif options.data is None:
        print("skipped: this script needs a folder with gold links and bitext, or --tiny")
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Print a row for every language pair that has bitext, and the calibration."""
    encoder = calque.load(options.model, "cpu")
    dev, test = {}, {}
    for path in sorted((options.data / "gold_alignments").glob("*.gold")):
        for bitext in find_bitext(options.data, path.stem):
            dev[path.stem], test[path.stem] = align(encoder, path.stem, bitext, options)
    calibration = fit(dev.values())
    print("| pair | AER, argmax | AER, probability | ECE | ECE, left out |")
    print("|---|---|---|---|---|")
    for name, part in test.items():
        others = fit(some for other, some in dev.items() if other != name)
        row = [
            measure_aer(part.chosen, part.gold),
            measure_aer(keep_likely(part.scored, calibration), part.gold),
            measure_error(part, calibration),
            measure_error(part, others),
        ]
        print(f"| {name} |", " | ".join(f"{100 * value:.1f}" for value in row), "|", flush=True)
    print(f"{options.aligner}: {calibration}")


def find_bitext(data: Path, name: str) -> list[Path]:
    """Return the bitext of a language pair, whose name always starts with English, if it exists."""
    other = next(language for language in name.split("-") if language != "en")
    return list((data / "bitext").glob(f"en-{other}.tsv*"))


def align(
    encoder: Encoder, name: str, bitext: Path, options: argparse.Namespace
) -> tuple[Part, Part]:
    """Train a statistical aligner, and align the gold text; return development and test pairs."""
    pairs, gold = read_test(options.data, name)
    more = read_words(bitext, name, options.pairs)
    statistical = StatisticalAligner.train([*pairs, *more], options.aligner)
    words = build_hybrid_words(encoder, statistical.kind)
    hybrid = HybridAligner(words, statistical, is_training_text=True)
    chosen = hybrid.align_block(pairs).links
    words.settings = replace(words.settings, method="probability", calibration=None, threshold=0.0)
    scored = hybrid.align_block(pairs).links
    numbers = [range(0, len(pairs), EVERY), [n for n in range(len(pairs)) if n % EVERY]]
    dev, test = (
        Part(take_pairs(chosen, some), take_pairs(scored, some), gold.take(some))
        for some in numbers
    )
    return dev, test


def read_words(bitext: Path, name: str, n_pairs: int) -> list[WordPair]:
    """Read pairs that are spread over a bitext, split into words, in the order of the languages."""
    src, tgt = name.split("-")
    split = build_splitter((src, tgt))
    everything = list(read_bitext(str(bitext), "tsv"))
    some = everything[:: max(1, len(everything) // n_pairs)][:n_pairs]
    return [split(pair if src == "en" else SentencePair(pair.tgt, pair.src)) for pair in some]


def fit(parts: Iterable[Part]) -> Calibration:
    """Return the calibration with the best threshold for some language pairs."""
    scores = JudgedScores()
    for part in parts:
        scores.add(part.scored, part.gold)
    return scores.calibrate()[0]


def keep_likely(links: Links, calibration: Calibration) -> Links:
    """Return the links that reach the threshold of a calibration."""
    scores = calibration.apply(torch.from_numpy(links.scores)).numpy()
    kept = scores >= calibration.threshold
    columns = (links.pairs, links.src, links.tgt, scores)
    return Links(*(column[kept] for column in columns), links.n_pairs)


def measure_aer(links: Links, gold: GoldLinks) -> float:
    return count_links(links, gold.sure, gold.possible).aer


def measure_error(part: Part, calibration: Calibration) -> float:
    """Return the expected calibration error of the links of mutual argmax."""
    cells = [
        links.pairs << 40 | links.src << 20 | links.tgt for links in (part.scored, part.chosen)
    ]
    links = keep_likely(part.scored, replace(calibration, threshold=0.0))
    is_sure, is_possible = judge_links(links, part.gold)
    used = np.isin(*cells) & (is_sure | ~is_possible)
    return bin_reliability(links.scores[used], is_sure[used]).error


if __name__ == "__main__":
    main()
