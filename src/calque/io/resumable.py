"""Crash-safe output files that are written block by block and can be resumed byte for byte.

Unfinished work for FILE is kept in the folder `FILE.partial`:

    settings.json     settings of the run; a resumed run must have the same
    part-N            output of process N, block after block
    part-N.journal    one line per finished block: [number, end, digest of the input, counts ...]

A block counts as finished when its line is in the journal. The line is written after the block
itself has reached the disk, and whatever a crash leaves behind the last line is cut off. When all
blocks are finished, the parts are merged in the order of the input and replace FILE in one step.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, TypeAlias

from calque.errors import InputError
from calque.io.files import DISK_FULL, check_output_file, sync_path, write_atomically
from calque.io.shards import Shard

RunSettings: TypeAlias = Mapping[str, str | int | float | bool | None]
Counts: TypeAlias = tuple[int, ...]

SETTINGS = "settings.json"
INPUT_SIZE = "input_size"  # the setting that is None if the input cannot be read twice
OWN_FILES = re.compile(r"part-\d+(?:\.journal)?|whole|settings\.json|\.calque-\w+\.partial")
COPY_BYTES = 1 << 20
REMOVE = "or remove this folder to start again"


class BlockSink(Protocol):
    """Destination of output blocks, each computed from one block of the input.

    `counts` are integers that are summed over all blocks, such as the numbers of pairs and links.
    """

    counts_before: Counts

    def begin_block(self, content: bytes) -> bool:
        """Register the next block of the input; return whether its output is still needed."""
        ...

    def append(self, content: bytes, counts: Counts) -> None:
        """Write the output of the block that was registered last."""
        ...

    def finish(self, empty: bytes = b"") -> Counts:
        """Complete the output and return the sums of all counts."""
        ...


def open_sink(
    path: Path | None, settings: RunSettings, *, resume: bool = False, shard: Shard | None = None
) -> AbstractContextManager[BlockSink]:
    """Open standard output (path None), a device or pipe, or a file that can be resumed."""
    if path is not None and (path.is_file() or not path.exists()):
        return ResumableFile(path, settings, resume=resume, shard=shard)
    return _open_stream(path)


@contextmanager
def _open_stream(path: Path | None) -> Iterator[StreamSink]:
    if path is None:
        sys.stdout.flush()
        yield StreamSink(sys.stdout.buffer)
        return
    with open(path, "wb") as stream:
        yield StreamSink(stream)


def check_resumable_output(path: Path, inputs: Iterable[str], *, resume: bool) -> None:
    """Raise InputError if an output file cannot be written, before the work starts."""
    check_output_file(path, inputs)
    check_no_unfinished_run(path, resume)


def compress_block(content: bytes, suffix: str) -> bytes:
    """Compress a block on its own: .gz, .xz and .zst files may consist of many such members.

    So a file is the same whether it was written in one run or in several.
    """
    if suffix == ".gz":
        return gzip.compress(content, 6, mtime=0)
    if suffix == ".xz":
        return lzma.compress(content)
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return content


class StreamSink:
    """Write blocks to a stream such as standard output, or count them only if there is none."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self.stream = stream
        self.counts: Counts = ()
        self.counts_before: Counts = ()

    def begin_block(self, content: bytes) -> bool:
        """Return True: every block is needed."""
        return True

    def append(self, content: bytes, counts: Counts) -> None:
        """Write a block and flush it, so that a reader at the other end gets it at once."""
        before = self.counts or (0,) * len(counts)
        self.counts = tuple(map(sum, zip(before, counts, strict=True)))
        if self.stream is not None:
            self.stream.write(content)
            self.stream.flush()

    def finish(self, empty: bytes = b"") -> Counts:
        """Return the sums of all counts."""
        return self.counts


class ResumableFile:
    """A file that is written block by block by one or more processes and can be resumed.

    `begin_block` must be called with the content of every input block in turn: a digest of the
    input read so far detects that a resumed run has another input. `counts_before` are the sums
    of the blocks that earlier runs finished.
    """

    def __init__(
        self,
        target: Path,
        settings: RunSettings,
        *,
        resume: bool = False,
        shard: Shard | None = None,
    ) -> None:
        self.target, self.shard = Path(os.path.realpath(target)), shard or Shard()
        self.folder = partial_folder(target)
        self.settings = {**settings, "processes": self.shard.n_ranks}
        self.parts = [self.folder / f"part-{rank}" for rank in range(self.shard.n_ranks)]
        self.n_blocks, self.digest = 0, b""
        self.counts_before: Counts = ()
        self.is_resumed = self.must_keep = False
        part = self.shard.run_on_main(lambda: self._open_folder(resume))
        self.part = part or JournaledFile(self.parts[self.shard.rank])

    def __enter__(self) -> ResumableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.part.close()
        if error is not None and self.shard.is_main and not self._is_worth_keeping(error):
            shutil.rmtree(self.folder)

    def begin_block(self, content: bytes) -> bool:
        """Register the next block of the input; return whether this process must compute it."""
        number, self.n_blocks = self.n_blocks, self.n_blocks + 1
        self.digest = hashlib.blake2b(self.digest + content, digest_size=16).digest()
        last = self.part.last
        if last is not None and number == last.block and self.digest.hex() != last.digest:
            raise self._input_changed()
        return self.shard.owns(number) and (last is None or number > last.block)

    def append(self, content: bytes, counts: Counts) -> None:
        """Write the output of the block that was registered last."""
        try:
            self.part.append(self.n_blocks - 1, content, self.digest.hex(), counts)
        except OSError as error:
            self.must_keep = True
            if error.errno not in DISK_FULL:
                raise
            problem, fix = "no space left on the device", "free some space, then use --resume"
            raise InputError(problem, file=self.target, fix=fix) from error

    def finish(self, empty: bytes = b"") -> Counts:
        """Merge the blocks of all processes into the file and return the sums of their counts.

        `empty` is the content of a file without blocks. Only the main process gets the counts.
        """
        if self.part.last is not None and self.part.last.block >= self.n_blocks:
            raise self._input_changed()
        self.shard.all_succeeded()
        if not self.shard.is_main:
            return ()
        self.must_keep = True
        whole = self.folder / "whole"
        _merge_parts(self.parts, whole)
        if whole.stat().st_size == 0:
            whole.write_bytes(empty)
        counts = _sum_counts(self.parts)
        os.replace(whole, self.target)
        sync_path(self.target.parent)
        # Without the settings the rest cannot be resumed, and a later run may remove it.
        (self.folder / SETTINGS).unlink()
        shutil.rmtree(self.folder)
        return counts

    def _open_folder(self, resume: bool) -> JournaledFile:
        """Create the folder, or reuse that of an unfinished run, and open the first part."""
        check_no_unfinished_run(self.target, resume)
        try:
            self.folder.mkdir(exist_ok=True)
            part = JournaledFile(self.parts[0])
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise InputError(problem, file=self.folder, fix="choose another output") from error
        try:
            found = read_run_settings(self.folder)
            if found is not None:
                self.is_resumed = True
                check_same_settings(found, self.settings, self.folder)
                self.counts_before = _sum_counts(self.parts)
                return part
            part.clear()
            for path in set(self.folder.iterdir()) - {part.path, journal_path(part.path)}:
                path.unlink()
            with write_atomically(self.folder / SETTINGS) as stream:
                json.dump(self.settings, stream)
        except BaseException:
            part.close()
            raise
        return part

    def _is_worth_keeping(self, error: BaseException) -> bool:
        if self.must_keep or self.is_resumed:
            return True
        has_blocks = self.shard.n_ranks > 1 or self.part.last is not None
        can_resume = self.settings[INPUT_SIZE] is not None
        return has_blocks and can_resume and not isinstance(error, InputError)

    def _input_changed(self) -> InputError:
        problem = "the input has changed since this run started"
        return InputError(problem, file=self.folder, fix=f"use the same input, {REMOVE}")


def partial_folder(target: Path) -> Path:
    """Return the folder that keeps the unfinished work for a file."""
    path = Path(os.path.realpath(target))
    return path.with_name(path.name + ".partial")


def check_no_unfinished_run(target: Path, resume: bool) -> None:
    """Raise InputError if `target` has an unfinished run and `resume` is false."""
    folder = partial_folder(target)
    check_own_files(folder, OWN_FILES)
    if not resume and read_run_settings(folder) is not None:
        raise unfinished_run_error(folder)


def check_own_files(folder: Path, own_files: re.Pattern[str]) -> None:
    """Raise InputError if a folder for unfinished work exists and holds anything else."""
    if folder.exists() and not (
        folder.is_dir() and all(map(own_files.fullmatch, os.listdir(folder)))
    ):
        problem = "this path is needed for unfinished work, but it holds something else"
        raise InputError(problem, file=folder, fix="move it, or choose another output")


def unfinished_run_error(folder: Path) -> InputError:
    """Return the error for a new run whose output has an unfinished one."""
    problem = "this folder holds an unfinished run"
    return InputError(problem, file=folder, fix=f"continue it with --resume, {REMOVE}")


def read_run_settings(folder: Path) -> RunSettings | None:
    """Return the settings of an unfinished run that can be resumed, or None."""
    try:
        found: RunSettings = json.loads((folder / SETTINGS).read_text("utf-8"))
        return None if found[INPUT_SIZE] is None else found
    except (OSError, ValueError, LookupError, TypeError):
        return None


def check_same_settings(old: RunSettings, new: RunSettings, folder: Path) -> None:
    """Raise InputError if a resumed run has other settings than the run it resumes."""
    for name in {**old, **new}:
        before, now = old.get(name), new.get(name)
        if before != now:
            problem = f"this run started with {name} {_show(before)}, not {_show(now)}"
            raise InputError(problem, file=folder, fix=f"use the same input and options, {REMOVE}")


def _show(value: object) -> str:
    if value is None:
        return "unset"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _merge_parts(parts: Sequence[Path], whole: Path) -> None:
    """Write the blocks of all processes one after another, in the order of the input."""
    whole.unlink(missing_ok=True)
    if len(parts) == 1:
        with suppress(OSError):  # a file system without hard links: copy
            os.link(parts[0], whole)
            return
    records = [read_records(part) for part in parts]
    with ExitStack() as stack:
        streams = [stack.enter_context(open(part, "rb")) for part in parts]
        output = stack.enter_context(open(whole, "wb"))
        for block in count():
            rank = block % len(parts)
            record = next(records[rank], None)
            if record is None:
                break
            _copy(streams[rank], output, record.end)
        _sync(output)


def _copy(stream: BinaryIO, output: BinaryIO, end: int) -> None:
    while n_left := end - stream.tell():
        content = stream.read(min(n_left, COPY_BYTES))
        if not content:
            problem = "the file is shorter than its journal says"
            raise InputError(problem, file=stream.name, fix="remove its folder to start again")
        output.write(content)


def _sum_counts(parts: Sequence[Path]) -> Counts:
    counts = [record.counts for part in parts for record in read_records(part)]
    return tuple(map(sum, zip(*counts, strict=True)))


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A line of the journal: a finished block, its end, and the digest of the input so far."""

    block: int
    end: int
    digest: str
    counts: Counts

    def to_line(self) -> bytes:
        """Return the line of the journal."""
        return json.dumps([self.block, self.end, self.digest, *self.counts]).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> BlockRecord:
        """Parse a line of the journal; raise ValueError if it is incomplete."""
        block, end, digest, *counts = json.loads(line)
        if not line.endswith(b"\n"):
            raise ValueError("the line has no end")
        return cls(block, end, digest, tuple(counts))


class JournaledFile:
    """A file of blocks with the journal `NAME.journal` beside it, locked by one process.

    `last` is the newest finished block.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: BinaryIO = open(path, "ab")  # noqa: SIM115
        lock_file(self.data, path)
        self.journal: BinaryIO = open(journal_path(path), "ab")  # noqa: SIM115
        self.last: BlockRecord | None = None
        self._recover()

    def append(self, block: int, content: bytes, digest: str, counts: Counts) -> None:
        """Write a block, wait until it has reached the disk, and record it in the journal."""
        self.data.write(content)
        _sync(self.data)
        record = BlockRecord(block, self.data.tell(), digest, counts)
        self.journal.write(record.to_line())
        self.last = record  # set before the sync, which Ctrl-C may interrupt: the line is written
        _sync(self.journal)

    def clear(self) -> None:
        """Remove all blocks."""
        for stream in (self.data, self.journal):
            stream.truncate(0)
        self.last = None

    def close(self) -> None:
        """Close both files and release the lock."""
        self.data.close()
        self.journal.close()

    def _recover(self) -> None:
        """Cut off blocks that are not in the journal, and records of blocks not in the file."""
        n_bytes, n_journal = os.fstat(self.data.fileno()).st_size, 0
        for record in read_records(self.path):
            if record.end > n_bytes:
                break
            self.last, n_journal = record, n_journal + len(record.to_line())
        self.data.truncate(0 if self.last is None else self.last.end)
        self.journal.truncate(n_journal)
        for stream in (self.data, self.journal):
            stream.seek(0, os.SEEK_END)


def journal_path(path: Path) -> Path:
    """Return the path of a file's journal."""
    return path.with_name(path.name + ".journal")


def read_records(path: Path) -> Iterator[BlockRecord]:
    """Read the journal of a file, up to the first incomplete line."""
    if not journal_path(path).exists():
        return
    with open(journal_path(path), "rb") as lines:
        for line in lines:
            try:
                yield BlockRecord.from_line(line)
            except (ValueError, TypeError):
                return


def lock_file(stream: BinaryIO, path: Path) -> None:
    """Lock an open file; raise InputError, naming `path`, if another process has locked it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        problem = "another process is writing here"
        raise InputError(problem, file=path, fix="wait until it ends, or stop it") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise  # the others mean a file system without locks


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
