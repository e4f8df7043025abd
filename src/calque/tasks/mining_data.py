"""The BUCC 2018 sets: two texts with a few true pairs hidden in them, in either naming.

The organizers' files are called sample, training and test. XTREME renames them: its dev is their
sample and its test their training set, whose gold pairs it takes away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from calque.tasks.languages import short_name
from calque.text.files import MAGIC
from calque.text.identified import read_id_pairs, read_identified
from calque.types import InputError

FOLDERS = ("bucc2018", "xtreme/bucc2018")
# The first that has gold pairs is scored, the last of the others gives the threshold.
SPLITS = ("test", "training", "dev", "sample")
GOLD = re.compile(r"([a-z]{2,3})-en\.(test|training|dev|sample)\.gold")


@dataclass(frozen=True, slots=True)
class MiningTest:
    """Distinct sentences of two languages, and the pairs of them that are translations.

    The gold pairs are rows of both sides; a name of a repeated sentence stands for its first.
    """

    split: str
    src: tuple[str, ...]
    tgt: tuple[str, ...]
    gold: frozenset[tuple[int, int]]
    n_duplicates: int


def find_gold(data: Path) -> dict[str, dict[str, Path]]:
    """Find the gold lists of a folder: language → split → file, the split to be scored first."""
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    found: dict[str, dict[str, Path]] = {}
    for path in _walk(data):
        match = GOLD.fullmatch(_unpacked(path))
        if match is not None:
            found.setdefault(short_name(match[1]), {}).setdefault(match[2], path)
    if not found:
        fix = "give the folder of BUCC 2018, or the one above bucc2018/"
        raise InputError("no xx-en.dev.gold here", file=data, fix=fix)
    return {
        language: {split: splits[split] for split in SPLITS if split in splits}
        for language, splits in sorted(found.items())
    }


def read_test(gold: Path) -> MiningTest:
    """Read a gold list and the two texts beside it."""
    match = GOLD.fullmatch(_unpacked(gold))
    if match is None:
        raise InputError("not a gold list", file=gold, fix="call it xx-en.dev.gold")
    code, split = match[1], match[2]
    src, tgt = (_Text(_beside(gold, f"{code}-en.{split}.{side}")) for side in (code, "en"))
    pairs = set()
    for number, names in enumerate(read_id_pairs(gold), start=1):
        rows = []
        for name, text in zip(names, (src, tgt), strict=True):
            if name not in text.rows:
                fix = "the list and the texts must belong together"
                problem = f"{name!r} is not in {text.path.name}"
                raise InputError(problem, file=gold, line=number, fix=fix)
            rows.append(text.rows[name])
        pairs.add((rows[0], rows[1]))
    if not pairs:
        raise InputError("holds no pairs", file=gold, fix="give another list")
    n_duplicates = src.n_duplicates + tgt.n_duplicates
    return MiningTest(
        split, tuple(src.sentences), tuple(tgt.sentences), frozenset(pairs), n_duplicates
    )


class _Text:
    """The distinct sentences of a file, and the row of every name."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, dict[str, int]()
        self.sentences: dict[str, int] = {}
        for number, (name, sentence) in enumerate(read_identified(path), start=1):
            if name in self.rows:
                fix = "give every sentence a name of its own"
                raise InputError(f"{name!r} again", file=path, line=number, fix=fix)
            self.rows[name] = self.sentences.setdefault(sentence, len(self.sentences))
        self.n_duplicates = len(self.rows) - len(self.sentences)


def _walk(data: Path) -> Iterator[Path]:
    """Go through the folder itself, the places the set may have in it, and a folder a language."""
    for folder in (data, *(data / name for name in FOLDERS)):
        yield from sorted(folder.glob("*.gold*"))
        yield from sorted(folder.glob("*-en/*.gold*"))


def _unpacked(path: Path) -> str:
    return path.stem if path.suffix in MAGIC else path.name


def _beside(gold: Path, name: str) -> Path:
    for suffix in ("", *MAGIC):
        path = gold.with_name(name + suffix)
        if path.exists():
            return path
    raise InputError(f"no {name} beside it", file=gold, fix="give the texts and the list together")
