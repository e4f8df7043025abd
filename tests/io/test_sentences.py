"""Sentence splitting on sentences of many languages and on the traps in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.io.segmentation import split_sentences


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("en", ["Mr. Smith paid $3.50 to J. Doe.", "He left!", "Did she?", '"Yes," he said.']),
        ("en", ["See fig. 3 for it.", "I said no.", "It is 5 p.m. now."]),
        ("en", ["He lives in the U.S. Army base.", "Wait… what?", "(It was late.)", "So?!", "Yes"]),
        (
            "de",
            ["Am 3. Oktober kam Ludwig XIV. nach Bonn.", "Er war 1990 da.", "Das gilt z.B. hier."],
        ),
        ("de", ["„Komm!“ sagte er.", "1990 war gut.", "Im Jahr 1991.", "Danach nicht."]),
        ("de", ["Er kam z. B. gestern.", "Das war u. U. 44 v. Chr. so.", "Ja."]),
        ("de_AT", ["Am 3. Oktober.", "Ja."]),
        ("deu", ["Am 3. Oktober.", "Ja."]),
        ("en", ["It was 5.", "Then 6."]),
        ("es", ["¿Dónde está la Sra. López?", "¡Aquí!", "No sé."]),
        ("fr", ["M. Dupont est là.", "« Bonjour ! » dit-il.", "Fin."]),
        ("ru", ["Он жил на ул. Ленина.", "Потом уехал."]),
        ("tr", ["Dr. Kaya geldi.", "İyi mi?"]),
        ("hi", ["यह ठीक है।", "क्या?", "हाँ।"]),
        ("ar", ["أين الكتاب؟", "هنا."]),
        ("ur", ["یہ کتاب ہے۔", "وہ گھر ہے۔"]),
        ("he", ["הוא בא.", "היא הלכה."]),
        ("ko", ["그는 갔다.", "나는 왔다."]),
    ],
)
def test_sentences_between_spaces(language: str, sentences: list[str]) -> None:
    assert split_sentences("  " + " ".join(sentences) + "\n", language) == sentences


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("zh", ["他来了。", "真的吗？！", "是的……好吧。"]),
        ("ja", ["彼は「行く。」と言った。", "（本当です。）", "「はい。」", "「いいえ。」"]),
        ("zh", ["版本3.5发布了。", "很好！"]),
    ],
)
def test_sentences_without_spaces(language: str, sentences: list[str]) -> None:
    assert split_sentences("".join(sentences), language) == sentences


def test_a_dot_before_a_small_letter_ends_nothing() -> None:
    assert split_sentences("all of this. is one", "en") == ["all of this. is one"]


@pytest.mark.parametrize("text", ["", "  \n", "\u3000"])
def test_nothing(text: str) -> None:
    assert split_sentences(text, "en") == []


@given(st.text(alphabet="aZ é字。！.!?…\"'»「」() 1\n।", max_size=60))
def test_no_character_is_lost(text: str) -> None:
    sentences = split_sentences(text, "de")
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() and sentence for sentence in sentences)


def test_long_text_takes_linear_time() -> None:
    text = "Ein Satz. " * 20_000 + "Ha" + "." * 200_000 + "x" + "!)" * 100_000 + "x" * 200_000
    assert len(split_sentences(text, "de")) == 20_001
