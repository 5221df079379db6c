"""HTTP shell of the gateway: the application, its errors and its guard. The routes are in `rank_routes` and `routes`.

JSON for people and curl, msgpack (`weightcast.transfer.wire.messages`) for reports, parts and digests; no pickle.
Every route wants a bearer token of its scope. Errors are JSON `{"error": class, "message": one line}` with a status of
4xx or 5xx, never 200. What ranks ask goes past the framework, through the same guard.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.server.guard import App, Guard, Receive, Scope, Send
from weightcast.gateway.server.rank_routes import hot_routes
from weightcast.gateway.server.requests import HotRoutes, refusal, refusal_of
from weightcast.gateway.server.routes import add_routes
from weightcast.gateway.server.tokens import Access, Throttle, Tokens, make_token
from weightcast.transfer.errors import WeightcastError

__all__ = ["make_app", "make_token", "scope_of"]


class _Application(FastAPI):
    """An application whose hot routes are found first."""

    hot: HotRoutes
    guarded: App

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self.hot.find(scope) if scope["type"] == "http" else None
        if found is None:
            await super().__call__(scope, receive, send)
        else:
            scope["hot"] = found
            await self.guarded(scope, receive, send)


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    """What `HotRoutes` has found."""
    await scope["hot"](scope, receive, send)


def make_app(gateway: Gateway, tokens: Tokens) -> FastAPI:
    """The FastAPI application. One of `tokens` is wanted as `Authorization: Bearer TOKEN` on every route."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.open()
        yield
        await gateway.close()

    app = _Application(
        title="weightcast gateway",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    hot = hot_routes(gateway)
    app.router.routes.extend(hot)
    add_routes(app, gateway)

    def needs(scope: Scope) -> Access:
        """The scope of the route that a request will come to; the widest for what is none, which is then not found."""
        for route in app.routes:
            if isinstance(route, Route) and route.matches(scope)[0] is Match.FULL:
                return scope_of(route)
        return Access.READ

    throttle, refused = Throttle(), gateway.metrics.refused
    app.hot = HotRoutes(hot)
    app.guarded = Guard(_answer, tokens, lambda _: Access.WORKER, refused, throttle)
    app.add_middleware(Guard, tokens=tokens, needs=needs, refused=refused, throttle=throttle)

    @app.exception_handler(WeightcastError)
    async def weightcast_error(_: Request, error: WeightcastError) -> Response:
        return refusal_of(error).response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return refusal("InputError", f"{where}: {first['msg']}"[:1000], 422).response

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"[:1000]
        return refusal("ControlError", message, error.status_code).response

    return app


def scope_of(route: Route) -> Access:
    """The scope that a route was declared with; the narrowest for one that was declared with none."""
    tags = list(getattr(route, "tags", []))
    return Access[str(tags[0]).upper()] if len(tags) == 1 else Access.OPERATOR
