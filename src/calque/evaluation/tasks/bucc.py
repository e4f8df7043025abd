"""Bitext mining on BUCC 2018: find the few translations in two large texts.

The organizers' files are called sample, training and test. XTREME renames them: its dev is their
sample, and its test is their training set without the gold pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.algorithms.margin import MinedPairs, find_best_threshold, mine_pairs
from calque.algorithms.nearest import UnitRows, find_neighbors
from calque.errors import InputError
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.settings import remember
from calque.evaluation.tasks.plug_in_retrieval import (
    check_retrieval_plug_in,
    embed_with_translations,
    missing_translations,
)
from calque.io.bitext import read_id_pairs, read_sentences_with_ids
from calque.io.files import MAGIC_BYTES
from calque.io.xtreme import TRANSLATED_TESTS, two_letter_code
from calque.models.inference import device_of
from calque.models.veco import Veco
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
    for the test itself, as most papers do on a development set. With `settings.plug` "in", vectors
    are [H ; S] of VECO, where S reads a machine translation of the sentence. An item is a source
    sentence.
    """
    files = find_gold(data)
    if settings.plug == "in":
        check_retrieval_plug_in(encoder, settings)
    known = list_languages(data, settings)
    names = [name for name in known if languages is None or name in languages]
    scores = []
    for n_done, name in enumerate(names, start=1):
        tests = [_read(encoder, gold, settings) for gold in _choose_splits(files[name])]
        scores.append(_measure_language(encoder, name, tests, settings.layer))
        on_progress(n_done, len(names))
    return scores


def list_languages(data: Path, settings: TaskSettings | None = None) -> list[str]:
    """List the languages with gold pairs; with plug=in also with machine translations."""
    files = find_gold(data)
    if settings is None or settings.plug == "out":
        return list(files)
    used = {name: _choose_splits(splits) for name, splits in files.items()}
    found = [name for name, golds in used.items() if all(map(_find_translations, golds))]
    if not found:
        gold = next(iter(used.values()))[0]
        name = _strip_compression(gold).removesuffix("gold") + ENGLISH
        raise missing_translations(gold.parent / TRANSLATED_TESTS, name)
    return found


@dataclass(frozen=True, slots=True)
class MiningTest:
    """Distinct sentences of two languages, and the pairs of rows that are translations.

    `machine_translations` are those of both sides, row by row, if they are needed.
    """

    split: str
    src: tuple[str, ...]
    tgt: tuple[str, ...]
    gold: frozenset[tuple[int, int]]
    n_duplicates: int
    machine_translations: tuple[tuple[str, ...], ...] = ()


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


def read_test(gold: Path, *, with_translations: bool = False) -> MiningTest:
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
    translations: tuple[tuple[str, ...], ...] = ()
    if with_translations:
        paths = _find_translations(gold)
        translations = tuple(
            each.translate(path) for each, path in zip((src, tgt), paths, strict=True)
        )
    return MiningTest(
        split,
        tuple(src.sentences),
        tuple(tgt.sentences),
        frozenset(pairs),
        src.n_duplicates + tgt.n_duplicates,
        translations,
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

    def translate(self, path: Path) -> tuple[str, ...]:
        """Return the translations in a file with the same ids, row by row; "" if there is none."""
        found = [""] * len(self.sentences)
        for number, (name, sentence) in enumerate(read_sentences_with_ids(path), start=1):
            if name not in self.rows:
                fix = "translate the text and keep its ids"
                problem = f"the id {name!r} is not in {self.path.name}"
                raise InputError(problem, file=path, line=number, fix=fix)
            found[self.rows[name]] = sentence
        return tuple(found)


def _choose_splits(splits: Mapping[str, Path]) -> list[Path]:
    """Return the gold pairs of the test and of the threshold; one file if there is one split."""
    golds = list(splits.values())
    return list(dict.fromkeys((golds[0], golds[-1])))


def _find_translations(gold: Path) -> list[Path]:
    """Return the machine translations of both texts; none unless both exist."""
    folder, stem = gold.parent / TRANSLATED_TESTS, _strip_compression(gold).removesuffix("gold")
    sides = stem.partition("-")[0], ENGLISH
    found = [
        [
            path
            for suffix in ("", *MAGIC_BYTES)
            if (path := folder / f"{stem}{side}{suffix}").exists()
        ]
        for side in sides
    ]
    return [paths[0] for paths in found] if all(found) else []


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


def _read(encoder: Encoder, gold: Path, settings: TaskSettings) -> MiningTest:
    is_plugged = settings.plug == "in"
    key = ("bucc", str(gold), is_plugged)
    return remember(encoder.tokenizer, key, lambda: read_test(gold, with_translations=is_plugged))


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
    is_plugged = bool(tests[0].machine_translations)  # a neutral space is made for H alone
    outputs = [choose_output(encoder, layer, raw=is_plugged, language=each) for each in languages]
    number, mined, n_windowed = outputs[0][0], [], 0
    for test in tests:
        sides = [
            _embed(encoder, text, number, translations)
            for text, translations in zip(
                (test.src, test.tgt), test.machine_translations or (None, None), strict=True
            )
        ]
        vectors = [finish(side) for (_, finish), (side, _) in zip(outputs, sides, strict=True)]
        mined.append(_mine(encoder, test, vectors))
        n_windowed += sum(n_long for _, n_long in sides)
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
    n_missing = sum(not text.strip() for side in tests[0].machine_translations for text in side)
    if n_missing:
        counts["without_translation"] = n_missing
    return LanguageScores(name, metrics, len(items.numerators), items, counts=counts)


def _embed(
    encoder: Encoder, sentences: Sequence[str], layer: int, translations: Sequence[str] | None
) -> tuple[Vectors, int]:
    """Return vectors, with VECO's cross-attention to translations, and the number in windows."""
    if translations is not None:
        assert isinstance(encoder, Veco)
        vectors, n_long = embed_with_translations(encoder, sentences, translations, [layer])
        return vectors[layer], n_long
    parts: list[Vectors] = []
    report = EmbedCounts()
    for block in embed_blocks(encoder, sentences, [layer]):
        parts.append(block.vectors[layer])
        report += block.counts
    return np.concatenate(parts), report.n_long


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
