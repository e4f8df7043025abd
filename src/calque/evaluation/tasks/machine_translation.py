"""Machine translation: SacreBLEU and chrF of whole test sets, with signatures to compare by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.evaluation.records import LanguageScores
from calque.io.conllu import sample_evenly
from calque.io.files import read_lines
from calque.translation.bleu import (
    TranslationScores,
    score_translations,
)

if TYPE_CHECKING:
    from calque.evaluation.settings import TaskSettings
    from calque.models.seq2seq import Seq2Seq
    from calque.translation.translate import Translator


PACKED = ("", ".gz", ".xz", ".zst")
# Where the test set of a task lies beneath the user's folder, and its name.
TEST_SETS = {
    "translation": ("translation", "newstest2014"),
    "multi30k": ("translation/multi30k", "test_2016_flickr"),
}


def find_test_sets(folder: Path, src: str, tgt: str) -> dict[str, tuple[Path, Path]]:
    """Find files whose names differ in their languages alone: newstest2014.en and newstest2014.de.

    They may be packed. In order of their names.
    """
    found = {}
    for path in sorted(folder.glob(f"*.{src}*")):
        for packing in PACKED:
            if path.name.endswith(f".{src}{packing}"):
                name = path.name.removesuffix(f".{src}{packing}")
                others = (path.with_name(f"{name}.{tgt}{other}") for other in PACKED)
                partner = next((other for other in others if other.is_file()), None)
                if partner is not None:
                    found[name] = (path, partner)
    if not found:
        raise InputError(
            f"no test set from {src} to {tgt}", file=folder, fix=f"put X.{src} and X.{tgt} there"
        )
    return found


def read_test_set(src: Path, tgt: Path) -> tuple[list[str], list[str]]:
    """Read the sources and the references of a test set, line by line."""
    sources, references = list(read_lines(src)), list(read_lines(tgt))
    if len(sources) != len(references):
        raise InputError(
            f"{len(references):,} lines, but {len(sources):,} in {src}",
            file=tgt,
            fix="a test set has a reference for every line",
        )
    return sources, references


def measure_translation(
    translator: Translator,
    sources: Iterable[str],
    references: Sequence[str],
    *,
    on_progress: Callable[[int], None] | None = None,
) -> TranslationScores:
    """Translate a test set and score it; `on_progress` is told of lines as they are done."""
    best = []
    for translation in translator.translate(sources):
        best.append(translation)
        if on_progress is not None:
            on_progress(1)
    return score_translations(best, references, translator.tgt_lang)


def list_directions(data: Path, settings: TaskSettings, *, task: str) -> list[str]:
    """List what can be translated from and into, such as en-de, of all languages of a test set."""
    files = find_sides(data, task)
    return [f"{src}-{tgt}" for src in files for tgt in files if src != tgt]


def find_sides(data: Path, task: str) -> dict[str, Path]:
    """Find the files of a task's test set by language."""
    place, name = TEST_SETS[task]
    folders = (data / place, data / Path(place).name, data)
    ending = re.compile(rf"{re.escape(name)}\.([a-z]{{2,3}})(?:\.(?:gz|xz|zst))?")
    for folder in folders:
        paths = sorted(folder.glob(f"{name}.*"))
        found = {match[1]: path for path in paths if (match := ending.fullmatch(path.name))}
        if len(found) > 1:
            return found
    fix = f"give {place}/{name}.de and {name}.en"
    raise InputError(f"no files of {task} here", file=data, fix=fix)


def measure_translations(
    model: Seq2Seq,
    data: Path,
    *,
    task: str,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Translate a test set in every direction that a model was taught, by beam search.

    BLEU is no ratio of sums over lines: there are no items, and seeds alone say what is noise.
    """
    from calque.translation.translate import Translator

    asked = list_directions(data, settings, task=task) if languages is None else list(languages)
    directions, files = choose_directions(model, asked), find_sides(data, task)
    tests = {}
    for src, tgt in directions:
        lines = list(zip(*read_test_set(files[src], files[tgt]), strict=True))
        tests[src, tgt] = sample_evenly(lines, settings.test_examples)
    n_all, n_done = sum(map(len, tests.values())), 0

    def tell(n_lines: int) -> None:
        nonlocal n_done
        n_done += n_lines
        on_progress(n_done, n_all)

    outcomes = []
    for (src, tgt), lines in tests.items():
        translator = Translator(model, tgt_lang=tgt, src_lang=src)
        sources, references = zip(*lines, strict=True)
        found = measure_translation(translator, sources, references, on_progress=tell)
        counts = {"directions_not_taught": len(asked) - len(directions)}
        outcomes.append(
            LanguageScores(
                f"{src}-{tgt}",
                found.metrics,
                found.n_lines,
                counts={name: count for name, count in counts.items() if count},
                notes={"bleu": found.bleu_signature, "chrf": found.chrf_signature},
            )
        )
    return outcomes


def choose_directions(model: Seq2Seq, asked: Sequence[str]) -> list[tuple[str, str]]:
    """Take those that a model was taught; of a model that does not say, the one asked for."""
    pairs = [(name.partition("-")[0], name.partition("-")[2]) for name in asked]
    if not model.directions and len(pairs) == 1:
        return pairs
    chosen = [pair for pair in pairs if pair in model.directions]
    if chosen:
        return chosen
    known = " ".join(f"{src}-{tgt}" for src, tgt in model.directions)
    problem = f"this model translates {known or 'nobody knows what'}, not {' '.join(asked)}"
    raise InputError(problem, fix=f"choose --languages {known or asked[0]}")
