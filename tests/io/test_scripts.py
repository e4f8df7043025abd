"""Scripts by the names of letters, against the Unicode database of another library."""

from __future__ import annotations

import unicodedata

import pytest

from calque.io.segmentation import COMMON_SCRIPT, find_script

SCRIPTS = [
    "Latin",
    "Cyrillic",
    "Greek",
    "Arabic",
    "Hebrew",
    "Devanagari",
    "Bengali",
    "Tamil",
    "Telugu",
    "Thai",
    "Lao",
    "Khmer",
    "Myanmar",
    "Han",
    "Hiragana",
    "Katakana",
    "Hangul",
    "Georgian",
    "Armenian",
    "Ethiopic",
    "Gurmukhi",
    "Gujarati",
    "Oriya",
    "Kannada",
    "Malayalam",
    "Sinhala",
    "Tibetan",
    "Mongolian",
    "Cherokee",
    "Canadian_Aboriginal",
    "Ol_Chiki",
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_letters_have_the_script_that_unicode_says(script: str) -> None:
    regex = pytest.importorskip("regex")
    is_in = regex.compile(rf"\p{{Script={script}}}").match
    letters = [
        chr(code)
        for code in range(0x10000)
        if unicodedata.category(chr(code))[0] == "L" and is_in(chr(code))
    ]
    wrong = [letter for letter in letters if find_script(letter) != script]
    assert len(letters) > 30
    assert len(wrong) <= 0.01 * len(letters)  # some modifiers are letters of no script by name


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("", COMMON_SCRIPT),
        ("1990", COMMON_SCRIPT),
        (" , ", COMMON_SCRIPT),
        ("\u0301", COMMON_SCRIPT),
        ("e\u0301", "Latin"),
        ("ｆｕｌｌ", "Latin"),
        ("ª", "Latin"),
        ("ｶﾅ", "Katakana"),
        ("ー", "Katakana"),
        ("々", "Han"),
        ("ा", "Devanagari"),
        ("(да", "Cyrillic"),
        ("한국", "Hangul"),
        ("\ue000", COMMON_SCRIPT),
        ("\U00020000", "Han"),
    ],
)
def test_the_first_letter_decides(text: str, script: str) -> None:
    assert find_script(text) == script
