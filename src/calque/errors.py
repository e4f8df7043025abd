"""Errors that are meant for users: one line that names the place, the problem and the fix."""

from __future__ import annotations

from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: one line that names the place, what is wrong there, and the fix.

    The command line prints it without a traceback and exits with code 2.
    """

    def __init__(
        self, problem: str, *, file: object = None, line: int | None = None, fix: str | None = None
    ) -> None:
        self.problem, self.file, self.line, self.fix = problem, file, line, fix
        place = "" if file is None else f"{file}: " if line is None else f"{file}, line {line}: "
        super().__init__(place + problem + (f" ({fix})" if fix else ""))


def first_line(error: Exception) -> str:
    """Give the first line of an error that says something, or its kind: libraries write essays."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


class MissingExtra(InputError):
    """An optional dependency is absent; the message names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", fix=f"pip install 'calque[{extra}]'")


def check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    """Raise InputError if the value of an option is neither None nor one of its choices."""
    choices = tuple(choices)
    if value is not None and value not in choices:
        raise InputError(
            f"{option} {value} does not exist", fix=f"choose from: {', '.join(choices)}"
        )
