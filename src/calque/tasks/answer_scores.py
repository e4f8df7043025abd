"""Exact match and F1 of answers as SQuAD's and MLQA's own scripts compute them.

Both compare answers without capitals, punctuation and articles; what these are depends on the
script and, in MLQA, on the language of the answer.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

from calque.types import InputError

Normalize: TypeAlias = Callable[[str], str]

SQUAD_ARTICLES = ("a", "an", "the")
# MLQA's lists. Hindi and Chinese have none; the Arabic article is written onto its word.
MLQA_ARTICLES: dict[str, tuple[str, ...]] = {
    "ar": (),
    "de": (
        *("ein", "eine", "einen", "einem", "eines", "einer"),
        *("der", "die", "das", "den", "dem", "des"),
    ),
    "en": SQUAD_ARTICLES,
    "es": ("un", "una", "unos", "unas", "el", "la", "los", "las"),
    "hi": (),
    "vi": ("của", "là", "cái", "chiếc", "những"),
    "zh": (),
}
ARABIC_ARTICLE = "ال"
HAN = re.compile("([\u4e00-\u9fa5])")


def normalize_squad(answer: str) -> str:
    """Normalize as SQuAD's script does, whatever the language.

    >>> normalize_squad("The  Broncos' “D”")
    'broncos “d”'
    """
    bare = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_article_pattern(SQUAD_ARTICLES).sub(" ", bare).split())


def normalize_mlqa(answer: str, language: str) -> str:
    """Normalize as MLQA's script does: punctuation of all scripts, articles of the language.

    Chinese characters are words of their own. The article `al-` goes wherever its letters stand,
    inside a word too: the script does so.

    >>> normalize_mlqa("Das „Haus“", "de"), normalize_mlqa("北京2008年", "zh")
    ('haus', '北 京 2008 年')
    """
    if language not in MLQA_ARTICLES:
        fix = f"choose from: {' '.join(MLQA_ARTICLES)}"
        raise InputError(f"MLQA has no rules for answers in {language!r}", fix=fix)
    bare = answer.lower().translate(_all_punctuation())
    if language == "ar":
        bare = bare.replace(ARABIC_ARTICLE, " ")
    if articles := MLQA_ARTICLES[language]:
        bare = _article_pattern(articles).sub(" ", bare)
    if language == "zh":
        bare = HAN.sub(r" \1 ", bare)
    return " ".join(bare.split())


def score_answer(
    found: str, answers: Sequence[str], normalize: Normalize = normalize_squad
) -> tuple[float, float]:
    """Give F1 of words and exact match, 0 to 1, each with the answer it agrees with best.

    >>> score_answer("the Denver Broncos", ["Broncos", "Carolina"])
    (0.6666666666666666, 0.0)
    """
    mine = normalize(found)
    others = [normalize(answer) for answer in answers]
    f1 = max((_word_f1(mine.split(), other.split()) for other in others), default=0.0)
    return f1, float(mine in others)


def _word_f1(found: Sequence[str], gold: Sequence[str]) -> float:
    """Twice the words in common, each as often as both have it, over the words of both."""
    n_common = (Counter(found) & Counter(gold)).total()
    return 2 * n_common / (len(found) + len(gold)) if n_common else 0.0


@cache
def _article_pattern(articles: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(articles)})\b")


@cache
def _all_punctuation() -> dict[int, None]:
    """Map every punctuation mark of Unicode, and ASCII's symbols, to nothing."""
    points = (p for p in range(sys.maxunicode) if unicodedata.category(chr(p)).startswith("P"))
    return dict.fromkeys([*points, *map(ord, string.punctuation)])
