"""The server as a process: signals, slow clients, ports, and many clients at once."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from calque.errors import InputError
from calque.io.processes import STOP_SIGNALS
from calque.server.limits import HEADERS
from calque.server.serve import check_address, open_listener

# An application without a model behind the real HTTP server and the signals of the command line.
# A request to /slow takes a second, one to /stuck does not end by itself.
PROGRAM = """
import asyncio, socket, sys
from calque.cli import app, main
from calque.server import http_server

http_server.HEADER_SECONDS = 1.0
stopping = []

async def answer(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive(); await send({"type": "lifespan.startup.complete"})
        await receive(); await send({"type": "lifespan.shutdown.complete"})
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(1)
    while scope["path"] == "/stuck":
        await asyncio.sleep(1)
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})

def models():
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    http_server.run_server(answer, listener, stop=lambda: stopping.append(1))

app.COMMANDS["models"] = models
sys.argv = ["calque", "models"]
main()
"""
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def start() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def send(port: int, path: bytes = b"/", data: bytes | None = None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(GET % path if data is None else data)
    return connection


def is_answered(connection: socket.socket) -> bool:
    """Read an answer; its head and body may come apart."""
    found = b""
    while not found.endswith(b"ok") and (more := connection.recv(1000)):
        found += more
    return found.startswith(b"HTTP/1.1 200") and found.endswith(b"ok")


@pytest.mark.parametrize("kind", STOP_SIGNALS)
def test_signals_end_the_server_after_the_requests_under_way(kind: signal.Signals) -> None:
    with start() as (process, port):
        idle = send(port)
        assert is_answered(idle)
        slow, stuck = send(port, b"/slow"), send(port, b"/stuck")
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(kind)
        assert is_answered(slow)
        assert process.wait(30) == 128 + kind
        # The stuck request is given up before the command line would end the process by force.
        assert process.stderr is not None
        assert "calque: interrupted" in process.stderr.read()
        assert 0.5 < time.monotonic() - started < 25
        for connection in (idle, slow, stuck):
            connection.close()


def test_slow_clients_are_disconnected() -> None:
    with start() as (_, port):
        silent = socket.create_connection(("127.0.0.1", port), timeout=30)
        half = send(port, data=b"GET / HTTP/1.1\r\nHost: loc")
        kept = send(port)
        assert is_answered(kept)
        for connection in (silent, half, kept):
            with suppress(ConnectionResetError):
                assert connection.recv(1000) == b""
            connection.close()
        fresh = send(port)
        assert is_answered(fresh)
        fresh.close()


@pytest.mark.parametrize("data", [b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000])
def test_invalid_http_is_answered_like_other_errors(data: bytes) -> None:
    with start() as (_, port), send(port, data=data) as connection:
        answer = b""
        with suppress(ConnectionResetError):
            while more := connection.recv(10_000):
                answer += more
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 400")
    assert list(json.loads(body)) == ["error"]
    for name, value in HEADERS.items():
        assert f"{name}: {value}" in head


def test_many_connections_and_large_headers() -> None:
    with start() as (_, port):
        large = send(port, data=b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000)
        assert large.recv(1000).startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
        large.close()
        many = [send(port) for _ in range(100)]
        assert all(is_answered(each) for each in many)
        for each in many:
            each.close()


def test_a_port_in_use_is_one_line() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}: address already in use .*--port"):
            open_listener("127.0.0.1", port)
    with pytest.raises(InputError, match="cannot listen at"):
        open_listener("no.such.host.invalid", 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_other_addresses_need_a_token(host: str) -> None:
    with pytest.raises(InputError, match="no token is set"):
        check_address(host, None)
    assert not check_address(host, "0123456789abcdef")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_own_addresses_need_none(host: str) -> None:
    assert check_address(host, None)


@pytest.mark.parametrize("token", ["", "short", "ü" * 20])
def test_weak_tokens_are_rejected(token: str) -> None:
    with pytest.raises(InputError, match="token is shorter"):
        check_address("127.0.0.1", token)


@pytest.mark.slow
def test_many_clients_at_once() -> None:
    """The real command with calque-mini: all answers are right, and it ends with code 143."""
    script = Path(__file__).parents[2] / "benchmarks" / "serving.py"
    serving = runpy.run_path(str(script), run_name="serving")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    async def measure() -> None:
        with serving["start_server"]() as server:
            measured = await serving["load"](server, 20, n_requests=60)
            assert measured.codes == {200: 60}

    asyncio.run(measure())
