"""`calque align` with aligners that learn from the text: trained, saved, loaded, combined."""

from __future__ import annotations

from pathlib import Path

import pytest

from calque.cli import run

pytest.importorskip("systran_align")
Row = tuple[str, str, str]


@pytest.fixture
def texts(demo_rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{row[2]}\t{row[1]}\n" for row in demo_rows if row[0] == "de"]
    Path("test.tsv").write_text("".join(lines[:5]), encoding="utf-8")
    Path("more.tsv").write_text("".join(lines[5:] * 5), encoding="utf-8")


def test_trains_saves_and_loads(texts: None, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["align", "test.tsv", "--aligner", "fast-align", "--tokenize", "de-en"]
    assert run([*command, "--bitext", "more.tsv", "--save", "m", "-o", "trained"]) == 0
    said = capsys.readouterr().err
    assert "m: fast-align trained on 105 pairs" in said
    assert "trained: 5 pairs" in said
    assert run([*command, "--load", "m", "-o", "loaded"]) == 0
    assert Path("loaded").read_text() == Path("trained").read_text()
    assert len(Path("loaded").read_text().splitlines()) == 5


def test_a_bitext_may_be_raw_and_the_other_way_round(texts: None) -> None:
    from calque.io.bitext import read_bitext
    from calque.io.segmentation import split_words

    raw = list(read_bitext("more.tsv"))
    spaced = [(" ".join(split_words(p.src, "de")), " ".join(split_words(p.tgt, "en"))) for p in raw]
    Path("spaced.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in spaced), encoding="utf-8")
    Path("turned.tsv").write_text("".join(f"{p.tgt}\t{p.src}\n" for p in raw), encoding="utf-8")
    command = ["align", "test.tsv", "--aligner", "fast-align", "-o"]
    assert run([*command, "one", "--bitext", "spaced.tsv"]) == 0
    turned = ["--bitext", "turned.tsv", "--tokenize-bitext", "de-en", "--reverse-bitext"]
    assert run([*command, "two", *turned]) == 0
    assert Path("one").read_text() == Path("two").read_text() != ""


@pytest.mark.parametrize("is_turned", [True, False])
def test_a_bitext_the_other_way_round_is_noticed(
    is_turned: bool, texts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_turned:
        lines = [line.split("\t") for line in Path("more.tsv").read_text("utf-8").splitlines()]
        Path("more.tsv").write_text("".join(f"{b}\t{a}\n" for a, b in lines), encoding="utf-8")
    command = ["align", "test.tsv", "--aligner", "fast-align", "--tokenize", "de-en", "-o", "out"]
    for options, is_warned in ([], is_turned), (["--reverse-bitext"], not is_turned):
        assert run([*command, "--bitext", "more.tsv", *options]) == 0
        warning = "--bitext has its sides the other way round (add --reverse-bitext, or drop it)"
        assert (warning in capsys.readouterr().err) == is_warned
    assert run(command) == 0  # no bitext
    assert "way round" not in capsys.readouterr().err


def test_a_bitext_means_hybrid(
    texts: None,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from calque.cli import align_job as trained_aligners

    monkeypatch.setattr(trained_aligners, "choose_library", lambda: "fast-align")
    Path("gold").write_text("0-0\n" * 5)
    command = ["align", "test.tsv", "--model", str(tiny_folder), "--gold", "gold"]
    assert run([*command, "--bitext", "more.tsv"]) == 0
    assert "hybrid argmax layer 3" in capsys.readouterr().out


@pytest.mark.slow
def test_adapts_first(texts: None, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["align", "test.tsv", "--model", str(tiny_folder), "--device", "cpu"]
    command += ["--adapt", "--adapt-steps", "2", "--bitext", "more.tsv", "--save-model", "new"]
    assert run([*command, "-o", "links"]) == 0
    assert len(Path("links").read_text().splitlines()) == 5
    assert Path("new/run/model/config.json").exists()
    assert "new/run/model: the adapted model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["-", "--aligner", "fast-align"], "a pipe is read once"),
        (["test.tsv", "--aligner", "fast-align", "-o", "x", "--resume"], "training again would"),
        (["test.tsv", "--bitext", "absent.tsv"], "absent.tsv: no such file"),
        (["test.tsv", "--load", "absent"], "absent"),
        (["test.tsv", "--aligner", "hybrid", "--sweep", "--gold", "test.tsv"], "--sweep"),
    ],
)
def test_errors(
    texts: None, options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["align", *options]) == 2
    said = capsys.readouterr().err
    assert problem in said and len(said.splitlines()) == 1
    assert not Path("x").exists()
