"""Word vectors: text and binary files, bad lines, counts, and decimals against `float`."""

from __future__ import annotations

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
from calque.io import word_vectors
from calque.io.files import BadLine, SkippedLines
from calque.io.word_vectors import (
    MARGIN,
    Delimiters,
    counts_path,
    cut_blocks,
    format_words,
    iterate_vectors,
    parse_block,
    parse_decimals,
    parse_line,
    read_word_counts,
    write_word2vec,
    write_word_counts,
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
    """Return a function that reads bytes as a file of vectors: words and rows."""

    def read_bytes(data: bytes, name: str = "a.vec", skip_bad=None):
        path = tmp_path / name
        path.write_bytes(data)
        blocks = list(iterate_vectors(path, skip_bad))
        words = [word for block in blocks for word in block.words]
        return words, [row for block in blocks for row in block.matrix.tolist()]

    return read_bytes


@pytest.fixture
def read_error(read):
    """Return a function that reads invalid bytes and returns the error."""

    def read_invalid(data: bytes, name: str = "a.vec") -> InputError:
        with pytest.raises(InputError) as caught:
            read(data, name)
        assert "\n" not in str(caught.value)
        assert caught.value.fix
        return caught.value

    return read_invalid


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("data", [GENSIM_TEXT, GENSIM_BINARY], ids=["text", "binary"])
def test_files_of_gensim(read, data, suffix):
    words, rows = read(PACK[suffix](data), f"a.vec{suffix}")
    assert words == GENSIM_WORDS
    lines = [line.split(" ") for line in GENSIM_TEXT.decode().splitlines()[1:]]
    assert rows == np.array([line[1:] for line in lines], dtype=np.float32).tolist()


def test_binary_files_of_word2vec_have_line_ends(read):
    rows = np.float32([[0.5, 2], [10, -0.25]])  # 10 is 00 00 20 41: a blank within
    data = b"2 2\ncat " + rows[0].tobytes() + b"\ndog " + rows[1].tobytes() + b"\n"
    assert read(data) == (["cat", "dog"], rows.tolist())


@pytest.mark.parametrize("first", [b"5\x0cab", b"7 ab", b" 1\nb", b"1 2\xff"])
def test_binary_numbers_may_begin_like_text(read, first):
    """The bytes of a number may be a digit and a blank."""
    rows = np.frombuffer(first + np.float32([0.25, -3, 10]).tobytes(), "<f4").reshape(2, 2)
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


def test_words_may_be_numbers_and_contain_blanks(read):
    words = [". . .", "at name@domain.com", "a\xa0b", "\u3000", "a\u2028b", "2.5", "-", "𝒳", "</s>"]
    text = "".join(f"{word} 0.5 -1\n" for word in words)
    assert read(f"{len(words)} 2\n{text}".encode()) == (words, [[0.5, -1]] * len(words))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"b 4 5", "the line has 2 numbers instead of 3"),
        (b"b", "the line has 0 numbers instead of 3"),
        (b"b 4 5 6 7", "the line has 4 numbers instead of 3"),
        (b"at b 4 5 6 7.5", "the line has 4 numbers instead of 3"),
        (b" 4 5 6", "the line has 2 numbers instead of 3"),
        (b"b 4 five 6", "'five' is not a finite number"),
        (b"b 4 nan 6", "'nan' is not a finite number"),
        (b"b 4 5 -inf", "'-inf' is not a finite number"),
        (b"b 4 5 1e39", "'1e39' is not a finite number"),
        (b"b 4 5,5 6", "'5,5' is not a finite number"),
        (b"b 4 5 \xff", "'\\\\xff' is not a finite number"),
        (b"b\xe9 4 5 6", "invalid UTF-8 at byte 2"),
        (b"b\0 4 5 6", "the line contains a NUL byte"),
        (b"", "the line is empty"),
        (b" \t ", "the line is empty"),
    ],
)
@pytest.mark.parametrize("header", [b"3 3\n", b""])
def test_bad_lines(read, read_error, line, reason, header):
    data = header + b"a 1 2 3\n" + line + b"\nc 7 8 9\n"
    error = read_error(data)
    assert (error.problem, error.line) == (reason, 2 + bool(header))
    stream = io.StringIO()
    skipped = SkippedLines(stream)
    assert read(data, skip_bad=skipped) == (["a", "c"], [[1, 2, 3], [7, 8, 9]])
    assert skipped.n_lines == 1
    assert stream.getvalue().startswith(f"{error.line}\t{reason}\t")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "the file is empty"),
        (b"word\n", "the line is neither a header nor a word with its vector"),
        (b"5 0\nword\n", "the line is neither a header nor a word with its vector"),
        (
            b"\x93NUMPY\x01\0v\0{'descr'\n",
            "the line is neither a header nor a word with its vector",
        ),
        (b"9" * 5000 + b" 3\na 1 2 3\n", "the header announces more words than any file can"),
        (b"1 " + b"9" * 5000 + b"\na 1\n", "the header announces vectors of more than 1,048,576"),
        (b"3 2\na 1 2\nb 3 4\n", "the header announces 3 words, but the file has 2"),
        (b"1 2\na 1 2\nb 3 4\n", "the header announces 1 words, but the file has 2"),
        (GENSIM_BINARY[:-1], "the file ends within word 8 of 8"),
        (GENSIM_BINARY[:-14], "the header announces 8 words, but the file has 7"),
        (GENSIM_BINARY[:-13], "the file ends within word 8 of 8"),
        (GENSIM_BINARY + b"y ", "the header announces 8 words, but the file has 9"),
        (GENSIM_BINARY.replace(b"8 3", b"8 2"), "word 2: invalid UTF-8 at byte 1"),
        (GENSIM_BINARY.replace(b"8 3", b"8 4"), "word 2: invalid UTF-8 at byte 1"),
        (b"2 1\na \0\0\x80\x3f\0\0\0 \0\0\0\0", "word 2: this is not a word"),
        (GENSIM_BINARY.replace(b"\x19=\xa1:", b"\0\0\x80\x7f"), "word 1: its vector is not finite"),
        (GENSIM_BINARY.replace(b"of ", b"o\xff "), "word 2: invalid UTF-8 at byte 2"),
    ],
)
def test_incomplete_files(read_error, data, problem):
    assert read_error(data).problem.startswith(problem)


def test_bad_vectors_in_binary_files_can_be_skipped(read):
    skipped = SkippedLines()
    data = GENSIM_BINARY.replace(b"\x19=\xa1:", b"\0\0\x80\x7f").replace(b"of ", b"o\xff ")
    words, rows = read(data, skip_bad=skipped)
    assert (words, len(rows), skipped.n_lines) == (GENSIM_WORDS[2:], 6, 2)


def test_damaged_archives(read_error):
    packed = gzip.compress(GENSIM_TEXT)
    assert "truncated" in read_error(packed[:-9], "a.vec.gz").problem


def test_an_exaggerated_header_takes_no_memory(read_error):
    line = b"2 999999\n" + b"a 1\n" * 1000
    assert read_error(line).problem == "the line has 1 numbers instead of 999999"


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
@pytest.mark.parametrize("data", [GENSIM_TEXT, GENSIM_BINARY], ids=["text", "binary"])
def test_blocks_may_end_anywhere(read, monkeypatch, data, size):
    expected = read(data)
    monkeypatch.setattr(word_vectors, "BLOCK_BYTES", size)
    monkeypatch.setattr(word_vectors, "BINARY_BLOCK_BYTES", size)
    monkeypatch.setattr("calque.io.files.CHUNK_BYTES", size)
    monkeypatch.setattr("calque.io.word_vectors.HEAD_BYTES", 50)
    assert read(data) == expected


def test_line_numbers_across_blocks(read_error, monkeypatch):
    monkeypatch.setattr(word_vectors, "BLOCK_BYTES", 64)
    lines = [b"w%d 1 2" % k for k in range(100)]
    assert read_error(b"100 2\n" + b"\n".join([*lines[:70], b"bad", *lines[71:]])).line == 72


@pytest.mark.parametrize("size", [16, 64, 1 << 18])
def test_words_longer_than_the_limit(read, read_error, monkeypatch, size):
    monkeypatch.setattr(word_vectors, "BLOCK_BYTES", size)
    monkeypatch.setattr(word_vectors, "BINARY_BLOCK_BYTES", size)
    monkeypatch.setattr("calque.io.files.CHUNK_BYTES", size)
    monkeypatch.setenv("CALQUE_MAX_LINE_BYTES", "100")
    skipped = SkippedLines()
    for long in (b"x" * 200, b"x" * 20_000, b"x " * 300):
        text = b"3 2\na 1 2\n" + long + b" 3 4\nb 5 6\n"
        error = read_error(text)
        assert (error.line, error.problem) == (3, "the line is longer than 100 bytes")
        assert read(text, skip_bad=skipped) == (["a", "b"], [[1, 2], [5, 6]])
    assert skipped.n_lines == 3
    for n_bytes in (101, 20_000):
        binary = b"2 1\na \0\0\0\0" + b"x" * n_bytes + b" \0\0\0\0"
        assert read_error(binary).problem == "word 2 is longer than 100 bytes"


def test_bare_carriage_returns(read_error):
    assert 'end with "\\r"' in read_error(b"2 2\ra 1 2\rb 3 4\r").problem


@given(st.lists(st.binary(max_size=20)), st.integers(1, 30))
def test_blocks_contain_every_line_once(chunks, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_vectors, "BLOCK_BYTES", size)
        blocks = list(cut_blocks(chunks, 1 << 20))
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
def test_blocks_agree_with_single_lines(lines):
    vectors, bad = parse_block(b"".join(line + b"\n" for line in lines), 2, 1 << 20)
    entries = {row: parse_line(line.rstrip(), 2) for row, line in enumerate(lines)}
    assert bad == {row: entry for row, entry in entries.items() if isinstance(entry, BadLine)}
    good = [entry for entry in entries.values() if not isinstance(entry, BadLine)]
    assert vectors.words == [word for word, _ in good]
    assert vectors.matrix.tolist() == np.float32([row for _, row in good]).tolist()


@given(st.binary(max_size=80), st.sampled_from([b"", b"2 2\n", b"1 1\n", b"a 1 2\n"]))
def test_arbitrary_bytes(tmp_path_factory, data, start):
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


def test_binary_format(tmp_path):
    path = tmp_path / "a.bin"
    matrix = np.float32([[1, -0.5], [1 / 3, 0]])
    write_word2vec(path, ["der", "naïve"], matrix, binary=True)
    expected = [b"2 2\n", b"der ", matrix[0], b"\n", "naïve ".encode(), matrix[1], b"\n"]
    assert path.read_bytes() == b"".join(bytes(part) for part in expected)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("n_words", [1, 1200])  # one block and several
def test_round_trip(tmp_path, suffix, n_words):
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
def test_invalid_words_are_not_written(word):
    with pytest.raises(InputError, match="cannot be written"):
        format_words(["fine", word])


def test_words_that_would_become_equal_are_not_written():
    with pytest.raises(InputError, match="occurs twice"):
        format_words(["a b", "a\xa0b"])


@pytest.mark.parametrize("binary", [False, True])
def test_infinite_vectors_are_not_written(tmp_path, binary):
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


# Counts.


def test_counts_are_beside_the_vectors(tmp_path):
    path = tmp_path / "de.vec.gz"
    with write_word_counts(path, ["der", "a\xa0b"], np.array([2**40, 0])):
        assert read_word_counts(path, ["der"]) is None  # not before the block ends
    assert (tmp_path / "de.vec.gz.counts").read_text() == "der\t1099511627776\na\xa0b\t0\n"
    assert read_word_counts(path, ["a\xa0b", "der"]).tolist() == [0, 2**40]


def test_an_error_leaves_the_counts_unchanged(tmp_path):
    path = tmp_path / "de.vec"
    counts_path(path).write_text("der\t5\n")
    for counts in (np.array([7]), None):
        with pytest.raises(RuntimeError), write_word_counts(path, ["der"], counts):
            raise RuntimeError
    assert os.listdir(tmp_path) == ["de.vec.counts"]
    assert read_word_counts(path, ["der"]).tolist() == [5]


def test_outdated_counts_are_removed(tmp_path):
    path = tmp_path / "de.vec"
    counts_path(path).write_text("der\t5\n")
    with write_word_counts(path, ["der"], None):
        pass
    assert read_word_counts(path, ["der"]) is None


def test_standard_output_has_no_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with write_word_counts("-", ["der"], np.array([7])):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "line", ["der", "der\t", "\t5", "der\t-5", "der\t5.0", "der\t٣", "der 5", "der\t" + "9" * 19]
)
def test_bad_counts(tmp_path, line):
    counts_path(tmp_path / "de.vec").write_text(f"die\t7\n{line}\n")
    with pytest.raises(InputError, match=r"counts, line 2: the line is not a word and its count"):
        read_word_counts(tmp_path / "de.vec", ["die"])


def test_every_word_needs_a_count(tmp_path):
    counts_path(tmp_path / "de.vec").write_text("die\t7\n")
    with pytest.raises(InputError, match="has no count for 'der'"):
        read_word_counts(tmp_path / "de.vec", ["die", "der"])


# Decimals.

plain = st.from_regex(r"[-+]?[0-9]{0,10}\.?[0-9]{0,20}", fullmatch=True)
scientific = st.from_regex(r"-?[0-9]\.[0-9]{1,8}[eE][-+]?[0-9]{1,3}", fullmatch=True)
floats = st.floats(width=32).map(str) | st.floats().map(repr)
rubbish = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12)


def parse(*fields: str) -> tuple[list[float], list[int]]:
    """Parse the fields of one line."""
    found = Delimiters.of(b"x" * MARGIN + f" {' '.join(fields)}\n".encode())
    around = np.flatnonzero(found.codes <= ord(" "))
    numbers, failed = parse_decimals(found, around[None])
    assert numbers.dtype == np.float32
    return numbers[0].tolist(), failed.tolist()


def parse_by_float(field: str) -> float | None:
    """Parse with `float` and round to 32 bits; None if such a float cannot hold it."""
    try:
        value = float(field.encode()) if "_" not in field else np.nan
    except ValueError:
        return None
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(rounded) if np.isfinite(rounded) else None


@given(st.lists(plain | scientific | floats | rubbish, min_size=1, max_size=8))
@example(["0.1234", "-0.12345678", "0.123456789", "-0.0012345678", "12345678.5", "123456789.5"])
@example(["", "-", ".", "-.", "--1", "1-2", "5-", "1.-2", "-1.-2", "1..2", ".5", "-.5", "5.", "+5"])
@example(["nan", "inf", "-inf", "1e39", "-1e39", "1e-50", "0x10", "1_000", "１", "3.4028235e38"])
@example(["999999999999999", "9999999999999999", "0.999999999999999", "0.9999999999999999"])
@example(["9007199254740993", "0.1234567890123456789", "-0", "-0.0", "00000000000000000001"])
@example(["1,5", "1/5", "1:5", "1;5", "1e5", "1E5", "e5", "12e", "0.1f", "0.1é"])
def test_numbers_agree_with_float(fields):
    numbers, failed = parse(*fields)
    expected = [parse_by_float(field) for field in fields]
    assert failed == [k for k, value in enumerate(expected) if value is None]
    wanted = [0.0 if value is None else value for value in expected]
    assert list(map(str, numbers)) == list(map(str, wanted))  # strings, because of −0.0


@pytest.mark.parametrize("format_", ["%.4f", "%.6g", "%.9g", "%.17g", "%f", "%e"])
def test_random_numbers_in_common_formats(format_):
    values = np.random.default_rng(0).standard_normal(2000) * 10.0 ** np.arange(-9, 11, 0.01)
    fields = [format_ % value for value in values]
    numbers, failed = parse(*fields)
    assert failed == []
    assert numbers == np.array(list(map(float, fields))).astype(np.float32).tolist()


def test_rows_of_numbers():
    found = Delimiters.of(b"x" * MARGIN + b" 1 2\ny 3 4\n")
    blanks = np.flatnonzero(found.codes <= ord(" "))
    numbers, failed = parse_decimals(found, np.array([blanks[:3], blanks[3:6]]))
    assert numbers.tolist() == [[1, 2], [3, 4]]
    assert failed.tolist() == []
