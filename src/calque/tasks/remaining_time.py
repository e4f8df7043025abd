"""How long a grid will take yet, from what its cells have taken so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

SecondsByKind = Mapping[str, Sequence[float]]


class Clock:
    """Remembers the seconds of finished cells by task, and guesses those of the others.

    A task that none is known of is taken for a mean one; with nothing known, nothing is said.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def note(self, task: str, seconds: float) -> None:
        """Take down how long a cell took."""
        self._seconds[task].append(seconds)

    def estimate(
        self, pending: Sequence[str], running: Sequence[tuple[str, float]], n_jobs: int
    ) -> float | None:
        """Give the seconds left: `pending` are tasks, `running` those with their seconds so far.

        >>> clock = Clock()
        >>> clock.note("pos", 10.0)
        >>> clock.estimate(["pos", "pos"], [("pos", 4.0)], n_jobs=2)
        13.0
        """
        if not self._seconds:
            return None
        rest = [max(0.0, self._guess(task) - so_far) for task, so_far in running]
        work = sum(map(self._guess, pending)) + sum(rest)
        # The last cell may have to be waited for alone.
        return max([work / max(1, n_jobs), *rest])

    def _guess(self, task: str) -> float:
        known = self._seconds.get(task)
        if known:
            return sum(known) / len(known)
        means = [sum(seconds) / len(seconds) for seconds in self._seconds.values()]
        return sum(means) / len(means)


def show_duration(seconds: float) -> str:
    """Say a time in words short enough for a line.

    >>> show_duration(7.4), show_duration(150), show_duration(3 * 3600 + 120)
    ('7 s', '2 min 30 s', '3 h 2 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
