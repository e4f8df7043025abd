"""Words of text in an unknown language."""

from __future__ import annotations

from calque.errors import MissingExtra
from calque.io.segmentation import find_script, get_word_splitter

# Languages of scripts without spaces between words.
SCRIPT_LANGUAGES = {"Han": "zh", "Hiragana": "ja", "Katakana": "ja"}


def find_words(text: str) -> list[str]:
    """Return the words of a text; punctuation marks are words of their own.

    Words of Chinese and Japanese are found by their splitters if these are installed, and are
    single characters otherwise.

    >>> find_words("Das ist gut.")
    ['Das', 'ist', 'gut', '.']
    """
    words: list[str] = []
    for word in get_word_splitter("und")(text):
        language = SCRIPT_LANGUAGES.get(find_script(word))
        words += [word] if language is None else _split_unspaced(word, language)
    return words


def _split_unspaced(text: str, language: str) -> list[str]:
    try:
        return get_word_splitter(language)(text)
    except MissingExtra:
        return [character for character in text if not character.isspace()]
