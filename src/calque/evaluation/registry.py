"""The table of tasks. Their code is imported when a task is used, so that listing them is fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

from calque.errors import InputError


@dataclass(frozen=True, slots=True)
class Task:
    """Description of a task.

    Attributes:
        title: What the task is about.
        metric: Name of the main metric.
        measure: "module:function" that measures one model and returns one `LanguageScores` per
            language. It is called as `measure(model, data, languages=, settings=, seed=,
            on_progress=)`, with `task=` if it has such a parameter.
        files: Patterns of its data files below the user's data folder.
        languages: "module:function" that lists the languages with a test, called with
            `(data, settings)`. None if the languages depend on the model (word vectors).
        model: What is measured: an encoder, a folder of word vectors, or an encoder-decoder.
        trained: Whether the model is fine-tuned, so that the seed matters.
        settings: The fields of `TaskSettings` that matter; all of them for trained tasks.
        defaults: Default settings that differ from those of `TaskSettings`.
        columns: Metrics shown in tables, by column title. Default: the main metric.
        source: Language of the training text of a probe.
    """

    title: str
    metric: str
    measure: str
    files: tuple[str, ...]
    languages: str | None = None
    model: str = "encoder"
    trained: bool = False
    settings: tuple[str, ...] = ()
    higher_is_better: bool = True
    defaults: Mapping[str, object] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None


# Translated training sets are one folder deeper; translations of tagged sentences have no tags.
POS_FILES = ("udpos/*.tsv*", "udpos/*/*.tsv*", "ud/*.conllu*", "ud/UD_*/*.conllu*")
NER_FILES = ("panx/*.tsv*", "panx/*/*.tsv*")
QA_TRAINING_FILES = (
    *("squad/train-v1.1.json*", "tydiqa/**/*.train.json*"),
    *("squad/**/*.translate.train.*.json*", "tydiqa/**/*.translate.train.*.json*"),
)
REVIEW_DOMAINS = ("books", "dvd", "music")
REVIEW_FOLDERS = ("cls-acl10-unprocessed", "cls", "amazon_reviews", "reviews")
# Few windows contain the answer, so a batch is larger; fewer updates allow a higher rate.
QA_DEFAULTS = {"batch_tokens": 4096, "learning_rate": 1e-4}

TASKS: dict[str, Task] = {
    "tatoeba": Task(
        "sentence retrieval",
        "accuracy",
        "calque.evaluation.tasks.tatoeba:measure",
        ("tatoeba/tatoeba.*", "tatoeba/translate-test/tatoeba.*"),
        "calque.evaluation.tasks.tatoeba:list_languages",
        settings=("layer", "layers", "center", "neutral", "plug", "similarity"),
        columns={"→ en": "accuracy_to_english", "en →": "accuracy_from_english"},
    ),
    "word_alignment": Task(
        "word alignment",
        "aer",
        "calque.evaluation.tasks.alignment_error:measure",
        ("gold_alignments/*-*.*",),
        "calque.evaluation.tasks.alignment_error:list_languages",
        settings=("layer", "layers"),
        higher_is_better=False,
        columns={"precision": "precision", "recall": "recall", "F1": "f1", "AER": "aer"},
    ),
    "bucc": Task(
        "bitext mining",
        "f1",
        "calque.evaluation.tasks.bucc:measure",
        (
            *("bucc2018/*-en.*", "bucc2018/*-en/*-en.*"),
            *("bucc2018/translate-test/*-en.*", "bucc2018/*-en/translate-test/*-en.*"),
        ),
        "calque.evaluation.tasks.bucc:list_languages",
        settings=("layer", "plug"),
    ),
    "pos_probe": Task(
        "part-of-speech tagging with a linear probe",
        "accuracy",
        "calque.evaluation.tasks.tagging_probe:measure",
        POS_FILES,
        "calque.evaluation.tasks.tagging_probe:list_languages",
        settings=("layer", "layers"),
        source="en",
    ),
    "ner_probe": Task(
        "named-entity recognition with a linear probe",
        "span_f1",
        "calque.evaluation.tasks.tagging_probe:measure",
        NER_FILES,
        "calque.evaluation.tasks.tagging_probe:list_languages",
        settings=("layer", "layers"),
        source="en",
    ),
    "lexicon_induction": Task(
        "word translation",
        "precision_at_1_csls",
        "calque.evaluation.tasks.lexicon_induction:measure",
        ("muse/*.5000-6500.txt",),
        model="vectors",
        columns={
            "nn\nP@1": "precision_at_1_nn",
            "csls\nP@1": "precision_at_1_csls",
            "csls\nP@5": "precision_at_5_csls",
            "csls\nP@10": "precision_at_10_csls",
            "known\nP@1": "precision_at_1_csls_known",
            "coverage": "coverage",
        },
    ),
    "word_similarity": Task(
        "correlation with human judgments of word similarity",
        "harmonic_mean",
        "calque.evaluation.tasks.word_similarity:measure",
        ("word_similarity/**/*.txt",),
        model="vectors",
        columns={
            "known\nPearson": "pearson_known",
            "known\nSpearman": "spearman_known",
            "known\nharmonic": "harmonic_mean_known",
            "all\nharmonic": "harmonic_mean",
            "coverage": "coverage",
        },
    ),
    "pos": Task(
        "part-of-speech tagging",
        "accuracy",
        "calque.evaluation.tasks.tagging:measure",
        (*POS_FILES, "udpos/translate-*/*.txt*", "ud/translate-*/*.txt*"),
        "calque.evaluation.tasks.tagging:list_languages",
        trained=True,
    ),
    "ner": Task(
        "named-entity recognition",
        "f1",
        "calque.evaluation.tasks.tagging:measure",
        (*NER_FILES, "panx/translate-*/*.txt*"),
        "calque.evaluation.tasks.tagging:list_languages",
        trained=True,
    ),
    "xnli": Task(
        "natural language inference",
        "accuracy",
        "calque.evaluation.tasks.classification:measure",
        ("xnli/*.tsv*", "xnli/*/*.tsv*"),
        "calque.evaluation.tasks.classification:list_languages",
        trained=True,
    ),
    "pawsx": Task(
        "paraphrase identification",
        "accuracy",
        "calque.evaluation.tasks.classification:measure",
        ("pawsx/*.tsv*", "pawsx/*/*.tsv*"),
        "calque.evaluation.tasks.classification:list_languages",
        trained=True,
    ),
    "reviews": Task(
        "sentiment of product reviews",
        "accuracy",
        "calque.evaluation.tasks.classification:measure",
        tuple(
            f"{folder}/{pattern}"
            for pattern in ("**/*.review*", "*.tsv*", "translate-*/*.tsv*")
            for folder in REVIEW_FOLDERS
        ),
        "calque.evaluation.tasks.classification:list_languages",
        trained=True,
    ),
    **{
        f"reviews_{domain}": Task(
            f"sentiment of product reviews, {domain}",
            "accuracy",
            "calque.evaluation.tasks.classification:measure",
            tuple(f"{folder}/*/{domain}/*.review*" for folder in REVIEW_FOLDERS),
            "calque.evaluation.tasks.classification:list_languages",
            trained=True,
        )
        for domain in REVIEW_DOMAINS
    },
    "parsing": Task(
        "dependency parsing",
        "las",
        "calque.evaluation.tasks.parsing:measure",
        ("ud/*-ud-*.conllu*", "ud/UD_*/*-ud-*.conllu*"),
        "calque.evaluation.tasks.parsing:list_languages",
        trained=True,
    ),
    "xquad": Task(
        "question answering, XQuAD",
        "f1",
        "calque.evaluation.tasks.question_answering:measure",
        ("xquad/**/*.json*", *QA_TRAINING_FILES),
        "calque.evaluation.tasks.question_answering:list_languages",
        trained=True,
        defaults=QA_DEFAULTS,
    ),
    "mlqa": Task(
        "question answering, MLQA",
        "f1",
        "calque.evaluation.tasks.question_answering:measure",
        ("mlqa/**/*.json*", *QA_TRAINING_FILES),
        "calque.evaluation.tasks.question_answering:list_languages",
        trained=True,
        defaults=QA_DEFAULTS,
    ),
    "tydiqa": Task(
        "question answering, TyDiQA",
        "f1",
        "calque.evaluation.tasks.question_answering:measure",
        ("tydiqa/**/*.json*",),
        "calque.evaluation.tasks.question_answering:list_languages",
        trained=True,
        defaults=QA_DEFAULTS,
    ),
    "translation": Task(
        "machine translation of news, newstest2014",
        "bleu",
        "calque.evaluation.tasks.machine_translation:measure",
        ("translation/newstest2014.*",),
        "calque.evaluation.tasks.machine_translation:list_languages",
        model="translator",
        settings=("test_examples",),
    ),
    "multi30k": Task(
        "machine translation of image captions, Multi30k",
        "bleu",
        "calque.evaluation.tasks.machine_translation:measure",
        ("translation/multi30k/test_2016_flickr.*",),
        "calque.evaluation.tasks.machine_translation:list_languages",
        model="translator",
        settings=("test_examples",),
    ),
}


def find_tasks(names: Iterable[str]) -> dict[str, Task]:
    """Return the tasks with the given names, each once; raise an InputError for unknown names.

    Tasks of word vectors and of other models cannot be combined: no model is both.
    """
    tasks: dict[str, Task] = {}
    for name in filter(None, (name.strip() for name in names)):
        if name not in TASKS:
            problem = f"there is no task {name!r}"
            raise InputError(problem, fix=f"choose from: {', '.join(TASKS)}")
        tasks[name] = TASKS[name]
    if not tasks:
        raise InputError("no task is given", fix=f"choose from: {', '.join(TASKS)}")
    vectors = [name for name, kind in tasks.items() if kind.model == "vectors"]
    others = [name for name in tasks if name not in vectors]
    if vectors and others:
        problem = f"{vectors[0]} measures word vectors and {others[0]} does not"
        raise InputError(problem, fix="evaluate these tasks separately")
    return tasks


def load_function(reference: str, task: str) -> Callable[..., Any]:
    """Import "module:function"; bind the name of the task if the function has a `task` parameter.

    One function may implement several tasks, for example tagging parts of speech and names.
    """
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return partial(function, task=task) if "task" in signature(function).parameters else function
