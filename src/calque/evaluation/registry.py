"""The list of tasks: the only place that names them.

What they are written in is imported when a task is used, so that listing them costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, TypeAlias

from calque.errors import InputError
from calque.types import Score

Scorer: TypeAlias = Callable[..., list[Score]]


@dataclass(frozen=True, slots=True)
class TaskKind:
    """What a task is: its main metric, what it takes, and where its code and its data are.

    `measure` and `languages` give outcomes of one model and the languages there are tests of, as
    MODULE:FUNCTION, with a dot before a module of this package; `score` does the layers of an
    untrained task one by one.
    `files` are patterns of its data beneath the user's folder; `defaults` differ from
    `TaskSettings`; `reads` are the settings that matter, all of them where it is `trained`.
    """

    what: str
    metric: str
    measure: str
    files: tuple[str, ...]
    languages: str | None = None
    score: str | None = None
    higher_is_better: bool = True
    trained: bool = False
    of_vectors: bool = False
    of_translators: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)
    reads: tuple[str, ...] = ()


def _untrained(what: str, metric: str, name: str, file: str, pattern: str, **more: Any) -> TaskKind:
    """Describe a task that only looks at a model as it is."""
    place = "untrained_vectors" if more.get("of_vectors") else "untrained"
    measure, score = f".{place}:measure_{name}", f".{file}:score_{name}"
    return TaskKind(what, metric, measure, (pattern,), score=score, **more)


def _probe(what: str, metric: str, *patterns: str) -> TaskKind:
    """Describe a linear probe, whose fit is convex: no seed decides."""
    return TaskKind(
        what,
        metric,
        ".untrained:measure_tagging_probe",
        patterns,
        languages=".untrained:list_probe_languages",
        score=".tagging_probe:score_tagging_probe",
        reads=("layer",),
    )


def _trained(what: str, metric: str, measure: str, *patterns: str, **more: Any) -> TaskKind:
    """Describe a task that is learnt; its module lists the languages."""
    languages = f"{measure.partition(':')[0]}:list_languages"
    return TaskKind(what, metric, measure, patterns, languages, trained=True, **more)


def _translation(what: str, pattern: str) -> TaskKind:
    """Describe a test of translations, for encoder–decoders."""
    return TaskKind(
        what,
        "bleu",
        ".machine_translation:measure_translations",
        (pattern,),
        languages=".machine_translation:list_directions",
        of_translators=True,
        reads=("test_examples",),
    )


def _questions(what: str, *patterns: str) -> TaskKind:
    """Describe a set of questions, each of which may be learnt from another's.

    Few windows have the answer: an update sees some thirty of them, as is usual. So there are few
    updates, which bear a higher rate (docs/tasks.md).
    """
    measure = ".question_answering:measure_questions"
    more = {"batch_tokens": 4096, "learning_rate": 1e-4}
    return _trained(what, "f1", measure, *patterns, defaults=more)


# Translated training sets lie one folder deeper.
PARTS_OF_SPEECH = ("udpos/*.tsv*", "udpos/*/*.tsv*", "ud/*.conllu*", "ud/UD_*/*.conllu*")
NAMES = ("panx/*.tsv*", "panx/*/*.tsv*")
# Translations of tagged sentences have no tags.
POS_TEXT, NER_TEXT = (
    ("udpos/translate-*/*.txt*", "ud/translate-*/*.txt*"),
    "panx/translate-*/*.txt*",
)
REVIEWS = ("cls-acl10-unprocessed", "cls", "amazon_reviews", "reviews")
QUESTIONS_LEARNT = ("squad/train-v1.1.json*", "tydiqa/**/*.train.json*")
TASKS: dict[str, TaskKind] = {
    "tatoeba": _untrained(
        "finding translations of sentences",
        "accuracy",
        "tatoeba",
        "tatoeba",
        "tatoeba/tatoeba.*",
        languages=".untrained:list_tatoeba_languages",
        reads=("layer",),
    ),
    "word_alignment": _untrained(
        "error rate of word links",
        "aer",
        "word_alignment",
        "alignment_error",
        "gold_alignments/*-*.*",
        languages=".untrained:list_alignment_pairs",
        higher_is_better=False,
        reads=("layer",),
    ),
    "bucc": TaskKind(
        "finding translations in two texts",
        "f1",
        ".bucc:measure_mining",
        ("bucc2018/*-en.*", "bucc2018/*-en/*-en.*"),
        languages=".bucc:list_languages",
        reads=("layer",),
    ),
    "pos_probe": _probe("parts of speech by a linear probe", "accuracy", *PARTS_OF_SPEECH),
    "ner_probe": _probe("names by a linear probe", "span_f1", *NAMES),
    "lexicon_induction": _untrained(
        "finding translations of words",
        "precision_at_1_csls",
        "lexicon_induction",
        "lexicon_induction",
        "muse/*.5000-6500.txt",
        of_vectors=True,
    ),
    "word_similarity": _untrained(
        "similarity of words against people's",
        "harmonic_mean",
        "word_similarity",
        "word_similarity",
        "word_similarity/**/*.txt",
        of_vectors=True,
    ),
    "pos": _trained(
        "parts of speech",
        "accuracy",
        ".tagging:measure_tagging",
        *PARTS_OF_SPEECH,
        *POS_TEXT,
    ),
    "ner": _trained("names", "f1", ".tagging:measure_tagging", *NAMES, NER_TEXT),
    "xnli": _trained(
        "whether one sentence follows from another",
        "accuracy",
        ".classification:measure_pairs",
        "xnli/*.tsv*",
        "xnli/*/*.tsv*",
    ),
    "pawsx": _trained(
        "whether two sentences mean the same",
        "accuracy",
        ".classification:measure_pairs",
        "pawsx/*.tsv*",
        "pawsx/*/*.tsv*",
    ),
    "reviews": _trained(
        "whether a review is positive",
        "accuracy",
        ".reviews:measure_reviews",
        *(f"{folder}/**/*.review*" for folder in REVIEWS),
        *(f"{folder}/*.tsv*" for folder in REVIEWS),
        *(f"{folder}/translate-*/*.tsv*" for folder in REVIEWS),
    ),
    "parsing": _trained(
        "dependency parsing",
        "las",
        ".parsing:measure_parsing",
        "ud/*-ud-*.conllu*",
        "ud/UD_*/*-ud-*.conllu*",
    ),
    "xquad": _questions("answers to questions, XQuAD", "xquad/**/*.json*", *QUESTIONS_LEARNT),
    "mlqa": _questions("answers to questions, MLQA", "mlqa/**/*.json*", *QUESTIONS_LEARNT),
    "tydiqa": _questions("answers to questions, TyDiQA", "tydiqa/**/*.json*"),
    "translation": _translation("translating news, newstest2014", "translation/newstest2014.*"),
    "multi30k": _translation(
        "translating captions of pictures, Multi30k", "translation/multi30k/test_2016_flickr.*"
    ),
}


def load_function(reference: str, task: str) -> Callable[..., Any]:
    """Import what MODULE:FUNCTION names; a function of several tasks is told which it does."""
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = getattr(import_module(module, "calque.evaluation.tasks"), name)
    return partial(function, task=task) if "task" in signature(function).parameters else function


def find_kinds(names: Iterable[str]) -> dict[str, TaskKind]:
    """Look up tasks by their names; an unknown one is an error, one named twice is one."""
    asked = [name.strip() for name in names if name.strip()]
    for name in asked:
        if name not in TASKS:
            raise InputError(f"no task is called {name!r}", fix=f"choose from: {', '.join(TASKS)}")
    if not asked:
        raise InputError("no task was named", fix=f"choose from: {', '.join(TASKS)}")
    return {name: TASKS[name] for name in asked}


def find_tasks(names: str) -> dict[str, Scorer]:
    """Look up what scores tasks layer by layer; one that has to be trained is an error.

    So are tasks of encoders beside tasks of word vectors: no model is both.
    """
    kinds = find_kinds(names.split(","))
    for name, kind in kinds.items():
        if kind.score is None:
            fix = "add --seeds 5 -o FOLDER" if kind.trained else "add -o FOLDER"
            raise InputError(f"{name} is measured in a grid", fix=fix)
    of_vectors = [name for name, kind in kinds.items() if kind.of_vectors]
    if of_vectors and len(of_vectors) < len(kinds):
        other = next(name for name in kinds if name not in of_vectors)
        problem = f"{of_vectors[0]} scores word vectors, {other} encoders"
        raise InputError(problem, fix="ask for them one after the other")
    return {name: load_function(kind.score or "", name) for name, kind in kinds.items()}


def take_vectors(names: Iterable[str]) -> bool:
    """Tell whether tasks score word vectors, not encoders."""
    return any(TASKS[name].of_vectors for name in names)
