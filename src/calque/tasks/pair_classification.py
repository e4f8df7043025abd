"""Classes of pairs of sentences by fine-tuning: inference (XNLI), paraphrase (PAWS-X)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from calque.tasks.classification import make_lesson
from calque.tasks.corpus import Corpus
from calque.tasks.prepared import remember
from calque.tasks.transfer import choose_tests
from calque.text.labelled import LabelledText, read_pairs
from calque.text.xtreme import TaskFiles, find_xtreme_files
from calque.types import InputError

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.tasks.outcome import Outcome
    from calque.tasks.task_settings import TaskSettings

TaskName = Literal["xnli", "pawsx"]
XNLI: TaskName = "xnli"
PAWSX: TaskName = "pawsx"


def measure_pairs(
    encoder: Encoder,
    data: Path,
    *,
    task: TaskName,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Train a classifier of pairs as the setting says, and give its accuracy by language.

    Without a training file the dev file is divided by groups of pairs that share a sentence, and
    every language is tested on the same part of it, since the files translate each other.
    """
    tests = list_languages(data, settings, task) if languages is None else list(languages)
    key = (task, str(data), settings.hash())
    lesson = remember(
        encoder.tokenizer, key, lambda: make_lesson(encoder, _open(data, settings, task), settings)
    )
    return lesson.measure(encoder, tests, seed, on_progress)


def list_languages(data: Path, settings: TaskSettings, task: TaskName) -> list[str]:
    """List the languages that the files allow to test in this setting, the source first."""
    corpus = _open(data, settings, task)
    return choose_tests(settings, corpus.trainable, corpus.files.tested)


def find_files(data: Path, task: TaskName) -> TaskFiles:
    """Find XTREME's files of a task."""
    files = find_xtreme_files(data, task, n_columns=3)
    if files is None:
        fix = f"give {task}/train-en.tsv and dev-XX.tsv"
        raise InputError(f"no files of {task} here", file=data, fix=fix)
    return files


def _open(data: Path, settings: TaskSettings, task: TaskName) -> Corpus[LabelledText]:
    return Corpus(
        find_files(data, task),
        read_pairs,
        settings,
        texts_of=lambda example: example.texts,
        label_of=lambda example: example.label,
    )
