"""What a task read and tokenized for one seed, kept for the next one in the same process."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

N_KEPT = 4  # of a tokenizer: the tasks that a worker goes to and fro between are few
_KEPT: WeakKeyDictionary[object, dict[Hashable, object]] = WeakKeyDictionary()


def remember(tokenizer: object, key: Hashable, make: Callable[[], T]) -> T:
    """Give what was made before for the same tokenizer and key, or make it.

    What is given is shared, so nobody may change it. The key must name all that it was made
    from: the task, the files, the settings that matter. It is dropped with the tokenizer, or when
    others have been asked for since.

    >>> class Tokenizer: pass
    >>> tokenizer = Tokenizer()
    >>> remember(tokenizer, "pos", lambda: [1]) is remember(tokenizer, "pos", lambda: [2])
    True
    """
    kept = _KEPT.setdefault(tokenizer, {})
    value = kept.pop(key) if key in kept else make()
    while len(kept) >= N_KEPT:
        kept.pop(next(iter(kept)))
    kept[key] = value
    return value  # type: ignore[return-value]
