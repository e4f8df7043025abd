from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks import classification as pair_classification
from calque.evaluation.tasks import reviews as text_classification
from calque.evaluation.tasks.classification import measure_pairs
from calque.evaluation.tasks.reviews import measure_reviews
from calque.models.encoder import Encoder

DATA = Path(__file__).parents[1] / "data"
SETTINGS = TaskSettings(epochs=1, batch_tokens=512)


def copy_encoder(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer)


@pytest.mark.parametrize("task", ["xnli", "pawsx"])
def test_pairs_in_all_languages(tiny_encoder: Encoder, task: pair_classification.TaskName) -> None:
    languages = pair_classification.list_languages(DATA, SETTINGS, task)
    outcomes = measure_pairs(copy_encoder(tiny_encoder), DATA, task=task, settings=SETTINGS, seed=0)
    assert [outcome.language for outcome in outcomes] == languages
    n_all = {"xnli": 90, "pawsx": 60}[task]
    for outcome in outcomes:
        assert outcome.items is not None
        assert outcome.items.score == pytest.approx(outcome.metrics["accuracy"])
        assert outcome.counts["train_examples"] + outcome.n_items == n_all
        assert outcome.counts["learnt_from_part_of_dev"] == 1


def test_words_that_give_the_class_away_are_learnt(tiny_encoder: Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "xnli"
    folder.mkdir()
    lines = (DATA / "xtreme/xnli/dev-en.tsv").read_text("utf-8").splitlines()
    marked = []
    for line in lines:
        first, second, label = line.split("\t")
        sign = {"entailment": "yes yes yes", "neutral": "maybe", "contradiction": "no no"}[label]
        marked.append(f"{first[:15]}\t{sign} {second[:8]}\t{label}")
    (folder / "train-en.tsv").write_text("\n".join(marked[:60]), encoding="utf-8")
    (folder / "dev-en.tsv").write_text("\n".join(marked[60:]), encoding="utf-8")
    settings = TaskSettings(
        epochs=15, batch_tokens=256, learning_rate=2e-3, head_learning_rate=2e-3
    )
    outcome = measure_pairs(
        copy_encoder(tiny_encoder), tmp_path, task="xnli", settings=settings, seed=0
    )[0]
    assert outcome.metrics["accuracy"] > 60 and outcome.n_items == 30


def test_reviews_in_their_own_layout(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(epochs=1, batch_tokens=128)
    assert text_classification.list_languages(DATA, settings) == ["en", "ja"]
    outcomes = measure_reviews(copy_encoder(tiny_encoder), DATA, settings=settings, seed=0)
    assert [outcome.n_items for outcome in outcomes] == [2, 2]
    assert outcomes[0].counts["reviews_of_three_stars"] == 1
    assert outcomes[0].counts["train_examples"] == 3


def test_reviews_in_plain_columns(tiny_encoder: Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "reviews"
    folder.mkdir()
    (folder / "train-en.tsv").write_text("fine\tgood\npoor\tbad\n" * 4, encoding="utf-8")
    (folder / "test-de.tsv").write_text("gut\tgood\nübel\tugly\n", encoding="utf-8")
    settings = TaskSettings(epochs=1, batch_tokens=128)
    outcome = measure_reviews(copy_encoder(tiny_encoder), tmp_path, settings=settings, seed=0)[0]
    assert outcome.language == "de" and outcome.counts["unknown_classes"] == 1
    assert outcome.metrics["accuracy"] in (0.0, 50.0)  # a class never seen is never right


def test_what_is_cut_or_left_out_of_lessons_is_counted(
    tiny_encoder: Encoder, tmp_path: Path
) -> None:
    review = "<item><rating>{}</rating><text>{}</text></item>"
    texts = {
        "train": [(5.0, "good " * 90), (1.0, "bad " * 90), (1.0, "poor"), (3.0, "so"), (3.0, "la")],
        "test": [(5.0, "fine"), (1.0, "poor")],
    }
    for split, reviews in texts.items():
        path = tmp_path / "cls" / "en" / "books" / f"{split}.review"
        path.parent.mkdir(parents=True, exist_ok=True)
        items = "".join(review.format(stars, text) for stars, text in reviews)
        path.write_text(f"<items>{items}</items>", encoding="utf-8")
    settings = TaskSettings(epochs=1, max_length=40)
    found = measure_reviews(copy_encoder(tiny_encoder), tmp_path, settings=settings, seed=0)[0]
    assert found.counts == {
        "train_examples": 3,
        "train_texts_cut": 2,
        "train_reviews_of_three_stars": 2,
    }


def test_a_row_says_that_the_dev_file_was_the_test(tiny_encoder: Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "pawsx"
    folder.mkdir()
    lines = "a b\tb a\t1\nc d\te f\t0\n" * 4
    for name in ("train-en", "dev-en", "dev-de", "test-de"):
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8")
    (folder / "test-en.tsv").write_text("a b\tb a\n" * 4, encoding="utf-8")  # no labels
    outcomes = measure_pairs(
        copy_encoder(tiny_encoder), tmp_path, task="pawsx", settings=SETTINGS, seed=0
    )
    told = {outcome.language: outcome.counts.get("tested_on_dev") for outcome in outcomes}
    assert told == {"en": 1, "de": None}


def test_one_class_cannot_be_learnt(tiny_encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "train-en.tsv").write_text("fine\tgood\n", encoding="utf-8")
    (tmp_path / "test-en.tsv").write_text("fine\tgood\n", encoding="utf-8")
    with pytest.raises(InputError, match="has 1 labels to learn"):
        measure_reviews(copy_encoder(tiny_encoder), tmp_path, settings=SETTINGS, seed=0)


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no files of pawsx here"):
        pair_classification.list_languages(tmp_path, SETTINGS, "pawsx")
    with pytest.raises(InputError, match="no reviews here"):
        text_classification.list_languages(tmp_path, SETTINGS)
