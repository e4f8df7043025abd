"""Text files: compressions, line ends, invalid bytes, and output that is complete or absent."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import resource
import stat
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io import files
from calque.io.files import (
    CHUNK_BYTES,
    BadLine,
    SkippedLines,
    check_output_file,
    read_chunks,
    read_lines,
    scan_lines,
    write_atomically,
)

SAMPLE = Path(__file__).parent.parent / "data" / "en-de.tsv"
SUFFIXES = ["", ".gz", ".xz", ".zst"]
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": partial(lzma.compress, preset=0),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.fixture
def place(tmp_path):
    """Return a function that writes bytes to a file and returns its path."""

    def write(data: bytes, name: str = "text.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write


def read_error(path) -> InputError:
    """Return the error of reading an invalid file."""
    with pytest.raises(InputError) as caught:
        list(read_lines(path))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip(tmp_path, suffix):
    path = tmp_path / f"sample.tsv{suffix}"
    expected = SAMPLE.read_text("utf-8")
    with write_atomically(path) as stream:
        stream.write(expected)
    assert path.read_bytes().startswith(PACK[suffix](b"x")[:2]) or suffix == ""
    assert list(read_lines(path)) == expected.splitlines()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_other_programs(place, suffix):
    data = SAMPLE.read_bytes()
    path = place(PACK[suffix](data), f"sample.tsv{suffix}")
    assert list(read_lines(path)) == data.decode().splitlines()


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_concatenated_archives(place, suffix):
    path = place(PACK[suffix](b"one\n") + PACK[suffix](b"two\n"), f"text{suffix}")
    assert list(read_lines(path)) == ["one", "two"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lines=st.lists(st.text(st.characters(exclude_characters="\n\r\0\ufeff", codec="utf-8"))))
@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_round_trip_of_any_lines(tmp_path, suffix, lines):
    path = tmp_path / f"lines{suffix}"
    with write_atomically(path) as stream:
        stream.writelines(line + "\n" for line in lines)
    assert list(read_lines(path)) == lines


def test_only_newlines_end_a_line(place):
    path = place("a\u2028b\x0bc\x85d\re\r\nf\r\r\ng".encode())
    assert list(read_lines(path)) == ["a\u2028b\x0bc\x85d\re", "f\r", "g"]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a\n\n", ["a", ""]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\xef\xbb\xbf", []),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", ["a", "\ufeffb"]),
    ],
)
def test_first_and_last_lines(place, data, lines):
    assert list(read_lines(place(data))) == lines


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_line_longer_than_any_buffer(place, suffix, monkeypatch):
    monkeypatch.setenv("CALQUE_MAX_LINE_BYTES", "100000000")
    long = "ü" * (5 * CHUNK_BYTES)
    path = place(PACK[suffix](f"a\n{long}\nb".encode()), f"long{suffix}")
    assert list(read_lines(path)) == ["a", long, "b"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lines=st.lists(st.text("ab", max_size=12)), limit=st.integers(1, 12), size=st.integers(1, 9))
def test_lines_longer_than_the_limit(place, monkeypatch, lines, limit, size):
    monkeypatch.setenv("CALQUE_MAX_LINE_BYTES", str(limit))
    monkeypatch.setattr(files, "CHUNK_BYTES", size)
    found = list(scan_lines(place("".join(line + "\n" for line in lines).encode())))
    reason = f"the line is longer than {limit} bytes"
    expected = [line if len(line) <= limit else reason for line in lines]
    assert [line.reason if isinstance(line, BadLine) else line for line in found] == expected


def test_long_lines_name_the_limit_and_can_be_skipped(place):
    path = place(b"a\n" + b"b" * 1_000_000 + b"\n" + b"c" * 1_000_001 + b"\nd\n")
    error = read_error(path)
    assert (error.line, error.problem) == (3, "the line is longer than 1,000,000 bytes")
    assert "set CALQUE_MAX_LINE_BYTES" in error.fix
    listed = io.StringIO()
    kept = list(read_lines(path, SkippedLines(listed), blank_bad=True))
    assert [len(line) for line in kept] == [1, 1_000_000, 0, 1]
    number, reason, text = listed.getvalue().rstrip("\n").split("\t")
    assert (number, reason, text) == ("3", error.problem, "c" * 100 + "…")


@pytest.mark.parametrize("value", ["many", "-1", "0", "1.5"])
def test_a_wrong_limit(place, monkeypatch, value):
    monkeypatch.setenv("CALQUE_MAX_LINE_BYTES", value)
    with pytest.raises(InputError, match=f"CALQUE_MAX_LINE_BYTES is {value} .set it to a number"):
        list(read_lines(place(b"a\n")))


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_bomb_takes_little_memory(place, suffix):
    """A line of 200 MiB, of which the file has less than 250 kB."""
    path = place(PACK[suffix](b"a" * (10 * CHUNK_BYTES)) * 20, f"bomb{suffix}")
    assert path.stat().st_size < 250_000
    tracemalloc.start()
    [line] = scan_lines(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(line, BadLine)
    assert peak < 50 * CHUNK_BYTES


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_bare_carriage_returns_are_refused(place, suffix):
    for data in (b"one\rtwo\r", b"one\rtwo", b"a line\r" * 1_000_000):
        error = read_error(place(PACK[suffix](data), f"mac{suffix}"))
        assert error.problem == 'the lines end with "\\r" instead of "\\n"'
        assert "mac2unix" in error.fix
    assert list(read_lines(place(PACK[suffix](b"one\r"), f"one{suffix}"))) == ["one"]
    assert list(read_lines(place(PACK[suffix](b"a\rb\n"), f"two{suffix}"))) == ["a\rb"]


def test_characters_across_chunks(place):
    text = "x" + "€\n" * CHUNK_BYTES  # 4 bytes a line after 1: chunks end inside characters
    assert list(read_lines(place(text.encode()))) == text.splitlines()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_reading_takes_constant_memory(place, suffix):
    data = b"the same line" * 20 + b"\n"
    data *= 200_000
    path = place(PACK[suffix](data), f"big{suffix}")
    tracemalloc.start()
    n_lines = sum(1 for _ in read_lines(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n_lines == 200_000
    assert peak < len(data) / 2


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("n_bytes", [1, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 3])
def test_chunks_are_bytes(place, suffix, n_bytes):
    """Line ends, UTF-8 and byte order marks are not interpreted."""
    data = b"\xef\xbb\xbf\r\n\0\xff" + np.random.default_rng(n_bytes).bytes(n_bytes)
    path = place(PACK[suffix](data[:n_bytes]), f"bytes{suffix}")
    chunks = list(read_chunks(path))
    assert b"".join(chunks) == data[:n_bytes]
    assert all(chunks)
    # zstandard returns all that a piece of the file decompresses to.
    assert max(map(len, chunks)) <= CHUNK_BYTES * (2 if suffix == ".zst" else 1)


def test_chunks_of_an_empty_file_and_of_a_pipe(place, monkeypatch):
    assert list(read_chunks(place(b""))) == []
    for pack in PACK.values():
        piped = io.TextIOWrapper(io.BufferedReader(io.BytesIO(pack(b"\xffone"))))
        monkeypatch.setattr(sys, "stdin", piped)
        assert b"".join(read_chunks("-")) == b"\xffone"


def list_open_files() -> list[str]:
    folder = "/proc/self/fd"
    return [os.path.realpath(f"{folder}/{number}") for number in os.listdir(folder)]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_files_are_opened_late_and_closed_early(place):
    absent = read_chunks("absent")
    with pytest.raises(InputError, match="absent: no such file"):
        next(absent)
    path = place(b"x" * (3 * CHUNK_BYTES))
    chunks = read_chunks(path)
    assert next(chunks)
    assert str(path) in list_open_files()
    chunks.close()
    assert str(path) not in list_open_files()


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_chunks_before_the_damage_are_read(place, suffix):
    packed = PACK[suffix](np.random.default_rng(0).bytes(4 * CHUNK_BYTES))
    chunks = read_chunks(place(packed[: len(packed) // 2], f"cut{suffix}"))
    assert next(chunks)
    with pytest.raises(InputError, match=f"damaged or truncated {suffix} data"):
        list(chunks)


def run_python(code: str, *args: str, stdin: bytes = b"") -> str:
    """Run code in a new interpreter and return its output."""
    command = [sys.executable, "-c", code, *args]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, env=env, check=True)
    return done.stdout.decode()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_standard_input_compressed_or_not(monkeypatch, suffix):
    buffer = io.BufferedReader(io.BytesIO(PACK[suffix]("één\ntwee".encode())))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(buffer))
    assert list(read_lines("-")) == ["één", "twee"]
    assert not buffer.closed


def test_pipes_in_and_out():
    code = (
        "from calque.io.files import read_lines, write_atomically\n"
        "with write_atomically('-') as out:\n"
        "    out.writelines(line[::-1] + '\\n' for line in read_lines('-'))"
    )
    assert run_python(code, stdin=gzip.compress(b"abc\nxyz\n")) == "cba\nzyx\n"


@pytest.mark.parametrize(
    ("data", "line", "problem"),
    [
        (b"good\nbad \xff here\n", 2, "invalid UTF-8 at byte 5"),
        (b"good\ncut \xe2\x82", 2, "invalid UTF-8 at byte 5"),
        (b"good\n\nnul\0\n", 3, "the line contains a NUL byte"),
        ("a\tb\n".encode("utf-16"), 1, "the line contains a NUL byte"),
        (b"a\n" * CHUNK_BYTES + b"\x80", CHUNK_BYTES + 1, "invalid UTF-8 at byte 1"),
    ],
)
def test_invalid_lines(place, data, line, problem):
    path = place(data)
    error = read_error(path)
    assert (error.file, error.line, error.problem) == (str(path), line, problem)
    assert error.fix
    assert str(path) in str(error)
    assert f"line {line}" in str(error)


def test_invalid_lines_can_be_skipped(place, tmp_path):
    path = place(b"one\nt\xffwo\nthree\nfo\0ur\nfive\r\n")
    with write_atomically(tmp_path / "skipped.tsv") as stream:
        skipped = SkippedLines(stream)
        assert list(read_lines(path, skipped)) == ["one", "three", "five"]
    assert skipped.n_lines == 2
    assert list(csv_columns(tmp_path / "skipped.tsv", 0, 1)) == [
        ("2", "invalid UTF-8 at byte 2"),
        ("4", "the line contains a NUL byte"),
    ]


def csv_columns(path: Path, *columns: int):
    for line in path.read_bytes().replace(b"\0", b"").decode().splitlines():
        yield tuple(line.split("\t")[column] for column in columns)


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
@pytest.mark.parametrize("share", [0.3, 0.99])
def test_truncated_archives(place, suffix, share):
    packed = PACK[suffix](SAMPLE.read_bytes())
    error = read_error(place(packed[: int(len(packed) * share)], f"cut{suffix}"))
    assert "truncated" in error.problem


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_damaged_archives(place, suffix):
    packed = bytearray(PACK[suffix](np.random.default_rng(0).bytes(10_000).hex().encode()))
    packed[len(packed) // 2] ^= 255
    packed[len(packed) // 2 + 1] ^= 255
    assert "damaged" in read_error(place(bytes(packed), f"damaged{suffix}")).problem


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
@pytest.mark.parametrize("data", [b"", b"plain text\n"])
def test_a_wrong_suffix_is_an_error(place, suffix, data):
    assert f"the content is not {suffix} data" in read_error(place(data, f"plain{suffix}")).problem


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_compressed_files_need_their_suffix(place, suffix):
    """Without it, line ends and NUL bytes of compressed data would be reported."""
    error = read_error(place(PACK[suffix](b"a line\n"), "text.dat"))
    assert error.problem == f"the content is {suffix} data"
    assert error.fix == f"rename the file to end in {suffix}"


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_standard_output_that_is_a_file_is_appended_to(tmp_path, name):
    script = "from calque.io.files import write_atomically\n"
    script += f"with write_atomically({name!r}) as stream: stream.write('new\\n')"
    path = tmp_path / "all.txt"
    path.write_text("earlier\n")
    with path.open("a") as stream:
        subprocess.run([sys.executable, "-c", script], stdout=stream, check=True)
    assert path.read_text() == "earlier\nnew\n"


@pytest.mark.parametrize("suffix", [".bz2", ".zip", ".lzma", ".BZ2", ".GZ"])
def test_unsupported_compressions(tmp_path, suffix):
    path = tmp_path / f"lines{suffix}"
    with pytest.raises(InputError, match=rf"{suffix} files are not supported \(use .gz, .xz"):
        write_atomically(path).__enter__()
    with pytest.raises(InputError, match="not supported"):
        check_output_file(path, [])
    assert not list(tmp_path.iterdir())
    path.write_bytes(b"plain text\n")
    with pytest.raises(InputError, match=f"{suffix} files are not supported"):
        list(read_lines(path))


def test_missing_files_and_directories(tmp_path):
    assert read_error(tmp_path / "absent.txt").fix == "check the path"
    assert read_error(tmp_path).fix == "pass the path of a file"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("interruption", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_only_the_old_file(place, suffix, interruption):
    path = place(b"old", f"out{suffix}")
    with pytest.raises(interruption), write_atomically(path) as stream:
        stream.writelines(fail_after("new\n" * 10_000, interruption))
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def fail_after(text: str, failure: type[BaseException]):
    yield text
    raise failure


def test_the_file_appears_at_the_end(tmp_path):
    path = tmp_path / "out.txt"
    with write_atomically(path) as stream:
        stream.write("text")
        stream.flush()
        assert not path.exists()
    assert path.read_text() == "text"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_content_is_synced_before_the_rename(tmp_path, monkeypatch):
    calls = []

    def sync(handle):
        status = os.fstat(handle)
        calls.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)

    monkeypatch.setattr(os, "fsync", sync)
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: [calls.append("replace"), rename(*paths)])
    with write_atomically(tmp_path / "out.txt") as stream:
        stream.write("text")
    assert calls == [4, "replace", "folder"]


def test_binary_streams_take_arrays(tmp_path):
    array = np.arange(6.0).reshape(2, 3)
    with write_atomically(tmp_path / "vectors.npy", binary=True) as stream:
        np.save(stream, array)
    np.testing.assert_array_equal(np.load(tmp_path / "vectors.npy"), array)


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_equal_text_gives_equal_bytes(tmp_path, suffix):
    for name in ("a", "b"):
        with write_atomically(tmp_path / f"{name}{suffix}") as stream:
            stream.write("text\n")
    packed = (tmp_path / f"a{suffix}").read_bytes()
    assert packed == (tmp_path / f"b{suffix}").read_bytes()
    assert suffix != ".gz" or packed[4:8] == bytes(4)  # the time


def test_permissions_follow_the_umask(tmp_path):
    with write_atomically(tmp_path / "out.txt") as stream:
        stream.write("text")
    (tmp_path / "plain.txt").write_text("text")
    assert (tmp_path / "out.txt").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode


def test_symbolic_links_are_kept(place, tmp_path):
    target = place(b"old")
    (tmp_path / "link").symlink_to(target)
    with write_atomically(tmp_path / "link") as stream:
        stream.write("new")
    assert (tmp_path / "link").is_symlink()
    assert target.read_text() == "new"


def test_devices_are_written_in_place():
    with write_atomically("/dev/null") as stream:
        stream.write("text")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("binary", [False, True])
def test_full_device(binary):
    with (
        pytest.raises(InputError, match=r"/dev/full: no space left.*free some space"),
        write_atomically("/dev/full", binary=binary) as stream,
    ):
        stream.write(b"text" if binary else "text")


def test_full_standard_output(monkeypatch):
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=full, flush=full.flush))
        with (
            pytest.raises(InputError, match="standard output: no space left"),
            write_atomically("-", binary=True) as stream,
        ):
            stream.write(b"text")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_nothing_behind(tmp_path, suffix):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    text = np.random.default_rng(0).bytes(1 << 19).hex()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limits[1]))
    try:
        with (
            pytest.raises(InputError, match="file too large"),
            write_atomically(tmp_path / f"out{suffix}") as stream,
        ):
            stream.write(text)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_unwritable_paths(tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "out.txt"):
        with pytest.raises(InputError, match=str(path)), write_atomically(path) as stream:
            stream.write("text")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("file/out.txt", "file: this is not a folder"),
        ("file/deep/out.txt", "file: this is not a folder"),
        ("absent/out.txt", r"absent/out.txt: .* its folder does not exist \(mkdir -p"),
        ("link", r"link: .* its folder does not exist \(mkdir -p .*elsewhere"),
        ("locked/out.txt", "locked: permission denied"),
        ("folder", "folder: this is a directory"),
    ],
)
def test_impossible_outputs(tmp_path, monkeypatch, path, problem):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "out.txt")
    for name in ("locked", "folder"):
        (tmp_path / name).mkdir()
    access = os.access  # the root user may write everywhere
    monkeypatch.setattr(os, "access", lambda p, mode: "locked" not in str(p) and access(p, mode))
    with pytest.raises(InputError, match=problem):
        check_output_file(tmp_path / path, [])
    monkeypatch.setattr(os, "access", lambda *_: False)
    check_output_file(Path("/dev/null"), [])


def test_errors_of_the_caller_are_not_changed(tmp_path):
    with pytest.raises(FileNotFoundError), write_atomically(tmp_path / "out.txt"):
        open(tmp_path / "absent.txt").close()
    assert os.listdir(tmp_path) == []
