"""Translations without tags: an English tagger labels them, and a model is trained on both."""

from __future__ import annotations

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from calque.errors import InputError
from calque.evaluation.finetuning.experiment import FinetuneExperiment
from calque.evaluation.finetuning.transfer import LabeledCorpus, TransferRun
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.tagging import (
    build_experiment,
    find_files,
    label_translations,
    list_languages,
    measure,
    teacher_settings,
)
from calque.io.conllu import TaggedSentence, read_tagged, read_untagged
from calque.models.encoder import Encoder
from calque.models.veco import Veco

DATA = Path(__file__).parents[1] / "data" / "xtreme"
FAST = TaskSettings(
    setting="translate-train-all",
    epochs=4,
    batch_tokens=256,
    learning_rate=1e-3,
    head_learning_rate=5e-3,
)
N_TRAIN = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """English with tags and as many German lines, as if translated; one of them is empty."""
    folder = tmp_path_factory.mktemp("data") / "udpos"
    (folder / "translate-train").mkdir(parents=True)
    (folder / "translate-test").mkdir()
    text = (DATA / "udpos" / "train-en.tsv").read_text("utf-8")
    sentences = [part for part in text.split("\n\n") if part.strip()][:N_TRAIN]
    (folder / "train-en.tsv").write_text("\n\n".join(sentences), "utf-8")
    for name in ("dev-en.tsv", "dev-de.tsv"):
        (folder / name).write_bytes((DATA / "udpos" / name).read_bytes())
    german = read_tagged(DATA / "udpos" / "dev-de.tsv")
    lines = [" ".join(german[k % len(german)].words) for k in range(N_TRAIN)]
    lines[3] = ""
    (folder / "translate-train" / "de.txt").write_text("\n".join(lines) + "\n", "utf-8")
    english = [" ".join(s.words) for s in read_tagged(DATA / "udpos" / "dev-en.tsv")]
    tests = [english[k % len(english)] for k in range(len(german))]
    tests[1] = ""
    (folder / "translate-test" / "de.txt").write_text("\n".join(tests) + "\n", "utf-8")
    return folder.parent


def copy_encoder(encoder: Encoder) -> Encoder:
    return Encoder(deepcopy(encoder.model), encoder.tokenizer)


def test_translations_without_tags_make_a_language_trainable(data: Path, tmp_path: Path) -> None:
    assert list_languages(data, FAST, "pos") == ["en", "de"]
    (tmp_path / "udpos").mkdir()
    for name in ("train-en.tsv", "dev-en.tsv", "dev-de.tsv"):
        shutil.copy(data / "udpos" / name, tmp_path / "udpos" / name)
    with pytest.raises(InputError, match="only en has files"):
        list_languages(tmp_path, FAST, "pos")


def test_tags_are_those_of_the_english_model(tiny_encoder: Encoder, data: Path) -> None:
    encoder = copy_encoder(tiny_encoder)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    settings = teacher_settings(FAST)
    experiment: FinetuneExperiment[TaggedSentence] = build_experiment(
        encoder, data, "pos", settings
    )
    teacher_labeled, counts = label_translations(encoder, experiment, 0, spans=False)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert counts == {"labelled_by_teacher": N_TRAIN - 1, "translations_empty": 1}
    lines = read_untagged(data / "udpos" / "translate-train" / "de.txt")
    assert [t.words for t, _ in teacher_labeled["de"]] == [
        line.words for line in lines if line.words
    ]
    assert [number for _, number in teacher_labeled["de"]] == [k for k in range(N_TRAIN) if k != 3]
    # The same model, used for a test.
    model, names, _ = experiment.train(
        encoder, 0, TransferRun(("en",), ()), lambda done, total: None
    )
    asked = [TaggedSentence(t.words, t.tags) for t, _ in teacher_labeled["de"]]
    score = experiment.score(model, experiment.encode(asked, names))
    assert score.metrics["accuracy"] == 100
    assert len({tag for t, _ in teacher_labeled["de"] for tag in t.tags}) > 1


def test_entity_tags_of_the_teacher_are_valid_spans(tiny_encoder: Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "panx"
    (folder / "translate-train").mkdir(parents=True)
    for name in ("train-en.tsv", "dev-en.tsv"):
        (folder / name).write_bytes((DATA / "panx" / name).read_bytes())
    german = read_tagged(DATA / "panx" / "train-de.tsv")
    n_train = len(read_tagged(folder / "train-en.tsv"))
    lines = [" ".join(german[k % len(german)].words) for k in range(n_train)]
    (folder / "translate-train" / "train-de.txt").write_text("\n".join(lines), "utf-8")
    experiment = build_experiment(
        copy_encoder(tiny_encoder), tmp_path, "ner", teacher_settings(FAST)
    )
    teacher_labeled, _ = label_translations(copy_encoder(tiny_encoder), experiment, 0, spans=True)
    for sentence, _ in teacher_labeled["de"]:
        for before, tag in zip(("O", *sentence.tags), sentence.tags, strict=False):
            assert not tag.startswith("I-") or before[2:] == tag[2:]


def test_student_trains_on_both_languages(tiny_encoder: Encoder, data: Path) -> None:
    steps: list[tuple[int, int]] = []
    outcomes = measure(
        copy_encoder(tiny_encoder),
        data,
        task="pos",
        settings=FAST,
        seed=0,
        on_progress=lambda done, total: steps.append((done, total)),
    )
    shares = [done / total for done, total in steps]
    assert shares == sorted(shares) and shares[-1] == 1
    assert [outcome.language for outcome in outcomes] == ["en", "de"]
    for outcome in outcomes:
        assert outcome.counts["train_examples"] == 2 * N_TRAIN - 1
        assert outcome.counts["labelled_by_teacher"] == N_TRAIN - 1
        assert outcome.counts["translations_empty"] == 1
        assert "learnt_from_part_of_dev" not in outcome.counts


def test_plug_in_student_reads_translations(tiny_encoder: Encoder, data: Path) -> None:
    veco = Veco.plug(tiny_encoder)
    settings = TaskSettings(setting="translate-train-all", plug="in", epochs=1, head="crf")
    en, de = measure(veco, data, task="pos", settings=settings, seed=0)
    assert en.counts["train_examples"] == 2 * N_TRAIN - 1
    assert en.counts["learnt_without_translation"] == 1
    assert en.counts["without_translation"] == en.n_items
    assert de.counts["without_translation"] == 1 and de.n_items == 15
    assert de.items is not None and len(de.items.numerators) == 15


def test_number_of_translated_lines_is_checked(
    tiny_encoder: Encoder, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "udpos"
    (folder / "translate-train").mkdir(parents=True)
    (folder / "train-en.tsv").write_bytes((data / "udpos" / "train-en.tsv").read_bytes())
    (folder / "dev-en.tsv").write_bytes((DATA / "udpos" / "dev-en.tsv").read_bytes())
    (folder / "translate-train" / "de.txt").write_text("Ein Satz .\n", "utf-8")
    with pytest.raises(InputError, match=r"de\.txt: the file has 1 lines, but 'en' 30 sentences"):
        measure(copy_encoder(tiny_encoder), tmp_path, task="pos", settings=FAST, seed=0)


def test_other_settings_ignore_translations(data: Path) -> None:
    files = find_files(data, "pos")
    assert list(files.untagged) == list(files.translated_tests) == ["de"]
    assert LabeledCorpus(files, read_tagged, TaskSettings()).trainable == ["de", "en"]
    assert LabeledCorpus(files, read_tagged, FAST).trainable == ["en"]
