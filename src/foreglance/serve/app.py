"""The application: routes, what every request passes first, errors in OpenAI's shape, the static page. No tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles

from foreglance import __version__
from foreglance.request import RequestError
from foreglance.serve.errors import ApiError, broken, from_request_error, from_validation
from foreglance.serve.guard import Guard
from foreglance.serve.host import Host
from foreglance.serve.routes import openai_router, other_router
from foreglance.serve.schema import UNSUPPORTED, Error, known_fields
from foreglance.serve.settings import ServerSettings
from foreglance.serve.slots import slots_router
from foreglance.serve.stream import ClientGone, Json

if TYPE_CHECKING:
    from foreglance.engine import Engine

log = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
ASSETS = PAGE.parent.parent / "assets"
EXAMPLE = "/example.png"
OPEN_PATHS = ("/health", "/", EXAMPLE)  # these and the page's own files need no key
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "A field that cannot be served; `param` names it."},
    401: {"model": Error, "description": "A key is needed."},
    403: {"model": Error, "description": "The server is not known by that host name."},
    404: {"model": Error, "description": "Not served here."},
    408: {"model": Error, "description": "The body stopped coming."},
    413: {"model": Error, "description": "The body is too large."},
    429: {"model": Error, "description": "The queue is full; Retry-After says when to come again."},
    500: {"model": Error, "description": "This request failed."},
    503: {"model": Error, "description": "The engine or the server has stopped."},
}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
CLIENT_CLOSED = 499  # nobody reads it; proxies log it so


def create_app(engine: Engine, settings: ServerSettings | None = None) -> FastAPI:
    """The application over an engine that nobody else uses."""
    settings = settings or ServerSettings()
    host = Host(engine, settings)
    app = FastAPI(
        title="foreglance",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=host.lifespan,
        default_response_class=Json,
        responses=ERRORS,
    )
    app.state.host = host
    app.include_router(openai_router(host))
    app.include_router(other_router(host))
    app.include_router(slots_router(host))
    answer_errors(app, host.metrics.refused)
    describe_errors(app)

    @app.get(EXAMPLE, include_in_schema=False)
    async def example() -> FileResponse:
        """A picture to try the page with."""
        return FileResponse(ASSETS / "scene.png")

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    guard(app, settings)
    return app


def describe_errors(app: FastAPI) -> None:
    """In the API's description: what is invalid is answered 400, in one shape, so there is no 422."""
    build = app.openapi

    def described() -> dict[str, Any]:
        document = build()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = described


def guard(app: FastAPI, settings: ServerSettings) -> None:
    """Put what every request passes first around an application."""
    page_files = ["/" + path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file()]
    app.add_middleware(Guard, settings=settings, open_paths=(*OPEN_PATHS, *page_files))
    if settings.cors_origins:  # outermost, so that a page can read refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )


def misplaced(app: FastAPI, request: Request) -> ApiError | None:
    """What is wrong with a request that came to no route of the API: its method or its path. None for the page's."""
    path, routes = request.url.path, [route for route in app.routes if not isinstance(route, Mount)]
    methods = [
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    if methods and request.method not in methods:
        words = " or ".join(methods)
        return ApiError(405, f"{path} takes {words}", code="http_error", headers={"Allow": ", ".join(methods)})
    if path.startswith("/v1/") and not methods:
        return ApiError(404, f"there is no {path} here; /openapi.json describes what there is", code="http_error")
    return None


def answer_errors(app: FastAPI, note: Callable[[int], None]) -> None:
    """Answer whatever a route raises in OpenAI's shape. `note` is told the status."""

    def answer(error: ApiError) -> Response:
        note(error.status)
        return Json(error.body(), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(RequestError)
    async def cannot_be_served(_: Request, error: RequestError) -> Response:
        return answer(from_request_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return answer(from_validation(error.errors(), error.body, known_fields(), UNSUPPORTED))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return answer(misplaced(app, request) or plain(error))

    def plain(error: HTTPException) -> ApiError:
        return ApiError(error.status_code, str(error.detail), code="http_error", headers=error.headers)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        log.error("a request broke the server's own code", exc_info=error)
        return answer(broken(error))
