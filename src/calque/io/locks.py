"""One writer per output, and hidden files beside it that a killed writer leaves.

These belong to the process that has locked them, or the lock of the folder NAME:

    .calque-NAME.lock       names the process that writes NAME
    .calque-XXXX.partial    a file that is not complete
    .calque-NAME.partial    a folder that is not complete
    .calque-NAME.replaced   the older folder of that name, moved aside
    .calque-NAME.deleted    a folder that is being removed

The system releases a lock when its process ends in any way. What is then left is removed by the
next process that writes in the same place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from calque.errors import InputError, explain_os_error

LOCK, PARTIAL, REPLACED, DELETED = ".lock", ".partial", ".replaced", ".deleted"
HIDDEN = re.compile(r"\.calque-(.+)\.(?:lock|partial|replaced|deleted)")
# Files and folders of this process, to be removed if it must end at once.
UNFINISHED: set[Path] = set()
# Error codes of file systems without locks; there, nothing is locked.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
# A process has a lock without its name in it for a moment only.
N_ATTEMPTS, SECONDS_BETWEEN_ATTEMPTS = 10, 0.05


def hidden_path(output: Path, suffix: str) -> Path:
    """Return the path of a hidden file or folder beside an output.

    >>> hidden_path(Path("runs/first"), REPLACED).name
    '.calque-first.replaced'
    """
    return output.with_name(f".calque-{output.name}{suffix}")


@contextmanager
def lock_output(output: Path, lock: Path | None = None) -> Iterator[None]:
    """Be the only process that writes an output while the block runs.

    The file of a killed process blocks nobody. Devices, pipes and "-" are not locked.

    Args:
        output: The file or folder, which need not exist.
        lock: The lock file, in an existing folder. Default: `.calque-NAME.lock` beside the output.

    Raises:
        InputError: Another process has the lock; the message names it and its host.
    """
    is_special = output.exists() and not output.is_file() and not output.is_dir()
    if is_special or str(output) == "-":
        yield
        return
    lock = hidden_path(Path(os.path.realpath(output)), LOCK) if lock is None else lock
    try:
        remove_leftovers(lock.parent)
        handle = _open_as_owner(lock, output)
    except OSError as error:
        raise explain_os_error(error, output) from error
    UNFINISHED.add(lock)
    try:
        with suppress(OSError):  # a full disk: the lock is without a name
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        _remove_locked(lock, handle)
        UNFINISHED.discard(lock)


def create_draft(folder: Path) -> BinaryIO:
    """Create a hidden file, for content that is renamed when it is complete."""
    remove_leftovers(folder)
    while True:
        path = folder / f".calque-{secrets.token_hex(4)}{PARTIAL}"
        with suppress(BlockingIOError):  # another process takes it for a leftover
            return open(path, "wb", opener=lambda name, _: _open_locked(Path(name))[0])


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder; restore folders that they had moved aside."""
    for path in folder.glob(".calque-*"):
        found = HIDDEN.fullmatch(path.name)
        if found is None:
            continue
        is_folder = path.is_dir() and not path.is_symlink()
        lock = hidden_path(folder / found[1], LOCK) if is_folder else path
        with suppress(OSError):  # it is locked, so its process is alive, or this user may not
            handle, is_locked = _open_locked(lock)
            if not is_locked:
                os.close(handle)
                continue
            try:
                if is_folder:
                    _settle(path, folder / found[1])
            finally:
                _remove_locked(lock, handle)


def _settle(leftover: Path, final: Path) -> None:
    """Restore a folder that was moved aside and not replaced; remove any other hidden folder."""
    if leftover.suffix != REPLACED:
        shutil.rmtree(leftover)
    elif not final.exists():
        leftover.rename(final)
    else:
        remove_folder(leftover, final)


def remove_folder(folder: Path, final: Path | None = None) -> None:
    """Remove a folder; it is renamed first, so that a crash never leaves half of it visible.

    `final` is its name when it is not hidden.
    """
    deleted = hidden_path(final or folder, DELETED)
    shutil.rmtree(deleted, ignore_errors=True)
    folder.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def _open_as_owner(lock: Path, output: Path) -> int:
    for _ in range(N_ATTEMPTS):
        try:
            return _open_locked(lock)[0]
        except BlockingIOError:
            owner = _read_owner(lock)
            if owner:
                break
            time.sleep(SECONDS_BETWEEN_ATTEMPTS)
    fix = "wait until it ends, stop it, or choose another output"
    raise InputError(f"{owner or 'another process'} is writing here", file=output, fix=fix)


def _read_owner(lock: Path) -> str:
    try:
        with open(lock, "rb") as stream:
            return stream.read(200).decode(errors="replace").strip()
    except OSError:
        return ""


def _open_locked(path: Path) -> tuple[int, bool]:
    """Open and lock a file, which is created if necessary.

    Also return whether it is locked, which is not possible on some file systems.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return handle, False
            os.close(handle)
            raise
        if _is_file_of(handle, path):
            return handle, True
        os.close(handle)  # the previous owner removed the file after it was opened here


def _remove_locked(path: Path, handle: int) -> None:
    with suppress(OSError):
        path.unlink()  # while it is locked: nobody else can have it
    os.close(handle)


def _is_file_of(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
