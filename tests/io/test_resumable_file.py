"""A file made in blocks: killed anywhere and gone on with, it is the same."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pytest

from calque.errors import InputError
from calque.io import outputs as journal
from calque.io import outputs as resumable_file
from calque.io.outputs import JournaledFile, ResumableFile, Shard, check_unfinished, working_folder

BLOCKS = [f"line {number}\n".encode() * number for number in range(7)]
WHOLE = b"".join(BLOCKS)
SETTINGS = {"pairs": 7, "format": "pharaoh", "scores": False, "layer": 0}


def write(target: Path, *, resume: bool = False, **changes: object) -> tuple[int, ...]:
    """Write all blocks that are wanted; figures are the number of blocks and of bytes."""
    with ResumableFile(target, SETTINGS | changes, resume=resume) as file:  # type: ignore[arg-type]
        for block in BLOCKS:
            if file.wants(b"input of " + block):
                file.append(block, (1, len(block)))
        return file.finish()


def interrupt(target: Path, n_blocks: int, error: BaseException | None = None) -> None:
    """Write some blocks and stop; without an error, as if the process had been killed."""
    file = ResumableFile(target, SETTINGS)
    for block in BLOCKS[:n_blocks]:
        assert file.wants(b"input of " + block)
        file.append(block, (1, len(block)))
    if error is None:
        file.part.close()
    else:
        file.__exit__(type(error), error, None)


def test_in_one_go(tmp_path: Path) -> None:
    assert write(tmp_path / "out") == (7, len(WHOLE))
    assert (tmp_path / "out").read_bytes() == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("n_blocks", range(8))
def test_gone_on_with_after_any_block(tmp_path: Path, n_blocks: int) -> None:
    interrupt(tmp_path / "out", n_blocks)
    assert not (tmp_path / "out").exists()
    assert write(tmp_path / "out", resume=True) == (7, len(WHOLE))
    assert (tmp_path / "out").read_bytes() == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def kill_at(step: int, target: Path, *, resume: bool) -> bool:
    """Write in a child that is killed at some step of what it does to the disk; was it?"""
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


def test_an_older_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    interrupt(tmp_path / "out", 3)
    assert (tmp_path / "out").read_bytes() == b"old"
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_an_unfinished_run_is_not_thrown_away(tmp_path: Path) -> None:
    interrupt(tmp_path / "out", 3)
    with pytest.raises(InputError, match=r"out\.partial: an unfinished run .*--resume, or remove"):
        write(tmp_path / "out")
    with pytest.raises(InputError, match="an unfinished run"):
        check_unfinished(tmp_path / "out", resume=False)
    check_unfinished(tmp_path / "out", resume=True)
    assert write(tmp_path / "out", resume=True)[0] == 7


def test_nothing_to_resume_is_a_new_run(tmp_path: Path) -> None:
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"format": "jsonl"}, "began with format pharaoh, not jsonl"),
        ({"scores": True}, "began with scores off, not on"),
        ({"pairs": 8}, "began with pairs 7, not 8"),
        ({"layer": None}, "began with layer 0, not unset"),
        ({"more": "x"}, "began with more unset, not x"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    interrupt(tmp_path / "out", 3)
    for _ in range(2):  # the refusal leaves all as it was
        with pytest.raises(InputError, match=problem):
            write(tmp_path / "out", resume=True, **changes)
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_another_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_can_be_gone_on_with_is_kept(tmp_path: Path) -> None:
    folder = working_folder(tmp_path / "out")
    interrupt(tmp_path / "out", 3, KeyboardInterrupt())
    assert folder.exists()
    write(tmp_path / "out", resume=True)
    for n_blocks, error in ((3, InputError("bad line")), (0, KeyboardInterrupt())):
        interrupt(tmp_path / "out", n_blocks, error)
        assert not folder.exists()


def test_a_pipe_cannot_be_gone_on_with(tmp_path: Path) -> None:
    file = ResumableFile(tmp_path / "out", SETTINGS | {"pairs": None})
    file.wants(b"x")
    file.append(b"half", (1, 4))
    file.part.close()  # as a kill would
    check_unfinished(tmp_path / "out", resume=False)
    assert write(tmp_path / "out") == (7, len(WHOLE))  # what is of no use is no obstacle
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_two_at_once(tmp_path: Path) -> None:
    with ResumableFile(tmp_path / "out", SETTINGS | {"pairs": None}):
        with pytest.raises(InputError, match="another process is writing it"):
            write(tmp_path / "out")
        assert working_folder(tmp_path / "out").exists()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JournaledFile, "append", fail)
    with pytest.raises(InputError, match=r"no space left .*go on with --resume"):
        write(tmp_path / "out")
    monkeypatch.undo()
    write(tmp_path / "out", resume=True)
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_without_hard_links_the_part_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(resumable_file, "COPY_BYTES", 5)
    write(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == WHOLE


def test_what_is_someone_elses_is_not_touched(tmp_path: Path) -> None:
    folder = working_folder(tmp_path / "out")
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    with pytest.raises(InputError, match=r"out\.partial: something else is where unfinished"):
        write(tmp_path / "out", resume=True)
    assert (folder / "thesis.tex").read_text() == "mine"
    working_folder(tmp_path / "other").write_text("mine")
    with pytest.raises(InputError, match=r"other\.partial: something else"):
        write(tmp_path / "other")


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(InputError, match=r"out\.partial: permission denied"):
        write(tmp_path / "out")


def test_no_blocks_at_all(tmp_path: Path) -> None:
    with ResumableFile(tmp_path / "out", SETTINGS) as file:
        assert file.finish(b"empty") == ()
    assert (tmp_path / "out").read_bytes() == b"empty"


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "there" / "real")
    write(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "there" / "real").read_bytes() == WHOLE


class PretendShard(Shard):
    """One of several processes, without the others: nobody is waited for."""

    def agree(self, is_fine: bool = True) -> bool:
        return is_fine


@pytest.mark.parametrize("n_ranks", [2, 3, 10])
def test_blocks_of_several_processes_are_merged_in_order(tmp_path: Path, n_ranks: int) -> None:
    target = tmp_path / "out"
    files = [
        ResumableFile(target, SETTINGS, shard=PretendShard(rank, n_ranks))
        for rank in range(n_ranks)
    ]
    for file in files:
        for number, block in enumerate(BLOCKS):
            if file.wants(block):
                assert number % n_ranks == file.shard.rank
                file.append(block, (1, len(block)))
    assert [file.finish() for file in files[::-1]][-1] == (7, len(WHOLE))
    for file in files:
        file.__exit__(None, None, None)
    assert target.read_bytes() == WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_process_does_not_go_on_for_two(tmp_path: Path) -> None:
    for rank in (0, 1):
        file = ResumableFile(tmp_path / "out", SETTINGS, shard=PretendShard(rank, 2))
        file.part.close()
    with pytest.raises(InputError, match="began with processes 2, not 1"):
        write(tmp_path / "out", resume=True)
    settings = json.loads((tmp_path / "out.partial" / "settings.json").read_text())
    assert settings == SETTINGS | {"processes": 2}


def test_ctrl_c_while_the_disk_is_slow_keeps_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, syncs = tmp_path / "out", count(1)

    def sync(stream: BinaryIO) -> None:
        stream.flush()
        if next(syncs) == 2:  # the first block is on the disk, and its record being written
            raise KeyboardInterrupt

    monkeypatch.setattr(journal, "_sync", sync)
    with pytest.raises(KeyboardInterrupt):
        write(target)
    monkeypatch.undo()
    assert working_folder(target).is_dir()
    write(target, resume=True)
    assert target.read_bytes() == WHOLE
