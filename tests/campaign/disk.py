"""Outputs on a disk that is too small: one clear line, and a good result when there is space."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from random import Random

from tests.campaign.disturbed import SECONDS, find_expected, finish, lay_out, start_or_resume
from tests.campaign.outcomes import (
    Attempt,
    Outcome,
    judge_end,
    judge_litter,
    judge_orphans,
    last_line,
)
from tests.campaign.tables import COMMANDS, Command

NEW_USER, NEW_MOUNTS, PRIVATE, RECURSIVE, REMOUNT = 0x10000000, 0x20000, 1 << 18, 1 << 14, 32
ENOUGH = "size=64m"


def plan(inputs: Path, count: int) -> Iterable[Attempt]:
    """Return so many runs, spread evenly over the commands; none where nothing can be mounted."""
    pid = os.fork()
    if not pid:
        os._exit(int(_unshare() != ""))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        print("disk: skipped, because this user cannot mount a file system")
        return
    for number in range(count):
        command = COMMANDS[number % len(COMMANDS)]
        yield Attempt("disk", command.name, number, partial(_try, command, inputs))


def _try(command: Command, inputs: Path, folder: Path, rng: Random) -> Outcome:
    assert not _unshare(), "mount namespaces are not available"
    lay_out(inputs, folder)
    outcome, disk = Outcome(), folder / "out"
    n_bytes = _find_peak(command, inputs)
    size = max(1, int(n_bytes * rng.uniform(0.0, 0.95)) // 4096) * 4096
    _mount(disk, f"size={size}")
    try:
        child = start_or_resume(command, folder, SECONDS)
        if not child.ends_within(SECONDS):
            outcome.add("hang", f"not ended after {SECONDS:g} s")
            child.end()
        else:
            judge_end(child, outcome)
            judge_orphans(child, outcome)
            judge_litter([disk, folder / "tmp"], outcome)
            if child.code == 2 and "out/" not in last_line(child.stderr):
                outcome.add("wrong exit", f"names no file: {last_line(child.stderr)}")
        _mount(disk, ENOUGH, REMOUNT)
        finish(command, inputs, folder, outcome)
    finally:
        _call("umount2", os.fsencode(disk), 2)
    if not outcome.is_good:
        outcome.details.append(f"{command.arguments} on a disk of {size:,} bytes of {n_bytes:,}")
    return outcome


@cache
def _find_peak(command: Command, inputs: Path) -> int:
    """Return about how many bytes a disk must have; checkpoints are removed along the way."""
    find_expected(command, inputs)
    folder = inputs.parent / f"peak-{os.getpid()}-{COMMANDS.index(command)}"
    folder.mkdir()
    lay_out(inputs, folder)
    _mount(folder / "out", ENOUGH)
    try:
        peak, child = 0, None
        child = start_or_resume(command, folder, 0)
        while not child.wait(0.01):
            space = os.statvfs(folder / "out")
            peak = max(peak, (space.f_blocks - space.f_bfree) * space.f_frsize)
        space = os.statvfs(folder / "out")
        return max(peak, (space.f_blocks - space.f_bfree) * space.f_frsize)
    finally:
        _call("umount2", os.fsencode(folder / "out"), 2)


@cache
def _unshare() -> str:
    """Give this process its own mounts; return the reason if that is not allowed."""
    flags = NEW_MOUNTS if os.geteuid() == 0 else NEW_MOUNTS | NEW_USER
    try:
        _call("unshare", flags)
        _call("mount", b"none", b"/", None, PRIVATE | RECURSIVE, None)
    except OSError as error:
        return str(error)
    return ""


def _mount(folder: Path, options: str, flags: int = 0) -> None:
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode())


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if getattr(libc, name)(*converted):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
