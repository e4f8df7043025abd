"""Settings as runs: in which languages a model learns, and in which it is tested after.

A fair division of examples that share texts: what was learnt from is in no test.

The examples of a task by language: which are learnt from, and which of them test that.

Which example is the translation of which: in files that translate each other, or beside them.
"""

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
from calque.evaluation.finetuning.plug_in import Paired
from calque.evaluation.settings import TaskSettings
from calque.io.conllu import sample_evenly
from calque.io.xtreme import TRANSLATE_TRAIN, TaskFiles

if TYPE_CHECKING:
    from torch import nn

    from calque.evaluation.records import LanguageScores


OnProgress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Run:
    """Languages to learn in, all at once, and languages to test in."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


def plan_runs(settings: TaskSettings, trainable: Sequence[str], tests: Sequence[str]) -> list[Run]:
    """Say what the setting of a task means for the languages there are files of.

    >>> from calque.evaluation.settings import TaskSettings
    >>> plan_runs(TaskSettings(setting="supervised"), ["en", "vi"], ["de", "en", "vi"])
    [Run(sources=('en',), tests=('en',)), Run(sources=('vi',), tests=('vi',))]
    """
    if not tests:
        raise InputError("no language to test in", fix="give a folder with tests")
    if settings.setting == "supervised":
        runs = [Run((name,), (name,)) for name in tests if name in trainable]
        if not runs:
            raise InputError(
                "none of the languages has files to learn from",
                fix=f"choose from: {' '.join(sorted(trainable))}, or another setting",
            )
        return runs
    if settings.setting == "translate-train-all":
        if not trainable:
            raise InputError("no language has files to learn from", fix="add a training file")
        if len(set(trainable)) < 2:
            problem = f"only {trainable[0]} has files to learn from: that is no translate-train-all"
            raise InputError(problem, fix="add translations, or choose another setting")
        return [Run(tuple(sorted(trainable)), tuple(tests))]
    if settings.source not in trainable:
        fix = f"set source to one of: {' '.join(sorted(trainable))}" if trainable else "add one"
        raise InputError(f"no file to learn from in the source {settings.source!r}", fix=fix)
    return [Run((settings.source,), tuple(tests))]


def choose_tests(
    settings: TaskSettings, trainable: Sequence[str], tests: Sequence[str]
) -> list[str]:
    """List the languages that can be tested in a setting, the source first."""
    runs = plan_runs(settings, trainable, tests)
    names = sorted({name for run in runs for name in run.tests})
    return sorted(names, key=lambda name: name != settings.source)


def pick_languages(known: Sequence[str], asked: Sequence[str] | None, data: object) -> list[str]:
    """Take those that are asked for, in the order they are known in; an unknown one is an error."""
    for name in asked or ():
        if name not in known:
            fix = f"choose from: {' '.join(known)}"
            raise InputError(f"nothing to test {name!r} on", file=data, fix=fix)
    return [name for name in known if asked is None or name in asked]


def measure_runs(
    encoder: nn.Module,
    runs: Sequence[Run],
    measure: Callable[[Run, OnProgress], list[LanguageScores]],
    on_progress: OnProgress = lambda done, total: None,
) -> list[LanguageScores]:
    """Measure run after run; each of several begins with the encoder's weights as they came."""
    kept = {name: value.clone() for name, value in encoder.state_dict().items()}
    outcomes: list[LanguageScores] = []
    for number, run in enumerate(runs):
        if number:
            with torch.no_grad():
                encoder.load_state_dict(kept)
        outcomes += measure(run, partial(tell_part, on_progress, number, len(runs)))
    return outcomes


def tell_part(on_progress: OnProgress, number: int, n_parts: int, done: int, total: int) -> None:
    """Tell the progress of one of several parts that are taken to be of the same length."""
    on_progress(number * total + done, n_parts * total)


def split_rows(texts: Sequence[Sequence[str]], share: float) -> tuple[list[int], list[int]]:
    """Divide rows so that rows with a text in common are on the same side, always the same way.

    XNLI has three hypotheses a premise, PAWS-X pairs that share a sentence. Groups are drawn until
    the first side has its share of the rows; both come in the order of the file.

    >>> split_rows([["a", "b"], ["c", "d"], ["b", "e"]], share=0.6)
    ([0, 2], [1])
    """
    groups = _group(texts)
    drawn = np.random.default_rng(0).permutation(len(groups)).tolist()
    first: list[int] = []
    for number in drawn[:-1]:  # one is always left
        if len(first) >= share * len(texts):
            break
        first += groups[number]
    rest = set(range(len(texts))) - set(first)
    return sorted(first), sorted(rest)


def _group(texts: Sequence[Sequence[str]]) -> list[list[int]]:
    """Join rows that share a text, directly or through others."""
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
        examples = sample_evenly(examples, self.settings.train_examples)
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
            return sample_evenly(self.load(dev), self.settings.test_examples), []
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
        return sample_evenly(examples, self.settings.test_examples)

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


Role = Literal["learn", "choose", "test"]


class Partners(Generic[T]):
    """Finds the translation of an example in the source language, or of one of the source.

    An example of another language is paired with the source's: by the original that its file
    names; line by line, where the set translates itself or the file is in `translate-train`; by
    the teacher that labelled it; and in a test first of all by the file in `translate-test`,
    which `read` reads. An example of the source is paired with the first language that has one.
    """

    def __init__(
        self,
        corpus: Corpus[T],
        read: Callable[[Path], list[T]],
        find_original: Callable[[T], T | None] = lambda example: None,
        is_empty: Callable[[T], bool] = lambda example: False,
    ) -> None:
        self.corpus, self._read = corpus, read
        self._find_original, self._is_empty = find_original, is_empty
        self._known: dict[tuple[str, Role], dict[int, T]] = {}

    def pair_lessons(self, run: Run, leave_out: Sequence[T]) -> list[Paired[T]]:
        """Pair what is learnt from in a run; the source's side is learnt from once a language.

        Paper: bilingual instances are "English instance with its translated one".
        """
        source, held = self.corpus.settings.source, set(map(id, leave_out))
        pairs: list[Paired[T]] = []
        for language in run.sources:
            if language != source:
                found = self.pair(language, self.corpus.learn_from(language, leave_out), "learn")
                for pair in found:
                    other = pair.other
                    learns = other is not None and source in run.sources and id(other) not in held
                    pairs.append(Paired(pair.example, other, learns))
        if source in run.sources:
            met = {id(pair.other) for pair in pairs if pair.learns_other}
            rest = [e for e in self.corpus.learn_from(source, leave_out) if id(e) not in met]
            pairs = self.pair(source, rest, "learn") + pairs
        if all(pair.other is None for pair in pairs):
            raise InputError(
                "plug=in: nothing to learn from has a translation",
                file=self.corpus.files.folder,
                fix=f"put translations of the training set into {TRANSLATE_TRAIN}/ and set "
                "setting=translate-train-all, or set plug=out",
            )
        return pairs

    def pair(self, language: str, examples: Sequence[T], role: Role) -> list[Paired[T]]:
        """Pair examples of a language with their translations, as far as there are any."""
        key = language, role
        if key not in self._known:
            self._known[key] = self._find(language, role)
        known = self._known[key]
        return [Paired(example, known.get(id(example))) for example in examples]

    def reads_lines(self, language: str) -> bool:
        """Tell whether a test is paired line by line: with what people wrote, not a machine."""
        return language not in self.corpus.files.translated_tests

    def _find(self, language: str, role: Role) -> dict[int, T]:
        """Give the translation of every example that has one, by the example's identity."""
        files, source = self.corpus.files, self.corpus.settings.source
        if role == "test" and not self.reads_lines(language):
            return self._read_beside(language)
        if language != source:
            return {id(own): other for own, other in self._list_pairs(language, role)}
        for other in sorted({*files.train, *files.dev, *files.test, *self.corpus.taught}):
            found = {} if other == source else dict(self._turn(other, role))
            if found:
                return found
        return {}

    def _turn(self, language: str, role: Role) -> Iterator[tuple[int, T]]:
        for own, other in self._list_pairs(language, role):
            yield id(other), own

    def _read_beside(self, language: str) -> dict[int, T]:
        """Read the translation of a test; it has a line for every example, perhaps an empty one."""
        path = self.corpus.files.translated_tests[language]
        tests, lines = self.corpus.load(self.corpus.files.to_test(language)), self._read(path)
        if len(lines) != len(tests):
            problem = f"{len(lines):,} translations of {len(tests):,} tests"
            raise InputError(problem, file=path, fix="give one for every test, in their order")
        pairs = zip(tests, lines, strict=True)
        return {id(test): line for test, line in pairs if not self._is_empty(line)}

    def _list_pairs(self, language: str, role: Role) -> Iterator[tuple[T, T]]:
        """List examples of another language, each with the source's that it translates."""
        files, source = self.corpus.files, self.corpus.settings.source
        if role == "test":
            yield from self._match(files.to_test(language), files.to_test(source))
            return
        of_role = files.dev if role == "choose" else files.train
        if role == "learn":
            learnt = self.corpus.load(files.train.get(source, ()))
            yield from ((own, learnt[k]) for own, k in self.corpus.taught.get(language, ()))
            if language not in files.train and source not in files.train:
                of_role = files.dev
        originals = [p for p in of_role.get(source, ()) if p.parent.name != TRANSLATE_TRAIN]
        for path in of_role.get(language, ()):
            named = list(self._name_originals(path, originals))
            yield from named or self._match((path,), originals)

    def _name_originals(self, path: Path, originals: Sequence[Path]) -> Iterator[tuple[T, T]]:
        """Pair examples whose file names what they translate, with that example if there is one."""
        known: dict[T, T] | None = None
        for example in self.corpus.load((path,)):
            original = self._find_original(example)
            if original is not None:
                if known is None:
                    known = {found: found for found in self.corpus.load(originals)}
                yield example, known.get(original, original)

    def _match(self, own: Sequence[Path], others: Sequence[Path]) -> Iterator[tuple[T, T]]:
        """Pair line by line the files of two languages that translate each other."""
        if not own or not others:
            return
        if self.corpus.is_parallel or own[0].parent.name == TRANSLATE_TRAIN:
            sides = self.corpus.load(own), self.corpus.load(others)
            if translate_each_other(sides[0], sides[1], self.corpus.label_of):
                yield from zip(*sides, strict=True)
