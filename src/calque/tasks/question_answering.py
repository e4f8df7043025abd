"""Question answering on XQuAD, MLQA and TyDiQA-GoldP: spans of a text, scored by F1 of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.tasks.answer_scores import Normalize, normalize_mlqa, normalize_squad, score_answer
from calque.tasks.finetuning import fine_tune
from calque.tasks.outcome import Items, Outcome
from calque.tasks.prepared import remember
from calque.tasks.question_files import MLQA, QuestionSet, find_questions
from calque.tasks.question_windows import QuestionExamples, encode_questions
from calque.tasks.span_finder import FoundAnswer, SpanFinder
from calque.tasks.transfer import Run, choose_tests, measure_runs, pick_languages, plan_runs
from calque.text.streams import seed_of
from calque.text.tagged import spread
from calque.types import InputError

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.tasks.task_settings import TaskSettings
    from calque.tasks.transfer import OnProgress
    from calque.text.questions import Question

# XTREME's window; a model that reads less has shorter ones.
WINDOW = 384


@dataclass(frozen=True, slots=True)
class QuestionText:
    """Questions with answers, and what a model reads of them."""

    questions: Sequence[Question]
    encoded: QuestionExamples
    n_unanswered: int
    n_longer: int  # questions whose answers are all longer than any that is given
    is_dev: bool = False

    def count(self, prefix: str = "") -> dict[str, int]:
        """Say what was read in windows, cut or left out."""
        n_windows = np.bincount(self.encoded.owners, minlength=len(self.questions))
        return {
            f"{prefix}questions": len(self.questions),
            f"{prefix}questions_without_answer_left_out": self.n_unanswered,
            f"{prefix}questions_cut": self.encoded.n_cut_questions,
            f"{prefix}texts_in_windows": int((n_windows > 1).sum()),
            f"{prefix}windows": len(self.encoded.lengths),
            f"{prefix}answers_in_no_window": self.encoded.n_lost_answers,
            f"{prefix}answers_longer_than_max_answer": self.n_longer,
        } | ({"tested_on_dev": 1} if self.is_dev else {})


@dataclass(frozen=True, slots=True)
class QuestionData:
    """What one run learns from and is tested on."""

    train: QuestionText
    tests: Mapping[str, QuestionText]
    counts: Mapping[str, int]


def measure_questions(
    encoder: Encoder,
    data: Path,
    *,
    task: str,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress = lambda done, total: None,
) -> list[Outcome]:
    """Fine-tune on questions and give F1 (the main metric) and exact match of every language."""
    if settings.select == "best":
        raise InputError(f"{task} has no questions to choose the best epoch by", fix="select last")
    files = find_questions(data, task)
    tests = pick_languages(list_languages(data, settings, task=task), languages, data)
    runs = plan_runs(settings, list(files.train), tests)

    def measure(run: Run, on_progress: OnProgress) -> list[Outcome]:
        prepared = _prepare(encoder, files, run, settings)
        return _measure_run(encoder, prepared, task, settings, seed, on_progress)

    return measure_runs(encoder, runs, measure, on_progress)


def list_languages(data: Path, settings: TaskSettings, *, task: str) -> list[str]:
    """List the languages that can be tested, the source first."""
    files = find_questions(data, task)
    return choose_tests(settings, list(files.train), sorted(files.tests))


def score_answers(
    found: Sequence[FoundAnswer], questions: Sequence[Question], normalize: Normalize
) -> tuple[Items, float]:
    """Give the items of F1, and exact match in percent."""
    pairs = [
        score_answer(answer.text, [gold.text for gold in question.answers], normalize)
        for answer, question in zip(found, questions, strict=True)
    ]
    f1, exact = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return Items(f1, np.ones_like(f1)), 100 * float(exact.mean())


def _measure_run(
    encoder: Encoder,
    data: QuestionData,
    task: str,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress,
) -> list[Outcome]:
    finder = SpanFinder(encoder, settings, torch.Generator().manual_seed(seed_of(seed, 1)))
    n_tests = len(data.tests)
    tuned = fine_tune(
        finder,
        data.train.encoded,
        settings,
        seed=seed,
        on_progress=lambda done, total: on_progress(done, total + n_tests),
    )
    outcomes = []
    for number, (language, text) in enumerate(data.tests.items(), start=1):
        rules = partial(normalize_mlqa, language=language) if task == MLQA else normalize_squad
        found = finder.answer(text.encoded, text.questions, settings)
        items, exact = score_answers(found, text.questions, rules)
        metrics = {"f1": items.score, "exact_match": exact}
        counts = {**data.counts, **text.count()}
        outcomes.append(Outcome(language, metrics, len(found), items, counts=counts))
        on_progress(tuned.n_updates + number, tuned.n_updates + n_tests)
    return outcomes


def _prepare(
    encoder: Encoder, files: QuestionSet, run: Run, settings: TaskSettings
) -> QuestionData:
    """Read and encode what a run needs, once for all seeds of a process."""
    longest = min(settings.max_length or WINDOW, encoder.max_tokens)
    paths = [files.train[n] for n in run.sources] + [files.tests[n] for n in run.tests]
    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in paths)
    sizes = (longest, settings.stride, settings.max_answer)
    examples = (settings.train_examples, settings.test_examples)

    def encode(questions: Sequence[Question], most: int | None) -> QuestionText:
        answered = spread([question for question in questions if question.answers], most)
        if not answered:
            raise InputError("no question has an answer", fix="give another file")
        n_unanswered = sum(not question.answers for question in questions)
        encoded = encode_questions(encoder.tokenizer, answered, longest, stride=settings.stride)
        n_longer = encoded.count_longer(answered, settings.max_answer)
        return QuestionText(answered, encoded, n_unanswered, n_longer)

    def read() -> QuestionData:
        known = [question for name in run.sources for question in files.read_train(name)]
        train = encode(known, settings.train_examples)
        tests = {
            name: replace(
                encode(files.read_test(name), settings.test_examples), is_dev=files.is_dev(name)
            )
            for name in run.tests
        }
        origin = {
            "train_from_squad": int(files.from_squad),
            "tests_held_out_of_training_files": len(files.held_out & set(run.tests)),
            "languages_left_out_for_secret_answers": len(files.secret),
        }
        return QuestionData(train, tests, train.count("train_") | origin)

    key = ("questions", run, stamps, sizes, examples, files.held_out)
    return remember(encoder.tokenizer, key, read)
