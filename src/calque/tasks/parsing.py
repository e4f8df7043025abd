"""Dependency parsing: a biaffine parser learns from treebanks and is scored in every language.

The protocol of Wu and Dredze (2020) after Ahmad et al. (2019): labelled attachment on gold words,
punctuation and symbols not counted, relations without subtypes, the first 128 words of a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.tasks.attachments import Attachments, count_attachments
from calque.tasks.finetuning import fine_tune
from calque.tasks.outcome import Outcome
from calque.tasks.parse_data import (
    ROOT,
    ParseData,
    ParsedText,
    count_words,
    find_treebanks,
    prepare,
)
from calque.tasks.parser import Parser, Parses
from calque.tasks.transfer import Run, choose_tests, measure_runs, pick_languages, plan_runs
from calque.text.streams import seed_of

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.tasks.task_settings import TaskSettings
    from calque.tasks.transfer import OnProgress


def measure_parsing(
    encoder: Encoder,
    data: Path,
    *,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Outcome]:
    """Fine-tune a parser and give LAS (the main metric) and UAS of every test language."""
    files = find_treebanks(data)
    tests = pick_languages(list_languages(data, settings), languages, data)
    runs = plan_runs(settings, list(files.train), tests)

    def measure(run: Run, on_progress: OnProgress) -> list[Outcome]:
        prepared = prepare(encoder, files, run, settings)
        return _measure_run(encoder, prepared, settings, seed, on_progress)

    return measure_runs(encoder, runs, measure, on_progress)


def list_languages(data: Path, settings: TaskSettings) -> list[str]:
    """List the languages that can be tested, the source first."""
    files = find_treebanks(data)
    return choose_tests(settings, list(files.train), sorted(files.test))


def _measure_run(
    encoder: Encoder,
    data: ParseData,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress,
) -> list[Outcome]:
    root = data.relations.index(ROOT)
    generator = torch.Generator().manual_seed(seed_of(seed, 1))
    parser = Parser(encoder, len(data.relations), root, settings, generator)

    def judge() -> float:
        return float(
            np.mean([_score(text, data, _parse(text), settings).las for text in data.dev.values()])
        )

    def _parse(text: ParsedText) -> Parses:
        return parser.parse(text.encoded, settings)

    tuned = fine_tune(
        parser,
        data.train,
        settings,
        seed=seed,
        score_dev=judge if data.dev else None,
        on_progress=lambda done, total: on_progress(done, total + len(data.tests)),
    )
    learnt = {"train_sentences": len(data.train.n_words), "train_words_cut": data.train.n_cut}
    outcomes = []
    for number, (language, text) in enumerate(data.tests.items(), start=1):
        parses = _parse(text)
        scores = _score(text, data, parses, settings)
        counts = learnt | count_words(text, data.relations)
        counts["sentences_searched_for_a_tree"] = parses.n_searched
        metrics = {"las": scores.las, "uas": scores.uas}
        n_items = len(text.sentences)
        outcomes.append(Outcome(language, metrics, n_items, scores.items, counts=counts))
        on_progress(tuned.n_updates + number, tuned.n_updates + len(data.tests))
    return outcomes


def _score(
    text: ParsedText, data: ParseData, parses: Parses, settings: TaskSettings
) -> Attachments:
    ends = np.cumsum(text.encoded.n_words)[:-1]
    heads = [part.tolist() for part in np.split(parses.heads, ends)]
    kinds = [[data.relations[k] for k in part] for part in np.split(parses.relations, ends)]
    return count_attachments(text.sentences, heads, kinds, subtypes=settings.subtypes)
