"""Speed and memory of `calque serve`: latency, throughput, errors, memory and the page.

    python benchmarks/serving.py [--clients 50] [--seconds 60] [--memory-requests 10000]
    python benchmarks/serving.py --tiny

The server is a process of its own on a free port of this computer. Every request to /align has one
pair of 20 words on each side, and no two pairs are alike. The clients share the cores with the
server, so the CPU time of the server is shown, too. The limit is the speed of the model alone: the
same pairs in full batches on all cores of this process, before the server starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from itertools import count, islice
from pathlib import Path

N_WORDS = 20
N_WARM = 20
EXPECTED = {200, 429, 503}
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Measured:
    """Answers by status, and the seconds that the successful ones took."""

    codes: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wall: float = 0.0
    cpu: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.wall

    def quantile(self, share: float) -> float:
        """Return a quantile of the latency in milliseconds."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def row(self, name: str) -> str:
        codes = ", ".join(f"{code}: {n:,}" for code, n in sorted(self.codes.items()))
        cpu = 1000 * self.cpu / max(1, len(self.seconds))
        return (
            f"| {name} | {self.quantile(0.5):.1f} | {self.quantile(0.95):.1f} | {self.rate:.1f} "
            f"| {cpu:.1f} | {codes} |"
        )


@dataclass
class RunningServer:
    """The process and port of the server."""

    process: subprocess.Popen[str]
    port: int

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory(self) -> float:
        """Return the resident memory in MiB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024


@contextmanager
def start_server() -> Iterator[RunningServer]:
    """Start the server on a free port, and end it after the block."""
    command = [sys.executable, "-m", "calque", "serve", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        if not line.startswith("http://"):
            sys.exit(f"the server did not start: {line}{process.stderr.read()}")
        yield RunningServer(process, int(line.split()[0].rpartition(":")[2]))
        process.send_signal(signal.SIGTERM)
        if process.wait(20) != 128 + signal.SIGTERM:
            sys.exit(f"the server ended with code {process.returncode}")
    finally:
        process.kill()
        process.communicate()


def make_pairs() -> Iterator[tuple[list[str], list[str]]]:
    """Return pairs of 20 words on both sides, no two of which are alike."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines() if line.startswith("de\t")]
    english, german = (" ".join(row[side] for row in rows).split() for side in (1, 2))
    for number in count():
        start, shift = number % len(german), number // len(german)
        src = [german[(start + k) % len(german)] for k in range(N_WORDS)]
        tgt = [english[(start + shift + k) % len(english)] for k in range(N_WORDS)]
        yield src, tgt


def make_bodies() -> Iterator[bytes]:
    """Return bodies of /align with one pair each."""
    for src, tgt in make_pairs():
        pair = {"src": " ".join(src), "tgt": " ".join(tgt)}
        yield json.dumps({"pairs": [pair], "tokenize": False}).encode()


def measure_limit(n_pairs: int) -> tuple[float, float]:
    """Return pairs per second and CPU ms per pair of the model without a server, best of three."""
    import torch

    import calque
    from calque.server.loaded_model import AlignJob, LoadedModel, ModelCores

    model = calque.load(device="cpu")
    loaded = LoadedModel("calque-mini", model, ModelCores(torch.device("cpu")))
    pairs = list(islice(make_pairs(), n_pairs))
    loaded.align([AlignJob(pairs[:N_WARM], loaded.settings)])
    walls, cpus = [], []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        loaded.align([AlignJob(pairs, loaded.settings)])
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return n_pairs / min(walls), 1000 * min(cpus) / n_pairs


class Client:
    """A keep-alive connection, with as little work as possible."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: bytes = b"", more: str = "") -> int:
        """Send a request and return its status; 0 for a broken connection."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        try:
            writer.write(f"{head}\r\n".encode() + body)
            self.head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(self.head.partition("content-length: ")[2].partition("\r\n")[0])
            self.body = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            await self.close()
            return 0
        return int(self.head.split(maxsplit=2)[1])

    async def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()
            self.streams = None


async def load(
    server: RunningServer, n_clients: int, *, seconds: float = 1e9, n_requests: int = 10**9
) -> Measured:
    """Let clients send one request after the other, for some time or for some requests."""
    measured, bodies = Measured(), make_bodies()
    end, left = time.perf_counter() + seconds, iter(range(n_requests))

    async def work() -> None:
        client = Client(server.port)
        while time.perf_counter() < end and next(left, None) is not None:
            started = time.perf_counter()
            status = await client.send("POST", "/align", next(bodies))
            measured.codes[status] += 1
            if status == 200:
                measured.seconds.append(time.perf_counter() - started)
            elif status in (429, 503):
                await asyncio.sleep(0.2)
        await client.close()

    cpu, begin = server.cpu_seconds(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(n_clients)))
    measured.wall, measured.cpu = time.perf_counter() - begin, server.cpu_seconds() - cpu
    return measured


async def measure_page(server: RunningServer) -> tuple[float, int, int]:
    """Return the median time to the first byte in ms, and bytes and number of the page's files."""
    from calque.server.folder_files import list_files
    from calque.server.page_files import FOLDER

    times = []
    for _ in range(20):
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip\r\n\r\n")
        await reader.readexactly(1)
        times.append(1000 * (time.perf_counter() - started))
        writer.close()
    client, weight = Client(server.port), 0
    names = list(list_files(FOLDER, lambda name: True))
    for name in names:
        if await client.send("GET", f"/page/{name}", more="Accept-Encoding: gzip\r\n") == 200:
            weight += len(client.head) + len(client.body)
    await client.close()
    return statistics.median(times), weight, len(names)


async def measure_memory(server: RunningServer, n_requests: int, n_clients: int) -> list[float]:
    """Return the memory of the server in MiB after every tenth of the requests."""
    memory = [server.memory()]
    for _ in range(10):
        await load(server, n_clients, n_requests=n_requests // 10)
        memory.append(server.memory())
    return memory


async def measure(options: argparse.Namespace) -> None:
    limit, limit_cpu = measure_limit(options.limit_pairs)
    with start_server() as server:
        await load(server, 1, n_requests=N_WARM)
        alone = await load(server, 1, n_requests=options.requests)
        together = await load(server, options.clients, seconds=options.seconds)
        print("| clients | p50 ms | p95 ms | requests/s | server CPU ms per request | answers |")
        print("|---|---|---|---|---|---|")
        print(alone.row("1"))
        print(together.row(str(options.clients)))
        print(f"\nthroughput: {together.rate / alone.rate:.2f} times one at a time")
        print(f"the model without a server: {limit:.1f} pairs/s, {limit_cpu:.1f} ms CPU per pair")
        print(f"the server reaches {together.rate / limit:.0%} of that")
        unexpected = {code for code in alone.codes + together.codes if code not in EXPECTED}
        memory = await measure_memory(server, options.memory_requests, options.clients)
        shown = ", ".join(f"{each:.0f}" for each in memory)
        print(f"memory over {options.memory_requests:,} requests: {shown} MiB")
        first, weight, n_files = await measure_page(server)
        print(f"page: first byte after {first:.1f} ms, {n_files} files, {weight / 1000:.0f} kB")
    if unexpected:
        sys.exit(f"unexpected answers: {sorted(unexpected)}")


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="requests one at a time")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all clients together")
    parser.add_argument("--memory-requests", type=int, default=10_000)
    parser.add_argument("--limit-pairs", type=int, default=1_000, help="pairs without a server")
    parser.add_argument("--tiny", action="store_true", help="a few requests")
    options = parser.parse_args()
    if options.tiny:
        options.requests, options.clients, options.seconds = 5, 8, 2.0
        options.memory_requests, options.limit_pairs = 40, 20
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
