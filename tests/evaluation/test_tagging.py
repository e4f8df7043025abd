"""Tagging: examples, training, labels of translations, and scores."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics import f1_score, precision_score, recall_score
from transformers import PreTrainedTokenizerFast

from calque.errors import InputError
from calque.evaluation.finetuning.experiment import FinetuneExperiment
from calque.evaluation.finetuning.labeled_corpus import LabeledCorpus
from calque.evaluation.finetuning.transfer import TransferRun
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks import tagging
from calque.evaluation.tasks.tagging import (
    TaskName,
    build_experiment,
    encode_tagged,
    find_files,
    label_translations,
    list_languages,
    measure,
    repair_spans,
    score_runs,
    score_spans,
    score_words,
    teacher_settings,
)
from calque.io.conllu import TaggedSentence, read_tagged, read_untagged
from calque.models.encoder import Encoder
from calque.models.heads import NO_LABEL
from calque.models.veco import Veco
from calque.tokens.layout import fit_batch_shape

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


SENTENCES = [
    TaggedSentence(("Ich", "mag", "Katzen", "."), ("PRON", "VERB", "NOUN", "PUNCT")),
    TaggedSentence(("Extraordinarily", "long", "sentences"), ("ADV", "_", "NEW")),
    TaggedSentence(("\u200d", "No"), ("X", "ADV")),
]
NAMES = ["ADV", "NOUN", "PRON", "PUNCT", "VERB", "X"]


@pytest.mark.parametrize("fixed", [False, True])
def test_labels_are_at_first_subwords(tiny_tokenizer: PreTrainedTokenizerFast, fixed: bool) -> None:
    examples = encode_tagged(tiny_tokenizer, SENTENCES, NAMES, longest=128, overlap=0.25)
    rows = np.array([2, 0, 1])
    shape = fit_batch_shape(examples.lengths, [rows]) if fixed else None
    batch = examples.collate(rows, shape)
    found: list[list[tuple[str, str]]] = []
    for start, stop in zip(batch.tokens.offsets[:-1], batch.tokens.offsets[1:], strict=True):
        ids, labels = (x[start:stop].tolist() for x in (batch.tokens.ids, batch.labels))
        pairs = [
            (tiny_tokenizer.convert_ids_to_tokens(token), examples.names[label])
            for token, label in zip(ids, labels, strict=True)
            if label != NO_LABEL
        ]
        if pairs:
            found.append(pairs)
    expected = []
    for row in (0, 1, 2):  # first subwords according to transformers
        sentence = SENTENCES[row]
        encoding = tiny_tokenizer(list(sentence.words), is_split_into_words=True)
        pieces = encoding.tokens()
        firsts = {w: k for k, w in reversed(list(enumerate(encoding.word_ids()))) if w is not None}
        expected.append(
            [(pieces[firsts[w]], tag) for w, tag in enumerate(sentence.tags) if w in firsts]
        )
    expected[1] = [pair for pair in expected[1] if pair[1] != "_"]
    assert sorted(found) == sorted(expected)
    assert examples.counts == {
        "words_without_subwords": 1,
        "words_without_tag": 1,
        "words_of_unknown_tag": 1,
    }


def test_long_sentences_are_split_into_windows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    words = tuple(f"w{k}" for k in range(60))
    tags = tuple(["NOUN", "VERB"][k % 2] for k in range(60))
    long = TaggedSentence(words, tags)
    examples = encode_tagged(
        tiny_tokenizer, [SENTENCES[0], long, SENTENCES[0]], NAMES, longest=24, overlap=0.25
    )
    assert examples.lengths.max() <= 24 and len(examples.lengths) > 4
    assert examples.counts == {"sentences_in_windows": 1}
    assert examples.words.tolist() == list(range(68))  # every word once, in order
    first = tiny_tokenizer(["w30"], is_split_into_words=True, add_special_tokens=False).input_ids
    row = int(np.searchsorted(examples.first_words, 34, "right")) - 1
    start = int(examples.lengths[:row].sum() + examples.offsets[34])
    assert examples.windows.ids[start : start + len(first)].tolist() == first
    at_edge = (examples.offsets == 1).sum()
    assert at_edge == 3  # other windows begin with words of the window before


SPANS = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]
# Without X: seqeval since 1.0, unlike the version that XTREME used, takes one letter for O.
PARTS = ["ADJ", "INTJ", "NOUN", "SCONJ", "SYM", "VERB"]


def draw_sentences(n_tags: int) -> st.SearchStrategy[list[tuple[list[int], list[int]]]]:
    tag = st.integers(0, n_tags - 1)
    word = st.tuples(tag, tag)
    sentence = st.lists(word, min_size=1, max_size=8).map(lambda w: tuple(map(list, zip(*w))))  # noqa: B905
    return st.lists(sentence, min_size=1, max_size=4)  # type: ignore[return-value]


def flatten(
    sentences: list[tuple[list[int], list[int]]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    gold, found = (np.array([tag for s in sentences for tag in s[side]]) for side in (0, 1))
    return gold, found, np.array([len(s[0]) for s in sentences])


@given(draw_sentences(len(SPANS)))
def test_span_scores_equal_seqeval(sentences: list[tuple[list[int], list[int]]]) -> None:
    gold, found, lengths = flatten(sentences)
    items, shares = score_spans(gold, found, SPANS, lengths)
    named = [[[SPANS[tag] for tag in s[side]] for s in sentences] for side in (0, 1)]
    assert items.score / 100 == pytest.approx(f1_score(*named, zero_division=0))
    assert shares["precision"] / 100 == pytest.approx(precision_score(*named, zero_division=0))
    assert shares["recall"] / 100 == pytest.approx(recall_score(*named, zero_division=0))
    for k, (here, there) in enumerate(zip(*named, strict=True)):
        if items.denominators[k]:
            share = items.numerators[k] / items.denominators[k]
            assert share == pytest.approx(f1_score([here], [there], zero_division=0))


@given(draw_sentences(len(PARTS)))
def test_run_scores_equal_seqeval(sentences: list[tuple[list[int], list[int]]]) -> None:
    gold, found, lengths = flatten(sentences)
    items, _ = score_runs(gold, found, PARTS, lengths)
    named = [[[PARTS[tag] for tag in s[side]] for s in sentences] for side in (0, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seqeval warns that these are not span tags
        assert items.score / 100 == pytest.approx(f1_score(*named, zero_division=0))


def test_word_scores_by_hand() -> None:
    gold, found = np.array([0, 1, NO_LABEL, 2, 2]), np.array([0, 2, 1, NO_LABEL, 2])
    items = score_words(gold, found, np.array([3, 2]))
    assert items.numerators.tolist() == [1, 1]
    assert items.denominators.tolist() == [2, 2]
    assert items.score == 50


def test_word_without_prediction_is_outside_of_spans() -> None:
    gold = np.array([0, 2, 4])
    items, _ = score_spans(gold, np.array([0, NO_LABEL, NO_LABEL]), SPANS, np.array([3]))
    assert items.score == 0  # the predicted span is one word too short


@given(draw_sentences(len(SPANS)))
def test_repair_gives_valid_tags_and_the_same_score(
    sentences: list[tuple[list[int], list[int]]],
) -> None:
    gold, found, lengths = flatten(sentences)
    repaired, n_repaired = repair_spans(found, SPANS, lengths)
    numbers = np.array([SPANS.index(name) for name in repaired])
    assert n_repaired == int((numbers != found).sum())
    assert (
        score_spans(gold, numbers, SPANS, lengths)[0].score
        == score_spans(gold, found, SPANS, lengths)[0].score
    )
    assert repair_spans(numbers, SPANS, lengths)[1] == 0


TRANSLATE_TRAIN = TaskSettings(
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
    text = (DATA / "xtreme" / "udpos" / "train-en.tsv").read_text("utf-8")
    sentences = [part for part in text.split("\n\n") if part.strip()][:N_TRAIN]
    (folder / "train-en.tsv").write_text("\n\n".join(sentences), "utf-8")
    for name in ("dev-en.tsv", "dev-de.tsv"):
        (folder / name).write_bytes((DATA / "xtreme" / "udpos" / name).read_bytes())
    german = read_tagged(DATA / "xtreme" / "udpos" / "dev-de.tsv")
    lines = [" ".join(german[k % len(german)].words) for k in range(N_TRAIN)]
    lines[3] = ""
    (folder / "translate-train" / "de.txt").write_text("\n".join(lines) + "\n", "utf-8")
    english = [" ".join(s.words) for s in read_tagged(DATA / "xtreme" / "udpos" / "dev-en.tsv")]
    tests = [english[k % len(english)] for k in range(len(german))]
    tests[1] = ""
    (folder / "translate-test" / "de.txt").write_text("\n".join(tests) + "\n", "utf-8")
    return folder.parent


def test_translations_without_tags_make_a_language_trainable(data: Path, tmp_path: Path) -> None:
    assert list_languages(data, TRANSLATE_TRAIN, "pos") == ["en", "de"]
    (tmp_path / "udpos").mkdir()
    for name in ("train-en.tsv", "dev-en.tsv", "dev-de.tsv"):
        shutil.copy(data / "udpos" / name, tmp_path / "udpos" / name)
    with pytest.raises(InputError, match="only en has files"):
        list_languages(tmp_path, TRANSLATE_TRAIN, "pos")


def test_tags_are_those_of_the_english_model(tiny_encoder: Encoder, data: Path) -> None:
    encoder = copy_encoder(tiny_encoder)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    settings = teacher_settings(TRANSLATE_TRAIN)
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
        (folder / name).write_bytes((DATA / "xtreme" / "panx" / name).read_bytes())
    german = read_tagged(DATA / "xtreme" / "panx" / "train-de.tsv")
    n_train = len(read_tagged(folder / "train-en.tsv"))
    lines = [" ".join(german[k % len(german)].words) for k in range(n_train)]
    (folder / "translate-train" / "train-de.txt").write_text("\n".join(lines), "utf-8")
    experiment = build_experiment(
        copy_encoder(tiny_encoder), tmp_path, "ner", teacher_settings(TRANSLATE_TRAIN)
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
        settings=TRANSLATE_TRAIN,
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
    (folder / "dev-en.tsv").write_bytes((DATA / "xtreme" / "udpos" / "dev-en.tsv").read_bytes())
    (folder / "translate-train" / "de.txt").write_text("Ein Satz .\n", "utf-8")
    with pytest.raises(InputError, match=r"de\.txt: the file has 1 lines, but 'en' 30 sentences"):
        measure(copy_encoder(tiny_encoder), tmp_path, task="pos", settings=TRANSLATE_TRAIN, seed=0)


def test_other_settings_ignore_translations(data: Path) -> None:
    files = find_files(data, "pos")
    assert list(files.untagged) == list(files.translated_tests) == ["de"]
    assert LabeledCorpus(files, read_tagged, TaskSettings()).trainable == ["de", "en"]
    assert LabeledCorpus(files, read_tagged, TRANSLATE_TRAIN).trainable == ["en"]


def test_only_chinese_names_are_joined_to_words(
    tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split_pairs(text: str) -> list[str]:
        return [text[k : k + 2] for k in range(0, len(text), 2)]

    monkeypatch.setattr(tagging, "get_word_splitter", {"zh": split_pairs}.__getitem__)
    run = TransferRun(("en",), ("en", "zh"))
    tests = []
    for choice in (False, True):
        settings = TaskSettings(chinese_words=choice)
        corpus = build_experiment(tiny_encoder, DATA, "ner", settings).corpus
        tests.append({name: corpus.test_set(name, run) for name in ("en", "zh")})
    assert tests[0]["en"] == tests[1]["en"]
    text = [["".join(sentence.words) for sentence in test["zh"]] for test in tests]
    assert text[0] == text[1]
    words = [{len(word) for s in test["zh"] for word in s.words} for test in tests]
    assert words == [{1}, {1, 2}]
    assert corpus.count_dropped("zh")["words_across_entities"] > 0
