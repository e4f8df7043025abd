"""The queue: jobs share batches, and no job can harm another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pytest
from tests.server.conftest import CallServer

from calque.server.batching import BatchQueue, QueueFull
from calque.server.loaded_model import AlignJob, EmbedJob, WordsJob
from calque.server.served_data import ServedData
from calque.word_alignment.neural import WordAligner


class Recorder:
    """Doubles numbers, and records what was computed together."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def double(self, numbers: Sequence[int]) -> list[int]:
        self.may_go_on.wait(20)
        self.batches.append(list(numbers))
        if -1 in numbers:
            raise ValueError("a bad number")
        return [2 * number for number in numbers]

    def negate(self, numbers: Sequence[int]) -> list[int]:
        self.batches.append(list(numbers))
        return [-number for number in numbers]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def queue() -> Iterator[BatchQueue]:
    queue = BatchQueue(wait_seconds=0.2, max_jobs=8, max_batch_size=4)
    yield queue
    queue.close()


def test_jobs_of_one_function_share_a_batch(queue: BatchQueue, recorder: Recorder) -> None:
    jobs = [queue.submit(recorder.double, 1), queue.submit(recorder.negate, 2)]
    jobs += [queue.submit(recorder.double, 3), queue.submit(recorder.double, 4)]
    assert [job.result(20) for job in jobs] == [2, -2, 6, 8]
    assert recorder.batches == [[1, 3, 4], [2]]


def test_batches_are_bounded_and_in_order(queue: BatchQueue, recorder: Recorder) -> None:
    recorder.may_go_on.clear()
    jobs = [queue.submit(recorder.double, number, size=2) for number in range(5)]
    jobs.append(queue.submit(recorder.double, 5, size=9))
    recorder.may_go_on.set()
    assert [job.result(20) for job in jobs] == [0, 2, 4, 6, 8, 10]
    assert recorder.batches == [[0, 1], [2, 3], [4], [5]]


def test_a_job_does_not_wait_longer_than_allowed(recorder: Recorder) -> None:
    queue = BatchQueue(wait_seconds=0.05)
    started = time.monotonic()
    assert queue.submit(recorder.double, 1).result(20) == 2
    assert 0.04 < time.monotonic() - started < 10
    queue.close()


def test_a_bad_job_fails_alone(queue: BatchQueue, recorder: Recorder) -> None:
    jobs = [queue.submit(recorder.double, number) for number in (1, -1, 2)]
    assert jobs[0].result(20) == 2 and jobs[2].result(20) == 4
    with pytest.raises(ValueError, match="a bad number"):
        jobs[1].result(20)


def test_a_full_queue_rejects_jobs(queue: BatchQueue, recorder: Recorder) -> None:
    recorder.may_go_on.clear()
    jobs = []
    with pytest.raises(QueueFull, match="too many"):
        jobs = [queue.submit(recorder.double, number) for number in range(99)]
    recorder.may_go_on.set()
    assert jobs == []


def test_a_canceled_job_is_not_computed(queue: BatchQueue, recorder: Recorder) -> None:
    recorder.may_go_on.clear()
    first = [queue.submit(recorder.double, number, size=4) for number in (1, 2)]

    async def give_up() -> None:
        job = asyncio.ensure_future(queue.compute(recorder.double, 3, 4))
        await asyncio.sleep(0.05)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(give_up())
    recorder.may_go_on.set()
    assert [job.result(20) for job in first] == [2, 4]
    assert queue.submit(recorder.double, 5).result(20) == 10
    assert recorder.batches == [[1], [2], [5]]


def test_a_result_that_takes_too_long_is_given_up(queue: BatchQueue, recorder: Recorder) -> None:
    recorder.may_go_on.clear()
    with pytest.raises(QueueFull, match="busy"):
        asyncio.run(queue.compute(recorder.double, 1, seconds=0.3))
    recorder.may_go_on.set()


def test_closing_ends_waiting_jobs(queue: BatchQueue, recorder: Recorder) -> None:
    recorder.may_go_on.clear()
    running = queue.submit(recorder.double, 1, size=4)
    time.sleep(0.1)
    waiting = queue.submit(recorder.double, 2, size=4)
    threading.Timer(0.2, recorder.may_go_on.set).start()
    queue.close()
    assert running.result(20) == 2
    with pytest.raises(QueueFull, match="stopping"):
        waiting.result(20)
    with pytest.raises(QueueFull, match="stopping"):
        queue.submit(recorder.double, 3)


def test_shared_batches_give_the_results_of_single_requests(
    call: CallServer, served_data: ServedData, demo_rows: list[tuple[str, str, str]]
) -> None:
    """Requests with different layers, methods and lengths, all at once and one by one."""
    methods = ["argmax", "itermax", "ot", "match"]
    requests: list[tuple[str, dict[str, object]]] = []
    for number, (_, english, text) in enumerate(demo_rows[::9]):
        pair = {"src": text, "tgt": english}
        body = {"pairs": [pair] * (1 + number % 3), "matrix": True, "model": "calque-mini"}
        requests.append(("/align", body | {"layer": number % 9, "method": methods[number % 4]}))
        requests.append(("/embed", {"texts": [text, english]}))
    single = [call("POST", path, json=body).json() for path, body in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        jobs = [pool.submit(call, "POST", path, json=body) for path, body in requests]
        wait(jobs)
    for expected, job in zip(single, jobs, strict=True):
        found = job.result().json()
        if "vectors" in expected:
            np.testing.assert_allclose(found["vectors"], expected["vectors"], atol=1e-5)
            continue
        for one, other in zip(expected["pairs"], found["pairs"], strict=True):
            links = [
                [(link["src"], link["tgt"]) for link in pair["links"]] for pair in (one, other)
            ]
            assert links[0] == links[1]
            np.testing.assert_allclose(other["matrix"], one["matrix"], atol=2e-4)


def test_aligned_jobs_share_the_encoder(
    served_data: ServedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = served_data.models["tiny"]
    n_sequences: list[int] = []
    forward = loaded.model.forward
    monkeypatch.setattr(
        loaded.model,
        "forward",
        lambda batch, layers: n_sequences.append(len(batch.offsets) - 1) or forward(batch, layers),
    )
    pair = (["das", "Haus"], ["the", "house"])
    jobs = [
        AlignJob([pair], loaded.choose_settings(layer, None, None), matrix=True)
        for layer in (1, 2, 3, 4)
    ]
    loaded.align(jobs)
    assert len(n_sequences) == 1


def test_links_by_subwords_and_dot_products(served_data: ServedData) -> None:
    loaded = served_data.models["tiny"]
    pair = (["Wochenendhaus", "gesehen"], ["seen", "the", "cottages"])
    plain = loaded.choose_settings(2, "ot")
    as_published = replace(plain, similarity="dot", unit="subwords", sharpness=1.0)
    jobs = [AlignJob([pair], settings, matrix=True) for settings in (plain, as_published)]
    aligner = WordAligner(loaded.model, method="ot", layer=2)
    expected = aligner.align_each([pair], [plain, as_published])
    for (found,), block in zip(loaded.align(jobs), expected, strict=True):
        assert [link[:2] for link in found.links] == block.links.to_lists()[0]
        assert found.matrix is not None and found.matrix.shape == (2, 3)


def test_words_of_several_layers_share_the_encoder(served_data: ServedData) -> None:
    loaded = served_data.models["tiny"]
    jobs = [
        WordsJob([["das", "Haus"], ["alt"]], loaded.choose_settings(3)),
        WordsJob([["the", "house"]], loaded.choose_settings(1)),
    ]
    for job, vectors in zip(jobs, loaded.embed_words(jobs), strict=True):
        (alone,) = loaded.embed_words([job])
        np.testing.assert_allclose(vectors, alone, atol=1e-5)


def test_sentences_of_several_layers_get_their_own(served_data: ServedData) -> None:
    loaded = served_data.models["tiny"]
    jobs = [EmbedJob(["das Haus", "alt"], 3), EmbedJob([], 1), EmbedJob(["the house"], 1)]
    jobs.append(EmbedJob(["ein Baum"], 3))
    for job, vectors in zip(jobs, loaded.embed(jobs), strict=True):
        expected = loaded.model.embed(job.texts, layer=job.layer)
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
