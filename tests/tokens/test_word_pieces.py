"""Words encoded once each give the same subwords as the tokenizer's own pre-split encoding."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from calque.models.encoder import Encoder
from calque.tokens.tokenizer import encode_words, wrap_tokenizer
from calque.tokens.words import PieceCounts, WordEncoder

Row = tuple[str, str, str]


def check_same(tokenizer: object, sentences: list[list[str]], encoder: WordEncoder) -> None:
    found = encoder.encode(sentences)
    plain = encode_words(tokenizer, sentences)  # type: ignore[arg-type]
    np.testing.assert_array_equal(found.ids, np.concatenate([p.ids for p in plain]))
    counts = [np.bincount(p.words, minlength=p.n_words) for p in plain]
    np.testing.assert_array_equal(found.n_pieces, np.concatenate(counts))
    np.testing.assert_array_equal(found.n_words, [p.n_words for p in plain])


def test_real_sentences(tiny_encoder: Encoder, demo_rows: list[Row]) -> None:
    sentences = [text.split() for row in demo_rows for text in row[1:]]
    encoder = WordEncoder(tiny_encoder.tokenizer)
    check_same(tiny_encoder.tokenizer, sentences[:100], encoder)
    check_same(tiny_encoder.tokenizer, sentences, encoder)  # half of the words are known by now


def test_forgets_when_full(tiny_encoder: Encoder, demo_rows: list[Row]) -> None:
    encoder = WordEncoder(tiny_encoder.tokenizer, max_words=20)
    for row in demo_rows[:40]:
        check_same(tiny_encoder.tokenizer, [text.split() for text in row[1:]], encoder)


@given(words=st.lists(st.lists(st.text(max_size=30), max_size=6), min_size=1, max_size=4))
def test_any_words(tiny_encoder: Encoder, words: list[list[str]]) -> None:
    check_same(tiny_encoder.tokenizer, words, WordEncoder(tiny_encoder.tokenizer))


def test_byte_level_words_keep_their_spaces() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    learner.train_from_iterator(["the house the mouse", "a house"], trainer)
    tokenizer = wrap_tokenizer(learner)
    sentences = [["the", "house", "the"], [], ["house"], ["", "house"]]
    check_same(tokenizer, sentences, WordEncoder(tokenizer))


def test_long_words_are_shortened_and_counted() -> None:
    text = PieceCounts(np.array([1, 2, 3, 4, 5]), np.array([3, 0, 2]), np.array([2, 1]))
    short, n_cut = text.shorten(2)
    assert (short.ids.tolist(), short.n_pieces.tolist(), n_cut) == ([1, 2, 4, 5], [2, 0, 2], 1)
    assert text.shorten(3) == (text, 0)
