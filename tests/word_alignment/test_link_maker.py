"""Linked bitext: what filters leave, the account of it, and what stands when things go wrong."""

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
from calque.io.bitext import read_bitext
from calque.io.cleaning import CleaningReport, CleaningRules
from calque.tokens.linked import read_linked
from calque.types import Links
from calque.word_alignment.linked_bitext import (
    LinkReport,
    LinkRules,
    filter_links,
    find_bitexts,
    make_links,
)
from calque.word_alignment.protocol import AlignedBlock, AlignReport, WordPair

DATA = Path(__file__).parents[1] / "data"
KEEP_ALL = LinkRules(keep_identical=True, keep_many=True, keep_empty=True)
LinkLists = list[list[tuple[int, int]]]


class Crossing:
    """Links each word with the word at its place and the one after; scores one half."""

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


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make(text: str, links: str, rules: LinkRules | None = None, **options: Any) -> LinkReport:
    Path("en-de.tsv").write_text(text, encoding="utf-8")
    Path("given").write_text(links, encoding="utf-8")
    bitexts = find_bitexts(["en-de.tsv"], links=["given"])
    return make_links(bitexts, "linked", rules=rules, **options)["en-de"]


def written() -> list[tuple[str, str]]:
    """Give the lines of text beside those of links."""
    text, links = (Path(f"linked/en-de.{kind}").read_text("utf-8") for kind in ("text", "links"))
    return list(zip(text.splitlines(), links.splitlines(), strict=True))


def filter_slowly(found: LinkLists, pairs: list[Any]) -> LinkLists:
    """Do what the paper says, pair by pair."""
    left = []
    for links, (src, tgt) in zip(found, pairs, strict=True):
        different = [(i, j) for i, j in links if src[i] != tgt[j]]
        of_src, of_tgt = Counter(i for i, _ in different), Counter(j for _, j in different)
        left.append([(i, j) for i, j in different if of_src[i] == of_tgt[j] == 1])
    return left


# Tom-Tom is identical. Once it is gone, Tom-schob is alone with its words; Mary has two.
TEXT = "Tom pushed Mary\tTom schob Maria an\nok .\tok .\n\tx\nthe end\tdas Ende\n"
LINKS = "0-0 0-1 2-2 2-3\n0-0 1-1\n\n0-0 1-1 1-1\n"


@pytest.mark.parametrize(
    ("rules", "lines", "n_links", "n_identical", "n_many", "n_unlinked"),
    [
        (LinkRules(), {0: "0-1", 3: "0-0 1-1"}, 8, 3, 2, 1),
        (LinkRules(keep_empty=True), {0: "0-1", 1: "", 3: "0-0 1-1"}, 8, 3, 2, 0),
        (LinkRules(keep_identical=True), {1: "0-0 1-1", 3: "0-0 1-1"}, 8, 0, 4, 1),
        (LinkRules(keep_many=True), {0: "0-1 2-2 2-3", 3: "0-0 1-1"}, 8, 3, 0, 1),
        (KEEP_ALL, {0: "0-0 0-1 2-2 2-3", 1: "0-0 1-1", 3: "0-0 1-1"}, 8, 0, 0, 0),
    ],
)
def test_each_filter_by_hand(
    rules: LinkRules,
    lines: dict[int, str],
    n_links: int,
    n_identical: int,
    n_many: int,
    n_unlinked: int,
) -> None:
    report = make(TEXT, LINKS, rules)
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
def test_filters_are_what_the_paper_says(pairs: list[Any], random: Any) -> None:
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
    bitexts = find_bitexts([DATA / "en-de.tsv"])
    report = make_links(bitexts, "linked", aligner=aligner, block_pairs=block_pairs)["en-de"]
    n_blocks = -(-29 // block_pairs)
    assert aligner.firsts == [block_pairs * k for k in range(n_blocks)]
    make_links(bitexts, "whole", aligner=Crossing())
    for kind in ("text", "links"):
        name = f"en-de.{kind}"
        assert (Path("linked") / name).read_bytes() == (Path("whole") / name).read_bytes()
    assert (report.n_read, report.n_long, report.n_cut) == (29, n_blocks, 2 * n_blocks)


def test_what_is_written_is_read_by_recipes(tmp_path: Path) -> None:
    make_links(find_bitexts([DATA / "en-de.tsv"]), "linked", aligner=Crossing())
    report = CleaningReport()
    paths, links = [Path("linked/en-de.text")], Path("linked/en-de.links")
    found = list(read_linked(paths, links, CleaningRules(), report, ("en", "de")))
    assert len(found) == report.n_read == len(written())
    assert not report.dropped


def test_scores_are_weights() -> None:
    make("a b\tc d\n", "0-0:0.5 1-1\n", LinkRules(scores=True))
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
    make_links(find_bitexts([DATA / "en-ja.tsv"], split="spaces"), "linked", aligner=Crossing())
    content = json.loads(Path("linked/report.json").read_text("utf-8"))
    assert list(content["bitexts"]) == ["en-de", "en-ja"]
    assert content["total"]["n_read"] == 4 + 24
    assert content["bitexts"]["en-ja"]["aligner"] == "Crossing"


def test_a_bitext_that_is_gone_leaves_the_report() -> None:
    make(TEXT, LINKS)
    for kind in ("text", "links"):
        Path(f"linked/en-de.{kind}").unlink()
    make_links(find_bitexts([DATA / "en-ja.tsv"], split="spaces"), "linked", aligner=Crossing())
    assert list(json.loads(Path("linked/report.json").read_text())["bitexts"]) == ["en-ja"]


def test_what_is_there_is_not_replaced_unasked() -> None:
    make(TEXT, LINKS)
    before = written()
    with pytest.raises(InputError, match=r"linked/en-de.text: exists \(add --overwrite"):
        make("a\tb\n", "0-0\n")
    assert written() == before
    assert make("a\tb\n", "0-0\n", overwrite=True).n_kept == 1
    assert written() == [("a ||| b", "0-0")]


def test_no_file_is_read_and_written() -> None:
    Path("linked").mkdir()
    Path("linked/en-de.text").write_text("a ||| b\n")
    bitexts = find_bitexts(["linked/en-de.text"])
    with pytest.raises(InputError, match=r"linked/en-de.text: both read and written"):
        make_links(bitexts, "linked", aligner=Crossing(), overwrite=True)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "x"}', '{"bitexts": {"a": {}}}'])
def test_a_foreign_report_is_not_replaced(content: str) -> None:
    Path("linked").mkdir()
    Path("linked/report.json").write_text(content)
    with pytest.raises(InputError, match=r"linked/report.json: not a report of links"):
        make(TEXT, LINKS, overwrite=True)
    assert Path("linked/report.json").read_text() == content


@pytest.mark.parametrize(
    ("text", "links", "problem"),
    [
        ("a\tb\n", "0-0\n0-0\n", "2 lines of links, but en-de.tsv has 1 pairs"),
        (
            "a\tb\nc\td\n",
            "0-0\n0-1\n",
            "given, line 2: a link between words 0 and 1.*--split spaces",
        ),
        ("a\tb\n", "0p0\n", "given, line 1: '0p0' is no link"),
        ("a\tb\nc d\n", "0-0\n0-0\n", "en-de.tsv, line 2: no tab"),
        ("", "", "en-de.tsv: no sentence pairs"),
        ("\tb\n", "0-0\n", "none of its 1 pairs can be linked"),
    ],
)
def test_bad_input_leaves_nothing(text: str, links: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        make(text, links)
    assert not Path("linked").exists()


def test_bad_lines_are_found_before_any_work() -> None:
    for name, text in (("en-de.tsv", "a\tb\n"), ("en-fr.tsv", "a b\n")):
        Path(name).write_text(text)
    aligner = Crossing()
    with pytest.raises(InputError, match=r"en-fr.tsv, line 1: no tab"):
        make_links(find_bitexts(["en-de.tsv", "en-fr.tsv"]), "linked", aligner=aligner)
    assert aligner.firsts == []
    assert not Path("linked").exists()


def test_bad_lines_are_listed_and_left_out() -> None:
    Path("en-fr.tsv").write_text("x\ty\n")
    report = make("a\tb\nno tab\nc\td\n", "0-0\n\n0-0\n", skip_bad="bad")
    assert (report.n_read, report.n_bad, report.n_kept) == (3, 1, 2)
    assert written() == [("a ||| b", "0-0"), ("c ||| d", "0-0")]
    assert Path("bad").read_text() == "en-de.tsv\t2\tno tab\tno tab\n"


def test_an_interrupted_run_keeps_what_is_done_and_nothing_else() -> None:
    bitexts = find_bitexts([DATA / "en-de.tsv", DATA / "en-ja.tsv"], split="spaces")

    def interrupt(name: str, phase: str, n_done: int, n_pairs: int | None) -> None:
        if (name, phase) == ("en-ja", "linking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_links(bitexts, "linked", aligner=Crossing(), block_pairs=5, on_progress=interrupt)
    names = {path.name for path in Path("linked").iterdir()}
    assert names == {"en-de.text", "en-de.links", "report.json"}
    assert list(json.loads(Path("linked/report.json").read_text())["bitexts"]) == ["en-de"]
    assert list(make_links(bitexts[1:], "linked", aligner=Crossing())) == ["en-ja"]


def test_tags_that_no_pair_has_are_told() -> None:
    notes: list[str] = []
    bitexts = find_bitexts([DATA / "en-de.tsv"])
    rules = LinkRules(include_tags=("tatoeba",), exclude_tags=("xnil",))
    report = make_links(bitexts, "linked", aligner=Crossing(), rules=rules, say=notes.append)
    assert report["en-de"].n_other_tags == 0
    assert notes == ["no pair has the tag 'xnil'; tags there are: tatoeba"]


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
    report = make_links(find_bitexts([DATA / "en-de.tsv"]), "linked", block_pairs=8)["en-de"]
    texts = [f"{' '.join(src)} ||| {' '.join(tgt)}" for src, tgt in pairs]
    lines = [" ".join(f"{i}-{j}" for i, j in links) for links in expected]
    assert written() == [(t, line) for t, line in zip(texts, lines, strict=True) if line]
    assert report.n_links == sum(map(len, found))
    assert 0 < report.n_kept_links < report.n_links
    assert json.loads(Path("linked/report.json").read_text())["bitexts"]["en-de"]["aligner"] == (
        "fast-align"
    )
