"""The list of tasks: the only place that names them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from calque.tasks.lexicon_induction import score_lexicon_induction
from calque.tasks.retrieval import score_tatoeba
from calque.tasks.tagging_probe import NER, POS, score_tagging_probe
from calque.tasks.word_alignment import score_word_alignment
from calque.tasks.word_similarity import score_word_similarity
from calque.types import InputError, Score

Task: TypeAlias = Callable[..., list[Score]]

ENCODER_TASKS: dict[str, Task] = {
    "tatoeba": score_tatoeba,
    "word_alignment": score_word_alignment,
    POS: partial(score_tagging_probe, task=POS),
    NER: partial(score_tagging_probe, task=NER),
}
VECTOR_TASKS: dict[str, Task] = {  # of static vectors, in a folder with a file a language
    "lexicon_induction": score_lexicon_induction,
    "word_similarity": score_word_similarity,
}
TASKS: dict[str, Task] = ENCODER_TASKS | VECTOR_TASKS


def find_tasks(names: str) -> dict[str, Task]:
    """Look up tasks by their names, separated by commas; an unknown one is an error.

    So are tasks of encoders beside tasks of word vectors: no model is both.
    """
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in TASKS:
            raise InputError(f"no task is called {name!r}", fix=f"choose from: {', '.join(TASKS)}")
    if not asked:
        raise InputError("no task was named", fix=f"choose from: {', '.join(TASKS)}")
    of_vectors = [name for name in asked if name in VECTOR_TASKS]
    if of_vectors and len(of_vectors) < len(asked):
        other = next(name for name in asked if name in ENCODER_TASKS)
        problem = f"{of_vectors[0]} scores word vectors, {other} encoders"
        raise InputError(problem, fix="ask for them one after the other")
    return {name: TASKS[name] for name in asked}


def take_vectors(names: Iterable[str]) -> bool:
    """Tell whether tasks score word vectors, not encoders."""
    return not VECTOR_TASKS.keys().isdisjoint(names)
