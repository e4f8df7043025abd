"""A fine-tuning experiment: examples are encoded once, models trained and tested run by run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from calque.errors import InputError
from calque.evaluation.finetuning.finetune import fine_tune
from calque.evaluation.finetuning.transfer import OnProgress, TransferRun, measure_runs, plan_runs
from calque.evaluation.records import ItemScores, LanguageScores, note_upper_bound
from calque.tokens.sampling import derive_seed

if TYPE_CHECKING:
    from calque.evaluation.finetuning.head_model import HeadModel
    from calque.evaluation.finetuning.labeled_corpus import LabeledCorpus
    from calque.evaluation.finetuning.plug_in import Role, TranslatedExample, TranslatedPairs
    from calque.models.encoder import Encoder


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TestScores:
    """Metrics on one test, the main one first, and the contribution of every item to it."""

    metrics: Mapping[str, float]
    items: ItemScores
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlugInSetup(Generic[T]):
    """What plug-in fine-tuning needs: the translations of examples, and how pairs are encoded."""

    pairs: TranslatedPairs[T]
    encode: Callable[[Sequence[TranslatedExample[T]], list[str]], Any]

    def count_missing(self, language: str, pairs: Sequence[TranslatedExample[T]]) -> dict[str, int]:
        """Count test examples without a translation, and those with a human translation."""
        n_missing = sum(pair.other is None for pair in pairs)
        by_line = self.pairs.pairs_by_line(language)
        counts = {
            "without_translation": n_missing,
            "human_translations": len(pairs) - n_missing if by_line else 0,
        }
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class FinetuneExperiment(Generic[T]):
    """Everything that distinguishes a task: examples, labels, model and score.

    `encode(examples, labels)` returns `Examples` with `counts`; `make_model(encoder, labels,
    generator)` adds a head to an encoder; `score(model, encoded)` tests it. `counts` has
    facts about the preparation of the data.
    """

    corpus: LabeledCorpus[T]
    labels_of: Callable[[T], Iterable[str]]
    check_labels: Callable[[list[str]], list[str]]
    encode: Callable[[Sequence[T], list[str]], Any]
    make_model: Callable[[Encoder, list[str], torch.Generator], HeadModel]
    score: Callable[[Any, Any], TestScores]
    plug: PlugInSetup[T] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    _encoded: dict[object, Any] = field(default_factory=dict)

    def measure(
        self, encoder: Encoder, tests: Sequence[str], seed: int, on_progress: OnProgress
    ) -> list[LanguageScores]:
        """Train models as the setting requires, and return the scores of every language."""
        runs = plan_runs(self.corpus.settings, self.corpus.trainable, tests)
        return measure_runs(encoder, runs, partial(self._measure_run, encoder, seed), on_progress)

    def train(
        self, encoder: Encoder, seed: int, run: TransferRun, on_progress: OnProgress
    ) -> tuple[HeadModel, list[str], dict[str, int]]:
        """Train the model of a run; return it with its labels and counts of the data."""
        corpus, settings = self.corpus, self.corpus.settings
        labels = self._find_labels(run)
        generator = torch.Generator().manual_seed(derive_seed(seed, 1))
        model = self.make_model(encoder, labels, generator)
        held: list[T] = []
        score_dev: Callable[[], float] | None = None
        if settings.select == "best":
            dev, held = corpus.selection_examples(run)
            source = settings.source if settings.source in run.sources else run.sources[0]
            ready = self._pair(source, dev, "train" if held else "select")
            selection = self._encode(("select", run.sources), ready, labels)

            def score_dev() -> float:
                return self.score(model, selection).items.score

        examples, counts = self._gather(run, held)
        encoded = self._encode(("train", run.sources, bool(held)), examples, labels)
        fine_tune(model, encoded, settings, seed=seed, score_dev=score_dev, on_progress=on_progress)
        lost = {**encoded.counts, **corpus.count_dropped_in_training(run.sources)}
        counts |= {f"train_{name}": count for name, count in lost.items()}
        if any(map(corpus.is_split, run.sources)):
            counts["learnt_from_part_of_dev"] = 1
        return model, labels, {**counts, **self.counts}

    def _measure_run(
        self, encoder: Encoder, seed: int, run: TransferRun, on_progress: OnProgress
    ) -> list[LanguageScores]:
        labels = self._find_labels(run)
        for language in run.tests:  # so that errors in a test are found before the training
            self._encode_test(language, run, labels)
        model, _, counts = self.train(encoder, seed, run, on_progress)
        return [self._test(model, language, run, labels, counts) for language in run.tests]

    def _gather(self, run: TransferRun, held: list[T]) -> tuple[Sequence[Any], dict[str, int]]:
        """Return the training examples of a run (pairs for plug-in) and their counts."""
        if self.plug is None:
            names = run.sources
            examples = [e for name in names for e in self.corpus.training_examples(name, held)]
            return examples, {"train_examples": len(examples)}
        pairs = self.plug.pairs.pair_training_examples(run, held)
        n_missing = sum(pair.other is None for pair in pairs)
        counts = {"train_examples": len(pairs) + sum(pair.learns_other for pair in pairs)}
        return pairs, counts | ({"learnt_without_translation": n_missing} if n_missing else {})

    def _pair(self, language: str, examples: Sequence[T], role: Role) -> Sequence[Any]:
        return examples if self.plug is None else self.plug.pairs.pair(language, examples, role)

    def _test(
        self,
        model: HeadModel,
        language: str,
        run: TransferRun,
        labels: list[str],
        train_counts: Mapping[str, int],
    ) -> LanguageScores:
        examples, encoded = self._encode_test(language, run, labels)
        model.language = language
        scored = self.score(model, encoded)
        counts = {**encoded.counts, **scored.counts, **self.corpus.count_dropped(language)}
        if self.plug is not None:
            counts |= self.plug.count_missing(language, examples)
        return LanguageScores(
            language,
            scored.metrics,
            len(examples),
            scored.items,
            counts={**counts, **train_counts},
            notes=note_upper_bound(counts.get("human_translations", 0)),
        )

    def _encode_test(
        self, language: str, run: TransferRun, labels: list[str]
    ) -> tuple[Sequence[Any], Any]:
        examples = self._pair(language, self.corpus.test_set(language, run), "test")
        return examples, self._encode(("test", language, run.sources), examples, labels)

    def _find_labels(self, run: TransferRun) -> list[str]:
        """Return the labels of the training examples of a run."""
        examples = [e for name in run.sources for e in self.corpus.training_examples(name)]
        labels = self.check_labels(sorted({x for e in examples for x in self.labels_of(e)}))
        if len(labels) < 2:
            problem = f"the training data of {' '.join(run.sources)} have {len(labels)} labels"
            raise InputError(problem, file=self.corpus.files.folder, fix="at least two are needed")
        return labels

    def _encode(self, key: tuple[object, ...], examples: Sequence[Any], labels: list[str]) -> Any:
        key = (*key, *labels)
        if key not in self._encoded:
            encode = self.encode if self.plug is None else self.plug.encode
            self._encoded[key] = encode(examples, labels)
        return self._encoded[key]
