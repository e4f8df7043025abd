from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from calque.errors import InputError
from calque.io.labeled import find_reviews, read_reviews

DATA = Path(__file__).parents[1] / "data"


def test_stars_become_classes() -> None:
    dropped = Counter[str]()
    reviews = read_reviews(DATA / "reviews" / "en" / "books" / "train.review", dropped)
    assert [(review.texts[0], review.label) for review in reviews] == [
        ("A joy I read it twice & lent it to a friend.", "good"),
        ("Dull I gave up after ten pages.", "bad"),
        ("Well written.", "good"),
    ]
    assert dropped == {"reviews_of_three_stars": 1, "reviews_without_text": 1}


def test_files_by_language() -> None:
    files = find_reviews(DATA)
    assert files is not None
    assert sorted(files.train) == ["en"] and files.tested == ["en", "ja"]


def test_control_characters_are_spaces(tmp_path: Path) -> None:
    path = tmp_path / "train.review"
    path.write_bytes(b"<items><item><rating>5</rating><text>a\x0bb</text></item></items>")
    assert read_reviews(path)[0].texts == ("a b",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<items><item><rating>5</rating>\n<text>a</items>", "line 2: not XML"),
        ("<items><item><rating>many</rating><text>a</text></item></items>", "a rating 'many'"),
        ("<items><item><text>a</text></item></items>", "a rating None"),
        ("<items></items>", "holds no review"),
        ("", "not XML"),
    ],
)
def test_what_is_no_review(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "train.review"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        read_reviews(path)
