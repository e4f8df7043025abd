"""Limits on requests, headers of all responses, and names that must not become paths."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.server.conftest import CallServer, make_call

from calque.server.limits import HEADERS, RequestGuard, RequestLimits
from calque.server.routes import build_server
from calque.server.served_data import ServedData

PAIR = {"src": "das Haus", "tgt": "the house"}
LONG = {"src": "a " * 600, "tgt": "b " * 600}
TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("status", "method", "path", "options"),
    [
        (200, "GET", "/health", {}),
        (200, "GET", "/", {}),
        (404, "GET", "/nothing", {}),
        (405, "DELETE", "/health", {"headers": {"content-type": "application/json"}}),
        (415, "POST", "/align", {"data": {"pairs": "x"}}),
        (415, "POST", "/align", {"content": b"{}"}),
        (415, "POST", "/align", {"content": b"{}", "headers": {"content-type": "text/plain"}}),
        (400, "POST", "/align", {"content": b"{", "headers": {"content-type": "application/json"}}),
        (422, "POST", "/align", {"json": {}}),
        (422, "POST", "/align", {"json": {"pairs": []}}),
        (422, "POST", "/align", {"json": {"pairs": [PAIR], "layer": 99}}),
        (422, "POST", "/align", {"json": {"pairs": [PAIR], "method": "magic"}}),
        (422, "POST", "/align", {"json": {"pairs": [PAIR], "model": "../other"}}),
        (422, "POST", "/align", {"json": {"pairs": [PAIR], "unknown": 1}}),
        (422, "POST", "/align", {"json": {"pairs": [PAIR] * 201}}),
        (422, "POST", "/embed", {"json": {"texts": ["a" * 5_001]}}),
        (413, "POST", "/embed", {"json": {"texts": ["a" * 5_000] * 11}}),
        (413, "POST", "/embed", {"json": {"texts": ["a" * (1 << 20)]}}),
        (413, "POST", "/align", {"json": {"pairs": [LONG], "matrix": True}}),
        (200, "POST", "/align", {"json": {"pairs": [LONG]}}),
        (422, "POST", "/search", {"json": {"text": "a", "languages": ["xx"]}}),
        (422, "GET", "/lexicon", {}),
        (422, "GET", "/runs/first?after=x", {}),
    ],
)
def test_status_and_headers(
    call: CallServer, status: int, method: str, path: str, options: dict[str, Any]
) -> None:
    reply = call(method, path, **options)
    assert reply.status_code == status, reply.text
    for name, value in HEADERS.items():
        assert reply.headers[name] == value
    assert "access-control-allow-origin" not in reply.headers
    if status >= 400:
        assert list(reply.json()) == ["error"] and "\n" not in reply.json()["error"]


def test_policy_forbids_everything_from_elsewhere() -> None:
    rules = dict(
        rule.strip().split(" ", 1) for rule in HEADERS["content-security-policy"].split(";")
    )
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in HEADERS["content-security-policy"]


@pytest.mark.parametrize("text", ["\x1b[31m", "a\nb", "\u202e", "\ud800"])
def test_errors_show_no_control_characters(call: CallServer, text: str) -> None:
    body = json.dumps({"pairs": [PAIR], "model": text}).encode()
    reply = call("POST", "/align", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 422
    assert reply.json()["error"].isprintable()


@pytest.mark.parametrize("text", ["\ud800", "a\x00b", "\x1b[2J", "<img src=x onerror=alert(1)>"])
def test_strange_text_is_only_text(call: CallServer, text: str) -> None:
    for path, body in (
        ("/align", {"pairs": [{"src": text, "tgt": "the house"}]}),
        ("/embed", {"texts": [text]}),
        ("/search", {"text": text}),
        ("/attention", {"src": text, "tgt": "the house"}),
    ):
        reply = call(
            "POST", path, content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert reply.status_code in (200, 422), (path, reply.text)
        assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "name",
    [
        "../limits.py",
        "..%2flimits.py",
        "%2e%2e/limits.py",
        "views/../../limits.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "main.js%00",
        "..\\limits.py",
        "%2e",
        "%2e%2e",
        "views",
        "a" * 5000,
    ],
)
@pytest.mark.parametrize("folder", ["/page/", "/runs/", "/results/plots/"])
def test_names_never_become_paths(call: CallServer, folder: str, name: str) -> None:
    reply = call("GET", folder + name)
    assert reply.status_code == 404, reply.text


def test_links_out_of_a_folder_are_not_followed(call: CallServer) -> None:
    assert [run["name"] for run in call("GET", "/runs").json()] == ["first"]
    for name in ("linked", "file", "../secret"):
        assert call("GET", f"/runs/{name}").status_code == 404
    assert call("GET", "/lexicon?word=secret&language=xx").status_code == 422
    assert "xx" not in call("GET", "/health").json()["vector_languages"]


def test_token(served_data: ServedData) -> None:
    call = make_call(build_server(served_data, RequestLimits(token=TOKEN)))
    for path in ("/", "/health", "/page/main.js"):
        assert call("GET", path).status_code == 200
    for path in ("/runs", "/openapi.json", "/nothing", "/results"):
        reply = call("GET", path)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
    for header in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN):
        assert call("GET", "/runs", headers={"authorization": header}).status_code == 401, header
    for header in (f"Bearer {TOKEN}", f"bearer {TOKEN}"):
        assert call("GET", "/runs", headers={"authorization": header}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("LOCALHOST", 200),
        ("evil.example", 400),
        ("localhost.evil.example", 400),
        ("127.0.0.1.evil.example:8000", 400),
        ("", 400),
        ("[::1", 400),
    ],
)
def test_only_own_names(served_data: ServedData, host: str, status: int) -> None:
    from calque.server.serve import LOOPBACK_NAMES

    call = make_call(build_server(served_data, RequestLimits(hosts=LOOPBACK_NAMES)))
    assert call("GET", "/health", headers={"host": host}).status_code == status


class SlowApp:
    """An application that answers when it is told to."""

    def __init__(self) -> None:
        self.n_started = self.n_canceled = 0
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.n_started += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.n_canceled += 1
            raise
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def scope(method: str = "GET", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": method, "path": "/health", "headers": pairs}


class Exchange:
    """One request whose messages the test sends, and the status of its response."""

    def __init__(self, guard: RequestGuard, request: dict[str, Any], *messages: dict[str, Any]):
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for message in messages:
            self.incoming.put_nowait(message)
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.task = asyncio.ensure_future(guard(request, self.incoming.get, self.send))

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])


WHOLE = {"type": "http.request", "body": b"", "more_body": False}
PART = {"type": "http.request", "body": b"x", "more_body": True}
GONE = {"type": "http.disconnect"}


def test_requests_at_once() -> None:
    async def run() -> None:
        app = SlowApp()
        guard = RequestGuard(app, RequestLimits(max_requests=2))
        first = [Exchange(guard, scope(), WHOLE) for _ in range(2)]
        await asyncio.sleep(0.05)
        third = Exchange(guard, scope(), WHOLE)
        await third.task
        assert third.status == 429 and third.headers[b"retry-after"] == b"1"
        app.go_on.set()
        for exchange in first:
            await exchange.task
            assert exchange.status == 200
        last = Exchange(guard, scope(), WHOLE)
        await last.task
        assert last.status == 200

    asyncio.run(run())


def test_a_client_that_is_gone_costs_nothing_more() -> None:
    async def run() -> None:
        app = SlowApp()
        guard = RequestGuard(app, RequestLimits(max_requests=1))
        exchange = Exchange(guard, scope(), WHOLE)
        await asyncio.sleep(0.05)
        exchange.incoming.put_nowait(GONE)
        await asyncio.wait_for(exchange.task, 10)
        assert (app.n_started, app.n_canceled, exchange.status) == (1, 1, 0)
        early = Exchange(guard, scope("POST", content_type="application/json"), PART, GONE)
        await asyncio.wait_for(early.task, 10)
        assert app.n_started == 1

    asyncio.run(run())


def test_a_request_that_is_canceled_gets_503() -> None:
    async def run() -> None:
        exchange = Exchange(RequestGuard(SlowApp(), RequestLimits()), scope(), WHOLE)
        await asyncio.sleep(0.05)
        exchange.task.cancel()  # as uvicorn does when it stops
        await asyncio.wait_for(exchange.task, 10)
        assert exchange.status == 503

    asyncio.run(run())


def test_a_slow_body_times_out() -> None:
    async def run() -> None:
        guard = RequestGuard(SlowApp(), RequestLimits(body_seconds=0.1))
        exchange = Exchange(guard, scope("POST", content_type="application/json"), PART)
        await asyncio.wait_for(exchange.task, 10)
        assert exchange.status == 408

    asyncio.run(run())


def test_a_large_body_is_not_read_to_its_end() -> None:
    async def run() -> None:
        limits = RequestLimits(max_bytes=2)
        post = scope("POST", content_type="application/json")
        exchange = Exchange(RequestGuard(SlowApp(), limits), post, PART, PART, PART, PART)
        await asyncio.wait_for(exchange.task, 10)
        assert exchange.status == 413 and exchange.incoming.qsize() == 1
        announced = scope("POST", content_type="application/json", content_length="3")
        exchange = Exchange(RequestGuard(SlowApp(), limits), announced)
        await asyncio.wait_for(exchange.task, 10)
        assert exchange.status == 413

    asyncio.run(run())
