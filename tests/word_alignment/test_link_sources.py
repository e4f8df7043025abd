"""Bitexts to be linked: names, languages, words, and what cannot be linked."""

from __future__ import annotations

from pathlib import Path

import pytest

from calque.errors import InputError
from calque.io.bitext import infer_languages, read_bitext
from calque.tokens.linked import MAX_WORDS
from calque.word_alignment.linked_bitext import BitextSource, LinkReport, find_bitexts, read_usable


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(
    text: str, name: str = "en-de.tsv", links: str | None = None, **options: object
) -> tuple[list[tuple[str, str]], LinkReport]:
    Path(name).write_text(text, encoding="utf-8")
    if links is not None:
        Path("given").write_text(links, encoding="utf-8")
    (source,) = find_bitexts([name], links=[] if links is None else ["given"], **options)  # type: ignore[arg-type]
    report = LinkReport()
    return [(pair.src, pair.tgt) for pair in read_usable(source, report)], report


@pytest.mark.parametrize(
    ("files", "languages", "name"),
    [
        (["bitext/en-de.tsv.xz"], None, "en-de"),
        (["en-de.text"], None, "en-de"),
        (["en-de"], None, "en-de"),
        (["hansards.en-fr.txt.gz"], None, "hansards.en-fr"),
        (["opus.v1.tsv.zst"], "en-de", "en-de.opus.v1"),
        (["foo-bar.tsv"], "en-de", "en-de.foo-bar"),
        (["de-en.tsv"], "en-de", "en-de.de-en"),
        (["news.en", "news.de"], None, "en-de.news"),
        (["a/news.en.gz", "b/news.de.gz"], None, "en-de.news"),
    ],
)
def test_names(files: list[str], languages: str | None, name: str) -> None:
    pair = None if languages is None else (languages[:2], languages[3:])
    (source,) = find_bitexts(files, languages=pair)
    assert source.name == name
    # A recipe must be able to read the languages from what is written.
    assert infer_languages(f"{name}.text") == source.languages == (pair or infer_languages(files))


def test_two_files_are_sides_if_their_names_say_so() -> None:
    assert len(find_bitexts(["en-de.tsv", "en-fr.tsv"])) == 2
    # Suffixes that could be languages, but are not.
    assert len(find_bitexts(["a.en-de.tsv", "a.en-fr.txt"])) == 2
    sides = find_bitexts(["src.txt", "tgt.txt"], format="moses", languages=("en", "de"))
    assert [source.name for source in sides] == ["en-de.src"]


def test_raw_text_is_split_by_its_languages() -> None:
    pairs, report = read("Ann's dog, here.\tAnns Hund, hier.\n")
    assert pairs == [("Ann 's dog , here .", "Anns Hund , hier .")]
    pairs, _ = read("L'eau\tthe water\n", "fr-en.tsv")
    assert pairs == [("L' eau", "the water")]
    assert (report.n_read, report.n_usable) == (1, 1)


def test_text_is_tidied_before_it_is_split() -> None:
    """Preparation removes marks of direction, and would drop what has another number of words."""
    pairs, _ = read("a\u200f b \u200f c\tCafe\u0301\xa0noir\n")
    assert pairs == [("a b c", "Caf\u00e9 noir")]


def test_words_that_stand_apart_stay() -> None:
    pairs, _ = read("Ann's  dog,\xa0here\tein Hund,\n", split="spaces")
    assert pairs == [("Ann's dog, here", "ein Hund,")]
    pairs, _ = read("Ann's dog, ||| ein Hund,\n", "corpus", split="spaces")
    assert pairs == [("Ann's dog,", "ein Hund,")]


def test_given_links_count_words_at_ascii_spaces() -> None:
    """A word that is or has another space cannot be written: links would be off."""
    text = "a  b\tc\na \u3000 b\tc\na\xa0b c\td\n|||\tx\na|||b c\tx\n\ufeff\tx\nCafe\u0301\tx\n"
    pairs, report = read(text, links="0-0\n" * 7)
    assert pairs == [("a b", "c"), ("Cafe\u0301", "x")]
    assert (report.n_read, report.n_unfit, report.n_usable) == (7, 5, 2)


def test_whatever_is_usable_is_read_again_as_it_is() -> None:
    characters = "a|\u3000\xa0\u2028\x1c\x85\u200c\xad\ufeff\u00e9"
    words = [x + y + z for x in characters for y in characters for z in characters]
    text = "".join(f"b {word}\tc\n" for word in words)
    pairs, _ = read(text, links="\n" * len(words))
    Path("out").write_text("".join(f"{src} ||| {tgt}\n" for src, tgt in pairs), encoding="utf-8")
    again = [(pair.src.split(), pair.tgt.split()) for pair in read_bitext("out", "pipes")]
    assert again == [(src.split(" "), tgt.split(" ")) for src, tgt in pairs]
    assert 0 < len(pairs) < len(words)


def test_sentences_of_too_many_words_are_counted() -> None:
    pairs, report = read("a " * (MAX_WORDS + 1) + "\tb\n" + "a " * MAX_WORDS + "\tb\n")
    assert [len(src.split()) for src, _ in pairs] == [MAX_WORDS]
    assert report.n_unfit == 1


def test_empty_sides_and_tags_are_counted() -> None:
    Path("en-de.tsv").write_text("a\tb\tnews\n\tb\tnews\na\t \tnews\nc\td\tbible\ne\tf\n")
    (source,) = find_bitexts(["en-de.tsv"])
    for options, texts, n_other, n_empty in (
        ({}, "ace", 0, 2),
        ({"include_tags": ["news"]}, "a", 2, 2),
        ({"exclude_tags": ["news"]}, "ce", 3, 0),
        ({"include_tags": ["news", "bible"], "exclude_tags": ["news"]}, "c", 4, 0),
    ):
        report = LinkReport()
        pairs = list(read_usable(source, report, **options))  # type: ignore[arg-type]
        assert "".join(pair.src for pair in pairs) == texts
        assert (report.n_read, report.n_other_tags, report.n_empty) == (5, n_other, n_empty)


def test_nothing_to_link_is_an_error() -> None:
    with pytest.raises(InputError, match=r"en-de.tsv: none of its 2 pairs .*2 have an empty side"):
        read("\ta\n \t\n")


def test_lines_of_links_are_as_many_as_pairs() -> None:
    for links, found in (("0-0\n", 1), ("0-0\n" * 4, 4)):
        with pytest.raises(
            InputError, match=f"given, .*{found} lines of links, but en-de.tsv has 3"
        ):
            read("a\tb\n" * 3, links=links)


def test_refusals() -> None:
    Path("folder").mkdir()
    for files, options, problem in (
        (["x.tsv"], {}, "x.tsv: its name does not tell its languages"),
        (["-"], {}, "standard input: a pipe has no name"),
        (["folder"], {}, "folder: a folder"),
        (["a/en-de.tsv", "b/en-de.tsv.gz"], {}, "2 bitexts would be called en-de"),
        (
            ["en-th.tsv"],
            {},
            "en-th.tsv: Thai puts no spaces .* give --split spaces, or leave it out",
        ),
        (["en-cn.tsv"], {}, "en-cn.tsv: 'cn' is a country"),
        (["a", "b", "c"], {"format": "moses"}, r"3 file\(s\) given as moses"),
        (["en-de.tsv", "en-fr.tsv"], {"links": ["x"]}, "1 files of links for 2 bitexts"),
        (["en-th.tsv"], {"leave_out": ["th"]}, "all bitexts are left out"),
    ):
        with pytest.raises(InputError, match=problem):
            find_bitexts(files, **options)
    (left,) = find_bitexts(["en-th.tsv", "en-de.tsv"], leave_out=["th", "ko"])
    assert left == BitextSource(("en-de.tsv",), ("en", "de"))
