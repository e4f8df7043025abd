"""Tokenizers that are trained, loaded and wrapped agree with transformers."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import unicodedata
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from tests.toy_tokenizers import word_piece
from transformers import AutoTokenizer, PreTrainedTokenizerFast, XLMRobertaTokenizer

from calque.errors import InputError
from calque.tokens.tokenizer import (
    SpecialTokens,
    encode_sentences,
    load_tokenizer,
    special_ids,
    train_tokenizer,
    write_tokenizer,
)

Rows = list[tuple[str, str, str]]


@pytest.fixture(scope="module")
def sentences(demo_rows: Rows) -> list[str]:
    return [sentence for row in demo_rows for sentence in row[1:]]


def test_special_ids_are_those_of_xlm_r(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
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


def test_full_disk_is_a_system_error(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        write_tokenizer(tiny_tokenizer, tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_saving_and_loading(
    tiny_tokenizer: PreTrainedTokenizerFast, sentences: list[str], tmp_path: Path
) -> None:
    tiny_tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert loaded.is_fast
        assert loaded.get_vocab() == tiny_tokenizer.get_vocab()
        assert loaded.special_tokens_map == tiny_tokenizer.special_tokens_map
        assert loaded(sentences)["input_ids"] == tiny_tokenizer(sentences)["input_ids"]


def test_decoding_restores_the_text(
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
def test_white_space_and_width_are_normalized(
    tiny_tokenizer: PreTrainedTokenizerFast, text: str, same_as: str
) -> None:
    """As in SentencePiece: white space is stripped and merged, characters are NFKC."""
    first, second = encode_sentences(tiny_tokenizer, [text, same_as])
    np.testing.assert_array_equal(first, second)


def test_typographic_characters_are_read_as_plain_ones(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = [
        tiny_tokenizer(text)["input_ids"]
        for text in ("L’homme – «oui»", 'L\'homme - "oui"', "Lʼhomme — „oui“")
    ]
    assert ids[0] == ids[1] == ids[2]


def test_rare_characters_become_unknown(sentences: list[str]) -> None:
    text = [*sentences, "鱻"]
    some = train_tokenizer(text, 1500, character_coverage=0.999)
    all_of_them = train_tokenizer(text, 1500, character_coverage=1.0)
    assert 3 in encode_sentences(some, ["鱻"])[0]
    assert 3 not in encode_sentences(all_of_them, ["鱻"])[0]


TRAINING = """
import sys
from calque.tokens import tokenizer
tokenizer.wrap_tokenizer = lambda trained: trained  # transformers takes seconds to import
sentences = sys.stdin.read().splitlines()
print(tokenizer.train_tokenizer(sentences, 1500).to_str())
"""


def test_training_is_deterministic(sentences: list[str]) -> None:
    """The library's order of words, of equal scores and of rare characters is random."""
    files = {
        subprocess.run(
            [sys.executable, "-c", TRAINING],
            env=os.environ | {"PYTHONHASHSEED": str(seed), "RAYON_NUM_THREADS": str(1 + seed % 3)},
            input="\n".join(sentences),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(6)
    }
    (file,) = files
    vocabulary = json.loads(file)["model"]["vocab"]
    assert [piece for piece, _ in vocabulary[:4]] == ["<s>", "<pad>", "</s>", "<unk>"]
    scored = [(-score, piece) for piece, score in vocabulary[4:]]
    assert scored == sorted(scored)


def test_special_tokens(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    found = SpecialTokens.of(tiny_tokenizer)
    assert found == SpecialTokens(0, 2, 2, 1, 1499, (0, 1, 2, 1499), 1500)
    assert SpecialTokens.of(word_piece(["a"])).n_between == 1
    without_mask = deepcopy(tiny_tokenizer)
    without_mask.mask_token = None
    with pytest.raises(InputError, match=r"no mask token \(use the tokenizer of"):
        SpecialTokens.of(without_mask)


@pytest.mark.parametrize(
    ("text", "vocab_size", "problem"),
    [
        (["one two three"], 12, "vocab_size=12 cannot hold the 8 characters of the text .raise"),
        ([], 100, "no text to train a tokenizer on"),
        (["", ""], 100, "no text to train a tokenizer on"),
    ],
)
def test_impossible_training_raises(text: list[str], vocab_size: int, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        train_tokenizer(text, vocab_size)


def test_truncation_and_padding_set_in_a_tokenizer_are_ignored(
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
def test_a_damaged_tokenizer_is_reported_in_one_line(
    damage: object, tiny_folder: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((tiny_folder / name).read_bytes())
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(InputError, match=r"pass a folder with tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: the ")
    assert "\n" not in str(caught.value)
