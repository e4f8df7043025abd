"""`calque links`: real sentences through every aligner, and into a recipe."""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from calque.cli import run
from calque.io.links import read_links
from calque.word_alignment.protocol import AlignWarning

DATA = Path(__file__).parents[1] / "data"
GOLD = DATA / "gold"
KEEP_ALL = ["--keep-identical", "--keep-many", "--keep-empty"]

needs_fast_align = pytest.mark.skipif(
    importlib.util.find_spec("systran_align") is None, reason="systran-align is not installed"
)
needs_eflomal = pytest.mark.skipif(
    importlib.util.find_spec("eflomal") is None, reason="eflomal is not installed"
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # with several, fast_align's links may differ
    shutil.copy(DATA / "en-de.tsv", "en-de.tsv")


def links_in(path: str) -> list[list[tuple[int, int]]]:
    return read_links(path).to_lists()


def words_in(path: str) -> list[tuple[list[str], list[str]]]:
    lines = Path(path).read_text("utf-8").splitlines()
    sides = [line.split(" ||| ") for line in lines]
    return [(src.split(), tgt.split()) for src, tgt in sides]


def check_filtered(folder: str, name: str) -> None:
    """Check that links are between different words and one-to-one, and that each pair has some."""
    pairs, links = words_in(f"{folder}/{name}.text"), links_in(f"{folder}/{name}.links")
    assert len(pairs) == len(links) > 0
    for (src, tgt), found in zip(pairs, links, strict=True):
        assert found
        assert all(src[i] != tgt[j] for i, j in found)
        assert max(Counter(i for i, _ in found).values()) == 1
        assert max(Counter(j for _, j in found).values()) == 1


def fails(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Expect one line that names the problem, exit code 2 and no new file."""
    before = {path.name for path in Path().iterdir()}
    assert run(["links", *arguments]) == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert captured.err.startswith("calque: error: ")
    assert captured.err.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == before


@needs_fast_align
def test_one_command_prepares_the_data_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["links", "en-de.tsv", "-o", "linked"]) == 0
    captured = capsys.readouterr()
    check_filtered("linked", "en-de")
    report = json.loads(Path("linked/report.json").read_text("utf-8"))["bitexts"]["en-de"]
    assert report["n_read"] == 29
    assert report["n_kept"] == len(links_in("linked/en-de.links"))
    assert report["n_kept_links"] == sum(map(len, links_in("linked/en-de.links")))
    assert "linked: en-de.text, .links, " in captured.err
    assert f"{report['n_kept']:,} of 29 pairs, {report['n_kept_links']:,} links" in captured.err
    assert "identical words" in captured.out
    assert "not one-to-one" in captured.out


@needs_fast_align
def test_unfiltered_links_are_those_of_calque_align() -> None:
    assert run(["links", "en-de.tsv", "-o", "linked", *KEEP_ALL]) == 0
    assert (
        run(["align", "en-de.tsv", "--aligner", "fast-align", "--tokenize", "en-de", "-o", "a"])
        == 0
    )
    assert Path("linked/en-de.links").read_bytes() == Path("a").read_bytes()


@needs_eflomal
def test_eflomal_can_be_symmetrized_otherwise() -> None:
    command = ["links", "en-de.tsv", "--aligner", "eflomal", *KEEP_ALL]
    for how in ("intersection", "union"):
        assert run([*command, "--symmetrize", how, "-o", how]) == 0
    n_links = [sum(map(len, links_in(f"{how}/en-de.links"))) for how in ("intersection", "union")]
    assert 0 < n_links[0] < n_links[1]


def test_an_encoder_links_words(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path("en-de.tsv").read_text("utf-8").splitlines(keepends=True)
    Path("few.tsv").write_text("".join(lines[:4]), encoding="utf-8")
    command = ["links", "few.tsv", "--languages", "en-de", "--aligner", "neural", "-o", "linked"]
    assert run([*command, "--device", "cpu"]) == 0
    check_filtered("linked", "en-de.few")
    assert "4 pairs" in capsys.readouterr().err
    report = json.loads(Path("linked/report.json").read_text("utf-8"))
    assert report["bitexts"]["en-de.few"]["aligner"].startswith("WordAligner ")


def test_links_of_the_encoder_are_those_of_calque_align(tiny_folder: Path) -> None:
    model = ["--model", str(tiny_folder), "--device", "cpu"]
    neural = ["--aligner", "neural", *model]
    assert run(["links", "en-de.tsv", "-o", "linked", *neural, *KEEP_ALL, "--scores"]) == 0
    assert run(["align", "en-de.tsv", "--tokenize", "en-de", "--scores", *model, "-o", "a"]) == 0
    assert Path("linked/en-de.links").read_text() == Path("a").read_text()


def test_given_links() -> None:
    """Annotated links of real sentences, split into words already."""
    shutil.copy(GOLD / "en-fr.text", "en-fr.text")
    sure = [
        " ".join(cell for cell in line.split() if "p" not in cell)
        for line in (GOLD / "en-fr.gold").read_text("utf-8").splitlines()
    ]
    Path("gold").write_text("".join(line + "\n" for line in sure))
    command = ["links", "en-fr.text", "--links", "gold"]
    assert run([*command, "-o", "all", *KEEP_ALL]) == 0
    assert links_in("all/en-fr.links") == links_in("gold")
    assert words_in("all/en-fr.text") == words_in("en-fr.text")
    assert run([*command, "-o", "linked"]) == 0
    check_filtered("linked", "en-fr")
    assert sum(map(len, links_in("linked/en-fr.links"))) < sum(map(len, links_in("gold")))


def test_many_bitexts_with_links(capsys: pytest.CaptureFixture[str]) -> None:
    Path("en-fr.txt.gz").write_bytes(gzip.compress(b"a b ||| c d\nx ||| x\n"))
    Path("news.en").write_text("one two\nthree\n")
    Path("news.de").write_text("eins zwei\ndrei\n")
    Path("1").write_text("0-0 1-1\n0-0\n")
    Path("2").write_text("0-1 1-0\n0-0\n")
    Path("en-it.tsv").write_text("a b\tc d\tgood\nx\ty\tbad\n")
    command = ["links", "en-fr.txt.gz", "en-it.tsv", "--links", "1", "--links", "2", "-o", "linked"]
    with pytest.warns(AlignWarning, match="no pair has the tag 'worse'; .* are: good, bad$"):
        assert run([*command, "--exclude-tags", "bad,worse"]) == 0
    assert Path("linked/en-fr.links").read_text() == "0-0 1-1\n"
    assert Path("linked/en-it.text").read_text() == "a b ||| c d\n"
    assert Path("linked/en-it.links").read_text() == "0-1 1-0\n"
    captured = capsys.readouterr()
    assert "linked: 2 bitexts, 2 of 4 pairs, 4 links, report.json" in captured.err
    assert "by bitext" in captured.out
    assert run(["links", "news.en", "news.de", "--links", "1", "-o", "linked"]) == 0
    assert Path("linked/en-de.news.text").read_text() == "one two ||| eins zwei\nthree ||| drei\n"


def test_bad_lines_can_be_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    Path("en-fr.tsv").write_bytes(b"a\tb\nnothing\nc\t\xff\nd\te\n")
    Path("1").write_text("0-0\n" * 4)
    command = ["en-fr.tsv", "--links", "1", "-o", "linked"]
    fails(command, "en-fr.tsv, line 2: the line has no tab", capsys)
    for read in ("en-fr.tsv", "1"):
        fails([*command, "--skip-bad", read], f"{read}: the file is both input and output", capsys)
    fails(
        [*command, "--skip-bad", "linked"],
        "linked: the same path is given for -o and --skip-bad",
        capsys,
    )
    for name in ("report.json", "en-fr.text"):
        problem = f"{name}: the same path is given for -o and --skip-bad"
        fails([*command[:-1], ".", "--skip-bad", name], problem, capsys)
    assert run(["links", *command, "--skip-bad", "bad"]) == 0
    assert Path("linked/en-fr.text").read_text() == "a ||| b\nd ||| e\n"
    assert [line.split("\t")[:2] for line in Path("bad").read_text().splitlines()] == [
        ["en-fr.tsv", "2"],
        ["en-fr.tsv", "3"],
    ]
    assert "invalid lines" in capsys.readouterr().out


@needs_fast_align
def test_a_recipe_reads_what_is_written(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(DATA / "en-ja.tsv", "en-ja.tsv")
    bitexts = ["en-de.tsv"]
    if importlib.util.find_spec("fugashi"):
        bitexts.append("en-ja.tsv")
    assert run(["links", *bitexts, "-o", "linked"]) == 0
    Path("recipe.yaml").write_text(
        "name: linked\n"
        "seed: 1\n"
        f"model: {{start: {tiny_folder}}}\n"
        "data:\n"
        "  sources: [{path: linked/en-*.text, kind: bitext, links: linked/en-*.links}]\n"
        "  cleaning: {max_ratio: null, max_nonletters: null}\n"
        "objectives: [{kind: linked_words, batch_tokens: 512}]\n"
        "schedule: {kind: linear, steps: 1, warmup: 0}\n"
    )
    capsys.readouterr()
    assert run(["prepare", "recipe.yaml", "-o", "prepared", "--workers", "1"]) == 0
    n_kept = sum(len(links_in(f"linked/{Path(name).stem}.links")) for name in bitexts)
    said = capsys.readouterr().err
    assert f"prepared: {len(bitexts)} corpora, {n_kept} examples" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        pytest.param(
            ["absent.en-de.tsv", "-o", "x"],
            "absent.en-de.tsv: no such file",
            marks=needs_fast_align,
        ),
        (["en-de.tsv", "-o", "en-de.tsv"], "en-de.tsv: this is a file (name a folder)"),
        (["en-de.tsv", "-o", "x", "--aligner", "giza"], "--aligner giza does not exist"),
        (["en-de.tsv", "-o", "x", "--input-format", "xml"], "--input-format xml does not exist"),
        (["en-de.tsv", "-o", "x", "--symmetrize", "some"], "--symmetrize some does not exist"),
        (["en-de.tsv", "-o", "x", "--languages", "english"], "'english' does not name two"),
        (["en-de.tsv", "-o", "x", "--model", "m"], "--model needs an encoder"),
        (
            ["en-de.tsv", "-o", "x", "--links", "l", "--aligner", "eflomal"],
            "--aligner cannot be used with --links",
        ),
        (["en-de.tsv", "-o", "x", "--links", "l"], "l: no such file"),
        (
            ["en-de.tsv", "-o", "x", "--links", "l", "--links", "m"],
            "there are 2 files of links for 1 bitexts",
        ),
        (["en-th.tsv", "-o", "x"], "en-th.tsv: Thai has no spaces between words"),
        (
            ["en-de.tsv", "-o", "x", "--symmetrize", "union"],
            "fast-align supports only grow-diag-final-and",
        ),
        (
            ["en-de.tsv", "-o", "x", "--symmetrize", "union", "--aligner", "neural"],
            "--symmetrize cannot be used with --aligner neural",
        ),
        (
            ["en-de.tsv", "-o", "x", "--stem", "4", "--aligner", "neural"],
            "--stem is for training fast-align or eflomal",
        ),
    ],
)
def test_errors(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    fails(arguments, problem, capsys)


def test_a_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    Path("en-fr.tsv").write_text("a\tb\n")
    Path("1").write_text("0-0\n")
    Path("file").touch()
    problem = "file/linked: not a directory (a part of the path is not a folder)"
    fails(["en-fr.tsv", "--links", "1", "-o", "file/linked"], problem, capsys)


def test_tags_may_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("1").write_text("\n" * 29)
    command = ["en-de.tsv", "--links", "1", "-o", "x", "--include-tags", "nope"]
    with pytest.warns(AlignWarning, match="no pair has the tag 'nope'"):
        assert run(["links", *command]) == 2
    error = capsys.readouterr().err
    assert "none of its 29 pairs can be linked (0 have an empty side, 29 other tags" in error
    assert not Path("x").exists()


def test_a_second_run_needs_overwrite(capsys: pytest.CaptureFixture[str]) -> None:
    Path("en-fr.tsv").write_text("a\tb\n")
    Path("1").write_text("0-0\n")
    command = ["links", "en-fr.tsv", "--links", "1", "-o", "linked"]
    assert run(command) == 0
    capsys.readouterr()
    fails(command[1:], "linked/en-fr.text: the file exists (add --overwrite", capsys)
    assert run([*command, "--overwrite"]) == 0


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "systran_align", None)
    fails(["en-de.tsv", "-o", "x"], "systran-align is not installed (pip install", capsys)
