"""Encoding by words: the same ids as the tokenizer's own, whatever the text."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    BETWEEN,
    MAX_CHARS,
    LoneWords,
    WordCache,
    encode_whole,
    make_sentence_encoder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Rows = list[tuple[str, str, str]]

# SentencePiece's table of rules that reach over spaces where they can: ﬁ → fi, U+0600 → x,
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
# Characters that vanish, become spaces, combine with what is before or after, or mean something.
PIECES = (
    *("", " ", "  ", "\t", "\n", "\r\n", "\x07", "\x85", "\xa0", "\xad", "\u2028", "\u3000"),
    *("\u200b", "\u200d", "\ufeff", "\ufffd", "\u0300", "\u0301", "\u0308", "\u0344", "\u0e33"),
    *("\u0600", "\u0605", "\u0d4e", "\U000110bd", "\U0001f3fd", "\u1100", "\u1161", "\uff9e"),
    *("´", "‗", "ﷺ", "ﬁ", "…", "ſ", "İ", "ΑΣ", "Straße", "a", "b", "x", ".", "``", "''", "-"),
    *(
        "a\u200b\u200bb",
        "▁",
        "▁a",
        BETWEEN,
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
    """XLM-R's parts, with another table of characters."""
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
    """ALBERT's normaliser, and spaces that nothing squeezes."""
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
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.normalizer = normalizers.BertNormalizer(lowercase=True)
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=1200, special_tokens=special, show_progress=False
    )
    learner.train_from_iterator(text, trainer)
    return learner


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


class Spy(LoneWords):
    """Remembers which words it was asked for."""

    asked: list[str]

    def cut(self, words):  # type: ignore[no-untyped-def]
        self.asked += words
        return super().cut(words)


def make_cache(tokenizer: Tokenizer, max_words: int = 1000) -> tuple[WordCache, Spy]:
    spy = Spy.of(tokenizer)
    assert isinstance(spy, Spy)
    spy.asked = []
    return WordCache(tokenizer, spy, max_words), spy


def split(ragged) -> list[list[int]]:  # type: ignore[no-untyped-def]
    ends = ragged.lengths.cumsum().tolist()
    starts = [0, *ends[:-1]]
    return [ragged.ids[a:b].tolist() for a, b in zip(starts, ends, strict=len(ends) > 0)]


def expect(tokenizer: Tokenizer, sentences: list[str]) -> list[list[int]]:
    return [tokenizer.encode(sentence, add_special_tokens=False).ids for sentence in sentences]


@each_kind
@given(blocks=st.lists(sentences, max_size=3))
def test_any_text_has_the_ids_of_the_tokenizer(
    kind: str, blocks: list[list[str]], kinds: dict[str, Tokenizer]
) -> None:
    """New words, known words, and words forgotten because the cache was full."""
    cache, _ = make_cache(kinds[kind], max_words=8)
    for block in [*blocks, *blocks]:
        assert split(cache.encode(block)) == expect(kinds[kind], block)


@each_kind
def test_every_two_pieces_side_by_side(kind: str, kinds: dict[str, Tokenizer]) -> None:
    cache, _ = make_cache(kinds[kind], max_words=100_000)
    for middle in ("", " ", "a ", " a", " \u0301", "\u0600 "):
        block = [left + middle + right for left in PIECES for right in PIECES]
        assert split(cache.encode(block)) == expect(kinds[kind], block)


@each_kind
@pytest.mark.parametrize("sentence", ["\u0605 a", "a\u0605 b", "\u0600 a", "a \u0301", "<s>\u0338"])
def test_one_odd_word_alone(kind: str, sentence: str, kinds: dict[str, Tokenizer]) -> None:
    """In a block, another odd word could save this one: if one cannot be told, none is."""
    cache, _ = make_cache(kinds[kind])
    assert split(cache.encode([sentence])) == expect(kinds[kind], [sentence])


@each_kind
def test_real_sentences(kind: str, kinds: dict[str, Tokenizer], text: list[str]) -> None:
    cache, spy = make_cache(kinds[kind], max_words=100_000)
    expected = expect(kinds[kind], text)
    assert split(cache.encode(text)) == expected
    n_asked = len(spy.asked)
    assert split(cache.encode(text)) == expected
    assert all(len(word) > MAX_CHARS for word in spy.asked[n_asked:])


@pytest.mark.parametrize("kind", ["embedded", "trained", "xlm-r", "raw"])
def test_plain_words_never_reach_the_tokenizer(
    kind: str, kinds: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all of the above would pass without a cache."""
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


def test_long_words_are_not_kept(kinds: dict[str, Tokenizer]) -> None:
    cache, spy = make_cache(kinds["trained"])
    long, longest_kept = "x" * (MAX_CHARS + 1), "x" * MAX_CHARS
    assert asked_for(spy, cache, f"{longest_kept} {long} one") == [longest_kept, "one", long]
    assert asked_for(spy, cache, f"one {long} {longest_kept}") == [long]


def test_a_full_cache_forgets_what_came_once(kinds: dict[str, Tokenizer]) -> None:
    cache, spy = make_cache(kinds["trained"], max_words=7)
    assert asked_for(spy, cache, "one two x y z") == ["one", "two", "x", "y", "z"]
    assert asked_for(spy, cache, "two one u v") == ["u", "v"]
    assert asked_for(spy, cache, "one x two") == ["x"]
    assert asked_for(spy, cache, "a b c d e", "e d c b a") == ["a", "b", "c", "d", "e"]
    # Five words came twice: keeping them would leave too little room.
    assert asked_for(spy, cache, "one a") == ["one", "a"]


def test_nothing_to_encode(kinds: dict[str, Tokenizer]) -> None:
    cache, _ = make_cache(kinds["trained"])
    assert split(cache.encode([])) == []
    assert split(cache.encode([""])) == [[]]


def byte_level(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()


def bare_first_word(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")


def marks_the_first_word_alone(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )


def pieces_over_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)


def no_pre_tokenizer(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = None  # type: ignore[assignment]


def rewrites_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(Regex("a b"), "c")


def rewrites_a_space(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a b", "c")])


def special_token_with_a_space(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["a b"])


def special_token_that_vanishes(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["\u200b"])


@pytest.mark.parametrize(
    "change",
    [
        byte_level,
        bare_first_word,
        marks_the_first_word_alone,
        pieces_over_spaces,
        no_pre_tokenizer,
        rewrites_spaces,
        rewrites_a_space,
        special_token_with_a_space,
        special_token_that_vanishes,
    ],
)
def test_other_tokenizers_encode_sentences_whole(
    change: Callable[[Tokenizer], None], tiny_tokenizer: PreTrainedTokenizerFast, text: list[str]
) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str())
    assert LoneWords.of(tokenizer) is not None
    change(tokenizer)
    assert LoneWords.of(tokenizer) is None
    block = [*text, "a b", " a b ", ""]
    assert split(make_sentence_encoder(tokenizer)(block)) == expect(tokenizer, block)


def test_pieces_by_chance_are_not_cached() -> None:
    model = models.BPE({"a": 0, "b": 1, "ab": 2, "▁": 3}, [("a", "b")], dropout=0.5)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert LoneWords.of(tokenizer) is None
    model.dropout = None
    assert LoneWords.of(tokenizer) is not None


def test_workers_start_without_torch() -> None:
    """What a spawned process imports to tokenise; torch would take it seconds."""
    code = "import calque.tokens.prepare, sys, json; print(json.dumps(list(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "transformers"}.isdisjoint(json.loads(run.stdout))
