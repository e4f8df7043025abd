"""`serve`: load the models and run the server until it is stopped."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from calque.server.routes import ServedData

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
# Time for requests that are being answered when the server is stopped.
SHUTDOWN_SECONDS = 4


def serve(
    model: str | Path | Sequence[str | Path] | None = None,
    *,
    results: str | Path | None = None,
    runs: str | Path | None = None,
    vectors: str | Path | None = None,
    sentences: str | Path | Sequence[str | Path] | None = None,
    translator: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    device: str = "auto",
) -> None:
    """Serve a page and a JSON API until the process is interrupted.

    Args:
        model: Model folder, hub name, `calque-mini` (the default), or a list of them. The first one
            is used unless a request names another.
        results: Folder with results of `calque evaluate -o`, for the study view.
        runs: Folder with training runs, for their loss curves.
        vectors: Folder with mapped word vectors by language, for the dictionary.
        sentences: Files to search: `LANGUAGE=FILE` with one sentence per line, or lines of a
            language, a tab and a sentence. Default: the sentences of the package.
        translator: Folder or hub name of an encoder-decoder model.
        host: Address to listen at. Other addresses than those of this computer need a token.
        port: Port to listen at; 0 for any free port.
        token: Bearer token that clients must send.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...

    Examples:
        >>> calque.serve("calque-mini", port=8000)  # doctest: +SKIP
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtra("uvicorn", "serve") from error
    from calque.server.limits import RequestLimits
    from calque.server.routes import build_server

    is_loopback = check_address(host, token)
    listener = open_listener(host, port)
    try:
        data = load_data(model, sentences, device)
        hosts = LOOPBACK_NAMES | {_host_name(host)} if is_loopback else None
        app = build_server(data, RequestLimits(hosts=hosts, token=token))
        address = f"http://{_host_name(host)}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        logger.info("%s (stop with Ctrl-C)", address)
        server = uvicorn.Server(config)
        server.run(sockets=[listener])
    finally:
        listener.close()


def check_address(host: str, token: str | None) -> bool:
    """Return whether only this computer can reach the address; others require a token."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not token:
        raise InputError(
            f"other computers can reach {host}, and the server has no token",
            fix="set one: CALQUE_TOKEN=$(openssl rand -hex 16), or use --host 127.0.0.1",
        )
    return is_loopback


def open_listener(host: str, port: int) -> socket.socket:
    """Open the port to listen at; raise InputError if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen at {host} port {port}: {reason.lower()}",
            fix="choose another port (--port) or address (--host)",
        ) from error


def load_data(
    model: str | Path | Sequence[str | Path] | None,
    sentences: str | Path | Sequence[str | Path] | None,
    device: str,
) -> ServedData:
    """Load everything that requests may use."""
    from calque.api import load
    from calque.report.plots import shorten_names
    from calque.server.loaded_model import LoadedModel
    from calque.server.routes import ServedData
    from calque.server.sentence_search import SentenceIndex, read_search_sentences

    names = [model] if model is None or isinstance(model, str | Path) else list(model)
    files = None if sentences is None else _as_list(sentences)
    found = read_search_sentences(files)
    encoders = {str(name or "calque-mini"): load(name, device) for name in names or [None]}
    short = shorten_names(encoders)
    models = {short[name]: LoadedModel(short[name], each) for name, each in encoders.items()}
    first = next(iter(models.values()))
    return ServedData(models, SentenceIndex(found, first.model.embed))


def _as_list(values: str | Path | Sequence[str | Path]) -> list[str]:
    several = [values] if isinstance(values, str | Path) else values
    return [str(value) for value in several]


def _host_name(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()
