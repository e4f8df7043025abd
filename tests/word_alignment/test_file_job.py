"""Links of a stream, in order and in constant memory; `align_file` from Python."""

from __future__ import annotations

import io
import json
import runpy
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import calque
from calque.errors import InputError
from calque.io import files
from calque.io.files import SkippedLines, read_lines
from calque.io.resumable import INPUT_SIZE, StreamSink, open_sink
from calque.models.encoder import Encoder
from calque.types import SentencePair
from calque.word_alignment.file_job import (
    SKIPPED,
    align_file,
    build_splitter,
    cut_blocks,
    read_pairs,
    write_links,
)
from calque.word_alignment.neural import METHODS, AlignSettings, WordAligner
from calque.word_alignment.protocol import AlignReport
from calque.word_alignment.scoring import LinkCounts

ToyAligner = runpy.run_path(str(Path(__file__).parents[1] / "toy_align.py"))["ToyAligner"]
GOLD = Path(__file__).parents[1] / "data" / "gold"
PAIRS = [SentencePair("a b c", "x y"), SentencePair("", "x"), SentencePair("a", "x")]


def write(pairs: list[SentencePair], **options: Any) -> tuple[str, tuple[AlignReport, int, int]]:
    stream = io.BytesIO()
    totals = write_links(ToyAligner(), pairs, StreamSink(stream), **options)
    return stream.getvalue().decode(), totals


def test_one_line_per_pair() -> None:
    text, totals = write(PAIRS)
    assert text == "0-0 1-1\n\n0-0\n"
    assert totals == (AlignReport(n_pairs=3, n_links=3, n_empty=1), 0, 0)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 7))
def test_blocks_change_neither_lines_nor_counts(lengths: list[int], block_pairs: int) -> None:
    pairs = [SentencePair("a " * n, "x " * (n + 1)) for n in lengths]
    text, (report, _, _) = write(pairs, block_pairs=block_pairs)
    assert text == "".join(" ".join(f"{i}-{i}" for i in range(n)) + "\n" for n in lengths)
    assert (report.n_pairs, report.n_links) == (len(lengths), sum(lengths))


def test_blocks_are_bounded_by_pairs_and_characters() -> None:
    pairs = [SentencePair("x" * n, "") for n in (1, 1, 1, 50, 1, 60, 1)]
    sizes = [len(block) for block in cut_blocks(pairs, 3, 50)]
    assert sizes == [3, 1, 2, 1]
    assert list(cut_blocks([])) == []


def test_raw_text_is_split_by_its_languages() -> None:
    pairs = [SentencePair("L'eau!", "Water!")]
    split = build_splitter(("fr", "en"))
    text, _ = write(pairs, format="jsonl", split=split)
    row = json.loads(text)
    assert (row["src"], row["tgt"]) == (["L'", "eau", "!"], ["Water", "!"])
    text, _ = write(pairs, format="words", split=split)
    assert text == "L'-Water eau-!\n"


def test_invalid_lines_give_empty_pairs(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"no bars\na ||| b\n\xff ||| x\n\0 ||| x\nc ||| d\nnone\n")
    listed = io.StringIO()
    skipped = SkippedLines(listed)
    pairs = list(read_pairs(tmp_path / "t", "pipes", skipped))
    first, second = SentencePair("a", "b"), SentencePair("c", "d")
    assert pairs == [SKIPPED, first, SKIPPED, SKIPPED, second, SKIPPED]
    assert [line.split("\t")[0] for line in listed.getvalue().splitlines()] == ["1", "3", "4", "6"]
    text, (report, n_skipped, _) = write(pairs, block_pairs=2)
    assert text == "\n0-0\n\n\n0-0\n\n"
    assert (n_skipped, skipped.n_lines, report.n_pairs) == (4, 4, 6)
    with pytest.raises(InputError, match="t, line 1: the line has 0 separators"):
        list(read_pairs(tmp_path / "t", "pipes"))


def test_progress() -> None:
    seen: list[tuple[str, int, int | None]] = []
    write(PAIRS, block_pairs=2, progress=lambda *figures: seen.append(figures), n_lines=3)
    assert seen == [("aligning", 2, 3), ("aligning", 3, 3)]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_an_empty_input_gives_a_readable_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"links{suffix}"
    with open_sink(path, {INPUT_SIZE: 0}) as sink:
        assert write_links(ToyAligner(), [], sink, suffix=suffix) == (AlignReport(), 0, 0)
    assert list(read_lines(path)) == []


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    def lines(n_pairs: int) -> Iterator[SentencePair]:
        return (SentencePair(f"{k} b c d e f g h", "s t u v w x y z") for k in range(n_pairs))

    def peak(n_pairs: int) -> int:
        with open_sink(tmp_path / f"{n_pairs}", {INPUT_SIZE: n_pairs}) as sink:
            tracemalloc.start()
            write_links(ToyAligner(), lines(n_pairs), sink, block_pairs=64)
            _, highest = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return highest

    peak(256)
    assert peak(8192) < 1.5 * peak(512)


# align_file


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("in")
    path.write_text("a b c ||| x y\n ||| x\nein Haus ||| a house\n")
    return path


def test_any_aligner_and_its_result(text: Path) -> None:
    result = align_file(text, output="out", aligner=ToyAligner())
    assert Path("out").read_text() == "0-0 1-1\n\n0-0 1-1\n"
    assert (result.output, result.n_pairs, result.n_links) == (Path("out"), 3, 4)
    assert (result.report.n_empty, result.n_skipped, result.n_resumed) == (1, 0, 0)
    assert result.gold is None and result.is_main
    assert not Path("out.partial").exists()


def test_gold_without_output(text: Path) -> None:
    Path("gold").write_text("0-0 1p1\n\n0-0\n")
    result = align_file(text, aligner=ToyAligner(), gold="gold")
    assert result.gold == LinkCounts(n_links=4, n_sure=2, n_sure_found=2, n_possible_found=3)
    assert result.output is None
    assert {path.name for path in Path().iterdir()} == {"in", "gold"}


def test_the_input_is_opened_once(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    read = files.read_chunks

    def read_chunks(path: Any) -> Iterator[bytes]:
        opened.append(str(path))
        return read(path)

    monkeypatch.setattr(files, "read_chunks", read_chunks)
    align_file(text, output="out", aligner=ToyAligner())
    assert opened == ["in"]


def test_an_invalid_line_leaves_no_output(text: Path) -> None:
    text.write_bytes(b"a ||| b\n" * 3000 + b"no separator\n")
    with pytest.raises(InputError, match="in, line 3001: "):
        align_file(text, output="out", aligner=ToyAligner())
    assert {path.name for path in Path().iterdir()} == {"in"}
    result = align_file(text, output="out", aligner=ToyAligner(), skip_bad="bad")
    assert (result.n_pairs, result.n_skipped) == (3001, 1)
    assert Path("bad").read_text().startswith("3001\t")


def test_links_below_the_threshold_are_not_written(text: Path, tiny_encoder: Encoder) -> None:
    options: dict[str, Any] = {"model": tiny_encoder, "method": "argmax", "scores": True}
    calque.align_file(GOLD / "en-fr.text", output="all", **options)
    calque.align_file(GOLD / "en-fr.text", output="likely", **options, threshold=0.5)
    links = [line.split() for line in Path("all").read_text().splitlines()]
    likely = [[link for link in line if float(link.split(":")[1]) >= 0.5] for line in links]
    assert [line.split() for line in Path("likely").read_text().splitlines()] == likely
    assert 0 < sum(map(len, likely)) < sum(map(len, links))


def test_a_loaded_model_two_files_and_a_sweep(text: Path, tiny_encoder: Encoder) -> None:
    lines = [line.split(" ||| ") for line in (GOLD / "en-fr.text").read_text().splitlines()]
    for side, name in enumerate(("src", "tgt")):
        Path(name).write_text("".join(f"{line[side]}\n" for line in lines))
    result = calque.align_file(
        "src", "tgt", output="out", model=tiny_encoder, method="argmax", layer=2
    )
    assert result.aligner == "neural argmax layer 2"
    words = [(src.split(), tgt.split()) for src, tgt in lines]
    links = WordAligner(tiny_encoder, method="argmax", layer=2).align(words)
    expected = [" ".join(f"{i}-{j}" for i, j in pair) for pair in links]
    assert Path("out").read_text().splitlines() == expected
    gold = GOLD / "en-fr.gold"
    scored = align_file("src", "tgt", model=tiny_encoder, method="argmax", layer=2, gold=gold)
    sweep = align_file("src", "tgt", model=tiny_encoder, gold=gold, sweep=True).sweep
    assert sweep is not None
    assert {choice.method for choice in sweep.counts} == set(METHODS)
    assert sweep.counts[AlignSettings(method="argmax", layer=2)] == scored.gold


@pytest.mark.slow
def test_the_training_stack_is_not_imported(tiny_folder: Path, text: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, calque; "
        f"calque.align_file('in', output='out', model={str(tiny_folder)!r}, device='cpu'); "
        "print([m for m in sys.modules if m.startswith(('calque.training', 'calque.objectives'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
