"""Questions with plug=in: batches against single pairs, which translations are read, refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from calque import cli
from calque.errors import InputError
from calque.evaluation.finetuning.plug_in import PlugInTokens, TranslatedExample, pair_windows
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.question_answering import (
    QuestionExamples,
    QuestionPairs,
    SpanFinder,
    encode_question_pairs,
    encode_questions,
    find_files,
    match_questions,
    measure,
)
from calque.io.questions import Answer, Question, read_questions
from calque.models.encoder import Encoder
from calque.models.heads import NO_LABEL
from calque.models.veco import Veco
from calque.tokens.layout import fit_batch_shape
from calque.tokens.ragged import Ragged, pack

QUESTIONS = Path(__file__).parents[1] / "data" / "questions"
PLUG = TaskSettings(plug="in", dropout=0.0, body_dropout=0.0)
RUN = TaskSettings(
    setting="translate-train-all",
    plug="in",
    epochs=1,
    batch_tokens=1024,
    max_length=64,
    train_examples=8,
    test_examples=6,
)


@pytest.fixture(scope="module")
def veco(tiny_encoder: Encoder) -> Veco:
    """A model whose cross-attention has an effect."""
    found = Veco.plug(tiny_encoder, "random", torch.Generator().manual_seed(1)).eval()
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if ".crossattention." in name and weight.ndim == 2:
                weight.mul_(10)
    return found


def copy_veco(veco: Veco) -> Veco:
    return Veco(deepcopy(veco.model), veco.tokenizer)


def ask(context: str, answer: str, name: str = "q", text: str = "Was ?") -> Question:
    return Question(name, text, context, (Answer(answer, context.index(answer)),))


def make_pairs() -> list[TranslatedExample[Question]]:
    """One with as many windows, one with more, one with fewer than its translation, one alone."""
    short, long = "Ein Baum steht am Weg .", "Das Haus ist rot und " * 12 + "der Baum ist grün ."
    english, much = "A tree is at the road .", "The house is red and " * 12 + "the tree is green ."
    return [
        TranslatedExample(ask(short, "Baum"), ask(english, "tree"), True),
        TranslatedExample(ask(long, "grün"), ask(english, "road"), True),
        TranslatedExample(ask(short, "Weg"), ask(much, "green"), True),
        TranslatedExample(ask(short, "Weg"), ask(much, "red")),
        TranslatedExample(ask(short, "steht")),
    ]


def encode_pairs(veco: Veco, pairs: Sequence[TranslatedExample[Question]]) -> QuestionPairs:
    def encode(questions: Sequence[Question]) -> QuestionExamples:
        return encode_questions(veco.tokenizer, questions, 32, stride=16)

    return encode_question_pairs(encode, pairs)


def test_windows_are_paired_in_order() -> None:
    left, right = [[0], [1, 2], [3], [4]], [[5], [6], [7, 8, 9], []]
    rows = pair_windows(left, right, [True, False, True, True])
    assert rows.left.tolist() == [0, 1, 2, 3, 3, 3, 4]
    assert rows.right.tolist() == [5, 6, 6, 7, 8, 9, -1]
    assert rows.counts_left.tolist() == [True, True, True, True, False, False, True]
    assert rows.counts_right.tolist() == [True, False, False, True, True, True, False]


@pytest.mark.parametrize("in_rows", [False, True])
@torch.no_grad()
def test_batches_equal_single_pairs(veco: Veco, in_rows: bool) -> None:
    """Scores of starts and ends, from [H ; S] of every window computed alone."""
    pairs = encode_pairs(veco, make_pairs())
    finder = SpanFinder(copy_veco(veco), PLUG, torch.Generator().manual_seed(0)).eval()
    rows = np.random.default_rng(0).permutation(len(pairs.lengths))
    batch = pairs.collate(rows, fit_batch_shape(pairs.lengths, [rows]) if in_rows else None)
    assert isinstance(batch.tokens, PlugInTokens)
    scores = torch.stack(finder.score(batch), dim=-1)
    ids = np.split(pairs.both.windows.ids, np.cumsum(pairs.both.windows.lengths)[:-1])

    def expect(own: int, other: int) -> torch.Tensor:
        one = pack(Ragged.of([ids[own]]), pad_id=1)
        (alone,) = veco(one)
        crossed = alone
        if other >= 0:
            read = pack(Ragged.of([ids[other]]), pad_id=1)
            crossed = veco.cross(one, veco(read)[0], read)
        expected: torch.Tensor = finder.output(torch.cat([alone, crossed], dim=1))
        return expected

    n_rows = len(batch.starts) // 2 if not in_rows else len(rows)
    assert n_rows == len(rows)
    for place, row in enumerate(rows.tolist()):
        left, right = int(pairs.rows.left[row]), int(pairs.rows.right[row])
        sides = [(place, left, right, pairs.rows.counts_left[row])]
        if right >= 0:
            sides.append((len(rows) + place, right, left, pairs.rows.counts_right[row]))
        for where, own, other, counts in sides:
            text = slice(int(pairs.both.firsts[own]), len(ids[own]) - 1)
            found = scores[where, text]
            torch.testing.assert_close(found, expect(own, other)[text], atol=2e-4, rtol=1e-3)
            assert bool(batch.is_text[where, text].all())
            assert int(batch.is_text[where].sum()) == len(found)
            label = int(pairs.both.starts[own]) if counts else NO_LABEL
            assert int(batch.starts[where]) == label
    without = [place for place, row in enumerate(rows) if pairs.rows.right[row] < 0]
    assert without and not batch.is_text[[len(rows) + place for place in without]].any()
    free, fixed = pairs.collate(rows), pairs.collate(rows, fit_batch_shape(pairs.lengths, [rows]))
    torch.testing.assert_close(finder(free), finder(fixed))


def test_answers_are_taken_from_the_question_itself(veco: Veco) -> None:
    pairs = make_pairs()
    encoded = encode_pairs(veco, pairs)
    # The windows that a longer translation repeats are not scored twice.
    assert sorted(encoded.scored[encoded.scored >= 0]) == list(range(len(encoded.own.lengths)))
    assert (encoded.scored < 0).sum() > 1
    finder = SpanFinder(copy_veco(veco), PLUG, torch.Generator().manual_seed(0)).eval()
    questions = [pair.example for pair in pairs]
    answers = finder.answer(encoded, questions, PLUG)
    for answer, question in zip(answers, questions, strict=True):
        assert answer.score > -np.inf
        assert question.context[answer.start : answer.end] == answer.text


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    paragraphs = [
        {
            "context": each.context,
            "qas": [
                {
                    "id": each.name,
                    "question": each.text,
                    "answers": [{"text": a.text, "answer_start": a.start} for a in each.answers],
                }
            ],
        }
        for each in questions
    ]
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The questions of the tests, with "translations" of most English training questions.

    As in the original, ids repeat: only a file with the same ids in the same order can be matched.
    """
    shutil.copytree(QUESTIONS, tmp_path / "data")
    folder = tmp_path / "data" / "tydiqa"
    english = read_questions(folder / "tydiqa.goldp.en.train.json")
    assert len({question.name for question in english}) < len(english) == 30
    unique = [replace(each, name=f"q{k}") for k, each in enumerate(english)]
    write_questions(folder / "tydiqa.goldp.en.train.json", unique)
    for language, questions in (("de", unique[:20]), ("zh", unique[10:25])):
        marked = [replace(each, text=f"{language} {each.text}") for each in questions]
        name = f"tydiqa.translate.train.en-{language}.json"
        write_questions(folder / "translate-train" / name, marked[::-1])
    return tmp_path / "data"


def test_training_questions_are_paired_by_id(data: Path) -> None:
    files = find_files(data, "xquad")
    assert files.list_trainable(RUN) == ["en", "sw", "de", "zh"]
    assert files.list_trainable(TaskSettings()) == ["en", "sw"]
    pairs = files.pair_train(("de", "en", "sw", "zh"), RUN)
    for pair in pairs:
        assert pair.other is None or pair.other.name == pair.example.name
        assert pair.learns_other == (pair.example.text[:3] in ("de ", "zh "))
    # 20 + 15 translations, 5 English questions that nothing translates, 10 Swahili ones.
    assert (len(pairs), sum(p.other is None for p in pairs)) == (20 + 15 + 5 + 10, 5 + 10)
    assert sum(p.learns_other for p in pairs) == 35
    alone = files.pair_train(("en",), replace(RUN, setting="zero-shot"))
    assert [p.other is not None for p in alone] == [True] * 25 + [False] * 5
    assert alone[0].other is not None and alone[0].other.text.startswith("de ")
    assert alone[22].other is not None and alone[22].other.text.startswith("zh ")
    only = files.pair_train(("de",), RUN)
    assert len(only) == 20 and not any(p.learns_other for p in only)
    assert all(p.other is not None for p in only)
    plain = files.pair_train(("en", "de"), replace(RUN, plug="out"))
    assert len(plain) == 30 + 20 and all(p.other is None for p in plain)


@pytest.mark.parametrize(
    ("names", "others", "expected"),
    [
        ("abc", "cab", [1, 2, 0]),
        ("abc", "bd", [None, 0, None]),
        ("001", "001", [0, 1, 2]),  # repeated ids, but the same order
        ("001", "010", [None, None, 1]),
        ("01", "0012", [None, 2]),
    ],
)
def test_matching_of_ids(names: str, others: str, expected: list[int | None]) -> None:
    sides = [[Question(name, "?", "", ()) for name in side] for side in (names, others)]
    assert match_questions(sides[0], sides[1]) == expected


def test_translations_of_held_out_questions_are_not_trained_on(data: Path) -> None:
    (data / "tydiqa" / "tydiqa.goldp.en.dev.json").unlink()
    files = find_files(data, "tydiqa")
    assert "en" in files.held_out
    held = {question.name for question in files.read_test("en")}
    for setting in (RUN, replace(RUN, plug="out")):
        trained = [p.example.name for p in files.pair_train(("en", "de", "zh"), setting)]
        assert trained and held.isdisjoint(trained)


def test_human_translations_of_tests_are_an_upper_bound(veco: Veco, data: Path) -> None:
    outcomes = measure(copy_veco(veco), data, task="xquad", settings=RUN, seed=0)
    for outcome in outcomes:  # en, de, zh share two questions
        n_missing = outcome.counts.get("without_translation", 0)
        assert outcome.counts["human_translations"] == outcome.n_items - n_missing > 0
        assert outcome.notes == {"upper_bound": "tests are read beside human translations"}
    german = read_questions(data / "xquad" / "xquad.de.json")
    path = data / "xquad" / "translate-test" / "xquad.translate.test.de-en.json"
    write_questions(path, [replace(each, text=f"en {each.text}") for each in german])
    files = find_files(data, "xquad")
    pairs = files.pair_test("de", RUN)
    assert [p.other is not None and p.other.text for p in pairs] == [f"en {q.text}" for q in german]
    outcomes = measure(copy_veco(veco), data, task="xquad", settings=RUN, seed=0)
    by_language = {outcome.language: outcome for outcome in outcomes}
    assert not {"human_translations", "without_translation"} & by_language["de"].counts.keys()
    assert not by_language["de"].notes and by_language["zh"].notes
    plain = measure(copy_veco(veco), data, task="xquad", settings=replace(RUN, plug="out"), seed=0)
    assert not plain[0].notes and "human_translations" not in plain[0].counts


def test_command_names_the_upper_bound_and_missing_translations(
    veco: Veco, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    veco.publish(tmp_path / "model", dtype=torch.float32, state=veco.model.state_dict())
    command = ["evaluate", f"veco={tmp_path / 'model'}", "--data", str(data), "--device", "cpu"]
    command += ["--seeds", "1", "--jobs", "0", "--set", "plug=in", "--set", "epochs=1"]
    command += ["--set", "max_length=64", "--set", "train_examples=8", "--set", "test_examples=4"]
    assert cli.run([*command, "--tasks", "xquad,tydiqa", "-o", str(tmp_path / "out")]) == 0
    found = capfd.readouterr()
    assert re.search("warning: veco, tydiqa: .* tests of sw have no translation", found.err)
    lines = (tmp_path / "out" / "results.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert {r["task"] for r in records if "upper_bound" in r.get("notes", {})} == {"xquad"}
    assert cli.run([*command, "--tasks", "xquad"]) == 0
    assert "upper bound" in capfd.readouterr().out
    shutil.rmtree(data / "tydiqa" / "translate-train")
    assert cli.run([*command, "--tasks", "xquad"]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.strip()]
    assert len(lines) == 1 and "no training example has one" in lines[0]


def test_a_plain_model_is_refused(tiny_encoder: Encoder, data: Path) -> None:
    with pytest.raises(InputError, match="needs a model with cross-attention"):
        measure(tiny_encoder, data, task="xquad", settings=RUN, seed=0)
