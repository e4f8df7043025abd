"""Locks, so that only one process at a time writes an output."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from calque.errors import InputError

# Error codes of file systems without locks; there, nothing is locked.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def lock_output(output: Path, lock: Path | None = None) -> Iterator[None]:
    """Be the only process that writes an output while the block runs.

    The lock is a file that names the process. The system releases it when the process ends in any
    way, so the file of a killed process blocks nobody. It is removed in the end.

    Args:
        output: The file or folder, which need not exist, for the message.
        lock: The lock file, in an existing folder. Default: `.NAME.lock` beside the output.

    Raises:
        InputError: Another process holds the lock.
    """
    lock = output.with_name(f".{output.name}.lock") if lock is None else lock
    handle = _open_locked(lock, output)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # while it is locked: nobody else can hold it
        os.close(handle)


def _open_locked(lock: Path, output: Path) -> int:
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise InputError(problem, file=lock, fix="choose another output") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            fix = "wait until it ends, stop it, or choose another output"
            raise InputError(f"{owner} is writing here", file=output, fix=fix) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(handle)
                raise
        if _is_file_of(handle, lock):
            return handle
        os.close(handle)  # the previous owner removed the file after it was opened here


def _is_file_of(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
