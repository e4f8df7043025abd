from __future__ import annotations

from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.tagging import TaskName, find_files, list_languages, measure
from calque.io.conllu import read_tagged
from calque.models.encoder import Encoder

DATA = Path(__file__).parents[1] / "data"
FAST = {"epochs": 2, "batch_tokens": 512, "learning_rate": 1e-3, "head_learning_rate": 5e-3}


def copy_encoder(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer)


@pytest.mark.parametrize(
    ("task", "choices"),
    [
        ("pos", {}),
        ("ner", {"head": "crf"}),
        ("pos", {"setting": "features", "extra_layers": 1}),
        ("ner", {"setting": "translate-train-all", "select": "best"}),
    ],
)
def test_scores_by_language(
    tiny_encoder: Encoder, task: TaskName, choices: dict[str, object]
) -> None:
    settings = TaskSettings(**FAST, **choices)  # type: ignore[arg-type]
    languages, steps = list_languages(DATA, settings, task), []
    outcomes = measure(
        copy_encoder(tiny_encoder),
        DATA,
        task=task,
        languages=languages,
        settings=settings,
        seed=0,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    assert [outcome.language for outcome in outcomes] == languages
    assert languages[0] == "en" and steps[-1][0] == steps[-1][1] == len(steps)
    for outcome in outcomes:
        assert outcome.items is not None
        main = next(iter(outcome.metrics.values()))
        assert outcome.items.score == pytest.approx(main, abs=1e-6)
        assert len(outcome.items.numerators) == outcome.n_items
    n_train = {"pos": 50, "ner": 60}[task]
    if settings.setting == "translate-train-all":
        n_train = 60 + 30 - 6
    assert outcomes[0].counts["train_examples"] == n_train


def test_accuracy_exceeds_the_most_frequent_tag(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(**{**FAST, "epochs": 12, "batch_tokens": 256})  # type: ignore[arg-type]
    outcome = measure(
        copy_encoder(tiny_encoder), DATA, task="pos", languages=["en"], settings=settings, seed=0
    )[0]
    test = read_tagged(DATA / "xtreme" / "udpos" / "dev-en.tsv")
    tags = Counter(tag for sentence in test for tag in sentence.tags)
    assert outcome.metrics["accuracy"] > 100 * max(tags.values()) / tags.total() + 10


def test_supervised_runs_start_from_the_same_weights(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(setting="supervised", **FAST)  # type: ignore[arg-type]
    choices = {"task": "pos", "settings": settings, "seed": 3}
    both = measure(copy_encoder(tiny_encoder), DATA, languages=["de", "hi"], **choices)  # type: ignore[arg-type]
    alone = measure(copy_encoder(tiny_encoder), DATA, languages=["hi"], **choices)  # type: ignore[arg-type]
    assert both[1].metrics == alone[0].metrics
    assert both[0].counts["learnt_from_part_of_dev"] == 1 and both[0].n_items == 5


def test_weights_depend_on_the_seed_only(tiny_encoder: Encoder) -> None:
    settings = TaskSettings(**FAST)  # type: ignore[arg-type]
    found = []
    for seed in (0, 0, 1):
        encoder = copy_encoder(tiny_encoder)
        measure(encoder, DATA, task="pos", languages=["en"], settings=settings, seed=seed)
        found.append(torch.cat([w.detach().flatten() for w in encoder.parameters()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_treebanks_instead_of_xtreme_files(tmp_path: Path) -> None:
    folder = tmp_path / "ud"
    folder.mkdir()
    for name in ("en_ewt-train", "en_ewt-dev"):
        text = (DATA / "tagged" / f"{name}.conllu").read_bytes()
        (folder / f"{name.replace('-', '-ud-')}.conllu").write_bytes(text)
    assert list_languages(tmp_path, TaskSettings(), "pos") == ["en"]
    assert find_files(tmp_path, "pos").folder == folder


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder has no files of ner"):
        list_languages(tmp_path, TaskSettings(), "ner")
    with pytest.raises(InputError, match="source language 'zu'"):
        list_languages(DATA, TaskSettings(source="zu"), "ner")


def test_training_tags_that_are_not_bio(tmp_path: Path, tiny_encoder: Encoder) -> None:
    folder = tmp_path / "panx"
    folder.mkdir()
    for name in ("train-en", "dev-en"):
        (folder / f"{name}.tsv").write_bytes((DATA / "xtreme/udpos/dev-en.tsv").read_bytes())
    with pytest.raises(InputError, match="is not a BIO tag"):
        measure(copy_encoder(tiny_encoder), tmp_path, task="ner", settings=TaskSettings(), seed=0)


def test_test_tags_that_are_not_bio(tmp_path: Path, tiny_encoder: Encoder) -> None:
    """Without the check, E-LOC of another scheme would be scored as the inside of a span."""
    folder = tmp_path / "panx"
    folder.mkdir()
    names = "to\tO\nNew\tB-LOC\nYork\tI-LOC\n\nto\tO\nParis\tB-LOC\n\n"
    for name in ("train-en", "dev-en"):
        (folder / f"{name}.tsv").write_text(names)
    (folder / "dev-de.tsv").write_text("in\tO\nNew\tB-LOC\nYork\tE-LOC\n")
    settings = TaskSettings(epochs=1)
    with pytest.raises(InputError, match="'E-LOC' is not a BIO tag") as caught:
        measure(copy_encoder(tiny_encoder), tmp_path, task="ner", settings=settings, seed=0)
    assert (caught.value.file, caught.value.line) == (str(folder / "dev-de.tsv"), 3)
