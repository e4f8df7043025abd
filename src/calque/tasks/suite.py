"""The list of tasks: the only place that names them."""

from __future__ import annotations

from collections.abc import Callable

from calque.tasks.retrieval import score_tatoeba
from calque.tasks.word_alignment import score_word_alignment
from calque.types import InputError, Score

TASKS: dict[str, Callable[..., list[Score]]] = {
    "tatoeba": score_tatoeba,
    "word_alignment": score_word_alignment,
}


def find_tasks(names: str) -> dict[str, Callable[..., list[Score]]]:
    """Look up tasks by their names, separated by commas; an unknown one is an error."""
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in TASKS:
            raise InputError(f"no task is called {name!r}", fix=f"choose from: {', '.join(TASKS)}")
    if not asked:
        raise InputError("no task was named", fix=f"choose from: {', '.join(TASKS)}")
    return {name: TASKS[name] for name in asked}
