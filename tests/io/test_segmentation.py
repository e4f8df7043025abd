"""Words of raw text: by example in many languages, and never a character lost."""

from __future__ import annotations

import importlib.util
import sys
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calque.errors import InputError, MissingExtra
from calque.io.bitext import parse_language_pair
from calque.io.segmentation import get_word_splitter, split_on_spaces, split_words

LANGUAGES = ("de", "en", "fr", "it", "ca", "nl", "he", "hi", "fa", "uk", "tr", "ko", "xx")


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("en", "Don't touch Ann's dogs'!", "Don't|touch|Ann|'s|dogs|'|!"),
        ("en", "It’s U.S. law, e.g. “this”.", "It|’s|U.S.|law|,|e.g.|“|this|”|."),
        ("en", "Pi is 3.14, not 1,000.50...", "Pi|is|3.14|,|not|1,000.50|..."),
        ("en", "(a well-known COVID-19 -- 50%)", "(|a|well-known|COVID-19|--|50|%|)"),
        ("en", "See http://a.b/c?d=1. Or me@x.org!", "See|http://a.b/c?d=1|.|Or|me@x.org|!"),
        ("de", "Größe: 12:30 Uhr (z.B. „so“)", "Größe|:|12:30|Uhr|(|z.B.|„|so|“|)"),
        (
            "fr",
            "L’eau d'aujourd'hui : qu'est-ce que c'est ?",
            "L’|eau|d'|aujourd'hui|:|qu'|est-ce|que|c'|est|?",
        ),
        ("it", "Un po' d'acqua, c'è.", "Un|po'|d'|acqua|,|c'|è|."),
        ("ca", "L'home dona'm l'aigua", "L'|home|dona|'m|l'|aigua"),
        ("nl", "'s Avonds is 't z'n auto", "'s|Avonds|is|'t|z'n|auto"),
        ("tr", "İstanbul'da 5'te", "İstanbul'da|5'te"),
        ("uk", "п'ять п’ять", "п'ять|п’ять"),
        ("hi", "उपभोक्ता मामलों में हिंदी।", "उपभोक्ता|मामलों|में|हिंदी|।"),
        ("fa", "می‌خواهم بروم، باشه؟", "می‌خواهم|بروم|،|باشه|؟"),
        ("he", 'צה"ל אמר: "שלום"', 'צה"ל|אמר|:|"|שלום|"'),
        ("vi", "to\u0302i \u0111i ho\u0323c", "to\u0302i|\u0111i|ho\u0323c"),
        ("en", "👨‍👩‍👧 🇩🇪🇫🇷 👍🏽", "👨‍👩‍👧|🇩🇪|🇫🇷|👍🏽"),
    ],
)
def test_by_example(language: str, text: str, words: str) -> None:
    assert split_words(text, language) == words.split("|")


@given(st.text(), st.sampled_from(LANGUAGES))
@example("''d''", "fr")
@example("'\u0308'a's", "ca")
@example("a@b.c'd http://'", "it")
def test_only_white_space_is_lost(text: str, language: str) -> None:
    words = split_words(text, language)
    assert "".join(words) == "".join(text.split())
    assert all(words)
    assert all(word.split() == [word] for word in words)


def test_marks_stay_with_their_letters() -> None:
    # Every Devanagari syllable below is a letter and a vowel sign, which `\\w` does not match.
    for text in ("कि", "की", "कु", "के", "को", "क्ष", "กำ", "தமிழ்", "e\u0301", "x\u20dd"):
        assert split_words(text, "xx") == [text]


def test_codes() -> None:
    assert split_words("l'eau", "fra") == split_words("l'eau", "fr_CA") == ["l'", "eau"]
    assert parse_language_pair("de-en") == ("de", "en")
    for text in ("de", "de-", "german-english", "de_en"):
        with pytest.raises(InputError, match="does not name two languages"):
            parse_language_pair(text)
    with pytest.raises(InputError, match="'jp' is a country"):
        get_word_splitter("jp")


@pytest.mark.parametrize(("code", "name"), [("th", "Thai"), ("khm", "Khmer"), ("my", "Burmese")])
def test_languages_that_need_another_program(code: str, name: str) -> None:
    with pytest.raises(InputError, match=f"{name} puts no spaces between words"):
        split_words("…", code)


def test_japanese() -> None:
    pytest.importorskip("fugashi")
    pytest.importorskip("unidic_lite")
    words = split_words("私は東京へ行きます。　全角 OK", "ja")
    assert words == ["私", "は", "東京", "へ", "行き", "ます", "。", "全角", "OK"]


def test_chinese() -> None:
    if importlib.util.find_spec("jieba") is None:
        pytest.skip("jieba is not installed")
    words = split_words("我来到北京清华大学。", "zh")
    assert words == ["我", "来到", "北京", "清华大学", "。"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, language in (("jieba", "zho"), ("fugashi", "jpn")):
        monkeypatch.setitem(sys.modules, package, None)
        get_word_splitter.cache_clear()
        with pytest.raises(MissingExtra, match=rf"{package} is not installed .*calque\[cjk\]"):
            get_word_splitter(language)
    get_word_splitter.cache_clear()


@pytest.mark.parametrize("unit", ["x", "a.", "+-", "a@", "'", "1,", "https://", "a'b-"])
def test_a_line_of_a_megabyte_is_split_in_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    started = time.process_time()
    words = split_words(text, "fr")
    assert "".join(words) == text
    assert time.process_time() - started < 10


def test_words_between_spaces() -> None:
    assert split_on_spaces(" a  b\tc \r") == ["a", "b", "c"]
    assert split_on_spaces("") == split_on_spaces(" \t") == []
    # As in the Kyoto gold alignments: what is white space only in Unicode belongs to the words.
    assert split_on_spaces("山 \u3000 10\u00a0000 \u2028") == [
        "山",
        "\u3000",
        "10\u00a0000",
        "\u2028",
    ]
