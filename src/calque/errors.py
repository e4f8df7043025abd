"""Errors for users: one line with the place, the problem and the fix."""

from __future__ import annotations

from collections.abc import Iterable


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
        place = "" if file is None else f"{file}: " if line is None else f"{file}, line {line}: "
        super().__init__(place + problem + (f" ({fix})" if fix else ""))


def first_line(error: Exception) -> str:
    """Return the first line of an error that is not empty, or the name of its type."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


class MissingExtra(InputError):
    """An optional dependency is missing; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", fix=f"pip install 'calque[{extra}]'")


def check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    """Raise InputError if the value of an option is neither None nor one of its choices."""
    choices = tuple(choices)
    if value is not None and value not in choices:
        raise InputError(
            f"{option} {value} does not exist", fix=f"choose from: {', '.join(choices)}"
        )
