import gzip
import io
import lzma
import os
import sys

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io import word_vectors as word2vec_binary
from calque.io import word_vectors as word2vec_text
from calque.io.files import BadLine, SkippedLines
from calque.io.word_vectors import (
    cut_blocks,
    format_words,
    iterate_vectors,
    parse_block,
    parse_line,
    write_word2vec,
)

# Written by Gensim 4.4 from the same eight vectors.
GENSIM_WORDS = ["the", "of", "été", "a\xa0b", "猫", "3.14", "...", "x"]
GENSIM_TEXT = (
    "8 3\nthe 0.0012301534 0.29874554 -0.27413785\nof -0.89059186 -0.4546708 -0.9916465\n"
    "été 0.0601436 1.3402152 -0.4922065\na\xa0b -0.6204749 0.48984206 0.356887\n"
    "猫 0.10541425 -0.930468 -0.029251823\n3.14 0.6953032 -1.3442146 -0.45761576\n"
    "... -1.9012227 -1.2895378 -1.841735\nx 1e-07 -123456.78 0.0\n"
).encode()
GENSIM_BINARY = (
    b"8 3\nthe \x19=\xa1:-\xf5\x98>\xcc[\x8c\xbeof \xd4\xfdc\xbf\x9c\xca\xe8\xbe\x8c\xdc}\xbf"
    b"\xc3\xa9t\xc3\xa9 #Yv=,\x8c\xab?~\x02\xfc\xbea\xc2\xa0b q\xd7\x1e\xbf\x94\xcc\xfa>\xe5\xb9"
    b"\xb6>\xe7\x8c\xab m\xe3\xd7='3n\xbf\x85\xa1\xef\xbc3.14 d\xff1?9\x0f\xac\xbf\x9dL\xea\xbe"
    b"... D[\xf3\xbf\x93\x0f\xa5\xbf\xf9\xbd\xeb\xbfx \x95\xbf\xd63d \xf1\xc7\x00\x00\x00\x00"
)
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.fixture
def read(tmp_path):
    """Read bytes as a file of vectors: words and rows."""

    def read_bytes(data: bytes, name: str = "a.vec", skip_bad=None):
        path = tmp_path / name
        path.write_bytes(data)
        blocks = list(iterate_vectors(path, skip_bad))
        words = [word for block in blocks for word in block.words]
        return words, [row for block in blocks for row in block.matrix.tolist()]

    return read_bytes


@pytest.fixture
def refusal(read):
    """Read bytes that must be refused, and give the error."""

    def refuse(data: bytes, name: str = "a.vec") -> InputError:
        with pytest.raises(InputError) as caught:
            read(data, name)
        assert "\n" not in str(caught.value)
        assert caught.value.fix
        return caught.value

    return refuse


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("data", [GENSIM_TEXT, GENSIM_BINARY], ids=["text", "binary"])
def test_gensim_s_files_are_read(read, data, suffix):
    words, rows = read(PACK[suffix](data), f"a.vec{suffix}")
    assert words == GENSIM_WORDS
    lines = [line.split(" ") for line in GENSIM_TEXT.decode().splitlines()[1:]]
    assert rows == np.array([line[1:] for line in lines], dtype=np.float32).tolist()


def test_word2vec_s_own_binary_files_have_line_ends(read):
    rows = np.float32([[0.5, 2], [10, -0.25]])  # 10 is 00 00 20 41: a blank within
    data = b"2 2\ncat " + rows[0].tobytes() + b"\ndog " + rows[1].tobytes() + b"\n"
    assert read(data) == (["cat", "dog"], rows.tolist())


@pytest.mark.parametrize(
    "data",
    [
        b"2 3\na 1 2.5 -3\nb 4 5 6\n",
        b"a 1 2.5 -3\nb 4 5 6\n",
        b"2 3\na 1 2.5 -3\nb 4 5 6",
        b"2 3 \na 1 2.5 -3 \nb 4 5 6 \n",
        b"2 3\r\na 1 2.5 -3\r\nb 4 5 6 \r\n",
        b"2\t3\na\t1\t2.5\t-3\nb\t4\t5\t6\n",
        b"2 3\n a  1 2.5  -3\nb 4 5 6\n\n  \n",
        b"\xef\xbb\xbf2 3\na 1 2.5 -3\nb 4 5 6\n",
        b"\xef\xbb\xbfa 1 2.5 -3\nb 4 5 6\n",
    ],
)
def test_variants_of_the_text_format(read, data):
    assert read(data) == (["a", "b"], [[1, 2.5, -3], [4, 5, 6]])


def test_words_may_be_numbers_and_hold_blanks_of_all_kinds(read):
    words = [". . .", "at name@domain.com", "a\xa0b", "\u3000", "a\u2028b", "2.5", "-", "𝒳", "</s>"]
    text = "".join(f"{word} 0.5 -1\n" for word in words)
    assert read(f"{len(words)} 2\n{text}".encode()) == (words, [[0.5, -1]] * len(words))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"b 4 5", "2 numbers where 3 are due"),
        (b"b", "0 numbers where 3 are due"),
        (b"b 4 5 6 7", "4 numbers where 3 are due"),
        (b"at b 4 5 6 7.5", "4 numbers where 3 are due"),
        (b" 4 5 6", "2 numbers where 3 are due"),
        (b"b 4 five 6", "'five' is not a finite number"),
        (b"b 4 nan 6", "'nan' is not a finite number"),
        (b"b 4 5 -inf", "'-inf' is not a finite number"),
        (b"b 4 5 1e39", "'1e39' is not a finite number"),
        (b"b 4 5,5 6", "'5,5' is not a finite number"),
        (b"b 4 5 \xff", "'\\\\xff' is not a finite number"),
        (b"b\xe9 4 5 6", "invalid UTF-8 at byte 2"),
        (b"b\0 4 5 6", "NUL byte"),
        (b"", "empty line"),
        (b" \t ", "empty line"),
    ],
)
@pytest.mark.parametrize("header", [b"3 3\n", b""])
def test_a_bad_line_is_named(read, refusal, line, reason, header):
    data = header + b"a 1 2 3\n" + line + b"\nc 7 8 9\n"
    error = refusal(data)
    assert (error.problem, error.line) == (reason, 2 + bool(header))
    stream = io.StringIO()
    skipped = SkippedLines(stream)
    assert read(data, skip_bad=skipped) == (["a", "c"], [[1, 2, 3], [7, 8, 9]])
    assert skipped.n_lines == 1
    assert stream.getvalue().startswith(f"{error.line}\t{reason}\t")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"word\n", "neither a header nor a word with its vector"),
        (b"5 0\nword\n", "neither a header nor a word with its vector"),
        (b"\x93NUMPY\x01\0v\0{'descr'\n", "neither a header nor a word with its vector"),
        (b"3 2\na 1 2\nb 3 4\n", "the header promises 3 words but the file holds 2"),
        (b"1 2\na 1 2\nb 3 4\n", "the header promises 1 words but the file holds 2"),
        (GENSIM_BINARY[:-1], "ends within word 8 of 8"),
        (GENSIM_BINARY[:-14], "the header promises 8 words but the file holds 7"),
        (GENSIM_BINARY[:-13], "ends within word 8 of 8"),
        (GENSIM_BINARY + b"y ", "the header promises 8 words but the file holds 9"),
        (GENSIM_BINARY.replace(b"8 3", b"8 2"), "word 2: invalid UTF-8 at byte 1"),
        (GENSIM_BINARY.replace(b"8 3", b"8 4"), "word 2: invalid UTF-8 at byte 1"),
        (b"2 1\na \0\0\x80\x3f\0\0\0 \0\0\0\0", "word 2: not a word, so the numbers before"),
        (GENSIM_BINARY.replace(b"\x19=\xa1:", b"\0\0\x80\x7f"), "word 1: its vector is not finite"),
        (GENSIM_BINARY.replace(b"of ", b"o\xff "), "word 2: invalid UTF-8 at byte 2"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(refusal, data, problem):
    assert refusal(data).problem.startswith(problem)


def test_bad_vectors_in_binary_files_can_be_skipped(read):
    skipped = SkippedLines()
    data = GENSIM_BINARY.replace(b"\x19=\xa1:", b"\0\0\x80\x7f").replace(b"of ", b"o\xff ")
    words, rows = read(data, skip_bad=skipped)
    assert (words, len(rows), skipped.n_lines) == (GENSIM_WORDS[2:], 6, 2)


def test_a_damaged_archive_is_refused(refusal):
    packed = gzip.compress(GENSIM_TEXT)
    assert "truncated" in refusal(packed[:-9], "a.vec.gz").problem


def test_a_header_that_promises_too_much_takes_no_memory(refusal):
    line = b"2 999999999999\n" + b"a 1\n" * 1000
    assert refusal(line).problem == "1 numbers where 999999999999 are due"


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
@pytest.mark.parametrize("data", [GENSIM_TEXT, GENSIM_BINARY], ids=["text", "binary"])
def test_blocks_may_end_anywhere(read, monkeypatch, data, size):
    expected = read(data)
    monkeypatch.setattr(word2vec_text, "BLOCK_BYTES", size)
    monkeypatch.setattr(word2vec_binary, "BLOCK_BYTES", size)
    monkeypatch.setattr("calque.io.files.CHUNK_BYTES", size)
    monkeypatch.setattr("calque.io.word_vectors.HEAD_BYTES", 50)
    assert read(data) == expected


def test_line_numbers_go_on_from_block_to_block(refusal, monkeypatch):
    monkeypatch.setattr(word2vec_text, "BLOCK_BYTES", 64)
    lines = [b"w%d 1 2" % k for k in range(100)]
    assert refusal(b"100 2\n" + b"\n".join([*lines[:70], b"bad", *lines[71:]])).line == 72


@given(st.lists(st.binary(max_size=20)), st.integers(1, 30))
def test_blocks_hold_every_line_once(chunks, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word2vec_text, "BLOCK_BYTES", size)
        blocks = list(cut_blocks(chunks))
    assert all(block.endswith(b"\n") for block in blocks)
    assert b"".join(blocks).rstrip() == b"".join(chunks).rstrip()


word = st.text(min_size=1, max_size=3) | st.sampled_from(["1.5", "a b", "", "-", ". .", "é"])
number = st.floats(-10, 10, width=32).map(str) | st.sampled_from(["1e-5", "7", "nan", "x", "", "."])
blank = st.sampled_from([" "] * 8 + ["  ", "\t", " \r"])
line = st.tuples(word, st.lists(st.tuples(blank, number), max_size=4), st.sampled_from(["", " "]))


def spell(parts: tuple[str, list[tuple[str, str]], str]) -> bytes:
    start, numbers, end = parts
    text = start + "".join(gap + value for gap, value in numbers) + end
    return text.replace("\n", "?").encode(errors="replace")


@given(st.lists(line.map(spell), min_size=1, max_size=6))
@example([b"\xff 1 2", b"a 1 2"])
@example([b"a", b"b", b"c 1 2"])
@example([b"a 1 2\x01", b"b 1\x0b2", b"c\x01 1 2", b"d 0\x011 2", b"\x0c 1 2"])
def test_a_block_is_read_like_its_lines(lines):
    vectors, bad = parse_block(b"".join(line + b"\n" for line in lines), 2)
    entries = {row: parse_line(line.rstrip(), 2) for row, line in enumerate(lines)}
    assert bad == {row: entry for row, entry in entries.items() if isinstance(entry, BadLine)}
    good = [entry for entry in entries.values() if not isinstance(entry, BadLine)]
    assert vectors.words == [word for word, _ in good]
    assert vectors.matrix.tolist() == np.float32([row for _, row in good]).tolist()


@given(st.binary(max_size=80), st.sampled_from([b"", b"2 2\n", b"1 1\n", b"a 1 2\n"]))
def test_no_bytes_do_harm(tmp_path_factory, data, start):
    path = tmp_path_factory.mktemp("any") / "a.vec"
    path.write_bytes(start + data)
    try:
        blocks = list(iterate_vectors(path))
    except InputError:
        return
    assert all(np.isfinite(block.matrix).all() for block in blocks)
    assert all(word for block in blocks for word in block.words)


def test_text_is_written_with_six_digits(tmp_path):
    path = tmp_path / "a.vec"
    matrix = np.float32([[1, -0.5, 1e-7], [1 / 3, 123456.789, 0]])
    write_word2vec(path, ["der", "naïve"], matrix)
    assert path.read_bytes() == "2 3\nder 1 -0.5 1e-07\nnaïve 0.333333 123457 0\n".encode()


def test_binary_is_written_as_word2vec_does(tmp_path):
    path = tmp_path / "a.bin"
    matrix = np.float32([[1, -0.5], [1 / 3, 0]])
    write_word2vec(path, ["der", "naïve"], matrix, binary=True)
    expected = [b"2 2\n", b"der ", matrix[0], b"\n", "naïve ".encode(), matrix[1], b"\n"]
    assert path.read_bytes() == b"".join(bytes(part) for part in expected)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("n_words", [1, 1200])  # one block and several
def test_what_is_written_is_read_back(tmp_path, suffix, n_words):
    path = tmp_path / f"a.vec{suffix}"
    words = [f"wört{k}" for k in range(n_words)]
    matrix = np.random.default_rng(0).standard_normal((n_words, 30), dtype=np.float32)
    write_word2vec(path, words, matrix)
    blocks = list(iterate_vectors(path))
    read = np.concatenate([block.matrix for block in blocks])
    assert [word for block in blocks for word in block.words] == words
    np.testing.assert_allclose(read, matrix, rtol=5.01e-6)
    again = tmp_path / f"b.vec{suffix}"
    write_word2vec(again, words, read)
    assert again.read_bytes() == path.read_bytes()


def test_vecmap_and_muse_read_what_is_written(tmp_path):
    path = tmp_path / "a.vec"
    write_word2vec(path, format_words(["New York", "猫"]), np.float32([[0.5, 1], [2, -1e-9]]))
    with open(path, encoding="utf-8", newline="\n") as stream:  # as both do it
        n_words, dimension = map(int, stream.readline().split())
        entries = [stream.readline().rstrip().split(" ", 1) for _ in range(n_words)]
    assert [word for word, _ in entries] == ["New\xa0York", "猫"]
    rows = [np.array(row.split(), dtype=np.float32) for _, row in entries]
    assert [len(row) for row in rows] == [dimension] * n_words
    assert rows[1].tolist() == [2, np.float32(-1e-9)]


@pytest.mark.parametrize("word", ["", "a\nb", "a\tb", "a\rb", "a\0b", "\ud800"])
def test_what_is_no_word_is_not_written(word):
    with pytest.raises(InputError, match="cannot be written"):
        format_words(["fine", word])


def test_words_that_would_become_equal_are_not_written():
    with pytest.raises(InputError, match="comes twice"):
        format_words(["a b", "a\xa0b"])


@pytest.mark.parametrize("binary", [False, True])
def test_no_file_with_vectors_that_are_not_finite(tmp_path, binary):
    matrix = np.zeros((5000, 10), dtype=np.float32)
    matrix[4321, 3] = np.nan
    words = [f"w{k}" for k in range(5000)]
    with pytest.raises(InputError, match="vector of 'w4321' is not finite"):
        write_word2vec(tmp_path / "a.vec", words, matrix, binary=binary)
    assert os.listdir(tmp_path) == []


def test_standard_input(monkeypatch):
    piped = io.BufferedReader(io.BytesIO(gzip.compress(b"a 1 2\n")))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped))
    (block,) = iterate_vectors("-")
    assert (block.words, block.matrix.tolist()) == (["a"], [[1, 2]])
