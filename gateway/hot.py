"""The routes that every rank asks in every update, without the framework's machinery: there are thousands a second.

What they take is checked by hand, and as strictly: InputError for what is missing, of another type or out of range.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weightcast.gateway.bodies import ReadyBody
from weightcast.gateway.guard import MAX_BODY
from weightcast.gateway.instance import Instance
from weightcast.gateway.pool import Gateway
from weightcast.gateway.records import as_json
from weightcast.transfer import wire
from weightcast.transfer.errors import InputError

__all__ = ["EPOCH", "MAX_POLL", "add_hot_routes", "decoded"]

MAX_POLL = 30.0
"""Longest long poll in seconds; clients ask again."""
LARGE_BODY = 256 << 10
"""Bodies above so many bytes are decoded beside the event loop."""
EPOCH = "/pairs/{name}/instances/{instance}/{epoch}"
"""Of what is asked for one epoch of an instance."""
_BIG = 1 << 62

T = TypeVar("T")
Answer = Callable[[Request], Awaitable[Response]]


class _HotRoute(Route):
    """A route for workers."""

    tags = ("worker",)


def add_hot_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds them before all others: routes are looked for in their order."""

    def route(method: str, path: str) -> Callable[[Answer], Answer]:
        def add(answer: Answer) -> Answer:
            app.router.routes.append(_HotRoute(path, answer, methods=[method]))
            return answer

        return add

    def at(request: Request) -> Instance:
        return gateway.pair(request.path_params["name"]).instance(request.path_params["instance"])

    def listed(orders: list[dict[str, Any]], count: int) -> Response:
        return JSONResponse({"orders": orders, "boot": gateway.boot, "given": count})

    @route("GET", "/pairs/{name}/orders")
    async def pair_orders(request: Request) -> Response:
        pair = gateway.pair(request.path_params["name"])
        after, wait, known = _polling(request)
        new = await pair.orders_from(after, wait) if known in ("", gateway.boot) else []
        return listed([{"instance": instance, **as_json(order)} for instance, order in new], pair.orders.count)

    @route("GET", "/pairs/{name}/instances/{instance}/orders")
    async def orders(request: Request) -> Response:
        found = at(request)
        after, wait, known = _polling(request)
        new = await found.orders_from(after, wait) if known in ("", gateway.boot) else []
        return listed([as_json(order) for order in new], found.orders.count)

    async def told(found: Instance, epoch: int, wait: float) -> Response:
        order = await found.go(epoch, wait)
        return Response(status_code=204) if order is None else JSONResponse({"number": order[0], **as_json(order[1])})

    @route("POST", EPOCH + "/ranks/{rank}/ready")
    async def ready(request: Request) -> Response:
        found, epoch = at(request), _whole(request.path_params, "epoch")
        try:
            body = ReadyBody.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"body.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        await found.ready(epoch, _whole(request.path_params, "rank"), " ".join(body.stale.split()), body.layers)
        return await told(found, epoch, _wait(request))

    @route("GET", EPOCH + "/go")
    async def go(request: Request) -> Response:
        return await told(at(request), _whole(request.path_params, "epoch"), _wait(request))

    @route("POST", EPOCH + "/{side}/{rank}/digests")
    async def digests(request: Request) -> Response:
        found, side = at(request), request.path_params["side"]
        if side not in ("trainer", "instance"):
            raise InputError(f"side is {side!r}, expected 'trainer' or 'instance'")
        epoch, rank = _whole(request.path_params, "epoch"), _whole(request.path_params, "rank")
        version = _whole(request.query_params, "version")
        report = await decoded(request, wire.decode_digests)
        await found.report_digests(epoch, side, rank, version, report)
        return JSONResponse({})


async def decoded(request: Request, decode: Callable[..., T]) -> T:
    """The message in a body, whose length the guard has limited."""
    body = await request.body()
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(decode, body, max_bytes=MAX_BODY)
    return decode(body, max_bytes=MAX_BODY)


def _polling(request: Request) -> tuple[int, float, str]:
    """`after`, `wait` and `known` of a long poll for orders."""
    known = request.query_params.get("known", "")
    if len(known) > 64:
        raise InputError(f"known has {len(known)} characters, expected at most 64")
    return _whole(request.query_params, "after", "0"), _wait(request), known


def _wait(request: Request) -> float:
    given = request.query_params.get("wait", "0")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= MAX_POLL:
        raise InputError(f"wait is {given[:80]!r}, expected seconds between 0 and {MAX_POLL:g}")
    return seconds


def _whole(values: Any, name: str, default: str = "") -> int:
    """A whole number of a path or query that is not negative."""
    given = str(values.get(name, default))
    if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) < _BIG):
        raise InputError(f"{name} is {given[:80]!r}, expected a whole number of at least 0")
    return int(given)
