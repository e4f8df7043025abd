"""Labeled texts and product reviews."""

from __future__ import annotations

import lzma
from collections import Counter
from pathlib import Path

import pytest

from calque.errors import InputError
from calque.io.labeled import (
    LabeledText,
    find_reviews,
    read_labeled_pairs,
    read_labeled_texts,
    read_reviews,
)

DATA = Path(__file__).parents[1] / "data" / "xtreme"


def test_xnli() -> None:
    pairs = read_labeled_pairs(DATA / "xnli" / "dev-de.tsv")
    assert len(pairs) == 90
    assert pairs[1].texts == ("und er hat gesagt, Mama ich bin daheim.", "Er sagte kein Wort.")
    assert pairs[1].label == "contradiction"


def test_translated_and_numbered_columns(tmp_path: Path) -> None:
    path = tmp_path / "en-de-translated.tsv"
    path.write_text("a\tb\tx\ty\tcontradictory\n", encoding="utf-8")
    assert read_labeled_pairs(path) == [LabeledText(("x", "y"), "contradiction", ("a", "b"))]
    path.write_text("id\tsentence1\tsentence2\tlabel\n1\tx\ty\t0\n", encoding="utf-8")
    assert read_labeled_pairs(path) == [LabeledText(("x", "y"), "0")]


@pytest.mark.parametrize("line", ["a\tb", "a\t\t1", "a", "a\tb\tc\td\te\tf"])
def test_invalid_lines(tmp_path: Path, line: str) -> None:
    path = tmp_path / "dev-en.tsv"
    path.write_text(f"x\ty\t0\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: the line does not have two texts and a label"):
        read_labeled_pairs(path)


def test_texts(tmp_path: Path) -> None:
    path = tmp_path / "dev-en.tsv"
    path.write_text("fine\tgood\nno\tway\tbad\n", encoding="utf-8")
    assert read_labeled_texts(path) == [
        LabeledText(("fine",), "good"),
        LabeledText(("no\tway",), "bad"),
    ]
    path.write_text("fine\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 1"):
        read_labeled_texts(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="the file has no examples"):
        read_labeled_texts(path)


def test_ratings_become_labels() -> None:
    dropped = Counter[str]()
    reviews = read_reviews(DATA.parent / "reviews" / "en" / "books" / "train.review", dropped)
    assert [(review.texts[0], review.label) for review in reviews] == [
        ("A joy I read it twice & lent it to a friend.", "good"),
        ("Dull I gave up after ten pages.", "bad"),
        ("Well written.", "good"),
    ]
    assert dropped == {"reviews_of_three_stars": 1, "reviews_without_text": 1}


def test_files_by_language() -> None:
    files = find_reviews(DATA.parent)
    assert files is not None
    assert sorted(files.train) == ["en"] and files.test_languages == ["en", "ja"]


def test_control_characters_are_spaces(tmp_path: Path) -> None:
    path = tmp_path / "train.review"
    path.write_bytes(b"<items><item><rating>5</rating><text>a\x0bb</text></item></items>")
    assert read_reviews(path)[0].texts == ("a b",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<items><item><rating>5</rating>\n<text>a</items>", "line 2: this is not XML"),
        (
            "<items><item><rating>many</rating><text>a</text></item></items>",
            "the rating 'many'",
        ),
        ("<items><item><text>a</text></item></items>", "the rating None is not a number"),
        *(
            (
                f"<items><item><rating>{rating}</rating><text>a</text></item></items>",
                f"the rating '{rating}' is not a number of stars",
            )
            for rating in ("nan", "inf", "1e999", "-1", "6")
        ),
        (
            '<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]>'
            "<items><item><rating>5</rating><text>&c;</text></item></items>",
            "document type declaration",
        ),
        (
            "<items><item><rating>5</rating><text>&b;</text></item></items>",
            "this is not XML: undefined entity",
        ),
        ('<?xml version="1.0" encoding="nope-8"?><items/>', "unknown encoding: nope-8"),
        ('<?xml version="1.0" encoding="shift_jis"?><items/>', "multi-byte encodings"),
        ("<a>" * 50_000, "this is not XML"),
        (
            f"<items><item><rating>5</rating><text>{'a' * 1_000_001}</text></item></items>",
            "a review is longer than 1,000,000 characters",
        ),
        ("<items></items>", "the file has no reviews"),
        ("", "this is not XML"),
    ],
)
def test_invalid_reviews(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "train.review"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        read_reviews(path)


@pytest.mark.parametrize("start", ["<items><item><text>", "<!--"])
def test_a_review_that_does_not_end_is_not_read_to_the_end(tmp_path: Path, start: str) -> None:
    path = tmp_path / "train.review.xz"
    with lzma.open(path, "wb", preset=0) as stream:
        stream.write(start.encode())
        for _ in range(20):
            stream.write(b"a" * (1 << 20))
    with pytest.raises(InputError, match="no <item> ends within 17,"):
        read_reviews(path)
