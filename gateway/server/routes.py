"""RouteBuilder for people and programs: whole pairs, whole instances, and monitoring."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from weightcast.gateway.layouts.inspection import inspect_instance
from weightcast.gateway.records import EngineSpec, PairOptions
from weightcast.gateway.server.requests import NOTHING, Reply, Request, json_reply
from weightcast.gateway.server.routing import KNOWN, WAIT, Query, RouteBuilder
from weightcast.gateway.server.tokens import Access
from weightcast.transfer.errors import ControlError

__all__ = ["add_routes"]

_PAIR = "/pairs/{name}"
_INSTANCE = _PAIR + "/instances/{instance}"
_TEXT = Query("text", {"type": "boolean", "default": False}, "true for a table to read instead of JSON")


def add_routes(routes: RouteBuilder) -> None:
    """Adds all of them."""
    _add_instances(routes)
    _add_pairs(routes)
    _add_health(routes)


def _add_health(routes: RouteBuilder) -> None:
    """Requests of monitoring."""
    gateway = routes.gateway

    @routes.add("GET", "/healthz", Access.READ)
    async def healthz(_: Request) -> Reply:
        """Health of the gateway: 503 with the reason while it cannot write its state down."""
        if gateway.store.trouble:
            return json_reply({"status": "failing", "reason": gateway.store.trouble}, 503)
        return json_reply({"status": "ok", "pairs": len(gateway.pairs)})

    @routes.add("GET", "/metrics", Access.READ, kinds=["text/plain"])
    async def metrics(_: Request) -> Reply:
        """Metrics in the text format of Prometheus."""
        return Reply(200, gateway.metrics.text(), CONTENT_TYPE_LATEST.encode())


def _add_pairs(routes: RouteBuilder) -> None:
    """Requests about whole pairs."""
    gateway = routes.gateway

    def status(request: Request) -> dict[str, Any]:
        return gateway.pair(request.path["name"]).status()

    @routes.add("GET", "/pairs", Access.READ)
    async def list_pairs(_: Request) -> Reply:
        """Status of all pairs."""
        return json_reply({"pairs": [pair.status() for pair in gateway.pairs.values()]})

    @routes.add("PUT", _PAIR, Access.OPERATOR, body=PairOptions)
    async def create(request: Request) -> Reply:
        """Creates a pair. Replies with its status."""
        spec = (await request.json(PairOptions)).named(request.path["name"])
        return json_reply((await gateway.create(spec)).status())

    @routes.add("GET", _PAIR, Access.READ)
    async def show(request: Request) -> Reply:
        """Status of a pair."""
        return json_reply(status(request))

    @routes.add("DELETE", _PAIR, Access.OPERATOR)
    async def delete(request: Request) -> Reply:
        """Deletes a pair."""
        await gateway.delete(request.path["name"])
        return json_reply({"deleted": request.path["name"]})

    @routes.add("GET", _PAIR + "/updates/{version}", Access.READ, query=[WAIT, KNOWN])
    async def result(request: Request) -> Reply:
        """Outcome of an update for each instance, once it is decided. A trainer rank that names its incarnation hears
        of the updates of its own trainer alone.
        """
        pair, version = routes.pair(request), request.whole("version")
        pair.check_boot(request.text("known"))
        if (incarnation := request.incarnation()) is not None:
            pair.incarnations.check(incarnation, pair.boot)
        if not await pair.poll(lambda: version in pair.results, request.wait()):
            return NOTHING
        return Reply(200, pair.result_text(version).encode())


def _add_instances(routes: RouteBuilder) -> None:
    """Requests about whole instances."""
    gateway = routes.gateway

    @routes.add("PUT", _INSTANCE, Access.OPERATOR, body=EngineSpec)
    async def join(request: Request) -> Reply:
        """Adds an instance to a pair. Replies with the status of the pair."""
        await gateway.join(request.path["name"], request.path["instance"], await request.json(EngineSpec))
        return json_reply(routes.pair(request).status())

    @routes.add("DELETE", _INSTANCE, Access.OPERATOR)
    async def leave(request: Request) -> Reply:
        """Takes an instance out of a pair. Replies with the status of the pair."""
        await gateway.leave(request.path["name"], request.path["instance"])
        return json_reply(routes.pair(request).status())

    @routes.add("GET", _INSTANCE + "/inspect", Access.READ, query=[_TEXT], kinds=["application/json", "text/plain"])
    async def inspect(request: Request) -> Reply:
        """Layout of an instance: ranks, slots, replicas, and the audit of dispatch."""
        name = request.path["instance"]
        instance = routes.pair(request).instance(name)
        if instance.layout is None:
            pair = request.path["name"]
            raise instance.failure or ControlError(f"instance {name} of pair {pair} has not registered yet")
        table = inspect_instance(instance.layout)
        if request.flag("text"):
            return Reply(200, table.to_text().encode(), b"text/plain; charset=utf-8")
        return json_reply(table.to_json())
