"""The routes: what each is for, who may use it (its one tag is the scope), and which call it becomes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from weightcast.gateway.bodies import (
    BeatBody,
    EngineBody,
    FailureBody,
    MemberBody,
    MovedBody,
    OfferBody,
    PairBody,
    RendezvousBody,
)
from weightcast.gateway.guard import MSGPACK
from weightcast.gateway.hot import EPOCH, MAX_POLL, add_hot_routes, decoded
from weightcast.gateway.inspection import inspect_instance
from weightcast.gateway.instance import Instance
from weightcast.gateway.pool import Gateway
from weightcast.transfer import errors, wire
from weightcast.transfer.errors import ControlError

__all__ = ["add_routes"]

READ: list[str | Enum] = ["read"]
WORKER: list[str | Enum] = ["worker"]
OPERATOR: list[str | Enum] = ["operator"]

Side = Literal["trainer", "instance"]
Wait = Annotated[float, Query(ge=0.0, le=MAX_POLL)]
Identity = Annotated[str, Query(max_length=64)]


def add_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds all routes, those that every rank asks in every update first: they are looked for in this order."""
    add_hot_routes(app, gateway)
    _trainer_routes(app, gateway)
    _rank_routes(app, gateway)
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
    async def result(name: str, version: int, wait: Wait = 0.0, known: Identity = "") -> Response:
        gateway.check_boot(known)
        pair = gateway.pair(name)
        if not await pair.poll(lambda: version in pair.results, wait):
            return Response(status_code=204)
        return JSONResponse({key: asdict(record) for key, record in pair.results[version].items()})


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


def _trainer_routes(app: FastAPI, gateway: Gateway) -> None:
    """What the ranks of a trainer ask."""

    @app.post("/pairs/{name}/connect", tags=WORKER)
    async def connect(name: str) -> dict[str, Any]:
        gateway.start_connect(name)
        return {"connecting": name}

    @app.post("/pairs/{name}/trainer/{rank}/report", tags=WORKER)
    async def report(name: str, rank: int, request: Request, start: Identity = "") -> dict[str, Any]:
        pair = gateway.pair(name)
        found = await decoded(request, wire.decode_report)
        generation, first = await pair.register_trainer(rank, found, start)
        return {"generation": generation, "first_order": first, "boot": gateway.boot}

    @app.post("/pairs/{name}/trainer/{rank}/beat", tags=WORKER)
    async def beat(name: str, rank: int) -> dict[str, Any]:
        await gateway.pair(name).beat(rank)
        return {}

    @app.post("/pairs/{name}/offers", tags=WORKER)
    async def offer(name: str, body: OfferBody) -> dict[str, Any]:
        return {"offered": await gateway.offer(name, body.rank, body.version), "boot": gateway.boot}

    @app.get("/pairs/{name}/updates/{version}/instances", tags=WORKER)
    async def begun(name: str, version: int, wait: Wait = 0.0, known: Identity = "") -> Response:
        gateway.check_boot(known)
        found = await gateway.pair(name).begun(version, wait)
        if found is None:
            return Response(status_code=204)
        return JSONResponse({"instances": found[0], "first_order": found[1]})


def _rank_routes(app: FastAPI, gateway: Gateway) -> None:
    """What the members of an instance's communicator ask."""

    def at(name: str, instance: str) -> Instance:
        return gateway.pair(name).instance(instance)

    @app.post("/pairs/{name}/instances/{instance}/ranks/{rank}/restarted", tags=WORKER)
    async def restarted(name: str, instance: str, rank: int) -> dict[str, Any]:
        await at(name, instance).restarted(rank)
        return {}

    @app.post("/pairs/{name}/instances/{instance}/ranks/{rank}/beat", tags=WORKER)
    async def beat(name: str, instance: str, rank: int, body: BeatBody) -> dict[str, Any]:
        found = at(name, instance)
        await found.beat(rank, body.identity)
        return {"running": found.running}

    @app.post(EPOCH + "/ranks/{rank}/report", tags=WORKER)
    async def report(
        name: str,
        instance: str,
        epoch: int,
        rank: int,
        request: Request,
        identity: Identity = "",
        uncommitted: bool = False,
        verified: Annotated[int | None, Query(ge=0, lt=1 << 62)] = None,
    ) -> dict[str, Any]:
        found = at(name, instance)
        body = await decoded(request, wire.decode_report)
        committed = await found.register(epoch, rank, body, identity, uncommitted, verified)
        return {"registered": rank, "committed": committed}

    @app.get(EPOCH + "/parts/{side}/{rank}", tags=WORKER)
    async def part(name: str, instance: str, epoch: int, side: Side, rank: int, wait: Wait = 0.0) -> Response:
        found = await at(name, instance).part(epoch, side, rank, wait)
        if found is None:
            return Response(status_code=204)
        return Response(await asyncio.to_thread(wire.encode_part, found), media_type=MSGPACK)

    @app.put(EPOCH + "/rendezvous", tags=WORKER)
    async def set_rendezvous(name: str, instance: str, epoch: int, body: RendezvousBody) -> dict[str, Any]:
        await at(name, instance).set_rendezvous(epoch, body.host, body.port)
        return {}

    @app.get(EPOCH + "/rendezvous", tags=WORKER)
    async def rendezvous(name: str, instance: str, epoch: int, wait: Wait = 0.0) -> Response:
        found = await at(name, instance).rendezvous(epoch, wait)
        if found is None:
            return Response(status_code=204)
        return JSONResponse({"host": found[0], "port": found[1]})

    @app.post(EPOCH + "/joined", tags=WORKER)
    async def joined(name: str, instance: str, epoch: int, body: MemberBody) -> dict[str, Any]:
        await at(name, instance).join(epoch, body.member)
        return {}

    @app.post(EPOCH + "/failures", tags=WORKER)
    async def failures(name: str, instance: str, epoch: int, body: FailureBody) -> dict[str, Any]:
        kind = getattr(errors, body.error, None) if body.error in errors.__all__ else None
        message = " ".join(body.message.split())
        await at(name, instance).fail_rank(epoch, " ".join(body.who.split()), (kind or ControlError)(message))
        return {}

    @app.post(EPOCH + "/ranks/{rank}/moved", tags=WORKER)
    async def moved(name: str, instance: str, epoch: int, rank: int, body: MovedBody) -> dict[str, Any]:
        await at(name, instance).report_moved(epoch, rank, body.version, body.layers)
        return {}
