"""Question answering as a task: files, windows of a fixed shape, a model that learns answers."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from calque.errors import InputError
from calque.evaluation.registry import TASKS, load_function
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.question_answering import (
    HELD_OUT,
    FoundAnswer,
    SpanFinder,
    encode_questions,
    find_questions,
    list_languages,
    measure_questions,
    normalize_squad,
    score_answers,
)
from calque.io.questions import Answer, Question, read_questions
from calque.models.encoder import Encoder
from calque.tokens.layout import fit_batch_shape

QUESTIONS = Path(__file__).parents[1] / "data" / "questions"
SETTINGS = TaskSettings(epochs=1, batch_tokens=512, train_examples=8, test_examples=4)


def copy_of(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer)


def make_finder(encoder: Encoder) -> SpanFinder:
    return SpanFinder(copy_of(encoder), SETTINGS, torch.Generator().manual_seed(2)).eval()


def test_files_of_the_three_sets(tmp_path: Path) -> None:
    for folder in (QUESTIONS, QUESTIONS / "xquad"):
        found = find_questions(folder, "xquad")
        assert sorted(found.tests) == ["de", "en", "zh"]
        assert sorted(found.train) == ["en", "sw"]
        assert not found.from_squad and not found.held_out
    assert len(find_questions(QUESTIONS, "mlqa").tests) == 7
    assert list_languages(QUESTIONS, SETTINGS, task="mlqa")[0] == "en"
    shutil.copytree(QUESTIONS, tmp_path / "xtreme")
    assert sorted(find_questions(tmp_path, "xquad").tests) == ["de", "en", "zh"]
    # SQuAD is learnt from where it is there, but not for TyDiQA, which has its own.
    squad = tmp_path / "xtreme" / "squad" / "train-v1.1.json"
    squad.parent.mkdir()
    shutil.copy(QUESTIONS / "xquad" / "xquad.en.json", squad)
    assert find_questions(tmp_path, "xquad").train == {"en": squad}
    assert find_questions(tmp_path, "mlqa").from_squad
    assert not find_questions(tmp_path, "tydiqa").from_squad


def test_mlqas_test_files_come_before_its_dev_files(tmp_path: Path) -> None:
    (tmp_path / "mlqa" / "MLQA_V1" / "test").mkdir(parents=True)
    shutil.copytree(QUESTIONS / "tydiqa", tmp_path / "tydiqa")
    source = QUESTIONS / "mlqa" / "dev-context-de-question-de.json"
    test = tmp_path / "mlqa/MLQA_V1/test/test-context-de-question-de.json"
    shutil.copy(source, test)
    shutil.copy(source, tmp_path / "mlqa" / "MLQA_V1" / source.name)
    shutil.copy(source, tmp_path / "mlqa" / "MLQA_V1" / "test-context-de-question-en.json")
    assert find_questions(tmp_path, "mlqa").tests == {"de": test}


def blank_answers(path: Path) -> None:
    """Do to a file what XTREME's download script does to tests."""
    content = json.loads(path.read_text("utf-8"))
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                entry["answers"] = [{"answer_start": 0, "text": ""}]
    path.write_text(json.dumps(content), "utf-8")


def test_tests_whose_answers_xtreme_blanked_give_way_to_dev_files(tmp_path: Path) -> None:
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
    found = find_questions(tmp_path, "mlqa")
    assert found.tests == {
        "de": dev / "dev-context-de-question-de.json",
        "en": test / "test-context-en-question-en.json",
    }
    assert found.secret == {"zh"}


def test_a_set_whose_answers_are_all_blank_is_refused_at_once(tmp_path: Path) -> None:
    shutil.copytree(QUESTIONS / "tydiqa", tmp_path / "tydiqa")
    shutil.copytree(QUESTIONS / "xquad", tmp_path / "xquad")
    for path in (tmp_path / "xquad").glob("*.json"):
        blank_answers(path)
    with pytest.raises(InputError, match=r"no answered questions of xquad here \(XTREME blanks"):
        list_languages(tmp_path, SETTINGS, task="xquad")


def test_a_malformed_test_is_no_matter_to_other_languages(tmp_path: Path) -> None:
    for name in ("tydiqa", "xquad"):
        shutil.copytree(QUESTIONS / name, tmp_path / name)
    (tmp_path / "xquad" / "xquad.zh.json").write_text("{", "utf-8")
    assert sorted(find_questions(tmp_path, "xquad").tests) == ["de", "en", "zh"]
    with pytest.raises(InputError, match=r"xquad\.zh\.json, line 1: this is not JSON"):
        find_questions(tmp_path, "xquad").read_test("zh")


def test_secret_answers_are_replaced_by_held_out_ones(tmp_path: Path) -> None:
    found = find_questions(QUESTIONS, "tydiqa")
    assert sorted(found.tests) == ["en", "sw"]
    assert found.held_out == {"en", "sw"}
    assert found.secret == {"fi"}
    everything = read_questions(QUESTIONS / "tydiqa" / "tydiqa.goldp.en.train.json")
    test, train = found.read_test("en"), found.read_train("en")
    assert len(test) == -(-len(everything) // HELD_OUT)
    assert sorted(q.context for q in test + train) == sorted(q.context for q in everything)
    assert not {q.context for q in test} & {q.context for q in train}
    # A test with answers is taken as it is, and all of the file is learnt from.
    shutil.copytree(QUESTIONS / "tydiqa", tmp_path / "tydiqa")
    shutil.copy(
        QUESTIONS / "xquad" / "xquad.en.json", tmp_path / "tydiqa" / "tydiqa.goldp.en.dev.json"
    )
    opened = find_questions(tmp_path, "tydiqa")
    assert opened.held_out == {"sw"}
    assert len(opened.read_train("en")) == len(everything)


def test_missing_files_are_named(tmp_path: Path, tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="no such folder"):
        find_questions(tmp_path / "none", "xquad")
    with pytest.raises(InputError, match=r"no answered questions of mlqa here .*dev-context-en"):
        find_questions(tmp_path, "mlqa")
    shutil.copytree(QUESTIONS / "xquad", tmp_path / "xquad")
    with pytest.raises(InputError, match="no questions to learn from here"):
        find_questions(tmp_path, "xquad")
    shutil.copy(tmp_path / "xquad" / "xquad.de.json", tmp_path / "xquad" / "xquad.de.json.gz")
    with pytest.raises(InputError, match="is of 'de' too"):
        find_questions(tmp_path, "xquad")
    with pytest.raises(InputError, match="nothing to test 'fr' on"):
        measure_questions(
            tiny_encoder, QUESTIONS, task="xquad", languages=["fr"], settings=SETTINGS, seed=0
        )


def test_a_fixed_shape_changes_no_loss(tiny_encoder: Encoder) -> None:
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


def test_the_best_answer_of_all_windows(tiny_encoder: Encoder) -> None:
    """Against all spans of all windows, one window after the other."""
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


def test_a_blank_text_gets_the_empty_answer(tiny_encoder: Encoder) -> None:
    question = Question("q", "What?", " ", ())
    examples = encode_questions(tiny_encoder.tokenizer, [question], 32, stride=8)
    assert make_finder(tiny_encoder).answer(examples, [question], SETTINGS)[0].text == ""


def test_items_are_the_questions() -> None:
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
def test_outcomes_are_complete_and_repeat(tiny_encoder: Encoder, task: str) -> None:
    measure = load_function(TASKS[task].measure, task)
    languages = load_function(TASKS[task].languages or "", task)(QUESTIONS, SETTINGS)[:2]
    assert languages[0] == "en"
    told: list[tuple[int, int]] = []
    found, again = (
        measure(
            copy_of(tiny_encoder),
            QUESTIONS,
            languages=languages,
            settings=SETTINGS,
            seed=3,
            on_progress=lambda done, total: told.append((done, total)),
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
    assert told[-1][0] == told[-1][1]


def test_a_model_learns_answers_by_heart(tiny_encoder: Encoder, tmp_path: Path) -> None:
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
    (outcome,) = measure_questions(
        copy_of(tiny_encoder), tmp_path, task="xquad", settings=settings, seed=0
    )
    assert outcome.metrics["f1"] > 80
    assert outcome.counts["answers_longer_than_max_answer"] == 0


def test_no_epoch_can_be_chosen(tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="choose the best epoch"):
        measure_questions(
            tiny_encoder, QUESTIONS, task="xquad", settings=replace(SETTINGS, select="best"), seed=0
        )
