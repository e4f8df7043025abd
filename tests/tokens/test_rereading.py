"""Text of one tokenizer read by another: shared pieces, and segments that both cut out."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calque.tokens.ragged import Ragged
from calque.tokens.tokenizer import encode_sentences, wrap_tokenizer
from calque.tokens.vocabularies import Retokenization, Retokenizer, Vocabulary, match_vocabularies

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    MakeTokenizer = Callable[..., PreTrainedTokenizerFast]

KINDS = runpy.run_path(str(Path(__file__).parents[1] / "toy_tokenizers.py"))
make_tokenizer: MakeTokenizer = KINDS["make_tokenizer"]


@pytest.fixture(scope="module")
def tokenizers(demo_rows: list[tuple[str, str, str]]) -> dict[str, PreTrainedTokenizerFast]:
    sentences = [row[1] for row in demo_rows]
    sizes = {"sentencepiece": 300, "byte-level": 700, "wordpiece": 600}
    return {kind: make_tokenizer(kind, sentences, size) for kind, size in sizes.items()}


@pytest.fixture
def unigram() -> Callable[..., PreTrainedTokenizerFast]:
    """A tokenizer of given pieces, the first of them the most likely."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    def make(*pieces: str) -> PreTrainedTokenizerFast:
        marks = [(mark, 0.0) for mark in ("<s>", "<pad>", "</s>", "<unk>")]
        scores = [(piece, -1.0 - 0.01 * k) for k, piece in enumerate(pieces)]
        tokenizer = Tokenizer(models.Unigram([*marks, *scores], unk_id=3))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        return wrap_tokenizer(tokenizer)

    return make


def retokenize(
    src: PreTrainedTokenizerFast, tgt: PreTrainedTokenizerFast, *sentences: str
) -> tuple[list[str], list[int], list[str], list[int]]:
    """Give the pieces of both tokenizers as text, and their segments."""
    ids = Ragged.of(encode_sentences(src, sentences))
    again = Retokenizer(src, tgt).retokenize(ids)
    assert again.n_segments > max([*again.src, *again.tgt, -1])
    return (
        src.convert_ids_to_tokens(ids.ids.tolist()),
        again.src.tolist(),
        tgt.convert_ids_to_tokens(again.pieces.ids.tolist()),
        again.tgt.tolist(),
    )


def test_segments_by_hand(unigram: Callable[..., PreTrainedTokenizerFast]) -> None:
    src = unigram("▁un", "believ", "able", "▁cat", "s", "▁a", "▁")
    tgt = unigram("▁un", "be", "liev", "a", "b", "le", "▁cats", "▁a")
    assert retokenize(src, tgt, "a unbelievable cats", "cats a") == (
        ["▁a", "▁un", "believ", "able", "▁cat", "s", "▁cat", "s", "▁a"],
        [0, 1, 2, 3, 4, 4, 5, 5, 6],
        ["▁a", "▁un", "be", "liev", "a", "b", "le", "▁cats", "▁cats", "▁a"],
        [0, 1, 2, 2, 3, 3, 3, 4, 5, 6],
    )


def test_cuts_that_cross_make_one_segment(
    unigram: Callable[..., PreTrainedTokenizerFast],
) -> None:
    src, tgt = unigram("▁ab", "cd", "▁x"), unigram("▁a", "bc", "d", "▁x")
    pieces = (["▁ab", "cd", "▁x"], [0, 0, 1], ["▁a", "bc", "d", "▁x"], [0, 0, 0, 1])
    assert retokenize(src, tgt, "abcd x") == pieces


def test_a_lone_space_goes_with_its_word(
    unigram: Callable[..., PreTrainedTokenizerFast],
) -> None:
    src, tgt = unigram("▁a", "cat", "▁"), unigram("▁a", "▁cat")
    assert retokenize(src, tgt, "a cat cat") == (
        ["▁a", "▁", "cat", "▁", "cat"],
        [0, 1, 1, 2, 2],
        ["▁a", "▁cat", "▁cat"],
        [0, 1, 2],
    )


def test_the_bytes_of_a_character_stay_together(
    tokenizers: dict[str, PreTrainedTokenizerFast],
    unigram: Callable[..., PreTrainedTokenizerFast],
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
    # And the other way round, where the other tokenizer cuts inside characters.
    pieces, segments, others, theirs = retokenize(tgt, tokenizers["byte-level"], "a 東京 a")
    assert (pieces, segments) == (["▁a", "▁東", "京", "▁a"], [0, 1, 2, 3])
    assert set(theirs) == {0, 1, 2, 3} and len(theirs) > 4


def test_marks_in_the_text_are_characters(
    tokenizers: dict[str, PreTrainedTokenizerFast],
    unigram: Callable[..., PreTrainedTokenizerFast],
) -> None:
    src, tgt = unigram("▁a", "<", "mask", ">"), tokenizers["byte-level"]
    ids = src.convert_tokens_to_ids(["▁a", "<", "mask", ">", "▁a"])
    again = Retokenizer(src, tgt).retokenize(Ragged.of([ids]))
    assert tgt.mask_token_id not in again.pieces.ids
    assert tgt.decode(again.pieces.ids) == "a<mask> a"
    before = tgt.backend_tokenizer.encode("<mask>", add_special_tokens=False).ids
    assert before == [tgt.mask_token_id]  # the tokenizer itself is left as it was


def test_what_cannot_be_spelled_is_no_lone_segment(
    unigram: Callable[..., PreTrainedTokenizerFast],
) -> None:
    src, tgt = unigram("▁a", "▁b"), unigram("▁a", "▁b", "▁京")
    ids = Ragged.of(encode_sentences(src, ["a 京 b"]))
    again = Retokenizer(src, tgt).retokenize(ids)
    assert again.one_to_one()[again.src][[0, -1]].all()
    assert tgt.convert_tokens_to_ids("▁京") not in again.pieces.ids


def test_bytes_that_are_no_text_have_no_partner(
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


def test_nothing_is_read_of_nothing(tokenizers: dict[str, PreTrainedTokenizerFast]) -> None:
    again = Retokenizer(tokenizers["wordpiece"], tokenizers["byte-level"]).retokenize(Ragged.of([]))
    assert (len(again.pieces.ids), len(again.src), again.n_segments) == (0, 0, 0)
    itself = Retokenization.identity(Ragged.of([[5, 6], [7]]))
    assert itself.one_to_one().all()
    assert itself.src.tolist() == itself.tgt.tolist() == [0, 1, 2]


words = st.text("abcdefghinorstuTBé,.'-", min_size=1, max_size=8)


@pytest.mark.parametrize(("src", "tgt"), [*permutations(("sentencepiece", "byte-level"))])
@settings(max_examples=30)
@given(sentences=st.lists(st.lists(words, min_size=1, max_size=6).map(" ".join), max_size=4))
def test_both_sides_of_a_segment_spell_the_same(
    src: str, tgt: str, sentences: list[str], tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    """By the pieces alone: no offsets, no places."""
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


@pytest.mark.parametrize(("src", "tgt"), [*permutations(KINDS["KINDS"], 2)])
def test_shared_pieces_spell_the_same(
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
def test_a_comma_is_matched_as_it_stands_after_a_word(
    src: str, tgt: str, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    """BERT's comma is a word of its own, SentencePiece's hangs on to the word before it."""
    one, other = tokenizers[src], tokenizers[tgt]
    mine, theirs = match_vocabularies(one, other)
    comma = one.convert_tokens_to_ids(",")
    assert other.convert_ids_to_tokens(theirs[mine == comma].tolist()) == [","]


def test_marks_are_put_where_they_mostly_stand(
    unigram: Callable[..., PreTrainedTokenizerFast],
) -> None:
    """BERT does not tell whether there was a space: the other reads `so, (中文).`."""
    bert = KINDS["word_piece"](["so", ",", "##,", "(", "##(", "中", "文", ")", "."])
    tgt = unigram("▁so", ",", "▁(", "中文", ").", "▁")
    mine, _, theirs, _ = retokenize(bert, tgt, "So , (中文) .")
    assert mine == ["so", ",", "(", "中", "文", ")", "."]
    assert theirs == ["▁so", ",", "▁(", "中文", ")."]
    pairs = zip(*match_vocabularies(bert, tgt), strict=True)
    matched = {
        bert.convert_ids_to_tokens(int(a)): tgt.convert_ids_to_tokens(int(b)) for a, b in pairs
    }
    assert matched == {"so": "▁so", ",": ",", "(": "▁("}


def test_a_comma_inside_words_is_none_of_two_wordpieces() -> None:
    """BERT lists a `##,`, but cuts commas off before it could be used."""
    pieces = ["##,", ",", "##s", "cat"]
    one, other = KINDS["word_piece"](pieces), KINDS["word_piece"](pieces[::-1])
    mine, theirs = match_vocabularies(one, other)
    matched = [
        (one.convert_ids_to_tokens(a), other.convert_ids_to_tokens(b))
        for a, b in zip(mine.tolist(), theirs.tolist(), strict=True)
    ]
    assert matched == [(piece, piece) for piece in (",", "##s", "cat")]
