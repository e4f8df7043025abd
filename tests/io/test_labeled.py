from __future__ import annotations

from pathlib import Path

import pytest

from calque.errors import InputError
from calque.io.labeled import LabeledText, read_labeled_pairs, read_labeled_texts

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
def test_a_line_that_is_no_pair(tmp_path: Path, line: str) -> None:
    path = tmp_path / "dev-en.tsv"
    path.write_text(f"x\ty\t0\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 2: not two texts and a class"):
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
    with pytest.raises(InputError, match="holds no example"):
        read_labeled_texts(path)
