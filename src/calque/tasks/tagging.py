"""Tagging by fine-tuning: parts of speech (UD POS) and names (PAN-X)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from calque.tasks.corpus import Corpus
from calque.tasks.head_task import longest_sequence
from calque.tasks.lesson import Lesson, PlugIn, Scored
from calque.tasks.partners import Partners
from calque.tasks.prepared import remember
from calque.tasks.tag_examples import TagExamples, encode_tagged
from calque.tasks.tag_pairs import TagPairs, encode_tag_pairs
from calque.tasks.tag_scores import repair_spans, score_runs, score_spans, score_words
from calque.tasks.tagger import Tagger
from calque.tasks.teacher import Taught, label_translations, teacher_settings
from calque.tasks.transfer import OnProgress, choose_tests, tell_part
from calque.text.spans import OUTSIDE, check_span_tags
from calque.text.tagged import (
    NO_TAG,
    TaggedSentence,
    read_names,
    read_tagged,
    read_untagged,
)
from calque.text.xtreme import TaskFiles, find_treebanks, find_xtreme_files
from calque.types import InputError

if TYPE_CHECKING:
    import torch

    from calque.models.encoder import Encoder
    from calque.tasks.outcome import Outcome
    from calque.tasks.task_settings import TaskSettings

TaskName = Literal["pos", "ner"]
POS: TaskName = "pos"
NER: TaskName = "ner"
FOLDERS = {POS: "udpos", NER: "panx"}
METRICS = {POS: "accuracy", NER: "f1"}
READERS: dict[TaskName, Callable[[Path], list[TaggedSentence]]] = {
    POS: read_tagged,
    NER: read_names,
}


def measure_tagging(
    encoder: Encoder,
    data: Path,
    *,
    task: TaskName,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Outcome]:
    """Train a tagger on first subwords as the setting says, and score it language by language.

    POS: accuracy of words, and XTREME's F1. NER: F1 of whole spans. An item is a sentence.
    """
    tests = list_languages(data, settings, task) if languages is None else list(languages)
    key = (task, str(data), settings.hash())
    lesson = remember(encoder.tokenizer, key, lambda: _prepare(encoder, data, task, settings))
    if settings.setting == "translate-train-all" and lesson.corpus.files.untagged:
        lesson, on_progress = _teach(encoder, data, task, lesson, seed, on_progress)
    return lesson.measure(encoder, tests, seed, on_progress)


def list_languages(data: Path, settings: TaskSettings, task: TaskName) -> list[str]:
    """List the languages that the files allow to test in this setting, the source first."""
    files = find_files(data, task)
    trainable = {*Corpus(files, READERS[task], settings).trainable}
    if settings.setting == "translate-train-all":
        trainable |= files.untagged.keys()  # a teacher will tag them
    return choose_tests(settings, sorted(trainable), files.tested)


def find_files(data: Path, task: TaskName) -> TaskFiles:
    """Find XTREME's files of a task or, of parts of speech, treebanks."""
    files = find_xtreme_files(data, FOLDERS[task], n_columns=2)
    if files is None and task == POS:
        files = find_treebanks(data)
    if files is None:
        shown = f"{FOLDERS[task]}/train-en.tsv and dev-XX.tsv"
        also = " or ud/*.conllu" if task == POS else ""
        raise InputError(f"no files of {task} here", file=data, fix=f"give {shown}{also}")
    return files


def _teach(
    encoder: Encoder,
    data: Path,
    task: TaskName,
    lesson: Lesson[TaggedSentence],
    seed: int,
    on_progress: OnProgress,
) -> tuple[Lesson[TaggedSentence], OnProgress]:
    """Let a tagger that learnt from the source alone label translations; half of the progress."""
    settings = teacher_settings(lesson.corpus.settings)
    key = (task, str(data), settings.hash())
    teacher = remember(encoder.tokenizer, key, lambda: _prepare(encoder, data, task, settings))
    taught, counts = label_translations(
        encoder, teacher, seed, task == NER, partial(tell_part, on_progress, 0, 2)
    )
    taught_lesson = _prepare(encoder, data, task, lesson.corpus.settings, taught)
    return replace(taught_lesson, counts=counts), partial(tell_part, on_progress, 1, 2)


def _prepare(
    encoder: Encoder,
    data: Path,
    task: TaskName,
    settings: TaskSettings,
    taught: Taught | None = None,
) -> Lesson[TaggedSentence]:
    """Find the files of a task; what is read and encoded of them serves the next seed, too."""
    longest, tokenizer = longest_sequence(encoder, settings), encoder.tokenizer

    def encode(sentences: Sequence[TaggedSentence], names: list[str]) -> TagExamples:
        return encode_tagged(tokenizer, sentences, names, longest=longest, overlap=settings.overlap)

    def make_model(encoder: Encoder, names: list[str], generator: torch.Generator) -> Tagger:
        return Tagger(encoder, names, settings, generator, spans=task == NER)

    read = READERS[task]
    corpus = Corpus(find_files(data, task), read, settings, taught=taught)
    plug = None
    if settings.plug == "in":
        translated = partial(_read_translation, read)
        partners = Partners(corpus, translated, is_empty=lambda line: not line.words)
        plug = PlugIn(partners, partial(encode_tag_pairs, encode))
    return Lesson(
        corpus,
        labels_of=lambda sentence: sentence.tags,
        check_labels=partial(_check_tags, task),
        encode=encode,
        make_model=make_model,
        score=partial(_score, task, settings),
        plug=plug,
    )


def _read_translation(
    read: Callable[[Path], list[TaggedSentence]], path: Path
) -> list[TaggedSentence]:
    return read_untagged(path) if ".txt" in path.suffixes else read(path)


def _check_tags(task: TaskName, names: list[str]) -> list[str]:
    known = set(names) - {NO_TAG}
    if task == NER:
        known.add(OUTSIDE)
        check_span_tags(sorted(known))
    return sorted(known)


def _score(
    task: TaskName, settings: TaskSettings, tagger: Tagger, test: TagExamples | TagPairs
) -> Scored:
    found = tagger.tag(test, settings)
    gold, names, lengths = test.tags, list(test.names), test.n_words
    if task == POS:
        items = score_words(gold, found, lengths)
        runs, _ = score_runs(gold, found, names, lengths)
        return Scored({"accuracy": items.score, "f1": runs.score}, items)
    items, shares = score_spans(gold, found, names, lengths)
    known = np.where(found < 0, names.index(OUTSIDE), found)
    _, n_repaired = repair_spans(known, names, lengths)
    return Scored({"f1": items.score, **shares}, items, {"tags_repaired": n_repaired})
