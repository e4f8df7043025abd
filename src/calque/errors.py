"""Errors for users: one line with the place, the problem and the fix."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable

# Longest text of a part of a message; input that is quoted in it may be megabytes long.
MAX_CHARACTERS = 500
# Line ends, terminal escapes, marks that reorder text, and bytes that are not UTF-8.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# System errors that are not defects, and what users can do about them.
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
FIXES: dict[int | None, str] = {
    **dict.fromkeys(DISK_FULL, "free some space or choose another output"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check the permissions"),
    errno.ENOENT: "check the path",
    errno.EEXIST: "choose another path",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EISDIR: "pass the path of a file",
    errno.EBADF: "do not close the standard streams",
    errno.ELOOP: "a symbolic link leads to itself",
    errno.ENAMETOOLONG: "choose a shorter name",
}


class InputError(ValueError):
    """Invalid input: one line that names the file and line, what is wrong, and how to fix it.

    The command line prints it without a traceback and exits with code 2.

    Args:
        problem: What is wrong.
        file: The file or folder, if there is one.
        line: The line number, counted from 1.
        fix: How to fix it.

    Examples:
        >>> print(InputError("the line has no tab", file="a.tsv", line=7, fix="write a TAB b"))
        a.tsv, line 7: the line has no tab (write a TAB b)
    """

    def __init__(
        self, problem: str, *, file: object = None, line: int | None = None, fix: str | None = None
    ) -> None:
        self.problem, self.file, self.line, self.fix = problem, file, line, fix
        place = "" if file is None else printable(file)
        place += "" if line is None else f", line {line}"
        text = f"{place}: {printable(problem)}" if place else printable(problem)
        super().__init__(text + (f" ({printable(fix)})" if fix else ""))


def printable(text: object, limit: int | None = MAX_CHARACTERS) -> str:
    r"""Return text as one line for people: control characters are escaped, long text is shortened.

    >>> print(printable("a\x1b[31m"))
    a\x1b[31m
    """
    line = UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def explain_os_error(error: OSError, file: object, *, fix: str | None = None) -> InputError:
    """Return an InputError for a system error, which names the file and the fix."""
    problem = (error.strerror or str(error)).lower()
    return InputError(problem, file=file, fix=fix or FIXES.get(error.errno))


def first_line(error: BaseException) -> str:
    """Return the first line of an error that is not empty, or the name of its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


class MissingExtra(InputError):
    """An optional dependency is missing; the message names the extra that installs it.

    Args:
        package: Name of the dependency.
        extra: The extra of Calque that installs it.
        limits: Where the dependency cannot be installed, and what to do there.
    """

    def __init__(self, package: str, extra: str, limits: str = "") -> None:
        fix = f"pip install 'calque[{extra}]'{limits}"
        super().__init__(f"{package} is not installed", fix=fix)


def check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    """Raise InputError if the value of an option is neither None nor one of its choices."""
    choices = tuple(choices)
    if value is not None and value not in choices:
        raise InputError(
            f"{option} {value} does not exist", fix=f"choose from: {', '.join(choices)}"
        )
