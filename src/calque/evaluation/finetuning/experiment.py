"""A task that is learnt from labelled examples: encoded once, trained and tested run by run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from calque.errors import InputError
from calque.evaluation.finetuning.finetune import fine_tune
from calque.evaluation.finetuning.transfer import OnProgress, Run, measure_runs, plan_runs
from calque.evaluation.records import ItemScores, LanguageScores
from calque.tokens.sampling import derive_seed

if TYPE_CHECKING:
    from calque.evaluation.finetuning.head_task import HeadModel
    from calque.evaluation.finetuning.plug_in import Paired
    from calque.evaluation.finetuning.transfer import Corpus, Partners, Role
    from calque.models.encoder import Encoder


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores on one test, the first of them the main one, with every item's share of it."""

    metrics: Mapping[str, float]
    items: ItemScores
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlugIn(Generic[T]):
    """What plug-in fine-tuning needs besides: who translates whom, and how pairs are encoded."""

    partners: Partners[T]
    encode: Callable[[Sequence[Paired[T]], list[str]], Any]

    def count_missing(self, language: str, pairs: Sequence[Paired[T]]) -> dict[str, int]:
        """Count tests without a translation, and those with one that people wrote."""
        n_missing = sum(pair.other is None for pair in pairs)
        by_line = self.partners.reads_lines(language)
        counts = {
            "without_translation": n_missing,
            "paired_by_line": len(pairs) - n_missing if by_line else 0,
        }
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Lesson(Generic[T]):
    """What a task needs besides the loop: its examples, its labels, its model and its score.

    `encode(examples, labels)` gives `Examples` with `counts`; `make_model(encoder, labels,
    generator)` puts a head on an encoder; `score(model, encoded)` tests it. `counts` says what
    happened to the data beforehand.
    """

    corpus: Corpus[T]
    labels_of: Callable[[T], Iterable[str]]
    check_labels: Callable[[list[str]], list[str]]
    encode: Callable[[Sequence[T], list[str]], Any]
    make_model: Callable[[Encoder, list[str], torch.Generator], HeadModel]
    score: Callable[[Any, Any], Scored]
    plug: PlugIn[T] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    _encoded: dict[object, Any] = field(default_factory=dict)

    def measure(
        self, encoder: Encoder, tests: Sequence[str], seed: int, on_progress: OnProgress
    ) -> list[LanguageScores]:
        """Train as the setting says, and score language by language."""
        runs = plan_runs(self.corpus.settings, self.corpus.trainable, tests)
        return measure_runs(encoder, runs, partial(self._measure_run, encoder, seed), on_progress)

    def train(
        self, encoder: Encoder, seed: int, run: Run, on_progress: OnProgress
    ) -> tuple[HeadModel, list[str], dict[str, int]]:
        """Learn what a run says; give the model, its labels, and what it learnt from."""
        corpus, settings = self.corpus, self.corpus.settings
        labels = self._find_labels(run)
        generator = torch.Generator().manual_seed(derive_seed(seed, 1))
        model = self.make_model(encoder, labels, generator)
        held: list[T] = []
        choose: Callable[[], float] | None = None
        if settings.select == "best":
            dev, held = corpus.choose_by(run)
            source = settings.source if settings.source in run.sources else run.sources[0]
            ready = self._pair(source, dev, "learn" if held else "choose")
            chooser = self._encode(("choose", run.sources), ready, labels)

            def choose() -> float:
                return self.score(model, chooser).items.score

        lesson, counts = self._gather(run, held)
        learnt = self._encode(("learn", run.sources, bool(held)), lesson, labels)
        fine_tune(model, learnt, settings, seed=seed, score_dev=choose, on_progress=on_progress)
        lost = {**learnt.counts, **corpus.count_unlearnt(run.sources)}
        counts |= {f"train_{name}": count for name, count in lost.items()}
        if any(map(corpus.is_divided, run.sources)):
            counts["learnt_from_part_of_dev"] = 1
        return model, labels, {**counts, **self.counts}

    def _measure_run(
        self, encoder: Encoder, seed: int, run: Run, on_progress: OnProgress
    ) -> list[LanguageScores]:
        labels = self._find_labels(run)
        for language in run.tests:  # what is wrong with a test is told before hours of training
            self._encode_test(language, run, labels)
        model, _, counts = self.train(encoder, seed, run, on_progress)
        return [self._test(model, language, run, labels, counts) for language in run.tests]

    def _gather(self, run: Run, held: list[T]) -> tuple[Sequence[Any], dict[str, int]]:
        """Collect what a run learns from, beside its translations if they are to be read."""
        if self.plug is None:
            lesson = [e for name in run.sources for e in self.corpus.learn_from(name, held)]
            return lesson, {"train_examples": len(lesson)}
        pairs = self.plug.partners.pair_lessons(run, held)
        n_missing = sum(pair.other is None for pair in pairs)
        counts = {"train_examples": len(pairs) + sum(pair.learns_other for pair in pairs)}
        return pairs, counts | ({"learnt_without_translation": n_missing} if n_missing else {})

    def _pair(self, language: str, examples: Sequence[T], role: Role) -> Sequence[Any]:
        return examples if self.plug is None else self.plug.partners.pair(language, examples, role)

    def _test(
        self,
        model: HeadModel,
        language: str,
        run: Run,
        labels: list[str],
        learnt: Mapping[str, int],
    ) -> LanguageScores:
        examples, encoded = self._encode_test(language, run, labels)
        scored = self.score(model, encoded)
        counts = {**encoded.counts, **scored.counts, **self.corpus.count_dropped(language)}
        if self.plug is not None:
            counts |= self.plug.count_missing(language, examples)
        n_items = len(examples)
        return LanguageScores(language, scored.metrics, n_items, scored.items, counts={**counts, **learnt})

    def _encode_test(self, language: str, run: Run, labels: list[str]) -> tuple[Sequence[Any], Any]:
        examples = self._pair(language, self.corpus.test_on(language, run), "test")
        return examples, self._encode(("test", language, run.sources), examples, labels)

    def _find_labels(self, run: Run) -> list[str]:
        """List the labels that a run's training examples have."""
        learnt = [e for name in run.sources for e in self.corpus.learn_from(name)]
        labels = self.check_labels(sorted({x for e in learnt for x in self.labels_of(e)}))
        if len(labels) < 2:
            problem = f"{' '.join(run.sources)} has {len(labels)} labels to learn"
            raise InputError(problem, file=self.corpus.files.folder, fix="give two or more")
        return labels

    def _encode(self, key: tuple[object, ...], examples: Sequence[Any], labels: list[str]) -> Any:
        key = (*key, *labels)
        if key not in self._encoded:
            encode = self.encode if self.plug is None else self.plug.encode
            self._encoded[key] = encode(examples, labels)
        return self._encoded[key]
