r"""Text files in and out: plain, .gz, .xz and .zst, streamed, written whole or not at all.

A line ends at "\n" and nowhere else (U+2028 and its like are text); one "\r" before it goes.
The path "-" means standard input, packed or not, and standard output.
"""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, TypeAlias, cast, overload

from calque.errors import InputError

PathLike: TypeAlias = str | os.PathLike[str]
SkipBad: TypeAlias = Callable[[int, str, str], None]  # line number, reason, text

CHUNK_BYTES = 1 << 20
ZSTD_CHUNK_BYTES = 1 << 10  # one byte may unpack to 32 KiB
BOM = b"\xef\xbb\xbf"
MAGIC_BYTES = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd"}
# Ways to pack that are neither read nor written: plain text under such a name would mislead.
FOREIGN = frozenset({".bz2", ".lzma", ".lz4", ".7z", ".zip", ".tar", ".tgz"})
PARTIAL_NAME = ".calque-*.partial"  # what a file is called until it is whole
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FIXES = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "name a file, not a folder",
    errno.EACCES: "check the permissions",
    **dict.fromkeys(DISK_FULL, "free some space or write elsewhere"),
}


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be used: why, how to mend it, and what stood there."""

    reason: str
    fix: str
    text: str


class SkippedLines:
    """Count bad lines and, given a stream, list them there: number, reason, text."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream, self.n_lines = stream, 0

    def __call__(self, number: int, reason: str, text: str) -> None:
        """Note one bad line."""
        self.n_lines += 1
        if self.stream is not None:
            self.stream.write(f"{number}\t{reason}\t{text}\n")

    def of(self, path: PathLike) -> SkipBad:
        """Give what notes the bad lines of one file of several: its name before the reason."""
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
    """Read the lines of a file, with the undecodable ones in their places."""
    return chain.from_iterable(map(_decode_block, _line_blocks(read_chunks(path))))


def report_bad_line(bad: BadLine, path: PathLike, number: int, skip_bad: SkipBad | None) -> None:
    """Hand a bad line to `skip_bad`, or raise the error that names it."""
    if skip_bad is None:
        raise InputError(bad.reason, file=display_name(path), line=number, fix=bad.fix)
    skip_bad(number, bad.reason, bad.text)


def display_name(path: PathLike) -> str:
    """Give the name a path has in messages."""
    return "standard input" if os.fspath(path) == "-" else os.fspath(path)


def open_skip_list(path: Path | None, stack: ExitStack) -> SkippedLines | None:
    """Open a list of bad lines, if one is wanted; it is there when the stack ends well."""
    return None if path is None else SkippedLines(stack.enter_context(write_atomically(path)))


def check_output_file(path: Path, inputs: Iterable[str]) -> None:
    """Refuse a file that cannot be written, or that is also read."""
    _refuse_foreign(path, "written")
    if not path.parent.is_dir():
        raise InputError("its folder does not exist", file=path, fix=f"mkdir -p {path.parent}")
    if path.is_dir():
        raise InputError("a folder", file=path, fix="name a file")
    for other in inputs:
        if path.exists() and os.path.exists(other) and os.path.samefile(path, other):
            raise InputError("both read and written", file=path, fix="write to another file")


def check_skip_list(
    path: Path | None, inputs: Iterable[PathLike], output: Path | None = None
) -> None:
    """Refuse a list of bad lines that would take the place of what is read or written."""
    if path is None:
        return
    check_output_file(path, [os.fspath(other) for other in inputs])
    if output is None or (output.exists() and not output.is_file()):
        return
    if os.path.realpath(path) == os.path.realpath(output):
        raise InputError("both -o and --skip-bad", file=output, fix="name two files")


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
    """Open a stream that becomes the file when the block ends well, and leaves no trace if not.

    The suffix decides the compression. Devices and pipes are written in place.
    """
    return _write_bytes(path) if binary else _write_text(path)


def check_writable_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written into, before the work for it is done."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise InputError("is not a folder", file=there, fix="give another name")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError("permission denied", file=there, fix="write elsewhere")


def remove_partial_files(folder: Path) -> None:
    """Remove what a killed process left half-written in a folder that only one writes to."""
    for leftover in folder.glob(PARTIAL_NAME):
        leftover.unlink()


def sync_path(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _line_blocks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Cut chunks anew after line ends, so that each block decodes on its own."""
    pending = [next(chunks, b"").removeprefix(BOM)]
    for chunk in chain([pending.pop()], chunks):
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            yield b"".join([*pending, head])
            pending = []
        pending.append(tail)
    if rest := b"".join(pending):
        yield rest


def _decode_block(block: bytes) -> list[str] | list[str | BadLine]:
    try:
        text = block.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        return [_decode_line(line) for line in block.split(b"\n")]
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in lines] if "\r" in text else lines


def _decode_line(line: bytes) -> str | BadLine:
    text = line.decode(errors="backslashreplace").removesuffix("\r")
    if b"\0" in line:
        return BadLine("NUL byte", "remove it, or convert the file from UTF-16 to UTF-8", text)
    try:
        return line.decode().removesuffix("\r")
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8 at byte {error.start + 1}"
        return BadLine(reason, "convert the file to UTF-8, for example with iconv", text)


def read_chunks(path: PathLike) -> Iterator[bytes]:
    """Give the bytes of a file, unpacked, in blocks as they are read."""
    try:
        with _open_bytes(path) as raw:
            packing = _recognize_packing(raw, path)
            yield from _unpack(raw, packing)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        problem = f"damaged or truncated {packing} data: {error}"
        raise InputError(
            problem, file=display_name(path), fix="fetch or compress it again"
        ) from error
    except OSError as error:
        raise _explain(error, path) from error


def _open_bytes(path: PathLike) -> AbstractContextManager[io.BufferedReader]:
    if os.fspath(path) == "-":
        return nullcontext(cast(io.BufferedReader, sys.stdin.buffer))
    return open(path, "rb")


def _refuse_foreign(path: PathLike, verb: str) -> None:
    suffix = Path(path).suffix
    if suffix.lower() in FOREIGN or (suffix not in MAGIC_BYTES and suffix.lower() in MAGIC_BYTES):
        fix = f"use {', '.join(MAGIC_BYTES)} or plain text"
        raise InputError(f"{suffix} is not {verb}", file=display_name(path), fix=fix)


def _recognize_packing(raw: io.BufferedReader, path: PathLike) -> str:
    """Tell the compression by the suffix, or for standard input by the first bytes."""
    _refuse_foreign(path, "read")
    start = raw.peek(max(map(len, MAGIC_BYTES.values())))
    if os.fspath(path) == "-":
        return next(
            (suffix for suffix, magic in MAGIC_BYTES.items() if start.startswith(magic)), ""
        )
    suffix = Path(path).suffix
    if not start.startswith(MAGIC_BYTES.get(suffix, b"")):
        fix = "rename the file after what it holds, or compress it"
        raise InputError(f"holds no {suffix} data", file=display_name(path), fix=fix)
    return suffix if suffix in MAGIC_BYTES else ""


def _unpack(raw: io.BufferedReader, packing: str) -> Iterator[bytes]:
    if packing == ".zst":
        yield from _unpack_zstd(raw)
        return
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(packing, nullcontext)(raw) as stream:
        yield from iter(partial(stream.read, CHUNK_BYTES), b"")


def _unpack_zstd(raw: io.BufferedReader) -> Iterator[bytes]:
    """Unpack frame after frame; zstandard's own reader takes a truncated file for a whole one."""
    import zstandard

    frame = zstandard.ZstdDecompressor().decompressobj()
    try:
        while packed := frame.unused_data or raw.read(ZSTD_CHUNK_BYTES):
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            data = frame.decompress(packed)
            yield from (data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES))
    except zstandard.ZstdError as error:
        raise EOFError(str(error)) from error
    if not frame.eof:
        raise EOFError("the last frame has no end")


@contextmanager
def _write_text(path: PathLike) -> Iterator[TextIO]:
    with _write_bytes(path) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
        try:
            yield text
        finally:
            text.detach()  # flushes, and leaves the stream open for its owner


@contextmanager
def _write_bytes(path: PathLike) -> Iterator[BinaryIO]:
    try:
        with _destination(path) as raw, _pack(raw, Path(path).suffix) as stream:
            yield stream
    except OSError as error:
        if error.errno in DISK_FULL:
            is_stdout = os.fspath(path) == "-"
            raise _explain(error, "standard output" if is_stdout else path) from error
        raise  # the caller's own: a file it could not read, a closed pipe


def _destination(path: PathLike) -> AbstractContextManager[BinaryIO]:
    if os.fspath(path) == "-":
        return _standard_output()
    _refuse_foreign(path, "written")
    is_special = os.path.exists(path) and not os.path.isfile(path)
    target = Path(os.path.realpath(path))
    beside = target.with_name(PARTIAL_NAME.replace("*", secrets.token_hex(4)))
    try:
        return open(path, "wb") if is_special else _take_place(open(beside, "xb"), target)
    except OSError as error:
        raise _explain(error, path) from error


@contextmanager
def _standard_output() -> Iterator[BinaryIO]:
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


@contextmanager
def _take_place(raw: io.BufferedWriter, target: Path) -> Iterator[BinaryIO]:
    try:
        with raw:
            yield raw
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(raw.name, target)
        sync_path(target.parent)
    except BaseException:
        Path(raw.name).unlink(missing_ok=True)
        raise


def _pack(raw: BinaryIO, suffix: str) -> AbstractContextManager[BinaryIO]:
    if suffix == ".gz":  # without a name and a time, equal text gives equal bytes
        return cast(
            AbstractContextManager[BinaryIO], gzip.GzipFile("", "wb", 6, fileobj=raw, mtime=0)
        )
    if suffix == ".xz":
        return cast(AbstractContextManager[BinaryIO], lzma.open(raw, "wb"))
    if suffix == ".zst":
        import zstandard

        packer = zstandard.ZstdCompressor(write_checksum=True)
        return cast(AbstractContextManager[BinaryIO], packer.stream_writer(raw, closefd=False))
    return nullcontext(raw)


def _explain(error: OSError, path: PathLike) -> InputError:
    """Turn the system's error into one that names the file and the fix."""
    fix = FIXES.get(error.errno or 0)
    return InputError((error.strerror or str(error)).lower(), file=display_name(path), fix=fix)
