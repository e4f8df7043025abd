from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.classification import (
    TaskName,
    TextClassifier,
    list_languages,
    measure,
)
from calque.models.encoder import Encoder

DATA = Path(__file__).parents[1] / "data"
SETTINGS = TaskSettings(epochs=1, batch_tokens=512)


def copy_encoder(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer)


@pytest.mark.parametrize("task", ["xnli", "pawsx"])
def test_sentence_pairs_in_all_languages(tiny_encoder: Encoder, task: TaskName) -> None:
    languages = list_languages(DATA, SETTINGS, task)
    outcomes = measure(copy_encoder(tiny_encoder), DATA, task=task, settings=SETTINGS, seed=0)
    assert [outcome.language for outcome in outcomes] == languages
    n_all = {"xnli": 90, "pawsx": 60}[task]
    for outcome in outcomes:
        assert outcome.items is not None
        assert outcome.items.score == pytest.approx(outcome.metrics["accuracy"])
        assert outcome.counts["train_examples"] + outcome.n_items == n_all
        assert outcome.counts["learnt_from_part_of_dev"] == 1


def test_words_that_determine_the_class_are_learned(tiny_encoder: Encoder, tmp_path: Path) -> None:
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
    outcome = measure(copy_encoder(tiny_encoder), tmp_path, task="xnli", settings=settings, seed=0)[
        0
    ]
    assert outcome.metrics["accuracy"] > 60 and outcome.n_items == 30


def test_reviews_in_the_layout_of_their_corpus(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(epochs=1, batch_tokens=128)
    assert list_languages(DATA, settings, "reviews") == ["en", "ja"]
    outcomes = measure(copy_encoder(tiny_encoder), DATA, task="reviews", settings=settings, seed=0)
    assert [outcome.n_items for outcome in outcomes] == [2, 2]
    assert outcomes[0].counts["reviews_of_three_stars"] == 1
    assert outcomes[0].counts["train_examples"] == 3


@pytest.fixture
def review_corpus(tmp_path: Path) -> Path:
    """Webis-CLS-10 in small: four languages, three domains; one review more in every domain."""
    for language in ("de", "en", "fr", "jp"):
        for number, domain in enumerate(("books", "dvd", "music"), start=1):
            folder = tmp_path / "cls-acl10-unprocessed" / language / domain
            folder.mkdir(parents=True)
            for split in ("train", "test"):
                items = "".join(
                    f"<item><rating>{stars}</rating><text>{language} {text} {k}</text></item>"
                    for k in range(number)
                    for stars, text in ((5.0, "gut good bon"), (1.0, "bad mal"))
                )
                (folder / f"{split}.review").write_text(f"<items>{items}</items>", "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "n_reviews"),
    [("reviews_books", 2), ("reviews_dvd", 4), ("reviews_music", 6), ("reviews", 12)],
)
def test_reviews_by_domain(
    task: TaskName, n_reviews: int, tiny_encoder: Encoder, review_corpus: Path
) -> None:
    """Table 2 of MetaXLM: trained and tested in the same language and domain."""
    settings = TaskSettings(setting="supervised", epochs=1, batch_tokens=128)
    encoder = copy_encoder(tiny_encoder)
    found = measure(encoder, review_corpus, task=task, settings=settings, seed=0)
    assert [scores.language for scores in found] == ["en", "de", "fr", "ja"]
    assert {(scores.n_items, scores.counts["train_examples"]) for scores in found} == {
        (n_reviews, n_reviews)
    }
    (review_corpus / "cls-acl10-unprocessed/fr/music/test.review").unlink()
    assert ("fr" in list_languages(review_corpus, settings, task)) == (task != "reviews_music")


def test_sixteen_directions(tiny_encoder: Encoder, review_corpus: Path) -> None:
    """Figure 6 of MetaXLM: the scores of en-de are those of de after training in en."""
    settings = TaskSettings(setting="directions", epochs=2, batch_tokens=128, learning_rate=1e-3)
    encoder, names = copy_encoder(tiny_encoder), ("de", "en", "fr", "ja")
    task: TaskName = "reviews_music"
    found = measure(encoder, review_corpus, task=task, settings=settings, seed=0)
    sources = ("en", "de", "fr", "ja")
    assert [scores.language for scores in found] == [f"{s}-{t}" for s in sources for t in names]
    one = replace(settings, setting="zero-shot", source="fr")
    alone = measure(copy_encoder(tiny_encoder), review_corpus, task=task, settings=one, seed=0)
    for scores in alone:
        (same,) = (each for each in found if each.language == f"fr-{scores.language}")
        assert same.metrics == scores.metrics and same.counts == scores.counts
        assert same.items is not None and scores.items is not None
        assert same.items.numerators.tolist() == scores.items.numerators.tolist()
    some = measure(
        encoder, review_corpus, task=task, settings=settings, seed=0, languages=["ja-en", "de-fr"]
    )
    assert [scores.language for scores in some] == ["ja-en", "de-fr"]


def test_reviews_in_tsv_files(tiny_encoder: Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "reviews"
    folder.mkdir()
    (folder / "train-en.tsv").write_text("fine\tgood\npoor\tbad\n" * 4, encoding="utf-8")
    (folder / "test-de.tsv").write_text("gut\tgood\nübel\tugly\n", encoding="utf-8")
    settings = TaskSettings(epochs=1, batch_tokens=128)
    outcome = measure(
        copy_encoder(tiny_encoder), tmp_path, task="reviews", settings=settings, seed=0
    )[0]
    assert outcome.language == "de" and outcome.counts["unknown_classes"] == 1
    assert outcome.metrics["accuracy"] in (
        0.0,
        50.0,
    )  # a class without training examples is never predicted


def test_truncated_and_dropped_training_texts_are_counted(
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
    found = measure(
        copy_encoder(tiny_encoder), tmp_path, task="reviews", settings=settings, seed=0
    )[0]
    assert found.counts == {
        "train_examples": 3,
        "train_texts_cut": 2,
        "train_reviews_of_three_stars": 2,
    }


def test_counts_tell_whether_the_test_is_the_dev_file(
    tiny_encoder: Encoder, tmp_path: Path
) -> None:
    folder = tmp_path / "pawsx"
    folder.mkdir()
    lines = "a b\tb a\t1\nc d\te f\t0\n" * 4
    for name in ("train-en", "dev-en", "dev-de", "test-de"):
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8")
    (folder / "test-en.tsv").write_text("a b\tb a\n" * 4, encoding="utf-8")  # no labels
    outcomes = measure(
        copy_encoder(tiny_encoder), tmp_path, task="pawsx", settings=SETTINGS, seed=0
    )
    on_dev = {outcome.language: outcome.counts.get("tested_on_dev") for outcome in outcomes}
    assert on_dev == {"en": 1, "de": None}


def test_a_single_class_is_an_error(tiny_encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "train-en.tsv").write_text("fine\tgood\n", encoding="utf-8")
    (tmp_path / "test-en.tsv").write_text("fine\tgood\n", encoding="utf-8")
    with pytest.raises(InputError, match="the training data of en have 1 labels"):
        measure(copy_encoder(tiny_encoder), tmp_path, task="reviews", settings=SETTINGS, seed=0)


def test_no_data(tmp_path: Path) -> None:
    tasks: tuple[TaskName, ...] = ("pawsx", "reviews", "reviews_dvd")
    for task in tasks:
        with pytest.raises(InputError, match=f"the folder has no files of {task}"):
            list_languages(tmp_path, SETTINGS, task)


def test_the_pooler_is_a_setting(tiny_encoder: Encoder) -> None:
    generator = torch.Generator().manual_seed(0)
    for pooler in (True, False):
        settings = replace(SETTINGS, pooler=pooler)
        model = TextClassifier(copy_encoder(tiny_encoder), 3, settings, generator)
        assert (model.head.dense is not None) == pooler
