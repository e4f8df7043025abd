"""Fast encoding by words gives the same ids as the tokenizer, for any text."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.toy_tokenizers import byte_level, encode_words, make_tokenizer
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from calque.tokens.words import (
    MAX_CACHED_CHARACTERS,
    SEPARATOR,
    ContextFreeWords,
    EncodedWords,
    WordCache,
    WordEncoder,
    build_sentence_encoder,
    encode_whole,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Rows = list[tuple[str, str, str]]

# A SentencePiece normalization table with rules that involve spaces: ﬁ → fi, U+0600 → x,
# U+0308 → y, space + U+0301 → z, a + U+0301 → á, U+0605 + space → q, U+00AD → nothing,
# ´ → space + U+0301, U+200B → space, space + U+0E33 → w (normalization_rule_tsv of version 0.2).
CHARSMAP = (
    "eNol03fwz3UcB/DX90snXTrn/Bl+MtO4KELWWQ0KmdG0R8re4/dLZFZGZoUQ5SeKyt4UfhwNe+9x9rqG8fjyuXt8"
    "nq/7vO/er/fd+/WJ7BHxcURahWyRFcnIyBeRJyJ98epkLHwg4mH1ve+5IvKq51n3pGdjqPXcMl0+Ihf1t4/1h9SD"
    "J3oVT8aIihEJZUbOiMwHk5FDndriUQqQn4KkUYjHKEJhilGUxynOE5TgKZ7kcO1kPC1L8gzPUorSPMfzlKEcZXmB"
    "8jhSVKAylXgvdzKqyGpUpQbVeZGavMxL1OIVXqU2dXiNetSlPq/TkAY0phFv0IRmNOUt3uQd3k71511a0JxWtKQN"
    "rWlHWzrQno68z4d8QGc60ZUudKcbPelBb3rRlz64pujHQAaQkbpQBvERg++PRHzCEIYxlBEMZxQj+YxPGc3njGUM"
    "XzCOCYxnEsYhpjCZr/iSqXzNdKYxg2+YxUxm8y3fMYe5fM88MpnPD/zIAhbyEz+ziF/5hSUsZhlLWcFyVrGSNaxm"
    "HUcbJGKDXM9vbGQTv7OFzWwli4uHE7FN7mA7f/IHf/MXu9jJHnazj70cYD+HOMiR1CxzjLV5E3FCHucUJznDac5x"
    "lvOp/pmJuCgvcJlLXOUK17nGTW7wT6r/zET8J//lFv9zh9tx7+dLy8qI1u1MUk+T0tuUrJsedwGrkJon"
)
# Strings that vanish, become spaces, combine with their neighbors, or are special tokens.
PIECES = (
    *("", " ", "  ", "\t", "\n", "\r\n", "\x07", "\x85", "\xa0", "\xad", "\u2028", "\u3000"),
    *("\u200b", "\u200d", "\ufeff", "\ufffd", "\u0300", "\u0301", "\u0308", "\u0344", "\u0e33"),
    *("\u0600", "\u0605", "\u0d4e", "\U000110bd", "\U0001f3fd", "\u1100", "\u1161", "\uff9e"),
    *("´", "‗", "ﷺ", "ﬁ", "…", "ſ", "İ", "ΑΣ", "Straße", "a", "b", "x", ".", "``", "''", "-"),
    *(
        "a\u200b\u200bb",
        "▁",
        "▁a",
        SEPARATOR,
        "<s>",
        "</s>",
        "<mask>",
        "<",
        "s>",
        "mask>",
        "[MASK]",
        "[MASK",
        "fire",
    ),
    *("The", "university", "Gäste", "中", "文字", "日本語", "ไทย", "नमस्ते", "سلام", "👍", "👨‍👩‍👧"),
    *("Donaudampfschifffahrtsgesellschaft", "彼は静かに歩いて家に帰った。それから眠った。"),
)
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
sentences = st.lists(
    st.lists(st.sampled_from(PIECES) | st.just(" ") | anything, max_size=12).map("".join),
    max_size=6,
)


def embedded(unigram: Tokenizer, text: list[str]) -> Tokenizer:
    folder = resources.files("calque").joinpath("data/models/calque-mini")
    return Tokenizer.from_str(folder.joinpath("tokenizer.json").read_text("utf-8"))


def trained(unigram: Tokenizer, text: list[str]) -> Tokenizer:
    return unigram


def xlm_r(unigram: Tokenizer, text: list[str]) -> Tokenizer:
    """XLM-R's components, with another table of characters."""
    charsmap = zlib.decompress(base64.b64decode(CHARSMAP))
    unigram.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(charsmap),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
    )
    unigram.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    unigram.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return unigram


def raw(unigram: Tokenizer, text: list[str]) -> Tokenizer:
    unigram.normalizer = None  # type: ignore[assignment]
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return unigram


def albert(unigram: Tokenizer, text: list[str]) -> Tokenizer:
    """ALBERT's normalizer, without merging of repeated spaces."""
    unigram.normalizer = normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Nmt(),
        ]
    )
    unigram.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    unigram.add_tokens([AddedToken("Fire", normalized=True), AddedToken("ﬁ", single_word=True)])
    return unigram


def bert(unigram: Tokenizer, text: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=1200, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


KINDS: dict[str, Callable[[Tokenizer, list[str]], Tokenizer]] = {
    "embedded": embedded,
    "trained": trained,
    "xlm-r": xlm_r,
    "raw": raw,
    "albert": albert,
    "bert": bert,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def text(demo_rows: Rows) -> list[str]:
    folder = Path(__file__).parents[1] / "data"
    files = [folder / "en-de.tsv", folder / "en-ja.tsv", folder / "en-de.dictionary.txt"]
    lines = [line for path in files for line in path.read_text("utf-8").splitlines()]
    return [sentence for row in demo_rows for sentence in row] + [
        part for line in lines for part in (line, *line.split("\t"))
    ]


@pytest.fixture(scope="module")
def kinds(tiny_tokenizer: PreTrainedTokenizerFast, text: list[str]) -> dict[str, Tokenizer]:
    def copy() -> Tokenizer:
        return Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())

    return {name: make(copy(), text) for name, make in KINDS.items()}


class Spy(ContextFreeWords):
    """Records which words it was asked for."""

    asked: list[str]

    def split(self, words):  # type: ignore[no-untyped-def]
        self.asked += words
        return super().split(words)


def make_cache(tokenizer: Tokenizer, max_words: int = 1000) -> tuple[WordCache, Spy]:
    spy = Spy.of(tokenizer)
    assert isinstance(spy, Spy)
    spy.asked = []
    return WordCache(tokenizer, spy, max_words), spy


def to_lists(ragged) -> list[list[int]]:  # type: ignore[no-untyped-def]
    ends = ragged.lengths.cumsum().tolist()
    starts = [0, *ends[:-1]]
    return [ragged.ids[a:b].tolist() for a, b in zip(starts, ends, strict=len(ends) > 0)]


def expect(tokenizer: Tokenizer, sentences: list[str]) -> list[list[int]]:
    return [tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in sentences]


@each_kind
@given(blocks=st.lists(sentences, max_size=3))
def test_any_text_is_encoded_like_the_tokenizer_does(
    kind: str, blocks: list[list[str]], kinds: dict[str, Tokenizer]
) -> None:
    """Covers new words, cached words, and words evicted because the cache was full."""
    cache, _ = make_cache(kinds[kind], max_words=8)
    for block in [*blocks, *blocks]:
        assert to_lists(cache.encode(block)) == expect(kinds[kind], block)


@each_kind
def test_every_two_odd_strings_side_by_side(kind: str, kinds: dict[str, Tokenizer]) -> None:
    cache, _ = make_cache(kinds[kind], max_words=100_000)
    for middle in ("", " ", "a ", " a", " \u0301", "\u0600 "):
        block = [left + middle + right for left in PIECES for right in PIECES]
        assert to_lists(cache.encode(block)) == expect(kinds[kind], block)


@each_kind
@pytest.mark.parametrize("sentence", ["\u0605 a", "a\u0605 b", "\u0600 a", "a \u0301", "<s>\u0338"])
def test_a_single_odd_word(kind: str, sentence: str, kinds: dict[str, Tokenizer]) -> None:
    """In a block, another odd word could hide a mistake: if one is refused, all are."""
    cache, _ = make_cache(kinds[kind])
    assert to_lists(cache.encode([sentence])) == expect(kinds[kind], [sentence])


@each_kind
def test_real_sentences_are_cached(kind: str, kinds: dict[str, Tokenizer], text: list[str]) -> None:
    cache, spy = make_cache(kinds[kind], max_words=100_000)
    expected = expect(kinds[kind], text)
    assert to_lists(cache.encode(text)) == expected
    n_asked = len(spy.asked)
    assert to_lists(cache.encode(text)) == expected
    assert all(len(word) > MAX_CACHED_CHARACTERS for word in spy.asked[n_asked:])


@pytest.mark.parametrize("kind", ["embedded", "trained", "xlm-r", "raw"])
def test_plain_words_never_reach_the_tokenizer(
    kind: str, kinds: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, all tests above would pass without a cache."""
    seen: list[str] = []

    def record(tokenizer: Tokenizer, sentences: list[str]):  # type: ignore[no-untyped-def]
        seen.extend(sentences)
        return encode_whole(tokenizer, sentences)

    monkeypatch.setattr("calque.tokens.words.encode_whole", record)
    cache, _ = make_cache(kinds[kind])
    plain = ["Guten Tag, Welt!", "今日は いい天気ですね。", "Привет …", "नमस्ते سلام", "caf\u00e9"]
    cache.encode([*plain, "a <s> b", "a  b", " a", "a ", "", "a ▁ b"])
    assert seen == ["a <s> b", "a  b", " a", "a ", "", "a ▁ b"]


def asked_for(spy: Spy, cache: WordCache, *sentences: str) -> list[str]:
    spy.asked.clear()
    cache.encode(sentences)
    return spy.asked


def test_long_words_are_not_cached(kinds: dict[str, Tokenizer]) -> None:
    cache, spy = make_cache(kinds["trained"])
    long, longest_cached = "x" * (MAX_CACHED_CHARACTERS + 1), "x" * MAX_CACHED_CHARACTERS
    assert asked_for(spy, cache, f"{longest_cached} {long} one") == [longest_cached, "one", long]
    assert asked_for(spy, cache, f"one {long} {longest_cached}") == [long]


def test_a_full_cache_evicts_words_used_once(kinds: dict[str, Tokenizer]) -> None:
    cache, spy = make_cache(kinds["trained"], max_words=7)
    assert asked_for(spy, cache, "one two x y z") == ["one", "two", "x", "y", "z"]
    assert asked_for(spy, cache, "two one u v") == ["u", "v"]
    assert asked_for(spy, cache, "one x two") == ["x"]
    assert asked_for(spy, cache, "a b c d e", "e d c b a") == ["a", "b", "c", "d", "e"]
    # Five words were used twice: keeping them would leave too little room.
    assert asked_for(spy, cache, "one a") == ["one", "a"]


def test_empty_input(kinds: dict[str, Tokenizer]) -> None:
    cache, _ = make_cache(kinds["trained"])
    assert to_lists(cache.encode([])) == []
    assert to_lists(cache.encode([""])) == [[]]


def splits_bytes(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()


def bare_first_word(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")


def marks_only_the_first_word(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )


def pieces_over_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)


def no_pre_tokenizer(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]


def rewrites_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(Regex("a b"), "c")


def rewrites_a_set_with_a_space(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(Regex("[^a]"), "c")


def rewrites_a_space(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a b", "c")])


def special_token_with_a_space(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["a b"])


def special_token_that_vanishes(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["\u200b"])


@pytest.mark.parametrize(
    "change",
    [
        splits_bytes,
        bare_first_word,
        marks_only_the_first_word,
        pieces_over_spaces,
        no_pre_tokenizer,
        rewrites_spaces,
        rewrites_a_space,
        rewrites_a_set_with_a_space,
        special_token_with_a_space,
        special_token_that_vanishes,
    ],
)
def test_context_dependent_tokenizers_encode_whole_sentences(
    change: Callable[[Tokenizer], None], tiny_tokenizer: PreTrainedTokenizerFast, text: list[str]
) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    assert ContextFreeWords.of(tokenizer) is not None
    change(tokenizer)
    assert ContextFreeWords.of(tokenizer) is None
    block = [*text, "a b", " a b ", ""]
    assert to_lists(build_sentence_encoder(tokenizer)(block)) == expect(tokenizer, block)


def test_random_segmentation_is_not_cached() -> None:
    model = models.BPE({"a": 0, "b": 1, "ab": 2, "▁": 3}, [("a", "b")], dropout=0.5)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert ContextFreeWords.of(tokenizer) is None
    model.dropout = None
    assert ContextFreeWords.of(tokenizer) is not None


def without_first_space(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Copy a SentencePiece-style tokenizer; in the copy only real spaces become `▁` (Gemma)."""
    copied = deepcopy(tokenizer)
    copied.backend_tokenizer.normalizer = normalizers.NFKC()  # no stripping
    copied.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    return copied


SPLIT_KINDS = ("unigram", "byte-level", "byte-level, first space", "wordpiece", "no first space")
each_split_kind = pytest.mark.parametrize("kind", SPLIT_KINDS)
Tokenizers = dict[str, "PreTrainedTokenizerFast"]


@pytest.fixture(scope="module")
def sentences_of_demo(demo_rows: Rows) -> list[str]:
    return [sentence for row in demo_rows for sentence in row[1:]]


@pytest.fixture(scope="module")
def tokenizers(sentences_of_demo: list[str], tiny_tokenizer: PreTrainedTokenizerFast) -> Tokenizers:
    made = (
        tiny_tokenizer,
        byte_level(sentences_of_demo, 1200, prefix_space=False),
        byte_level(sentences_of_demo, 1200, prefix_space=True),
        make_tokenizer("wordpiece", sentences_of_demo, 1200),
        without_first_space(tiny_tokenizer),
    )
    return dict(zip(SPLIT_KINDS, made, strict=True))


def check_encoder(
    encoder: WordEncoder, tokenizer: PreTrainedTokenizerFast, sentences: list[list[str]]
) -> None:
    """Compare with the tokenizer's own encoding of sentences that are split into words."""
    found, expected = encoder.encode(sentences), encode_words(tokenizer, sentences)
    np.testing.assert_array_equal(found.ids, np.concatenate([p.ids for p in expected]))
    counts = [np.bincount(p.words, minlength=p.n_words) for p in expected]
    np.testing.assert_array_equal(found.n_pieces, np.concatenate(counts))
    np.testing.assert_array_equal(found.n_words, [p.n_words for p in expected])


@each_split_kind
def test_words_agree_with_character_offsets(
    kind: str, tokenizers: Tokenizers, sentences_of_demo: list[str]
) -> None:
    """Words give the ids of the whole sentence, and each subword lies in its word."""
    tokenizer = tokenizers[kind]
    encoder = WordEncoder(tokenizer)
    for sentence in sentences_of_demo:
        words = sentence.split()
        found = encoder.encode([words])
        text = " ".join(words)
        whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        assert found.ids.tolist() == whole.ids
        # A subword that is only the space before a word belongs to that word.
        last = [stop if text[stop - 1 : stop] == " " else stop - 1 for _, stop in whole.offsets]
        ends = np.cumsum([len(word) + 1 for word in words])
        owners = np.searchsorted(ends, last, "right")
        assert found.n_pieces.tolist() == np.bincount(owners, minlength=len(words)).tolist()


@each_split_kind
def test_split_text_is_encoded_like_plain_text(
    kind: str, tokenizers: Tokenizers, sentences_of_demo: list[str]
) -> None:
    plain = [text for text in sentences_of_demo if text.isascii()]
    assert len(plain) > 20
    found = WordEncoder(tokenizers[kind]).encode([text.split() for text in plain])
    expected = tokenizers[kind](plain, add_special_tokens=False)["input_ids"]
    assert found.ids.tolist() == [number for ids in expected for number in ids]


@each_split_kind
def test_cached_words_agree_with_the_tokenizer(
    kind: str, tokenizers: Tokenizers, sentences_of_demo: list[str]
) -> None:
    tokenizer = tokenizers[kind]
    split = [text.split() for text in sentences_of_demo]
    split += [
        [],
        [""],
        ["彼", "は", "静か", "に", "歩い", "た"],
        ["The", "\u200b", "", "\x07", "a"],
    ]
    encoder, forgetful = WordEncoder(tokenizer), WordEncoder(tokenizer, max_words=20)
    check_encoder(encoder, tokenizer, split[:100])
    check_encoder(encoder, tokenizer, split)  # half of the words are cached by now
    for start in range(0, 80, 2):
        check_encoder(forgetful, tokenizer, split[start : start + 2])


@given(words=st.lists(st.lists(st.text(max_size=30), max_size=6), min_size=1, max_size=4))
def test_any_words(tiny_tokenizer: PreTrainedTokenizerFast, words: list[list[str]]) -> None:
    check_encoder(WordEncoder(tiny_tokenizer), tiny_tokenizer, words)


def test_deleted_words_have_no_subword(tokenizers: Tokenizers) -> None:
    words = ["The", "\u200b", "", "\x07", "house"]
    for kind in ("unigram", "wordpiece"):
        assert (WordEncoder(tokenizers[kind]).encode([words]).n_pieces > 0).tolist() == [
            True,
            False,
            False,
            False,
            True,
        ]
    n_pieces = WordEncoder(tokenizers["byte-level"]).encode([words]).n_pieces
    assert np.flatnonzero(n_pieces).tolist() == [0, 1, 3, 4]  # bytes are never deleted


def test_truncation_set_in_a_tokenizer_is_ignored(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    words = [
        "The",
        "university",
        "has",
        "a",
        "cafeteria",
        "and",
        "a",
        "garden",
        "and",
        "a",
        "pool.",
    ]
    expected = WordEncoder(tiny_tokenizer).encode([words]).ids
    limited = deepcopy(tiny_tokenizer)
    limited.backend_tokenizer.enable_truncation(1)
    np.testing.assert_array_equal(WordEncoder(limited).encode([words]).ids, expected)


def test_truncate_words() -> None:
    text = EncodedWords(np.array([1, 2, 3, 4, 5]), np.array([3, 0, 2]), np.array([2, 1]))
    short, n_cut = text.truncate_words(2)
    assert (short.ids.tolist(), short.n_pieces.tolist(), n_cut) == ([1, 2, 4, 5], [2, 0, 2], 1)
    assert text.truncate_words(3) == (text, 0)


def test_workers_start_without_torch() -> None:
    """A worker process that tokenizes must not import torch, which takes seconds."""
    code = "import calque.tokens.prepare, sys, json; print(json.dumps(list(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers"}.isdisjoint(json.loads(run.stdout))
