"""The examples of a task by language: which are learnt from, and which of them test that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from calque.tasks.parallel_split import split_rows
from calque.tasks.task_settings import TaskSettings
from calque.tasks.transfer import Run
from calque.text.tagged import spread
from calque.text.xtreme import TaskFiles
from calque.types import InputError

T = TypeVar("T")

# Of a file that must serve both, the share that is learnt from; of a training set without a dev
# set, the share by which the epoch is chosen.
TRAIN_SHARE, DEV_SHARE = 2 / 3, 0.1
# Lines of parallel files whose classes agree at least; annotators corrected some translations.
AGREEMENT = 0.9


class Corpus(Generic[T]):
    """Reads the files of a task as they are asked for, each once.

    A language without a training file learns from its dev file. Where that is its test as well,
    it is divided, the same way for every seed: the first two thirds are learnt from and the rest
    tests. Where files are translations of each other (`texts_of` is given), the division goes by
    groups of lines that share a text, and holds for the tests of all languages: no language is
    tested on a translation of what was learnt from. `dropped` says of files that were read what
    was left out of them; `taught` are examples that no file has labels of, each with the number
    of the source's training example that it translates.
    """

    def __init__(
        self,
        files: TaskFiles,
        read: Callable[[Path], list[T]],
        settings: TaskSettings,
        texts_of: Callable[[T], tuple[str, ...]] | None = None,
        label_of: Callable[[T], str] | None = None,
        dropped: Mapping[Path, Mapping[str, int]] | None = None,
        taught: Mapping[str, Sequence[tuple[T, int]]] | None = None,
    ) -> None:
        self.files, self.settings = files, settings
        self.read, self.label_of, self._texts_of = read, label_of, texts_of
        self._dropped = {} if dropped is None else dropped
        self.taught = taught or {}
        self._known: dict[Path, list[T]] = {}

    @property
    def is_parallel(self) -> bool:
        """Whether the files of all languages translate each other, line by line."""
        return self._texts_of is not None

    @property
    def trainable(self) -> list[str]:
        """List the languages that the setting may learn from."""
        with_files = sorted({*self.files.train, *self.taught})
        if self.settings.setting == "translate-train-all" and with_files:
            return with_files
        return sorted({*self.files.train, *self.files.dev})

    def is_divided(self, language: str) -> bool:
        """Tell whether a language learns from a part of its own test."""
        learns = self.files.train.get(language) or self.taught.get(language)
        return not learns and not self.files.test.get(language)

    def learn_from(self, language: str, leave_out: Sequence[T] = ()) -> list[T]:
        """Give the examples to learn from in a language, less those that choose the epoch."""
        taught = [example for example, _ in self.taught.get(language, ())]
        examples = self.load(self._files_to_learn(language)) + taught
        if not examples:
            raise InputError(f"nothing to learn from in {language!r}", file=self.files.folder)
        if self.is_divided(language):
            examples = [examples[k] for k in self._divide(language)[0]]
        examples = spread(examples, self.settings.train_examples)
        held = set(map(id, leave_out))
        return [example for example in examples if id(example) not in held] if held else examples

    def choose_by(self, run: Run) -> tuple[list[T], list[T]]:
        """Give examples that choose the epoch, of the source if that is learnt from.

        They are the source's dev file where neither training nor test needs it; if not, the last
        tenth of what is learnt from, which must be left out then: the second list.
        """
        source = self.settings.source if self.settings.source in run.sources else run.sources[0]
        dev = self.files.dev.get(source)
        if dev and self.files.train.get(source) and self.files.test.get(source):
            return spread(self.load(dev), self.settings.test_examples), []
        examples = self.learn_from(source)
        held = examples[-max(1, round(DEV_SHARE * len(examples))) :]
        return held, held

    def test_on(self, language: str, run: Run) -> list[T]:
        """Give the examples that test a language, none of them learnt from in this run."""
        examples = self.load(self.files.to_test(language))
        divided = [source for source in run.sources if self.is_divided(source)]
        if divided and self._texts_of is not None:
            self._check_parallel(divided[0], language)
            examples = [examples[k] for k in self._divide(divided[0])[1]]
        elif language in divided:
            examples = [examples[k] for k in self._divide(language)[1]]
        return spread(examples, self.settings.test_examples)

    def count_dropped(self, language: str) -> dict[str, int]:
        """Say what reading left out of the test of a language, and whether that is its dev file."""
        counts = self._sum_dropped(self.files.to_test(language))
        return counts if self.files.test.get(language) else {**counts, "tested_on_dev": 1}

    def count_unlearnt(self, languages: Sequence[str]) -> dict[str, int]:
        """Say what reading left out of what is learnt from in some languages."""
        return self._sum_dropped([f for name in languages for f in self._files_to_learn(name)])

    def _sum_dropped(self, files: Sequence[Path]) -> dict[str, int]:
        counts = Counter[str]()
        for path in files:
            counts.update(self._dropped.get(path, {}))
        return dict(counts)

    def _files_to_learn(self, language: str) -> tuple[Path, ...]:
        files = self.files.train.get(language, ())
        return files if files or self.taught.get(language) else self.files.dev.get(language, ())

    def _divide(self, language: str) -> tuple[list[int], list[int]]:
        """Divide the lines of a dev file; parallel files all as the first language's by name."""
        if self._texts_of is None:
            n_all = len(self.load(self.files.dev[language]))
            n_first = max(1, min(n_all - 1, round(TRAIN_SHARE * n_all)))
            return list(range(n_first)), list(range(n_first, n_all))
        pivot = "en" if "en" in self.files.dev else min(self.files.dev)
        self._check_parallel(pivot, language)
        texts = [self._texts_of(example) for example in self.load(self.files.dev[pivot])]
        return split_rows(texts, TRAIN_SHARE)

    def _check_parallel(self, first: str, second: str) -> None:
        """Refuse files that are not line by line translations, which the division relies on."""
        assert self.label_of is not None
        sides = [self.load(self.files.to_test(name)) for name in (first, second)]
        if translate_each_other(sides[0], sides[1], self.label_of):
            return
        raise InputError(
            f"{second} is not the translation of {first}, line by line",
            file=self.files.folder,
            fix="add a training file, of which no test has translations",
        )

    def load(self, files: Sequence[Path]) -> list[T]:
        """Give the examples of files; the same ones every time."""
        for path in files:
            if path not in self._known:
                self._known[path] = list(self.read(path))
        return [example for path in files for example in self._known[path]]


def translate_each_other(
    first: Sequence[T], second: Sequence[T], label_of: Callable[[T], str] | None
) -> bool:
    """Tell whether two files may be line by line translations: as many lines, the same classes."""
    if label_of is None:
        return len(first) == len(second)
    labels = [np.array([label_of(example) for example in side]) for side in (first, second)]
    return len(first) == len(second) and bool((labels[0] == labels[1]).mean() >= AGREEMENT)
