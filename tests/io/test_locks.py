"""Locks: one writer per output; what a killed writer leaves is removed, and blocks nobody."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from calque.cli import run
from calque.errors import InputError
from calque.io import locks
from calque.io.files import remove_unfinished, write_atomically
from calque.io.locks import create_draft, lock_output, remove_leftovers
from calque.io.outputs import write_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_within(enter: Callable[[], AbstractContextManager[object]], folder: Path) -> None:
    """Enter a context in a child process, which is killed when there is a file in a folder."""
    child = os.fork()
    if child == 0:
        try:
            with enter():
                time.sleep(60)
        finally:
            os._exit(0)
    for _ in range(1000):
        time.sleep(0.01)
        if any(folder.iterdir()):
            break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_second_process_learns_who_the_first_is(tmp_path: Path) -> None:
    with lock_output(tmp_path / "out"):
        assert names(tmp_path) == [".calque-out.lock"]
        with (
            pytest.raises(InputError) as caught,
            lock_output(tmp_path / "out"),
        ):
            pass
        assert str(caught.value) == (
            f"{tmp_path / 'out'}: process {os.getpid()} on {socket.gethostname()} is writing here "
            "(wait until it ends, stop it, or choose another output)"
        )
        with lock_output(tmp_path / "other"):
            assert names(tmp_path) == [".calque-other.lock", ".calque-out.lock"]
    assert names(tmp_path) == []
    with lock_output(tmp_path / "out"):
        pass


def test_another_lock_file(tmp_path: Path) -> None:
    with lock_output(tmp_path, tmp_path / ".lock"):
        with pytest.raises(InputError, match=f"{tmp_path}: process"):
            lock_output(tmp_path, tmp_path / ".lock").__enter__()
        assert names(tmp_path) == [".lock"]
    assert names(tmp_path) == []


def test_links_to_one_output_have_one_lock(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("out")
    with lock_output(tmp_path / "link"), pytest.raises(InputError, match="out: process"):
        lock_output(tmp_path / "out").__enter__()


@pytest.mark.parametrize("output", ["-", "/dev/null"])
def test_devices_and_standard_output_are_not_locked(output: str) -> None:
    with lock_output(Path(output)), lock_output(Path(output)):
        assert not Path(output).with_name(f".calque-{Path(output).name}.lock").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["embed", "in.txt", "-o", "out.npy"],
        ["clean", "in.txt", "-o", "out.tsv"],
        ["align", "in.txt", "-o", "out"],
        ["mine", "in.txt", "in.txt", "-o", "out.tsv"],
        ["lexicon", "in.vec", "in.vec", "-o", "out.txt"],
        ["extract", "in.txt", "-o", "out.vec", "--language", "en"],
    ],
    ids=lambda command: command[0],
)
def test_commands_lock_their_outputs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("a b ||| c d\n")
    Path("in.vec").write_text("2 2\na 1 2\nb 2 1\n")
    output = Path(command[command.index("-o") + 1])
    folders = [output.with_name(f"{output.name}{suffix}") for suffix in ("", ".partial", ".mining")]
    with ExitStack() as stack:
        for path in folders:
            stack.enter_context(lock_output(path))
        assert run(command) == 2
    owner = f"process {os.getpid()} on {socket.gethostname()} is writing here"
    assert re.search(rf"^calque: error: \S*{output}\S*: {owner} \(", capsys.readouterr().err, re.M)
    assert names(tmp_path) == ["in.txt", "in.vec"]


def test_the_lock_of_a_killed_process_blocks_nobody(tmp_path: Path) -> None:
    lock = tmp_path / ".calque-out.lock"
    kill_within(lambda: lock_output(tmp_path / "out"), tmp_path)
    assert lock.exists()
    with lock_output(tmp_path / "out"):
        assert f"process {os.getpid()} " in lock.read_text()
    assert names(tmp_path) == []


def test_a_lock_that_is_removed_between_open_and_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_file, opened = fcntl.flock, []

    def remove_first(handle: int, operation: int) -> None:
        opened.append(handle)
        if len(opened) == 1:  # as its owner does, before it unlocks the file
            (tmp_path / ".calque-out.lock").unlink()
        lock_file(handle, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with lock_output(tmp_path / "out"):
        assert len(opened) == 2
        monkeypatch.undo()
        with pytest.raises(InputError, match="is writing here"):
            lock_output(tmp_path / "out").__enter__()


def test_a_lock_without_a_name_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, waits = locks._open_locked(tmp_path / ".calque-out.lock")[0], list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.close(handle)

    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(InputError, match="another process is writing here"):
        lock_output(tmp_path / "out").__enter__()
    waits.clear()
    monkeypatch.setattr(time, "sleep", wait)
    with lock_output(tmp_path / "out"):
        assert len(waits) == 3


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    left = tmp_path / ".calque-12345678.partial"
    left.touch()  # perhaps of a living process
    monkeypatch.setattr(fcntl, "flock", fail)
    with lock_output(tmp_path / "out"), lock_output(tmp_path / "out"):
        pass
    with write_atomically(tmp_path / "out") as stream:
        stream.write("text")
    assert names(tmp_path) == [left.name, "out"]


@pytest.mark.parametrize("place", ["absent/out", "file/out", "link", "x" * 250])
def test_impossible_locks_name_the_output(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / ".calque-link.lock").symlink_to("file")
    with pytest.raises(InputError, match=rf"{place}: .*"):
        lock_output(tmp_path / place).__enter__()


def test_a_full_disk_does_not_hide_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    monkeypatch.setattr(locks, "N_ATTEMPTS", 1)
    with lock_output(tmp_path / "out"), pytest.raises(InputError, match="another process"):
        lock_output(tmp_path / "out").__enter__()


def test_drafts_of_killed_processes_are_removed(tmp_path: Path) -> None:
    kill_within(lambda: write_atomically(tmp_path / "killed"), tmp_path)
    assert len(names(tmp_path)) == 1
    with write_atomically(tmp_path / "out") as first:
        first.write("text")
        [draft] = names(tmp_path)
        with write_atomically(tmp_path / "other"):
            assert draft in names(tmp_path)
    assert names(tmp_path) == ["other", "out"]
    assert (tmp_path / "out").read_text() == "text"


def test_a_draft_that_is_removed_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_file, n_calls = fcntl.flock, 0

    def interfere(handle: int, operation: int) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:
            raise BlockingIOError(errno.EAGAIN, "another process removes it")
        if n_calls == 2:
            for path in tmp_path.iterdir():
                path.unlink()
        lock_file(handle, operation)

    monkeypatch.setattr(fcntl, "flock", interfere)
    with create_draft(tmp_path) as draft:
        assert names(tmp_path) == [Path(draft.name).name]


def make_folder(path: Path, content: str) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").write_text(content)


def test_folders_of_killed_processes_are_settled(tmp_path: Path) -> None:
    for name in (".calque-a.partial", ".calque-b.deleted", "d", ".calque-d.replaced"):
        make_folder(tmp_path / name, name)
    make_folder(tmp_path / ".calque-c.v2.replaced", "c")  # killed before the new one came
    make_folder(tmp_path / ".calque-foreign", "not of this kind")
    with lock_output(tmp_path / "e"):
        make_folder(tmp_path / ".calque-e.partial", "being written")
        write_folder(tmp_path / "f", lambda draft: None)
        assert (tmp_path / ".calque-e.partial" / "inner" / "file").exists()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".calque-foreign", "c.v2", "d", "f"]
    assert (tmp_path / "c.v2" / "inner" / "file").read_text() == "c"
    assert (tmp_path / "d" / "inner" / "file").read_text() == "d"


def test_nothing_is_left_at_a_forced_end(tmp_path: Path) -> None:
    def write(draft: Path) -> None:
        with write_atomically(tmp_path / "file"):
            assert len(names(tmp_path)) == 3
            remove_unfinished()
            assert names(tmp_path) == []
            (tmp_path / ".calque-folder.partial").mkdir()
            raise InterruptedError

    with pytest.raises(InputError):
        write_folder(tmp_path / "folder", write)


def test_lock_files_are_for_all_users_that_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with lock_output(tmp_path / "out"):
            mode = (tmp_path / ".calque-out.lock").stat().st_mode
    finally:
        os.umask(before)
    assert stat.S_IMODE(mode) == 0o664
