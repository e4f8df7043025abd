"""A queue that lets concurrent requests share batches of the encoder.

One thread uses the models. It takes the first job, waits a few milliseconds for others, and
computes all jobs of one kind together. While it computes, further jobs gather for the next batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")

WAIT_SECONDS = 0.004
MAX_JOBS = 256
# Characters of text that are computed together. On a CPU more would not be faster: a part of the
# requests is better read and answered while the others are computed.
MAX_BATCH_SIZE = {"cpu": 4_096, "cuda": 1 << 16}
JOIN_SECONDS = 3.0


class QueueFull(Exception):
    """There are too many jobs, or the server is stopping."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A payload for a function that computes several payloads at once."""

    compute: Callable[[Sequence[Any]], Sequence[Any]]
    payload: Any
    size: int
    arrived: float
    result: Future[Any] = field(default_factory=Future)


class BatchQueue:
    """Computes jobs in one thread, those of the same function together, in the order of arrival.

    Args:
        wait_seconds: Longest time that the first job waits for others.
        max_jobs: Number of waiting jobs beyond which a new one is rejected.
        max_batch_size: Total size of the jobs that are computed together; a single job may be
            larger.
    """

    def __init__(
        self,
        *,
        wait_seconds: float = WAIT_SECONDS,
        max_jobs: int = MAX_JOBS,
        max_batch_size: int = MAX_BATCH_SIZE["cpu"],
    ) -> None:
        self._wait_seconds, self._max_jobs = wait_seconds, max_jobs
        self._max_batch_size = max_batch_size
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    async def compute(
        self,
        function: Callable[[Sequence[PayloadT]], Sequence[ResultT]],
        payload: PayloadT,
        size: int = 1,
        *,
        seconds: float | None = None,
        late: str = "the model is busy with other requests",
    ) -> ResultT:
        """Return the function's result for one payload, computed together with others.

        A canceled call costs nothing if its job has not begun. QueueFull is raised if too many jobs
        are waiting or, with the text `late`, if the result is not there after some seconds.
        """
        job = asyncio.wrap_future(self.submit(function, payload, size))
        try:
            return await asyncio.wait_for(job, seconds)
        except TimeoutError:
            raise QueueFull(late) from None

    def submit(
        self,
        function: Callable[[Sequence[PayloadT]], Sequence[ResultT]],
        payload: PayloadT,
        size: int = 1,
    ) -> Future[ResultT]:
        """Add a job and return its future result."""
        job = _Job(function, payload, size, time.monotonic())
        with self._changed:
            if not self._is_open:
                raise QueueFull("the server is stopping")
            if len(self._jobs) >= self._max_jobs:
                raise QueueFull("too many requests are waiting")
            self._jobs.append(job)
            self._changed.notify()
        return job.result

    def close(self) -> None:
        """Reject the waiting jobs and all further ones, and wait a little for the current batch."""
        with self._changed:
            self._is_open = False
            jobs = list(self._jobs)
            self._jobs.clear()
            self._changed.notify()
        for job in jobs:
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(QueueFull("the server is stopping"))
        self._thread.join(JOIN_SECONDS)

    def _work(self) -> None:
        while jobs := self._take():
            groups: dict[Callable[[Sequence[Any]], Sequence[Any]], list[_Job]] = {}
            for job in jobs:
                groups.setdefault(job.compute, []).append(job)
            for function, group in groups.items():
                _run(function, [job for job in group if job.result.set_running_or_notify_cancel()])

    def _take(self) -> list[_Job]:
        """Wait for jobs and remove the next batch from the queue; an empty one means the end."""
        with self._changed:
            while not self._jobs and self._is_open:
                self._changed.wait()
            while self._jobs and sum(job.size for job in self._jobs) < self._max_batch_size:
                seconds = self._jobs[0].arrived + self._wait_seconds - time.monotonic()
                if seconds <= 0 or not self._is_open:
                    break
                self._changed.wait(seconds)
            batch: list[_Job] = []
            size = 0
            while self._jobs and (not batch or size + self._jobs[0].size <= self._max_batch_size):
                batch.append(self._jobs.popleft())
                size += batch[-1].size
            return batch if batch or not self._is_open else self._take()


def _run(function: Callable[[Sequence[Any]], Sequence[Any]], jobs: Sequence[_Job]) -> None:
    """Compute jobs together; if that fails, one by one, so that a bad one fails alone."""
    if not jobs:
        return
    try:
        results = function([job.payload for job in jobs])
    except Exception as error:  # noqa: BLE001 (it belongs to the request, not to this thread)
        if len(jobs) == 1:
            jobs[0].result.set_exception(error)
            return
        for job in jobs:
            _run(function, [job])
        return
    for job, result in zip(jobs, results, strict=True):
        job.result.set_result(result)
