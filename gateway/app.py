"""HTTP shell of the gateway: routes in, calls of `service` and `coordinator` out.

JSON for people and curl, msgpack (`weightcast.transfer.wire`) for reports, parts and digests; no pickle. Every route
wants the bearer token. Errors are JSON `{"error": class, "message": one line}` with a status of 4xx or 5xx, never 200.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from weightcast.gateway import coordinator
from weightcast.gateway.engines import EngineSpec
from weightcast.gateway.guard import MAX_BODY, MSGPACK, Guard, check_token
from weightcast.gateway.inspection import inspect_instance
from weightcast.gateway.service import Deadlines, Pair, PairSpec
from weightcast.transfer import errors, wire
from weightcast.transfer.errors import (
    AuthorizationError,
    ControlError,
    CoverageError,
    DescribeError,
    InputError,
    WeightcastError,
)

__all__ = ["Gateway", "make_app", "make_token"]

log = logging.getLogger("weightcast.gateway")

MAX_POLL = 30.0
"""Longest long poll in seconds; clients ask again."""

Side = Literal["trainer", "instance"]
Wait = Annotated[float, Query(ge=0.0, le=MAX_POLL)]


def make_token() -> str:
    """A fresh random bearer token."""
    return secrets.token_urlsafe(32)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EngineBody(_Body):
    """JSON of an EngineSpec."""

    kind: Literal["sglang", "worker"] = "sglang"
    world_size: int = Field(ge=1, le=100_000)
    url: str = Field(default="", max_length=2048)
    pause: Literal["abort", "retract", "in_place"] = "abort"
    backend: Literal["gloo", "nccl"] = "gloo"


class PairBody(_Body):
    """JSON of a PairSpec."""

    trainer_world: int = Field(ge=1, le=100_000)
    instances: dict[str, EngineBody] = Field(min_length=1, max_length=10_000)
    deadlines: dict[str, float] = Field(default_factory=dict)
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 10)


class RendezvousBody(_Body):
    """Where the first member of a communicator listens."""

    host: str = Field(min_length=1, max_length=255)
    port: int = Field(ge=1, le=65535)


class MemberBody(_Body):
    """Label of a member of a communicator."""

    member: str = Field(min_length=1, max_length=255)


class FailureBody(_Body):
    """What stopped a rank."""

    who: str = Field(max_length=255)
    error: str = Field(max_length=64)
    message: str = Field(max_length=10_000)


class ReadyBody(_Body):
    """Outcome of a rank's check before the transfer; empty when nothing changed."""

    stale: str = Field(default="", max_length=10_000)


class OfferBody(_Body):
    """A trainer rank's readiness to send a version."""

    rank: int = Field(ge=0)
    version: int = Field(ge=0, lt=1 << 62)


class Gateway:
    """The pairs of one gateway process, and the tasks that move them."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.pairs: dict[str, Pair] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._connecting: dict[str, asyncio.Task[object]] = {}

    def pair(self, name: str) -> Pair:
        """Raises InputError naming the pairs there are."""
        found = self.pairs.get(name)
        if found is None:
            raise InputError(f"there is no pair {name!r}; there are {', '.join(self.pairs) or 'none'}")
        return found

    def create(self, spec: PairSpec) -> None:
        """A new pair; the same spec again changes nothing. Raises ControlError for another spec under a name in use."""
        known = self.pairs.get(spec.name)
        if known is not None:
            if known.spec != spec:
                raise ControlError(f"pair {spec.name} exists with another specification; delete it first")
            return
        taken = {e.url: p.spec.name for p in self.pairs.values() for e in p.spec.instances.values() if e.url}
        for name, engine in spec.instances.items():
            if engine.url in taken:
                raise ControlError(f"instance {name}: {engine.url} belongs to pair {taken[engine.url]} already")
        self.pairs[spec.name] = Pair(spec)

    def delete(self, name: str) -> None:
        """Forgets a pair; engines are left as they are. Raises ControlError while it connects or updates."""
        pair = self.pair(name)
        connecting = self._connecting.get(name)
        if pair.offers or (connecting is not None and not connecting.done()):
            raise ControlError(
                f"pair {name} is being {'updated' if pair.offers else 'connected'}; delete it afterwards"
            )
        del self.pairs[name]
        self._connecting.pop(name, None)

    def start_connect(self, name: str) -> None:
        """Connects the pair's instances in the background; once at a time."""
        pair = self.pair(name)
        running = self._connecting.get(name)
        if running is None or running.done():
            self._connecting[name] = self._spawn(coordinator.connect(pair, self.host, self.port))

    async def offer(self, name: str, rank: int, version: int) -> None:
        """A trainer rank offers a version; the first one starts the update, which waits for the others."""
        pair = self.pair(name)
        if await pair.offer(rank, version):
            self._spawn(coordinator.update(pair, version, self.host, self.port))

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def done(finished: asyncio.Task[object]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                log.error("gateway task failed: %s", error, exc_info=error)

        task.add_done_callback(done)
        return task


_STATUS: tuple[tuple[type[WeightcastError], int], ...] = (
    (AuthorizationError, 401),
    (InputError, 400),
    (CoverageError, 422),
    (DescribeError, 422),
    (ControlError, 409),
    (WeightcastError, 409),
)


def _error_response(error: WeightcastError) -> JSONResponse:
    status = next(code for kind, code in _STATUS if isinstance(error, kind))
    return JSONResponse({"error": type(error).__name__, "message": str(error)}, status_code=status)


def make_app(gateway: Gateway, token: str) -> FastAPI:
    """The FastAPI application. `token` is wanted as `Authorization: Bearer TOKEN` on every route."""
    check_token(token)  # here, because middleware is made only when the first request comes
    app = FastAPI(title="weightcast gateway", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=token)

    @app.exception_handler(WeightcastError)
    async def weightcast_error(_: Request, error: WeightcastError) -> JSONResponse:
        return _error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"error": "InputError", "message": f"{where}: {first['msg']}"}, status_code=422)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse({"error": "ControlError", "message": message}, status_code=error.status_code)

    _pair_routes(app, gateway)
    _rank_routes(app, gateway)
    return app


def _pair_routes(app: FastAPI, gateway: Gateway) -> None:
    """What operators and trainers ask of whole pairs."""

    @app.get("/pairs")
    async def list_pairs() -> dict[str, Any]:
        return {"pairs": [pair.status() for pair in gateway.pairs.values()]}

    @app.put("/pairs/{name}")
    async def create(name: str, body: PairBody) -> dict[str, Any]:
        try:
            deadlines = Deadlines(**body.deadlines)
        except TypeError:
            known = ", ".join(Deadlines.__slots__)
            raise InputError(f"deadlines {sorted(body.deadlines)} are not all known; known are {known}") from None
        instances = {key: EngineSpec(**engine.model_dump()) for key, engine in body.instances.items()}
        gateway.create(PairSpec(name, body.trainer_world, instances, deadlines, body.bucket_bytes))
        return gateway.pair(name).status()

    @app.get("/pairs/{name}")
    async def status(name: str) -> dict[str, Any]:
        return gateway.pair(name).status()

    @app.delete("/pairs/{name}")
    async def delete(name: str) -> dict[str, Any]:
        gateway.delete(name)
        return {"deleted": name}

    @app.post("/pairs/{name}/connect")
    async def connect(name: str) -> dict[str, Any]:
        gateway.start_connect(name)
        return {"connecting": name}

    @app.post("/pairs/{name}/offers")
    async def offer(name: str, body: OfferBody) -> dict[str, Any]:
        await gateway.offer(name, body.rank, body.version)
        return {"offered": body.version}

    @app.get("/pairs/{name}/updates/{version}")
    async def result(name: str, version: int, wait: Wait = 0.0) -> Response:
        pair = gateway.pair(name)
        if not await pair.poll(lambda: version in pair.results, wait):
            return Response(status_code=204)
        return JSONResponse({key: asdict(record) for key, record in pair.results[version].items()})

    @app.get("/pairs/{name}/instances/{instance}/inspect")
    async def inspect(name: str, instance: str, text: bool = False) -> Response:
        found = gateway.pair(name).instance(instance)
        if found.layout is None:
            raise found.failure or ControlError(f"instance {instance} of pair {name} has not registered yet")
        table = inspect_instance(found.layout)
        return PlainTextResponse(table.to_text()) if text else JSONResponse(table.to_json())


def _rank_routes(app: FastAPI, gateway: Gateway) -> None:
    """What single ranks ask: register, fetch a part, join, follow orders, report."""

    @app.post("/pairs/{name}/trainer/{rank}/report")
    async def trainer_report(name: str, rank: int, request: Request) -> dict[str, Any]:
        pair = gateway.pair(name)
        report = wire.decode_report(await request.body(), max_bytes=MAX_BODY)
        await pair.register_trainer(rank, report)
        return {"registered": rank}

    @app.post("/pairs/{name}/instances/{instance}/{epoch}/ranks/{rank}/report")
    async def instance_report(
        name: str,
        instance: str,
        epoch: int,
        rank: int,
        request: Request,
        identity: Annotated[str, Query(max_length=64)] = "",
        uncommitted: bool = False,
    ) -> dict[str, Any]:
        pair = gateway.pair(name)
        report = wire.decode_report(await request.body(), max_bytes=MAX_BODY)
        await pair.register_instance(instance, epoch, rank, report, identity, uncommitted)
        return {"registered": rank}

    base = "/pairs/{name}/instances/{instance}/{epoch}"

    @app.get(base + "/parts/{side}/{rank}")
    async def part(name: str, instance: str, epoch: int, side: Side, rank: int, wait: Wait = 0.0) -> Response:
        found = await gateway.pair(name).part(instance, epoch, side, rank, wait)
        if found is None:
            return Response(status_code=204)
        return Response(await asyncio.to_thread(wire.encode_part, found), media_type=MSGPACK)

    @app.put(base + "/rendezvous")
    async def set_rendezvous(name: str, instance: str, epoch: int, body: RendezvousBody) -> dict[str, Any]:
        await gateway.pair(name).set_rendezvous(instance, epoch, body.host, body.port)
        return {}

    @app.get(base + "/rendezvous")
    async def rendezvous(name: str, instance: str, epoch: int, wait: Wait = 0.0) -> Response:
        found = await gateway.pair(name).rendezvous(instance, epoch, wait)
        if found is None:
            return Response(status_code=204)
        return JSONResponse({"host": found[0], "port": found[1]})

    @app.post(base + "/joined")
    async def joined(name: str, instance: str, epoch: int, body: MemberBody) -> dict[str, Any]:
        await gateway.pair(name).join(instance, epoch, body.member)
        return {}

    @app.post(base + "/failures")
    async def failures(name: str, instance: str, epoch: int, body: FailureBody) -> dict[str, Any]:
        kind = getattr(errors, body.error, None) if body.error in errors.__all__ else None
        await gateway.pair(name).fail_rank(instance, epoch, body.who, (kind or ControlError)(body.message))
        return {}

    @app.get("/pairs/{name}/instances/{instance}/orders")
    async def orders(
        name: str, instance: str, after: Annotated[int, Query(ge=0)] = 0, wait: Wait = 0.0
    ) -> dict[str, Any]:
        found = await gateway.pair(name).orders(instance, after, wait)
        return {"orders": [asdict(order) for order in found]}

    @app.post(base + "/ranks/{rank}/ready")
    async def ready(name: str, instance: str, epoch: int, rank: int, body: ReadyBody) -> dict[str, Any]:
        await gateway.pair(name).ready(instance, epoch, rank, body.stale)
        return {}

    @app.get(base + "/go")
    async def go(name: str, instance: str, epoch: int, wait: Wait = 0.0) -> Response:
        order = await gateway.pair(name).go(instance, epoch, wait)
        return Response(status_code=204) if order is None else JSONResponse(asdict(order))

    @app.post("/pairs/{name}/instances/{instance}/ranks/{rank}/restarted")
    async def restarted(name: str, instance: str, rank: int) -> dict[str, Any]:
        await gateway.pair(name).restarted(instance, rank)
        return {}

    @app.post(base + "/trainer/{rank}/transferred")
    async def transferred(name: str, instance: str, epoch: int, rank: int) -> dict[str, Any]:
        await gateway.pair(name).transferred(instance, epoch, rank)
        return {}

    @app.post(base + "/{side}/{rank}/digests")
    async def digests(name: str, instance: str, epoch: int, side: Side, rank: int, request: Request) -> dict[str, Any]:
        report = wire.decode_digests(await request.body(), max_bytes=MAX_BODY)
        await gateway.pair(name).digests(instance, epoch, side, rank, report)
        return {}
