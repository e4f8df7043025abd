"""Extractive question answering (XQuAD, MLQA, TyDiQA-GoldP): find the answer as a span of a text.

A model reads `<s> question </s></s> part of the text </s>`, one window of the text after another,
and the answer is taken from the window that is most certain of it.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.finetune import fine_tune, predict
from calque.evaluation.finetuning.head_model import HeadModel, move_to_device_of
from calque.evaluation.finetuning.plug_in import (
    PairRows,
    TranslatedExample,
    check_any_translated,
    check_plug_in,
    pair_windows,
)
from calque.evaluation.finetuning.transfer import (
    TransferRun,
    choose_tests,
    measure_runs,
    pick_languages,
    plan_runs,
)
from calque.evaluation.records import ItemScores, LanguageScores, note_upper_bound
from calque.evaluation.settings import remember
from calque.io.conllu import sample_evenly
from calque.io.questions import Question, read_questions
from calque.io.xtreme import check_data_folder
from calque.models.attention import scatter_rows
from calque.models.heads import NO_LABEL, find_best_spans, make_linear, mean_cross_entropy
from calque.objectives.base import TensorBatch
from calque.tokens.layout import build_packed_layout
from calque.tokens.ragged import BatchShape, Ragged, ranges, reorder
from calque.tokens.sampling import derive_seed
from calque.tokens.tokenizer import disable_truncation_and_padding

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.evaluation.finetuning.plug_in import PlugInTokens
    from calque.evaluation.finetuning.transfer import OnProgress
    from calque.evaluation.settings import TaskSettings
    from calque.io.questions import Answer
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]

Normalize: TypeAlias = Callable[[str], str]

XQUAD, MLQA, TYDIQA = "xquad", "mlqa", "tydiqa"
JSON = r"\.json(\.(gz|xz|zst))?"
# Names of test files. If a language has files of two patterns, the first pattern is used.
TEST_FILES: dict[str, tuple[str, ...]] = {
    XQUAD: (rf"xquad\.(?P<language>[a-z]+){JSON}",),
    MLQA: (
        rf"test-context-(?P<language>[a-z]+)-question-(?P=language){JSON}",
        rf"dev-context-(?P<language>[a-z]+)-question-(?P=language){JSON}",
    ),
    TYDIQA: (rf"tydiqa\.goldp\.(?P<language>[a-z]+)\.dev{JSON}",),
}
TYDIQA_TRAIN = rf"tydiqa\.goldp\.(?P<language>[a-z]+)\.train{JSON}"
SQUAD, SQUAD_TRAIN = "squad", "squad/train-v1.1.json*"
# Machine translations, as XTREME names them: of English training questions, and of test questions
# into English. Questions keep their ids.
ENGLISH = "en"
TRANSLATED_TRAIN = rf"[a-z]+\.translate\.train\.en-(?P<language>[a-z]+){JSON}"
TRANSLATED_TEST = rf"[a-z]+\.translate\.test\.(?P<language>[a-z]+)-en{JSON}"
EXAMPLES = {
    XQUAD: "xquad/xquad.en.json",
    MLQA: "mlqa/dev-context-en-question-en.json",
    TYDIQA: "tydiqa/tydiqa.goldp.en.dev.json",
}
# One of this many training questions is held out for testing if the test has no answers.
HELD_OUT = 5
# Number of files for which `has_answers` is cached.
N_CACHED = 256
# Tokens of a window as in XTREME, and maximum tokens of a question (at most half a window).
WINDOW, MAX_QUESTION = 384, 64
# Position of an answer that is not in the window: its first token.
NOT_HERE = 0
# Score of tokens that cannot be part of an answer: far below any other, but finite.
IMPOSSIBLE_SCORE = -1e6


def measure(
    encoder: Encoder,
    data: Path,
    *,
    task: str,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress = lambda done, total: None,
) -> list[LanguageScores]:
    """Fine-tune on questions and return F1 (the main metric) and exact match by language."""
    if settings.select == "best":
        problem = f"{task} has no development questions to choose the best epoch"
        raise InputError(problem, fix="set select=last")
    if settings.plug == "in":
        check_plug_in(encoder, supports_plug_in=True)
    files = find_files(data, task)
    tests = pick_languages(list_languages(data, settings, task=task), languages, data)
    runs = plan_runs(settings, files.list_trainable(settings), tests)

    def measure_run(run: TransferRun, on_progress: OnProgress) -> list[LanguageScores]:
        prepared = _prepare(encoder, files, run, settings)
        return _measure_run(encoder, prepared, task, settings, seed, on_progress)

    return measure_runs(encoder, runs, measure_run, on_progress)


def list_languages(data: Path, settings: TaskSettings, *, task: str) -> list[str]:
    """List the languages that can be tested in this setting, the source first."""
    files = find_files(data, task)
    return choose_tests(settings, files.list_trainable(settings), sorted(files.tests))


def _measure_run(
    encoder: Encoder,
    data: QuestionData,
    task: str,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress,
) -> list[LanguageScores]:
    model = SpanFinder(encoder, settings, torch.Generator().manual_seed(derive_seed(seed, 1)))
    n_tests = len(data.tests)
    tuned = fine_tune(
        model,
        data.train.encoded,
        settings,
        seed=seed,
        on_progress=lambda done, total: on_progress(done, total + n_tests),
    )
    scores = []
    for number, (language, test) in enumerate(data.tests.items(), start=1):
        normalize = partial(normalize_mlqa, language=language) if task == MLQA else normalize_squad
        model.language = language
        answers = model.answer(test.encoded, test.questions, settings)
        items, exact_match = score_answers(answers, test.questions, normalize)
        metrics = {"f1": items.score, "exact_match": exact_match}
        counts = {**data.counts, **test.count()}
        scores.append(
            LanguageScores(
                language, metrics, len(answers), items, counts=counts, notes=test.list_notes()
            )
        )
        on_progress(tuned.n_updates + number, tuned.n_updates + n_tests)
    return scores


@dataclass(frozen=True, slots=True)
class QuestionText:
    """Questions that have answers, and the same questions encoded.

    With plug=in they are encoded beside their translations, which `n_untranslated` do not have.
    `has_human_translations` means that those that are read were not made by a machine.
    """

    questions: Sequence[Question]
    encoded: QuestionExamples | QuestionPairs
    n_unanswered: int
    n_longer: int  # questions whose answers are all longer than `max_answer`
    is_dev: bool = False
    n_untranslated: int = 0
    has_human_translations: bool = False

    def count(self, prefix: str = "") -> dict[str, int]:
        """Count questions, windows, and what was truncated or left out."""
        own = self.encoded.own
        n_windows = np.bincount(own.owners, minlength=len(self.questions))
        optional = {
            "tested_on_dev": int(self.is_dev),
            ("learnt_" if prefix else "") + "without_translation": self.n_untranslated,
            "human_translations": self.n_human_translations,
        }
        return {
            f"{prefix}questions": len(self.questions),
            f"{prefix}questions_without_answer_left_out": self.n_unanswered,
            f"{prefix}questions_cut": own.n_cut_questions,
            f"{prefix}texts_in_windows": int((n_windows > 1).sum()),
            f"{prefix}windows": len(own.lengths),
            f"{prefix}answers_in_no_window": own.n_lost_answers,
            f"{prefix}answers_longer_than_max_answer": self.n_longer,
        } | {name: count for name, count in optional.items() if count}

    @property
    def n_human_translations(self) -> int:
        """The number of questions that are read beside a human translation."""
        n_translated = len(self.questions) - self.n_untranslated
        return n_translated if self.has_human_translations else 0

    def list_notes(self) -> dict[str, str]:
        """Return the note on scores that are an upper bound."""
        return note_upper_bound(self.n_human_translations)


@dataclass(frozen=True, slots=True)
class QuestionData:
    """Training and test questions of one run."""

    train: QuestionText
    tests: Mapping[str, QuestionText]
    counts: Mapping[str, int]


def _prepare(
    encoder: Encoder, files: QuestionFiles, run: TransferRun, settings: TaskSettings
) -> QuestionData:
    """Read and encode the data of a run, once for all seeds of a process."""
    longest = min(settings.max_length or WINDOW, encoder.max_tokens)
    is_plugged = settings.plug == "in"

    def encode_plainly(questions: Sequence[Question]) -> QuestionExamples:
        return encode_questions(encoder.tokenizer, questions, longest, stride=settings.stride)

    def encode(
        pairs: Sequence[TranslatedExample[Question]], n_questions: int | None
    ) -> QuestionText:
        answered = [pair for pair in pairs if pair.example.answers]
        chosen = sample_evenly(answered, n_questions)
        if not chosen:
            raise InputError("no question has an answer", fix="use another file")
        questions = [pair.example for pair in chosen]
        if is_plugged:
            encoded: QuestionExamples | QuestionPairs = encode_question_pairs(
                encode_plainly, chosen
            )
        else:
            encoded = encode_plainly(questions)
        n_longer = encoded.own.count_longer(questions, settings.max_answer)
        n_untranslated = sum(pair.other is None for pair in chosen) if is_plugged else 0
        n_unanswered = len(pairs) - len(answered)
        return QuestionText(
            questions, encoded, n_unanswered, n_longer, n_untranslated=n_untranslated
        )

    def read() -> QuestionData:
        train = encode(files.pair_train(run.sources, settings), settings.train_examples)
        tests = {
            name: replace(
                encode(files.pair_test(name, settings), settings.test_examples),
                is_dev=files.is_dev(name),
                has_human_translations=is_plugged and name not in files.translated_tests,
            )
            for name in run.tests
        }
        counts = {
            "train_from_squad": int(files.from_squad),
            "tests_held_out_of_training_files": len(files.held_out & set(run.tests)),
            "languages_left_out_for_secret_answers": len(files.secret),
        }
        return QuestionData(train, tests, train.count("train_") | counts)

    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in files.list_paths())
    sizes = (longest, settings.stride, settings.max_answer)
    n_examples = (settings.train_examples, settings.test_examples)
    plug = (settings.plug, settings.source)
    key = ("questions", run, stamps, sizes, n_examples, files.held_out, plug)
    return remember(encoder.tokenizer, key, read)


@dataclass(frozen=True, slots=True)
class QuestionFiles:
    """Training and test files by language.

    The test of a `held_out` language is a part of its training file that is not trained on.
    Languages in `secret` have only a test without answers, so they cannot be tested.
    `translated_train` and `translated_tests` are machine translations of English training questions
    and of test questions into English.
    """

    train: Mapping[str, Path]
    tests: Mapping[str, Path]
    held_out: frozenset[str]
    secret: frozenset[str]
    from_squad: bool
    translated_train: Mapping[str, Path] = field(default_factory=dict)
    translated_tests: Mapping[str, Path] = field(default_factory=dict)

    def list_trainable(self, settings: TaskSettings) -> list[str]:
        """List the languages that the setting may train on."""
        if settings.setting == "translate-train-all":
            return list(dict.fromkeys([*self.train, *self.translated_train]))
        return list(self.train)

    def list_paths(self) -> list[Path]:
        """List all files."""
        kinds = (self.train, self.tests, self.translated_train, self.translated_tests)
        return [path for files in kinds for path in files.values()]

    def read_train(self, language: str) -> list[Question]:
        """Read the training questions, without those that are held out."""
        if language not in self.train:
            return []
        questions = read_questions(self.train[language])
        if language in self.held_out:
            questions = [q for number, q in enumerate(questions) if number % HELD_OUT]
        return questions

    def read_translated(self, language: str) -> list[TranslatedExample[Question]]:
        """Read translated training questions, each with the English question that it translates.

        Translations of questions that are held out for a test are left out.
        """
        if language not in self.translated_train:
            return []
        translated = read_questions(self.translated_train[language])
        originals = read_questions(self.train[ENGLISH]) if ENGLISH in self.train else []
        pairs = []
        for question, number in zip(
            translated, match_questions(translated, originals), strict=True
        ):
            is_held = ENGLISH in self.held_out and (number is None or number % HELD_OUT == 0)
            if not is_held:
                other = None if number is None else originals[number]
                pairs.append(TranslatedExample(question, other))
        return pairs

    def pair_train(
        self, sources: Sequence[str], settings: TaskSettings
    ) -> list[TranslatedExample[Question]]:
        """Return the training questions; with plug=in each beside its translation.

        A translated question is paired with the English one, which is trained on once per language
        if English is trained on at all. English questions that are left over are paired with the
        first translation.
        """
        pairs: list[TranslatedExample[Question]] = []
        for language in sources:
            pairs += [TranslatedExample(question) for question in self.read_train(language)]
            pairs += self.read_translated(language)
        if settings.plug == "out":
            return [TranslatedExample(pair.example) for pair in pairs]
        if ENGLISH in sources:
            pairs = [replace(pair, learns_other=_both_answered(pair)) for pair in pairs]
            learned = {pair.other for pair in pairs if pair.learns_other}
            first: dict[Question | None, Question] = {}
            for language in sorted(self.translated_train):
                for pair in self.read_translated(language):
                    first.setdefault(pair.other, pair.example)
            english = set(self.read_train(ENGLISH))
            pairs = [
                replace(pair, other=first.get(pair.example)) if pair.example in english else pair
                for pair in pairs
                if pair.example not in learned
            ]
        check_any_translated(pairs, next(iter(self.train.values())).parent)
        return pairs

    def pair_test(self, language: str, settings: TaskSettings) -> list[TranslatedExample[Question]]:
        """Return the test questions; with plug=in each beside its translation.

        That is the machine translation or, without such a file, the human one: the question of the
        source language, or of the first other language that has it for the source itself.
        """
        questions = self.read_test(language)
        if settings.plug == "out":
            return [TranslatedExample(question) for question in questions]
        if language in self.translated_tests:
            partners = [read_questions(self.translated_tests[language])]
        else:
            others = [name for name in sorted(self.tests) if name != language]
            names = others if language == settings.source else [settings.source]
            partners = [self.read_test(name) for name in names if name in self.tests]
        found: list[Question | None] = [None] * len(questions)
        for others_read in partners:
            numbers = match_questions(questions, others_read)
            found = [
                before if before is not None or number is None else others_read[number]
                for before, number in zip(found, numbers, strict=True)
            ]
        return [TranslatedExample(*pair) for pair in zip(questions, found, strict=True)]

    def read_test(self, language: str) -> list[Question]:
        """Read the test questions."""
        questions = read_questions(self.tests[language])
        return questions[::HELD_OUT] if language in self.held_out else questions

    def is_dev(self, language: str) -> bool:
        """Return whether a test is a development file instead of a test file (MLQA)."""
        return self.tests[language].name.startswith("dev-")


def match_questions(questions: Sequence[Question], others: Sequence[Question]) -> list[int | None]:
    """Return for every question the number of the other question with the same id, if any.

    Ids repeat in training files of TyDiQA. Then questions match in order, if all ids are equal, and
    otherwise only those match whose id is unique on both sides.
    """
    names, other_names = ([question.name for question in side] for side in (questions, others))
    if names == other_names:
        return list(range(len(names)))
    counts, other_counts = Counter(names), Counter(other_names)
    numbers = {name: k for k, name in enumerate(other_names) if other_counts[name] == 1}
    return [numbers.get(name) if counts[name] == 1 else None for name in names]


def _both_answered(pair: TranslatedExample[Question]) -> bool:
    return pair.other is not None and bool(pair.example.answers and pair.other.answers)


def find_files(data: Path, task: str) -> QuestionFiles:
    """Find the files of a task in a folder, in `xtreme` in it, or in the folder of the dataset.

    XQuAD and MLQA have no training files: SQuAD is used if it is there, and otherwise TyDiQA.
    """
    check_data_folder(data)
    # Given the folder of one dataset, the others are beside it.
    roots = [data.parent] if data.name in TEST_FILES else [data, data / "xtreme"]
    tests: dict[str, Path] = {}
    known = set[str]()
    for pattern in TEST_FILES[task]:
        found = _match_files(roots, task, pattern)
        known |= found.keys()
        tests = {name: path for name, path in found.items() if has_answers(path)} | tests
    train = _match_files(roots, TYDIQA, TYDIQA_TRAIN)
    squad = [path for root in roots for path in sorted(root.glob(SQUAD_TRAIN))]
    held_out = frozenset[str]()
    if task == TYDIQA:
        held_out = frozenset(train) - frozenset(tests)
        tests = tests | {name: train[name] for name in held_out}
    elif squad:
        train = {"en": squad[0]}
    if not tests:
        fix = f"pass a folder with files such as {EXAMPLES[task]}"
        if known:
            fix = "XTREME removes the answers of its tests: use the original files of the dataset"
        raise InputError(f"the folder has no answered questions of {task}", file=data, fix=fix)
    if not train:
        fix = f"add {SQUAD_TRAIN.rstrip('*')} or tydiqa/tydiqa.goldp.en.train.json"
        raise InputError("the folder has no training questions", file=data, fix=fix)
    from_squad = bool(squad) and task != TYDIQA
    return QuestionFiles(
        train,
        tests,
        held_out,
        frozenset(known - tests.keys()),
        from_squad,
        _match_files(roots, SQUAD if from_squad else TYDIQA, TRANSLATED_TRAIN),
        _match_files(roots, task, TRANSLATED_TEST),
    )


def _match_files(roots: Sequence[Path], name: str, pattern: str) -> dict[str, Path]:
    """Return the files of a dataset by language, at any depth; the first root takes precedence."""
    found: dict[str, Path] = {}
    for root in roots:
        here: dict[str, Path] = {}
        for path in sorted((root / name).rglob("*.json*")):
            if (match := re.fullmatch(pattern, path.name)) and path.is_file():
                language = match["language"]
                if language in here:
                    problem = f"{path.name} is a second file for {language!r}"
                    raise InputError(problem, file=here[language], fix="remove one of them")
                here[language] = path
        found = here | found
    return found


def has_answers(path: Path) -> bool:
    """Return whether any question of a file has an answer; XTREME removes those of its tests."""
    facts = path.stat()
    return _has_answers(path, facts.st_mtime_ns, facts.st_size)


@lru_cache(N_CACHED)
def _has_answers(path: Path, changed: int, size: int) -> bool:
    try:
        return any(question.answers for question in read_questions(path))
    except InputError:
        return True  # the error is reported when the file is needed


@dataclass(frozen=True, slots=True)
class WindowBatch(TensorBatch):
    """Windows with the first and last token of the answer.

    `cells` are the cells of all tokens in a table of windows × longest, counted row by row; padding
    has the number after the last cell. `is_text` marks the tokens that may be part of an answer.
    """

    tokens: TokenBatch | PlugInTokens
    cells: Int[Tensor, "tokens"]
    is_text: Bool[Tensor, "windows longest"]
    starts: Int[Tensor, "windows"]
    ends: Int[Tensor, "windows"]


@dataclass(frozen=True, slots=True)
class QuestionExamples:
    """Windows of the texts of questions; window w belongs to question `owners[w]`.

    Its text starts at token `firsts[w]` and has `n_text[w]` tokens, the first of which is token
    `offsets[w]` of the whole text. `spans[q]` has the characters of every token of the text of
    question q.
    """

    windows: Ragged
    owners: IntArray
    firsts: IntArray
    n_text: IntArray
    offsets: IntArray
    starts: IntArray
    ends: IntArray
    spans: Sequence[IntArray]
    pad_id: int
    n_cut_questions: int
    n_lost_answers: int  # answers that are not completely in any window

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of every window."""
        return self.windows.lengths

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> WindowBatch:
        """Return a batch of some windows, without padding or padded to a fixed shape."""
        chosen = reorder(self.windows, rows)
        layout = build_packed_layout(chosen, pad_id=self.pad_id, shape=shape)
        n_rows = len(rows) if shape is None else max(shape.sequences, len(rows))
        is_counted = np.ones(len(rows), dtype=np.bool_)
        return self.build_batch(layout.tokens, layout.slots, rows, is_counted, n_rows, shape)

    def build_batch(
        self,
        tokens: TokenBatch | PlugInTokens,
        slots: IntArray,
        windows: IntArray,
        is_counted: BoolArray,
        n_rows: int,
        shape: BatchShape | None,
    ) -> WindowBatch:
        """Return a batch of windows by number (−1: none), padded to a number of rows.

        Their tokens are at `slots`, and only the labels of counted windows are used.
        """
        lengths = np.where(windows < 0, 0, self.windows.lengths[windows])
        longest = int(lengths.max(initial=1)) if shape is None else shape.row
        columns = np.arange(longest)
        cells = np.full(len(tokens.ids), n_rows * longest)
        cells[slots] = ranges(np.arange(len(windows)) * longest, lengths)
        is_text = np.zeros((n_rows, longest), dtype=bool)
        n_text = np.where(windows < 0, 0, self.n_text[windows])[:, None]
        firsts = self.firsts[windows][:, None]
        is_text[: len(windows)] = (columns >= firsts) & (columns < firsts + n_text)
        labels = np.full((2, n_rows), NO_LABEL)
        found = np.stack([self.starts[windows], self.ends[windows]])
        labels[:, : len(windows)] = np.where(is_counted, found, NO_LABEL)
        return WindowBatch(tokens, *map(torch.from_numpy, (cells, is_text, *labels)))

    @property
    def own(self) -> QuestionExamples:
        """The windows that are scored, without translations."""
        return self

    @property
    def scored(self) -> IntArray:
        """The window that every row of the predictions belongs to."""
        return np.arange(len(self.lengths))

    def count_longer(self, questions: Sequence[Question], max_tokens: int) -> int:
        """Count the questions whose answers all have more than `max_tokens` tokens."""
        n_longer = 0
        for question, spans in zip(questions, self.spans, strict=True):
            found = [find_tokens(spans, answer) for answer in question.answers]
            sizes = [tokens[1] - tokens[0] + 1 for tokens in found if tokens is not None]
            n_longer += bool(sizes) and min(sizes) > max_tokens
        return n_longer

    def characters(self, window: int, start: int, end: int) -> tuple[int, int]:
        """Return the characters of the original text for the tokens of a window."""
        spans = self.spans[int(self.owners[window])]
        shift = int(self.offsets[window] - self.firsts[window])
        return int(spans[start + shift, 0]), int(spans[end + shift, 1])


def encode_questions(
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    longest: int,
    *,
    stride: int,
) -> QuestionExamples:
    """Split texts into windows whose starts are `stride` tokens apart, or half a window if less.

    Thus every answer of up to half a window is completely in one of them.
    """
    special = _find_special_tokens(tokenizer)
    n_special = sum(map(len, special))
    max_question = min(MAX_QUESTION, (longest - n_special) // 2)
    if max_question < 1:
        problem = f"a window of {longest} tokens is too short for a question"
        raise InputError(problem, fix="raise max_length")
    queries = _encode(tokenizer, [question.text for question in questions])
    texts = _encode(tokenizer, [question.context for question in questions])
    ids: list[IntArray] = []
    rows: list[tuple[int, ...]] = []
    n_lost = 0
    for number, question in enumerate(questions):
        query = queries[question.text][0][:max_question]
        pieces, spans = texts[question.context]
        head = np.concatenate([special[0], query, special[1]])
        room = longest - n_special - len(query)
        answer = find_tokens(spans, question.answers[0]) if question.answers else None
        is_found = not question.answers
        for begin in _window_starts(len(pieces), room, stride):
            part = pieces[begin : begin + room]
            label = (NOT_HERE, NOT_HERE)
            if answer is not None and begin <= answer[0] and answer[1] < begin + len(part):
                label = (answer[0] - begin + len(head), answer[1] - begin + len(head))
                is_found = True
            ids.append(np.concatenate([head, part, special[2]]))
            rows.append((number, len(head), len(part), begin, *label))
        n_lost += not is_found
    owners, firsts, n_text, offsets, starts, ends = np.array(rows, np.int64).reshape(-1, 6).T
    return QuestionExamples(
        Ragged.of(ids),
        owners,
        firsts,
        n_text,
        offsets,
        starts,
        ends,
        spans=[texts[question.context][1] for question in questions],
        pad_id=tokenizer.pad_token_id or 0,
        n_cut_questions=sum(
            len(queries[question.text][0]) > max_question for question in questions
        ),
        n_lost_answers=n_lost,
    )


@dataclass(frozen=True, slots=True)
class QuestionPairs:
    """Pairs of windows of texts and of their translations, for plug-in fine-tuning.

    `own` are the questions, which are scored; `both` has their translations after them.
    """

    own: QuestionExamples
    both: QuestionExamples
    rows: PairRows

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of every pair."""
        return self.rows.count_tokens(self.both.windows)

    @property
    def scored(self) -> IntArray:
        """The window that every row of the predictions belongs to; −1 if it is a repeated one."""
        return np.where(self.rows.counts_left, self.rows.left, -1)

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> WindowBatch:
        """Return a batch of some pairs, all questions before all translations."""
        text, windows = self.both.windows, self.rows.sequences(rows)
        tokens, layout = self.rows.collate(text, rows, pad_id=self.both.pad_id, shape=shape)
        n_rows = 2 * (len(rows) if shape is None else max(shape.sequences, len(rows)))
        is_counted = self.rows.counted(rows)
        return self.both.build_batch(tokens, layout.slots, windows, is_counted, n_rows, shape)


def encode_question_pairs(
    encode: Callable[[Sequence[Question]], QuestionExamples],
    pairs: Sequence[TranslatedExample[Question]],
) -> QuestionPairs:
    """Encode questions and their translations, whose windows are paired in order."""
    own = encode([pair.example for pair in pairs])
    others = encode([pair.other for pair in pairs if pair.other is not None])
    n_own, translated = len(own.lengths), iter(_list_windows(others))
    right = [[] if pair.other is None else [n_own + k for k in next(translated)] for pair in pairs]
    rows = pair_windows(_list_windows(own), right, [pair.learns_other for pair in pairs])

    def join(name: str) -> IntArray:
        return np.concatenate([getattr(own, name), getattr(others, name)])

    both = replace(
        own,
        windows=Ragged(
            np.concatenate([own.windows.ids, others.windows.ids]),
            np.concatenate([own.windows.lengths, others.windows.lengths]),
        ),
        firsts=join("firsts"),
        n_text=join("n_text"),
        offsets=join("offsets"),
        starts=join("starts"),
        ends=join("ends"),
        owners=np.concatenate([own.owners, len(own.spans) + others.owners]),
        spans=[*own.spans, *others.spans],
    )
    return QuestionPairs(own, both, rows)


def _list_windows(examples: QuestionExamples) -> list[list[int]]:
    """Return the numbers of the windows of every question."""
    windows: list[list[int]] = [[] for _ in examples.spans]
    for window, owner in enumerate(examples.owners.tolist()):
        windows[owner].append(window)
    return windows


def find_tokens(spans: IntArray, answer: Answer) -> tuple[int, int] | None:
    """Return the first and last token with a character of an answer; None if there is none."""
    start = answer.start + len(answer.text) - len(answer.text.lstrip())
    end = answer.start + len(answer.text.rstrip())
    inside = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _window_starts(n_tokens: int, room: int, stride: int) -> range:
    """Return the starts of windows, up to the one that reaches the end.

    >>> list(_window_starts(10, room=4, stride=3)), list(_window_starts(4, room=4, stride=1))
    ([0, 2, 4, 6], [0])
    """
    step = min(stride, max(1, room // 2))
    n_more = max(0, -(-(n_tokens - room) // step))
    return range(0, n_more * step + 1, step)


def _find_special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[IntArray]:
    """Return the special tokens before, between and after the two texts of a pair."""
    example = disable_truncation_and_padding(tokenizer.backend_tokenizer).encode("a", "a")
    numbers = [None if number is None else int(number) for number in example.sequence_ids]
    first, second = numbers.index(0), numbers.index(1)
    last_first = len(numbers) - 1 - numbers[::-1].index(0)
    last_second = len(numbers) - 1 - numbers[::-1].index(1)
    ids = np.asarray(example.ids, dtype=np.int64)
    return [ids[:first], ids[last_first + 1 : second], ids[last_second + 1 :]]


def _encode(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]
) -> dict[str, tuple[IntArray, IntArray]]:
    """Return the tokens of every distinct text, and the characters of every token."""
    distinct = list(dict.fromkeys(texts))
    encodings = disable_truncation_and_padding(tokenizer.backend_tokenizer).encode_batch(
        distinct, add_special_tokens=False
    )
    return {
        text: (
            np.asarray(encoding.ids, dtype=np.int64),
            np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2),
        )
        for text, encoding in zip(distinct, encodings, strict=True)
    }


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """A predicted answer, its characters in the original text, and its log-probability."""

    text: str
    start: int
    end: int
    score: float


class SpanFinder(HeadModel):
    """Scores every token of a window as the first and as the last token of the answer.

    The first token of the window stands for "not in this window", so that the probabilities of
    answers in different windows can be compared.
    """

    supports_plug_in = True

    def __init__(
        self, encoder: Encoder, settings: TaskSettings, generator: torch.Generator
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.output = make_linear(self.width, 2, generator)
        move_to_device_of(self, encoder)

    def score(
        self, batch: WindowBatch
    ) -> tuple[Float[Tensor, "windows longest"], Float[Tensor, "windows longest"]]:
        """Return the scores of starts and of ends; very low for tokens outside of the text."""
        flat = self.output(self.read(batch.tokens)).float()
        scores = scatter_rows(flat, batch.cells, batch.is_text.shape)
        may_answer = batch.is_text.clone()
        may_answer[:, NOT_HERE] = True
        masked = scores.masked_fill(~may_answer[:, :, None], IMPOSSIBLE_SCORE)
        return masked[..., 0], masked[..., 1]

    def forward(self, batch: WindowBatch) -> Float[Tensor, ""]:
        """Return the mean of the losses of starts and of ends."""
        starts, ends = self.score(batch)
        total = mean_cross_entropy(starts, batch.starts) + mean_cross_entropy(ends, batch.ends)
        return total / 2

    def answer(
        self,
        examples: QuestionExamples | QuestionPairs,
        questions: Sequence[Question],
        settings: TaskSettings,
    ) -> list[FoundAnswer]:
        """Return the answers to all questions; the empty answer for a text without tokens."""

        def find(batch: WindowBatch) -> tuple[Tensor, Tensor, Tensor]:
            starts, ends = (scores.log_softmax(dim=1) for scores in self.score(batch))
            return find_best_spans(starts, ends, batch.is_text, settings.max_answer)

        answers = [FoundAnswer("", 0, 0, float("-inf"))] * len(questions)
        own, scored = examples.own, examples.scored
        for rows, _, found in list(predict(self, examples, settings, find)):
            # In batches of pairs, translations come after the questions.
            columns = (column[: len(rows)].tolist() for column in found)
            for window, first, last, score in zip(scored[rows].tolist(), *columns, strict=True):
                owner = int(own.owners[window])
                if window >= 0 and score > answers[owner].score:
                    start, end = own.characters(window, first, last)
                    answers[owner] = _strip(questions[owner].context, start, end, score)
        return answers


def _strip(context: str, start: int, end: int, score: float) -> FoundAnswer:
    """Return the answer without spaces at both ends, which tokens may start with."""
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    return FoundAnswer(text, start, start + len(text), score)


# Scores of answers, as the evaluation scripts of SQuAD and MLQA compute them. Both ignore case,
# punctuation and articles, but define the latter differently.

SQUAD_ARTICLES = ("a", "an", "the")
# The lists of MLQA. Hindi and Chinese have no articles; the Arabic article is a prefix.
MLQA_ARTICLES: dict[str, tuple[str, ...]] = {
    "ar": (),
    "de": (
        *("ein", "eine", "einen", "einem", "eines", "einer"),
        *("der", "die", "das", "den", "dem", "des"),
    ),
    "en": SQUAD_ARTICLES,
    "es": ("un", "una", "unos", "unas", "el", "la", "los", "las"),
    "hi": (),
    "vi": ("của", "là", "cái", "chiếc", "những"),
    "zh": (),
}
ARABIC_ARTICLE = "ال"
HAN = re.compile("([\u4e00-\u9fa5])")


def normalize_squad(answer: str) -> str:
    """Return an answer as normalized by the script of SQuAD, in any language.

    >>> normalize_squad("The  Broncos' “D”")
    'broncos “d”'
    """
    bare = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_article_pattern(SQUAD_ARTICLES).sub(" ", bare).split())


def normalize_mlqa(answer: str, language: str) -> str:
    """Return an answer as normalized by the script of MLQA.

    It removes the punctuation of all scripts and the articles of the language, the Arabic article
    even inside a word. Chinese characters are words.

    >>> normalize_mlqa("Das „Haus“", "de"), normalize_mlqa("北京2008年", "zh")
    ('haus', '北 京 2008 年')
    """
    if language not in MLQA_ARTICLES:
        fix = f"choose from: {' '.join(MLQA_ARTICLES)}"
        raise InputError(f"MLQA has no rules for answers in {language!r}", fix=fix)
    bare = answer.lower().translate(_all_punctuation())
    if language == "ar":
        bare = bare.replace(ARABIC_ARTICLE, " ")
    if articles := MLQA_ARTICLES[language]:
        bare = _article_pattern(articles).sub(" ", bare)
    if language == "zh":
        bare = HAN.sub(r" \1 ", bare)
    return " ".join(bare.split())


def score_answers(
    found: Sequence[FoundAnswer], questions: Sequence[Question], normalize: Normalize
) -> tuple[ItemScores, float]:
    """Return F1 by question, and exact match in percent."""
    pairs = [
        score_answer(answer.text, [gold.text for gold in question.answers], normalize)
        for answer, question in zip(found, questions, strict=True)
    ]
    f1, exact = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return ItemScores(f1, np.ones_like(f1)), 100 * float(exact.mean())


def score_answer(
    found: str, answers: Sequence[str], normalize: Normalize = normalize_squad
) -> tuple[float, float]:
    """Return F1 of words and exact match, from 0 to 1, each for the gold answer that fits best.

    >>> score_answer("the Denver Broncos", ["Broncos", "Carolina"])
    (0.6666666666666666, 0.0)
    """
    own = normalize(found)
    gold = [normalize(answer) for answer in answers]
    f1 = max((_word_f1(own.split(), other.split()) for other in gold), default=0.0)
    return f1, float(own in gold)


def _word_f1(found: Sequence[str], gold: Sequence[str]) -> float:
    n_common = (Counter(found) & Counter(gold)).total()
    return 2 * n_common / (len(found) + len(gold)) if n_common else 0.0


@cache
def _article_pattern(articles: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(articles)})\b")


@cache
def _all_punctuation() -> dict[int, None]:
    """Return a table that deletes the punctuation of Unicode and the symbols of ASCII."""
    points = (p for p in range(sys.maxunicode) if unicodedata.category(chr(p)).startswith("P"))
    return dict.fromkeys([*points, *map(ord, string.punctuation)])
