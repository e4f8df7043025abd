"""Words out of raw text, by language: rules for most, jieba for Chinese, fugashi for Japanese.

The words are pieces of the text, in order, and all of it but its white space.
"""

from __future__ import annotations

import re
import tempfile
import unicodedata
import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from calque.text.bitext import LANGUAGE_PAIR
from calque.types import InputError, MissingExtra

Splitter: TypeAlias = Callable[[str], list[str]]

SPACED_WORD = re.compile(r"[^ \t\r\n\f\v]+")
APOSTROPHE = "['’]"
JOINERS = "\u200c\u200d\u00ad"  # between letters of one word: non-joiner, joiner, soft hyphen
SKIN_TONES = "\U0001f3fb-\U0001f3ff"
FLAG = "[\U0001f1e6-\U0001f1ff]{2}"
ADDRESS = r"(?:https?://|www\.)[^\s<>\"]*[\w/]|[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+"
OWN_WORDS = {  # that begin or end with an apostrophe
    "it": rf"po{APOSTROPHE}(?!\w)",
    "nl": rf"{APOSTROPHE}[nst](?!\w)",
}
# Where an apostrophe ends a word, and the words that hold one all the same.
ELISION = re.compile(
    rf"aujourd{APOSTROPHE}hui|prud{APOSTROPHE}hom[a-z]*|[^'’]+{APOSTROPHE}?|{APOSTROPHE}[^'’]*",
    re.IGNORECASE,
)
POSSESSIVE = re.compile(rf"(?={APOSTROPHE}s$)", re.IGNORECASE)
CATALAN_ENCLITIC = re.compile(rf"(?={APOSTROPHE}(?:m|t|s|n|l|ls|ns)$)", re.IGNORECASE)
CLITICS: dict[str, Callable[[str], list[str]]] = {
    "ca": lambda word: _split_catalan(word),
    "en": lambda word: _split_at(POSSESSIVE, word),
    "fr": ELISION.findall,
    "it": ELISION.findall,
    "oc": ELISION.findall,
}

SPACELESS = {"bo": "Tibetan", "km": "Khmer", "lo": "Lao", "my": "Burmese", "th": "Thai"}
CODES = {  # of the languages that are treated in a way of their own
    "bod": "bo", "cat": "ca", "cmn": "zh", "eng": "en", "fra": "fr", "heb": "he", "ita": "it",
    "jpn": "ja", "khm": "km", "kor": "ko", "lao": "lo", "mya": "my", "nld": "nl", "oci": "oc",
    "tha": "th", "yue": "zh", "zho": "zh",
}  # fmt: skip
NOT_LANGUAGES = {"cn": "zh", "jp": "ja"}  # countries: taken for languages of spaced words


def split_words(text: str, language: str) -> list[str]:
    """Split raw text into words.

    Hyphenated words, numbers such as 1,000.50 and addresses stay whole; punctuation stands alone.

    >>> split_words("L'hôtel n'a que 1,5 étoile…", "fr")
    ["L'", 'hôtel', "n'", 'a', 'que', '1,5', 'étoile', '…']
    >>> split_words("Don't touch Ann's well-known e.g.", "en")
    ["Don't", 'touch', 'Ann', "'s", 'well-known', 'e.g.']
    """
    return find_splitter(language)(text)


def find_code(language: str) -> str:
    """Give the code that a language is treated by, without its region.

    >>> find_code("jpn"), find_code("zh_Hant"), find_code("pt_BR")
    ('ja', 'zh', 'pt')
    """
    base = language.partition("_")[0]
    return CODES.get(base, base)


@cache
def find_splitter(language: str) -> Splitter:
    """Give what splits a language into words; one that cannot be split is an InputError."""
    code = find_code(language)
    if code in NOT_LANGUAGES:
        raise InputError(f"{code!r} is a country", fix=f"the language is {NOT_LANGUAGES[code]}")
    if code in SPACELESS:
        raise InputError(
            f"{SPACELESS[code]} puts no spaces between words, and Calque cannot find them",
            fix="put spaces between the words and do without --tokenize",
        )
    if code in ("ja", "zh"):
        return _japanese_splitter() if code == "ja" else _chinese_splitter()
    find, clitics = _compile(code).findall, CLITICS.get(code)
    if clitics is None:
        return find
    return lambda text: [
        part
        for word in find(text)
        for part in (clitics(word) if "'" in word or "’" in word else (word,))
    ]


def split_on_spaces(text: str) -> list[str]:
    r"""Split text whose words stand apart already, at ASCII white space alone.

    Links count words as other programs do, for which U+3000 and its like are part of a word:
    in the Kyoto gold alignments U+3000 itself is one.

    >>> split_on_spaces("天狗 の 山 \u3000 くらま")
    ['天狗', 'の', '山', '\u3000', 'くらま']
    """
    return SPACED_WORD.findall(text)


def parse_languages(text: str) -> tuple[str, str]:
    """Read the languages of a bitext, such as de-en.

    >>> parse_languages("pt_BR-zho")
    ('pt_BR', 'zho')
    """
    match = LANGUAGE_PAIR.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} does not name two languages", fix="write de-en")
    return match[1], match[2]


def _compile(code: str) -> re.Pattern[str]:
    """Build the expression that finds the next word."""
    marks = _combining_marks()
    inner, letter = rf"[\w{marks}{JOINERS}]", rf"[^\W\d_][{marks}]*"
    joints = [rf"[-‐‑{APOSTROPHE[1:-1]}](?={inner})", r"(?<=\d)[.,:](?=\d)"]
    if code in ("he", "yi"):
        joints.append(r"(?<=[א-ת])[\"״׳](?=[א-ת])")
    kinds = [
        ADDRESS,
        rf"{letter}(?:\.{letter})+(?!{inner})\.?",  # U.S.
        OWN_WORDS.get(code, ""),
        rf"{inner}+(?:(?:{'|'.join(joints)}){inner}+)*",
        FLAG,
        r"\.{2,}|-{2,}",
        rf"\S(?:[{marks}{SKIN_TONES}]|\u200d\S)*",  # punctuation and pictures
    ]
    return re.compile("|".join(filter(None, kinds)))


@cache
def _combining_marks() -> str:
    r"""List the combining marks, which Python's `\w` leaves out, as ranges."""
    points = [n for n in (*range(0x20000), *range(0xE0100, 0xE01F0)) if _is_mark(chr(n))]
    starts = [n for n in points if n == 0 or not _is_mark(chr(n - 1))]
    ends = [n for n in points if not _is_mark(chr(n + 1))]
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(starts, ends, strict=True))


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


def _split_at(place: re.Pattern[str], word: str) -> list[str]:
    return [part for part in place.split(word) if part]


def _split_catalan(word: str) -> list[str]:
    """Split `l'home` after the apostrophe and `dona'm` before it."""
    return [
        part
        for piece in _split_at(CATALAN_ENCLITIC, word)
        for part in ([piece] if piece[0] in "'’" else ELISION.findall(piece))
    ]


def _japanese_splitter() -> Splitter:
    try:
        import fugashi

        tagger = fugashi.Tagger()
    except ImportError:
        raise MissingExtra("fugashi", "cjk") from None
    except RuntimeError:  # fugashi without a dictionary
        raise MissingExtra("unidic-lite", "cjk") from None
    return lambda text: [part for word in tagger(text) for part in word.surface.split()]


def _chinese_splitter() -> Splitter:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its old string literals and imports
            import jieba
    except ImportError:
        raise MissingExtra("jieba", "cjk") from None
    jieba.setLogLevel("WARNING")
    tokenizer = jieba.Tokenizer()
    # jieba would read its cache from a folder that anyone can write to.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tmp_dir = folder
        tokenizer.initialize()
    return lambda text: [part for word in tokenizer.cut(text) for part in word.split()]
