"""Routes for people and programs: whole pairs, whole instances, and monitoring."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST

from weightcast.gateway.control.pair import check_spec
from weightcast.gateway.layouts.inspection import InspectTable, ReportsTable, inspect_instance, inspect_reports
from weightcast.gateway.records import EngineSpec, PairOptions
from weightcast.gateway.server.requests import NOTHING, Reply, json_reply, refusal
from weightcast.gateway.server.routing import KNOWN, WAIT, Answer, Call, Query, Routes
from weightcast.gateway.server.tokens import Access
from weightcast.transfer.errors import ControlError

__all__ = ["ROUTES"]

ROUTES = Routes()
_PAIR = "/pairs/{name}"
_INSTANCE = _PAIR + "/instances/{instance}"
_REPLACE = Query("replace", {"type": "boolean", "default": False}, "true to put it in place of a pair of that name")
_FORCE = Query("force", {"type": "boolean", "default": False}, "true to end what the pair has under way")
_TEXT = Query("text", {"type": "boolean", "default": False}, "true for a table to read instead of JSON")

# Whole instances


@ROUTES.add("PUT", _INSTANCE, Access.OPERATOR, body=EngineSpec)
async def join(call: Call) -> Answer:
    """Adds an instance to a pair. Replies with the status of the pair."""
    await call.gateway.join(call.path["name"], call.path["instance"], await call.json(EngineSpec))
    return call.pair.status()


@ROUTES.add("DELETE", _INSTANCE, Access.OPERATOR)
async def leave(call: Call) -> Answer:
    """Takes an instance out of a pair. Replies with the status of the pair."""
    await call.gateway.leave(call.path["name"], call.path["instance"])
    return call.pair.status()


@ROUTES.add("GET", _INSTANCE + "/inspect", Access.READ, query=[_TEXT], kinds=["application/json", "text/plain"])
async def inspect(call: Call) -> Answer:
    """Layout of an instance: ranks, slots, replicas, and the audit of dispatch. Without one, what ranks reported."""
    name, pair = call.path["instance"], call.path["name"]
    instance = call.pair.instance(name)
    table: InspectTable | ReportsTable
    if instance.layout is not None:
        table = inspect_instance(instance.layout)
    elif instance.reports:
        reason = str(instance.failure or "its ranks are still registering")
        table = inspect_reports(name, instance.world, instance.reports, reason)
    else:
        raise instance.failure or ControlError(f"instance {name} of pair {pair} has not registered yet")
    if call.flag("text"):
        return Reply(200, table.to_text().encode(), b"text/plain; charset=utf-8")
    return table.to_json()


@ROUTES.add("GET", _INSTANCE + "/ready", Access.READY)
async def ready(call: Call) -> Answer:
    """Readiness of an instance for requests: 200 while it serves, else 503 with the reason."""
    name, instance = call.path["name"], call.path["instance"]
    pair = call.gateway.pairs.get(name)
    member = pair.instances.get(instance) if pair is not None else None
    # Names of other pairs and instances are not for the token of a probe.
    reason = "the gateway does not know it" if member is None else member.unready
    if reason:
        return refusal("PairStateError", f"instance {instance} of pair {name} does not serve: {reason}"[:1000], 503)
    return {"ready": True}


# Whole pairs


@ROUTES.add("GET", "/pairs", Access.READ)
async def list_pairs(call: Call) -> Answer:
    """Status of all pairs."""
    return {"pairs": [pair.status() for pair in call.gateway.pairs.values()]}


@ROUTES.add("PUT", _PAIR, Access.OPERATOR, query=[_REPLACE, WAIT], body=PairOptions)
async def create(call: Call) -> Answer:
    """Creates a pair. Replies with its status. With `replace` a pair of that name is ended and forgotten first."""
    spec, replace = (await call.json(PairOptions)).named(call.path["name"]), call.flag("replace")
    check_spec(spec)
    if replace and not await call.gateway.end(spec.name, "is replaced", call.wait()):
        return NOTHING
    return (await call.gateway.create(spec, replace=replace)).status()


@ROUTES.add("GET", _PAIR, Access.READ)
async def show(call: Call) -> Answer:
    """Status of a pair."""
    return call.pair.status()


@ROUTES.add("GET", _PAIR + "/waiting", Access.READ)
async def waiting(call: Call) -> Answer:
    """Waits of a pair that are under way: who is missing, since when, and for how many seconds at most."""
    return {"waiting": call.pair.waiting_json()}


@ROUTES.add("DELETE", _PAIR, Access.OPERATOR, query=[_FORCE, WAIT])
async def delete(call: Call) -> Answer:
    """Deletes a pair. With `force` a connect or update under way is ended first."""
    name = call.path["name"]
    if call.flag("force") and not await call.gateway.end(name, "is deleted", call.wait()):
        return NOTHING
    await call.gateway.delete(name)
    return {"deleted": name}


@ROUTES.add("GET", _PAIR + "/updates/{version}", Access.READ, query=[WAIT, KNOWN])
async def result(call: Call) -> Answer:
    """Outcome of an update for each instance, once it is decided. A trainer rank that names its incarnation hears
    of the updates of its own trainer alone.
    """
    pair, version = call.pair, call.version()
    pair.check_boot(call.text("known"))
    if (incarnation := call.incarnation()) is not None:
        pair.incarnations.check(incarnation, pair.boot)
    if not await pair.poll(lambda: version in pair.results, call.wait()):
        return NOTHING
    return Reply(200, pair.result_text(version).encode())


# Monitoring


@ROUTES.add("GET", "/livez", Access.OPEN)
async def livez(_: Call) -> Answer:
    """Sign of life of the gateway's process, and nothing else."""
    return {}


@ROUTES.add("GET", "/healthz", Access.READ)
async def healthz(call: Call) -> Answer:
    """Health of the gateway: 503 with the reason while it cannot write its state down."""
    if trouble := call.gateway.store.trouble:
        return json_reply({"status": "failing", "reason": trouble}, 503)
    return {"status": "ok", "pairs": len(call.gateway.pairs)}


@ROUTES.add("GET", "/metrics", Access.READ, kinds=["text/plain"])
async def metrics(call: Call) -> Answer:
    """Metrics in the text format of Prometheus."""
    return Reply(200, call.gateway.metrics.text(), CONTENT_TYPE_LATEST.encode())
