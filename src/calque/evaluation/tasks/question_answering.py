"""Exact match and F1 of answers as SQuAD's and MLQA's own scripts compute them.

Both compare answers without capitals, punctuation and articles; what these are depends on the
script and, in MLQA, on the language of the answer.

Where the sets of questions keep what is learnt from and what is tested on.

Questions as examples: `<s> question </s></s> part of the text </s>`, window after window.

Extractive question answering: a span of the text, from the window that is surest of it.

Question answering on XQuAD, MLQA and TyDiQA-GoldP: spans of a text, scored by F1 of words.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.finetune import fine_tune, predict
from calque.evaluation.finetuning.head_model import HeadModel, move_to_device_of
from calque.evaluation.finetuning.transfer import (
    TransferRun,
    choose_tests,
    measure_runs,
    pick_languages,
    plan_runs,
)
from calque.evaluation.records import ItemScores, LanguageScores
from calque.evaluation.settings import remember
from calque.io.conllu import sample_evenly
from calque.io.questions import Question, read_questions
from calque.models.attention import scatter_rows
from calque.models.heads import find_best_spans, make_linear, mean_cross_entropy
from calque.tokens.layout import build_packed_layout
from calque.tokens.ragged import BatchShape, Ragged, ranges, reorder
from calque.tokens.sampling import derive_seed
from calque.tokens.tokenizer import disable_truncation_and_padding

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.evaluation.finetuning.transfer import OnProgress
    from calque.evaluation.settings import TaskSettings
    from calque.io.questions import Answer
    from calque.models.encoder import Encoder
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

Normalize: TypeAlias = Callable[[str], str]

SQUAD_ARTICLES = ("a", "an", "the")
# MLQA's lists. Hindi and Chinese have none; the Arabic article is written onto its word.
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
    """Normalize as SQuAD's script does, whatever the language.

    >>> normalize_squad("The  Broncos' “D”")
    'broncos “d”'
    """
    bare = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_article_pattern(SQUAD_ARTICLES).sub(" ", bare).split())


def normalize_mlqa(answer: str, language: str) -> str:
    """Normalize as MLQA's script does: punctuation of all scripts, articles of the language.

    Chinese characters are words of their own. The article `al-` goes wherever its letters stand,
    inside a word too: the script does so.

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


def score_answer(
    found: str, answers: Sequence[str], normalize: Normalize = normalize_squad
) -> tuple[float, float]:
    """Give F1 of words and exact match, 0 to 1, each with the answer it agrees with best.

    >>> score_answer("the Denver Broncos", ["Broncos", "Carolina"])
    (0.6666666666666666, 0.0)
    """
    mine = normalize(found)
    others = [normalize(answer) for answer in answers]
    f1 = max((_word_f1(mine.split(), other.split()) for other in others), default=0.0)
    return f1, float(mine in others)


def _word_f1(found: Sequence[str], gold: Sequence[str]) -> float:
    """Twice the words in common, each as often as both have it, over the words of both."""
    n_common = (Counter(found) & Counter(gold)).total()
    return 2 * n_common / (len(found) + len(gold)) if n_common else 0.0


@cache
def _article_pattern(articles: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(articles)})\b")


@cache
def _all_punctuation() -> dict[int, None]:
    """Map every punctuation mark of Unicode, and ASCII's symbols, to nothing."""
    points = (p for p in range(sys.maxunicode) if unicodedata.category(chr(p)).startswith("P"))
    return dict.fromkeys([*points, *map(ord, string.punctuation)])


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


# Tokens of a question that are read at most, and never more than half a window.
MAX_QUESTION = 64
# Where an answer "stands" that is not in the window: at its first token.
NOT_HERE = 0


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows, and between which of their tokens the answer lies.

    `cells` are the places of all tokens among windows × longest, counted row by row, or the one
    beyond for padding. `is_text` marks the tokens an answer may consist of.
    """

    tokens: TokenBatch
    cells: Int[Tensor, "tokens"]
    is_text: Bool[Tensor, "windows longest"]
    starts: Int[Tensor, "windows"]
    ends: Int[Tensor, "windows"]

    def to(self, device: torch.device | str) -> WindowBatch:
        """Copy the tensors to a device, without waiting for the copy."""
        names = ("cells", "is_text", "starts", "ends")
        moved = (getattr(self, name).to(device, non_blocking=True) for name in names)
        return WindowBatch(self.tokens.to(device), *moved)


@dataclass(frozen=True, slots=True)
class QuestionExamples:
    """Windows on the texts of questions; window w is of question `owners[w]`.

    Its text begins at token `firsts[w]` and has `n_text[w]` tokens, of which number `offsets[w]` of
    the whole text is the first. `spans[q]` are the characters of the tokens of question q's text.
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
    n_lost_answers: int  # that no window holds whole

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every window."""
        return self.windows.lengths

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> WindowBatch:
        """Lay out some windows, without padding or up to a fixed shape."""
        chosen = reorder(self.windows, rows)
        placed = build_packed_layout(chosen, pad_id=self.pad_id, shape=shape)
        n_rows, longest = len(rows), int(chosen.lengths.max(initial=1))
        if shape is not None:
            n_rows, longest = max(shape.sequences, n_rows), shape.row
        columns = np.arange(longest)
        cells = np.full(len(placed.tokens.ids), n_rows * longest)
        begins = np.arange(len(rows)) * longest
        cells[ranges(placed.starts, chosen.lengths)] = ranges(begins, chosen.lengths)
        is_text = np.zeros((n_rows, longest), dtype=bool)
        firsts, n_text = self.firsts[rows][:, None], self.n_text[rows][:, None]
        is_text[: len(rows)] = (columns >= firsts) & (columns < firsts + n_text)
        labels = np.full((2, n_rows), -100)
        labels[:, : len(rows)] = self.starts[rows], self.ends[rows]
        return WindowBatch(
            placed.tokens,
            torch.from_numpy(cells),
            torch.from_numpy(is_text),
            torch.from_numpy(labels[0]),
            torch.from_numpy(labels[1]),
        )

    def count_longer(self, questions: Sequence[Question], most: int) -> int:
        """Count the questions of which every answer has more than so many tokens."""
        n_longer = 0
        for question, spans in zip(questions, self.spans, strict=True):
            places = [find_tokens(spans, answer) for answer in question.answers]
            sizes = [place[1] - place[0] + 1 for place in places if place is not None]
            n_longer += bool(sizes) and min(sizes) > most
        return n_longer

    def characters(self, window: int, start: int, end: int) -> tuple[int, int]:
        """Give the characters of the original text that tokens of a window stand for."""
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
    """Cut texts into windows that begin `stride` tokens apart, or half a window if that is less.

    So every answer of up to half a window stands whole in one of them.
    """
    marks = _find_marks(tokenizer)
    n_marks = sum(map(len, marks))
    most = min(MAX_QUESTION, (longest - n_marks) // 2)
    if most < 1:
        raise InputError(f"a window of {longest} tokens holds no question", fix="raise max_length")
    asked = _encode(tokenizer, [question.text for question in questions])
    texts = _encode(tokenizer, [question.context for question in questions])
    ids: list[IntArray] = []
    rows: list[tuple[int, ...]] = []
    n_lost = 0
    for number, question in enumerate(questions):
        query = asked[question.text][0][:most]
        pieces, spans = texts[question.context]
        head = np.concatenate([marks[0], query, marks[1]])
        room = longest - n_marks - len(query)
        answer = find_tokens(spans, question.answers[0]) if question.answers else None
        is_found = not question.answers
        for begin in _window_starts(len(pieces), room, stride):
            part = pieces[begin : begin + room]
            label = (NOT_HERE, NOT_HERE)
            if answer is not None and begin <= answer[0] and answer[1] < begin + len(part):
                label = (answer[0] - begin + len(head), answer[1] - begin + len(head))
                is_found = True
            ids.append(np.concatenate([head, part, marks[2]]))
            rows.append((number, len(head), len(part), begin, *label))
        n_lost += not is_found
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return QuestionExamples(
        Ragged.of(ids),
        columns[0],
        columns[1],
        columns[2],
        columns[3],
        columns[4],
        columns[5],
        spans=[texts[question.context][1] for question in questions],
        pad_id=tokenizer.pad_token_id or 0,
        n_cut_questions=sum(len(asked[question.text][0]) > most for question in questions),
        n_lost_answers=n_lost,
    )


def find_tokens(spans: IntArray, answer: Answer) -> tuple[int, int] | None:
    """Give the first and last token that have a character of an answer; none may have."""
    start = answer.start + len(answer.text) - len(answer.text.lstrip())
    end = answer.start + len(answer.text.rstrip())
    inside = np.flatnonzero((spans[:, 0] < end) & (spans[:, 1] > start))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _window_starts(n_tokens: int, room: int, stride: int) -> range:
    """Begin windows so far apart until one reaches the end.

    >>> list(_window_starts(10, room=4, stride=3)), list(_window_starts(4, room=4, stride=1))
    ([0, 2, 4, 6], [0])
    """
    step = min(stride, max(1, room // 2))
    n_more = max(0, -(-(n_tokens - room) // step))
    return range(0, n_more * step + 1, step)


def _find_marks(tokenizer: PreTrainedTokenizerFast) -> list[IntArray]:
    """Find what a tokenizer puts before, between and after the two texts of a pair."""
    example = disable_truncation_and_padding(tokenizer.backend_tokenizer).encode("a", "a")
    kinds = [None if kind is None else int(kind) for kind in example.sequence_ids]
    first, second = kinds.index(0), kinds.index(1)
    last_first = len(kinds) - 1 - kinds[::-1].index(0)
    last_second = len(kinds) - 1 - kinds[::-1].index(1)
    ids = np.asarray(example.ids, dtype=np.int64)
    return [ids[:first], ids[last_first + 1 : second], ids[last_second + 1 :]]


def _encode(
    tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]
) -> dict[str, tuple[IntArray, IntArray]]:
    """Encode every distinct text once: its tokens, and the characters each stands for."""
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


# Far below any score, and finite, so that what is no text has no gradient and makes no NaN.
IMPOSSIBLE = -1e6


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """An answer, the characters of the original text it consists of, and its log-probability."""

    text: str
    start: int
    end: int
    score: float


class SpanFinder(HeadModel):
    """Scores every token of a window as the first and as the last of the answer.

    The window's own first token stands for "not here", so that probabilities of windows compare.
    """

    def __init__(
        self, encoder: Encoder, settings: TaskSettings, generator: torch.Generator
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.output = make_linear(encoder.hidden_size, 2, generator)
        move_to_device_of(self, encoder)

    def score(
        self, batch: WindowBatch
    ) -> tuple[Float[Tensor, "windows longest"], Float[Tensor, "windows longest"]]:
        """Give the scores of starts and of ends; what may not answer has none to speak of."""
        flat = self.output(self.read(batch.tokens)).float()
        scores = scatter_rows(flat, batch.cells, batch.is_text.shape)
        may_answer = batch.is_text.clone()
        may_answer[:, NOT_HERE] = True
        masked = scores.masked_fill(~may_answer[:, :, None], IMPOSSIBLE)
        return masked[..., 0], masked[..., 1]

    def forward(self, batch: WindowBatch) -> Float[Tensor, ""]:
        """Give the mean of the losses of starts and of ends."""
        starts, ends = self.score(batch)
        total = mean_cross_entropy(starts, batch.starts) + mean_cross_entropy(ends, batch.ends)
        return total / 2

    def answer(
        self,
        examples: QuestionExamples,
        questions: Sequence[Question],
        settings: TaskSettings,
    ) -> list[FoundAnswer]:
        """Answer every question; a text without tokens has the empty answer."""

        def find(batch: WindowBatch) -> tuple[Tensor, Tensor, Tensor]:
            starts, ends = (scores.log_softmax(dim=1) for scores in self.score(batch))
            return find_best_spans(starts, ends, batch.is_text, settings.max_answer)

        found = [FoundAnswer("", 0, 0, float("-inf"))] * len(questions)
        for rows, _, parts in list(predict(self, examples, settings, find)):
            firsts, lasts, scores = (part.tolist() for part in parts)
            for window, first, last, score in zip(
                rows.tolist(), firsts, lasts, scores, strict=True
            ):
                owner = int(examples.owners[window])
                if score > found[owner].score:
                    start, end = examples.characters(window, first, last)
                    found[owner] = _trim(questions[owner].context, start, end, score)
        return found


def _trim(context: str, start: int, end: int, score: float) -> FoundAnswer:
    """Leave out blanks at both ends, which tokens may begin with."""
    text = context[start:end]
    start += len(text) - len(text.lstrip())
    text = text.strip()
    return FoundAnswer(text, start, start + len(text), score)


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
) -> list[LanguageScores]:
    """Fine-tune on questions and give F1 (the main metric) and exact match of every language."""
    if settings.select == "best":
        raise InputError(f"{task} has no questions to choose the best epoch by", fix="select last")
    files = find_questions(data, task)
    tests = pick_languages(list_languages(data, settings, task=task), languages, data)
    runs = plan_runs(settings, list(files.train), tests)

    def measure(run: TransferRun, on_progress: OnProgress) -> list[LanguageScores]:
        prepared = _prepare(encoder, files, run, settings)
        return _measure_run(encoder, prepared, task, settings, seed, on_progress)

    return measure_runs(encoder, runs, measure, on_progress)


def list_languages(data: Path, settings: TaskSettings, *, task: str) -> list[str]:
    """List the languages that can be tested, the source first."""
    files = find_questions(data, task)
    return choose_tests(settings, list(files.train), sorted(files.tests))


def score_answers(
    found: Sequence[FoundAnswer], questions: Sequence[Question], normalize: Normalize
) -> tuple[ItemScores, float]:
    """Give the items of F1, and exact match in percent."""
    pairs = [
        score_answer(answer.text, [gold.text for gold in question.answers], normalize)
        for answer, question in zip(found, questions, strict=True)
    ]
    f1, exact = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return ItemScores(f1, np.ones_like(f1)), 100 * float(exact.mean())


def _measure_run(
    encoder: Encoder,
    data: QuestionData,
    task: str,
    settings: TaskSettings,
    seed: int,
    on_progress: OnProgress,
) -> list[LanguageScores]:
    finder = SpanFinder(encoder, settings, torch.Generator().manual_seed(derive_seed(seed, 1)))
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
        outcomes.append(LanguageScores(language, metrics, len(found), items, counts=counts))
        on_progress(tuned.n_updates + number, tuned.n_updates + n_tests)
    return outcomes


def _prepare(
    encoder: Encoder, files: QuestionSet, run: TransferRun, settings: TaskSettings
) -> QuestionData:
    """Read and encode what a run needs, once for all seeds of a process."""
    longest = min(settings.max_length or WINDOW, encoder.max_tokens)
    paths = [files.train[n] for n in run.sources] + [files.tests[n] for n in run.tests]
    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in paths)
    sizes = (longest, settings.stride, settings.max_answer)
    examples = (settings.train_examples, settings.test_examples)

    def encode(questions: Sequence[Question], most: int | None) -> QuestionText:
        answered = sample_evenly([question for question in questions if question.answers], most)
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
