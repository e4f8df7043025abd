"""The routes of the server: requests are checked, computed in shared batches, and answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from calque.errors import InputError, printable
from calque.io.segmentation import split_on_spaces
from calque.server.batching import BatchQueue, QueueFull
from calque.server.limits import RequestGuard, RequestLimits, error_headers
from calque.server.loaded_model import AlignedPair, AlignJob, LoadedModel
from calque.server.page_files import INDEX, find_page_file
from calque.server.schemas import (
    MAX_TOTAL_CHARACTERS,
    AlignReply,
    AlignRequest,
    ErrorReply,
    HealthReply,
    PairLinks,
    SearchMatch,
    SearchReply,
    SearchRequest,
    WordLink,
)
from calque.server.text_words import find_words

if TYPE_CHECKING:
    from calque.server.sentence_search import SentenceIndex

METHODS = ("ot", "itermax", "argmax", "match")
# Digits of scores and cosines in responses.
DIGITS = 4


@dataclass(frozen=True, slots=True)
class ServedData:
    """What the server was started with; a view without data is not offered."""

    models: dict[str, LoadedModel]
    sentences: SentenceIndex
    queue: BatchQueue = field(default_factory=BatchQueue)

    @property
    def default_model(self) -> LoadedModel:
        """The first model."""
        return next(iter(self.models.values()))

    @property
    def views(self) -> list[str]:
        """The views of the page that can be shown."""
        return ["align", "search"]

    def find_model(self, name: str | None) -> LoadedModel:
        """Return the model with a name, by default the first."""
        if name is None:
            return self.default_model
        if name not in self.models:
            fix = f"choose from: {', '.join(self.models)}"
            raise InputError(f"the server has no model {name!r}", fix=fix)
        return self.models[name]


def build_server(data: ServedData, limits: RequestLimits | None = None) -> RequestGuard:
    """Return the ASGI application."""
    app = FastAPI(
        title="Calque",
        version=version("calque"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={
            status: {"model": ErrorReply, "description": HTTPStatus(status).phrase}
            for status in (400, 401, 413, 415, 422, 429, 503)
        },
    )
    _add_error_handlers(app)
    _add_page(app)
    _add_model_routes(app, data)
    return RequestGuard(app, limits or RequestLimits())


def _add_error_handlers(app: FastAPI) -> None:
    def reply(status: int, problem: str) -> JSONResponse:
        return JSONResponse(
            {"error": printable(problem)}, status_code=status, headers=error_headers(status)
        )

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return reply(400, "the body is not valid JSON")
        place = ".".join(str(part) for part in first["loc"])
        return reply(422, f"{place}: {first['msg']}")

    @app.exception_handler(InputError)
    async def bad_input(_: Request, error: InputError) -> JSONResponse:
        return reply(422, str(error))

    @app.exception_handler(QueueFull)
    async def busy(_: Request, error: QueueFull) -> JSONResponse:
        return reply(503, str(error))

    @app.exception_handler(404)
    @app.exception_handler(405)
    @app.exception_handler(HTTPException)
    async def failed(_: Request, error: HTTPException) -> JSONResponse:
        return reply(error.status_code, str(error.detail))

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> JSONResponse:
        return reply(500, "the server failed; its log has the reason")


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    def index(request: Request) -> Response:
        return send_file(request, INDEX)

    @app.get("/page/{name:path}", include_in_schema=False)
    def page_file(request: Request, name: str) -> Response:
        return send_file(request, name)

    def send_file(request: Request, name: str) -> Response:
        file = find_page_file(name)
        if file is None:
            raise HTTPException(404, "there is no such file")
        headers = {"etag": file.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(file.compressed, media_type=file.media_type, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)


def _add_model_routes(app: FastAPI, data: ServedData) -> None:
    @app.get("/health")
    async def health() -> HealthReply:
        """Return what this server has."""
        loaded = data.default_model
        return HealthReply(
            status="ok",
            version=version("calque"),
            model=loaded.name,
            models=list(data.models),
            n_layers=loaded.model.n_layers,
            default_layer=loaded.layer,
            methods=list(METHODS),
            default_method=loaded.settings.method,
            default_threshold=loaded.settings.threshold,
            languages=data.sentences.languages,
            views=data.views,
        )

    @app.post("/align")
    async def align(request: AlignRequest) -> AlignReply:
        """Link the words of sentence pairs."""
        loaded = data.find_model(request.model)
        settings = loaded.choose_settings(request.layer, request.method, request.threshold)
        size = check_size([text for pair in request.pairs for text in (pair.src, pair.tgt)])
        split = find_words if request.tokenize else split_on_spaces
        pairs = [(split(pair.src), split(pair.tgt)) for pair in request.pairs]
        job = AlignJob(pairs, settings, request.matrix)
        aligned = await data.queue.compute(loaded.align, job, size)
        return AlignReply(
            model=loaded.name,
            layer=settings.layer,
            method=settings.method,
            threshold=settings.threshold,
            pairs=[
                _format_pair(src, tgt, found)
                for (src, tgt), found in zip(pairs, aligned, strict=True)
            ],
        )

    @app.post("/search")
    async def search(request: SearchRequest) -> SearchReply:
        """Find the sentences nearest to a sentence."""
        loaded = data.default_model
        (vector,) = await data.queue.compute(loaded.embed, [request.text], len(request.text))
        matches = data.sentences.find(vector, request.n, request.languages)
        return SearchReply(
            matches=[
                SearchMatch(
                    language=sentence.language,
                    text=sentence.text,
                    score=round(score, DIGITS),
                    line=sentence.line,
                )
                for sentence, score in matches
            ]
        )


def check_size(texts: Sequence[str]) -> int:
    """Return the number of characters of a request; raise an error if there are too many."""
    size = sum(map(len, texts))
    if size > MAX_TOTAL_CHARACTERS:
        raise HTTPException(413, f"the texts have more than {MAX_TOTAL_CHARACTERS:,} characters")
    return size


def _format_pair(src: list[str], tgt: list[str], found: AlignedPair) -> PairLinks:
    matrix = None if found.matrix is None else found.matrix.astype(float).round(DIGITS).tolist()
    links = [WordLink(src=i, tgt=j, score=round(score, DIGITS)) for i, j, score in found.links]
    return PairLinks(src=src, tgt=tgt, links=links, matrix=matrix)
