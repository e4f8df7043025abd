"""Crash-safe output files that are written block by block and can be resumed byte for byte.

Unfinished work for FILE is kept in the folder `FILE.partial`:

    settings.json     settings of the run; a resumed run must have the same
    part-N            output of process N, block after block
    part-N.journal    one line per finished block: [number, end, digests, counts ...] digest

A block counts as finished when its line is in the journal. The line is written after the block
itself has reached the disk, and whatever a crash leaves behind the last line is cut off. When all
blocks are finished, the parts are merged in the order of the input and replace FILE in one step.

A line has the digests of all input up to this block, of the block itself, and of all lines up to
this one. They are verified when a run is resumed and when the parts are merged. The first damaged
block and all that follow it are computed again.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, TypeAlias

from calque.errors import DISK_FULL, InputError, explain_os_error, printable
from calque.io.files import check_output_file, sync_path, write_atomically
from calque.io.locks import lock_output
from calque.io.shards import Shard
from calque.io.structured import read_json

RunSettings: TypeAlias = Mapping[str, str | int | float | bool | None]
Counts: TypeAlias = tuple[int, ...]

SETTINGS = "settings.json"
INPUT_SIZE = "input_size"  # the setting that is None if the input cannot be read twice
OWN_FILES = re.compile(r"part-\d+(?:\.journal)?|whole|settings\.json|\.calque-\w+\.partial")
COPY_BYTES = 1 << 20
DIGEST_BYTES = 16
REMOVE = "or remove this folder to start again"


class ResumeWarning(UserWarning):
    """A part of the unfinished work is damaged and is computed again."""


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
        self._stack = ExitStack()
        part = self.shard.run_on_main(lambda: self._open_folder(resume))
        self.part = part or JournaledFile(self.parts[self.shard.rank])

    def __enter__(self) -> ResumableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.part.close()
        with self._stack:  # unlocks the output
            if error is None or not self.shard.is_main:
                return
            if not self._is_worth_keeping(error):
                shutil.rmtree(self.folder)
            elif isinstance(error, KeyboardInterrupt):
                add_resume_note(error, self.folder)

    def begin_block(self, content: bytes) -> bool:
        """Register the next block of the input; return whether this process must compute it."""
        number, self.n_blocks = self.n_blocks, self.n_blocks + 1
        self.digest = _digest(self.digest + content)
        last = self.part.last
        if last is not None and number == last.block and self.digest.hex() != last.input_digest:
            raise self._input_changed()
        return self.shard.owns(number) and (last is None or number > last.block)

    def append(self, content: bytes, counts: Counts) -> None:
        """Write the output of the block that was registered last."""
        with self._explain_full_disk():
            self.part.append(self.n_blocks - 1, content, self.digest.hex(), counts)

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
        with self._explain_full_disk():
            counts = _merge_parts(self.parts, whole, self.n_blocks)
            if whole.stat().st_size == 0:
                whole.write_bytes(empty)
            os.replace(whole, self.target)
            sync_path(self.target.parent)
        # Without the settings the rest cannot be resumed, and a later run may remove it.
        (self.folder / SETTINGS).unlink()
        shutil.rmtree(self.folder)
        return counts

    def _open_folder(self, resume: bool) -> JournaledFile:
        """Create the folder, or reuse that of an unfinished run, and open the first part."""
        with ExitStack() as stack:
            stack.enter_context(lock_output(self.folder))
            found = self._read_settings(resume)
            try:
                self.folder.mkdir(exist_ok=True)
                if found is None:
                    for path in self.folder.iterdir():
                        path.unlink()
                    with write_atomically(self.folder / SETTINGS) as stream:
                        json.dump(self.settings, stream)
                part = stack.enter_context(JournaledFile(self.parts[0]))
            except OSError as error:
                raise explain_os_error(error, self.folder) from error
            self.counts_before = _sum_counts(self.parts)
            self._stack = stack.pop_all()
            return part

    def _read_settings(self, resume: bool) -> RunSettings | None:
        """Return the settings of a run to resume, which must be the same, or None."""
        check_own_files(self.folder, OWN_FILES)
        found = read_run_settings(self.folder)
        if found is not None:
            if not resume:
                raise unfinished_run_error(self.folder)
            check_same_settings(found, self.settings, self.folder)
            self.is_resumed = True
        elif resume and (self.folder / SETTINGS).exists():
            warn_of_damage(self.folder, "the run cannot be resumed and starts again")
        return found

    @contextmanager
    def _explain_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.must_keep = True
            if error.errno not in DISK_FULL:
                raise
            problem, fix = "no space left on the device", "free some space, then use --resume"
            raise InputError(problem, file=self.target, fix=fix) from error

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
        with lock_output(folder):  # raises an error if the run is not interrupted
            raise unfinished_run_error(folder)


def check_own_files(folder: Path, own_files: re.Pattern[str]) -> None:
    """Raise InputError if a path for unfinished work holds anything else."""
    problem = None
    if folder.is_symlink():
        problem = "this path is needed for unfinished work, but it is a symbolic link"
    elif folder.exists() and not (
        folder.is_dir() and all(map(own_files.fullmatch, os.listdir(folder)))
    ):
        problem = "this path is needed for unfinished work, but it holds something else"
    if problem is not None:
        raise InputError(problem, file=folder, fix="move it, or choose another output")


def add_resume_note(error: BaseException, folder: Path) -> None:
    """Add to an interruption where the finished work is, for the last line that users see."""
    if not getattr(error, "__notes__", ()):
        error.add_note(f"the finished work is kept in {folder}: continue with --resume")


def warn_of_damage(place: object, problem: str) -> None:
    """Warn that a part of the unfinished work is computed again."""
    warnings.warn(f"{printable(place)}: {problem}", ResumeWarning, stacklevel=3)


def unfinished_run_error(folder: Path) -> InputError:
    """Return the error for a new run whose output has an unfinished one."""
    problem = "this folder holds an unfinished run"
    return InputError(problem, file=folder, fix=f"continue it with --resume, {REMOVE}")


def read_run_settings(folder: Path) -> RunSettings | None:
    """Return the settings of an unfinished run that can be resumed, or None."""
    try:
        found = read_json(folder / SETTINGS, dict)
    except InputError:
        return None
    return None if found.get(INPUT_SIZE) is None else found


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


def _merge_parts(parts: Sequence[Path], whole: Path, n_blocks: int) -> Counts:
    """Write the blocks of all processes in the order of the input; return the sums of counts.

    The blocks of a single process are one file already.
    """
    whole.unlink(missing_ok=True)
    fix = "use --resume to compute again what is damaged"
    records = [(record for record, _ in read_records(part)) for part in parts]
    found = []
    with ExitStack() as stack:
        streams = [stack.enter_context(open(part, "rb")) for part in parts]
        is_linked = len(parts) == 1 and _link(parts[0], whole)
        output = None if is_linked else stack.enter_context(open(whole, "wb"))
        for block in range(n_blocks):
            stream, record = streams[block % len(parts)], next(records[block % len(parts)], None)
            if record is None or not _copy_block(stream, record, output):
                problem = f"block {block + 1} is damaged"
                raise InputError(problem, file=stream.name, fix=fix)
            found.append(record.counts)
        if output is not None:
            _sync(output)
        elif streams[0].read(1):
            raise InputError("the file is longer than its journal says", file=parts[0], fix=fix)
    return tuple(map(sum, zip(*found, strict=True)))


def _link(path: Path, other: Path) -> bool:
    with suppress(OSError):  # a file system without hard links
        os.link(path, other)
        return True
    return False


def _copy_block(stream: BinaryIO, record: BlockRecord, output: BinaryIO | None = None) -> bool:
    """Copy a block, or read it if there is no output; return whether its digest is right."""
    digest, n_left = hashlib.blake2b(digest_size=DIGEST_BYTES), record.end - stream.tell()
    while n_left > 0 and (content := stream.read(min(n_left, COPY_BYTES))):
        n_left -= len(content)
        digest.update(content)
        if output is not None:
            output.write(content)
    return n_left == 0 and digest.hexdigest() == record.output_digest


def _sum_counts(parts: Sequence[Path]) -> Counts:
    counts = [record.counts for part in parts for record, _ in read_records(part)]
    return tuple(map(sum, zip(*counts, strict=True)))


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A line of the journal: a finished block, its end, digests and counts."""

    block: int
    end: int
    input_digest: str
    output_digest: str
    counts: Counts

    def to_line(self, before: bytes) -> bytes:
        """Return the line of the journal; `before` is the line before it, or empty."""
        fields = [self.block, self.end, self.input_digest, self.output_digest, *self.counts]
        return _seal(json.dumps(fields).encode(), before)

    @classmethod
    def from_line(cls, line: bytes, before: bytes) -> BlockRecord | None:
        """Parse a line of the journal; return None if it is incomplete or damaged."""
        content = line.rpartition(b" ")[0]
        if line != _seal(content, before):
            return None
        block, end, input_digest, output_digest, *counts = json.loads(content)
        return cls(block, end, input_digest, output_digest, tuple(counts))


def _seal(content: bytes, before: bytes) -> bytes:
    """Return a line that ends with the digest of its content and the digest before it."""
    return b"%s %s\n" % (content, _digest(before[-2 * DIGEST_BYTES - 1 :] + content).hex().encode())


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class JournaledFile:
    """A file of blocks with the journal `NAME.journal` beside it.

    `last` is the newest finished block.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: BlockRecord | None = None
        self.last_line = b""
        with ExitStack() as stack:
            self.data: BinaryIO = stack.enter_context(open(path, "ab"))
            self.journal: BinaryIO = stack.enter_context(open(journal_path(path), "ab"))
            self._recover()
            stack.pop_all()

    def __enter__(self) -> JournaledFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, block: int, content: bytes, input_digest: str, counts: Counts) -> None:
        """Write a block, wait until it has reached the disk, and record it in the journal."""
        self.data.write(content)
        _sync(self.data)
        output_digest = _digest(content).hex()
        record = BlockRecord(block, self.data.tell(), input_digest, output_digest, counts)
        line = record.to_line(self.last_line)
        self.journal.write(line)
        # Set before the sync, which Ctrl-C may interrupt: the line is written.
        self.last, self.last_line = record, line
        _sync(self.journal)

    def close(self) -> None:
        """Close both files; what a full disk did not take is lost."""
        for stream in (self.data, self.journal):
            with suppress(OSError):
                stream.close()

    def _recover(self) -> None:
        """Cut off the first damaged block and all that follow, and what is not in the journal."""
        n_blocks = n_journal = 0
        with open(self.path, "rb") as content:
            for record, line in read_records(self.path):
                if not _copy_block(content, record):
                    break
                self.last, self.last_line = record, line
                n_blocks, n_journal = n_blocks + 1, n_journal + len(line)
        if b"\n" in journal_path(self.path).read_bytes()[n_journal:]:
            kept = f"{n_blocks:,} finished blocks are kept, and the others are computed again"
            warn_of_damage(self.path, f"a block or its record is damaged: {kept}")
        self.data.truncate(0 if self.last is None else self.last.end)
        self.journal.truncate(n_journal)
        for stream in (self.data, self.journal):
            stream.seek(0, os.SEEK_END)


def journal_path(path: Path) -> Path:
    """Return the path of a file's journal."""
    return path.with_name(path.name + ".journal")


def read_records(path: Path) -> Iterator[tuple[BlockRecord, bytes]]:
    """Read the records of a journal and their lines, up to the first incomplete or damaged one."""
    if not journal_path(path).exists():
        return
    before = b""
    with open(journal_path(path), "rb") as lines:
        for line in lines:
            record = BlockRecord.from_line(line, before)
            if record is None:
                return
            yield record, line
            before = line


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
