"""Resumable files: killed at any point and resumed, the output is the same byte for byte."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import lzma
import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import zstandard

from calque.errors import InputError
from calque.io import resumable
from calque.io.files import read_lines
from calque.io.resumable import (
    BlockRecord,
    JournaledFile,
    ResumableFile,
    ResumeWarning,
    check_no_unfinished_run,
    check_resumable_output,
    compress_block,
    journal_path,
    partial_folder,
    read_records,
)
from calque.io.shards import Shard

BLOCKS = [f"line {number}\n".encode() * number for number in range(7)]
WHOLE = b"".join(BLOCKS)
SETTINGS = {"input_size": 7, "format": "pharaoh", "scores": False, "layer": 0}


def write(target: Path, *, resume: bool = False, **changes: object) -> tuple[int, ...]:
    """Write all blocks that are needed and count blocks and bytes."""
    with ResumableFile(target, SETTINGS | changes, resume=resume) as file:  # type: ignore[arg-type]
        for block in BLOCKS:
            if file.begin_block(b"input of " + block):
                file.append(block, (1, len(block)))
        return file.finish()


def interrupt(target: Path, n_blocks: int, error: BaseException | None = None) -> None:
    """Write some blocks and stop; without an error, as if the process had been killed."""
    file = ResumableFile(target, SETTINGS)
    for block in BLOCKS[:n_blocks]:
        assert file.begin_block(b"input of " + block)
        file.append(block, (1, len(block)))
    if error is None:
        file._stack.close()
    else:
        file.__exit__(type(error), error, None)


def test_one_run(tmp_path: Path) -> None:
    assert write(tmp_path / "out") == (7, len(WHOLE))
    assert (tmp_path / "out").read_bytes() == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("n_blocks", range(8))
def test_resume_after_any_block(tmp_path: Path, n_blocks: int) -> None:
    interrupt(tmp_path / "out", n_blocks)
    assert not (tmp_path / "out").exists()
    assert write(tmp_path / "out", resume=True) == (7, len(WHOLE))
    assert (tmp_path / "out").read_bytes() == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def kill_at(step: int, target: Path, *, resume: bool) -> bool:
    """Write in a child process, killed at a disk operation; return whether it was killed."""
    child = os.fork()
    if child == 0:
        steps = count(1)

        def counted(work: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                if next(steps) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return work(*arguments, **options)

            return call

        for name in ("fsync", "link", "mkdir", "replace", "rmdir", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            write(target, resume=resume)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_killed_at_every_step(tmp_path: Path) -> None:
    for step in count(1):
        target = tmp_path / str(step) / "out"
        target.parent.mkdir()
        if not kill_at(step, target, resume=False):
            break
        kill_at(2 * step % 17 + 1, target, resume=True)  # again, somewhere else
        write(target, resume=True)
        assert target.read_bytes() == WHOLE, step
        assert [path.name for path in target.parent.iterdir()] == ["out"], step
    assert step > 2 * len(BLOCKS)


def test_an_older_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    interrupt(tmp_path / "out", 3)
    assert (tmp_path / "out").read_bytes() == b"old"
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_an_unfinished_run_is_not_discarded(tmp_path: Path) -> None:
    interrupt(tmp_path / "out", 3)
    with pytest.raises(
        InputError, match=r"out\.partial: this folder holds an unfinished run .*--resume, or remove"
    ):
        write(tmp_path / "out")
    with pytest.raises(InputError, match="holds an unfinished run"):
        check_no_unfinished_run(tmp_path / "out", resume=False)
    check_no_unfinished_run(tmp_path / "out", resume=True)
    assert write(tmp_path / "out", resume=True)[0] == 7


@pytest.mark.parametrize("damage", [b"LINE", b"", b"line 9\n"])
def test_damaged_blocks_are_computed_again(tmp_path: Path, damage: bytes) -> None:
    interrupt(tmp_path / "out", 6)
    part = tmp_path / "out.partial" / "part-0"
    part.write_bytes(part.read_bytes().replace(b"line 3\n", damage, 1))
    with pytest.warns(ResumeWarning, match="3 finished blocks are kept"):
        assert write(tmp_path / "out", resume=True) == (7, len(WHOLE))
    assert (tmp_path / "out").read_bytes() == WHOLE


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("part-0", lambda content: content.replace(b"line 3", b"line 4", 1)),
        ("part-0", lambda content: content[:-1]),
        ("part-0.journal", lambda content: content[: content.index(b"[4, ")]),
        ("part-0.journal", lambda content: content.replace(b", 1, ", b", 2, ")),
    ],
)
def test_blocks_damaged_before_they_are_merged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    damage: Callable[[bytes], bytes],
    has_links: bool,
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_links)
    merge = resumable._merge_parts

    def damage_and_merge(*arguments: Any) -> Any:
        path = tmp_path / "out.partial" / file
        path.write_bytes(damage(path.read_bytes()))
        return merge(*arguments)

    monkeypatch.setattr(resumable, "_merge_parts", damage_and_merge)
    with pytest.raises(InputError, match=r"part-0: block \d is damaged \(use --resume"):
        write(tmp_path / "out")
    monkeypatch.setattr(resumable, "_merge_parts", merge)
    assert not (tmp_path / "out").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumeWarning)
        write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


@pytest.mark.parametrize("settings", [b"", b"{", b"[" * 100_000, b"[]", b'{"input_size": null}'])
def test_damaged_settings_start_the_run_again(tmp_path: Path, settings: bytes) -> None:
    interrupt(tmp_path / "out", 3)
    (tmp_path / "out.partial" / "settings.json").write_bytes(settings)
    with pytest.warns(ResumeWarning, match=r"out\.partial: the run cannot be resumed and starts"):
        assert write(tmp_path / "out", resume=True) == (7, len(WHOLE))
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_nothing_to_resume_is_a_new_run(tmp_path: Path) -> None:
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "jsonl"}, "started with format pharaoh, not jsonl"),
        ({"scores": True}, "started with scores off, not on"),
        ({"input_size": 8}, "started with input_size 7, not 8"),
        ({"layer": None}, "started with layer 0, not unset"),
        ({"more": "x"}, "started with more unset, not x"),
    ],
)
def test_other_settings_are_an_error(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    interrupt(tmp_path / "out", 3)
    for _ in range(2):  # the error changes nothing
        with pytest.raises(InputError, match=problem):
            write(tmp_path / "out", resume=True, **changes)
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_another_input_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(tmp_path / "out", 4)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "BLOCKS", [b"changed", *BLOCKS[1:]])
        with pytest.raises(InputError, match="the input has changed"):
            write(tmp_path / "out", resume=True)
        patch.setitem(globals(), "BLOCKS", BLOCKS[:2])
        with pytest.raises(InputError, match="the input has changed"):
            write(tmp_path / "out", resume=True)
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_only_resumable_work_is_kept(tmp_path: Path) -> None:
    folder, interruption = partial_folder(tmp_path / "out"), KeyboardInterrupt()
    interrupt(tmp_path / "out", 3, interruption)
    assert folder.exists()
    kept = f"the finished work is kept in {folder}: continue with --resume"
    assert interruption.__notes__ == [kept]
    write(tmp_path / "out", resume=True)
    for n_blocks, error in ((3, InputError("bad line")), (0, KeyboardInterrupt())):
        interrupt(tmp_path / "out", n_blocks, error)
        assert not folder.exists()
        assert not hasattr(error, "__notes__")
    assert not list(tmp_path.glob(".*"))


def test_input_from_a_pipe_cannot_be_resumed(tmp_path: Path) -> None:
    file = ResumableFile(tmp_path / "out", SETTINGS | {"input_size": None})
    file.begin_block(b"x")
    file.append(b"half", (1, 4))
    file._stack.close()  # as a kill would
    check_no_unfinished_run(tmp_path / "out", resume=False)
    assert write(tmp_path / "out") == (
        7,
        len(WHOLE),
    )  # leftovers that cannot be resumed are replaced
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_two_writers_at_once(tmp_path: Path) -> None:
    with ResumableFile(tmp_path / "out", SETTINGS | {"input_size": None}):
        for resume in (False, True):
            with pytest.raises(
                InputError, match=rf"out\.partial: process {os.getpid()} on .* writing"
            ):
                write(tmp_path / "out", resume=resume)
        assert partial_folder(tmp_path / "out").exists()
    with ResumableFile(tmp_path / "other", SETTINGS) as file:
        assert file.begin_block(b"x")
        file.append(b"half", (1, 4))
        with pytest.raises(InputError, match="is writing here"):
            check_resumable_output(tmp_path / "other", [], resume=False)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module, name in ((resumable, "_sync"), (os, "replace")):
        monkeypatch.setattr(module, name, fail)
        with pytest.raises(InputError, match=r"out\S*: no space left on (the )?device .*free some"):
            write(tmp_path / "out")
        monkeypatch.undo()
        write(tmp_path / "out", resume=True)
        assert (tmp_path / "out").read_bytes() == WHOLE


def test_a_disk_that_becomes_full(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(InputError, match=r"out: no space left .*then use --resume"):
            write(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert write(tmp_path / "out", resume=True) == (7, len(WHOLE))
    assert (tmp_path / "out").read_bytes() == WHOLE


def refuse_links(*_: object) -> None:
    raise OSError(errno.EPERM, "no links here")


def test_without_hard_links_the_part_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse_links)
    monkeypatch.setattr(resumable, "COPY_BYTES", 5)
    write(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    folder = partial_folder(tmp_path / "out")
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"out\.partial: this path is needed for unfinished work"):
        write(tmp_path / "out", resume=True)
    assert (folder / "thesis.tex").read_text() == "mine"
    partial_folder(tmp_path / "other").write_text("mine")
    with pytest.raises(InputError, match=r"other\.partial: this path is needed"):
        write(tmp_path / "other")


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for target in ("elsewhere", "nowhere"):
        link = tmp_path / "out.partial"
        link.symlink_to(target)
        for resume in (False, True):
            with pytest.raises(InputError, match=r"out\.partial: .* it is a symbolic link"):
                write(tmp_path / "out", resume=resume)
            with pytest.raises(InputError, match=r"out\.partial: .* it is a symbolic link"):
                check_resumable_output(tmp_path / "out", [], resume=resume)
        link.unlink()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_folder_that_cannot_be_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(InputError, match=r"out\.partial: permission denied"):
        write(tmp_path / "out")


def test_a_file_without_blocks(tmp_path: Path) -> None:
    with ResumableFile(tmp_path / "out", SETTINGS) as file:
        assert file.finish(b"empty") == ()
    assert (tmp_path / "out").read_bytes() == b"empty"


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "there" / "real")
    write(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "there" / "real").read_bytes() == WHOLE


class PretendShard(Shard):
    """One of several processes; it does not wait for the others."""

    def all_succeeded(self, success: bool = True) -> bool:
        return success


@pytest.mark.parametrize("n_ranks", [2, 3, 10])
def test_blocks_of_several_processes_are_merged_in_order(tmp_path: Path, n_ranks: int) -> None:
    target = tmp_path / "out"
    files = [
        ResumableFile(target, SETTINGS, shard=PretendShard(rank, n_ranks))
        for rank in range(n_ranks)
    ]
    for file in files:
        for number, block in enumerate(BLOCKS):
            if file.begin_block(block):
                assert number % n_ranks == file.shard.rank
                file.append(block, (1, len(block)))
    assert [file.finish() for file in files[::-1]][-1] == (7, len(WHOLE))
    for file in files:
        file.__exit__(None, None, None)
    assert target.read_bytes() == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_process_cannot_resume_the_work_of_two(tmp_path: Path) -> None:
    for rank in (0, 1):
        file = ResumableFile(tmp_path / "out", SETTINGS, shard=PretendShard(rank, 2))
        file._stack.close()
        file.part.close()
    with pytest.raises(InputError, match="started with processes 2, not 1"):
        write(tmp_path / "out", resume=True)
    settings = json.loads((tmp_path / "out.partial" / "settings.json").read_text())
    assert settings == SETTINGS | {"processes": 2}


def test_an_interrupt_during_the_sync_keeps_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, syncs = tmp_path / "out", count(1)

    def sync(stream: BinaryIO) -> None:
        stream.flush()
        if next(syncs) == 2:  # the first block is on disk and its record is being written
            raise KeyboardInterrupt

    monkeypatch.setattr(resumable, "_sync", sync)
    with pytest.raises(KeyboardInterrupt):
        write(target)
    monkeypatch.undo()
    assert partial_folder(target).is_dir()
    write(target, resume=True)
    assert target.read_bytes() == WHOLE


# The journal.

JOURNAL_BLOCKS = [b"first\n", b"", b"third block\n"]


@pytest.fixture
def part(tmp_path: Path) -> Path:
    file = JournaledFile(tmp_path / "part")
    for number, content in enumerate(JOURNAL_BLOCKS):
        file.append(3 * number, content, f"digest {number}", (number, 10))
    file.close()
    return tmp_path / "part"


def reopen(path: Path) -> BlockRecord | None:
    file = JournaledFile(path)
    file.close()
    return file.last


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def records(path: Path) -> list[BlockRecord]:
    return [record for record, _ in read_records(path)]


RECORDS = [
    BlockRecord(0, 6, "digest 0", digest(b"first\n"), (0, 10)),
    BlockRecord(3, 6, "digest 1", digest(b""), (1, 10)),
    BlockRecord(6, 18, "digest 2", digest(b"third block\n"), (2, 10)),
]


def test_journal_records(part: Path) -> None:
    assert part.read_bytes() == b"".join(JOURNAL_BLOCKS)
    assert records(part) == RECORDS
    assert reopen(part) == RECORDS[-1]
    first = journal_path(part).read_text().splitlines()[0]
    content = f'[0, 6, "digest 0", "{digest(b"first" + bytes([10]))}", 0, 10]'
    assert first == f"{content} {digest(content.encode())}"


def test_every_truncation_of_the_journal_is_recovered(part: Path) -> None:
    journal, data = journal_path(part).read_bytes(), part.read_bytes()
    ends = [len(b"".join(journal.splitlines(True)[:n])) for n in range(4)]
    for length in range(len(journal) + 1):
        journal_path(part).write_bytes(journal[:length])
        part.write_bytes(data + b"what was being written")
        last = reopen(part)
        n_whole = sum(end <= length for end in ends) - 1
        assert (last.block if last else None) == [None, 0, 3, 6][n_whole]
        assert part.read_bytes() == b"".join(JOURNAL_BLOCKS[:n_whole])
        assert journal_path(part).read_bytes() == journal[: ends[n_whole]]


@pytest.mark.parametrize("file", ["part", "part.journal"])
def test_every_changed_byte_is_noticed(part: Path, file: str) -> None:
    damaged = part.with_name(file)
    journal, data, content = (
        journal_path(part).read_bytes(),
        part.read_bytes(),
        damaged.read_bytes(),
    )
    for position, byte in enumerate(content):
        journal_path(part).write_bytes(journal)
        part.write_bytes(data)
        changed = bytearray(content)
        changed[position] = byte ^ 1
        damaged.write_bytes(changed)
        is_last_line_end = file == "part.journal" and position == len(content) - 1  # as if killed
        kept = pytest.warns(ResumeWarning, match=r"part: .* finished blocks are kept, and the")
        with nullcontext() if is_last_line_end else kept:
            reopen(part)
        n_kept = len(records(part))
        assert n_kept < 3
        assert records(part) == RECORDS[:n_kept]
        assert part.read_bytes() == b"".join(JOURNAL_BLOCKS[:n_kept])


def test_removed_and_exchanged_records_are_noticed(part: Path) -> None:
    first, second, third = journal_path(part).read_bytes().splitlines(True)
    for lines, n_kept in (
        ([second, third], 0),
        ([first, third], 1),
        ([first, first, second, third], 1),
        ([second, first, third], 0),
    ):
        journal_path(part).write_bytes(b"".join(lines))
        assert records(part) == RECORDS[:n_kept]


def test_a_record_without_its_block_is_dropped(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:10])
    with pytest.warns(ResumeWarning, match="2 finished blocks are kept"):
        assert reopen(part) == RECORDS[1]
    assert part.read_bytes() == b"first\n"


def test_appending_after_recovery(part: Path) -> None:
    part.write_bytes(part.read_bytes() + b"torn")
    file = JournaledFile(part)
    file.append(9, b"fourth\n", "digest 3", (3, 10))
    file.close()
    assert part.read_bytes() == b"".join(JOURNAL_BLOCKS) + b"fourth\n"
    assert [record.end for record in records(part)] == [6, 6, 18, 25]


@pytest.mark.parametrize(
    "content", [b"5\n", b"null\n", b"[]\n", b"\xff\n", b'[0, 6, "digest of version 0.1", 0, 10]\n']
)
def test_invalid_journals_start_again(part: Path, content: bytes) -> None:
    journal_path(part).write_bytes(content)
    assert records(part) == []
    with pytest.warns(ResumeWarning, match="0 finished blocks are kept"):
        assert reopen(part) is None
    assert part.read_bytes() == journal_path(part).read_bytes() == b""


# Compressed blocks and outputs


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_compressed_blocks_make_one_file(tmp_path: Path, suffix: str) -> None:
    blocks = [b"first\n", b"", "zweite Zeile ß\n".encode() * 100]
    path = tmp_path / f"links{suffix}"
    path.write_bytes(b"".join(compress_block(block, suffix) for block in blocks))
    whole = b"".join(blocks).decode()
    assert list(read_lines(path)) == whole.splitlines()
    opened: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".zst": zstandard.open}
    with opened.get(suffix, open)(path, "rb") as stream:
        assert stream.read().decode() == whole
    assert compress_block(b"same", suffix) == compress_block(b"same", suffix)


def test_impossible_outputs(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("a ||| b\n")
    for target, inputs in (
        (tmp_path / "no" / "out", []),
        (tmp_path, []),
        (tmp_path / "in", ["-", str(tmp_path / "in")]),
    ):
        with pytest.raises(InputError):
            check_resumable_output(target, inputs, resume=False)
    check_resumable_output(tmp_path / "out", [str(tmp_path / "in")], resume=False)
