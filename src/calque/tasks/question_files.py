"""Where the sets of questions keep what is learnt from and what is tested on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from calque.text.questions import Question, read_questions
from calque.types import InputError

XQUAD, MLQA, TYDIQA = "xquad", "mlqa", "tydiqa"
SQUAD_TRAIN = "squad/train-v1.1.json*"
# One of so many questions to learn from is held out where the tests' own answers are secret.
HELD_OUT = 5
MOST_FILES = 256
PACKED = r"\.json(\.(gz|xz|zst))?"
# The earlier of two patterns counts where both have files of a language.
TESTS: dict[str, tuple[str, ...]] = {
    XQUAD: (rf"xquad\.(?P<language>[a-z]+){PACKED}",),
    MLQA: (
        rf"test-context-(?P<language>[a-z]+)-question-(?P=language){PACKED}",
        rf"dev-context-(?P<language>[a-z]+)-question-(?P=language){PACKED}",
    ),
    TYDIQA: (rf"tydiqa\.goldp\.(?P<language>[a-z]+)\.dev{PACKED}",),
}
TYDIQA_TRAIN = rf"tydiqa\.goldp\.(?P<language>[a-z]+)\.train{PACKED}"
EXAMPLES = {
    XQUAD: "xquad/xquad.en.json",
    MLQA: "mlqa/dev-context-en-question-en.json",
    TYDIQA: "tydiqa/tydiqa.goldp.en.dev.json",
}


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Questions to learn from and to be tested on, by language, and how they came about.

    Of `held_out` languages the test is a part of the file to learn from, which learning leaves out.
    `secret` ones have a test without answers and nothing else: they cannot be tested.
    """

    train: Mapping[str, Path]
    tests: Mapping[str, Path]
    held_out: frozenset[str]
    secret: frozenset[str]
    from_squad: bool

    def read_train(self, language: str) -> list[Question]:
        """Read the questions to learn from, without those that are held out."""
        questions = read_questions(self.train[language])
        if language in self.held_out:
            questions = [q for number, q in enumerate(questions) if number % HELD_OUT]
        return questions

    def read_test(self, language: str) -> list[Question]:
        """Read the questions to be tested on."""
        questions = read_questions(self.tests[language])
        return questions[::HELD_OUT] if language in self.held_out else questions

    def is_dev(self, language: str) -> bool:
        """Tell whether a test is a dev file, beside which the set has a test proper (MLQA)."""
        return self.tests[language].name.startswith("dev-")


def find_questions(data: Path, task: str) -> QuestionSet:
    """Find the files of a task in a folder, in `xtreme` in it, or in the set's own folder.

    XQuAD and MLQA have nothing to learn from: that is SQuAD where it is there, else TyDiQA.
    """
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    tests: dict[str, Path] = {}
    named = set[str]()
    for pattern in TESTS[task]:
        found = _match(_folders(data, task), pattern)
        named |= found.keys()
        tests = {name: path for name, path in found.items() if is_answered(path)} | tests
    train = _match(_folders(data, TYDIQA), TYDIQA_TRAIN)
    squad = [path for folder in _roots(data) for path in sorted(folder.glob(SQUAD_TRAIN))]
    held_out = frozenset[str]()
    if task == TYDIQA:
        held_out = frozenset(train) - frozenset(tests)
        tests = tests | {name: train[name] for name in held_out}
    elif squad:
        train = {"en": squad[0]}
    if not tests:
        fix = f"give a folder with files like {EXAMPLES[task]}"
        if named:
            fix = "XTREME blanks the answers of its tests: take the files from the set's own source"
        raise InputError(f"no answered questions of {task} here", file=data, fix=fix)
    if not train:
        fix = f"add {SQUAD_TRAIN.rstrip('*')} or tydiqa/tydiqa.goldp.en.train.json"
        raise InputError("no questions to learn from here", file=data, fix=fix)
    from_squad = bool(squad) and task != TYDIQA
    return QuestionSet(train, tests, held_out, frozenset(named - tests.keys()), from_squad)


def _roots(data: Path) -> list[Path]:
    """List the folders that may hold the sets' folders; one set's folder lies beside others'."""
    return [data.parent] if data.name in TESTS else [data, data / "xtreme"]


def _folders(data: Path, name: str) -> Sequence[Path]:
    return [root / name for root in _roots(data) if (root / name).is_dir()]


def _match(folders: Sequence[Path], pattern: str) -> dict[str, Path]:
    """Find files by their names, at any depth; of two of one language the first folder's."""
    found: dict[str, Path] = {}
    for folder in folders:
        here: dict[str, Path] = {}
        for path in sorted(folder.rglob("*.json*")):
            if matched := re.fullmatch(pattern, path.name):
                name = matched["language"]
                if name in here:
                    fix = "keep one of them in the folder"
                    raise InputError(f"{path} is of {name!r} too", file=here[name], fix=fix)
                here[name] = path
        found = here | found
    return found


def is_answered(path: Path) -> bool:
    """Tell whether any question of a file has an answer; XTREME blanks those of its tests."""
    facts = path.stat()
    return _has_answers(path, facts.st_mtime_ns, facts.st_size)


@lru_cache(MOST_FILES)
def _has_answers(path: Path, changed: int, size: int) -> bool:
    """Read a file once for all that ask; a malformed one is for its reader to refuse."""
    try:
        return any(question.answers for question in read_questions(path))
    except InputError:
        return True
