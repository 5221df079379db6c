"""Application of the gateway: the table of routes behind one guard.

JSON for people and curl, msgpack (`weightcast.transfer.wire.messages`) for reports, parts and digests; no pickle.
Every route but `/livez` wants a bearer token of its scope. Errors are JSON `{"error": class, "message": one line}`
with a status of 4xx or 5xx, never 200. `/openapi.json` documents all routes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.routing import Router

from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.server import rank_routes
from weightcast.gateway.server import routes as people_routes
from weightcast.gateway.server.guard import Guard, Receive, Scope, Send
from weightcast.gateway.server.openapi import add_document, document_of
from weightcast.gateway.server.requests import refusal
from weightcast.gateway.server.routing import Route, Routes, RouteTable
from weightcast.gateway.server.tokens import Access, Throttle, Tokens, make_token

__all__ = ["Application", "make_app", "make_token"]


class Application:
    """ASGI application of a gateway. One of `tokens` is wanted as `Authorization: Bearer TOKEN`, but on `/livez`."""

    def __init__(self, gateway: Gateway, tokens: Tokens) -> None:
        routes = Routes(*rank_routes.ROUTES.added, *people_routes.ROUTES.added)
        add_document(routes)
        self.routes = routes.added
        self._gateway = gateway
        self._table = RouteTable(self.routes)
        self._guarded = Guard(self._answer, tokens, _access, gateway.metrics.refused, Throttle())

        @asynccontextmanager
        async def lifespan(_: object) -> AsyncIterator[None]:
            await gateway.open()
            yield
            await gateway.close()

        self._lifespan = Router(lifespan=lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
            return
        if scope["type"] == "http":
            scope["route"] = self._table.find(scope)
        await self._guarded(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        route: Route | None = scope["route"]
        if route is not None:
            await route(self._gateway, scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        methods = self._table.methods(path)
        status, why = (405, f"Method Not Allowed; it has {', '.join(methods)}") if methods else (404, "Not Found")
        await refusal("ControlError", f"{method} {path}: {why}"[:1000], status).send(send)


def make_app(gateway: Gateway, tokens: Tokens) -> Application:
    """Makes the application of a gateway."""
    return Application(gateway, tokens)


def _access(scope: Scope) -> Access:
    """The scope that a request needs; for a path without a route one whose holders may know that there is none."""
    route: Route | None = scope["route"]
    return Access.READ if route is None else route.access


def main() -> None:
    """Prints the OpenAPI document, as `make openapi` keeps it in docs/generated."""
    application = make_app(Gateway("127.0.0.1", 1), Tokens(make_token()))
    print(json.dumps(document_of(application.routes), indent=1))


if __name__ == "__main__":
    main()
