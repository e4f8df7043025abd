"""Dictionaries read for the words in question: columns by name, once a file, swapped ones told."""

from __future__ import annotations

from pathlib import Path

import pytest

from calque.errors import InputError
from calque.growth.match import DictionaryUse, read_translations

ENGLISH = {"cat", "dog", "the", "to", "house", *(f"en{k}" for k in range(30))}


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def is_known(word: str) -> bool:
    return word in ENGLISH


def test_columns_by_name(tmp_path: Path) -> None:
    first = write(tmp_path / "en-de.0-5000.txt", "cat Katze", "cat Kater", "dog Hund")
    second = write(tmp_path / "de-en.txt", "Katze cat", "Katze puss", "Hut hat")
    third = write(tmp_path / "my words.txt", "house\tHaus")
    wanted = {"katze", "hund", "haus"}
    found, uses = read_translations([first, second, third], "en", wanted, is_known)
    assert found.look_up("Katze") == {"cat": 2, "puss": 1}
    assert found.look_up("Hund") == {"dog": 1}
    assert found.look_up("Haus") == {"house": 1}
    assert found.look_up("Kater") == {}  # not asked for
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


def test_a_repeated_line_counts_once_a_file(tmp_path: Path) -> None:
    lines = ("cat Katze", "cat Katze", "puss Katze")
    paths = [write(tmp_path / f"en-de.{k}.txt", *lines) for k in range(2)]
    found, uses = read_translations(paths, "en", {"katze"}, is_known)
    assert found.look_up("Katze") == {"cat": 2, "puss": 2}
    assert [(use.n_entries, use.n_used) for use in uses] == [(3, 2), (3, 2)]


def test_another_language(tmp_path: Path) -> None:
    path = write(tmp_path / "de-en.txt", "Katze cat")
    found, _ = read_translations([path], "de", {"cat"}, is_known=lambda word: False)
    assert found.look_up("cat") == {"Katze": 1}
    with pytest.raises(InputError, match=r"de-en\.txt: by its name .* no column of 'fr'"):
        read_translations([path], "fr", {"cat"}, is_known)


def test_swapped_columns_are_told(tmp_path: Path) -> None:
    lines = [f"de{k} en{k}" for k in range(30)]
    path = write(tmp_path / "en-de.txt", *lines)
    with pytest.raises(InputError, match=r"the columns look swapped: .* 0 words .* 30 of the oth"):
        read_translations([path], "en", set(), is_known)
    read_translations([write(tmp_path / "de-en.txt", *lines)], "en", set(), is_known)


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "en-de.txt", "cat Katze", "one two three")
    with pytest.raises(InputError, match=r"en-de\.txt, line 2: 3 words where 2 are due"):
        read_translations([path], "en", set(), is_known)
    empty = write(tmp_path / "en-fr.txt")
    assert read_translations([empty], "en", set(), is_known)[1][0].n_entries == 0


def test_columns_by_name_in_capitals(tmp_path: Path) -> None:
    path = write(tmp_path / "DE-EN.txt", "Katze cat")
    found, _ = read_translations([path], "en", {"katze"}, is_known)
    assert found.look_up("Katze") == {"cat": 1}
