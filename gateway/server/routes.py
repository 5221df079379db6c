"""What people and programs ask of whole pairs and instances; the one tag of a route is its scope. See also `hot`."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.incarnations import HEADER, Incarnation
from weightcast.gateway.layouts.inspection import inspect_instance
from weightcast.gateway.server.bodies import EngineBody, PairBody
from weightcast.gateway.server.requests import MAX_POLL, stopping
from weightcast.transfer.errors import ControlError

__all__ = ["add_routes"]

READ: list[str | Enum] = ["read"]
OPERATOR: list[str | Enum] = ["operator"]

Wait = Annotated[float, Query(ge=0.0, le=MAX_POLL)]
Identity = Annotated[str, Query(max_length=64)]
Said = Annotated[str, Header(alias=HEADER)]


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds all of them."""
    _instance_routes(app, gateway)
    _pair_routes(app, gateway)
    _health_routes(app, gateway)


def _health_routes(app: FastAPI, gateway: Gateway) -> None:
    """What monitoring asks."""

    @app.get("/healthz", tags=READ)
    async def healthz() -> JSONResponse:
        if gateway.store.trouble:
            return JSONResponse({"status": "failing", "reason": gateway.store.trouble}, status_code=503)
        return JSONResponse({"status": "ok", "pairs": len(gateway.pairs)})

    @app.get("/metrics", tags=READ)
    async def metrics() -> Response:
        return Response(gateway.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _pair_routes(app: FastAPI, gateway: Gateway) -> None:
    """What is asked of whole pairs."""

    @app.get("/pairs", tags=READ)
    async def list_pairs() -> dict[str, Any]:
        return {"pairs": [pair.status() for pair in gateway.pairs.values()]}

    @app.put("/pairs/{name}", tags=OPERATOR)
    async def create(name: str, body: PairBody) -> dict[str, Any]:
        return (await gateway.create(body.spec(name))).status()

    @app.get("/pairs/{name}", tags=READ)
    async def status(name: str) -> dict[str, Any]:
        return gateway.pair(name).status()

    @app.delete("/pairs/{name}", tags=OPERATOR)
    async def delete(name: str) -> dict[str, Any]:
        await gateway.delete(name)
        return {"deleted": name}

    @app.get("/pairs/{name}/updates/{version}", tags=READ)
    async def result(name: str, version: int, wait: Wait = 0.0, known: Identity = "", said: Said = "") -> Response:
        """Anybody may ask; a trainer rank hears of the updates of its own trainer alone."""
        pair = gateway.pair(name)
        pair.check_boot(known)
        if said:
            pair.incarnations.check(Incarnation.parse(said), pair.boot)
        try:
            if not await pair.poll(lambda: version in pair.results, wait):
                return Response(status_code=204)
        except asyncio.CancelledError:
            return stopping().response
        return Response(pair.result_text(version), media_type="application/json")


def _instance_routes(app: FastAPI, gateway: Gateway) -> None:
    """What is asked of whole instances."""

    @app.put("/pairs/{name}/instances/{instance}", tags=OPERATOR)
    async def join(name: str, instance: str, body: EngineBody) -> dict[str, Any]:
        await gateway.join(name, instance, body.spec())
        return gateway.pair(name).status()

    @app.delete("/pairs/{name}/instances/{instance}", tags=OPERATOR)
    async def leave(name: str, instance: str) -> dict[str, Any]:
        await gateway.leave(name, instance)
        return gateway.pair(name).status()

    @app.get("/pairs/{name}/instances/{instance}/inspect", tags=READ)
    async def inspect(name: str, instance: str, text: bool = False) -> Response:
        found = gateway.pair(name).instance(instance)
        if found.layout is None:
            raise found.failure or ControlError(f"instance {instance} of pair {name} has not registered yet")
        table = inspect_instance(found.layout)
        return PlainTextResponse(table.to_text()) if text else JSONResponse(table.to_json())
