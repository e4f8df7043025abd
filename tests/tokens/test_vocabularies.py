"""Vocabularies of all kinds as text; matching and retokenization between two of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.toy_tokenizers import KINDS, byte_level, make_tokenizer, sentence_piece, word_piece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calque.errors import InputError
from calque.tokens.ragged import Ragged
from calque.tokens.tokenizer import encode_sentences, wrap_tokenizer
from calque.tokens.vocabularies import (
    Retokenization,
    Retokenizer,
    Vocabulary,
    has_whole_characters,
    match_vocabularies,
    normalize_piece,
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
SENTENCES = ["The cat sleeps.", "Die Katze schläft, nicht wahr?", "Кошка спит", "猫が眠る 😀"]
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=20)


def join(vocabulary: Vocabulary, ids: list[int]) -> str:
    return "".join(vocabulary.texts[number] or "" for number in ids)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


@cache
def byte_level_toy() -> Any:
    return byte_level(SENTENCES)


@given(TEXT)
def test_byte_level_pieces_restore_the_text(text: str) -> None:
    tokenizer = byte_level_toy()
    vocabulary = Vocabulary.of(tokenizer)
    joined = join(vocabulary, encode(tokenizer, text))
    found = joined.encode("utf-8", "surrogateescape").decode()
    assert found == (text if not text or text[0].isspace() else " " + text)


def test_byte_level_pieces_agree_with_the_decoder() -> None:
    tokenizer = byte_level_toy()
    vocabulary = Vocabulary.of(tokenizer)
    whole = [
        k
        for k, text in enumerate(vocabulary.texts)
        if text is not None and has_whole_characters(text)
    ]
    half = [k for k, text in enumerate(vocabulary.texts) if text and not has_whole_characters(text)]
    assert len(whole) > 150 and len(half) > 120
    decode = tokenizer.backend_tokenizer.decoder.decode
    for number in whole:
        assert vocabulary.texts[number] == decode([vocabulary.tokens[number]])
    for number in half:
        assert "\N{REPLACEMENT CHARACTER}" in decode([vocabulary.tokens[number]])
    assert len({vocabulary.texts[k] for k in (*whole, *half)}) == len(whole) + len(half)


def test_sentence_pieces_restore_the_text(
    tiny_tokenizer: PreTrainedTokenizerFast, demo_rows: list[tuple[str, str, str]]
) -> None:
    vocabulary = Vocabulary.of(tiny_tokenizer)
    normalize = tiny_tokenizer.backend_tokenizer.normalizer.normalize_str
    for _, english, sentence in demo_rows[:60]:
        for text in (english, sentence):
            assert join(vocabulary, encode(tiny_tokenizer, text)) == " " + normalize(text)


def test_word_pieces_restore_the_words() -> None:
    tokenizer = word_piece(["un", "##believ", "##able", "cat", "##s"], lowercase=False)
    vocabulary = Vocabulary.of(tokenizer)
    assert join(vocabulary, encode(tokenizer, "unbelievable cats")) == " unbelievable cats"


def test_roles_and_special_tokens() -> None:
    bert = Vocabulary.of(word_piece(["cat"]))
    assert bert.roles == {
        "cls": 2, "sep": 3, "pad": 0, "unk": 1, "mask": 4, "bos": 2, "eos": 3
    }  # fmt: skip
    assert bert.texts == [None] * 5 + [" cat"]
    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        bos_token="[UNK]",
    )
    assert Vocabulary.of(plain).roles == {"cls": 0, "bos": 0}


def test_bert_splits_off_punctuation_and_ideographs() -> None:
    pieces = [",", "##,", "中", "か", "a", "##a", "1", "€", "(", "cat"]
    vocabulary = Vocabulary.of(word_piece(pieces))
    assert {vocabulary.tokens[number] for number in vocabulary.standalone} == {",", "中", "("}
    # The tokenizer agrees.
    tokens = word_piece(pieces).tokenize("a,a中a(")
    assert tokens == ["a", ",", "a", "中", "a", "("]
    assert not Vocabulary.of(sentence_piece(["▁,", ","])).standalone


def test_added_words_are_standalone() -> None:
    tokenizer = sentence_piece(["▁cat"])
    tokenizer.add_tokens(["quokka"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<de>"]})
    vocabulary = Vocabulary.of(tokenizer)
    number = tokenizer.convert_tokens_to_ids("quokka")
    assert vocabulary.texts[number] == "quokka"
    assert vocabulary.standalone == {number}
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


def test_byte_pieces() -> None:
    vocabulary = Vocabulary.of(sentence_piece(["<0xE4>", "<0x41>", "A", "▁"]))
    by_token = dict(zip(vocabulary.tokens, vocabulary.texts, strict=True))
    assert by_token["<0xE4>"] == "\udce4"
    assert by_token["<0x41>"] is None
    assert (by_token["A"], by_token["▁"]) == ("A", " ")


def test_byte_pieces_of_characters_that_are_no_piece() -> None:
    """Llama's vocabulary has the line feed only as a byte."""
    vocabulary = Vocabulary.of(sentence_piece(["<0x0A>", "<0x41>", "<0x20>", "▁", "▁A"]))
    by_token = dict(zip(vocabulary.tokens, vocabulary.texts, strict=True))
    assert (by_token["<0x0A>"], by_token["<0x41>"], by_token["<0x20>"]) == ("\n", "A", None)


def test_an_unknown_kind_raises() -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    with pytest.raises(InputError, match=r"the WordLevel vocabulary .* \(use WordPiece, Sentence"):
        Vocabulary.of(wrapped)


@given(TEXT)
def test_normalization_is_idempotent(text: str) -> None:
    once = normalize_piece(text)
    assert normalize_piece(" " + text.lstrip(" ")).startswith(" ")
    if text.isascii():
        assert normalize_piece(once) == once


def test_normalization_by_hand() -> None:
    assert normalize_piece("") == ""
    assert normalize_piece(" Katze") == " katze"
    assert normalize_piece("Ａﬁ") == "afi"
    # NFKC turns a lone acute accent into a space and a combining accent: not a word start.
    assert normalize_piece("´") == "´"
    assert normalize_piece(" ДА") == " да"


@pytest.fixture(scope="module")
def tokenizers(demo_rows: list[tuple[str, str, str]]) -> dict[str, PreTrainedTokenizerFast]:
    sentences = [row[1] for row in demo_rows]
    sizes = {"sentencepiece": 300, "byte-level": 700, "wordpiece": 600}
    return {kind: make_tokenizer(kind, sentences, size) for kind, size in sizes.items()}


@pytest.fixture
def unigram() -> MakeTokenizer:
    """Build a tokenizer of given pieces, the first of them the most likely."""

    def make(*pieces: str) -> PreTrainedTokenizerFast:
        special = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
        scores = [(piece, -1.0 - 0.01 * k) for k, piece in enumerate(pieces)]
        tokenizer = Tokenizer(models.Unigram([*special, *scores], unk_id=3))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        return wrap_tokenizer(tokenizer)

    return make


def retokenize(
    src: PreTrainedTokenizerFast, tgt: PreTrainedTokenizerFast, *sentences: str
) -> tuple[list[str], list[int], list[str], list[int]]:
    """Return the tokens of both tokenizers and their segments."""
    ids = Ragged.of(encode_sentences(src, sentences))
    again = Retokenizer(src, tgt).retokenize(ids)
    assert again.n_segments > max([*again.src, *again.tgt, -1])
    return (
        src.convert_ids_to_tokens(ids.ids.tolist()),
        again.src.tolist(),
        tgt.convert_ids_to_tokens(again.pieces.ids.tolist()),
        again.tgt.tolist(),
    )


def test_segments_by_hand(unigram: MakeTokenizer) -> None:
    src = unigram("▁un", "believ", "able", "▁cat", "s", "▁a", "▁")
    tgt = unigram("▁un", "be", "liev", "a", "b", "le", "▁cats", "▁a")
    assert retokenize(src, tgt, "a unbelievable cats", "cats a") == (
        ["▁a", "▁un", "believ", "able", "▁cat", "s", "▁cat", "s", "▁a"],
        [0, 1, 2, 3, 4, 4, 5, 5, 6],
        ["▁a", "▁un", "be", "liev", "a", "b", "le", "▁cats", "▁cats", "▁a"],
        [0, 1, 2, 2, 3, 3, 3, 4, 5, 6],
    )


def test_crossing_boundaries_make_one_segment(
    unigram: MakeTokenizer,
) -> None:
    src, tgt = unigram("▁ab", "cd", "▁x"), unigram("▁a", "bc", "d", "▁x")
    pieces = (["▁ab", "cd", "▁x"], [0, 0, 1], ["▁a", "bc", "d", "▁x"], [0, 0, 0, 1])
    assert retokenize(src, tgt, "abcd x") == pieces


def test_a_space_piece_belongs_to_the_following_word(
    unigram: MakeTokenizer,
) -> None:
    src, tgt = unigram("▁a", "cat", "▁"), unigram("▁a", "▁cat")
    assert retokenize(src, tgt, "a cat cat") == (
        ["▁a", "▁", "cat", "▁", "cat"],
        [0, 1, 1, 2, 2],
        ["▁a", "▁cat", "▁cat"],
        [0, 1, 2],
    )


def test_the_bytes_of_a_character_are_one_segment(
    tokenizers: dict[str, PreTrainedTokenizerFast],
    unigram: MakeTokenizer,
) -> None:
    tgt = unigram("▁東", "京", "▁a")
    pieces, segments, others, theirs = retokenize(tokenizers["byte-level"], tgt, "a 東京 a")
    assert others == ["▁a", "▁東", "京", "▁a"]
    assert theirs == [0, 1, 2, 3]
    assert segments == sorted(segments)
    bounds = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(pieces)]
    parts = ["".join(pieces[a:b]) for a, b in pairwise(bounds)]
    decode = tokenizers["byte-level"].backend_tokenizer.decoder.decode
    assert [decode([part]) for part in parts] == ["a", " 東", "京", " a"]
    # In the other direction, the other tokenizer splits inside characters.
    pieces, segments, others, theirs = retokenize(tgt, tokenizers["byte-level"], "a 東京 a")
    assert (pieces, segments) == (["▁a", "▁東", "京", "▁a"], [0, 1, 2, 3])
    assert set(theirs) == {0, 1, 2, 3} and len(theirs) > 4


def test_special_tokens_in_the_text_are_plain_text(
    tokenizers: dict[str, PreTrainedTokenizerFast],
    unigram: MakeTokenizer,
) -> None:
    src, tgt = unigram("▁a", "<", "mask", ">"), tokenizers["byte-level"]
    ids = src.convert_tokens_to_ids(["▁a", "<", "mask", ">", "▁a"])
    again = Retokenizer(src, tgt).retokenize(Ragged.of([ids]))
    assert tgt.mask_token_id not in again.pieces.ids
    assert tgt.decode(again.pieces.ids) == "a<mask> a"
    before = tgt.backend_tokenizer.encode("<mask>", add_special_tokens=False).ids
    assert before == [tgt.mask_token_id]  # the tokenizer itself is unchanged


def test_unknown_pieces_are_not_matched(
    unigram: MakeTokenizer,
) -> None:
    src, tgt = unigram("▁a", "▁b"), unigram("▁a", "▁b", "▁京")
    ids = Ragged.of(encode_sentences(src, ["a 京 b"]))
    again = Retokenizer(src, tgt).retokenize(ids)
    assert again.one_to_one()[again.src][[0, -1]].all()
    assert tgt.convert_tokens_to_ids("▁京") not in again.pieces.ids


def test_invalid_bytes_have_no_partner(
    tokenizers: dict[str, PreTrainedTokenizerFast],
) -> None:
    src = tokenizers["byte-level"]
    half = src.convert_tokens_to_ids("æ")  # the first of three bytes
    fine = encode_sentences(src, ["Tom"])[0].tolist()
    again = Retokenizer(src, tokenizers["sentencepiece"]).retokenize(Ragged.of([[half], fine, []]))
    assert again.pieces.lengths[0] == 0 == again.pieces.lengths[2]
    assert again.pieces.lengths[1] > 0
    assert set(again.src[:1]).isdisjoint(again.tgt)
    assert again.src[-1] == again.tgt[-1]


def test_empty_input_and_identity(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    again = Retokenizer(tokenizers["wordpiece"], tokenizers["byte-level"]).retokenize(Ragged.of([]))
    assert (len(again.pieces.ids), len(again.src), again.n_segments) == (0, 0, 0)
    itself = Retokenization.identity(Ragged.of([[5, 6], [7]]))
    assert itself.one_to_one().all()
    assert itself.src.tolist() == itself.tgt.tolist() == [0, 1, 2]


words = st.text("abcdefghinorstuTBé,.'-", min_size=1, max_size=8)


@pytest.mark.parametrize(("src", "tgt"), [*permutations(("sentencepiece", "byte-level"))])
@settings(max_examples=30)
@given(sentences=st.lists(st.lists(words, min_size=1, max_size=6).map(" ".join), max_size=4))
def test_both_sides_of_a_segment_have_the_same_text(
    src: str, tgt: str, sentences: list[str], tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    """Compare the texts of the pieces, without offsets."""
    ids = Ragged.of(encode_sentences(tokenizers[src], sentences))
    again = Retokenizer(tokenizers[src], tokenizers[tgt]).retokenize(ids)
    spelled = []
    for kind, numbers, segments in (
        (src, ids.ids, again.src),
        (tgt, again.pieces.ids, again.tgt),
    ):
        texts = Vocabulary.of(tokenizers[kind]).texts
        parts = [b""] * again.n_segments
        for number, segment in zip(numbers.tolist(), segments.tolist(), strict=True):
            text = texts[number] or ""
            parts[segment] += text.encode("utf-8", "surrogateescape").replace(b" ", b"")
        spelled.append(parts)
    has_unknown = tokenizers["sentencepiece"].unk_token_id in (
        ids.ids if src == "sentencepiece" else again.pieces.ids
    )
    if not has_unknown:
        assert spelled[0] == spelled[1]
        assert b"".join(spelled[0]) == "".join(sentences).replace(" ", "").encode()
        assert b"" not in spelled[0]


@pytest.mark.parametrize(("src", "tgt"), [*permutations(KINDS, 2)])
def test_matched_pieces_have_the_same_text(
    src: str, tgt: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    mine, theirs = match_vocabularies(tokenizers[src], tokenizers[tgt])
    assert len(mine) == len(theirs) > 100
    assert (np.diff(mine) > 0).all()
    assert len(set(theirs.tolist())) == len(theirs)
    starts = {"sentencepiece": "▁", "byte-level": "Ġ", "wordpiece": "##"}

    def spell(kind: str, number: int) -> tuple[bool, str]:
        token = tokenizers[kind].convert_ids_to_tokens(number)
        marked = token.startswith(starts[kind])
        if kind == "wordpiece":
            return not marked, token.removeprefix("##")
        return marked, token.removeprefix(starts[kind])

    n_alike = n_words = 0
    for number, other in zip(mine.tolist(), theirs.tolist(), strict=True):
        one, two = spell(src, number), spell(tgt, other)
        if one[1].isascii() and one[1].isalnum():
            assert one == two
            n_words += one[0]
        n_alike += one[1] == two[1]
    assert n_alike > 0.9 * len(mine)
    assert n_words > 50


@pytest.mark.parametrize(("src", "tgt"), [*permutations(("sentencepiece", "wordpiece"))])
def test_commas_are_matched_without_space(
    src: str, tgt: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    """BERT's comma is a word of its own; SentencePiece's follows a word without space."""
    one, other = tokenizers[src], tokenizers[tgt]
    mine, theirs = match_vocabularies(one, other)
    comma = one.convert_tokens_to_ids(",")
    assert other.convert_ids_to_tokens(theirs[mine == comma].tolist()) == [","]


def test_punctuation_gets_its_usual_spacing(
    unigram: MakeTokenizer,
) -> None:
    """BERT does not record whether there was a space; the other tokenizer gets `so, (中文).`."""
    bert = word_piece(["so", ",", "##,", "(", "##(", "中", "文", ")", "."])
    tgt = unigram("▁so", ",", "▁(", "中文", ").", "▁")
    mine, _, theirs, _ = retokenize(bert, tgt, "So , (中文) .")
    assert mine == ["so", ",", "(", "中", "文", ")", "."]
    assert theirs == ["▁so", ",", "▁(", "中文", ")."]
    pairs = zip(*match_vocabularies(bert, tgt), strict=True)
    matched = {
        bert.convert_ids_to_tokens(int(a)): tgt.convert_ids_to_tokens(int(b)) for a, b in pairs
    }
    assert matched == {"so": "▁so", ",": ",", "(": "▁("}


def test_unused_continuation_pieces_are_not_matched() -> None:
    """BERT has a `##,` that is never used, because commas are split off."""
    pieces = ["##,", ",", "##s", "cat"]
    one, other = word_piece(pieces), word_piece(pieces[::-1])
    mine, theirs = match_vocabularies(one, other)
    matched = [
        (one.convert_ids_to_tokens(a), other.convert_ids_to_tokens(b))
        for a, b in zip(mine.tolist(), theirs.tolist(), strict=True)
    ]
    assert matched == [(piece, piece) for piece in (",", "##s", "cat")]
