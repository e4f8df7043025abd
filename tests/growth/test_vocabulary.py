"""Vocabulary matching, row by row, between the three kinds of tokenizers."""

from __future__ import annotations

import runpy
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from calque.errors import InputError
from calque.growth.match import RULES, Glossary, VocabularyMatch, match_vocabularies
from calque.tokens.vocabularies import PieceIndex, Vocabulary

TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_tokenizers.py"))
word_piece, sentence_piece, byte_level = (
    TOYS[name] for name in ("word_piece", "sentence_piece", "byte_level")
)
Row = tuple[str, dict[str, float]]


def match(new: Any, mono: Any, glossary: Glossary | None = None) -> VocabularyMatch:
    return match_vocabularies(Vocabulary.of(new), PieceIndex(mono), glossary)


def rows_of(new: Any, mono: Any, glossary: Glossary | None = None) -> dict[str, Row]:
    """Give the rule of every new piece, and its sources with their weights."""
    found = match(new, mono, glossary)
    parts: list[dict[str, float]] = [{} for _ in found.rules]
    sources = found.sources
    for row, source, weight in zip(sources.rows, sources.sources, sources.weights, strict=True):
        token = mono.convert_ids_to_tokens(int(source))
        parts[row][token] = parts[row].get(token, 0) + float(weight)
    rules = [RULES[rule] for rule in found.rules]
    tokens = new.convert_ids_to_tokens(range(len(rules)))
    return dict(zip(tokens, zip(rules, parts, strict=True), strict=True))


def same(token: str, rule: str = "exact") -> Row:
    return rule, {token: 1.0}


NONE: Row = ("unmatched", {})


@pytest.fixture
def bert() -> Any:
    pieces = ["cat", "##s", "house", "to", "the", "er", "##er", "tom", ",", "##,", "(", "##(", "中"]
    return word_piece([*pieces, "s", "cafe", "big", "out", "##side", "и", "die", "c", "##at"])


def test_sentence_pieces_from_word_pieces(bert: Any) -> None:
    pieces = ["▁cat", "cat", "s", "▁s", "▁Cat", "▁ＣＡＴ", "▁Tom", ",", "▁,", "(", "中", "▁中", "▁"]
    found = rows_of(sentence_piece([*pieces, "▁Katze", "er", "ER", "▁café"]), bert)
    expected = {
        "▁cat": same("cat"),
        "cat": NONE,  # only as a word's start
        "s": same("##s"),
        "▁s": same("s"),
        "▁Cat": same("cat", "normalized"),
        "▁ＣＡＴ": same("cat", "normalized"),
        "▁Tom": same("tom", "normalized"),
        ",": same(","),  # not ##, which BERT never uses
        "▁,": same(","),
        "(": same("("),
        "中": same("中"),
        "▁中": same("中"),
        "▁": NONE,
        "▁Katze": NONE,
        "er": same("##er"),
        "ER": same("##er", "normalized"),
        "▁café": same("cafe", "folded"),  # as the tokenizer itself reads it
    }
    assert {piece: found[piece] for piece in expected} == expected


def test_special_tokens_by_role(bert: Any) -> None:
    found = rows_of(sentence_piece(["▁[CLS]"]), bert)
    roles = {
        "<s>": "[CLS]",
        "</s>": "[SEP]",
        "<pad>": "[PAD]",
        "<unk>": "[UNK]",
        "<mask>": "[MASK]",
    }
    assert {token: found[token] for token in roles} == {
        token: same(old, "special") for token, old in roles.items()
    }
    assert found["▁[CLS]"] == NONE  # a text that only looks like one


def test_other_special_tokens_by_name(bert: Any) -> None:
    new, mono = sentence_piece(["▁cat"]), sentence_piece(["▁cat"])
    new.add_special_tokens({"additional_special_tokens": ["<de>", "<fr>"]})
    mono.add_special_tokens({"additional_special_tokens": ["<de>"]})
    found = rows_of(new, mono)
    assert found["<de>"] == same("<de>", "special")
    assert found["<fr>"] == NONE
    assert rows_of(new, bert)["<de>"] == NONE


def test_word_pieces_from_byte_level() -> None:
    text = ["the cat sat, the cat (the cat) sat", "xä yä zä wä uä"] * 3
    mono = byte_level(text, 300)
    assert {"Ġcat", "Ġthe", ",", "Ġ("} <= set(mono.get_vocab())
    found = rows_of(word_piece(["cat", "The", ",", "(", "##t", "ä", "##ä"], lowercase=False), mono)
    assert found["cat"] == same("Ġcat")
    assert found["The"] == same("Ġthe", "normalized")
    assert found[","] == same(",")  # follows a word
    assert found["("] == same("Ġ(")  # opens
    assert found["##t"] == same("t")
    assert found["##ä"] == same("Ã¤")  # two bytes, one letter


def test_bytes_match_bytes_alone() -> None:
    """Half of a character is found in another vocabulary of bytes, and nowhere else."""
    bytes_alone = byte_level(["plain"], 280)
    half = "ä".encode()[0]
    piece = next(
        token
        for token, text in zip(
            Vocabulary.of(bytes_alone).tokens, Vocabulary.of(bytes_alone).texts, strict=True
        )
        if text == bytes([half]).decode("utf-8", "surrogateescape")
    )
    assert piece == "Ã"
    assert rows_of(byte_level(["other words"], 280), bytes_alone)[piece] == same(piece)
    assert rows_of(sentence_piece(["<0xC3>"]), bytes_alone)["<0xC3>"] == same(piece)
    letters = sentence_piece([piece, "▁" + piece])  # the letter Ã is another thing
    assert rows_of(bytes_alone, letters)[piece] == NONE
    assert rows_of(letters, bytes_alone)[piece] == NONE


def test_a_vocabulary_matches_itself(bert: Any, tiny_tokenizer: Any) -> None:
    for tokenizer in (bert, tiny_tokenizer, byte_level(["the cat", "die Katze", "猫"], 320)):
        found = match(tokenizer, tokenizer)
        tokens = Vocabulary.of(tokenizer).tokens
        used = [k for k, token in enumerate(tokens) if token not in ("##,", "##(")]
        assert set(found.rules[used]) == {RULES.index("special"), RULES.index("exact")}
        np.testing.assert_array_equal(found.sources.rows, np.arange(len(found.rules)))
        np.testing.assert_array_equal(found.sources.sources[used], used)
        assert (found.sources.weights == 1).all()


@pytest.fixture
def german(tmp_path: Path) -> Path:
    lines = [
        "cat Katze", "cat Kater", "tom Kater", "house haus", "outside draußen", "the die",
        "to zu", "the zu", "er er", "dog Hund", "café Café",
    ]  # fmt: skip
    path = tmp_path / "en-de.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_translations(bert: Any, german: Path) -> None:
    pieces = ["▁Katze", "▁Kater", "▁kater", "▁Haus", "Haus", "▁draußen", "▁die", "▁zu", "▁Hund"]
    found = rows_of(sentence_piece([*pieces, "▁neu"]), bert, Glossary([german]))
    half = pytest.approx(0.5)
    assert found["▁Katze"] == same("cat", "dictionary")
    assert found["▁Kater"] == ("dictionary", {"cat": half, "tom": half})
    assert found["▁kater"] == found["▁Kater"]  # whatever its case
    assert found["▁Haus"] == same("house", "dictionary")
    assert found["Haus"] == NONE  # inside a word it is no word
    assert found["▁draußen"] == ("composed", {"out": half, "##side": half})
    assert found["▁die"] == same("die")  # what it spells goes first
    assert found["▁zu"] == ("dictionary", {"to": half, "the": half})
    assert found["▁Hund"] == NONE  # BERT cannot spell "dog" here
    assert found["▁neu"] == NONE


def test_more_dictionaries_more_weight(bert: Any, german: Path, tmp_path: Path) -> None:
    turned = tmp_path / "de-en.txt"
    turned.write_text("zu to\nzu outside\n", encoding="utf-8")
    found = match(sentence_piece(["▁zu"]), bert, Glossary([german, turned]))
    rows = rows_of(sentence_piece(["▁zu"]), bert, Glossary([german, turned]))
    weights = {"to": 2 / 4, "the": 1 / 4, "out": 1 / 8, "##side": 1 / 8}
    assert rows["▁zu"] == ("composed", pytest.approx(weights))
    assert list(found.meanings.values()) == [["to", "the", "outside"]]
    assert [use.n_used for use in found.dictionaries] == [2, 2]


def test_without_composition(bert: Any, german: Path) -> None:
    found = rows_of(sentence_piece(["▁draußen", "▁zu"]), bert, Glossary([german], composes=False))
    assert found["▁draußen"] == NONE
    assert found["▁zu"][0] == "dictionary"


def test_dictionaries_first(bert: Any, german: Path) -> None:
    new = sentence_piece(["▁die", "▁Die", "▁cat", "▁er"])
    found = rows_of(new, bert, Glossary([german], prefer="dictionary"))
    assert found["▁die"] == same("the", "dictionary")
    assert found["▁Die"] == same("the", "dictionary")
    assert found["▁cat"] == same("cat")
    assert found["▁er"] == same("er", "dictionary")
    without = match(new, bert, Glossary([german], prefer="dictionary")).rules_without
    assert [RULES[rule] for rule in without[4:8]] == ["exact", "normalized", "exact", "exact"]


def test_dictionaries_first_in_foreign_scripts(bert: Any, tmp_path: Path) -> None:
    """A letter or ideograph in an English vocabulary knows little of what it means elsewhere."""
    path = tmp_path / "en-xx.txt"
    path.write_text("big 中\nto и\nhouse 房子\n", encoding="utf-8")
    mono = word_piece([*bert.get_vocab(), *(f"word{k}" for k in range(40))])
    found = rows_of(sentence_piece(["中", "▁и", "и", "房子", "中国"]), mono, Glossary([path]))
    assert found["中"] == same("big", "dictionary")  # no spaces there: a word anywhere
    assert found["房子"] == same("house", "dictionary")
    assert found["▁и"] == same("to", "dictionary")
    assert found["и"] == NONE
    without = rows_of(sentence_piece(["中", "▁и"]), mono)
    assert (without["中"], without["▁и"]) == (same("中"), same("и"))


def test_a_word_that_means_itself(bert: Any, tmp_path: Path) -> None:
    """MUSE says of many words that they also mean themselves; spelling them adds noise."""
    path = tmp_path / "en-de.txt"
    path.write_text("out outs\nouts outs\ncats cats\n", encoding="utf-8")
    found = rows_of(sentence_piece(["▁outs", "▁cats"]), bert, Glossary([path]))
    assert found["▁outs"] == same("out", "dictionary")
    half = pytest.approx(0.5)
    assert found["▁cats"] == ("composed", {"cat": half, "##s": half})  # a name: all there is


def test_words_of_a_cased_model(tmp_path: Path) -> None:
    """MUSE is lower-cased; "germany" is found though the model only has "Germany"."""
    path = tmp_path / "en-de.txt"
    path.write_text("germany deutschland\n", encoding="utf-8")
    mono = sentence_piece(["▁Germany", "▁germ", "any"])
    found = rows_of(sentence_piece(["▁Deutschland"]), mono, Glossary([path]))
    assert found["▁Deutschland"] == same("▁Germany", "dictionary")


def test_composition_leaves_the_bare_word_start_out(tmp_path: Path) -> None:
    path = tmp_path / "zh-en.txt"
    path.write_text("中国 china\n", encoding="utf-8")
    mono = sentence_piece(["▁", "中", "国", "▁a"])
    found = rows_of(word_piece(["china"]), mono, Glossary([path], language="zh"))
    half = pytest.approx(0.5)
    assert found["china"] == ("composed", {"中": half, "国": half})


def test_composition_starts_a_word_whatever_the_tokenizer(tmp_path: Path) -> None:
    """One of Gemma's kind puts no `▁` before a text's first word."""
    mono = sentence_piece(["▁cat", "cat", "▁c", "s", "t"])
    mono.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    (tmp_path / "en-de.txt").write_text("cats katzen\n", encoding="utf-8")
    found = rows_of(sentence_piece(["▁katzen"]), mono, Glossary([tmp_path / "en-de.txt"]))
    assert found["▁katzen"] == ("composed", {"▁cat": 0.5, "s": 0.5})


def test_a_chinese_model_knows_its_words_by_characters(tmp_path: Path) -> None:
    """Few Chinese words are one piece, and many an English one: no sign of swapped columns."""
    english = [f"w{number}" for number in range(40)]
    characters = "中国美人大日本"
    mono = word_piece([*characters, *english])
    chinese = map("".join, permutations(characters, 2))
    lines = [f"{word} {other}" for word, other in zip(chinese, english, strict=False)]
    path = tmp_path / "zh-en.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    found = rows_of(sentence_piece(["▁x1"]), mono, Glossary([path], language="zh"))
    assert found["▁x1"] == NONE
    assert not PieceIndex(mono).is_known("中x")
    path.write_text("\n".join(f"词{k}语 {word}" for k, word in enumerate(english)), "utf-8")
    with pytest.raises(InputError, match="knows 0 words of the zh column, 40 of the other"):
        match(sentence_piece(["▁x1"]), mono, Glossary([path], language="zh"))


def test_unspelled_translations_are_counted(bert: Any, german: Path) -> None:
    assert match(sentence_piece(["▁Hund", "▁Katze"]), bert, Glossary([german])).n_unspelled == 1
