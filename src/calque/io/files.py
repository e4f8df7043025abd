r"""Read and write text files: plain, .gz, .xz and .zst, streamed; output appears complete or not.

A line ends at "\n" only (U+2028 and similar characters are text); one "\r" before it is removed.
Longer lines than `CALQUE_MAX_LINE_BYTES` are invalid, so that a small compressed file cannot take
all memory.
The path "-" means standard input, compressed or not, or standard output.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, TypeAlias, cast, overload

from calque.errors import DISK_FULL, InputError, explain_os_error
from calque.io.locks import UNFINISHED, create_draft

PathLike: TypeAlias = str | os.PathLike[str]
SkipBad: TypeAlias = Callable[[int, str, str], None]  # line number, reason, text

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES, DEFAULT_MAX_LINE_BYTES = "CALQUE_MAX_LINE_BYTES", 1_000_000
SHOWN_BYTES = 100  # of a line that is too long
ZSTD_CHUNK_BYTES = 1 << 10  # one byte may decompress to 32 KiB
BOM = b"\xef\xbb\xbf"
MAGIC_BYTES = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}
# Formats that are not supported: plain text under such a name would be misleading.
UNSUPPORTED = frozenset({".bz2", ".lzma", ".lz4", ".7z", ".zip", ".tar", ".tgz"})
NUL_BYTE = "the line contains a NUL byte"
NUL_BYTE_FIX = "remove it, or convert the file from UTF-16 to UTF-8"
UTF8_FIX = "convert the file to UTF-8, for example with iconv"
BARE_CR = 'the lines end with "\\r" instead of "\\n"'
BARE_CR_FIX = "convert the file, for example with mac2unix or tr '\\r' '\\n'"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be used: the reason, how to fix it, and its text."""

    reason: str
    fix: str
    text: str


class SkippedLines:
    """Count bad lines and, given a stream, list them there: line number, reason, text."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream, self.n_lines = stream, 0

    def __call__(self, number: int, reason: str, text: str) -> None:
        """Count one bad line and write it to the list."""
        self.n_lines += 1
        if self.stream is not None:
            self.stream.write(f"{number}\t{reason}\t{text}\n")

    def of(self, path: PathLike) -> SkipBad:
        """Return a handler for the bad lines of one file among several, which names the file."""
        return lambda number, reason, text: self(number, f"{display_name(path)}: {reason}", text)


def read_lines(
    path: PathLike, skip_bad: SkipBad | None = None, *, blank_bad: bool = False
) -> Iterator[str]:
    """Read the lines of a file; an invalid line raises InputError or is passed to `skip_bad`.

    With `blank_bad` a skipped line is returned as an empty one, so that line numbers stay the same.
    """
    for number, line in enumerate(scan_lines(path), start=1):
        if isinstance(line, str):
            yield line
        else:
            report_bad_line(line, path, number, skip_bad)
            if blank_bad:
                yield ""


def count_input_lines(path: PathLike, *, skip_bad: bool = False) -> int | None:
    """Return the number of lines of a file, or None for a pipe, which can be read only once.

    Unless `skip_bad`, an invalid line raises InputError, so that it is reported before the work.
    """
    if os.fspath(path) == "-" or (os.path.exists(path) and not os.path.isfile(path)):
        return None
    return sum(1 for _ in read_lines(path, SkippedLines() if skip_bad else None, blank_bad=True))


def scan_lines(path: PathLike) -> Iterator[str | BadLine]:
    """Yield the lines of a file, with a BadLine for each line that cannot be used."""
    limit = max_line_bytes()
    blocks = _line_blocks(read_chunks(path), limit, path)
    return chain.from_iterable(_decode_block(block, limit) for block in blocks)


def max_line_bytes() -> int:
    """Return the maximum length of a line, which an environment variable can change."""
    value = os.environ.get(MAX_LINE_BYTES, "")
    if value and not (value.isascii() and value.isdigit() and int(value[:18]) > 0):
        problem = f"{MAX_LINE_BYTES} is {value}"
        raise InputError(problem, fix="set it to a number of bytes, such as 10000000")
    return int(value[:18] or DEFAULT_MAX_LINE_BYTES)


def describe_long_line(line: bytes, limit: int) -> BadLine:
    """Return what is wrong with a line of more than `limit` bytes; only its start is shown."""
    text = line[:SHOWN_BYTES].decode(errors="backslashreplace") + "…"
    fix = f"split the line, or set {MAX_LINE_BYTES} to a larger number"
    return BadLine(f"the line is longer than {limit:,} bytes", fix, text)


def report_bad_line(bad: BadLine, path: PathLike, number: int, skip_bad: SkipBad | None) -> None:
    """Pass a bad line to `skip_bad`, or raise an InputError that names the file and line."""
    if skip_bad is None:
        raise InputError(bad.reason, file=display_name(path), line=number, fix=bad.fix)
    skip_bad(number, bad.reason, bad.text)


def check_line_ends(only_line: bytes, path: PathLike) -> None:
    r"""Raise InputError if "\r" ends the lines of a file, which then seems to have only one."""
    if b"\r" in only_line[:-1]:
        raise InputError(BARE_CR, file=display_name(path), fix=BARE_CR_FIX)


def display_name(path: PathLike) -> str:
    """Return the name of a path in messages."""
    return "standard input" if os.fspath(path) == "-" else os.fspath(path)


def open_skip_list(path: Path | None, stack: ExitStack) -> SkippedLines | None:
    """Open a file that lists bad lines, or return None; it appears when the stack ends well."""
    return None if path is None else SkippedLines(stack.enter_context(write_atomically(path)))


def check_output_file(path: Path, inputs: Iterable[str]) -> None:
    """Raise InputError if a file cannot be written or is also an input."""
    _check_suffix(path)
    folder = path.parent if not path.is_symlink() else Path(os.path.realpath(path)).parent
    if not path.exists() or path.is_file():
        check_writable_folder(folder)
    if not folder.is_dir():
        problem = "the file cannot be created: its folder does not exist"
        raise InputError(problem, file=path, fix=f"mkdir -p {folder}")
    if path.is_dir():
        raise InputError("this is a directory", file=path, fix="pass the path of a file")
    for other in inputs:
        if path.exists() and os.path.exists(other) and os.path.samefile(path, other):
            problem = "the file is both input and output"
            raise InputError(problem, file=path, fix="choose another output")


def check_skip_list(
    path: Path | None, inputs: Iterable[PathLike], output: Path | None = None
) -> None:
    """Raise InputError if the list of bad lines would replace an input or the output."""
    if path is None:
        return
    check_output_file(path, [os.fspath(other) for other in inputs])
    if output is None or (output.exists() and not output.is_file()):
        return
    if os.path.realpath(path) == os.path.realpath(output):
        problem = "the file is both -o and --skip-bad"
        raise InputError(problem, file=output, fix="choose two files")


@overload
def write_atomically(
    path: PathLike, *, binary: Literal[False] = False
) -> AbstractContextManager[TextIO]: ...
@overload
def write_atomically(
    path: PathLike, *, binary: Literal[True]
) -> AbstractContextManager[BinaryIO]: ...
def write_atomically(
    path: PathLike, *, binary: bool = False
) -> AbstractContextManager[TextIO] | AbstractContextManager[BinaryIO]:
    """Open a stream that becomes the file when the block ends without an error.

    After an error nothing is left, and an older file is unchanged. The suffix decides the
    compression. Devices and pipes are written in place.
    """
    return _write_bytes(path) if binary else _write_text(path)


def check_writable_folder(folder: Path) -> None:
    """Raise InputError if a folder cannot be created or written to."""
    found = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not found.is_dir():
        raise InputError("this is not a folder", file=found, fix="choose another path")
    if not os.access(found, os.W_OK | os.X_OK):
        raise InputError("permission denied", file=found, fix="choose another folder")


def remove_unfinished() -> None:
    """Remove the files and folders that this process has not completed, before it ends."""
    for path in list(UNFINISHED):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _line_blocks(chunks: Iterator[bytes], limit: int, path: PathLike) -> Iterator[bytes]:
    """Yield blocks that end at line ends, so that each can be decoded on its own.

    Of a line that is longer than the limit, the rest is skipped.
    """
    pending, n_pending = [b""], 0
    is_first, is_skipped = True, False
    for chunk in chain([next(chunks, b"").removeprefix(BOM)], chunks):
        if is_skipped:
            _, newline, chunk = chunk.partition(b"\n")
            is_skipped = not newline
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            yield b"".join([*pending, head])
            pending, n_pending, is_first = [], 0, False
        if is_skipped:
            continue
        pending.append(tail)
        n_pending += len(tail)
        if n_pending > limit:
            long = b"".join(pending)[: limit + 1]
            if is_first:
                check_line_ends(long, path)
            yield long
            pending, n_pending, is_first, is_skipped = [], 0, False, True
    rest = b"".join(pending)
    if is_first:
        check_line_ends(rest, path)
    if rest:
        yield rest


def _decode_block(block: bytes, limit: int) -> list[str] | list[str | BadLine]:
    try:
        text = "\0" if _has_long_line(block, limit) else block.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        return [_decode_line(line, limit) for line in block.split(b"\n")]
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in lines] if "\r" in text else lines


def _has_long_line(block: bytes, limit: int) -> bool:
    """Return whether a line has more than `limit` bytes: at a multiple of it there is one."""
    for position in range(limit, len(block), limit):
        start, end = block.rfind(b"\n", 0, position) + 1, block.find(b"\n", position)
        if (len(block) if end < 0 else end) - start > limit:
            return True
    return False


def _decode_line(line: bytes, limit: int) -> str | BadLine:
    if len(line) > limit:
        return describe_long_line(line, limit)
    text = line.decode(errors="backslashreplace").removesuffix("\r")
    if b"\0" in line:
        return BadLine(NUL_BYTE, NUL_BYTE_FIX, text)
    try:
        return line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        return BadLine(f"invalid UTF-8 at byte {error.start + 1}", UTF8_FIX, text)


def read_chunks(path: PathLike) -> Iterator[bytes]:
    """Yield the bytes of a file, decompressed, in chunks."""
    try:
        with _open_bytes(path) as raw:
            compression = _detect_compression(raw, path)
            yield from _decompress(raw, compression)
    except (EOFError, MemoryError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"damaged or truncated {compression} data: {error}"
        raise InputError(
            problem, file=display_name(path), fix="fetch or compress it again"
        ) from error
    except OSError as error:
        raise explain_os_error(error, display_name(path)) from error


def _open_bytes(path: PathLike) -> AbstractContextManager[io.BufferedReader]:
    if os.fspath(path) == "-":
        return nullcontext(cast(io.BufferedReader, sys.stdin.buffer))
    return open(path, "rb")


def _check_suffix(path: PathLike) -> None:
    suffix = Path(path).suffix
    if suffix.lower() in UNSUPPORTED or (
        suffix not in MAGIC_BYTES and suffix.lower() in MAGIC_BYTES
    ):
        fix = f"use {', '.join(MAGIC_BYTES)} or plain text"
        raise InputError(f"{suffix} files are not supported", file=display_name(path), fix=fix)


def _detect_compression(raw: io.BufferedReader, path: PathLike) -> str:
    """Return the compression by the suffix or, for standard input, by the first bytes."""
    _check_suffix(path)
    start = raw.peek(max(map(len, MAGIC_BYTES.values())))
    if os.fspath(path) == "-":
        return next(
            (suffix for suffix, magic in MAGIC_BYTES.items() if start.startswith(magic)), ""
        )
    suffix = Path(path).suffix
    for other, magic in MAGIC_BYTES.items() if suffix not in MAGIC_BYTES else ():
        if start.startswith(magic):
            problem, fix = f"the content is {other} data", f"rename the file to end in {other}"
            raise InputError(problem, file=display_name(path), fix=fix)
    if not start.startswith(MAGIC_BYTES.get(suffix, b"")):
        problem = f"the content is not {suffix} data"
        raise InputError(problem, file=display_name(path), fix="rename or compress the file")
    return suffix if suffix in MAGIC_BYTES else ""


def _decompress(raw: io.BufferedReader, compression: str) -> Iterator[bytes]:
    if compression == ".zst":
        yield from _decompress_zstd(raw)
        return
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(compression, nullcontext)(raw) as stream:
        yield from iter(partial(stream.read, CHUNK_BYTES), b"")


def _decompress_zstd(raw: io.BufferedReader) -> Iterator[bytes]:
    """Decompress frame by frame; zstandard's own reader accepts a truncated file as complete."""
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        while compressed := frame.unused_data or raw.read(ZSTD_CHUNK_BYTES):
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            data = frame.decompress(compressed)
            yield from (data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES))
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    if not frame.eof:
        raise EOFError("the last frame is incomplete")


@contextmanager
def _write_text(path: PathLike) -> Iterator[TextIO]:
    with _write_bytes(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
        try:
            yield text
        finally:
            text.detach()  # flushes the text and leaves the stream open


@contextmanager
def _write_bytes(path: PathLike) -> Iterator[BinaryIO]:
    try:
        with _destination(path) as raw, _compress(raw, Path(path).suffix) as stream:
            yield stream
    except OSError as error:
        if error.errno in DISK_FULL:
            is_stdout = os.fspath(path) == "-"
            raise explain_os_error(error, "standard output" if is_stdout else path) from error
        raise  # an error of the caller, such as an input that cannot be read


def _destination(path: PathLike) -> AbstractContextManager[BinaryIO]:
    if os.fspath(path) in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        return _standard_output()  # in place, even if it is a file
    _check_suffix(path)
    is_special = os.path.exists(path) and not os.path.isfile(path)
    target = Path(os.path.realpath(path))
    try:
        if is_special:
            return open(path, "wb")
        return _rename_at_end(create_draft(target.parent), target)
    except OSError as error:
        raise explain_os_error(error, display_name(path)) from error


@contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


@contextmanager
def _rename_at_end(draft: BinaryIO, target: Path) -> Iterator[BinaryIO]:
    UNFINISHED.add(Path(draft.name))
    try:
        with draft:
            yield draft
            draft.flush()
            os.fsync(draft.fileno())
            os.replace(draft.name, target)  # while it is locked: else it looks like a leftover
        sync_path(target.parent)
    except BaseException:
        Path(draft.name).unlink(missing_ok=True)
        raise
    finally:
        UNFINISHED.discard(Path(draft.name))


def _compress(raw: BinaryIO, suffix: str) -> AbstractContextManager[BinaryIO]:
    if suffix == ".gz":  # no name and no time: equal text gives equal bytes
        return cast(
            AbstractContextManager[BinaryIO], gzip.GzipFile("", "wb", 6, fileobj=raw, mtime=0)
        )
    if suffix == ".xz":
        return cast(AbstractContextManager[BinaryIO], lzma.open(raw, "wb"))
    if suffix == ".zst":
        import zstandard

        compressor = zstandard.ZstdCompressor(write_checksum=True)
        return cast(AbstractContextManager[BinaryIO], compressor.stream_writer(raw, closefd=False))
    return nullcontext(raw)
