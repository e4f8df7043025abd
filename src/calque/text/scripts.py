"""Which script a piece of text is written in, read off the names of its letters."""

from __future__ import annotations

import unicodedata
from functools import cache

COMMON = "Common"
# What the names of letters begin with, where that is not the script's own name.
FIRST_WORDS = {
    "CANADIAN": "Canadian_Aboriginal",
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "KANGXI": "Han",
    "KATAKANA-HIRAGANA": "Katakana",
    "MEETEI": "Meetei_Mayek",
    "NEW": "New_Tai_Lue",
    "OL": "Ol_Chiki",
    "SYLOTI": "Syloti_Nagri",
}
NEUTRAL = {"COMBINING", "MODIFIER"}
# Scripts whose words follow each other without a space between them.
UNSPACED = frozenset({"Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan"})


def script_of(text: str) -> str:
    """Name the script of the first letter; `Common` where there is none: digits, marks, signs.

    >>> [script_of(text) for text in ("¿Qué?", "да", "日本", "ひ", "हिन्दी", "3.14")]
    ['Latin', 'Cyrillic', 'Han', 'Hiragana', 'Devanagari', 'Common']
    """
    scripts = (_script_of_character(character) for character in text)
    return next((script for script in scripts if script != COMMON), COMMON)


@cache
def _script_of_character(character: str) -> str:
    for part in unicodedata.normalize("NFKC", character):  # Ａ is an A, ª an a
        word = unicodedata.name(part, "").partition(" ")[0]
        if word not in NEUTRAL and unicodedata.category(part)[0] in "LM" and word:
            return FIRST_WORDS.get(word, word.capitalize())
    return COMMON
