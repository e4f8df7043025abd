"""The ASGI application: the page, /health, error replies and all other routes."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import version

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHttpException

from calque.errors import InputError, printable
from calque.server.batching import QueueFull
from calque.server.folder_routes import add_folder_routes
from calque.server.limits import RequestGuard, RequestLimits, error_headers
from calque.server.model_routes import add_model_routes
from calque.server.page_files import INDEX, find_page_file
from calque.server.schemas import ErrorReply, HealthReply, ServedModel
from calque.server.served_data import ServedData

METHODS = ("ot", "itermax", "argmax", "match", "probability")


def build_server(data: ServedData, limits: RequestLimits | None = None) -> RequestGuard:
    """Return the ASGI application for models and folders."""
    app = FastAPI(
        title="Calque",
        version=version("calque"),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={
            status: {"model": ErrorReply, "description": HTTPStatus(status).phrase}
            for status in (400, 401, 404, 408, 413, 415, 422, 429, 503)
        },
    )
    _add_error_replies(app)
    _add_page(app)
    _add_health(app, data)
    add_model_routes(app, data)
    add_folder_routes(app, data)
    return RequestGuard(app, limits or RequestLimits())


def _add_error_replies(app: FastAPI) -> None:
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

    @app.exception_handler(AnyHttpException)
    async def failed(_: Request, error: AnyHttpException) -> JSONResponse:
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


def _add_health(app: FastAPI, data: ServedData) -> None:
    @app.get("/health")
    async def health() -> HealthReply:
        """Return what this server has."""
        return HealthReply(
            status="ok",
            version=version("calque"),
            models=[
                ServedModel(
                    name=loaded.name,
                    n_layers=loaded.model.n_layers,
                    n_heads=loaded.n_heads,
                    default_layer=loaded.layer,
                    default_method=loaded.settings.method,
                    default_threshold=loaded.settings.min_score,
                    probability_threshold=loaded.probability_threshold,
                    map_languages=loaded.map_languages,
                )
                for loaded in data.models.values()
            ],
            methods=list(METHODS),
            languages=data.sentences.languages,
            vector_languages=[] if data.words is None else data.words.languages,
            target_languages=[] if data.translator is None else data.translator.languages,
            views=data.views,
        )
