"""Cleaning: every rule by example, properties, counts, and `clean_bitext`."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io import cleaning
from calque.io.bitext import read_bitext
from calque.io.cleaning import (
    CleaningReport,
    CleaningRules,
    clean_bitext,
    clean_pairs,
    clean_sentences,
    normalize_text,
)
from calque.types import SentencePair

DATA = Path(__file__).parent.parent / "data"
LAX = CleaningRules(
    max_chars=None,
    max_ratio=None,
    max_nonletters=None,
    drop_identical=False,
    drop_duplicates=False,
    normalize=False,
)


def clean_tuples(pairs, rules, languages=None):
    """Clean (source, target) tuples; return the kept ones and the reasons of the others."""
    report = CleaningReport()
    kept = list(clean_pairs([SentencePair(*pair) for pair in pairs], rules, report, languages))
    return [(pair.src, pair.tgt) for pair in kept], dict(report.dropped)


@pytest.mark.parametrize("language", ["de", "ja"])
def test_real_pairs_are_kept(language):
    pairs = list(read_bitext(DATA / f"en-{language}.tsv"))
    report = CleaningReport()
    assert list(clean_pairs(pairs, CleaningRules(), report, ("en", language))) == pairs
    assert report.n_read == report.n_kept == len(pairs)
    assert report.n_normalized == 0


def test_tags_and_order_are_kept(monkeypatch):
    monkeypatch.setattr(cleaning, "BLOCK_ITEMS", 3)
    pairs = [SentencePair(f"sentence {i:03}", f"Satz  {i:03}", f"tag{i}") for i in range(20)]
    dropped = [SentencePair("normalized ", "")]
    expected = [SentencePair(pair.src, pair.tgt.replace("  ", " "), pair.tag) for pair in pairs]
    report = CleaningReport()
    assert list(clean_pairs(pairs + dropped, CleaningRules(), report)) == expected
    assert report.n_normalized == 20


def test_empty_sides_are_always_dropped():
    assert clean_tuples([("", "x"), ("x", ""), ("x", "y")], LAX) == ([("x", "y")], {"empty": 2})
    assert clean_tuples([(" \t", "x")], replace(LAX, normalize=True)) == ([], {"empty": 1})


@pytest.mark.parametrize(
    ("rules", "kept", "reasons"),
    [
        ({"min_chars": 3}, ["abc", "a b c d"], {"too short": 1}),
        ({"max_chars": 3}, ["ab", "abc"], {"too long": 1}),
        ({"min_words": 2}, ["a b c d"], {"too short": 2}),
        ({"max_words": 3}, ["ab", "abc"], {"too long": 1}),
        ({"min_words": 2, "max_words": 3}, [], {"too short": 2, "too long": 1}),
    ],
)
def test_length_limits_are_inclusive(rules, kept, reasons):
    rules = replace(LAX, **rules)
    report = CleaningReport()
    assert list(clean_sentences(["ab", "abc", "a b c d"], rules, report)) == kept
    assert report.dropped == reasons


def test_either_side_can_be_too_long():
    rules = replace(LAX, max_chars=3)
    assert clean_tuples([("abcd", "a"), ("a", "abcd")], rules) == ([], {"too long": 2})


def test_the_length_ratio_has_some_slack():
    rules = replace(LAX, max_ratio=2)
    kept, reasons = clean_tuples(
        [("a" * 10, "b" * 30), ("a" * 30, "b" * 10), ("a" * 10, "b" * 31)], rules
    )
    assert [len(tgt) for _, tgt in kept] == [30, 10]
    assert reasons == {"length ratio": 1}


@pytest.mark.parametrize("factor", [2, 3.5])
def test_the_length_ratio_of_japanese(factor):
    rules = replace(LAX, max_ratio=factor)
    pairs = [(pair.src, pair.tgt) for pair in read_bitext(DATA / "en-ja.tsv")]
    assert clean_tuples(pairs, rules)[0] == pairs
    assert clean_tuples([("Wolkenkratzer " * 10, "摩天楼")], rules) == ([], {"length ratio": 1})


def test_identical_sides_are_dropped():
    rules = replace(LAX, drop_identical=True, normalize=True)
    assert clean_tuples([("same", "same "), ("same", "Same")], rules) == (
        [("same", "Same")],
        {"identical sides": 1},
    )


def test_duplicates_across_blocks(monkeypatch):
    monkeypatch.setattr(cleaning, "BLOCK_ITEMS", 2)
    rules = replace(LAX, drop_duplicates=True)
    pairs = [("a", "b"), ("a", "b"), ("ab", ""), ("b", "a"), ("a", "c"), ("a", "b"), ("b", "a")]
    kept, reasons = clean_tuples(pairs, rules)
    assert kept == [("a", "b"), ("b", "a"), ("a", "c")]
    assert reasons == {"duplicate": 3, "empty": 1}


def test_dropped_pairs_do_not_count_as_seen():
    rules = replace(LAX, drop_duplicates=True, max_chars=1)
    assert clean_tuples([("ab", "c"), ("ab", "c")], rules) == ([], {"too long": 2})


@given(st.lists(st.lists(st.integers(-20, 20), max_size=30), max_size=30))
def test_the_hash_set_is_a_set(blocks):
    seen, hashes = set(), cleaning._HashSet()
    for block in blocks:
        marks = hashes.add(np.array(block, dtype=np.int64))
        expected = [not (value in seen or seen.add(value)) for value in block]
        assert marks.tolist() == expected
    assert sum(map(len, hashes.runs)) == len(seen)


def test_the_hash_set_is_small():
    rng, hashes = np.random.default_rng(0), cleaning._HashSet()
    for _ in range(100):
        hashes.add(rng.integers(-(2**63), 2**63 - 1, 1000))
    assert sum(run.nbytes for run in hashes.runs) == 800_000
    assert len(hashes.runs) <= 4


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("10 + 5 = 15", False),
        ("<%s>: %d%%", False),
        ("It's 3:30.", True),
        ("あいう。。。", True),
    ],
)
def test_text_must_be_mostly_letters(text, is_kept):
    rules = replace(LAX, max_nonletters=0.6)
    report = CleaningReport()
    assert list(clean_sentences([text], rules, report)) == [text] * is_kept
    assert report.dropped["non-letters"] == (not is_kept)


@pytest.mark.parametrize("text", ["नमस्ते", "می\u200cخواهم", "two words", "e\u0301"])
def test_marks_joiners_and_spaces_count_as_letters(text):
    rules = replace(LAX, max_nonletters=0)
    assert list(clean_sentences([text, text + "!"], rules, CleaningReport())) == [text]


@pytest.mark.parametrize(
    ("language", "good", "bad"),
    [
        ("ru", "Привет, Tom", "Privet, Tom"),
        ("ja", "東京", "Tōkyō"),
        ("ja", "ラーメン", "ramen"),
        ("zh", "你好", "ni hao"),
        ("zh-TW", "𠀀", "ㄅㄆㄇ"),
        ("ko", "안녕", "你好"),
        ("de", "Übung", "упражнение"),
        ("vi", "ổ", "…"),
        ("fa", "سلام", "salam"),
        ("el", "Ἀθῆναι", "Athinai"),
        ("hi", "नमस्ते", "namaste"),
        ("en", "a", "😀 42"),
    ],
)
def test_scripts_are_checked(language, good, bad):
    report = CleaningReport()
    assert list(clean_sentences([good, bad], LAX, report, language)) == [good]
    assert report.dropped == {"wrong script": 1}
    assert clean_tuples([(good, "x"), (bad, "x")], LAX, (language, "qq"))[0] == [(good, "x")]
    assert clean_tuples([("x", good), ("x", bad)], LAX, ("qq", language))[0] == [("x", good)]


def test_scripts_of_unknown_languages_are_not_checked():
    pairs = [("1", "2"), ("привет", "你好")]
    assert clean_tuples(pairs, LAX, ("sr", "qq"))[0] == pairs
    assert clean_tuples(pairs, replace(LAX, check_scripts=False), ("en", "de"))[0] == pairs
    assert clean_tuples(pairs, LAX)[0] == pairs


def test_script_ranges_agree_with_character_names():
    names = {"Kana": r"HIRAGANA|KATAKANA", "Han": "IDEOGRAPH", "Burmese": "MYANMAR"}
    for script, (ranges, _) in cleaning.SCRIPTS.items():
        for span in ranges.split():
            first, last = (int(code, 16) for code in span.split("-"))
            named = [unicodedata.name(chr(code), "") for code in range(first, last + 1)]
            own = [name for name in named if re.search(names.get(script, script.upper()), name)]
            assert len(own) > 0.85 * len([name for name in named if name]), (script, span)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  a\t b\u00a0\u3000c\n", "a b c"),
        ("e\u0301", "é"),
        ("e\u200e\u0301", "é"),
        ("a\x00b\x07\x9fc\ufeff", "abc"),
        ("so\u00adft", "soft"),
        ("a \x07 b", "a b"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("a\u2028b\x85c", "a b c"),
        ("\ufb01", "\ufb01"),
        ("", ""),
    ],
)
def test_text_is_normalized(text, expected):
    assert normalize_text(text) == expected


@given(st.text())
def test_normalizing_twice_changes_nothing(text):
    once = normalize_text(text)
    assert normalize_text(once) == once
    assert unicodedata.is_normalized("NFC", once)
    assert " ".join(once.split()) == once


SIDES = st.text("ab Zé1!я漢\t\u0301", max_size=12) | st.text(max_size=12)


@given(
    pairs=st.lists(st.builds(SentencePair, SIDES, SIDES, st.none() | st.just("tag"))),
    rules=st.builds(
        CleaningRules,
        max_chars=st.none() | st.integers(1, 12),
        max_words=st.none() | st.integers(1, 3),
        max_ratio=st.none() | st.floats(1, 3),
        max_nonletters=st.none() | st.floats(0, 1),
        drop_identical=st.booleans(),
        drop_duplicates=st.booleans(),
        normalize=st.booleans(),
    ),
    languages=st.none() | st.just(("en", "ru")),
)
def test_kept_pairs_and_counts(pairs, rules, languages):
    report = CleaningReport()
    kept = list(clean_pairs(pairs, rules, report, languages))
    normalize = normalize_text if rules.normalize else str
    normalized = iter(
        [SentencePair(normalize(pair.src), normalize(pair.tgt), pair.tag) for pair in pairs]
    )
    assert all(pair in normalized for pair in kept)  # in order: `in` moves the iterator on
    assert report.n_read == len(pairs)
    assert report.n_kept == len(kept) == report.n_read - report.dropped.total()
    assert list(clean_pairs(kept, rules, CleaningReport(), languages)) == kept
    if rules.drop_duplicates:
        assert len({(pair.src, pair.tgt) for pair in kept}) == len(kept)


def test_long_lines_end_a_block(monkeypatch):
    monkeypatch.setattr(cleaning, "BLOCK_CHARS", 10)
    blocks = list(cleaning._blocks(["aaaa", "bbbbbb", "c" * 50, "d", "e"], len))
    assert blocks == [["aaaa", "bbbbbb"], ["c" * 50], ["d", "e"]]


def test_report():
    texts = ["fine words", "fine words", "x" * 5000, "y" * 5000, "12345", "", " "] + ["1"] * 5
    report = CleaningReport()
    assert list(clean_sentences(texts, CleaningRules(), report)) == ["fine words"]
    assert report.dropped == {"duplicate": 1, "too long": 2, "non-letters": 6, "empty": 2}
    assert [len(texts) for texts in report.examples.values()] == [2, 2, 3, 1]
    assert report.examples["too long"][0] == ("x" * 200,)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert report.to_dict()["dropped"]["too long"] == 2


def test_one_report_for_several_files():
    report = CleaningReport()
    for text in ("one text", "another", ""):
        list(clean_sentences([text], CleaningRules(), report))
    assert (report.n_read, report.n_kept) == (3, 2)


def test_contradictory_rules():
    with pytest.raises(InputError, match="min_chars is 10, but max_chars is 5"):
        CleaningRules(min_chars=10, max_chars=5)


def test_clean_bitext(tmp_path):
    (tmp_path / "en-de.tsv").write_text(
        "Good  morning!\tGuten Morgen!\ttag\tmore\nTom\tTom\nIt rains.\tИдёт дождь.\n", "utf-8"
    )
    calls = []
    result = clean_bitext(
        tmp_path / "en-de.tsv",
        output=tmp_path / "out.tsv",
        report=tmp_path / "report.json",
        progress=lambda *call: calls.append(call),
    )
    assert (tmp_path / "out.tsv").read_text("utf-8") == "Good morning!\tGuten Morgen!\ttag\n"
    assert (result.n_read, result.n_kept, result.n_normalized) == (3, 1, 1)
    assert result.dropped == {"identical sides": 1, "wrong script": 1}
    assert result.languages == ("en", "de")
    assert (result.n_extra_columns, result.first_extra_columns, result.n_bad) == (1, 1, 0)
    assert json.loads((tmp_path / "report.json").read_text("utf-8"))["dropped"] == result.dropped
    assert calls == [("cleaning", 3, None)]


def test_clean_bitext_of_two_files(tmp_path):
    (tmp_path / "a").write_text("Hallo!\nJa.\n")
    (tmp_path / "b").write_bytes(b"Hello!\n\xff\n")
    with pytest.raises(InputError, match="invalid UTF-8"):
        clean_bitext(tmp_path / "a", tmp_path / "b", output=tmp_path / "out")
    outputs = [tmp_path / "out.de", tmp_path / "out.en"]
    result = clean_bitext(
        tmp_path / "a",
        tmp_path / "b",
        output=outputs,
        languages="de-en",
        skip_bad=tmp_path / "bad",
        rules=CleaningRules(max_chars=10),
    )
    assert [path.read_text() for path in outputs] == ["Hallo!\n", "Hello!\n"]
    assert (result.n_bad, result.outputs) == (1, tuple(map(str, outputs)))
    assert (tmp_path / "bad").read_text().startswith("2\tinvalid UTF-8")
