"""Pieces as text: what tokenizers cut up comes together again, whatever their kind."""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calque.errors import InputError
from calque.tokens.vocabularies import Vocabulary, is_whole, normalize_text

TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_tokenizers.py"))
SENTENCES = ["The cat sleeps.", "Die Katze schläft, nicht wahr?", "Кошка спит", "猫が眠る 😀"]
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=20)


def join(vocabulary: Vocabulary, ids: list[int]) -> str:
    return "".join(vocabulary.texts[number] or "" for number in ids)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


@cache
def byte_level_toy() -> Any:
    return TOYS["byte_level"](SENTENCES)


@given(TEXT)
def test_byte_level_pieces_make_the_text_again(text: str) -> None:
    tokenizer = byte_level_toy()
    vocabulary = Vocabulary.of(tokenizer)
    joined = join(vocabulary, encode(tokenizer, text))
    found = joined.encode("utf-8", "surrogateescape").decode()
    assert found == (text if not text or text[0].isspace() else " " + text)


def test_byte_level_pieces_are_what_the_decoder_says() -> None:
    tokenizer = byte_level_toy()
    vocabulary = Vocabulary.of(tokenizer)
    whole = [k for k, text in enumerate(vocabulary.texts) if text is not None and is_whole(text)]
    half = [k for k, text in enumerate(vocabulary.texts) if text and not is_whole(text)]
    assert len(whole) > 150 and len(half) > 120
    decode = tokenizer.backend_tokenizer.decoder.decode
    for number in whole:
        assert vocabulary.texts[number] == decode([vocabulary.tokens[number]])
    for number in half:
        assert "\N{REPLACEMENT CHARACTER}" in decode([vocabulary.tokens[number]])
    assert len({vocabulary.texts[k] for k in (*whole, *half)}) == len(whole) + len(half)


def test_sentence_pieces_make_the_text_again(
    tiny_tokenizer: PreTrainedTokenizerFast, demo_rows: list[tuple[str, str, str]]
) -> None:
    vocabulary = Vocabulary.of(tiny_tokenizer)
    normalize = tiny_tokenizer.backend_tokenizer.normalizer.normalize_str
    for _, english, sentence in demo_rows[:60]:
        for text in (english, sentence):
            assert join(vocabulary, encode(tiny_tokenizer, text)) == " " + normalize(text)


def test_word_pieces_make_the_words_again() -> None:
    tokenizer = TOYS["word_piece"](["un", "##believ", "##able", "cat", "##s"], lowercase=False)
    vocabulary = Vocabulary.of(tokenizer)
    assert join(vocabulary, encode(tokenizer, "unbelievable cats")) == " unbelievable cats"


def test_roles_and_special_tokens() -> None:
    bert = Vocabulary.of(TOYS["word_piece"](["cat"]))
    assert bert.roles == {
        "cls": 2, "sep": 3, "pad": 0, "unk": 1, "mask": 4, "bos": 2, "eos": 3
    }  # fmt: skip
    assert bert.texts == [None] * 5 + [" cat"]
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        bos_token="[UNK]",
    )
    assert Vocabulary.of(plain).roles == {"cls": 0, "bos": 0}


def test_marks_and_ideographs_are_cut_off_by_bert() -> None:
    pieces = [",", "##,", "中", "か", "a", "##a", "1", "€", "(", "cat"]
    vocabulary = Vocabulary.of(TOYS["word_piece"](pieces))
    assert {vocabulary.tokens[number] for number in vocabulary.lone} == {",", "中", "("}
    # The tokenizer itself agrees.
    tokens = TOYS["word_piece"](pieces).tokenize("a,a中a(")
    assert tokens == ["a", ",", "a", "中", "a", "("]
    assert not Vocabulary.of(TOYS["sentence_piece"](["▁,", ","])).lone


def test_added_words_have_no_place_of_their_own() -> None:
    tokenizer = TOYS["sentence_piece"](["▁cat"])
    tokenizer.add_tokens(["quokka"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<de>"]})
    vocabulary = Vocabulary.of(tokenizer)
    number = tokenizer.convert_tokens_to_ids("quokka")
    assert vocabulary.texts[number] == "quokka"
    assert vocabulary.lone == {number}
    assert vocabulary.texts[tokenizer.convert_tokens_to_ids("<de>")] is None


def test_ids_without_a_token() -> None:
    vocabulary = {"[UNK]": 0, "cat": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")),
        unk_token="[UNK]",
    )
    found = Vocabulary.of(tokenizer)
    assert found.tokens == ["[UNK]", "", "", "cat"]
    assert found.texts == [None, None, None, " cat"]


def test_bytes_that_stand_in_for_unknown_characters() -> None:
    vocabulary = Vocabulary.of(TOYS["sentence_piece"](["<0xE4>", "<0x41>", "A", "▁"]))
    by_token = dict(zip(vocabulary.tokens, vocabulary.texts, strict=True))
    assert by_token["<0xE4>"] == "\udce4"
    assert by_token["<0x41>"] is None
    assert (by_token["A"], by_token["▁"]) == ("A", " ")


def test_bytes_are_characters_that_no_other_piece_is() -> None:
    """Llama's vocabulary has the end of a line as a byte alone."""
    vocabulary = Vocabulary.of(TOYS["sentence_piece"](["<0x0A>", "<0x41>", "<0x20>", "▁", "▁A"]))
    by_token = dict(zip(vocabulary.tokens, vocabulary.texts, strict=True))
    assert (by_token["<0x0A>"], by_token["<0x41>"], by_token["<0x20>"]) == ("\n", "A", None)


def test_a_kind_without_word_starts_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    with pytest.raises(InputError, match=r"a WordLevel vocabulary .* \(use WordPiece, Sentence"):
        Vocabulary.of(wrapped)


@given(TEXT)
def test_normal_forms_stay(text: str) -> None:
    once = normalize_text(text)
    assert normalize_text(" " + text.lstrip(" ")).startswith(" ")
    if text.isascii():
        assert normalize_text(once) == once


def test_normal_forms() -> None:
    assert normalize_text("") == ""
    assert normalize_text(" Katze") == " katze"
    assert normalize_text("Ａﬁ") == "afi"
    # An acute accent alone is a space and a combining one to Unicode: not the start of a word.
    assert normalize_text("´") == "´"
    assert normalize_text(" ДА") == " да"
