"""Bitext mining on BUCC 2018: find the few translations in two large texts.

The organizers' files are called sample, training and test. XTREME renames them: its dev is their
sample, and its test is their training set without the gold pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.algorithms.margin import MinedPairs, find_best_threshold, mine_pairs
from calque.algorithms.nearest import UnitRows, find_neighbors
from calque.errors import InputError
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.settings import remember
from calque.io.bitext import read_id_pairs, read_sentences_with_ids
from calque.io.files import MAGIC_BYTES
from calque.io.xtreme import two_letter_code
from calque.models.inference import device_of
from calque.sentences.embed import EmbedCounts, choose_output, embed_blocks

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder

    Vectors = npt.NDArray[np.float32]
    Bools = npt.NDArray[np.bool_]

ENGLISH = "en"
FOLDERS = ("bucc2018", "xtreme/bucc2018")
# The first split with gold pairs is the test, the last one is used to choose the threshold.
SPLITS = ("test", "training", "dev", "sample")
GOLD = re.compile(r"([a-z]{2,3})-en\.(test|training|dev|sample)\.gold")
N_NEIGHBORS = 4


def measure(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Mine pairs by margin ratio (Artetxe & Schwenk, 2019) and return F1.

    The threshold is chosen on another split with gold pairs. If there is only one split, the
    source sentences are divided into two halves, and each half is scored with the threshold that
    is best for the other half (`counts["folds"]` is 2). `f1_best` uses the threshold that is best
    for the test itself, as most papers do on a development set. An item is a source sentence.
    """
    files = find_gold(data)
    names = [name for name in files if languages is None or name in languages]
    scores = []
    for n_done, name in enumerate(names, start=1):
        golds = list(files[name].values())
        used = dict.fromkeys((golds[0], golds[-1]))  # only one if there is a single split
        tests = [_read(encoder, gold) for gold in used]
        scores.append(_measure_language(encoder, name, tests, settings.layer))
        on_progress(n_done, len(names))
    return scores


def list_languages(data: Path, settings: TaskSettings | None = None) -> list[str]:
    """List the languages with gold pairs."""
    return list(find_gold(data))


@dataclass(frozen=True, slots=True)
class MiningTest:
    """Distinct sentences of two languages, and the pairs of rows that are translations."""

    split: str
    src: tuple[str, ...]
    tgt: tuple[str, ...]
    gold: frozenset[tuple[int, int]]
    n_duplicates: int


def find_gold(data: Path) -> dict[str, dict[str, Path]]:
    """Find the files of gold pairs: language → split → file, the test split first."""
    if not data.is_dir():
        raise InputError("the folder does not exist", file=data, fix="check --data")
    found: dict[str, dict[str, Path]] = {}
    for path in _list_gold_files(data):
        match = GOLD.fullmatch(_strip_compression(path))
        if match is not None:
            found.setdefault(two_letter_code(match[1]), {}).setdefault(match[2], path)
    if not found:
        fix = "pass the folder of BUCC 2018, or a folder that contains bucc2018/"
        raise InputError("the folder has no files such as xx-en.dev.gold", file=data, fix=fix)
    return {
        language: {split: splits[split] for split in SPLITS if split in splits}
        for language, splits in sorted(found.items())
    }


def read_test(gold: Path) -> MiningTest:
    """Read a file of gold pairs and the two texts in the same folder."""
    match = GOLD.fullmatch(_strip_compression(gold))
    if match is None:
        problem = "the file name is not one of BUCC 2018"
        raise InputError(problem, file=gold, fix="name it xx-en.dev.gold")
    code, split = match[1], match[2]
    src, tgt = (_Text(_find_text(gold, f"{code}-en.{split}.{side}")) for side in (code, "en"))
    pairs = set()
    for number, names in enumerate(read_id_pairs(gold), start=1):
        rows = []
        for name, text in zip(names, (src, tgt), strict=True):
            if name not in text.rows:
                fix = "use the gold pairs and texts of the same release"
                problem = f"the id {name!r} is not in {text.path.name}"
                raise InputError(problem, file=gold, line=number, fix=fix)
            rows.append(text.rows[name])
        pairs.add((rows[0], rows[1]))
    if not pairs:
        raise InputError("the file has no pairs", file=gold, fix="download it again")
    n_duplicates = src.n_duplicates + tgt.n_duplicates
    return MiningTest(
        split, tuple(src.sentences), tuple(tgt.sentences), frozenset(pairs), n_duplicates
    )


class _Text:
    """The distinct sentences of a file, and the row of every id."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, dict[str, int]()
        self.sentences: dict[str, int] = {}
        for number, (name, sentence) in enumerate(read_sentences_with_ids(path), start=1):
            if name in self.rows:
                problem, fix = f"the id {name!r} occurs twice", "use each id once"
                raise InputError(problem, file=path, line=number, fix=fix)
            self.rows[name] = self.sentences.setdefault(sentence, len(self.sentences))
        self.n_duplicates = len(self.rows) - len(self.sentences)


def _list_gold_files(data: Path) -> Iterator[Path]:
    """Yield the files *.gold of the folders in which the dataset may be."""
    for folder in (data, *(data / name for name in FOLDERS)):
        yield from sorted(folder.glob("*.gold*"))
        yield from sorted(folder.glob("*-en/*.gold*"))


def _strip_compression(path: Path) -> str:
    return path.stem if path.suffix in MAGIC_BYTES else path.name


def _find_text(gold: Path, name: str) -> Path:
    for suffix in ("", *MAGIC_BYTES):
        path = gold.with_name(name + suffix)
        if path.exists():
            return path
    problem = f"{name} is missing in the same folder"
    raise InputError(problem, file=gold, fix="keep the texts and the gold pairs together")


def _read(encoder: Encoder, gold: Path) -> MiningTest:
    return remember(encoder.tokenizer, ("bucc", str(gold)), lambda: read_test(gold))


@dataclass(frozen=True, slots=True)
class _Mined:
    """Candidate pairs of a test, which of them are gold, and the source rows of all gold pairs."""

    pairs: MinedPairs
    is_gold: Bools
    gold_src: npt.NDArray[np.int64]
    n_src: int

    @property
    def folds(self) -> Bools:
        """Assign source sentences to two halves with equally many gold pairs."""
        folds: Bools = np.arange(self.n_src) % 2 == 1
        with_gold = np.unique(self.gold_src)
        folds[with_gold] = np.arange(len(with_gold)) % 2 == 1
        return folds

    def threshold(self, among: Bools) -> float:
        """Return the best threshold for a part of the source sentences."""
        is_part = among[self.pairs.src]
        n_gold = int(among[self.gold_src].sum())
        return find_best_threshold(
            self.pairs.scores[is_part], self.is_gold[is_part], n_gold
        ).threshold


def _measure_language(
    encoder: Encoder, name: str, tests: list[MiningTest], layer: int | None
) -> LanguageScores:
    languages = (name, ENGLISH) if encoder.maps is not None else (None, None)
    outputs = [choose_output(encoder, layer, raw=False, language=each) for each in languages]
    number, mined, n_windowed = outputs[0][0], [], 0
    for test in tests:
        sides = [_embed(encoder, text, number) for text in (test.src, test.tgt)]
        vectors = [finish(side) for (_, finish), (side, _) in zip(outputs, sides, strict=True)]
        mined.append(_mine(encoder, test, vectors))
        n_windowed += sum(report.n_long for _, report in sides)
    found, everything = mined[0], np.ones(mined[0].n_src, dtype=np.bool_)
    kept = _choose_kept(mined)
    items = _count_items(found, kept)
    best = _count_items(found, found.pairs.scores >= np.float64(found.threshold(everything)))
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
    return LanguageScores(name, metrics, len(items.numerators), items, counts=counts)


def _embed(encoder: Encoder, sentences: Sequence[str], layer: int) -> tuple[Vectors, EmbedCounts]:
    parts: list[Vectors] = []
    report = EmbedCounts()
    for block in embed_blocks(encoder, sentences, [layer]):
        parts.append(block.vectors[layer])
        report += block.counts
    return np.concatenate(parts), report


def _mine(encoder: Encoder, test: MiningTest, sides: list[Vectors]) -> _Mined:
    device = device_of(encoder)
    src, tgt = (UnitRows(vectors, None, device) for vectors in sides)
    near = find_neighbors(src, tgt, min(N_NEIGHBORS, len(src), len(tgt)))
    pairs = mine_pairs(near)
    chosen = zip(pairs.src.tolist(), pairs.tgt.tolist(), strict=True)
    is_gold = np.fromiter((pair in test.gold for pair in chosen), np.bool_, len(pairs))
    gold_src = np.array(sorted(row for row, _ in test.gold), dtype=np.int64)
    return _Mined(pairs, is_gold, gold_src, len(src))


def _choose_kept(mined: list[_Mined]) -> Bools:
    """Select pairs of the first test with the threshold of the other test, or of the other half."""
    found = mined[0]
    if len(mined) > 1:
        everything = np.ones(mined[1].n_src, dtype=np.bool_)
        return found.pairs.scores >= np.float64(mined[1].threshold(everything))
    folds = found.folds
    by_fold = np.where(folds, found.threshold(~folds), found.threshold(folds))
    kept: Bools = found.pairs.scores >= by_fold[found.pairs.src]
    return kept


def _count_items(found: _Mined, kept: Bools) -> ItemScores:
    """Return twice the correct pairs, and predicted plus gold pairs, of every source sentence."""
    hits = np.bincount(found.pairs.src[kept & found.is_gold], minlength=found.n_src)
    predicted = np.bincount(found.pairs.src[kept], minlength=found.n_src)
    gold = np.bincount(found.gold_src, minlength=found.n_src)
    return ItemScores((2 * hits).astype(np.float64), (predicted + gold).astype(np.float64))
