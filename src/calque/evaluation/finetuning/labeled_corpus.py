"""The examples of a task by language, split so that no example is trained on and tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from calque.errors import InputError
from calque.io.conllu import sample_evenly

if TYPE_CHECKING:
    from calque.evaluation.finetuning.transfer import TransferRun
    from calque.evaluation.settings import TaskSettings
    from calque.io.xtreme import TaskFiles

T = TypeVar("T")

# Share of a file for training if it must serve for training and testing; share of the training
# examples that choose the epoch if there is no development file.
TRAIN_SHARE, SELECTION_SHARE = 2 / 3, 0.1
# Minimum share of lines of parallel files with equal labels; some labels were corrected.
AGREEMENT = 0.9


class LabeledCorpus(Generic[T]):
    """The examples of a task by language; each file is read once, when it is needed.

    A language without a training file trains on its development file. If that is also its test,
    it is split in the same way for every seed: two thirds for training, the rest for the test. If
    the files are translations of each other (`texts_of` is given), the split keeps lines that
    share a text together and holds for the tests of all languages, so that no language is tested
    on a translation of a training example. `dropped` counts what was left out of each file;
    `teacher_labeled` are examples labeled by a model, each with the number of the training example
    of the source language that it translates.
    """

    def __init__(
        self,
        files: TaskFiles,
        read: Callable[[Path], list[T]],
        settings: TaskSettings,
        texts_of: Callable[[T], tuple[str, ...]] | None = None,
        label_of: Callable[[T], str] | None = None,
        dropped: Mapping[Path, Mapping[str, int]] | None = None,
        teacher_labeled: Mapping[str, Sequence[tuple[T, int]]] | None = None,
    ) -> None:
        self.files, self.settings = files, settings
        self.read, self.label_of, self._texts_of = read, label_of, texts_of
        self._dropped = {} if dropped is None else dropped
        self.teacher_labeled = teacher_labeled or {}
        self._known: dict[Path, list[T]] = {}

    @property
    def is_parallel(self) -> bool:
        """Whether the files of all languages are translations of each other, line by line."""
        return self._texts_of is not None

    @property
    def trainable(self) -> list[str]:
        """The languages that the setting may train on."""
        with_files = sorted({*self.files.train, *self.teacher_labeled})
        if self.settings.setting == "translate-train-all" and with_files:
            return with_files
        return sorted({*self.files.train, *self.files.dev})

    def is_split(self, language: str) -> bool:
        """Return whether a language trains on a part of its own test file."""
        learns = self.files.train.get(language) or self.teacher_labeled.get(language)
        return not learns and not self.files.test.get(language)

    def training_examples(self, language: str, leave_out: Sequence[T] = ()) -> list[T]:
        """Return the training examples of a language without those that choose the epoch."""
        teacher_labeled = [example for example, _ in self.teacher_labeled.get(language, ())]
        examples = self.load(self._training_files(language)) + teacher_labeled
        if not examples:
            raise InputError(
                f"there are no training examples for {language!r}", file=self.files.folder
            )
        if self.is_split(language):
            examples = [examples[k] for k in self._split(language)[0]]
        examples = sample_evenly(examples, self.settings.train_examples)
        held = set(map(id, leave_out))
        return [example for example in examples if id(example) not in held] if held else examples

    def selection_examples(self, run: TransferRun) -> tuple[list[T], list[T]]:
        """Return the examples that choose the epoch, and those to leave out of the training.

        They are the development file of the source language if neither training nor test needs
        it; otherwise the last tenth of the training examples.
        """
        source = self.settings.source if self.settings.source in run.sources else run.sources[0]
        dev = self.files.dev.get(source)
        if dev and self.files.train.get(source) and self.files.test.get(source):
            return sample_evenly(self.load(dev), self.settings.test_examples), []
        examples = self.training_examples(source)
        held = examples[-max(1, round(SELECTION_SHARE * len(examples))) :]
        return held, held

    def test_set(self, language: str, run: TransferRun) -> list[T]:
        """Return the test examples of a language, none of which is trained on in this run."""
        examples = self.load(self.files.test_files(language))
        divided = [source for source in run.sources if self.is_split(source)]
        if divided and self._texts_of is not None:
            self._check_parallel(divided[0], language)
            examples = [examples[k] for k in self._split(divided[0])[1]]
        elif language in divided:
            examples = [examples[k] for k in self._split(language)[1]]
        return sample_evenly(examples, self.settings.test_examples)

    def count_dropped(self, language: str) -> dict[str, int]:
        """Count what was left out of the test of a language, and note a development file."""
        counts = self._sum_dropped(self.files.test_files(language))
        return counts if self.files.test.get(language) else {**counts, "tested_on_dev": 1}

    def count_dropped_in_training(self, languages: Sequence[str]) -> dict[str, int]:
        """Count what was left out of the training files of some languages."""
        return self._sum_dropped([f for name in languages for f in self._training_files(name)])

    def _sum_dropped(self, files: Sequence[Path]) -> dict[str, int]:
        counts = Counter[str]()
        for path in files:
            counts.update(self._dropped.get(path, {}))
        return dict(counts)

    def _training_files(self, language: str) -> tuple[Path, ...]:
        files = self.files.train.get(language, ())
        return (
            files
            if files or self.teacher_labeled.get(language)
            else self.files.dev.get(language, ())
        )

    def _split(self, language: str) -> tuple[list[int], list[int]]:
        """Return the training and test lines of a development file; parallel files share them."""
        if self._texts_of is None:
            n_all = len(self.load(self.files.dev[language]))
            n_first = max(1, min(n_all - 1, round(TRAIN_SHARE * n_all)))
            return list(range(n_first)), list(range(n_first, n_all))
        pivot = "en" if "en" in self.files.dev else min(self.files.dev)
        self._check_parallel(pivot, language)
        texts = [self._texts_of(example) for example in self.load(self.files.dev[pivot])]
        return split_rows(texts, TRAIN_SHARE)

    def _check_parallel(self, first: str, second: str) -> None:
        """Raise InputError if two files are not parallel, as the split requires."""
        assert self.label_of is not None
        sides = [self.load(self.files.test_files(name)) for name in (first, second)]
        if are_parallel(sides[0], sides[1], self.label_of):
            return
        raise InputError(
            f"the files of {second} and {first} are not translations line by line",
            file=self.files.folder,
            fix="add a training file whose translations are in no test",
        )

    def load(self, files: Sequence[Path]) -> list[T]:
        """Return the examples of files; the same objects every time."""
        for path in files:
            if path not in self._known:
                self._known[path] = list(self.read(path))
        return [example for path in files for example in self._known[path]]


def are_parallel(
    first: Sequence[T], second: Sequence[T], label_of: Callable[[T], str] | None
) -> bool:
    """Return whether two files can be parallel: equal numbers of lines and mostly equal labels."""
    if label_of is None:
        return len(first) == len(second)
    labels = [np.array([label_of(example) for example in side]) for side in (first, second)]
    return len(first) == len(second) and bool((labels[0] == labels[1]).mean() >= AGREEMENT)


def split_rows(texts: Sequence[Sequence[str]], share: float) -> tuple[list[int], list[int]]:
    """Split rows, always in the same way, with rows that share a text on the same side.

    XNLI has three hypotheses per premise, and pairs of PAWS-X share sentences. Random groups are
    added until the first side has its share of the rows; both sides keep the order of the file.

    >>> split_rows([["a", "b"], ["c", "d"], ["b", "e"]], share=0.6)
    ([0, 2], [1])
    """
    groups = _group(texts)
    order = np.random.default_rng(0).permutation(len(groups)).tolist()
    first: list[int] = []
    for number in order[:-1]:  # one group is always left for the other side
        if len(first) >= share * len(texts):
            break
        first += groups[number]
    rest = set(range(len(texts))) - set(first)
    return sorted(first), sorted(rest)


def _group(texts: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return groups of rows that share a text, directly or through other rows."""
    root: dict[str, str] = {}

    def find(text: str) -> str:
        while root.setdefault(text, text) != text:
            root[text] = root[root[text]]
            text = root[text]
        return text

    for row in texts:
        for text in row[1:]:
            root[find(text)] = find(row[0])
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(texts):
        groups.setdefault(find(row[0]), []).append(number)
    return list(groups.values())
