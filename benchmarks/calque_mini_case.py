r"""Prepare a training that teaches calque-mini to read capitals, titles, and missing punctuation.

    python benchmarks/calque_mini_case.py DATA -o WORK [--model calque-mini]
    cd WORK && calque train calque-mini-refine -o run --set engine.precision=bf16 \
        --set schedule.steps=420
    python benchmarks/calque_mini_case.py --average WORK
    python benchmarks/calque_mini_case.py DATA --score WORK/model
    python benchmarks/calque_mini_case.py --tiny               (all of its code in a few seconds)

DATA has bitext/en-XX.tsv.xz and bitext/prose/en-XX.tsv.xz; for `--score`, xtreme/xnli/.
WORK/start is the model with upper-case copies of its pieces, so that text in capitals is no longer
cut into letters: a new row starts as the row of its lower-case piece. WORK/bitext has sentences of
which half are written in another way, and WORK/linked words that the model links itself, so that
it keeps its links. `--average` writes WORK/model, the weighted mean of the model before and after,
and `--score` measures retrieval of sentences that are written in each way.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from calque_mini_2 import NEW, Text, balance, read_demo, write_lines, write_tokenizer, write_weights
from safetensors.torch import load_file, save_file
from tiny_data import write_data
from torch.nn import functional as F

import calque
from calque.io.segmentation import get_word_splitter
from calque.models.inference import has_fast_bf16
from calque.models.loading import find_model
from calque.tokens.tokenizer import FIRST_TOKENS
from calque.types import SentencePair

# Most training pairs per language and kind of text, and how many of them have links.
MOST, MOST_LINKED = {"plain": 8000, "software": 2000, "bible": 0}, 2000
# How much less likely than its lower-case piece a piece is for masked language modeling.
BIAS_OF_CAPITALS = -5.0
SHARE_OF_TRAINED = 0.7  # of the weights
SCORED, MOST_SCORED = ("de", "fr", "es", "ru", "tr", "vi", "el", "bg"), 800


def drop_last_mark(text: str) -> str:
    return text.rstrip(".!?…。！？") or text


# Ways of writing with their shares among the sentences; the others stay as they are.
WAYS: dict[str, tuple[float, Callable[[str], str]]] = {
    "upper case": (0.16, str.upper),
    "title case": (0.14, lambda text: " ".join(map(capitalize, text.split(" ")))),
    "lower case": (0.08, str.lower),
    "no final mark": (0.07, drop_last_mark),
    "in quotes": (0.05, lambda text: f"“{text}”"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--average", type=Path, metavar="WORK", help="write WORK/model instead")
    parser.add_argument("--score", metavar="MODEL", help="measure retrieval instead")
    parser.add_argument("--model", default="calque-mini", help="the model to train")
    parser.add_argument("--tiny", action="store_true", help="a few pairs and a tiny model")
    options = parser.parse_args()
    if options.tiny:
        with tempfile.TemporaryDirectory() as scratch:
            data, work = Path(scratch) / "data", Path(scratch) / "work"
            model = write_data(data)
            prepare(Text(data), work, model)
            shutil.copytree(work / "start", work / "run" / "model")
            average(work)
            score(work / "model", {"fr": [("A house.", "Une maison."), ("Two.", "Deux.")]})
    elif options.average is not None:
        average(options.average)
    elif options.data is not None and options.score is not None:
        score(options.score, read_xnli(options.data))
    elif options.data is None or options.output is None:
        print("skipped: this script needs a folder with bitext and -o or --score, or --tiny")
    else:
        prepare(Text(options.data, read_demo()), options.output, find_model(options.model))


def prepare(text: Text, work: Path, model: Path) -> None:
    """Write everything that the recipe calque-mini-refine reads."""
    for folder in ("bitext", "dev", "linked", "start"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    add_capitals(model, work / "start")
    aligner = calque.WordAligner(calque.load(work / "start", "cpu"), method="argmax")
    generator, english = random.Random(3), dict[str, None]()
    for language in text.list_languages():
        pairs = balance(text.split(language, work / "dev"), MOST)
        english |= dict.fromkeys(pair.src for pair in pairs[: MOST["plain"] // 4])
        rows = (f"{pair.src}\t{vary(pair.tgt, generator)}" for pair in pairs)
        write_lines(work / "bitext" / f"en-{language}.tsv", rows)
        if language not in NEW or NEW[language].has_spaces:
            link(work / "linked" / f"en-{language}", language, pairs, aligner, generator)
        print(f"{language}: {len(pairs):,} pairs", flush=True)
    # English itself: the teacher reads the sentence as it is.
    rows = (f"{each}\t{vary(each, generator, always=True)}" for each in english)
    write_lines(work / "bitext" / "en-en.tsv", rows)


def add_capitals(model: Path, start: Path) -> None:
    """Write the model with upper-case copies of its pieces."""
    spec = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = spec["model"]["vocab"]
    copies = find_capitals(vocabulary)
    n_old = len(vocabulary)
    # A multiple of 64 rows, with <mask> as the last one: the least likely pieces are left out.
    copies = copies[: len(copies) - (n_old + len(copies) + 1) % 64]
    pieces = vocabulary + [[piece, vocabulary[row][1]] for piece, row in copies]
    write_tokenizer(model, start, spec, pieces)
    rows = torch.tensor([row for _, row in copies], dtype=torch.long)
    bias = BIAS_OF_CAPITALS
    write_weights(model, start, n_old, lambda old: old[rows] + (bias if old.ndim == 1 else 0.0))


def average(work: Path) -> None:
    """Write the weighted mean of the model before and after the training, in half precision."""
    before, after = (
        load_file(work / folder / "model.safetensors") for folder in ("start", "run/model")
    )
    shutil.copytree(work / "start", work / "model", dirs_exist_ok=True)
    mean = {
        key: torch.lerp(before[key].float(), value.float(), SHARE_OF_TRAINED).half().contiguous()
        for key, value in after.items()
    }
    save_file(mean, work / "model" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((work / "start" / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = "float16"
    alignment = config.get("calque", {}).get("alignment", {})
    if alignment.pop("calibration", None) is not None:  # its probabilities have changed
        alignment["method"] = "argmax"
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (work / "model" / "config.json").write_text(text, encoding="utf-8")


def find_capitals(vocabulary: Sequence[Sequence[Any]]) -> list[tuple[str, int]]:
    """Return upper-case pieces that do not exist yet, and the most likely piece of each.

    >>> find_capitals([*FIRST_TOKENS, ("▁The", -3.0), ("the", -4.0), ("▁the", -2.0), ("a", -5.0)])
    [('▁THE', 6), ('THE', 5)]
    """
    known = {piece for piece, *_ in vocabulary}
    found: dict[str, int] = {}
    for row in range(len(FIRST_TOKENS), len(vocabulary)):
        piece, score = vocabulary[row]
        capitals = piece.upper()
        is_new = capitals not in known and len(capitals) == len(piece) > 1
        if not is_new or sum(map(str.isalpha, piece)) < 2:
            continue
        if capitals not in found or score > vocabulary[found[capitals]][1]:
            found[capitals] = row
    return sorted(found.items(), key=lambda item: (-vocabulary[item[1]][1], item[0]))


def vary(text: str, generator: random.Random, *, always: bool = False) -> str:
    """Write some of the sentences in another way."""
    total = sum(share for share, _ in WAYS.values()) if always else 1.0
    drawn = generator.random() * total
    for share, way in WAYS.values():
        if drawn < share:
            return way(text)
        drawn -= share
    return text


def capitalize(word: str) -> str:
    return word[:1].upper() + word[1:]


def link(
    path: Path,
    language: str,
    pairs: Sequence[SentencePair],
    aligner: calque.WordAligner,
    generator: random.Random,
) -> None:
    """Link the words of some pairs with the model, and write some of the pairs in another way."""
    split = get_word_splitter("en"), get_word_splitter(language)
    words = [(split[0](pair.src), split[1](pair.tgt)) for pair in pairs[:MOST_LINKED]]
    words = [pair for pair in words if all(2 <= len(side) <= 50 for side in pair)]
    with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bf16()):
        links = aligner.align(words)
    by_word = [way for _, way in (WAYS["upper case"], WAYS["title case"], WAYS["lower case"])]
    lines = []
    for pair in words:
        way = generator.choice(by_word) if generator.random() < 0.3 else str
        lines.append(" ||| ".join(" ".join(map(way, side)) for side in pair))
    write_lines(path.with_suffix(".text"), lines)
    write_lines(path.with_suffix(".links"), (" ".join(f"{i}-{j}" for i, j in row) for row in links))


def read_xnli(data: Path) -> dict[str, list[tuple[str, str]]]:
    """Return English premises and their translations."""
    sides: dict[str, list[str]] = {}
    for language in ("en", *SCORED):
        path = data / "xtreme" / "xnli" / f"dev-{language}.tsv.xz"
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            sides[language] = [line.split("\t")[1] for line in stream][:MOST_SCORED]
    return {language: list(zip(sides["en"], sides[language], strict=True)) for language in SCORED}


def score(model: str | Path, tests: dict[str, Iterable[tuple[str, str]]]) -> None:
    """Print the accuracy of retrieval, the mean of both directions, for each way of writing."""
    encoder = calque.load(model, "cpu", precision="bf16" if has_fast_bf16() else "fp32")
    names = ["as written", *WAYS]
    print("| | " + " | ".join(names) + " |\n|---|" + len(names) * "---|")
    for language, pairs in tests.items():
        english, others = zip(*pairs, strict=True)
        src = F.normalize(torch.as_tensor(encoder.embed(list(english))), dim=1)
        own, row = torch.arange(len(english)), []
        for way in [str, *(way for _, way in WAYS.values())]:
            tgt = F.normalize(torch.as_tensor(encoder.embed(list(map(way, others)))), dim=1)
            similarity = src @ tgt.T
            hits = torch.cat([similarity.argmax(1) == own, similarity.argmax(0) == own])
            row.append(f"{100 * hits.float().mean():.1f}")
        print(f"| {language} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
