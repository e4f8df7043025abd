"""Machine translation: BLEU and chrF of whole test sets, with SacreBLEU's signatures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.evaluation.records import LanguageScores
from calque.io.conllu import sample_evenly
from calque.io.files import read_lines
from calque.translation.bleu import score_translations

if TYPE_CHECKING:
    from calque.evaluation.settings import TaskSettings
    from calque.models.seq2seq import Seq2Seq

# Folder of a task's test set below the data folder, and the name of its files.
TEST_SETS = {
    "translation": ("translation", "newstest2014"),
    "multi30k": ("translation/multi30k", "test_2016_flickr"),
}


def measure(
    model: Seq2Seq,
    data: Path,
    *,
    task: str,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Translate a test set with beam search in every direction that the model was trained on.

    `languages` are directions such as en-de. BLEU is not a ratio of sums over lines, so there are
    no items.
    """
    from calque.translation.translate import Translator

    asked = list_languages(data, settings, task=task) if languages is None else list(languages)
    directions, files = choose_directions(model, asked), find_files(data, task)
    tests = {}
    for src, tgt in directions:
        lines = list(zip(*read_test_set(files[src], files[tgt]), strict=True))
        tests[src, tgt] = sample_evenly(lines, settings.test_examples)
    n_lines, n_done = sum(map(len, tests.values())), 0
    counts = {"directions_not_taught": len(asked) - len(directions)}
    scores = []
    for (src, tgt), lines in tests.items():
        sources, references = zip(*lines, strict=True)
        translations = []
        for translation in Translator(model, tgt_lang=tgt, src_lang=src).translate(sources):
            translations.append(translation)
            n_done += 1
            on_progress(n_done, n_lines)
        found = score_translations(translations, references, tgt)
        scores.append(
            LanguageScores(
                f"{src}-{tgt}",
                found.metrics,
                found.n_lines,
                counts={name: count for name, count in counts.items() if count},
                notes={"bleu": found.bleu_signature, "chrf": found.chrf_signature},
            )
        )
    return scores


def list_languages(data: Path, settings: TaskSettings, *, task: str) -> list[str]:
    """List all directions of a test set, such as en-de."""
    files = find_files(data, task)
    return [f"{src}-{tgt}" for src in files for tgt in files if src != tgt]


def choose_directions(model: Seq2Seq, asked: Sequence[str]) -> list[tuple[str, str]]:
    """Return the requested directions that the model was trained on.

    If the model has no list of directions, a single requested direction is accepted.
    """
    pairs = [(name.partition("-")[0], name.partition("-")[2]) for name in asked]
    if not model.directions and len(pairs) == 1:
        return pairs
    chosen = [pair for pair in pairs if pair in model.directions]
    if chosen:
        return chosen
    known = " ".join(f"{src}-{tgt}" for src, tgt in model.directions)
    problem = f"this model translates {known or 'in unknown directions'}, not {' '.join(asked)}"
    raise InputError(problem, fix=f"choose --languages {known or asked[0]}")


def find_files(data: Path, task: str) -> dict[str, Path]:
    """Find the files of a task's test set by language."""
    folder, name = TEST_SETS[task]
    for parent in (data / folder, data / Path(folder).name, data):
        files = find_language_files(parent, name)
        if len(files) > 1:
            return files
    problem = f"the folder has no files of {task}"
    fix = f"pass a folder with {folder}/{name}.de and {name}.en"
    raise InputError(problem, file=data, fix=fix)


def find_language_files(folder: Path, name: str) -> dict[str, Path]:
    """Return the files NAME.XX of a folder by language XX; they may be compressed."""
    pattern = re.compile(rf"{re.escape(name)}\.([a-z]{{2,3}})(?:\.(?:gz|xz|zst))?")
    paths = sorted(folder.glob(f"{name}.*"))
    return {match[1]: path for path in paths if (match := pattern.fullmatch(path.name))}


def read_test_set(src: Path, tgt: Path) -> tuple[list[str], list[str]]:
    """Read the sources and the references of a test set."""
    sources, references = list(read_lines(src)), list(read_lines(tgt))
    if len(sources) != len(references):
        raise InputError(
            f"the file has {len(references):,} lines, but {src} has {len(sources):,}",
            file=tgt,
            fix="line n of both files must be translations of each other",
        )
    return sources, references
