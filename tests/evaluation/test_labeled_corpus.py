from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.evaluation.finetuning.labeled_corpus import LabeledCorpus, split_rows
from calque.evaluation.finetuning.transfer import TransferRun
from calque.evaluation.settings import TaskSettings
from calque.io.conllu import TaggedSentence, read_tagged
from calque.io.labeled import LabeledText, read_labeled_pairs
from calque.io.xtreme import find_xtreme_files

DATA = Path(__file__).parents[1] / "data" / "xtreme"


def open_pairs(data: Path, **choices: object) -> LabeledCorpus[LabeledText]:
    files = find_xtreme_files(data, "xnli", 3)
    assert files is not None
    settings = TaskSettings(**choices)  # type: ignore[arg-type]
    return LabeledCorpus(files, read_labeled_pairs, settings, lambda e: e.texts, lambda e: e.label)


def open_tagged(task: str, **choices: object) -> LabeledCorpus[TaggedSentence]:
    files = find_xtreme_files(DATA, task, 2)
    assert files is not None
    return LabeledCorpus(files, read_tagged, TaskSettings(**choices))  # type: ignore[arg-type]


@given(
    st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=2), min_size=1),
    st.floats(0.1, 0.9),
)
def test_the_two_sides_share_no_text(texts: list[list[str]], share: float) -> None:
    first, rest = split_rows(texts, share)
    assert sorted(first + rest) == list(range(len(texts)))
    sides = [{text for k in side for text in texts[k]} for side in (first, rest)]
    assert not sides[0] & sides[1]


def test_split_keeps_premises_together_and_translations_apart() -> None:
    corpus = open_pairs(DATA)
    run = TransferRun(("en",), ("en", "de", "sw"))
    train = corpus.training_examples("en")
    assert len(train) == 60 and corpus.is_split("en")
    tests = {name: corpus.test_set(name, run) for name in run.tests}
    assert not {e.texts[0] for e in train} & {e.texts[0] for e in tests["en"]}
    german = read_labeled_pairs(DATA / "xnli" / "dev-de.tsv")
    english = read_labeled_pairs(DATA / "xnli" / "dev-en.tsv")
    translated = {e.texts: g for e, g in zip(english, german, strict=True)}
    assert tests["de"] == [translated[e.texts] for e in tests["en"]]
    assert [e.label for e in tests["de"]] == [e.label for e in tests["sw"]]


def test_all_languages_are_split_in_the_same_way() -> None:
    corpus = open_pairs(DATA, setting="supervised")
    english = {e.texts: k for k, e in enumerate(read_labeled_pairs(DATA / "xnli" / "dev-en.tsv"))}
    german = {e.texts: k for k, e in enumerate(read_labeled_pairs(DATA / "xnli" / "dev-de.tsv"))}
    rows = [english[e.texts] for e in corpus.training_examples("en")]
    assert rows == [german[e.texts] for e in corpus.training_examples("de")]


def test_files_that_are_not_translations_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "xnli"
    folder.mkdir()
    english = (DATA / "xnli" / "dev-en.tsv").read_text("utf-8").splitlines()
    (folder / "dev-en.tsv").write_text("\n".join(english), encoding="utf-8")
    (folder / "dev-de.tsv").write_text("\n".join(english[1:] + english[:1]), encoding="utf-8")
    corpus = open_pairs(tmp_path)
    with pytest.raises(InputError, match="files of de and en are not translations"):
        corpus.test_set("de", TransferRun(("en",), ("de",)))


def test_dev_file_is_not_split_if_there_is_a_training_file() -> None:
    corpus = open_tagged("udpos")
    assert len(corpus.training_examples("en")) == 50
    assert len(corpus.test_set("de", TransferRun(("en",), ("de",)))) == 15
    assert corpus.training_examples("de") + corpus.test_set(
        "de", TransferRun(("de",), ("de",))
    ) == read_tagged(DATA / "udpos" / "dev-de.tsv")
    assert len(corpus.training_examples("de")) == 10


def test_trainable_languages_of_settings() -> None:
    assert open_tagged("panx", setting="translate-train-all").trainable == ["de", "en"]
    assert open_tagged("panx", setting="supervised").trainable == ["de", "en", "zh"]
    assert open_pairs(DATA, setting="translate-train-all").trainable == ["de", "en", "sw"]


def test_examples_that_choose_the_epoch_are_not_trained_on() -> None:
    corpus = open_tagged("udpos")
    run = TransferRun(("en",), ("en",))
    dev, held = corpus.selection_examples(run)
    assert len(dev) == len(held) == 5
    rest = corpus.training_examples("en", leave_out=held)
    assert rest + held == corpus.training_examples("en")


def test_dev_file_chooses_the_epoch_if_there_is_a_test_file(tmp_path: Path) -> None:
    folder = tmp_path / "udpos"
    folder.mkdir()
    for name, source in (("train-en", "train-en"), ("dev-en", "dev-en"), ("test-en", "dev-de")):
        (folder / f"{name}.tsv").write_bytes((DATA / "udpos" / f"{source}.tsv").read_bytes())
    files = find_xtreme_files(tmp_path, "udpos", 2)
    assert files is not None
    dev, held = LabeledCorpus(files, read_tagged, TaskSettings()).selection_examples(
        TransferRun(("en",), ("en",))
    )
    assert dev == read_tagged(folder / "dev-en.tsv") and held == []


def test_numbers_of_examples_are_limited() -> None:
    corpus = open_tagged("udpos", train_examples=20, test_examples=4)
    assert len(corpus.training_examples("en")) == 20
    assert len(corpus.test_set("hi", TransferRun(("en",), ("hi",)))) == 4
