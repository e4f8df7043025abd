"""What every request must satisfy before a route sees it, and headers of every response.

The checks are: the Host header, the bearer token, the number of requests at once, the content type
and the size of the body, and the time that a client takes to send it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from calque.errors import printable

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
ENCODED_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
RETRY_SECONDS = 1
OPEN_PATHS = ("/", "/health")
OPEN_FOLDER = "/page/"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on single requests and on their number at once.

    Args:
        hosts: Names that the Host header may have, in lower case and without the port. Default:
            any.
        token: The bearer token that clients need, except for the page and /health.
        max_bytes: Largest body.
        max_requests: Number of requests that are answered at once.
        body_seconds: Time to send the body.
    """

    hosts: frozenset[str] | None = None
    token: str | None = None
    max_bytes: int = 1 << 20
    max_requests: int = 128
    body_seconds: float = 10.0


class Rejected(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, problem: str) -> None:
        super().__init__(problem)
        self.status = status


class RequestGuard:
    """ASGI middleware that applies the limits, and cancels the work for clients that are gone."""

    def __init__(self, app: AsgiApp, limits: RequestLimits) -> None:
        self._app, self._limits, self._n_requests = app, limits, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        response = GuardedResponse(send)
        if self._n_requests >= self._limits.max_requests:
            await send_error(response.send, 429, "too many requests at once")
            return
        self._n_requests += 1
        try:
            await self._answer(scope, receive, response.send)
        except asyncio.CancelledError:  # the server is stopping, and has waited for a while
            if not response.is_started:
                await send_error(response.send, 503, "the server is stopping")
        finally:
            self._n_requests -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        try:
            self._check_host(headers)
            self._check_token(scope["path"], headers)
            if scope["method"] not in ("GET", "HEAD"):
                _check_content_type(headers)
            body = await self._read_body(headers, receive)
        except Rejected as error:
            await send_error(send, error.status, str(error))
            return
        if body is not None:
            await _run_while_connected(self._app, scope, body, receive, send)

    def _check_host(self, headers: dict[str, bytes]) -> None:
        """Reject other names than the server's: a web page could point its own name here."""
        host = headers.get("host", b"").decode("latin-1").lower()
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if self._limits.hosts is not None and name not in self._limits.hosts:
            raise Rejected(400, f"this server does not have the name {printable(name, 100)!r}")

    def _check_token(self, path: str, headers: dict[str, bytes]) -> None:
        token = self._limits.token
        if token is None or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return
        kind, _, given = headers.get("authorization", b"").partition(b" ")
        is_right = hmac.compare_digest(given.strip(), token.encode())
        if kind.lower() != b"bearer" or not is_right:
            raise Rejected(401, "a bearer token is required (Authorization: Bearer TOKEN)")

    async def _read_body(self, headers: dict[str, bytes], receive: Receive) -> bytes | None:
        """Return the body, or None if the client has gone."""
        too_large = Rejected(413, f"the body is larger than {self._limits.max_bytes:,} bytes")
        length = headers.get("content-length", b"0")
        if length.isdigit() and int(length) > self._limits.max_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._limits.max_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise Rejected(408, "the body of the request did not arrive in time") from None


def _check_content_type(headers: dict[str, bytes]) -> None:
    """Require JSON: browsers do not send it to other sites without asking them first."""
    kind = headers.get("content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Rejected(415, "the body must be JSON (Content-Type: application/json)")


async def _run_while_connected(
    app: AsgiApp, scope: Scope, body: bytes, receive: Receive, send: Send
) -> None:
    """Run the application on a body that was read, and cancel it if the client disconnects."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await asyncio.Future()

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answer = asyncio.ensure_future(app(scope, replay, send))
    gone = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not answer.done():
            answer.cancel()
    with suppress(asyncio.CancelledError):
        await answer


class GuardedResponse:
    """A response to which the headers of every response are added."""

    def __init__(self, send: Send) -> None:
        self._send, self.is_started = send, False

    async def send(self, message: Message) -> None:
        """Send a message to the client."""
        if message["type"] == "http.response.start":
            self.is_started = True
            message["headers"] = [*message.get("headers", ()), *ENCODED_HEADERS]
        await self._send(message)


async def send_error(send: Send, status: int, problem: str) -> None:
    """Send an error as JSON; the client may try again later after 429 and 503."""
    headers, body = encode_error(status, problem)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def encode_error(status: int, problem: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return the headers and the body of an error as JSON."""
    body = json.dumps({"error": printable(problem)}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(name.encode(), value.encode()) for name, value in error_headers(status).items()]
    return headers, body


def error_headers(status: int) -> dict[str, str]:
    """Return the headers that an error with this status has."""
    if status in (429, 503):
        return {"retry-after": str(RETRY_SECONDS)}
    if status == 401:
        return {"www-authenticate": "Bearer"}
    return {"connection": "close"} if status in (408, 413) else {}
