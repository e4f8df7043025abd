"""Transfer between languages: runs, training and test examples, and translated pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.plug_in import TranslatedExample
from calque.evaluation.settings import TaskSettings
from calque.io.conllu import sample_evenly
from calque.io.xtreme import TRANSLATE_TRAIN, TaskFiles

if TYPE_CHECKING:
    from torch import nn

    from calque.evaluation.records import LanguageScores


OnProgress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class TransferRun:
    """Languages to train on, all at once, and languages to test."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


def plan_runs(
    settings: TaskSettings, trainable: Sequence[str], tests: Sequence[str]
) -> list[TransferRun]:
    """Return the runs that a setting requires for the available languages.

    >>> from calque.evaluation.settings import TaskSettings
    >>> plan_runs(TaskSettings(setting="supervised"), ["en", "vi"], ["de", "en", "vi"])
    [TransferRun(sources=('en',), tests=('en',)), TransferRun(sources=('vi',), tests=('vi',))]
    """
    if not tests:
        raise InputError("there is no language to test", fix="pass a folder with test files")
    if settings.setting == "supervised":
        runs = [TransferRun((name,), (name,)) for name in tests if name in trainable]
        if not runs:
            raise InputError(
                "none of the languages has training files",
                fix=f"choose from: {' '.join(sorted(trainable))}, or use another setting",
            )
        return runs
    if settings.setting == "translate-train-all":
        if not trainable:
            raise InputError("no language has training files", fix="add a training file")
        if len(set(trainable)) < 2:
            problem = (
                f"translate-train-all needs several languages, but only {trainable[0]} has files"
            )
            raise InputError(problem, fix="add translations, or use another setting")
        return [TransferRun(tuple(sorted(trainable)), tuple(tests))]
    if settings.source not in trainable:
        fix = f"set source to one of: {' '.join(sorted(trainable))}" if trainable else "add one"
        raise InputError(f"the source language {settings.source!r} has no training file", fix=fix)
    return [TransferRun((settings.source,), tuple(tests))]


def choose_tests(
    settings: TaskSettings, trainable: Sequence[str], tests: Sequence[str]
) -> list[str]:
    """Return the languages that can be tested in a setting, the source first."""
    runs = plan_runs(settings, trainable, tests)
    names = sorted({name for run in runs for name in run.tests})
    return sorted(names, key=lambda name: name != settings.source)


def pick_languages(known: Sequence[str], asked: Sequence[str] | None, data: object) -> list[str]:
    """Return the requested languages in the order of `known`; an unknown one is an error."""
    for name in asked or ():
        if name not in known:
            fix = f"choose from: {' '.join(known)}"
            raise InputError(f"there is no test for {name!r}", file=data, fix=fix)
    return [name for name in known if asked is None or name in asked]


def measure_runs(
    encoder: nn.Module,
    runs: Sequence[TransferRun],
    measure: Callable[[TransferRun, OnProgress], list[LanguageScores]],
    on_progress: OnProgress = lambda done, total: None,
) -> list[LanguageScores]:
    """Measure all runs; each one starts from the original weights of the encoder."""
    kept = {name: value.clone() for name, value in encoder.state_dict().items()}
    outcomes: list[LanguageScores] = []
    for number, run in enumerate(runs):
        if number:
            with torch.no_grad():
                encoder.load_state_dict(kept)
        outcomes += measure(run, partial(report_part, on_progress, number, len(runs)))
    return outcomes


def report_part(on_progress: OnProgress, number: int, n_parts: int, done: int, total: int) -> None:
    """Report the progress of one of several parts that are assumed to have the same length."""
    on_progress(number * total + done, n_parts * total)


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


Role = Literal["train", "select", "test"]


class TranslatedPairs(Generic[T]):
    """Finds the translations of examples.

    An example of another language is paired with one of the source language: by the original that
    its file names; line by line, if the files are parallel or the file is in `translate-train`; by
    the teacher that labeled it; and for tests first of all by the file in `translate-test`, which
    `read` reads. An example of the source is paired with the first language that has one.
    """

    def __init__(
        self,
        corpus: LabeledCorpus[T],
        read: Callable[[Path], list[T]],
        find_original: Callable[[T], T | None] = lambda example: None,
        is_empty: Callable[[T], bool] = lambda example: False,
    ) -> None:
        self.corpus, self._read = corpus, read
        self._find_original, self._is_empty = find_original, is_empty
        self._known: dict[tuple[str, Role], dict[int, T]] = {}

    def pair_training_examples(
        self, run: TransferRun, leave_out: Sequence[T]
    ) -> list[TranslatedExample[T]]:
        """Return the training pairs of a run; the source side is trained on once per language.

        Paper: bilingual instances are "English instance with its translated one".
        """
        source, held = self.corpus.settings.source, set(map(id, leave_out))
        pairs: list[TranslatedExample[T]] = []
        for language in run.sources:
            if language != source:
                found = self.pair(
                    language, self.corpus.training_examples(language, leave_out), "train"
                )
                for pair in found:
                    other = pair.other
                    learns = other is not None and source in run.sources and id(other) not in held
                    pairs.append(TranslatedExample(pair.example, other, learns))
        if source in run.sources:
            already_paired = {id(pair.other) for pair in pairs if pair.learns_other}
            rest = [
                e
                for e in self.corpus.training_examples(source, leave_out)
                if id(e) not in already_paired
            ]
            pairs = self.pair(source, rest, "train") + pairs
        if all(pair.other is None for pair in pairs):
            raise InputError(
                "plug=in needs translations, but no training example has one",
                file=self.corpus.files.folder,
                fix=f"put translations of the training set into {TRANSLATE_TRAIN}/ and set "
                "setting=translate-train-all, or set plug=out",
            )
        return pairs

    def pair(self, language: str, examples: Sequence[T], role: Role) -> list[TranslatedExample[T]]:
        """Return examples of a language with their translations, if there are any."""
        key = language, role
        if key not in self._known:
            self._known[key] = self._find_translations(language, role)
        known = self._known[key]
        return [TranslatedExample(example, known.get(id(example))) for example in examples]

    def pairs_by_line(self, language: str) -> bool:
        """Return whether a test is paired line by line, that is with human translations."""
        return language not in self.corpus.files.translated_tests

    def _find_translations(self, language: str, role: Role) -> dict[int, T]:
        """Return the translations by the identity of the example."""
        files, source = self.corpus.files, self.corpus.settings.source
        if role == "test" and not self.pairs_by_line(language):
            return self._read_translated_test(language)
        if language != source:
            return {id(own): other for own, other in self._training_pairs(language, role)}
        for other in sorted({*files.train, *files.dev, *files.test, *self.corpus.teacher_labeled}):
            found = {} if other == source else dict(self._reversed_pairs(other, role))
            if found:
                return found
        return {}

    def _reversed_pairs(self, language: str, role: Role) -> Iterator[tuple[int, T]]:
        for own, other in self._training_pairs(language, role):
            yield id(other), own

    def _read_translated_test(self, language: str) -> dict[int, T]:
        """Read the translations of a test: one line for every example, which may be empty."""
        path = self.corpus.files.translated_tests[language]
        tests, lines = self.corpus.load(self.corpus.files.test_files(language)), self._read(path)
        if len(lines) != len(tests):
            problem = f"there are {len(lines):,} translations of {len(tests):,} test examples"
            raise InputError(problem, file=path, fix="write one line for every example, in order")
        pairs = zip(tests, lines, strict=True)
        return {id(test): line for test, line in pairs if not self._is_empty(line)}

    def _training_pairs(self, language: str, role: Role) -> Iterator[tuple[T, T]]:
        """Yield examples of another language with the source examples that they translate."""
        files, source = self.corpus.files, self.corpus.settings.source
        if role == "test":
            yield from self._pairs_by_line(files.test_files(language), files.test_files(source))
            return
        of_role = files.dev if role == "select" else files.train
        if role == "train":
            sources = self.corpus.load(files.train.get(source, ()))
            labeled = self.corpus.teacher_labeled.get(language, ())
            yield from ((own, sources[k]) for own, k in labeled)
            if language not in files.train and source not in files.train:
                of_role = files.dev
        originals = [p for p in of_role.get(source, ()) if p.parent.name != TRANSLATE_TRAIN]
        for path in of_role.get(language, ()):
            named = list(self._pairs_by_original(path, originals))
            yield from named or self._pairs_by_line((path,), originals)

    def _pairs_by_original(self, path: Path, originals: Sequence[Path]) -> Iterator[tuple[T, T]]:
        """Yield examples whose file names the original, with the example that has this text."""
        known: dict[T, T] | None = None
        for example in self.corpus.load((path,)):
            original = self._find_original(example)
            if original is not None:
                if known is None:
                    known = {found: found for found in self.corpus.load(originals)}
                yield example, known.get(original, original)

    def _pairs_by_line(self, own: Sequence[Path], others: Sequence[Path]) -> Iterator[tuple[T, T]]:
        """Yield the pairs of two parallel files, line by line."""
        if not own or not others:
            return
        if self.corpus.is_parallel or own[0].parent.name == TRANSLATE_TRAIN:
            sides = self.corpus.load(own), self.corpus.load(others)
            if are_parallel(sides[0], sides[1], self.corpus.label_of):
                yield from zip(*sides, strict=True)
