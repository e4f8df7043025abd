"""Good and bad reviews by fine-tuning: Amazon's of Prettenhofer and Stein (2010), or plain TSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.evaluation.finetuning.transfer import LabeledCorpus, choose_tests
from calque.evaluation.settings import remember
from calque.evaluation.tasks.classification import make_lesson
from calque.io.labeled import (
    REVIEW_FOLDERS,
    LabeledText,
    find_reviews,
    read_labeled_texts,
    read_reviews,
)
from calque.io.xtreme import TaskFiles, find_xtreme_files

if TYPE_CHECKING:
    from calque.evaluation.records import LanguageScores
    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder


TASK = "reviews"


def measure_reviews(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[LanguageScores]:
    """Train a classifier of reviews as the setting says, and give its accuracy by language."""
    tests = list_languages(data, settings) if languages is None else list(languages)
    key = (TASK, str(data), settings.hash())
    lesson = remember(
        encoder.tokenizer, key, lambda: make_lesson(encoder, _open(data, settings), settings)
    )
    return lesson.measure(encoder, tests, seed, on_progress)


def list_languages(data: Path, settings: TaskSettings) -> list[str]:
    """List the languages that the files allow to test in this setting, the source first."""
    corpus = _open(data, settings)
    return choose_tests(settings, corpus.trainable, corpus.files.test_languages)


def find_files(data: Path) -> TaskFiles:
    """Find the reviews' own layout, or `train-XX.tsv` with `text ⇥ class` lines."""
    files = find_reviews(data)
    for name in REVIEW_FOLDERS:
        files = files or find_xtreme_files(data, name, n_columns=2)
    if files is None:
        fix = f"give {REVIEW_FOLDERS[0]}/LANGUAGE/CATEGORY/train.review, or {TASK}/train-XX.tsv"
        raise InputError("no reviews here", file=data, fix=fix)
    return files


def _open(data: Path, settings: TaskSettings) -> LabeledCorpus[LabeledText]:
    dropped: dict[Path, Counter[str]] = {}

    def read(path: Path) -> list[LabeledText]:
        if ".review" not in path.suffixes:
            return read_labeled_texts(path)
        return read_reviews(path, dropped.setdefault(path, Counter()))

    return LabeledCorpus(find_files(data), read, settings, dropped=dropped)
