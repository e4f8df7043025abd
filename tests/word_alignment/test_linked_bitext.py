"""Linked bitext: names, languages and words of bitexts; filters, reports and errors."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.bitext import infer_languages, read_bitext
from calque.io.cleaning import CleaningReport, CleaningRules
from calque.tokens.linked import MAX_WORDS, read_linked
from calque.types import Links
from calque.word_alignment.linked_bitext import (
    BitextSource,
    LinkReport,
    LinkRules,
    filter_links,
    find_bitexts,
    link_bitext,
)
from calque.word_alignment.protocol import AlignedBlock, AlignReport, AlignWarning, WordPair

DATA = Path(__file__).parents[1] / "data"
KEEP_ALL = {"keep_identical": True, "keep_many": True, "keep_empty": True}
LinkLists = list[list[tuple[int, int]]]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# Bitexts


def read(
    text: str, name: str = "en-de.tsv", links: str | None = None, **options: object
) -> tuple[list[tuple[str, str]], LinkReport]:
    Path(name).write_text(text, encoding="utf-8")
    if links is not None:
        Path("given").write_text(links, encoding="utf-8")
    (source,) = find_bitexts([name], links=[] if links is None else ["given"], **options)  # type: ignore[arg-type]
    report = LinkReport()
    return [(pair.src, pair.tgt) for pair in source.read_usable(report)], report


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
    # A recipe must be able to infer the languages from the name of the output.
    assert infer_languages(f"{name}.text") == source.languages == (pair or infer_languages(files))


def test_two_files_are_sides_if_they_are_named_after_languages() -> None:
    assert len(find_bitexts(["en-de.tsv", "en-fr.tsv"])) == 2
    # Suffixes that could be languages but are not.
    assert len(find_bitexts(["a.en-de.tsv", "a.en-fr.txt"])) == 2
    sides = find_bitexts(["src.txt", "tgt.txt"], format="moses", languages=("en", "de"))
    assert [source.name for source in sides] == ["en-de.src"]


def test_raw_text_is_split_by_its_languages() -> None:
    pairs, report = read("Ann's dog, here.\tAnns Hund, hier.\n")
    assert pairs == [("Ann 's dog , here .", "Anns Hund , hier .")]
    pairs, _ = read("L'eau\tthe water\n", "fr-en.tsv")
    assert pairs == [("L' eau", "the water")]
    assert (report.n_read, report.n_usable) == (1, 1)


def test_text_is_normalized_before_it_is_split() -> None:
    """Preparation normalizes text, and would drop a pair whose number of words changes."""
    pairs, _ = read("a\u200f b \u200f c\tCafe\u0301\xa0noir\n")
    assert pairs == [("a b c", "Caf\u00e9 noir")]


def test_tokenized_text_is_split_at_spaces() -> None:
    pairs, _ = read("Ann's  dog,\xa0here\tein Hund,\n", tokenized=True)
    assert pairs == [("Ann's dog, here", "ein Hund,")]
    pairs, _ = read("Ann's dog, ||| ein Hund,\n", "corpus", tokenized=True)
    assert pairs == [("Ann's dog,", "ein Hund,")]


def test_given_links_count_words_at_ascii_spaces() -> None:
    """A word that contains another kind of space cannot be written: links would not match."""
    text = "a  b\tc\na \u3000 b\tc\na\xa0b c\td\n|||\tx\na|||b c\tx\n\ufeff\tx\nCafe\u0301\tx\n"
    pairs, report = read(text, links="0-0\n" * 7)
    assert pairs == [("a b", "c"), ("Cafe\u0301", "x")]
    assert (report.n_read, report.n_unfit, report.n_usable) == (7, 5, 2)


def test_usable_text_is_read_again_unchanged() -> None:
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
        ({"include_tags": ("news",)}, "a", 2, 2),
        ({"exclude_tags": ("news",)}, "ce", 3, 0),
        ({"include_tags": ("news", "bible"), "exclude_tags": ("news",)}, "c", 4, 0),
    ):
        report = LinkReport()
        pairs = list(source.read_usable(report, LinkRules(**options)))  # type: ignore[arg-type]
        assert "".join(pair.src for pair in pairs) == texts
        assert (report.n_read, report.n_other_tags, report.n_empty) == (5, n_other, n_empty)


def test_nothing_to_link_is_an_error() -> None:
    with pytest.raises(InputError, match=r"en-de.tsv: none of its 2 pairs .*2 have an empty side"):
        read("\ta\n \t\n")


def test_lines_of_links_are_as_many_as_pairs() -> None:
    for links, found in (("0-0\n", 1), ("0-0\n" * 4, 4)):
        with pytest.raises(
            InputError, match=f"given, .* {found} lines of links, but en-de.tsv has 3"
        ):
            read("a\tb\n" * 3, links=links)


def test_impossible_bitexts() -> None:
    Path("folder").mkdir()
    for files, options, problem in (
        (["x.tsv"], {}, "x.tsv: the languages cannot be inferred"),
        (["-"], {}, "standard input: this is a pipe"),
        (["folder"], {}, "folder: this is a directory"),
        (["a/en-de.tsv", "b/en-de.tsv.gz"], {}, "2 bitexts would have the same name, en-de"),
        (
            ["en-th.tsv"],
            {},
            "en-th.tsv: .*Thai .*--tokenized, or use --leave-out",
        ),
        (["en-cn.tsv"], {}, "en-cn.tsv: 'cn' is a country"),
        (["a", "b", "c"], {"format": "moses"}, "moses needs two files, but there are 3"),
        (["en-de.tsv", "en-fr.tsv"], {"links": ["x"]}, "1 files of links for 2 bitexts"),
        (["en-th.tsv"], {"leave_out": ["th"]}, "--leave-out removes all bitexts"),
    ):
        with pytest.raises(InputError, match=problem):
            find_bitexts(files, **options)
    (left,) = find_bitexts(["en-th.tsv", "en-de.tsv"], leave_out=["th", "ko"])
    assert left == BitextSource(("en-de.tsv",), ("en", "de"))


# Links and filters


class Crossing:
    """Links each word with the word at its position and the next one; all scores are 0.5."""

    def __init__(self) -> None:
        self.firsts: list[int] = []

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        self.firsts.append(first)
        rows = [
            (number, i, j)
            for number, (src, tgt) in enumerate(pairs)
            for i in range(len(src))
            for j in (i, i + 1)
            if j < len(tgt)
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        scores = np.full(len(rows), 0.5, dtype=np.float32)
        links = Links(table[0], table[1], table[2], scores, len(pairs))
        return AlignedBlock(links, AlignReport(len(pairs), len(rows), n_long=1, n_cut=2))


def make(text: str, links: str, **options: Any) -> LinkReport:
    Path("en-de.tsv").write_text(text, encoding="utf-8")
    Path("given").write_text(links, encoding="utf-8")
    return link_bitext("en-de.tsv", "linked", links="given", **options).reports["en-de"]


def written() -> list[tuple[str, str]]:
    """Return the lines of text with those of links."""
    text, links = (Path(f"linked/en-de.{kind}").read_text("utf-8") for kind in ("text", "links"))
    return list(zip(text.splitlines(), links.splitlines(), strict=True))


def filter_slowly(found: LinkLists, pairs: list[Any]) -> LinkLists:
    """Apply the filters of the paper pair by pair."""
    left = []
    for links, (src, tgt) in zip(found, pairs, strict=True):
        different = [(i, j) for i, j in links if src[i] != tgt[j]]
        of_src, of_tgt = Counter(i for i, _ in different), Counter(j for _, j in different)
        left.append([(i, j) for i, j in different if of_src[i] == of_tgt[j] == 1])
    return left


# Tom-Tom is identical. Without it, Tom-schob is one-to-one; Mary has two links.
TEXT = "Tom pushed Mary\tTom schob Maria an\nok .\tok .\n\tx\nthe end\tdas Ende\n"
LINKS = "0-0 0-1 2-2 2-3\n0-0 1-1\n\n0-0 1-1 1-1\n"


@pytest.mark.parametrize(
    ("rules", "lines", "n_links", "n_identical", "n_many", "n_unlinked"),
    [
        ({}, {0: "0-1", 3: "0-0 1-1"}, 8, 3, 2, 1),
        ({"keep_empty": True}, {0: "0-1", 1: "", 3: "0-0 1-1"}, 8, 3, 2, 0),
        ({"keep_identical": True}, {1: "0-0 1-1", 3: "0-0 1-1"}, 8, 0, 4, 1),
        ({"keep_many": True}, {0: "0-1 2-2 2-3", 3: "0-0 1-1"}, 8, 3, 0, 1),
        (KEEP_ALL, {0: "0-0 0-1 2-2 2-3", 1: "0-0 1-1", 3: "0-0 1-1"}, 8, 0, 0, 0),
    ],
)
def test_each_filter_by_hand(
    rules: dict[str, bool],
    lines: dict[int, str],
    n_links: int,
    n_identical: int,
    n_many: int,
    n_unlinked: int,
) -> None:
    report = make(TEXT, LINKS, **rules)
    texts = [line.replace("\t", " ||| ") for line in TEXT.splitlines()]
    assert written() == [(texts[k], links) for k, links in lines.items()]
    assert report == LinkReport(
        n_read=4,
        n_empty=1,
        n_links=n_links,
        n_identical=n_identical,
        n_many=n_many,
        n_unlinked=n_unlinked,
    )
    assert report.n_kept == len(lines)
    assert report.n_kept_links == sum(len(line.split()) for line in lines.values())


def test_words_that_differ_in_case_are_not_identical() -> None:
    assert make("In it\tin It\n", "0-0 1-1\n").n_identical == 0


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
            st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
        ),
        max_size=5,
    ),
    st.randoms(use_true_random=False),
)
def test_filters_match_plain_loops(pairs: list[Any], random: Any) -> None:
    cells = [[(i, j) for i in range(len(s)) for j in range(len(t))] for s, t in pairs]
    found = [[cell for cell in row if random.random() < 0.4] for row in cells]
    rows = [(number, i, j) for number, row in enumerate(found) for i, j in row]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    links = Links(table[0], table[1], table[2], np.ones(len(rows), np.float32), len(pairs))
    report = LinkReport(n_read=len(pairs))
    left, kept = filter_links(links, pairs, LinkRules(), report)
    expected = filter_slowly(found, pairs)
    assert left.to_lists() == [row for row in expected if row]
    assert list(kept) == [number for number, row in enumerate(expected) if row]
    assert report.n_kept == len(left.to_lists())
    assert report.n_kept_links == sum(map(len, expected))
    again = LinkReport()
    twice, _ = filter_links(left, [pairs[k] for k in kept], LinkRules(), again)
    assert twice.to_lists() == left.to_lists()
    assert again == LinkReport(n_links=len(left.pairs))


@pytest.mark.parametrize("block_pairs", [1, 7, 10_000])
def test_blocks_make_no_difference(block_pairs: int) -> None:
    aligner = Crossing()
    result = link_bitext(DATA / "en-de.tsv", "linked", aligner=aligner, block_pairs=block_pairs)
    report = result.reports["en-de"]
    n_blocks = -(-29 // block_pairs)
    assert aligner.firsts == [block_pairs * k for k in range(n_blocks)]
    link_bitext(DATA / "en-de.tsv", "whole", aligner=Crossing())
    for kind in ("text", "links"):
        name = f"en-de.{kind}"
        assert (Path("linked") / name).read_bytes() == (Path("whole") / name).read_bytes()
    assert (report.n_read, report.n_long, report.n_cut) == (29, n_blocks, 2 * n_blocks)


def test_the_output_is_read_by_recipes(tmp_path: Path) -> None:
    link_bitext([DATA / "en-de.tsv"], "linked", aligner=Crossing())
    report = CleaningReport()
    paths, links = [Path("linked/en-de.text")], Path("linked/en-de.links")
    found = list(read_linked(paths, links, CleaningRules(), report, ("en", "de")))
    assert len(found) == report.n_read == len(written())
    assert not report.dropped


def test_scores_are_weights() -> None:
    make("a b\tc d\n", "0-0:0.5 1-1\n", scores=True)
    assert written() == [("a b ||| c d", "0-0:0.5020 1-1:1.0000")]  # in 255ths


def test_the_report() -> None:
    make(TEXT, LINKS)
    content = json.loads(Path("linked/report.json").read_text("utf-8"))
    entry, total = content["bitexts"]["en-de"], content["total"]
    assert entry["files"] == ["en-de.tsv"]
    assert (entry["links"], entry["split"], entry["languages"]) == ("given", "spaces", "en-de")
    assert "aligner" not in entry
    assert (total["n_read"], total["n_kept"], total["n_kept_links"]) == (4, 2, 3)
    assert (total["share_identical"], total["share_kept"]) == (3 / 8, 0.5)
    assert entry == entry | total
    link_bitext(DATA / "en-ja.tsv", "linked", tokenized=True, aligner=Crossing())
    content = json.loads(Path("linked/report.json").read_text("utf-8"))
    assert list(content["bitexts"]) == ["en-de", "en-ja"]
    assert content["total"]["n_read"] == 4 + 24
    assert content["bitexts"]["en-ja"]["aligner"] == "Crossing"


def test_a_deleted_bitext_is_removed_from_the_report() -> None:
    make(TEXT, LINKS)
    for kind in ("text", "links"):
        Path(f"linked/en-de.{kind}").unlink()
    link_bitext(DATA / "en-ja.tsv", "linked", tokenized=True, aligner=Crossing())
    assert list(json.loads(Path("linked/report.json").read_text())["bitexts"]) == ["en-ja"]


def test_existing_output_is_not_replaced() -> None:
    make(TEXT, LINKS)
    before = written()
    with pytest.raises(InputError, match=r"linked/en-de.text: the file exists \(add --overwrite"):
        make("a\tb\n", "0-0\n")
    assert written() == before
    assert make("a\tb\n", "0-0\n", overwrite=True).n_kept == 1
    assert written() == [("a ||| b", "0-0")]


def test_input_is_never_overwritten() -> None:
    Path("linked").mkdir()
    Path("linked/en-de.text").write_text("a ||| b\n")
    with pytest.raises(InputError, match=r"linked/en-de.text: .* both input and output"):
        link_bitext("linked/en-de.text", "linked", aligner=Crossing(), overwrite=True)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": "x"}', '{"bitexts": {"a": {}}}', "[" * 100_000]
)
def test_a_foreign_report_is_not_replaced(content: str) -> None:
    Path("linked").mkdir()
    Path("linked/report.json").write_text(content)
    with pytest.raises(InputError, match=r"linked/report.json: the file is not a report"):
        make(TEXT, LINKS, overwrite=True)
    assert Path("linked/report.json").read_text() == content


@pytest.mark.parametrize(
    ("text", "links", "problem"),
    [
        ("a\tb\n", "0-0\n0-0\n", "2 lines of links, but en-de.tsv has 1 pairs"),
        (
            "a\tb\nc\td\n",
            "0-0\n0-1\n",
            "given, line 2: .*link 0-1 .*check --tokenized",
        ),
        ("a\tb\n", "0p0\n", "given, line 1: '0p0' is not a link"),
        ("a\tb\nc d\n", "0-0\n0-0\n", "en-de.tsv, line 2: the line has no tab"),
        ("", "", "en-de.tsv: the file has no sentence pairs"),
        ("\tb\n", "0-0\n", "none of its 1 pairs can be linked"),
    ],
)
def test_invalid_input_leaves_no_output(text: str, links: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        make(text, links)
    assert not Path("linked").exists()


def test_invalid_lines_are_found_before_any_work() -> None:
    for name, text in (("en-de.tsv", "a\tb\n"), ("en-fr.tsv", "a b\n")):
        Path(name).write_text(text)
    aligner = Crossing()
    with pytest.raises(InputError, match=r"en-fr.tsv, line 1: the line has no tab"):
        link_bitext(["en-de.tsv", "en-fr.tsv"], "linked", aligner=aligner)
    assert aligner.firsts == []
    assert not Path("linked").exists()


def test_invalid_lines_are_listed_and_left_out() -> None:
    Path("en-fr.tsv").write_text("x\ty\n")
    report = make("a\tb\nno tab\nc\td\n", "0-0\n\n0-0\n", skip_bad="bad")
    assert (report.n_read, report.n_bad, report.n_kept) == (3, 1, 2)
    assert written() == [("a ||| b", "0-0"), ("c ||| d", "0-0")]
    assert Path("bad").read_text() == "en-de.tsv\t2\tthe line has no tab\tno tab\n"


def test_an_interrupted_run_keeps_only_finished_bitexts() -> None:
    bitexts = [DATA / "en-de.tsv", DATA / "en-ja.tsv"]
    options: dict[str, Any] = {"aligner": Crossing(), "tokenized": True}

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "en-ja: linking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        link_bitext(bitexts, "linked", block_pairs=5, progress=interrupt, **options)
    names = {path.name for path in Path("linked").iterdir()}
    assert names == {"en-de.text", "en-de.links", "report.json"}
    assert list(json.loads(Path("linked/report.json").read_text())["bitexts"]) == ["en-de"]
    assert list(link_bitext(bitexts[1:], "linked", **options).reports) == ["en-ja"]


def test_tags_that_no_pair_has_give_a_warning() -> None:
    options: dict[str, Any] = {"include_tags": ["tatoeba"], "exclude_tags": ["xnil"]}
    with pytest.warns(AlignWarning, match="no pair has the tag 'xnil'; .* are: tatoeba$"):
        result = link_bitext(DATA / "en-de.tsv", "linked", aligner=Crossing(), **options)
    assert result.total.n_other_tags == 0


@pytest.mark.skipif(
    importlib.util.find_spec("systran_align") is None, reason="systran-align is not installed"
)
def test_fast_align_links_are_those_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from calque.io.segmentation import split_words
    from calque.word_alignment.statistical import StatisticalAligner

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # with several, links may differ
    raw = list(read_bitext(DATA / "en-de.tsv"))
    pairs = [(split_words(pair.src, "en"), split_words(pair.tgt, "de")) for pair in raw]
    model = StatisticalAligner.train(pairs, "fast-align")
    found = model.training_block(0, len(pairs)).links.to_lists()
    expected = filter_slowly(found, pairs)
    report = link_bitext(DATA / "en-de.tsv", "linked", block_pairs=8).reports["en-de"]
    texts = [f"{' '.join(src)} ||| {' '.join(tgt)}" for src, tgt in pairs]
    lines = [" ".join(f"{i}-{j}" for i, j in links) for links in expected]
    assert written() == [(t, line) for t, line in zip(texts, lines, strict=True) if line]
    assert report.n_links == sum(map(len, found))
    assert 0 < report.n_kept_links < report.n_links
    assert json.loads(Path("linked/report.json").read_text())["bitexts"]["en-de"]["aligner"] == (
        "fast-align"
    )
