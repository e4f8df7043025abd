"""The tokens that decoders begin with: one for each language that a model writes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calque.types import InputError

# The decoder of a model with several target languages begins with the language's own token.
LANGUAGE_TOKEN = "<2{}>"


def choose_language(
    language: str | None, targets: Sequence[str], taught: Sequence[str]
) -> str | None:
    """Choose the language whose token a decoder begins with; None where there are no such tokens.

    `targets` have a token, and `taught` are those that it was taught to translate into.

    >>> choose_language(None, ["de", "en"], ["en"]), choose_language("de", [], ["de"])
    ('en', None)
    """
    known = list(targets) or list(taught)
    if language is None and len(taught) == 1:
        language = taught[0]
    if language is None and len(targets) > 1:
        problem = "this model writes several languages, and is not told which"
        raise InputError(problem, fix=f"name one of {', '.join(targets)}")
    if language is not None and known and language not in known:
        problem = f"this model does not write {language}"
        raise InputError(problem, fix=f"name one of {', '.join(known)}")
    return (language or targets[0]) if targets else None


def find_first_token(model: Any, folder: Path | None) -> int:
    """Give the token that a decoder begins with, whatever it writes."""
    for known in (model.config, model.generation_config):
        first = getattr(known, "decoder_start_token_id", None)
        if first is not None:
            return int(first)
    raise InputError(
        "this model does not say which token its decoder begins with",
        file=folder,
        fix="set decoder_start_token_id in its config.json",
    )


def language_token_id(tokenizer: Any, language: str) -> int:
    """Look up the token of a language."""
    found = tokenizer.get_vocab().get(LANGUAGE_TOKEN.format(language))
    if found is None:
        raise InputError(f"the tokenizer has no token for the language {language}")
    return int(found)


def add_language_tokens(tokenizer: Any, languages: list[str]) -> Any:
    """Give a copy of a tokenizer a token for each language that has none yet."""
    wanted = [LANGUAGE_TOKEN.format(language) for language in languages]
    known = tokenizer.get_vocab()
    missing = [token for token in wanted if token not in known]
    if not missing:
        return tokenizer
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(missing, special_tokens=True)
    return grown


def without_languages(vocabulary: dict[str, int]) -> dict[str, int]:
    """Leave the tokens of languages out of a vocabulary: text never holds them."""
    head, tail = LANGUAGE_TOKEN.split("{}")
    return {
        piece: number
        for piece, number in vocabulary.items()
        if not (piece.startswith(head) and piece.endswith(tail) and len(piece) <= 8)
    }
