"""HTTP shell of the gateway: the application, its errors and its guard. The routes are in `routes`.

JSON for people and curl, msgpack (`weightcast.transfer.wire`) for reports, parts and digests; no pickle. Every route
wants a bearer token of its scope. Errors are JSON `{"error": class, "message": one line}` with a status of 4xx or 5xx,
never 200.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from weightcast.gateway.guard import Guard, Scope
from weightcast.gateway.pool import Gateway
from weightcast.gateway.routes import add_routes
from weightcast.gateway.tokens import Access, Tokens, make_token
from weightcast.transfer.errors import (
    AuthorizationError,
    ControlError,
    CoverageError,
    DescribeError,
    InputError,
    WeightcastError,
)

__all__ = ["make_app", "make_token", "scope_of"]

_STATUS: tuple[tuple[type[WeightcastError], int], ...] = (
    (AuthorizationError, 401),
    (InputError, 400),
    (CoverageError, 422),
    (DescribeError, 422),
    (ControlError, 409),
    (WeightcastError, 409),
)


def _error_response(error: WeightcastError) -> JSONResponse:
    return _refusal(type(error).__name__, str(error), next(code for kind, code in _STATUS if isinstance(error, kind)))


def _refusal(error: str, message: str, status: int) -> JSONResponse:
    """One line of text that can be encoded, whatever was quoted in it."""
    line = " ".join(message.encode("utf-8", "backslashreplace").decode().split())
    return JSONResponse({"error": error, "message": line}, status_code=status)


def make_app(gateway: Gateway, tokens: Tokens) -> FastAPI:
    """The FastAPI application. One of `tokens` is wanted as `Authorization: Bearer TOKEN` on every route."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.open()
        yield
        await gateway.close()

    app = FastAPI(
        title="weightcast gateway",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    add_routes(app, gateway)

    def needs(scope: Scope) -> Access:
        """The scope of the route that a request will come to; the widest for what is none, which is then not found."""
        for route in app.routes:
            if isinstance(route, Route) and route.matches(scope)[0] is Match.FULL:
                return scope_of(route)
        return Access.READ

    app.add_middleware(Guard, tokens=tokens, needs=needs, refused=gateway.metrics.refused)

    @app.exception_handler(WeightcastError)
    async def weightcast_error(_: Request, error: WeightcastError) -> JSONResponse:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _refusal("InputError", f"{where}: {first['msg']}"[:1000], 422)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"[:1000]
        return _refusal("ControlError", message, error.status_code)

    return app


def scope_of(route: Route) -> Access:
    """The scope that a route was declared with; the narrowest for one that was declared with none."""
    tags = list(getattr(route, "tags", []))
    return Access[str(tags[0]).upper()] if len(tags) == 1 else Access.OPERATOR
