"""Segmentation of text: words by language, sentences, and scripts.

Words are found by rules for most languages, by jieba for Chinese and by fugashi for Japanese; they
are the pieces of the text between white space or smaller, in order. Sentences are split by light
rules, with lists of abbreviations and ordinals whose dots do not end a sentence.
"""

from __future__ import annotations

import re
import tempfile
import unicodedata
import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from calque.errors import InputError, MissingExtra

WordSplitter: TypeAlias = Callable[[str], list[str]]

SPACED_WORD = re.compile(r"[^ \t\r\n\f\v]+")
APOSTROPHE = "['’]"
JOINERS = (
    "\u200c\u200d\u00ad"  # within words: zero-width non-joiner, zero-width joiner, soft hyphen
)
SKIN_TONES = "\U0001f3fb-\U0001f3ff"
FLAG = "[\U0001f1e6-\U0001f1ff]{2}"
ADDRESS = r"(?:https?://|www\.)[^\s<>\"]*[\w/]|[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+"
APOSTROPHE_WORDS = {  # words that begin or end with an apostrophe
    "it": rf"po{APOSTROPHE}(?!\w)",
    "nl": rf"{APOSTROPHE}[nst](?!\w)",
}
# Words that end with an apostrophe, and those that contain one.
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

UNSPACED_LANGUAGES = {"bo": "Tibetan", "km": "Khmer", "lo": "Lao", "my": "Burmese", "th": "Thai"}
LANGUAGE_CODES = {  # languages with rules of their own
    "bod": "bo", "cat": "ca", "cmn": "zh", "eng": "en", "fra": "fr", "heb": "he", "ita": "it",
    "jpn": "ja", "khm": "km", "kor": "ko", "lao": "lo", "mya": "my", "nld": "nl", "oci": "oc",
    "tha": "th", "yue": "zh", "zho": "zh",
}  # fmt: skip
COUNTRY_CODES = {"cn": "zh", "jp": "ja"}  # often mistaken for language codes


def split_words(text: str, language: str) -> list[str]:
    """Return the words of raw text.

    Hyphenated words, numbers such as 1,000.50 and addresses are one word; punctuation marks are
    words of their own.

    >>> split_words("L'hôtel n'a que 1,5 étoile…", "fr")
    ["L'", 'hôtel', "n'", 'a', 'que', '1,5', 'étoile', '…']
    >>> split_words("Don't touch Ann's well-known e.g.", "en")
    ["Don't", 'touch', 'Ann', "'s", 'well-known', 'e.g.']
    """
    return get_word_splitter(language)(text)


def language_code(language: str) -> str:
    """Return the language code without its region, with two letters if the rules have such a code.

    >>> language_code("jpn"), language_code("zh_Hant"), language_code("pt_BR")
    ('ja', 'zh', 'pt')
    """
    base = language.partition("_")[0]
    return LANGUAGE_CODES.get(base, base)


@cache
def get_word_splitter(language: str) -> WordSplitter:
    """Return the function that splits a language into words.

    A language that cannot be split is an InputError.
    """
    code = language_code(language)
    if code in COUNTRY_CODES:
        problem = f"{code!r} is a country code, not a language code"
        raise InputError(problem, fix=f"use {COUNTRY_CODES[code]}")
    if code in UNSPACED_LANGUAGES:
        raise InputError(
            f"{UNSPACED_LANGUAGES[code]} has no spaces between words, and Calque cannot split it",
            fix="put spaces between the words and omit --tokenize",
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
    r"""Return the words of tokenized text, separated by ASCII white space only.

    Other programs count words this way: for them U+3000 and similar characters are part of a word,
    and in the Kyoto gold alignments U+3000 itself is a word.

    >>> split_on_spaces("天狗 の 山 \u3000 くらま")
    ['天狗', 'の', '山', '\u3000', 'くらま']
    """
    return SPACED_WORD.findall(text)


def _compile(code: str) -> re.Pattern[str]:
    """Return the regular expression of a word."""
    marks = _combining_marks()
    inner, letter = rf"[\w{marks}{JOINERS}]", rf"[^\W\d_][{marks}]*"
    joints = [rf"[-‐‑{APOSTROPHE[1:-1]}](?={inner})", r"(?<=\d)[.,:](?=\d)"]
    if code in ("he", "yi"):
        joints.append(r"(?<=[א-ת])[\"״׳](?=[א-ת])")
    kinds = [
        ADDRESS,
        rf"{letter}(?:\.{letter})+(?!{inner})\.?",  # U.S.
        APOSTROPHE_WORDS.get(code, ""),
        rf"{inner}+(?:(?:{'|'.join(joints)}){inner}+)*",
        FLAG,
        r"\.{2,}|-{2,}",
        rf"\S(?:[{marks}{SKIN_TONES}]|\u200d\S)*",  # punctuation and emoji
    ]
    return re.compile("|".join(filter(None, kinds)))


@cache
def _combining_marks() -> str:
    r"""Return ranges of the combining marks, which Python's `\w` does not match."""
    points = [n for n in (*range(0x20000), *range(0xE0100, 0xE01F0)) if _is_mark(chr(n))]
    starts = [n for n in points if n == 0 or not _is_mark(chr(n - 1))]
    ends = [n for n in points if not _is_mark(chr(n + 1))]
    return "".join(f"{chr(a)}-{chr(b)}" for a, b in zip(starts, ends, strict=True))


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


def _split_at(pattern: re.Pattern[str], word: str) -> list[str]:
    return [part for part in pattern.split(word) if part]


def _split_catalan(word: str) -> list[str]:
    """Split `l'home` after the apostrophe and `dona'm` before it."""
    return [
        part
        for piece in _split_at(CATALAN_ENCLITIC, word)
        for part in ([piece] if piece[0] in "'’" else ELISION.findall(piece))
    ]


def _japanese_splitter() -> WordSplitter:
    try:
        import fugashi

        tagger = fugashi.Tagger()
    except ImportError:
        raise MissingExtra("fugashi", "cjk") from None
    except RuntimeError:  # fugashi without a dictionary
        raise MissingExtra("unidic-lite", "cjk") from None
    return lambda text: [part for word in tagger(text) for part in word.surface.split()]


def _chinese_splitter() -> WordSplitter:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about outdated string literals and imports
            import jieba
    except ImportError:
        raise MissingExtra("jieba", "cjk") from None
    jieba.setLogLevel("WARNING")
    tokenizer = jieba.Tokenizer()
    # By default jieba reads its cache from a folder that every user can write to.
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tmp_dir = folder
        tokenizer.initialize()
    return lambda text: [part for word in tokenizer.cut(text) for part in word.split()]


# Hard ends always end a sentence; soft ends only before a space.
HARD_ENDS = "。！？｡।॥۔؟։።។៕။"
SOFT_ENDS = ".!?…‼⁇⁈⁉"
CLOSERS = "\"'’”»›)]}」』）】》〉"
OPENERS = "\"'‘“„«‹([{「『（【《〈¿¡-–—*•"
END = re.compile(
    rf"(?P<hard>[{HARD_ENDS}][{HARD_ENDS}{SOFT_ENDS}]*)(?P<closers>[{re.escape(CLOSERS)}]*)(?P<gap>\s*)"
    rf"|(?<![{SOFT_ENDS}])(?P<soft>[{SOFT_ENDS}]++)[{re.escape(CLOSERS)}]*+\s+"
)
LAST_WORD = re.compile(r"[^\s\"'(\[{«“„‘]*$")
LONGEST_WORD = 40  # characters before a dot that are checked

# Languages in which a number with a dot is an ordinal: "am 3. Oktober", "Ludwig XIV. starb".
DOTTED_ORDINALS = "bs cs da de et fi fo hr hu is lb lv nb nn pl sk sl sr tr"
ORDINAL = re.compile(r"\d{1,2}|[IVX]+")
# Abbreviations before names and other words with a capital letter.
ABBREVIATIONS = {
    "bg": "г гр ул бул проф акад д-р",
    "ca": "sr sra dr dra prof av núm pàg",
    "cs": "tzv např č str ul sv ing mgr prof dr",
    "da": "ca dr prof hr fr nr bl.a",
    "de": "dr prof hr fr st bzw ca vgl evtl ggf inkl sog nr abs ing hrsg dipl-ing z i u v",
    "el": "κ κα κος δρ καθ",
    "en": "mr mrs ms messrs dr prof st gen col maj sgt capt lt rep sen gov rev hon vs mt ft pres",
    "es": "sr sra srta dr dra dña prof ud uds av pág núm ee.uu",
    "fi": "esim ks mm klo nro prof tri",
    "fr": "m mm mme mmes mlle dr pr me mgr st ste av cf env",
    "hu": "dr prof pl ún kb id ifj özv",
    "it": "sig sigg dott prof ing avv sen on pag mons",
    "nb": "ca dr prof hr fr nr bl.a",
    "nl": "dhr mevr mw dr prof ir ing drs bijv ca st nr",
    "pl": "dr prof inż mgr ul al np tzw św godz ks",
    "pt": "sr sra srs dr dra prof profa exmo av pág",
    "ro": "dr prof str nr dl dna",
    "ru": "г гг ул им проф акад тыс млн млрд см стр рис гл др",
    "sv": "ca dr prof hr fr nr bl.a t.ex",
    "tr": "dr prof doç sn bkz av",
    "uk": "р рр вул ім проф акад тис млн млрд див",
}
BEFORE_NUMBERS = (
    "art fig figs no nos nr núm vol ch p pp pg pag pág cap s str sec abs bd jan feb mar apr jun jul"
    " aug sep sept oct nov dec ст рис стр гл"
)
SENTENCE_CODES = {
    "bul": "bg", "cat": "ca", "ces": "cs", "dan": "da", "deu": "de", "ell": "el", "eng": "en",
    "fin": "fi", "fra": "fr", "hun": "hu", "ita": "it", "nld": "nl", "nob": "nb", "no": "nb",
    "pol": "pl", "por": "pt", "ron": "ro", "rus": "ru", "slk": "sk", "slv": "sl", "spa": "es",
    "swe": "sv", "tur": "tr", "ukr": "uk",
}  # fmt: skip


def split_sentences(text: str, language: str) -> list[str]:
    """Return the sentences of a paragraph; nothing but white space is lost.

    >>> split_sentences('Dr. Ohm kam am 3. Mai. "Gut!" sagte er. Warum?', "de")
    ['Dr. Ohm kam am 3. Mai.', '"Gut!" sagte er.', 'Warum?']
    >>> split_sentences("「行く！」と言った。本当？はい。", "ja")
    ['「行く！」と言った。', '本当？', 'はい。']
    """
    base = language.partition("_")[0]
    code = SENTENCE_CODES.get(base, base)
    sentences, start = [], 0
    for match in END.finditer(text):
        if _is_end(match, text, start, code):
            sentences.append(text[start : match.end()].strip())
            start = match.end()
    return [sentence for sentence in (*sentences, text[start:].strip()) if sentence]


def _is_end(match: re.Match[str], text: str, start: int, code: str) -> bool:
    """Return whether a sentence ends at these marks."""
    following = text[match.end() : match.end() + 1]
    if match["hard"] is not None:
        # 「行く！」と言った: the quotation ends, but not the sentence.
        return not match["closers"] or bool(match["gap"]) or following in OPENERS
    if not following or not _can_begin(following):
        return False
    if match["soft"] != ".":
        return True
    found = LAST_WORD.search(text[max(start, match.start() - LONGEST_WORD) : match.start()])
    return not _is_abbreviation(found[0] if found else "", following, code)


def _can_begin(character: str) -> bool:
    """Return whether a sentence can begin with a character: not a lowercase letter or comma."""
    return (
        character.isdigit()
        or character in OPENERS
        or unicodedata.category(character) in ("Lu", "Lt", "Lo")
    )


def _is_abbreviation(word: str, following: str, code: str) -> bool:
    """Return whether the dot after a word belongs to it."""
    if len(word) == 1 and word.isupper():
        return True  # J. Smith
    if "." in word.strip(".") and not any(character.isdigit() for character in word):
        return True  # z.B., U.S.
    if code in _listed(DOTTED_ORDINALS) and following.isalpha() and ORDINAL.fullmatch(word):
        return True
    small = word.lower()
    if following.isdigit() and small in _listed(BEFORE_NUMBERS):
        return True
    return small in _listed(ABBREVIATIONS.get(code, ""))


@cache
def _listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


COMMON_SCRIPT = "Common"
# First words of character names that are not the name of the script.
SCRIPT_NAMES = {
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
WITHOUT_SCRIPT = {"COMBINING", "MODIFIER"}
# Scripts without spaces between words.
UNSPACED_SCRIPTS = frozenset(
    {"Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan"}
)


def find_script(text: str) -> str:
    """Return the script of the first letter, or `Common` if there is none.

    >>> [find_script(text) for text in ("¿Qué?", "да", "日本", "ひ", "हिन्दी", "3.14")]
    ['Latin', 'Cyrillic', 'Han', 'Hiragana', 'Devanagari', 'Common']
    """
    scripts = (_script_of_character(character) for character in text)
    return next((script for script in scripts if script != COMMON_SCRIPT), COMMON_SCRIPT)


@cache
def _script_of_character(character: str) -> str:
    for part in unicodedata.normalize("NFKC", character):  # Ａ is an A, ª an a
        word = unicodedata.name(part, "").partition(" ")[0]
        if word not in WITHOUT_SCRIPT and unicodedata.category(part)[0] in "LM" and word:
            return SCRIPT_NAMES.get(word, word.capitalize())
    return COMMON_SCRIPT
