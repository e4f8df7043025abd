"""`calque data` and `check_data`: the catalog agrees with the tasks; valid and invalid folders."""

from __future__ import annotations

import json
import lzma
import re
import runpy
import shutil
from pathlib import Path

import pytest

from calque.cli import run
from calque.evaluation.dataset_check import READERS, check_data, recognize_file
from calque.evaluation.datasets import load_datasets
from calque.evaluation.registry import TASKS

DATASETS = load_datasets()
FIXTURES = Path(__file__).parents[1] / "data"
write_bucc = runpy.run_path(str(FIXTURES.parent / "bucc_files.py"))["write_bucc"]

QUESTIONS = (
    '{"data": [{"paragraphs": [{"context": "Ada Lovelace was born in London.", "qas": '
    '[{"id": "1", "question": "Where?", "answers": [{"text": "London", "answer_start": 25}]}]}]}]}'
)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".xz":
            path.write_bytes(lzma.compress(content.encode()))
        else:
            path.write_text(content, "utf-8")


@pytest.fixture
def data(tmp_path: Path, demo_rows: list[tuple[str, str, str]]) -> Path:
    """A folder with a little of many datasets."""
    folder = tmp_path / "data"
    pairs = "A man sleeps.\tNobody is awake.\tneutral\nIt rains.\tIt is wet.\tentailment\n"
    write(
        folder,
        {
            "xtreme/panx/train-en.tsv.xz": "Ada\tB-PER\nLovelace\tI-PER\n\nParis\tB-LOC\n\n",
            "xtreme/panx/dev-de.tsv": "Berlin\tB-LOC\n\n",
            "xtreme/panx/test-de.tsv": "Berlin\n\n",
            "xtreme/xnli/dev-en.tsv": pairs,
            "xtreme/xnli/translate-train/en-de-translated.tsv": pairs,
            "xtreme/xquad/xquad.en.json": QUESTIONS,
            "tatoeba/tatoeba.deu-eng.deu": "Ja.\nNein.\n",
            "tatoeba/tatoeba.deu-eng.eng": "Yes.\nNo.\n",
            "muse/en-de.5000-6500.txt": "cat Katze\ndog Hund\n",
            "word_similarity/rg65_cross/rg65_EN-DE.txt": "cat\tKatze\t3.9\n",
            "word_similarity/semeval17_mono/english.txt": "cat\tdog\t2.5\n",
            "gold_alignments/en-de.text": "a cat ||| eine Katze\n",
            "gold_alignments/en-de.gold": "0-0 1-1\n",
            "cls/de/books/train.review": "<items><item><rating>5.0</rating>"
            "<text>Gut.</text></item></items>",
            "translation/newstest2014.en": "Yes.\n",
            "translation/newstest2014.de": "Ja.\n",
            "notes.txt": "mine",
            ".hidden/panx/train-fr.tsv": "not read",
        },
    )
    shutil.copy(FIXTURES / "fr_gsd.conllu", folder / "fr_gsd-ud-test.conllu")
    (folder / "bucc2018").mkdir()
    write_bucc(folder / "bucc2018", demo_rows)
    return folder


def test_every_task_has_data_and_every_dataset_a_task() -> None:
    described = {task for dataset in DATASETS.values() for task in dataset.tasks}
    assert set(TASKS) <= described
    assert described <= set(TASKS)


def test_layouts_in_the_catalog_are_recognized() -> None:
    for name, dataset in DATASETS.items():
        for kind in dataset.files:
            re.compile(kind.pattern)
            assert kind.reader is None or kind.reader in READERS
        for line in dataset.layout:
            place = line.partition("  ")[0].replace("XX", "de")
            if place.endswith("/"):
                continue
            match = recognize_file(f"/data/{place}", DATASETS)
            assert match is not None, place
            assert match[0] == name


def test_non_commercial_licenses_are_marked() -> None:
    for dataset in DATASETS.values():
        says_so = "NC" in dataset.license or dataset.license.startswith("non-commercial")
        assert dataset.non_commercial == says_so
        assert dataset.source.startswith("http")


def test_files_of_a_folder(data: Path) -> None:
    report = check_data(data)
    assert not report.problems, report.problems
    found = {(file.dataset, file.split, file.language): file.n_items for file in report.found}
    assert found.pop(("ud", "test", "fr")) == 3
    assert found == {
        ("panx", "train", "en"): 2,
        ("panx", "dev", "de"): 1,
        ("panx", "test", "de"): 0,
        ("xnli", "dev", "en"): 2,
        ("xnli", "translate-train", "de"): 2,
        ("xquad", "test", "en"): 1,
        ("tatoeba", "test", "deu"): 2,
        ("muse", "test", "en-de"): 2,
        ("rg65", "test", "en-de"): 1,
        ("semeval2017", "test", "english"): 1,
        ("gold_alignments", "test", "en-de"): 1,
        ("cls", "train", "de"): 1,
        ("wmt14", "newstest2014", "en"): 1,
        ("wmt14", "newstest2014", "de"): 1,
        ("bucc2018", "dev", "de"): 13,
    }
    assert [path.name for path in report.unknown] == ["notes.txt"]
    missing = report.missing("panx")
    assert "1 test files without labels" in missing
    assert report.missing("cls") == ["no test"]
    # A set's own folder will do.
    assert {file.dataset for file in check_data(data / "xtreme/panx").found} == {"panx"}


def test_questions_without_answers_are_not_items(tmp_path: Path) -> None:
    (tmp_path / "xquad").mkdir()
    entry = {"id": "1", "question": "Wer?", "answers": [{"answer_start": 0, "text": ""}]}
    content = {"data": [{"paragraphs": [{"context": "Ich.", "qas": [entry]}]}]}
    (tmp_path / "xquad" / "xquad.de.json").write_text(json.dumps(content), "utf-8")
    report = check_data(tmp_path)
    assert [(file.n_items, file.is_unlabeled) for file in report.found] == [(0, True)]
    assert "1 test files without labels" in report.missing("xquad")


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in DATASETS)
    assert run(["data", "show", "xnli"]) == 0
    shown = capsys.readouterr().out
    assert "CC BY-NC 4.0 (not for commercial use)" in shown
    assert "https://github.com/facebookresearch/XNLI" in shown
    assert "xnli/dev-XX.tsv" in shown


def test_a_valid_folder(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "check", str(data)]) == 0
    said = capsys.readouterr().out
    assert "not found: udpos pawsx squad mlqa tydiqa multi30k" in said
    assert "1 other files: notes.txt" in said
    assert run(["data", "check", str(data), "--tasks", "xnli,pawsx"]) == 0
    said = capsys.readouterr().out
    assert "not found: pawsx" in said
    assert "panx" not in said.splitlines()[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("xtreme/panx/dev-de.tsv", "Berlin\tB-LOC\nBonn\n", "dev-de.tsv, line 2: "),
        ("xtreme/panx/dev-de.tsv", "Berlin\tS-LOC\n", "dev-de.tsv, line 1: "),
        ("xtreme/xnli/dev-en.tsv", "a\tb\n", "dev-en.tsv, line 1: "),
        ("xtreme/xquad/xquad.en.json", "{", "xquad.en.json: this is not"),
        ("tatoeba/tatoeba.deu-eng.eng", "Yes.\n", "tatoeba.deu-eng.deu: the file has 2 lines, but"),
        ("muse/en-de.5000-6500.txt", "cat\n", "5000-6500.txt, line 1: "),
        ("gold_alignments/en-de.gold", "0-7\n", "en-de.gold, line 1: "),
        (
            "bucc2018/de-en.dev.gold",
            "de-9\ten-1\n",
            "line 1: the id 'de-9' is not in de-en.dev.de",
        ),
        ("cls/de/books/train.review", "<items><item>", "train.review, line 1: "),
        ("translation/newstest2014.de", "Ja.\nNein.\n", "2014.de: the file has 2 lines, but"),
        ("fr_gsd-ud-test.conllu", "1\tOui\n", "conllu, line 1: "),
    ],
)
def test_invalid_files(
    data: Path, name: str, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (data / name).write_text(content)
    assert run(["data", "check", str(data)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("invalid: ")
    assert message in said[0]


def test_invalid_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (["show", "xnly"], "there is no dataset 'xnly'"),
        (["show"], "calque data show needs an argument"),
        (["xnli"], "xnli"),
        (["list", "xnli"], "use calque data show xnli"),
        (["check", str(tmp_path / "absent")], "the folder does not exist"),
        (["check", str(tmp_path)], "the folder has no file of a known dataset"),
        (["--tasks", "dancing"], "there is no dataset for the task 'dancing'"),
    ]
    for arguments, message in cases:
        assert run(["data", *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
