"""The BUCC 2018 sets: two texts with a few true pairs hidden in them, in either naming.

The organizers' files are called sample, training and test. XTREME renames them: its dev is their
sample and its test their training set, whose gold pairs it takes away.

Bitext mining on BUCC 2018: find the few translations among two texts of one topic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.algorithms.margin import MinedPairs, choose_cut, mine_pairs
from calque.algorithms.nearest import UnitRows, find_neighbors
from calque.errors import InputError
from calque.evaluation.records import Items, Outcome
from calque.evaluation.settings import remember
from calque.io.bitext import read_id_pairs, read_identified
from calque.io.files import MAGIC
from calque.io.xtreme import short_name
from calque.models.inference import EmbedReport, device_of
from calque.sentences.embed import choose_output, embed_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder

    Vectors = npt.NDArray[np.float32]
    Bools = npt.NDArray[np.bool_]

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


NEIGHBORS = 4


def list_languages(data: Path, settings: TaskSettings) -> list[str]:
    """List the languages whose true pairs with English are known."""
    return list(find_gold(data))


def measure_mining(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None,
    settings: TaskSettings,
    seed: int | None,
    on_progress: Callable[[int, int], None],
) -> list[Outcome]:
    """Mine by margin ratio (Artetxe & Schwenk, 2019); F1 with a threshold from other pairs.

    The threshold comes from another split with gold pairs. Where there is only one, the source
    sentences are halved, and each half is scored with the threshold that is best for the other:
    `counts` says so with 2 folds. `f1_best` has the threshold that is best for the very pairs
    that are scored, as most papers do on a development set. An item is a source sentence.
    """
    files = find_gold(data)
    names = [name for name in files if languages is None or name in languages]
    outcomes = []
    for n_done, name in enumerate(names, start=1):
        golds = list(files[name].values())
        used = dict.fromkeys((golds[0], golds[-1]))  # one, if there are no others
        tests = [_read(encoder, gold) for gold in used]
        outcomes.append(_measure_language(encoder, name, tests, settings.layer))
        on_progress(n_done, len(names))
    return outcomes


def _read(encoder: Encoder, gold: Path) -> MiningTest:
    return remember(encoder.tokenizer, ("bucc", str(gold)), lambda: read_test(gold))


@dataclass(frozen=True, slots=True)
class _Mined:
    """Candidates of a test, which of them are gold, and the fold each source sentence is in."""

    pairs: MinedPairs
    is_gold: Bools
    gold_src: npt.NDArray[np.int64]
    n_src: int

    @property
    def folds(self) -> Bools:
        """Halve the sources: those with a translation in turn, and the others in turn."""
        folds: Bools = np.arange(self.n_src) % 2 == 1
        known = np.unique(self.gold_src)
        folds[known] = np.arange(len(known)) % 2 == 1
        return folds

    def threshold(self, among: Bools) -> float:
        """Find the best threshold for the sources of a part."""
        mine = among[self.pairs.src]
        n_gold = int(among[self.gold_src].sum())
        return choose_cut(self.pairs.scores[mine], self.is_gold[mine], n_gold).threshold


def _measure_language(
    encoder: Encoder, name: str, tests: list[MiningTest], layer: int | None
) -> Outcome:
    number, finish = choose_output(encoder, layer, raw=False)
    mined, n_windowed = [], 0
    for test in tests:
        sides = [_embed(encoder, text, number) for text in (test.src, test.tgt)]
        mined.append(_mine(encoder, test, [finish(vectors) for vectors, _ in sides]))
        n_windowed += sum(report.n_long for _, report in sides)
    found, everything = mined[0], np.ones(mined[0].n_src, dtype=np.bool_)
    kept = _choose_kept(mined)
    items = _count(found, kept)
    best = _count(found, found.pairs.scores >= np.float64(found.threshold(everything)))
    n_kept, n_hits, n_gold = int(kept.sum()), int((kept & found.is_gold).sum()), len(tests[0].gold)
    metrics = {
        "f1": items.score,
        "precision": 100 * n_hits / max(1, n_kept),
        "recall": 100 * n_hits / n_gold,
        "f1_best": best.score,
    }
    counts = {
        "layer": number,
        "src_sentences": len(tests[0].src),
        "tgt_sentences": len(tests[0].tgt),
        "gold_pairs": n_gold,
        "mined_pairs": n_kept,
        "repeated_sentences": tests[0].n_duplicates,
        "folds": 2 if len(tests) == 1 else 0,
        "in_windows": n_windowed,
    }
    return Outcome(name, metrics, len(items.numerators), items, counts=counts)


def _embed(encoder: Encoder, sentences: Sequence[str], layer: int) -> tuple[Vectors, EmbedReport]:
    parts: list[Vectors] = []
    report = EmbedReport()
    for block in embed_blocks(encoder, sentences, [layer]):
        parts.append(block.vectors[layer])
        report += block.report
    return np.concatenate(parts), report


def _mine(encoder: Encoder, test: MiningTest, sides: list[Vectors]) -> _Mined:
    place = device_of(encoder)
    src, tgt = (UnitRows(vectors, None, place) for vectors in sides)
    near = find_neighbors(src, tgt, min(NEIGHBORS, len(src), len(tgt)))
    pairs = mine_pairs(near)
    chosen = zip(pairs.src.tolist(), pairs.tgt.tolist(), strict=True)
    is_gold = np.fromiter((pair in test.gold for pair in chosen), np.bool_, len(pairs))
    gold_src = np.array(sorted(row for row, _ in test.gold), dtype=np.int64)
    return _Mined(pairs, is_gold, gold_src, len(src))


def _choose_kept(mined: list[_Mined]) -> Bools:
    """Cut the first test's candidates where the other says, or each half where its other does."""
    found = mined[0]
    if len(mined) > 1:
        everything = np.ones(mined[1].n_src, dtype=np.bool_)
        return found.pairs.scores >= np.float64(mined[1].threshold(everything))
    folds = found.folds
    by_fold = np.where(folds, found.threshold(~folds), found.threshold(folds))
    kept: Bools = found.pairs.scores >= by_fold[found.pairs.src]
    return kept


def _count(found: _Mined, kept: Bools) -> Items:
    """Give twice the hits, and predicted plus gold pairs, of every source sentence."""
    hits = np.bincount(found.pairs.src[kept & found.is_gold], minlength=found.n_src)
    predicted = np.bincount(found.pairs.src[kept], minlength=found.n_src)
    gold = np.bincount(found.gold_src, minlength=found.n_src)
    return Items((2 * hits).astype(np.float64), (predicted + gold).astype(np.float64))
