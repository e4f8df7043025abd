"""Tokenizers against transformers' own, and word maps against character offsets."""

from __future__ import annotations

import json
import unicodedata
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, XLMRobertaTokenizer

from calque.errors import InputError
from calque.tokens.tokenizer import (
    encode_sentences,
    encode_words,
    load_tokenizer,
    special_ids,
    train_tokenizer,
)

Rows = list[tuple[str, str, str]]
BERT_MARKS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
ROBERTA_MARKS = {
    "cls_token": "<s>",
    "pad_token": "<pad>",
    "sep_token": "</s>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}


def byte_level(sentences: list[str], add_prefix_space: bool = False) -> PreTrainedTokenizerFast:
    """Train a tokenizer of RoBERTa's kind."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=list(ROBERTA_MARKS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=learner, **ROBERTA_MARKS)


def word_piece(sentences: list[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of BERT's kind."""
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.BertNormalizer(lowercase=False)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    learner.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=1200, special_tokens=list(BERT_MARKS.values()), show_progress=False
    )
    learner.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=learner, **BERT_MARKS)


def without_first_space(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Make a tokenizer of SentencePiece's kind one of Gemma's: only real spaces become `▁`."""
    copied = deepcopy(tokenizer)
    copied.backend_tokenizer.normalizer = normalizers.NFKC()  # and none is stripped
    copied.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return copied


@pytest.fixture(scope="module")
def sentences(demo_rows: Rows) -> list[str]:
    return [sentence for row in demo_rows for sentence in row[1:]]


@pytest.fixture(scope="module")
def kinds(
    sentences: list[str], tiny_tokenizer: PreTrainedTokenizerFast
) -> dict[str, PreTrainedTokenizerFast]:
    return {
        "unigram": tiny_tokenizer,
        "byte-level": byte_level(sentences),
        "byte-level with a first space": byte_level(sentences, add_prefix_space=True),
        "wordpiece": word_piece(sentences),
        "unigram without a first space": without_first_space(tiny_tokenizer),
    }


each_kind = pytest.mark.parametrize(
    "kind",
    [
        "unigram",
        "byte-level",
        "byte-level with a first space",
        "wordpiece",
        "unigram without a first space",
    ],
)


def test_ids_are_those_of_xlm_r(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tiny_tokenizer) == 1500
    assert tiny_tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 1499]) == [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "<mask>",
    ]
    assert special_ids(tiny_tokenizer) == [0, 1, 2, 1499]
    assert sorted(tiny_tokenizer.get_vocab().values()) == list(range(1500))


def test_encodes_like_transformers_xlm_r(
    tiny_tokenizer: PreTrainedTokenizerFast, demo_rows: Rows
) -> None:
    model = json.loads(tiny_tokenizer.backend_tokenizer.to_str())["model"]
    pieces = [(piece, score) for piece, score in model["vocab"]]
    reference = XLMRobertaTokenizer(vocab=[*pieces, ("<mask>", 0.0)])
    for _, english, sentence in demo_rows:
        plain = [unicodedata.normalize("NFKC", text) for text in (english, sentence)]
        assert tiny_tokenizer(english)["input_ids"] == reference(plain[0])["input_ids"]
        assert tiny_tokenizer(english, sentence)["input_ids"] == reference(*plain)["input_ids"]


def test_survives_saving(
    tiny_tokenizer: PreTrainedTokenizerFast, sentences: list[str], tmp_path: Path
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert loaded.is_fast
        assert loaded.get_vocab() == tiny_tokenizer.get_vocab()
        assert loaded.special_tokens_map == tiny_tokenizer.special_tokens_map
        assert loaded(sentences)["input_ids"] == tiny_tokenizer(sentences)["input_ids"]


def test_decoding_gives_the_text_back(
    tiny_tokenizer: PreTrainedTokenizerFast, sentences: list[str]
) -> None:
    n_checked = 0
    for sentence, ids in zip(sentences, encode_sentences(tiny_tokenizer, sentences), strict=True):
        if 3 not in ids:
            assert tiny_tokenizer.decode(ids) == unicodedata.normalize("NFKC", sentence)
            n_checked += 1
    assert n_checked > 300


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("  The  university ", "The university"),
        ("\tThe\u3000university\n", "The university"),
        ("The\x07 university", "The university"),
        ("\ufeffThe university", "The university"),
        ("Ｔｈｅ ｕｎｉｖｅｒｓｉｔｙ", "The university"),
        ("Gäste", "Ga\u0308ste"),
        (" ", ""),
    ],
)
def test_white_space_and_width_do_not_count(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str, same_as: str
) -> None:
    """As in SentencePiece: white space is trimmed and squeezed, characters are NFKC."""
    first, second = encode_sentences(tiny_tokenizer, [text, same_as])
    np.testing.assert_array_equal(first, second)


def test_rare_characters_become_unknown(sentences: list[str]) -> None:
    text = [*sentences, "鱻"]
    some = train_tokenizer(text, 1500, character_coverage=0.999)
    all_of_them = train_tokenizer(text, 1500, character_coverage=1.0)
    assert 3 in encode_sentences(some, ["鱻"])[0]
    assert 3 not in encode_sentences(all_of_them, ["鱻"])[0]


@pytest.mark.parametrize(
    ("text", "vocab_size", "problem"),
    [
        (["one two three"], 12, "vocab_size=12 cannot hold the text's 8 characters .raise"),
        ([], 100, "no text to train a tokenizer on"),
        (["", ""], 100, "no text to train a tokenizer on"),
    ],
)
def test_training_that_cannot_work_is_refused(
    text: list[str], vocab_size: int, problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        train_tokenizer(text, vocab_size)


@each_kind
def test_words_agree_with_character_offsets(
    kind: str, kinds: dict[str, PreTrainedTokenizerFast], sentences: list[str]
) -> None:
    """Words encoded one by one are the sentence encoded whole, each piece inside its word."""
    tokenizer = kinds[kind]
    split = [sentence.split() for sentence in sentences]
    for words, pieces in zip(split, encode_words(tokenizer, split), strict=True):
        text = " ".join(words)
        whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        assert pieces.ids.tolist() == whole.ids
        # A piece that is nothing but the space before a word belongs to that word.
        last = [stop if text[stop - 1 : stop] == " " else stop - 1 for _, stop in whole.offsets]
        ends = np.cumsum([len(word) + 1 for word in words])
        by_offset = np.searchsorted(ends, last, "right").tolist()
        assert pieces.words.tolist() == by_offset
        assert pieces.n_words == len(words)
        first = [by_offset.index(k) for k in range(len(words))]
        assert pieces.first_pieces().tolist() == first


@pytest.mark.parametrize("kind", ["unigram", "wordpiece"])
def test_words_agree_with_transformers(
    kind: str, kinds: dict[str, PreTrainedTokenizerFast], sentences: list[str]
) -> None:
    split = [sentence.split() for sentence in sentences]
    theirs = kinds[kind](split, is_split_into_words=True, add_special_tokens=False)
    for k, pieces in enumerate(encode_words(kinds[kind], split)):
        assert pieces.ids.tolist() == theirs["input_ids"][k]
        assert pieces.words.tolist() == theirs.word_ids(k)


@each_kind
def test_split_text_is_read_like_text(
    kind: str, kinds: dict[str, PreTrainedTokenizerFast], sentences: list[str]
) -> None:
    """Where spaces are part of pieces, they are given back to the words."""
    plain = [text for text in sentences if text.isascii()]
    assert len(plain) > 20
    split = encode_words(kinds[kind], [text.split() for text in plain])
    theirs = kinds[kind](plain, add_special_tokens=False)["input_ids"]
    assert [pieces.ids.tolist() for pieces in split] == theirs


@each_kind
@pytest.mark.parametrize(
    "words", [["彼", "は", "静か", "に", "歩い", "た"], ["我", "们", "来", "了", "。"]]
)
def test_words_without_spaces_between_them(
    kind: str, words: list[str], kinds: dict[str, PreTrainedTokenizerFast]
) -> None:
    tokenizer = kinds[kind]
    (pieces,) = encode_words(tokenizer, [words])
    assert set(pieces.words.tolist()) == set(range(len(words)))
    assert pieces.words.tolist() == sorted(pieces.words.tolist())
    for k, word in enumerate(words):
        mine = pieces.ids[pieces.words == k]
        if tokenizer.unk_token_id not in mine:
            assert str(tokenizer.decode(mine)).strip() == word


def test_words_that_vanish_have_no_piece(kinds: dict[str, PreTrainedTokenizerFast]) -> None:
    words = ["The", "\u200b", "", "\x07", "house"]
    for kind in ("unigram", "wordpiece"):
        (pieces,) = encode_words(kinds[kind], [words])
        assert pieces.n_words == 5
        assert pieces.first_pieces()[1:4].tolist() == [-1, -1, -1]
        assert set(pieces.words.tolist()) == {0, 4}
    (pieces,) = encode_words(kinds["byte-level"], [words])
    assert set(pieces.words.tolist()) == {0, 1, 3, 4}  # bytes are never deleted
    (alone,) = encode_words(kinds["unigram"], [["\u200b"]])
    assert (alone.ids.tolist(), alone.first_pieces().tolist()) == ([], [-1])
    (nothing,) = encode_words(kinds["unigram"], [[]])
    assert (nothing.ids.tolist(), nothing.n_words) == ([], 0)


def test_limits_left_in_a_tokenizer_do_not_cut_text(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    sentence = "The university has a cafeteria and a garden and a pool."
    (expected,) = encode_sentences(tiny_tokenizer, [sentence])
    called = deepcopy(tiny_tokenizer)
    called(sentence, truncation=True, max_length=5)
    called([sentence, "The"], padding="max_length", max_length=90)
    limited = deepcopy(tiny_tokenizer)
    limited.backend_tokenizer.enable_truncation(4)
    limited.backend_tokenizer.enable_padding(length=90, pad_id=1, pad_token="<pad>")
    limited.save_pretrained(tmp_path)
    for tokenizer in (called, limited, load_tokenizer(tmp_path)):
        (found,) = encode_sentences(tokenizer, [sentence])
        np.testing.assert_array_equal(found, expected)
        tokenizer.backend_tokenizer.enable_truncation(4)
        (pieces,) = encode_words(tokenizer, [sentence.split()])
        np.testing.assert_array_equal(pieces.ids, expected)


def cut_short(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:2000])


def remove(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_model(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    content["model"]["type"] = "Telepathy"
    path.write_text(json.dumps(content), "utf-8")


def damage_settings(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{", "utf-8")


@pytest.mark.parametrize("damage", [cut_short, remove, damage_model, damage_settings])
def test_a_damaged_tokenizer_is_one_line(damage: object, tiny_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(InputError, match=r"give a folder with tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: no tokenizer")
    assert "\n" not in str(caught.value)
