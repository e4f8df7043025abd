"""The HTTP server: uvicorn with time limits for slow clients, and a clean end on signals."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from calque.io.processes import STOP_SIGNALS
from calque.server.limits import ENCODED_HEADERS, AsgiApp, encode_error

# Time to send the headers of a request, counted from the connection or the previous answer.
HEADER_SECONDS = 10.0
# Time for one answer, from its first header to the last byte that the client has taken.
CONNECTION_SECONDS = 120.0
MAX_CONNECTIONS = 512
MAX_HEADER_BYTES = 32 << 10
# Time for requests that are being answered when the server is stopped.
SHUTDOWN_SECONDS = 3


def run_server(app: AsgiApp, listener: socket.socket, *, stop: Callable[[], None]) -> None:
    """Answer requests until a stop signal; then the handler that was there before is called.

    Args:
        app: The ASGI application.
        listener: The socket to listen at.
        stop: Called when no more requests are accepted, to end the work for those under way.
    """
    config = Config(
        app,
        http=TimedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = StoppableServer(config, stop)
    server.run(sockets=[listener])
    server.pass_signal_on()


class StoppableServer(Server):
    """A server that stops at SIGINT, SIGTERM or SIGHUP."""

    def __init__(self, config: Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop
        self._received: tuple[int, FrameType | None] | None = None
        self._handlers: dict[int, Any] = {}

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle the stop signals while the block runs, except those that the caller ignores."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kinds = [kind for kind in STOP_SIGNALS if signal.getsignal(kind) is not signal.SIG_IGN]
        self._handlers = {kind: signal.signal(kind, self.handle_exit) for kind in kinds}
        try:
            yield
        finally:
            for kind, handler in self._handlers.items():
                signal.signal(kind, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop after the current requests, or at once if this is the second signal."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._received = self._received or (sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reject the requests that wait for a model, and wait for the others."""
        stopping = asyncio.get_running_loop().run_in_executor(None, self._stop)
        await super().shutdown(sockets)
        await stopping

    def pass_signal_on(self) -> None:
        """Call the earlier handler of the signal, which may raise KeyboardInterrupt."""
        if self._received is None:
            return
        number, frame = self._received
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)
        else:  # the default: end this process
            signal.raise_signal(number)


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes connections whose client is too slow."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first request."""
        super().connection_made(transport)
        is_rejected = len(self.connections) > MAX_CONNECTIONS
        self._limit = self.loop.call_later(0 if is_rejected else HEADER_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the time limit."""
        self._limit.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the time limit of the answer when the headers of a request are complete."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._restart(CONNECTION_SECONDS)

    def on_response_complete(self) -> None:
        """Start the time limit of the next request, which may already be there."""
        finished = self.cycle
        super().on_response_complete()
        is_idle = self.cycle is finished
        self._restart(HEADER_SECONDS if is_idle else CONNECTION_SECONDS)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP like other errors, unless an answer has begun, and disconnect."""
        cycle = getattr(self, "cycle", None)  # None before the first request
        if cycle is None or cycle.response_complete or not cycle.response_started:
            headers, body = encode_error(400, msg)
            headers += [(b"connection", b"close"), *ENCODED_HEADERS]
            lines = [b"HTTP/1.1 400 Bad Request", *(b"%s: %s" % header for header in headers)]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()

    def _restart(self, seconds: float) -> None:
        self._limit.cancel()
        self._limit = self.loop.call_later(seconds, self.transport.abort)
