"""Sentences out of paragraphs, by light rules: where they end, and the dots that end none."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

# These end a sentence wherever they stand; the others only before a space.
HARD = "。！？｡।॥۔؟։።។៕။"
SOFT = ".!?…‼⁇⁈⁉"
CLOSERS = "\"'’”»›)]}」』）】》〉"
OPENERS = "\"'‘“„«‹([{「『（【《〈¿¡-–—*•"
END = re.compile(
    rf"(?P<hard>[{HARD}][{HARD}{SOFT}]*)(?P<closers>[{re.escape(CLOSERS)}]*)(?P<gap>\s*)"
    rf"|(?<![{SOFT}])(?P<soft>[{SOFT}]++)[{re.escape(CLOSERS)}]*+\s+"
)
LAST_WORD = re.compile(r"[^\s\"'(\[{«“„‘]*$")
LONGEST_WORD = 40  # looked back at before a dot

# A number, or a ruler's, with a dot is an ordinal: "am 3. Oktober", "Ludwig XIV. starb".
DOTTED_ORDINALS = "bs cs da de et fi fo hr hu is lb lv nb nn pl sk sl sr tr"
ORDINAL = re.compile(r"\d{1,2}|[IVX]+")
# Before a name or whatever else begins with a capital.
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
CODES = {
    "bul": "bg", "cat": "ca", "ces": "cs", "dan": "da", "deu": "de", "ell": "el", "eng": "en",
    "fin": "fi", "fra": "fr", "hun": "hu", "ita": "it", "nld": "nl", "nob": "nb", "no": "nb",
    "pol": "pl", "por": "pt", "ron": "ro", "rus": "ru", "slk": "sk", "slv": "sl", "spa": "es",
    "swe": "sv", "tur": "tr", "ukr": "uk",
}  # fmt: skip


def split_sentences(text: str, language: str) -> list[str]:
    """Split a paragraph into sentences; their text is the paragraph's but for white space.

    >>> split_sentences('Dr. Ohm kam am 3. Mai. "Gut!" sagte er. Warum?', "de")
    ['Dr. Ohm kam am 3. Mai.', '"Gut!" sagte er.', 'Warum?']
    >>> split_sentences("「行く！」と言った。本当？はい。", "ja")
    ['「行く！」と言った。', '本当？', 'はい。']
    """
    base = language.partition("_")[0]
    code = CODES.get(base, base)
    sentences, start = [], 0
    for match in END.finditer(text):
        if _ends(match, text, start, code):
            sentences.append(text[start : match.end()].strip())
            start = match.end()
    return [sentence for sentence in (*sentences, text[start:].strip()) if sentence]


def _ends(match: re.Match[str], text: str, start: int, code: str) -> bool:
    """Tell whether a sentence ends at these marks rather than goes on after them."""
    following = text[match.end() : match.end() + 1]
    if match["hard"] is not None:
        # 「行く！」と言った: what is quoted ends, the sentence does not.
        return not match["closers"] or bool(match["gap"]) or following in OPENERS
    if not following or not _begins(following):
        return False
    if match["soft"] != ".":
        return True
    found = LAST_WORD.search(text[max(start, match.start() - LONGEST_WORD) : match.start()])
    return not _is_shortened(found[0] if found else "", following, code)


def _begins(character: str) -> bool:
    """Tell whether a sentence can begin so: not with a small letter, not with a comma."""
    return (
        character.isdigit()
        or character in OPENERS
        or unicodedata.category(character) in ("Lu", "Lt", "Lo")
    )


def _is_shortened(word: str, following: str, code: str) -> bool:
    """Tell whether the dot after a word belongs to it."""
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
