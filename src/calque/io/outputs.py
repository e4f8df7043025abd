"""A file of whole blocks and a journal of them, so that work goes on after a kill where it was.

A block counts once its line is in the journal, which is written after the block has reached the
disk. What a kill has left behind that line is cut off.

Sharing work among the processes that torchrun has started.

A file made block by block that a kill cannot spoil: it can be gone on with, byte for byte.

Until it is whole, its blocks lie in `FILE.partial/`: one `part-N` with its journal for each
process, and the settings of the run in `settings.json`.

A folder of plain files with a list of them, written whole or not at all, and checked when read.

The list, `manifest.json`, has the settings of the model and the size and SHA-256 of each file.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeAlias, TypeVar

import numpy as np
from safetensors import SafetensorError

from calque.errors import InputError
from calque.io.files import DISK_FULL, check_target, write_atomically

if TYPE_CHECKING:
    import numpy.typing as npt
    from accelerate import PartialState


@dataclass(frozen=True, slots=True)
class Record:
    """One block in the journal: its number, where it ends, what was read so far, and figures."""

    block: int
    end: int
    digest: str
    figures: tuple[int, ...]

    def to_line(self) -> bytes:
        """Give the journal's line."""
        return json.dumps([self.block, self.end, self.digest, *self.figures]).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """Read the journal's line; ValueError if it is not whole."""
        block, end, digest, *figures = json.loads(line)
        if not line.endswith(b"\n"):
            raise ValueError("a line without an end")
        return cls(block, end, digest, tuple(figures))


class JournaledFile:
    """Blocks appended to a file, each of them noted in `NAME.journal` beside it.

    `last` is the newest block that is safe. Only one process at a time can have it open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: BinaryIO = open(path, "ab")  # noqa: SIM115
        lock_file(self.data, path)
        self.journal: BinaryIO = open(journal_of(path), "ab")  # noqa: SIM115
        self.last: Record | None = None
        self._recover()

    def append(self, block: int, content: bytes, digest: str, figures: tuple[int, ...]) -> None:
        """Write a block, wait until it is on the disk, and note it."""
        self.data.write(content)
        _sync(self.data)
        record = Record(block, self.data.tell(), digest, figures)
        self.journal.write(record.to_line())
        self.last = record  # before the wait, in which Ctrl-C may come: the block is noted
        _sync(self.journal)

    def clear(self) -> None:
        """Forget all blocks."""
        for stream in (self.data, self.journal):
            stream.truncate(0)
        self.last = None

    def close(self) -> None:
        """Close both files; the lock goes with them."""
        self.data.close()
        self.journal.close()

    def _recover(self) -> None:
        """Cut off what is not in the journal, and from the journal what is not in the file."""
        n_bytes, n_journal = os.fstat(self.data.fileno()).st_size, 0
        for record in read_records(self.path):
            if record.end > n_bytes:
                break
            self.last, n_journal = record, n_journal + len(record.to_line())
        self.data.truncate(0 if self.last is None else self.last.end)
        self.journal.truncate(n_journal)
        for stream in (self.data, self.journal):
            stream.seek(0, os.SEEK_END)


def journal_of(path: Path) -> Path:
    """Give the name of a file's journal."""
    return path.with_name(path.name + ".journal")


def read_records(path: Path) -> Iterator[Record]:
    """Read the journal of a file up to a line that a kill has cut short."""
    if not journal_of(path).exists():
        return
    with open(journal_of(path), "rb") as lines:
        for line in lines:
            try:
                yield Record.from_line(line)
            except (ValueError, TypeError):
                return


def lock_file(stream: BinaryIO, path: Path) -> None:
    """Refuse to share an open file with another process that locked it; `path` is for messages."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        problem = "another process is writing it"
        raise InputError(problem, file=path, fix="wait for it, or end it") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise  # else a file system without locks


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


ResultT = TypeVar("ResultT")


class StoppedByMain(Exception):
    """The main process met bad input, and says so; the others stop without a word."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One process among others that take turns at the blocks of a file; alone by default."""

    rank: int = 0
    n_ranks: int = 1
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Tell whether this process checks the input and puts the output together."""
        return self.rank == 0

    def owns(self, block: int) -> bool:
        """Tell whether a block is this process's to work on."""
        return block % self.n_ranks == self.rank

    def agree(self, is_fine: bool = True) -> bool:
        """Wait for all processes, and tell whether all of them are fine."""
        if self.n_ranks == 1:
            return is_fine

        import torch

        worst = torch.tensor(int(is_fine))
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MIN, group=self.group)
        return bool(worst)

    def run_on_main(self, work: Callable[[], ResultT]) -> ResultT | None:
        """Do something in the main process while the others wait; bad input there stops all."""
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except InputError as problem:
                error = problem
        if not self.agree(error is None):
            raise error or StoppedByMain
        return result


@contextmanager
def join_shards() -> Iterator[Shard]:
    """Work with the other processes, if torchrun has started any, until the block ends."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Shard()
        return

    import torch

    state = join_processes()
    # The default group may belong to GPUs, and gives up after some minutes.
    group = torch.distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    try:
        yield Shard(state.process_index, state.num_processes, group)
    finally:
        torch.distributed.destroy_process_group()  # or its threads abort the process at exit


Settings: TypeAlias = Mapping[str, str | int | float | bool | None]

SETTINGS = "settings.json"
INPUT_SIZE = "pairs"  # the setting that is None where the input cannot be read twice
OURS = re.compile(r"part-\d+(?:\.journal)?|whole|settings\.json|\.calque-\w+\.partial")
COPY_BYTES = 1 << 20
ANEW = "or remove this folder to begin anew"


class ResumableFile:
    """Blocks that become a file when all are there; `finish` makes it and sums their figures.

    `wants` must be told of every block of the input in turn, by what stands in it: so it knows
    that an input gone on with is the same as far as it had been read.
    """

    def __init__(
        self, target: Path, settings: Settings, *, resume: bool = False, shard: Shard | None = None
    ) -> None:
        self.target, self.shard = Path(os.path.realpath(target)), shard or Shard()
        self.folder = working_folder(target)
        self.settings = {**settings, "processes": self.shard.n_ranks}
        self.parts = [self.folder / f"part-{rank}" for rank in range(self.shard.n_ranks)]
        self.n_seen, self.digest = 0, b""
        self.figures_before: tuple[int, ...] = ()
        self.is_resumed = self.is_kept = False
        part = self.shard.run_on_main(lambda: self._claim(resume))
        self.part = part or JournaledFile(self.parts[self.shard.rank])

    def __enter__(self) -> ResumableFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.part.close()
        if error is not None and self.shard.is_main and not self._is_worth_keeping(error):
            shutil.rmtree(self.folder)

    def wants(self, content: bytes) -> bool:
        """Take note of the next block of the input, and tell whether it is still to be done."""
        number, self.n_seen = self.n_seen, self.n_seen + 1
        self.digest = hashlib.blake2b(self.digest + content, digest_size=16).digest()
        last = self.part.last
        if last is not None and number == last.block and self.digest.hex() != last.digest:
            raise self._changed()
        return self.shard.owns(number) and (last is None or number > last.block)

    def append(self, content: bytes, figures: tuple[int, ...]) -> None:
        """Write the block that `wants` was told of last."""
        try:
            self.part.append(self.n_seen - 1, content, self.digest.hex(), figures)
        except OSError as error:
            self.is_kept = True
            if error.errno not in DISK_FULL:
                raise
            problem, fix = "no space left on the device", "make room, then go on with --resume"
            raise InputError(problem, file=self.target, fix=fix) from error

    def finish(self, empty: bytes = b"") -> tuple[int, ...]:
        """Put the blocks of all processes in their place, and sum their figures.

        `empty` is what a file without blocks holds. Only the main process gets the figures.
        """
        if self.part.last is not None and self.part.last.block >= self.n_seen:
            raise self._changed()
        self.shard.agree()
        if not self.shard.is_main:
            return ()
        self.is_kept = True
        whole = self.folder / "whole"
        _join_parts(self.parts, whole)
        if whole.stat().st_size == 0:
            whole.write_bytes(empty)
        figures = _sum_figures(self.parts)
        os.replace(whole, self.target)
        _sync_path(self.target.parent)
        # Without its settings the rest is of no use, and a later run may clear it away.
        (self.folder / SETTINGS).unlink()
        shutil.rmtree(self.folder)
        return figures

    def _claim(self, resume: bool) -> JournaledFile:
        """Take the folder for this run: new, gone on with, or emptied of what is of no use."""
        check_unfinished(self.target, resume)
        try:
            self.folder.mkdir(exist_ok=True)
            part = JournaledFile(self.parts[0])
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise InputError(problem, file=self.folder, fix="write elsewhere") from error
        try:
            found = read_settings(self.folder)
            if found is not None:
                self.is_resumed = True
                _compare(found, self.settings, self.folder)
                self.figures_before = _sum_figures(self.parts)
                return part
            part.clear()
            for path in set(self.folder.iterdir()) - {part.path, journal_of(part.path)}:
                path.unlink()
            with write_atomically(self.folder / SETTINGS) as stream:
                json.dump(self.settings, stream)
        except BaseException:
            part.close()
            raise
        return part

    def _is_worth_keeping(self, error: BaseException) -> bool:
        if self.is_kept or self.is_resumed:
            return True
        is_begun = self.shard.n_ranks > 1 or self.part.last is not None
        can_resume = self.settings[INPUT_SIZE] is not None
        return is_begun and can_resume and not isinstance(error, InputError)

    def _changed(self) -> InputError:
        problem = "the input has changed since this run began"
        return InputError(problem, file=self.folder, fix=f"give the same input, {ANEW}")


def working_folder(target: Path) -> Path:
    """Give the folder that holds a file's blocks until it is whole."""
    path = Path(os.path.realpath(target))
    return path.with_name(path.name + ".partial")


def check_unfinished(target: Path, resume: bool) -> None:
    """Refuse to begin anew where an unfinished run can be gone on with, or someone's files lie."""
    folder = working_folder(target)
    if folder.exists() and not (folder.is_dir() and all(map(OURS.fullmatch, os.listdir(folder)))):
        problem = "something else is where unfinished work would be kept"
        raise InputError(problem, file=folder, fix="move it, or write elsewhere")
    if not resume and read_settings(folder) is not None:
        problem = "an unfinished run is here"
        raise InputError(problem, file=folder, fix=f"go on with --resume, {ANEW}")


def read_settings(folder: Path) -> Settings | None:
    """Read what an unfinished run was told, if there is one that can be gone on with."""
    try:
        found: Settings = json.loads((folder / SETTINGS).read_text("utf-8"))
        return None if found[INPUT_SIZE] is None else found
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _compare(old: Settings, new: Settings, folder: Path) -> None:
    for name in {**old, **new}:
        before, now = old.get(name), new.get(name)
        if before != now:
            problem = f"this run began with {name} {_show(before)}, not {_show(now)}"
            raise InputError(problem, file=folder, fix=f"give the same input and options, {ANEW}")


def _show(value: object) -> str:
    if value is None:
        return "unset"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _join_parts(parts: Sequence[Path], whole: Path) -> None:
    """Lay the blocks of all processes one after another, in the order of the input."""
    whole.unlink(missing_ok=True)
    if len(parts) == 1:
        with suppress(OSError):  # where there are no links, copy
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
        output.flush()
        os.fsync(output.fileno())


def _copy(stream: BinaryIO, output: BinaryIO, end: int) -> None:
    while left := end - stream.tell():
        content = stream.read(min(left, COPY_BYTES))
        if not content:
            raise InputError(
                "shorter than its journal says",
                file=stream.name,
                fix="remove its folder to begin anew",
            )
        output.write(content)


def _sum_figures(parts: Sequence[Path]) -> tuple[int, ...]:
    found = [record.figures for part in parts for record in read_records(part)]
    return tuple(map(sum, zip(*found, strict=True)))


MANIFEST = "manifest.json"


def write_model_folder(
    folder: Path, format: str, settings: dict[str, Any], fill: Callable[[Path], object]
) -> None:
    """Write what `fill` puts into a folder, and the list; an older model there is replaced."""
    folder = Path(folder)
    if folder.exists() and not _may_replace(folder, format):
        raise InputError("exists and is no model", file=folder, fix="choose a new folder")

    def fill_and_list(draft: Path) -> None:
        fill(draft)
        files = {path.name: _describe(path) for path in sorted(draft.iterdir())}
        manifest = {"format": format, **settings, "files": files}
        text = json.dumps(manifest, ensure_ascii=False, indent=2) + "\n"
        (draft / MANIFEST).write_text(text, "utf-8")

    write_folder(folder, fill_and_list)


def read_model_folder(folder: Path, format: str) -> dict[str, Any]:
    """Check a folder against its list, and give the list."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if manifest.get("format") != format:
        problem = f"holds {manifest.get('format') or 'something else'}, not {format}"
        raise InputError(problem, file=folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise InputError("is missing", file=path, fix="copy or train the model again")
        found = _describe(path)
        if found != expected:
            problem = f"is damaged: {found['bytes']:,} bytes, written as {expected['bytes']:,}"
            if found["bytes"] == expected["bytes"]:
                problem = "is damaged: not what was written"
            raise InputError(problem, file=path, fix="copy or train the model again")
    return manifest


def write_words(path: Path, words: list[str]) -> None:
    """Write words as a JSON list, one a line; whatever a word contains, it comes back."""
    text = json.dumps(words, ensure_ascii=False, indent=0)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def read_words(path: Path) -> list[str]:
    """Read words that were written so."""
    words: list[str] = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    return words


def read_array(path: Path, *, mapped: bool = False) -> npt.NDArray[Any]:
    """Read a NumPy array, or map it where it is too large to be read whole."""
    found: npt.NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    return found


def _may_replace(folder: Path, format: str) -> bool:
    """Tell whether a folder has nothing in it but a model of the same format."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if MANIFEST not in names:
        return not names
    manifest = _read_manifest(folder)
    return manifest.get("format") == format and names <= {MANIFEST, *manifest["files"]}


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        problem = f"has no {MANIFEST}" if folder.is_dir() else "is no folder"
        raise InputError(problem, file=folder, fix="name the folder of a saved model")
    try:
        manifest = json.loads(path.read_bytes())
        names = list(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("is no list of a model's files", file=path) from error
    if any(Path(name).name != name for name in names):
        raise InputError("names files outside its folder", file=path)
    return dict(manifest)


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def write_folder(final: Path, fill: Callable[[Path], object]) -> None:
    """Write a folder whole or not at all; one of that name is replaced in the end."""
    draft = _hidden(final, PARTIAL)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _clear_leftovers(final.parent)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        fill(draft)
        for path in (*draft.rglob("*"), draft):
            _sync_path(path)
        _publish(draft, final)
    except (OSError, SafetensorError) as error:
        fix = "free some space or choose another run folder; older checkpoints are intact"
        raise InputError(f"cannot be written: {error}", file=final, fix=fix) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, final: Path) -> None:
    """Give a written folder its name; an older one of that name steps aside first."""
    aside = _hidden(final, REPLACED)
    if final.exists():
        final.rename(aside)
    draft.rename(final)
    _sync_path(final.parent)
    if aside.exists():
        _discard(aside)


def _discard(folder: Path) -> None:
    """Remove a folder; it is hidden first, so a kill never leaves half of it in view."""
    doomed = folder
    if folder.suffix not in (PARTIAL, DELETED):
        doomed = _hidden(folder, DELETED)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _hidden(folder: Path, suffix: str) -> Path:
    """Name the hidden sibling of a checkpoint folder."""
    return folder.with_name(f".{folder.stem.removeprefix('.')}{suffix}")


def _sync_path(path: Path) -> None:
    """Wait until a file or a folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


LONGEST_WAIT = timedelta(days=7)


def join_processes() -> PartialState:
    """Find the other processes torchrun has started, if any: on GPUs where there are some."""
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available())


# Hidden siblings of a checkpoint: being written, stepped aside for a rewrite, being removed.
PARTIAL, REPLACED, DELETED = ".partial", ".replaced", ".deleted"


def _clear_leftovers(run: Path) -> None:
    """Remove what a killed process left, and put back a folder that it had moved aside."""
    for leftover in run.glob(".step-*.*"):
        final = run / leftover.stem.removeprefix(".")
        if leftover.suffix == REPLACED and not final.exists():
            leftover.rename(final)
        else:
            _discard(leftover)


class LinkSink(Protocol):
    """A place that blocks of links go to."""

    figures_before: tuple[int, ...]

    def wants(self, content: bytes) -> bool:
        """Take note of the next block of the input, and tell whether its links are wanted."""
        ...

    def append(self, content: bytes, figures: tuple[int, ...]) -> None:
        """Take the links of that block."""
        ...

    def finish(self, empty: bytes = b"") -> tuple[int, ...]:
        """Give the sum of all figures."""
        ...


class LinkStream:
    """Links to a stream, such as standard output, or without one to nowhere."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self.stream = stream
        self.figures: tuple[int, ...] = ()
        self.figures_before: tuple[int, ...] = ()

    def wants(self, content: bytes) -> bool:
        """Want every block."""
        return True

    def append(self, content: bytes, figures: tuple[int, ...]) -> None:
        """Write a block at once, for whoever reads at the other end."""
        before = self.figures or (0,) * len(figures)
        self.figures = tuple(map(sum, zip(before, figures, strict=True)))
        if self.stream is not None:
            self.stream.write(content)
            self.stream.flush()

    def finish(self, empty: bytes = b"") -> tuple[int, ...]:
        """Give the sum of all figures."""
        return self.figures


def pack_block(content: bytes, suffix: str) -> bytes:
    """Compress a block on its own: .gz, .xz and .zst files may hold many such members.

    So a file that a kill has cut into two runs is the same as one made in one go.
    """
    if suffix == ".gz":
        return gzip.compress(content, 6, mtime=0)
    if suffix == ".xz":
        return lzma.compress(content)
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return content


def check_output(path: Path, paths: Iterable[str], *, resume: bool) -> None:
    """Refuse an output that cannot be written, before the work begins."""
    check_target(path, paths)
    check_unfinished(path, resume)


def open_sink(
    path: Path | None, settings: Settings, *, resume: bool = False, shard: Shard | None = None
) -> AbstractContextManager[LinkSink]:
    """Open standard output (no path), a file that can be resumed, or a device or pipe as it is."""
    if path is not None and (path.is_file() or not path.exists()):
        return ResumableFile(path, settings, resume=resume, shard=shard)
    return _open_stream(path)


@contextmanager
def _open_stream(path: Path | None) -> Iterator[LinkStream]:
    if path is None:
        sys.stdout.flush()
        yield LinkStream(sys.stdout.buffer)
        return
    with open(path, "wb") as stream:
        yield LinkStream(stream)


def fingerprint(folder: Path) -> str:
    """Tell models apart by what is in their files."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with open(path, "rb") as stream:
            digest = hashlib.file_digest(stream, "blake2b")
        total.update(path.name.encode() + b"\0" + digest.digest())
    return total.hexdigest()
