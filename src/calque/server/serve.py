"""`serve`: load models and folders, and answer requests until the process is stopped."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError, MissingExtra, first_line

if TYPE_CHECKING:
    from calque.server.served_data import ServedData

    Names = str | Path | Sequence[str | Path]

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
MIN_TOKEN_CHARACTERS = 8
BACKLOG = 512  # connections that wait to be accepted


def serve(
    model: Names | None = None,
    *,
    results: str | Path | None = None,
    runs: str | Path | None = None,
    vectors: str | Path | None = None,
    sentences: Names | None = None,
    translator: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    device: str = "auto",
) -> None:
    """Serve a page and a JSON API until the process is interrupted.

    Requests can read only the folders that are given here. Nothing is sent to other computers.

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
        from calque.server.http_server import run_server
        from calque.server.limits import RequestLimits
        from calque.server.routes import build_server
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn", "starlette", "h11"):
            raise
        raise MissingExtra(error.name, "serve") from error
    is_loopback = check_address(host, token)
    with open_listener(host, port) as listener:
        data = load_data(
            model,
            results=results,
            runs=runs,
            vectors=vectors,
            sentences=sentences,
            translator=translator,
            device=device,
        )
        hosts = LOOPBACK_NAMES | {_host_name(host)} if is_loopback else None
        app = build_server(data, RequestLimits(hosts=hosts, token=token))
        address = f"http://{_host_name(host)}:{listener.getsockname()[1]}"
        logger.info("%s shows: %s (stop with Ctrl-C)", address, ", ".join(data.views))
        try:
            run_server(app, listener, stop=data.close)
        except KeyboardInterrupt as interruption:
            interruption.add_note("the server was stopped")
            raise


def check_address(host: str, token: str | None) -> bool:
    """Return whether only this computer can reach the address; others require a token."""
    if token is not None and (len(token) < MIN_TOKEN_CHARACTERS or not token.isascii()):
        raise InputError(
            f"the token is shorter than {MIN_TOKEN_CHARACTERS} ASCII characters",
            fix="create one: openssl rand -hex 16",
        )
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and token is None:
        raise InputError(
            f"other computers can reach {host}, but no token is set",
            fix="export CALQUE_TOKEN=$(openssl rand -hex 16), or use --host 127.0.0.1",
        )
    return is_loopback


def open_listener(host: str, port: int) -> socket.socket:
    """Open the port to listen at; raise InputError if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number and number > 0 else first_line(error)
        raise InputError(
            f"cannot listen at {host}, port {port}: {reason.lower()}",
            fix="choose another port (--port) or address (--host)",
        ) from error
    # Connections inherit this. Without it, the body of an answer waits 40 ms for the client to
    # confirm the head; asyncio sets it only for sockets that name their protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def load_data(
    model: Names | None = None,
    *,
    results: str | Path | None = None,
    runs: str | Path | None = None,
    vectors: str | Path | None = None,
    sentences: Names | None = None,
    translator: str | Path | None = None,
    device: str = "auto",
) -> ServedData:
    """Load the models, embed the sentences and check the folders."""
    from calque.api import load
    from calque.models.inference import choose_device, load_encoder
    from calque.models.loading import EMBEDDED_MODEL
    from calque.models.seq2seq import Seq2Seq
    from calque.report.plots import shorten_names
    from calque.server.batching import MAX_BATCH_SIZE, BatchQueue
    from calque.server.loaded_model import LoadedModel, LoadedTranslator, ModelCores
    from calque.server.sentence_search import SentenceIndex, read_search_sentences
    from calque.server.served_data import ServedData
    from calque.server.study import StudyFolder
    from calque.server.training_runs import TrainingRuns
    from calque.server.word_lookup import WordLookup

    # Folders and files first: what is wrong with them is reported at once.
    study = None if results is None else StudyFolder(Path(results))
    training_runs = None if runs is None else TrainingRuns(Path(runs))
    words = None if vectors is None else WordLookup(Path(vectors))
    to_find = read_search_sentences(None if sentences is None else _as_list(sentences))
    names = _as_list(model) if model else [EMBEDDED_MODEL]
    short = shorten_names(names)
    torch_device = choose_device(device)
    cores = ModelCores(torch_device)
    models = {short[n]: LoadedModel(short[n], load(n, device), cores) for n in short}
    seq2seq = None if translator is None else load_encoder(translator, device, cls=Seq2Seq)
    max_batch_size = MAX_BATCH_SIZE.get(torch_device.type, MAX_BATCH_SIZE["cpu"])
    return ServedData(
        models=models,
        sentences=SentenceIndex(to_find, next(iter(models.values())).model.embed),
        words=words,
        study=study,
        runs=training_runs,
        translator=None if seq2seq is None else LoadedTranslator(seq2seq),
        queue=BatchQueue(max_batch_size=max_batch_size),
    )


def _as_list(values: Names) -> list[str]:
    several = [values] if isinstance(values, str | Path) else values
    return [str(value) for value in several]


def _host_name(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()
