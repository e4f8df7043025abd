"""Vocabulary matching: CPU seconds and memory of 250 k × 50 k pieces with 45 dictionaries.

    python benchmarks/vocabulary.py --muse DATA/muse
    python benchmarks/vocabulary.py --tiny

The SentencePiece and WordPiece vocabularies consist of the words of MUSE dictionaries and of parts
of them; 45 dictionaries of 100,000 entries repeat and extend MUSE's. Without --muse all words are
random. For comparison, a simple program matches one token at a time with `transformers`; it has no
normalizer rule, no scripts and no standalone pieces. The last row is the initialization of weights.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calque.growth.initialize import combine_rows, draw_like
from calque.growth.match import RULES, VocabularyMatch, match_rows
from calque.io.dictionaries import read_dictionary
from calque.tokens.vocabularies import PieceIndex, Vocabulary

N_LANGUAGES = 45
LETTERS = "abcdefghijklmnopqrstuvwxyzäöüéèñçабвгдежзиклмнопрстуαβγδεζηθικλμνξπρστ"


# Input.


def draw_words(n_words: int, generator: random.Random, alphabet: str) -> list[str]:
    """Draw random words with realistic lengths."""
    words: dict[str, None] = {}
    while len(words) < n_words:
        length = min(14, 2 + int(generator.expovariate(0.25)))
        words["".join(generator.choices(alphabet, k=length))] = None
    return list(words)


def read_muse(folder: Path) -> tuple[dict[str, list[tuple[str, str]]], list[str], list[str]]:
    """Read the dictionaries from English; also return the English words and the others."""
    entries: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(folder.glob("en-??.*.txt")):
        code = path.name[3:5]
        if code != "en":
            entries.setdefault(code, []).extend(read_dictionary(path))
    english = Counter(word for each in entries.values() for word, _ in each)
    others = Counter(word for each in entries.values() for _, word in each)
    return entries, [word for word, _ in english.most_common()], list(others)


def write_dictionaries(
    folder: Path,
    entries: dict[str, list[tuple[str, str]]],
    words: tuple[list[str], list[str]],
    n_entries: int,
    generator: random.Random,
) -> list[Path]:
    """Write 45 dictionaries of equal size; missing entries are random."""
    codes = [*entries, *(f"{a}{b}" for a in "qxyz" for b in "abcdefghijklmnopqrst")][:N_LANGUAGES]
    paths = []
    for code in codes:
        lines = entries.get(code, [])[:n_entries]
        n_more = n_entries - len(lines)
        drawn = zip(
            generator.choices(words[0], k=n_more),
            generator.choices(words[1], k=n_more),
            strict=True,
        )
        text = "".join(f"{a} {b}\n" for a, b in [*lines, *drawn])
        paths.append(folder / f"en-{code}.txt")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def make_pieces(
    words: list[str], n_pieces: int, format_piece: Callable[[str, bool], str]
) -> list[str]:
    """Return pieces: half of them whole words, a tenth capitalized; the rest are parts of words."""
    pieces: dict[str, None] = {}
    for share, make in (
        (0.4, lambda word: format_piece(word, True)),
        (0.5, lambda word: format_piece(word.capitalize(), True)),
        (0.7, lambda word: format_piece(word[-4:], False)),
        (0.85, lambda word: format_piece(word[:5], True)),
        (1.0, lambda word: format_piece(word[1:], False)),
        (1.0, lambda word: format_piece(word[2:-1], False)),
    ):
        made = iter(dict.fromkeys(make(word) for word in words if len(word) > 3))
        pieces |= dict.fromkeys(islice(made, int(share * n_pieces) - len(pieces)))
    return list(pieces)


def make_mono(words: list[str], n_pieces: int) -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = sorted(set("".join(words)))
    pieces = make_pieces(words, n_pieces, lambda text, starts: text if starts else "##" + text)
    every = dict.fromkeys([*special, *letters, *("##" + letter for letter in letters), *pieces])
    vocabulary = {piece: number for number, piece in enumerate(list(every)[:n_pieces])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return wrap(tokenizer, special)


def make_new(words: list[str], n_pieces: int) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    pieces = make_pieces(words, n_pieces, lambda text, starts: "▁" + text if starts else text)
    scores = [(piece, -10.0) for piece in [*special, *pieces][:n_pieces]]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return wrap(tokenizer, special)


def wrap(tokenizer: Tokenizer, special: list[str]) -> PreTrainedTokenizerFast:
    roles = ("pad", "unk", "cls", "sep", "mask")
    named = {f"{role}_token": token for role, token in zip(roles, special, strict=True)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


# The simple program.


def match_simply(
    new: PreTrainedTokenizerFast, mono: PreTrainedTokenizerFast, paths: list[Path]
) -> dict[int, list[int]]:
    """Return the sources of each row, one token at a time."""
    known = mono.get_vocab()
    meanings: dict[str, dict[str, None]] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            english, other = line.split()
            meanings.setdefault(other, {})[english] = None
    roles = ("cls_token", "sep_token", "pad_token", "unk_token", "mask_token")
    special = {getattr(new, role): getattr(mono, role) for role in roles}
    sources = {}
    for row in range(len(new)):
        token = new.convert_ids_to_tokens(row)
        if token in special:
            sources[row] = [mono.convert_tokens_to_ids(special[token])]
            continue
        starts = token.startswith("▁")
        text = token.lstrip("▁")
        normal = unicodedata.normalize("NFKC", text).lower()
        for form in (text, normal):
            piece = form if starts else "##" + form
            if piece in known:
                sources[row] = [mono.convert_tokens_to_ids(piece)]
                break
        else:
            words = meanings.get(text) or meanings.get(normal) or {}
            if starts and words:
                sources[row] = [
                    number
                    for word in words
                    for number in mono.convert_tokens_to_ids(mono.tokenize(word))
                ]
    return sources


def measure(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def compare(match: VocabularyMatch, simple: dict[int, list[int]]) -> float:
    """Return the fraction of the simple program's rows that have the same sources."""
    bounds = np.searchsorted(match.sources.rows, np.arange(len(match.rules) + 1))
    same = [
        set(sources) == set(match.sources.sources[bounds[row] : bounds[row + 1]].tolist())
        for row, sources in simple.items()
    ]
    return sum(same) / len(same)


def fill(match: VocabularyMatch, n_old: int, hidden: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = combine_rows(torch.randn((n_old, hidden), generator=generator), match.sources)
    unmatched = torch.from_numpy(match.rules == RULES.index("unmatched"))
    rows[unmatched] = draw_like(rows[~unmatched], int(unmatched.sum()), generator)
    return rows


def describe(name: str, seconds: float, note: str) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"name": name, "seconds": seconds, "peak_gb": peak, "note": note}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--muse", type=Path)
    parser.add_argument("--new", type=int, default=250_000)
    parser.add_argument("--mono", type=int, default=50_000)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="400 × 200 pieces")
    options = parser.parse_args()
    if options.tiny:
        options.new, options.mono, options.entries, options.hidden = 400, 200, 20, 8
    generator = random.Random(0)
    entries: dict[str, list[tuple[str, str]]] = {}
    if options.muse is not None:
        entries, english, others = read_muse(options.muse)
    else:
        english = draw_words(options.mono, generator, LETTERS[:26])
        others = draw_words(options.new, generator, LETTERS)
    mono, new = make_mono(english, options.mono), make_new(english[:20_000] + others, options.new)
    with tempfile.TemporaryDirectory() as folder:
        words = (english, others)
        paths = write_dictionaries(Path(folder), entries, words, options.entries, generator)
        seconds, match = measure(lambda: match_rows(Vocabulary.of(new), PieceIndex(mono), paths))
        counts = np.bincount(match.rules, minlength=len(RULES))
        note = ", ".join(f"{rule} {n:,}" for rule, n in zip(RULES, counts, strict=True))
        rows = [describe("calque", seconds, note)]
        seconds, found = measure(lambda: match_simply(new, mono, paths))
        note = f"{len(found):,} rows matched, {compare(match, found):.1%} of them equal"
        rows.append(describe("simple program", seconds, note))
    seconds, _ = measure(lambda: fill(match, len(mono), options.hidden))
    rows.append(describe(f"weights × {options.hidden}", seconds, "means and draws"))
    sizes = f"{len(new):,} × {len(mono):,} pieces"
    title = f"{sizes}, {len(paths)} dictionaries of {options.entries:,} entries"
    table = Table(title=title)
    for column in ("", "CPU s", "peak GB", ""):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(row["name"], f"{row['seconds']:.1f}", f"{row['peak_gb']:.1f}", row["note"])
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
