"""BLEU and chrF compared with SacreBLEU's functions, and files of test sets."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from calque.errors import InputError
from calque.evaluation.grid.model_specs import find_models
from calque.evaluation.grid.run_grid import plan_grid
from calque.evaluation.grid.runner import Runner
from calque.evaluation.grid.task_run import build_records
from calque.evaluation.registry import find_tasks
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.machine_translation import (
    choose_directions,
    find_language_files,
    list_languages,
    measure,
    read_test_set,
)
from calque.models.seq2seq import Seq2Seq
from calque.translation.bleu import score_translations

# The example of SacreBLEU's README, with the score printed there.
SYSTEM = [
    "The dog bit the man.",
    "It wasn't surprising.",
    "The man had just bitten him.",
]
REFERENCE = [
    "The dog bit the man.",
    "It was not unexpected.",
    "The man bit him first.",
]


def test_scores_equal_those_of_sacrebleu() -> None:
    import sacrebleu

    found = score_translations(SYSTEM, REFERENCE, "en")
    bleu = sacrebleu.corpus_bleu(SYSTEM, [REFERENCE])
    assert found.bleu == pytest.approx(bleu.score)
    assert found.chrf == pytest.approx(sacrebleu.corpus_chrf(SYSTEM, [REFERENCE]).score)
    assert found.n_lines == 3
    assert list(found.metrics) == ["bleu", "chrf"]
    version = sacrebleu.__version__
    assert found.bleu_signature == (
        f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    )
    assert found.chrf_signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|")


def test_perfect_translation_scores_100_and_chinese_is_split_into_characters() -> None:
    found = score_translations(["我们的客人几分钟后到。"], ["我们的客人几分钟后到。"], "zh")
    assert found.bleu == pytest.approx(100)
    assert found.chrf == pytest.approx(100)
    assert "tok:zh" in found.bleu_signature


@pytest.mark.parametrize(
    ("language", "alike"),
    [("zho", "zh"), ("cmn", "zh"), ("yue", "zh"), ("jpn", "ja"), ("kor", "ko"), ("tha", "th")],
)
def test_language_codes_of_three_letters(language: str, alike: str) -> None:
    texts, references = ["我们的客人几分钟后到。"], ["我们的客人都到了。"]
    found = score_translations(texts, references, language)
    assert found == score_translations(texts, references, alike)
    assert "tok:13a" not in found.bleu_signature


@pytest.mark.parametrize("language", ["th", "lo", "km", "my", "bo"])
def test_scripts_without_spaces_are_split_into_characters(language: str) -> None:
    """Split at spaces, these two would have no word in common."""
    import sacrebleu

    texts, references = ["แขกของเราจะมาถึงเร็วๆนี้"], ["แขกของเราจะมาถึงในไม่ช้า"]
    found = score_translations(texts, references, language)
    wanted = sacrebleu.corpus_bleu(texts, [references], tokenize="char")
    assert found.bleu == pytest.approx(wanted.score)
    assert found.bleu > 50
    assert "|tok:char|" in found.bleu_signature


def test_files_of_a_test_set(tmp_path: Path) -> None:
    (tmp_path / "test.en").write_text("One.\nTwo.\n")
    with lzma.open(tmp_path / "test.de.xz", "wt") as stream:
        stream.write("Eins.\nZwei.\n")
    (tmp_path / "other.en").write_text("Alone.\n")
    (tmp_path / "test.file").write_text("no language\n")
    found = find_language_files(tmp_path, "test")
    assert found == {"de": tmp_path / "test.de.xz", "en": tmp_path / "test.en"}
    assert read_test_set(found["en"], found["de"]) == (["One.", "Two."], ["Eins.", "Zwei."])
    (tmp_path / "test.en").write_text("One.\n")
    with pytest.raises(InputError, match=r"test.de.xz: the file has 2 lines, but .*test.en has 1"):
        read_test_set(found["en"], found["de"])


def test_invalid_input_is_an_error() -> None:
    with pytest.raises(InputError, match="2 translations for 1 references"):
        score_translations(["a", "b"], ["a"])
    with pytest.raises(InputError, match="no lines to score"):
        score_translations([], [])


@pytest.fixture
def news(tmp_path: Path, taught_pairs: list[tuple[str, str]]) -> Path:
    """A test set of pairs that the tiny translator was trained on; the English is compressed."""
    folder = tmp_path / "translation"
    folder.mkdir()
    sides = ["".join(f"{pair[side]}\n" for pair in taught_pairs) for side in (0, 1)]
    (folder / "newstest2014.en.xz").write_bytes(lzma.compress(sides[0].encode()))
    (folder / "newstest2014.de").write_text(sides[1], encoding="utf-8")
    (folder / "newstest2014.fr").write_text(sides[1], encoding="utf-8")
    return tmp_path


def test_task_in_both_directions(translator_folder: Path, news: Path) -> None:
    settings, steps = TaskSettings(), []
    asked = list_languages(news, settings, task="translation")
    assert asked == ["de-en", "de-fr", "en-de", "en-fr", "fr-de", "fr-en"]
    outcomes = measure(
        Seq2Seq.load(translator_folder),
        news,
        task="translation",
        languages=asked,
        settings=settings,
        seed=0,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    assert [outcome.language for outcome in outcomes] == ["de-en", "en-de"]
    assert steps[-1] == (16, 16)
    for outcome in outcomes:
        assert outcome.metrics["bleu"] == pytest.approx(100)
        assert outcome.items is None and outcome.n_items == 8
        assert outcome.counts == {"directions_not_taught": 4}
        assert "tok:13a" in outcome.notes["bleu"]


def test_task_in_a_grid(translator_folder: Path, tiny_folder: Path, news: Path) -> None:
    tasks = find_tasks(["translation"])
    folders = [f"good={translator_folder}", f"plain={tiny_folder}", f"floor=random:{tiny_folder}"]
    models = find_models(folders)
    runs, _ = plan_grid(models, tasks, [1], news, languages=["en-de"])
    runner = Runner("cpu")
    results = [runner.run(run) for run in runs]
    (row,) = build_records(runs[0], results[0])
    assert row["language"] == "en-de" and row["metric"] == "bleu"
    assert row["value"] == pytest.approx(100) and "nrefs:1" in row["notes"]["bleu"]
    assert "is not an encoder–decoder" in (results[1].error or "")
    assert "a model with random weights cannot translate" in (results[2].error or "")
    assert [run.seed for run in runs] == [None, None, 1]


def test_directions_without_training_are_an_error(translator_folder: Path, news: Path) -> None:
    model = Seq2Seq.load(translator_folder)
    with pytest.raises(InputError, match="this model translates de-en en-de, not en-fr"):
        choose_directions(model, ["en-fr"])
    with pytest.raises(InputError, match="the folder has no files of multi30k"):
        list_languages(news, TaskSettings(), task="multi30k")
