"""Links of a stream: in order, in step with the lines, in constant memory."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import runpy
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.files import SkippedLines, read_lines
from calque.io.resumable import StreamSink, check_resumable_output, compress_block, open_sink
from calque.types import SentencePair
from calque.word_alignment.file_job import (
    SKIPPED,
    LinkLayout,
    cut_blocks,
    read_in_step,
    write_links,
)
from calque.word_alignment.protocol import AlignReport

ToyAligner = runpy.run_path(str(Path(__file__).parents[1] / "toy_align.py"))["ToyAligner"]
PAIRS = [SentencePair("a b c", "x y"), SentencePair("", "x"), SentencePair("a", "x")]


def write(pairs: list[SentencePair], layout: LinkLayout, **options: Any) -> tuple[str, Any]:
    stream = io.BytesIO()
    totals = write_links(ToyAligner(), pairs, StreamSink(stream), layout, **options)
    return stream.getvalue().decode(), totals


def test_a_line_a_pair() -> None:
    text, totals = write(PAIRS, LinkLayout())
    assert text == "0-0 1-1\n\n0-0\n"
    assert totals.report == AlignReport(n_pairs=3, n_links=3, n_empty=1)
    assert (totals.n_skipped, totals.n_before) == (0, 0)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 7))
def test_blocks_change_neither_lines_nor_counts(lengths: list[int], block_pairs: int) -> None:
    pairs = [SentencePair("a " * n, "x " * (n + 1)) for n in lengths]
    text, totals = write(pairs, LinkLayout(block_pairs=block_pairs))
    assert text == "".join(" ".join(f"{i}-{i}" for i in range(n)) + "\n" for n in lengths)
    assert totals.report.n_pairs == len(lengths)
    assert totals.report.n_links == sum(lengths)


def test_blocks_are_bounded_by_pairs_and_characters() -> None:
    pairs = [SentencePair("x" * n, "") for n in (1, 1, 1, 50, 1, 60, 1)]
    sizes = [len(block) for block in cut_blocks(pairs, 3, 50)]
    assert sizes == [3, 1, 2, 1]
    assert list(cut_blocks([])) == []


def test_raw_text_is_split_by_its_languages() -> None:
    pairs = [SentencePair("L'eau!", "Water!")]
    text, _ = write(pairs, LinkLayout("jsonl", languages=("fr", "en")))
    row = json.loads(text)
    assert (row["src"], row["tgt"]) == (["L'", "eau", "!"], ["Water", "!"])
    text, _ = write(pairs, LinkLayout("words", languages=("fr", "en")))
    assert text == "L'-Water eau-!\n"


def test_bad_lines_keep_their_places(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"no bars\na ||| b\n\xff ||| x\n\0 ||| x\nc ||| d\nnone\n")
    listed = io.StringIO()
    skipped = SkippedLines(listed)
    pairs = list(read_in_step(tmp_path / "t", "pipes", skipped))
    first, second = SentencePair("a", "b"), SentencePair("c", "d")
    assert pairs == [SKIPPED, first, SKIPPED, SKIPPED, second, SKIPPED]
    assert [line.split("\t")[0] for line in listed.getvalue().splitlines()] == ["1", "3", "4", "6"]
    text, totals = write(pairs, LinkLayout(block_pairs=2))
    assert text == "\n0-0\n\n\n0-0\n\n"
    assert (totals.n_skipped, skipped.n_lines, totals.report.n_pairs) == (4, 4, 6)
    with pytest.raises(InputError, match="t, line 1: 0 separators"):
        list(read_in_step(tmp_path / "t", "pipes"))


def test_observers() -> None:
    seen: list[tuple[int, int, int]] = []
    passed: list[int] = []
    layout = LinkLayout(block_pairs=2)
    write(
        PAIRS,
        layout,
        observe=lambda first, words, block: seen.append((first, len(words), block.links.n_pairs)),
        on_block=passed.append,
    )
    assert seen == [(0, 2, 2), (2, 1, 1)]
    assert passed == [2, 1]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_members_make_one_file(tmp_path: Path, suffix: str) -> None:
    blocks = [b"first\n", b"", "zweite Zeile ß\n".encode() * 100]
    path = tmp_path / f"links{suffix}"
    path.write_bytes(b"".join(compress_block(block, suffix) for block in blocks))
    whole = b"".join(blocks).decode()
    assert list(read_lines(path)) == whole.splitlines()
    opened: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".zst": zstandard.open}
    with opened.get(suffix, open)(path, "rb") as stream:
        assert stream.read().decode() == whole
    assert compress_block(b"same", suffix) == compress_block(b"same", suffix)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_an_empty_input_gives_a_file_that_can_be_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"links{suffix}"
    with open_sink(path, {"pairs": 0}) as sink:
        assert write_links(ToyAligner(), [], sink, suffix=suffix).report == AlignReport()
    assert list(read_lines(path)) == []


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    def lines(n_pairs: int) -> Iterator[SentencePair]:
        return (SentencePair(f"{k} b c d e f g h", "s t u v w x y z") for k in range(n_pairs))

    def peak(n_pairs: int) -> int:
        with open_sink(tmp_path / f"{n_pairs}", {"pairs": n_pairs}) as sink:
            tracemalloc.start()
            write_links(ToyAligner(), lines(n_pairs), sink, LinkLayout(block_pairs=64))
            _, highest = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return highest

    peak(256)
    assert peak(8192) < 1.5 * peak(512)


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a ||| b\n")
    with pytest.raises(InputError, match="its folder does not exist"):
        check_resumable_output(tmp_path / "no" / "out", [], resume=False)
    with pytest.raises(InputError, match="a folder"):
        check_resumable_output(tmp_path, [], resume=False)
    with pytest.raises(InputError, match="both read and written"):
        check_resumable_output(tmp_path / "in", ["-", str(tmp_path / "in")], resume=False)
    check_resumable_output(tmp_path / "out", [str(tmp_path / "in")], resume=False)
