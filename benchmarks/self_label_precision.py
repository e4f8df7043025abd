"""Precision of the self-labels of denoising word alignment (XLM-Align) against gold links.

    python benchmarks/self_label_precision.py FOLDER [--model calque-mini] [--layers 5,6,7]
    python benchmarks/self_label_precision.py --tiny          (all of its code in a few seconds)

FOLDER has PAIR.text and PAIR.gold. Only development pairs are read, every fifth by default, so that
labels can be chosen here and aligners scored on the other pairs. Labels link subwords of pairs that
are encoded as one sequence, exactly as in training. The columns are means over the language pairs:

- precision: share of the subword links that are within linked words of the gold links;
- labeled: share of the subwords that have a link, and so can be queries of the pointer network;
- AER: of the links between words that any of their subwords have.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch
from tiny_data import write_data

import calque
from calque.io.bitext import read_bitext
from calque.io.links import build_links, read_gold
from calque.models.encoder import Encoder
from calque.objectives.self_labels import (
    LabelRules,
    PairBlocks,
    compare_states,
    find_links,
    token_sides,
)
from calque.tokens.layout import add_pair_special_tokens, join_sides
from calque.tokens.ragged import Ragged, pack
from calque.tokens.tokenizer import SpecialTokens
from calque.tokens.words import EncodedWords, WordEncoder
from calque.word_alignment.neural import AlignSettings
from calque.word_alignment.scoring import count_links

BATCH_PAIRS = 64
SHARPNESS = {"dot": (1.0, 5.0, 20.0), "cosine": (5.0, 10.0, 20.0, 40.0)}
FILTERS = ("argmax", "itermax", "union")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", default="calque-mini")
    parser.add_argument("--layers", help="such as 6,7; default: the model's for words")
    parser.add_argument("--every", type=int, default=5, help="use every Nth pair")
    parser.add_argument("--languages", help="such as de-en,en-fr; default: all of the folder")
    parser.add_argument("--tiny", action="store_true", help="a few pairs and a tiny model")
    options = parser.parse_args()
    if options.tiny:
        with tempfile.TemporaryDirectory() as scratch:
            options.model = str(write_data(Path(scratch)))
            options.folder, options.layers = Path(scratch) / "gold_alignments", "1,2"
            measure(options)
    elif options.folder is None:
        print("skipped: this script needs a folder with gold links, or --tiny")
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Print one row for every layer and every way of labeling."""
    encoder = calque.load(options.model, "cpu")
    settings = AlignSettings.of(encoder)
    layers = [int(n) for n in options.layers.split(",")] if options.layers else [settings.layer]
    names = options.languages.split(",") if options.languages else None
    tests = [
        DevelopmentPairs(encoder, path, options.every, reset=settings.positions == "reset")
        for path in sorted(options.folder.glob("*.gold"))
        if names is None or path.stem in names
    ]
    n_pairs = sum(test.n_pairs for test in tests)
    print(f"{n_pairs} development pairs of {len(tests)} language pairs, {options.model}")
    print(
        "| layer | similarity | labels | sharpness | scaled first | filter | precision | labeled |"
        " AER |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for layer in layers:
        similarities = {kind: [t.compare(layer, kind) for t in tests] for kind in SHARPNESS}
        for rules in list_rules():
            rows = [
                test.score(states, rules)
                for test, states in zip(tests, similarities[rules.similarity], strict=True)
            ]
            precision, labeled, aer = np.mean(rows, axis=0)
            is_plan = rules.labels == "transport"
            cells = [layer, rules.similarity, rules.labels]
            cells += [f"{rules.sharpness:g}", rules.scale_first] if is_plan else ["–", "–"]
            cells += [rules.filter, *(f"{100 * x:.1f}" for x in (precision, labeled, aer))]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def list_rules() -> Iterator[LabelRules]:
    """List all ways of labeling that are compared."""
    for kind, values in SHARPNESS.items():
        for name in FILTERS:
            yield LabelRules(kind, labels="argmax", filter=name)
        for sharpness, name, first in product(values, FILTERS, ("columns", "rows")):
            yield LabelRules(kind, sharpness, filter=name, scale_first=first)


class DevelopmentPairs:
    """Every Nth pair of a gold set that fits the encoder, tokenized."""

    def __init__(self, encoder: Encoder, gold: Path, every: int, *, reset: bool) -> None:
        self.encoder, self.reset = encoder, reset
        self.special = SpecialTokens.of(encoder.tokenizer)
        pairs = [(p.src.split(), p.tgt.split()) for p in read_bitext(gold.with_suffix(".text"))]
        words = WordEncoder(encoder.tokenizer)
        numbers = list(range(0, len(pairs), every))
        src, tgt = (words.encode([pairs[n][side] for n in numbers]) for side in (0, 1))
        n_tokens = np.maximum(src.lengths, tgt.lengths) if reset else src.lengths + tgt.lengths
        fits = n_tokens + 2 + (0 if reset else self.special.n_between) <= encoder.max_tokens
        self.numbers = [n for n, is_short in zip(numbers, fits, strict=True) if is_short]
        self.src, self.tgt = (
            words.encode([pairs[n][side] for n in self.numbers]) for side in (0, 1)
        )
        self.gold = read_gold(gold).take(self.numbers)

    @property
    def n_pairs(self) -> int:
        """Number of pairs."""
        return len(self.numbers)

    @torch.inference_mode()
    def compare(self, layer: int, similarity: str) -> list[tuple[torch.Tensor, PairBlocks]]:
        """Return the similarities of all tokens of every batch of pairs."""
        compared = []
        for start in range(0, self.n_pairs, BATCH_PAIRS):
            rows = slice(start, start + BATCH_PAIRS)
            left, right = (cut(side, rows) for side in (self.src, self.tgt))
            sides = add_pair_special_tokens(left, right, self.special)
            joined, positions = join_sides(*sides, reset=self.reset)
            tokens = pack(joined, positions=positions, pad_id=self.special.pad_id)
            flat_sides = torch.from_numpy(token_sides(left, right, self.special))
            blocks = PairBlocks.of(tokens, flat_sides)
            (states,) = self.encoder(tokens, [layer])
            compared.append((compare_states(blocks.to_blocks(states), similarity), blocks))
        return compared

    def score(
        self, compared: Sequence[tuple[torch.Tensor, PairBlocks]], rules: LabelRules
    ) -> tuple[float, float, float]:
        """Return precision of the subword links, share of labeled subwords, AER of the words."""
        possible = self.gold.possible
        columns = (possible.pairs.tolist(), possible.src.tolist(), possible.tgt.tolist())
        known = set(zip(*columns, strict=True))
        n_links = n_right = n_labeled = n_tokens = first = 0
        words: set[tuple[int, int, int]] = set()
        for similarity, blocks in compared:
            cells = blocks.cells()
            links = find_links(similarity, cells, rules)
            n_labeled += int(links.any(dim=2).sum() + links.any(dim=1).sum())
            n_tokens += int(cells.any(dim=2).sum() + cells.any(dim=1).sum())
            for k, (matrix, cell) in enumerate(zip(links, cells, strict=True)):
                src, tgt = owners(self.src, first + k), owners(self.tgt, first + k)
                inside = matrix[cell.any(dim=1)][:, cell.any(dim=0)]
                found = [(first + k, src[i], tgt[j]) for i, j in inside.nonzero().tolist()]
                n_links += len(found)
                n_right += sum(link in known for link in found)
                words.update(found)
            first += len(links)
        found_words = build_links(sorted(words), self.n_pairs)
        counts = count_links(found_words, self.gold.sure, possible)
        return n_right / max(1, n_links), n_labeled / n_tokens, counts.aer


def cut(side: EncodedWords, rows: slice) -> Ragged:
    """Return the subwords of some sentences."""
    starts = np.concatenate([[0], np.cumsum(side.lengths)])
    lengths = side.lengths[rows]
    return Ragged(side.ids[starts[rows.start] : starts[rows.start + len(lengths)]], lengths)


def owners(side: EncodedWords, number: int) -> list[int]:
    """Return the word of every subword of a sentence."""
    first, stop = side.first_words[number : number + 2]
    n_pieces = side.n_pieces[first:stop]
    return np.repeat(np.arange(len(n_pieces)), n_pieces).tolist()


if __name__ == "__main__":
    main()
