"""A file made block by block that a kill cannot spoil: it can be gone on with, byte for byte.

Until it is whole, its blocks lie in `FILE.partial/`: one `part-N` with its journal for each
process, and the settings of the run in `settings.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeAlias

from calque.text.files import DISK_FULL, write_atomically
from calque.tools.journal import JournaledFile, journal_of, read_records
from calque.tools.shards import Shard
from calque.types import InputError

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
        _sync_folder(self.target.parent)
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


def _sync_folder(folder: Path) -> None:
    """Wait until a folder's list of names has reached the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
