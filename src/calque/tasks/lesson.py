"""A task that is learnt from labelled examples: encoded once, trained and tested run by run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from calque.tasks.finetuning import fine_tune
from calque.tasks.outcome import Items, Outcome
from calque.tasks.transfer import OnProgress, Run, measure_runs, plan_runs
from calque.text.streams import seed_of
from calque.types import InputError

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.tasks.corpus import Corpus
    from calque.tasks.head_task import HeadModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores on one test, the first of them the main one, with every item's share of it."""

    metrics: Mapping[str, float]
    items: Items
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lesson(Generic[T]):
    """What a task needs besides the loop: its examples, its labels, its model and its score.

    `encode(examples, labels)` gives `Examples` with `counts`; `make_model(encoder, labels,
    generator)` puts a head on an encoder; `score(model, encoded)` tests it.
    """

    corpus: Corpus[T]
    labels_of: Callable[[T], Iterable[str]]
    check_labels: Callable[[list[str]], list[str]]
    encode: Callable[[Sequence[T], list[str]], Any]
    make_model: Callable[[Encoder, list[str], torch.Generator], HeadModel]
    score: Callable[[Any, Any], Scored]
    _encoded: dict[object, Any] = field(default_factory=dict)

    def measure(
        self, encoder: Encoder, tests: Sequence[str], seed: int, on_progress: OnProgress
    ) -> list[Outcome]:
        """Train as the setting says, and score language by language."""
        runs = plan_runs(self.corpus.settings, self.corpus.trainable, tests)
        return measure_runs(encoder, runs, partial(self._measure_run, encoder, seed), on_progress)

    def _measure_run(
        self, encoder: Encoder, seed: int, run: Run, on_progress: OnProgress
    ) -> list[Outcome]:
        corpus, settings = self.corpus, self.corpus.settings
        labels = self._find_labels(run)
        generator = torch.Generator().manual_seed(seed_of(seed, 1))
        model = self.make_model(encoder, labels, generator)
        held: list[T] = []
        choose: Callable[[], float] | None = None
        if settings.select == "best":
            dev, held = corpus.choose_by(run)
            chooser = self._encode(("choose", run.sources), dev, labels)

            def choose() -> float:
                return self.score(model, chooser).items.score

        lesson = [e for name in run.sources for e in corpus.learn_from(name, leave_out=held)]
        learnt = self._encode(("learn", run.sources, bool(held)), lesson, labels)
        fine_tune(model, learnt, settings, seed=seed, score_dev=choose, on_progress=on_progress)
        return [self._test(model, language, run, labels, len(lesson)) for language in run.tests]

    def _test(
        self, model: HeadModel, language: str, run: Run, labels: list[str], n_learnt: int
    ) -> Outcome:
        examples = self.corpus.test_on(language, run)
        encoded = self._encode(("test", language, run.sources), examples, labels)
        scored = self.score(model, encoded)
        counts = {**encoded.counts, **scored.counts, **self.corpus.count_dropped(language)}
        counts["train_examples"] = n_learnt
        if any(map(self.corpus.is_divided, run.sources)):
            counts["learnt_from_part_of_dev"] = 1
        return Outcome(language, scored.metrics, len(examples), scored.items, counts=counts)

    def _find_labels(self, run: Run) -> list[str]:
        """List the labels that a run's training examples have."""
        learnt = [e for name in run.sources for e in self.corpus.learn_from(name)]
        labels = self.check_labels(sorted({x for e in learnt for x in self.labels_of(e)}))
        if len(labels) < 2:
            problem = f"{' '.join(run.sources)} has {len(labels)} labels to learn"
            raise InputError(problem, file=self.corpus.files.folder, fix="give two or more")
        return labels

    def _encode(self, key: tuple[object, ...], examples: Sequence[T], labels: list[str]) -> Any:
        key = (*key, *labels)
        if key not in self._encoded:
            self._encoded[key] = self.encode(examples, labels)
        return self._encoded[key]
