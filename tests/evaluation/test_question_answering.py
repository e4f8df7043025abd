"""Question answering: files, windows, training of a model, and scores of answers."""

from __future__ import annotations

import json
import shutil
import string
from collections import Counter
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.evaluation.registry import TASKS, load_function
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.question_answering import (
    HELD_OUT,
    MLQA_ARTICLES,
    NOT_HERE,
    FoundAnswer,
    QuestionExamples,
    SpanFinder,
    _window_starts,
    encode_questions,
    find_files,
    find_tokens,
    list_languages,
    measure,
    normalize_mlqa,
    normalize_squad,
    score_answer,
    score_answers,
)
from calque.io.questions import Answer, Question, read_questions
from calque.models.encoder import Encoder
from calque.tokens.layout import fit_batch_shape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

QUESTIONS = Path(__file__).parents[1] / "data" / "questions"
SETTINGS = TaskSettings(epochs=1, batch_tokens=512, train_examples=8, test_examples=4)


def copy_of(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer)


def make_finder(encoder: Encoder) -> SpanFinder:
    return SpanFinder(copy_of(encoder), SETTINGS, torch.Generator().manual_seed(2)).eval()


def test_files_of_the_three_datasets(tmp_path: Path) -> None:
    for folder in (QUESTIONS, QUESTIONS / "xquad"):
        found = find_files(folder, "xquad")
        assert sorted(found.tests) == ["de", "en", "zh"]
        assert sorted(found.train) == ["en", "sw"]
        assert not found.from_squad and not found.held_out
    assert len(find_files(QUESTIONS, "mlqa").tests) == 7
    assert list_languages(QUESTIONS, SETTINGS, task="mlqa")[0] == "en"
    shutil.copytree(QUESTIONS, tmp_path / "xtreme")
    assert sorted(find_files(tmp_path, "xquad").tests) == ["de", "en", "zh"]
    # SQuAD is used for training if it is there, but not for TyDiQA, which has its own.
    squad = tmp_path / "xtreme" / "squad" / "train-v1.1.json"
    squad.parent.mkdir()
    shutil.copy(QUESTIONS / "xquad" / "xquad.en.json", squad)
    assert find_files(tmp_path, "xquad").train == {"en": squad}
    assert find_files(tmp_path, "mlqa").from_squad
    assert not find_files(tmp_path, "tydiqa").from_squad


def test_mlqa_prefers_test_files_to_dev_files(tmp_path: Path) -> None:
    (tmp_path / "mlqa" / "MLQA_V1" / "test").mkdir(parents=True)
    shutil.copytree(QUESTIONS / "tydiqa", tmp_path / "tydiqa")
    source = QUESTIONS / "mlqa" / "dev-context-de-question-de.json"
    test = tmp_path / "mlqa/MLQA_V1/test/test-context-de-question-de.json"
    shutil.copy(source, test)
    shutil.copy(source, tmp_path / "mlqa" / "MLQA_V1" / source.name)
    shutil.copy(source, tmp_path / "mlqa" / "MLQA_V1" / "test-context-de-question-en.json")
    assert find_files(tmp_path, "mlqa").tests == {"de": test}


def blank_answers(path: Path) -> None:
    """Remove the answers of a file, as the download script of XTREME does for tests."""
    content = json.loads(path.read_text("utf-8"))
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                entry["answers"] = [{"answer_start": 0, "text": ""}]
    path.write_text(json.dumps(content), "utf-8")


def test_dev_files_replace_tests_without_answers(tmp_path: Path) -> None:
    shutil.copytree(QUESTIONS / "tydiqa", tmp_path / "tydiqa")
    dev, test = tmp_path / "mlqa" / "MLQA_V1" / "dev", tmp_path / "mlqa" / "MLQA_V1" / "test"
    for folder, split in ((dev, "dev"), (test, "test")):
        folder.mkdir(parents=True)
        for name in ("de", "en", "zh"):
            source = QUESTIONS / "mlqa" / f"dev-context-{name}-question-{name}.json"
            shutil.copy(source, folder / f"{split}-context-{name}-question-{name}.json")
    blank_answers(test / "test-context-de-question-de.json")
    blank_answers(test / "test-context-zh-question-zh.json")
    (dev / "dev-context-zh-question-zh.json").unlink()
    found = find_files(tmp_path, "mlqa")
    assert found.tests == {
        "de": dev / "dev-context-de-question-de.json",
        "en": test / "test-context-en-question-en.json",
    }
    assert found.secret == {"zh"}


def test_dataset_without_any_answer_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(QUESTIONS / "tydiqa", tmp_path / "tydiqa")
    shutil.copytree(QUESTIONS / "xquad", tmp_path / "xquad")
    for path in (tmp_path / "xquad").glob("*.json"):
        blank_answers(path)
    with pytest.raises(InputError, match=r"no answered questions of xquad \(XTREME removes"):
        list_languages(tmp_path, SETTINGS, task="xquad")


def test_malformed_test_does_not_affect_other_languages(tmp_path: Path) -> None:
    for name in ("tydiqa", "xquad"):
        shutil.copytree(QUESTIONS / name, tmp_path / name)
    (tmp_path / "xquad" / "xquad.zh.json").write_text("{", "utf-8")
    assert sorted(find_files(tmp_path, "xquad").tests) == ["de", "en", "zh"]
    with pytest.raises(InputError, match=r"xquad\.zh\.json: this is not valid JSON: .* line 1"):
        find_files(tmp_path, "xquad").read_test("zh")


def test_held_out_questions_replace_tests_without_answers(tmp_path: Path) -> None:
    found = find_files(QUESTIONS, "tydiqa")
    assert sorted(found.tests) == ["en", "sw"]
    assert found.held_out == {"en", "sw"}
    assert found.secret == {"fi"}
    everything = read_questions(QUESTIONS / "tydiqa" / "tydiqa.goldp.en.train.json")
    test, train = found.read_test("en"), found.read_train("en")
    assert len(test) == -(-len(everything) // HELD_OUT)
    assert sorted(q.context for q in test + train) == sorted(q.context for q in everything)
    assert not {q.context for q in test} & {q.context for q in train}
    # A test with answers is used as it is, and all training questions are trained on.
    shutil.copytree(QUESTIONS / "tydiqa", tmp_path / "tydiqa")
    shutil.copy(
        QUESTIONS / "xquad" / "xquad.en.json", tmp_path / "tydiqa" / "tydiqa.goldp.en.dev.json"
    )
    opened = find_files(tmp_path, "tydiqa")
    assert opened.held_out == {"sw"}
    assert len(opened.read_train("en")) == len(everything)


def test_missing_files_are_errors(tmp_path: Path, tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="no such folder"):
        find_files(tmp_path / "none", "xquad")
    with pytest.raises(InputError, match=r"no answered questions of mlqa .*dev-context-en"):
        find_files(tmp_path, "mlqa")
    shutil.copytree(QUESTIONS / "xquad", tmp_path / "xquad")
    with pytest.raises(InputError, match="no training questions"):
        find_files(tmp_path, "xquad")
    shutil.copy(tmp_path / "xquad" / "xquad.de.json", tmp_path / "xquad" / "xquad.de.json.gz")
    with pytest.raises(InputError, match="is a second file for 'de'"):
        find_files(tmp_path, "xquad")
    with pytest.raises(InputError, match="no test for 'fr'"):
        measure(tiny_encoder, QUESTIONS, task="xquad", languages=["fr"], settings=SETTINGS, seed=0)


def test_fixed_shape_does_not_change_the_loss(tiny_encoder: Encoder) -> None:
    questions = read_questions(QUESTIONS / "xquad" / "xquad.en.json")
    examples = encode_questions(tiny_encoder.tokenizer, questions, 96, stride=32)
    rows = np.random.default_rng(0).permutation(len(examples.lengths))[:7]
    shape = replace(fit_batch_shape(examples.lengths, [rows]), sequences=10)
    padded, plain = examples.collate(rows, shape), examples.collate(rows)
    other = examples.collate(np.arange(5), shape)
    for field in fields(padded):
        if field.name != "tokens":
            assert getattr(padded, field.name).shape == getattr(other, field.name).shape
    finder = make_finder(tiny_encoder)
    with torch.no_grad():
        torch.testing.assert_close(finder(padded), finder(plain), rtol=1e-4, atol=1e-5)


def test_answer_is_the_best_span_of_all_windows(tiny_encoder: Encoder) -> None:
    """Compare with an exhaustive search over all spans of all windows."""
    questions = read_questions(QUESTIONS / "xquad" / "xquad.de.json")[:4]
    examples = encode_questions(tiny_encoder.tokenizer, questions, 96, stride=32)
    finder, settings = make_finder(tiny_encoder), replace(SETTINGS, max_answer=5)
    found = finder.answer(examples, questions, settings)
    best: dict[int, tuple[float, str]] = {}
    for window in range(len(examples.lengths)):
        batch = examples.collate(np.array([window]))
        with torch.no_grad():
            starts, ends = (scores.log_softmax(1)[0] for scores in finder.score(batch))
        owner, first = int(examples.owners[window]), int(examples.firsts[window])
        for i in range(first, first + int(examples.n_text[window])):
            for j in range(i, min(i + 5, first + int(examples.n_text[window]))):
                start, end = examples.characters(window, i, j)
                score = float(starts[i] + ends[j])
                if score > best.get(owner, (-np.inf, ""))[0]:
                    best[owner] = (score, questions[owner].context[start:end].strip())
    for owner, answer in enumerate(found):
        assert answer.score == pytest.approx(best[owner][0], abs=1e-4)
        assert answer.text == best[owner][1]
        assert questions[owner].context[answer.start : answer.end] == answer.text


def test_blank_text_has_the_empty_answer(tiny_encoder: Encoder) -> None:
    question = Question("q", "What?", " ", ())
    examples = encode_questions(tiny_encoder.tokenizer, [question], 32, stride=8)
    assert make_finder(tiny_encoder).answer(examples, [question], SETTINGS)[0].text == ""


def test_items_are_questions() -> None:
    questions = [
        Question("1", "?", "in 1976", (Answer("in 1976", 0), Answer("1976", 3))),
        Question("2", "?", "red house", (Answer("red house", 0),)),
    ]
    found = [FoundAnswer("1976", 3, 7, 0), FoundAnswer("house", 4, 9, 0)]
    items, exact = score_answers(found, questions, normalize_squad)
    assert items.numerators.tolist() == [1, pytest.approx(2 / 3)]
    assert items.score == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert exact == 50


@pytest.mark.parametrize("task", ["xquad", "mlqa", "tydiqa"])
def test_scores_are_complete_and_reproducible(tiny_encoder: Encoder, task: str) -> None:
    measure_task = load_function(TASKS[task].measure, task)
    languages = load_function(TASKS[task].languages or "", task)(QUESTIONS, SETTINGS)[:2]
    assert languages[0] == "en"
    reported: list[tuple[int, int]] = []
    found, again = (
        measure_task(
            copy_of(tiny_encoder),
            QUESTIONS,
            languages=languages,
            settings=SETTINGS,
            seed=3,
            on_progress=lambda done, total: reported.append((done, total)),
        )
        for _ in range(2)
    )
    assert [outcome.language for outcome in found] == languages
    for outcome, other in zip(found, again, strict=True):
        assert list(outcome.metrics) == ["f1", "exact_match"]
        assert outcome.metrics == other.metrics
        assert outcome.items.score == pytest.approx(outcome.metrics["f1"], abs=1e-6)
        assert outcome.n_items == len(outcome.items.numerators)
        assert outcome.counts["train_questions"] == 8
        assert outcome.counts["windows"] >= outcome.n_items
    assert reported[-1][0] == reported[-1][1]


def test_model_memorizes_its_training_answers(tiny_encoder: Encoder, tmp_path: Path) -> None:
    questions = json.loads((QUESTIONS / "tydiqa/tydiqa.goldp.en.train.json").read_text())
    questions["data"] = questions["data"][:5]
    for name in ("tydiqa/tydiqa.goldp.en.train.json", "xquad/xquad.en.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(questions))
    settings = TaskSettings(
        epochs=50,
        batch_tokens=512,
        learning_rate=1e-3,
        head_learning_rate=3e-3,
        dropout=0.0,
        body_dropout=0.0,
        max_answer=80,
    )
    (outcome,) = measure(copy_of(tiny_encoder), tmp_path, task="xquad", settings=settings, seed=0)
    assert outcome.metrics["f1"] > 80
    assert outcome.counts["answers_longer_than_max_answer"] == 0


def test_best_epoch_cannot_be_selected(tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="choose the best epoch"):
        measure(
            tiny_encoder, QUESTIONS, task="xquad", settings=replace(SETTINGS, select="best"), seed=0
        )


ALL = [
    question
    for path in sorted(QUESTIONS.rglob("*.json*"))
    for question in read_questions(path)
    if question.answers
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of calque-mini, which covers the scripts of the samples."""
    import torch

    from calque.models.loading import load_checkpoint

    return load_checkpoint(None, torch.float32)[1]


@pytest.fixture(scope="module")
def examples(tokenizer: PreTrainedTokenizerFast) -> QuestionExamples:
    return encode_questions(tokenizer, ALL, 96, stride=32)


def test_windows_equal_pairs_encoded_by_the_tokenizer(
    tokenizer: PreTrainedTokenizerFast, examples: QuestionExamples
) -> None:
    ends = np.cumsum(examples.lengths)
    assert examples.lengths.max() <= 96
    whole = [w for w in range(len(ends)) if (examples.owners == examples.owners[w]).sum() == 1]
    assert whole
    for window in whole:
        question = ALL[examples.owners[window]]
        expected = tokenizer.backend_tokenizer.encode(question.text, question.context).ids
        found = examples.windows.ids[ends[window] - examples.lengths[window] : ends[window]]
        assert found.tolist() == expected


def test_answers_keep_their_characters(examples: QuestionExamples) -> None:
    n_here = 0
    for window, owner in enumerate(examples.owners.tolist()):
        start, end = int(examples.starts[window]), int(examples.ends[window])
        if start == NOT_HERE:
            assert end == NOT_HERE
            continue
        n_here += 1
        first, last = examples.characters(window, start, end)
        answer, context = ALL[owner].answers[0], ALL[owner].context
        begin = answer.start + len(answer.text) - len(answer.text.lstrip())
        stop = answer.start + len(answer.text.rstrip())
        # Tokens may extend beyond the answer on both sides, but must contain all of it ...
        assert first <= begin and stop <= last
        assert answer.text.strip() in context[first:last]
        # ... and the outermost tokens both have something of it.
        assert examples.characters(window, start, start)[1] > begin
        assert examples.characters(window, end, end)[0] < stop
    assert n_here >= len(ALL) - examples.n_lost_answers > 0.9 * len(ALL)


def test_every_token_of_a_text_is_in_a_window(examples: QuestionExamples) -> None:
    for owner, spans in enumerate(examples.spans):
        seen = np.zeros(len(spans), dtype=int)
        for window in np.flatnonzero(examples.owners == owner).tolist():
            begin = int(examples.offsets[window])
            seen[begin : begin + int(examples.n_text[window])] += 1
        assert seen.all()


@given(st.integers(0, 60), st.integers(2, 20), st.integers(1, 30), st.data())
def test_spans_of_half_a_window_are_completely_in_one(
    n_tokens: int, room: int, stride: int, data: st.DataObject
) -> None:
    starts = _window_starts(n_tokens, room, stride)
    assert starts[0] == 0 and starts[-1] + room >= n_tokens
    assert len(starts) == 1 or starts[-2] + room < n_tokens  # no superfluous window
    if n_tokens:
        first = data.draw(st.integers(0, n_tokens - 1))
        last = min(n_tokens - 1, first + room // 2 - 1)
        assert any(begin <= first and last < begin + room for begin in starts)


def test_tokens_of_an_answer_by_hand() -> None:
    spans = np.array([[0, 3], [3, 8], [8, 9], [9, 9], [9, 13]])  # "Die| Zeit|,|| Ort"
    assert find_tokens(spans, Answer("Zeit", 4)) == (1, 1)
    assert find_tokens(spans, Answer("Zeit, Ort", 4)) == (1, 4)
    assert find_tokens(spans, Answer(" Zeit ", 3)) == (1, 1)
    assert find_tokens(spans, Answer("x", 40)) is None


def test_long_questions_are_truncated_and_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    question = Question("q", "why " * 100, "Because of rain.", (Answer("rain", 11),))
    examples = encode_questions(tokenizer, [question], 40, stride=10)
    assert examples.n_cut_questions == 1
    assert examples.lengths.max() <= 40
    assert examples.starts.max() > 0
    with pytest.raises(InputError, match="too short for a question"):
        encode_questions(tokenizer, [question], 5, stride=10)


def test_an_answer_longer_than_any_window_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "the old house stood on a hill " * 8
    question = Question("q", "What?", text, (Answer(text, 0),))
    examples = encode_questions(tokenizer, [question], 32, stride=10)
    assert examples.n_lost_answers == 1
    assert not examples.starts.any()


def test_a_blank_text_has_one_window_without_text(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = encode_questions(tokenizer, [Question("q", "What?", " ", ())], 32, stride=10)
    assert examples.n_text.tolist() == [0]
    assert not examples.collate(np.array([0])).is_text.any()


def test_questions_whose_answers_are_all_long_are_counted(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "the old house stood on a hill"
    both = Question("1", "What?", text, (Answer(text, 0), Answer("house", 8)))
    long = Question("2", "What?", text, (Answer(text, 0),))
    unknown = Question("3", "What?", text, ())
    questions = [both, long, unknown]
    examples = encode_questions(tokenizer, questions, 64, stride=10)
    assert examples.count_longer(questions, 3) == 1
    assert examples.count_longer(questions, 30) == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The Quick, brown fox!", "quick brown fox"),
        ("An  apple\ta day", "apple day"),
        ("theatre and an anthem", "theatre and anthem"),  # articles are whole words
        ("U.S.A.", "usa"),
        ("the-end", "theend"),  # punctuation is removed before articles
        ("“quoted” – dash", "“quoted” – dash"),  # SQuAD removes ASCII punctuation only
        ("a", ""),
        ("Die Stadt", "die stadt"),
    ],
)
def test_normalization_of_squad(answer: str, expected: str) -> None:
    assert normalize_squad(answer) == expected


@pytest.mark.parametrize(
    ("language", "answer", "expected"),
    [
        ("en", "The “quoted” – dash", "quoted dash"),
        ("en", "$5 (about)", "5 about"),  # ASCII symbols count as punctuation
        ("en", "€5", "€5"),  # other symbols do not
        ("de", "Der Mann, des Jahres", "mann jahres"),
        ("de", "the Haus", "the haus"),
        ("es", "¿Los Ángeles?", "ángeles"),
        ("vi", "cái bàn của tôi", "bàn tôi"),
        ("hi", "राम, श्याम।", "राम श्याम"),
        ("ar", "البيت الكبير", "بيت كبير"),
        ("ar", "خالد", "خ د"),  # the script removes the article inside a word, too
        ("zh", "北京，2008 Olympics年", "北 京 2008 olympics 年"),
        ("zh", "the 山", "the 山"),
    ],
)
def test_normalization_of_mlqa(language: str, answer: str, expected: str) -> None:
    assert normalize_mlqa(answer, language) == expected


def test_a_language_without_rules_is_an_error() -> None:
    with pytest.raises(InputError, match="no rules for answers in 'fr'"):
        normalize_mlqa("le", "fr")


def test_scores_by_hand() -> None:
    # Two words in common of 3 and 4: precision 2/3, recall 1/2, F1 = 4/7.
    assert score_answer("the red old house", ["a red wooden house today"]) == (
        pytest.approx(4 / 7),
        0,
    )
    # Repeated words count as often as they occur on both sides: 2 of 3 and of 2.
    assert score_answer("ba ba ba", ["ba ba"])[0] == pytest.approx(4 / 5)
    # Both scores use the gold answer that fits best.
    assert score_answer("1976", ["in 1976", "1976"]) == (1, 1)
    assert score_answer("nothing", ["in 1976", "1976"]) == (0, 0)
    # Chinese is split into characters: 2 in common of 3 and 2.
    assert score_answer("北京市", ["北京"], partial(normalize_mlqa, language="zh"))[0] == (
        pytest.approx(4 / 5)
    )
    assert score_answer("北京市", ["北京"])[0] == 0
    # Two empty strings are equal but have no word in common, as in both scripts.
    assert score_answer("the", ["a"]) == (0, 1)


WORDS = st.lists(st.sampled_from(["the", "a", "red", "Red", "house,", "2", "“x”"]), max_size=6).map(
    " ".join
)


@given(WORDS, st.lists(WORDS, min_size=1, max_size=3))
def test_scores_equal_the_definition(found: str, answers: list[str]) -> None:
    """F1 = 2PR / (P + R) over words without punctuation."""

    def words(text: str) -> list[str]:
        bare = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in bare.split() if word not in ("a", "an", "the")]

    expected = []
    for answer in answers:
        common = sum((Counter(words(found)) & Counter(words(answer))).values())
        if common:
            precision, recall = common / len(words(found)), common / len(words(answer))
            expected.append(2 * precision * recall / (precision + recall))
    f1, exact = score_answer(found, answers)
    assert f1 == pytest.approx(max(expected, default=0))
    assert exact == any(words(found) == words(answer) for answer in answers)


@given(st.text(max_size=30), st.sampled_from(sorted(MLQA_ARTICLES)))
def test_normalized_answers_have_single_spaces_and_full_scores(text: str, language: str) -> None:
    normal = normalize_mlqa(text, language)
    assert normal == " ".join(normal.split())
    f1, exact = score_answer(text, [text], partial(normalize_mlqa, language=language))
    assert (f1, exact) == (float(bool(normal)), 1)
