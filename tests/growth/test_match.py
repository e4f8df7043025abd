"""Vocabulary matching between three kinds of tokenizers; reading of dictionaries."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.toy_tokenizers import byte_level, sentence_piece, word_piece
from tokenizers import pre_tokenizers

from calque.errors import InputError
from calque.growth.match import (
    RULES,
    DictionaryUse,
    VocabularyMatch,
    match_rows,
    read_translations,
)
from calque.tokens.vocabularies import PieceIndex, Vocabulary

Row = tuple[str, dict[str, float]]


def match(new: Any, mono: Any, *dictionaries: Path, **options: Any) -> VocabularyMatch:
    return match_rows(Vocabulary.of(new), PieceIndex(mono), dictionaries, **options)


def rows_of(new: Any, mono: Any, *dictionaries: Path, **options: Any) -> dict[str, Row]:
    """Return the rule of every new piece, and its sources with their weights."""
    found = match(new, mono, *dictionaries, **options)
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
        "cat": NONE,  # only at the start of a word
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
        "▁café": same("cafe", "folded"),  # as the tokenizer normalizes it
    }
    assert {piece: found[piece] for piece in expected} == expected


def test_what_is_left_takes_the_mean_of_its_pieces(bert: Any) -> None:
    """Only on request, and after all other rules."""
    new = sentence_piece(["▁cat", "▁outside", "outside", "▁cats", "▁Дом", "▁"])
    found = rows_of(new, bert, split=True)
    assert found["▁cat"] == same("cat")
    half = ("split", {"out": 0.5, "##side": 0.5})
    assert (found["▁outside"], found["outside"]) == (half, half)
    assert found["▁cats"] == ("split", {"cat": 0.5, "##s": 0.5})
    assert (found["▁Дом"], found["▁"]) == (NONE, NONE)  # unknown characters, no characters
    assert rows_of(new, bert)["▁cats"] == NONE


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
    assert found["▁[CLS]"] == NONE  # a text that looks like a special token


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
    assert found[","] == same(",")  # without a space
    assert found["("] == same("Ġ(")  # with a space
    assert found["##t"] == same("t")
    assert found["##ä"] == same("Ã¤")  # two bytes, one letter


def test_bytes_match_only_bytes() -> None:
    """A part of a character is found only in other vocabularies of bytes."""
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
    letters = sentence_piece([piece, "▁" + piece])  # the letter Ã is not that byte
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
    found = rows_of(sentence_piece([*pieces, "▁neu"]), bert, german)
    half = pytest.approx(0.5)
    assert found["▁Katze"] == same("cat", "dictionary")
    assert found["▁Kater"] == ("dictionary", {"cat": half, "tom": half})
    assert found["▁kater"] == found["▁Kater"]  # in any case
    assert found["▁Haus"] == same("house", "dictionary")
    assert found["Haus"] == NONE  # not at the start of a word
    assert found["▁draußen"] == ("composed", {"out": half, "##side": half})
    assert found["▁die"] == same("the", "dictionary")  # translations come before equal text
    assert found["▁zu"] == ("dictionary", {"to": half, "the": half})
    assert found["▁Hund"] == NONE  # "dog" is unknown to this BERT
    assert found["▁neu"] == NONE


def test_more_dictionaries_more_weight(bert: Any, german: Path, tmp_path: Path) -> None:
    turned = tmp_path / "de-en.txt"
    turned.write_text("zu to\nzu outside\n", encoding="utf-8")
    found = match(sentence_piece(["▁zu"]), bert, german, turned, average="weighted")
    rows = rows_of(sentence_piece(["▁zu"]), bert, german, turned, average="weighted")
    weights = {"to": 2 / 4, "the": 1 / 4, "out": 1 / 8, "##side": 1 / 8}
    assert rows["▁zu"] == ("composed", pytest.approx(weights))
    assert list(found.meanings.values()) == [["to", "the", "outside"]]
    assert [use.n_used for use in found.dictionaries] == [2, 2]


def test_plain_mean_of_translations(bert: Any, german: Path, tmp_path: Path) -> None:
    """As in the paper: a translation counts once, and the word itself counts like any other."""
    turned = tmp_path / "de-en.txt"
    turned.write_text("zu to\nzu outside\nzu the\nouts cats\nouts out\nouts outs\n", "utf-8")
    new = sentence_piece(["▁zu", "▁outs"])
    found = rows_of(new, bert, german, turned)
    index = PieceIndex(bert)
    for piece, translations in {"▁zu": ["to", "the", "outside"], "▁outs": ["cats", "out"]}.items():
        expected: dict[str, float] = {}
        for word in translations:  # mean over the translations of the mean over their pieces
            pieces = bert.convert_ids_to_tokens(index.tokenize_words([word])[word])
            for each in pieces:
                expected[each] = expected.get(each, 0) + 1 / len(translations) / len(pieces)
        if piece == "▁outs":  # its own translation has two pieces, too
            expected = {k: v * 2 / 3 for k, v in expected.items()}
            for each in ("out", "##s"):
                expected[each] = expected.get(each, 0) + 1 / 6
        assert found[piece] == ("composed", pytest.approx(expected))
    assert found != rows_of(new, bert, german, turned, average="weighted")


def test_without_composition(bert: Any, german: Path) -> None:
    found = rows_of(sentence_piece(["▁draußen", "▁zu"]), bert, german, compose=False)
    assert found["▁draußen"] == NONE
    assert found["▁zu"][0] == "dictionary"


def test_dictionaries_or_equal_text_first(bert: Any, german: Path) -> None:
    new = sentence_piece(["▁die", "▁Die", "▁cat", "▁er"])
    found = rows_of(new, bert, german)
    assert found["▁die"] == same("the", "dictionary")
    assert found["▁Die"] == same("the", "dictionary")
    assert found["▁cat"] == same("cat")
    assert found["▁er"] == same("er", "dictionary")
    without = match(new, bert, german).rules_without
    assert [RULES[rule] for rule in without[4:8]] == ["exact", "normalized", "exact", "exact"]
    surface = rows_of(new, bert, german, prefer="surface")
    assert surface["▁die"] == same("die")
    assert surface["▁er"] == same("er")
    assert surface["▁Die"] == same("die", "normalized")


def test_dictionaries_first_in_foreign_scripts(bert: Any, tmp_path: Path) -> None:
    """An English model knows little about the meaning of other scripts."""
    path = tmp_path / "en-xx.txt"
    path.write_text("big 中\nto и\nhouse 房子\n", encoding="utf-8")
    mono = word_piece([*bert.get_vocab(), *(f"word{k}" for k in range(40))])
    found = rows_of(sentence_piece(["中", "▁и", "и", "房子", "中国"]), mono, path)
    assert found["中"] == same("big", "dictionary")  # a word anywhere, because there are no spaces
    assert found["房子"] == same("house", "dictionary")
    assert found["▁и"] == same("to", "dictionary")
    assert found["и"] == NONE
    without = rows_of(sentence_piece(["中", "▁и"]), mono)
    assert (without["中"], without["▁и"]) == (same("中"), same("и"))


def test_a_word_that_is_its_own_translation(bert: Any, tmp_path: Path) -> None:
    """MUSE has many words as their own translation, which adds noise."""
    path = tmp_path / "en-de.txt"
    path.write_text("out outs\nouts outs\ncats cats\n", encoding="utf-8")
    found = rows_of(sentence_piece(["▁outs", "▁cats"]), bert, path, average="weighted")
    assert found["▁outs"] == same("out", "dictionary")
    half = pytest.approx(0.5)
    assert found["▁cats"] == ("composed", {"cat": half, "##s": half})  # the only translation


def test_words_of_a_cased_model(tmp_path: Path) -> None:
    """MUSE is in lower case; "germany" finds "Germany"."""
    path = tmp_path / "en-de.txt"
    path.write_text("germany deutschland\n", encoding="utf-8")
    mono = sentence_piece(["▁Germany", "▁germ", "any"])
    found = rows_of(sentence_piece(["▁Deutschland"]), mono, path)
    assert found["▁Deutschland"] == same("▁Germany", "dictionary")


def test_composition_ignores_the_bare_word_start(tmp_path: Path) -> None:
    path = tmp_path / "zh-en.txt"
    path.write_text("中国 china\n", encoding="utf-8")
    mono = sentence_piece(["▁", "中", "国", "▁a"])
    found = rows_of(word_piece(["china"]), mono, path, language="zh")
    half = pytest.approx(0.5)
    assert found["china"] == ("composed", {"中": half, "国": half})


def test_composition_starts_a_word_with_any_tokenizer(tmp_path: Path) -> None:
    """Tokenizers like Gemma's put no `▁` before the first word of a text."""
    mono = sentence_piece(["▁cat", "cat", "▁c", "s", "t"])
    mono.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    (tmp_path / "en-de.txt").write_text("cats katzen\n", encoding="utf-8")
    found = rows_of(sentence_piece(["▁katzen"]), mono, tmp_path / "en-de.txt")
    assert found["▁katzen"] == ("composed", {"▁cat": 0.5, "s": 0.5})


def test_a_chinese_model_knows_words_by_their_characters(tmp_path: Path) -> None:
    """Chinese words of several pieces do not indicate swapped columns."""
    english = [f"w{number}" for number in range(40)]
    characters = "中国美人大日本"
    mono = word_piece([*characters, *english])
    chinese = map("".join, permutations(characters, 2))
    lines = [f"{word} {other}" for word, other in zip(chinese, english, strict=False)]
    path = tmp_path / "zh-en.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    found = rows_of(sentence_piece(["▁x1"]), mono, path, language="zh")
    assert found["▁x1"] == NONE
    assert not PieceIndex(mono).is_known("中x")
    path.write_text("\n".join(f"词{k}语 {word}" for k, word in enumerate(english)), "utf-8")
    with pytest.raises(
        InputError, match="knows 0 words of the zh column and 40 words of the other"
    ):
        match(sentence_piece(["▁x1"]), mono, path, language="zh")


def test_unspelled_translations_are_counted(bert: Any, german: Path) -> None:
    assert match(sentence_piece(["▁Hund", "▁Katze"]), bert, german).n_unspelled == 1


ENGLISH = {"cat", "dog", "the", "to", "house", *(f"en{k}" for k in range(30))}


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def is_known(word: str) -> bool:
    return word in ENGLISH


def test_the_file_name_names_the_columns(tmp_path: Path) -> None:
    first = write(tmp_path / "en-de.0-5000.txt", "cat Katze", "cat Kater", "dog Hund")
    second = write(tmp_path / "de-en.txt", "Katze cat", "Katze puss", "Hut hat")
    third = write(tmp_path / "my words.txt", "house\tHaus")
    wanted = {"katze", "hund", "haus"}
    found, uses = read_translations([first, second, third], "en", wanted, is_known)
    assert found.look_up("Katze") == {"cat": 2, "puss": 1}
    assert found.look_up("Hund") == {"dog": 1}
    assert found.look_up("Haus") == {"house": 1}
    assert found.look_up("Kater") == {}  # not wanted
    assert uses == [
        DictionaryUse(str(first), 3, 2),
        DictionaryUse(str(second), 3, 2),
        DictionaryUse(str(third), 1, 1),
    ]


def test_a_word_is_looked_up_as_written_first(tmp_path: Path) -> None:
    path = write(tmp_path / "en-de.txt", "food Essen", "eat essen", "eat ESSEN")
    found, _ = read_translations([path], "en", {"essen"}, is_known)
    assert found.look_up("Essen") == {"food": 1}
    assert found.look_up("essen") == {"eat": 1}
    assert found.look_up("eSSen") == {"food": 1, "eat": 2}
    assert found.look_up("Esse") == {}


def test_repeated_lines_count_once_per_file(tmp_path: Path) -> None:
    lines = ("cat Katze", "cat Katze", "puss Katze")
    paths = [write(tmp_path / f"en-de.{k}.txt", *lines) for k in range(2)]
    found, uses = read_translations(paths, "en", {"katze"}, is_known)
    assert found.look_up("Katze") == {"cat": 2, "puss": 2}
    assert [(use.n_entries, use.n_used) for use in uses] == [(3, 2), (3, 2)]


def test_dictionaries_of_another_language(tmp_path: Path) -> None:
    path = write(tmp_path / "de-en.txt", "Katze cat")
    found, _ = read_translations([path], "de", {"cat"}, is_known=lambda word: False)
    assert found.look_up("cat") == {"Katze": 1}
    with pytest.raises(InputError, match=r"de-en\.txt: the file name has no column of 'fr'"):
        read_translations([path], "fr", {"cat"}, is_known)


def test_swapped_columns_raise(tmp_path: Path) -> None:
    lines = [f"de{k} en{k}" for k in range(30)]
    path = write(tmp_path / "en-de.txt", *lines)
    with pytest.raises(
        InputError, match=r"the columns seem to be swapped: .* 0 words .* 30 words of the oth"
    ):
        read_translations([path], "en", set(), is_known)
    read_translations([write(tmp_path / "de-en.txt", *lines)], "en", set(), is_known)


def test_an_invalid_line_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "en-de.txt", "cat Katze", "one two three")
    with pytest.raises(InputError, match=r"en-de\.txt, line 2: the line has 3 words instead of 2"):
        read_translations([path], "en", set(), is_known)
    empty = write(tmp_path / "en-fr.txt")
    assert read_translations([empty], "en", set(), is_known)[1][0].n_entries == 0


def test_file_names_in_capitals(tmp_path: Path) -> None:
    path = write(tmp_path / "DE-EN.txt", "Katze cat")
    found, _ = read_translations([path], "en", {"katze"}, is_known)
    assert found.look_up("Katze") == {"cat": 1}
