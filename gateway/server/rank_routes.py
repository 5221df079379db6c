"""RouteBuilder for ranks. Their scope is "worker".

In every update each inference rank asks a few times, each trainer rank once for each instance and a few times for all.
"""

from __future__ import annotations

from dataclasses import asdict

from weightcast.gateway.control.instance import Holding, Instance
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.records import Order
from weightcast.gateway.server.bodies import (
    MAX_IDENTITY,
    BeatBody,
    FailureBody,
    MovedBody,
    OfferBody,
    ReadyBody,
    RendezvousBody,
)
from weightcast.gateway.server.requests import NOTHING, Reply, Request, decoded, json_reply
from weightcast.gateway.server.routing import KNOWN, WAIT, Query, RouteBuilder, Speaker
from weightcast.gateway.server.tokens import Access
from weightcast.transfer import errors
from weightcast.transfer.errors import ControlError, PairStateError
from weightcast.transfer.wire import messages as wire
from weightcast.transfer.wire.messages import MSGPACK

__all__ = ["add_rank_routes"]

_TRAINER = "/pairs/{name}/trainer/{rank}"
_INSTANCE = "/pairs/{name}/instances/{instance}"
_EPOCH = _INSTANCE + "/{epoch}"
"""Of what is asked for one epoch of an instance."""
_MEMBER = _EPOCH + "/{side}/{rank}"
"""Of what the members of its communicator ask, those of both sides."""
_WHOLE = {"type": "integer", "minimum": 0}
_FLAG = {"type": "boolean", "default": False}
_POLL = (Query("after", _WHOLE, "number of the first order to send"), WAIT, KNOWN)
_VERSION = Query("version", _WHOLE, "the version that was transferred")
_FIRST = Query("first", _FLAG, "true for the first pass of a trainer rank, before the transfer")
_UID = Query("uid", {"type": "string", "maxLength": 64}, "one creation of the pair, as registered")
_HOLDING = (
    Query("verified", _WHOLE, "version whose digests this rank reported last"),
    Query("of", {"type": "string", "maxLength": 64}, "creation of the pair that it came from"),
    Query("uncommitted", _FLAG, "true when the memory was written since a commit"),
    Query("followed", _WHOLE, "generation of the trainer that wrote the memory last"),
)
_REGISTRATION = (
    Query("start", {"type": "string", "maxLength": 64}, "PROCESS.N for connect number N of a process"),
    Query("pid", _WHOLE, "number of the process"),
    Query("was", _WHOLE, "generation that the process was given before"),
    Query("resumes", _FLAG, "true when it goes on where it was"),
    Query("takeover", _FLAG, "true when it displaces another process even after it was displaced itself"),
)


def add_rank_routes(routes: RouteBuilder) -> None:
    """Adds all of them."""
    _add_orders(routes)
    _add_update(routes)
    _add_connect(routes)
    _add_trainer(routes)


def _add_orders(routes: RouteBuilder) -> None:
    """Orders for all ranks, and their signs of life."""

    @routes.add("GET", "/pairs/{name}/orders", Access.WORKER, Speaker.TRAINER, _POLL)
    async def pair_orders(request: Request) -> Reply:
        """Orders for all instances of a pair, from number `after` on."""
        pair = routes.pair(request)
        orders = await pair.orders_from(*_polling(request, pair))
        return _listed(orders, pair, pair.orders.count)

    @routes.add("GET", _INSTANCE + "/orders", Access.WORKER, Speaker.INSTANCE, _POLL)
    async def orders(request: Request) -> Reply:
        """Orders for the ranks of an instance, from number `after` on."""
        return await _orders_of(routes, request)

    @routes.add("GET", "/pairs/{name}/settings", Access.WORKER)
    async def settings(request: Request) -> Reply:
        """Deadlines and counts of a pair."""
        return json_reply(asdict(routes.pair(request).spec.settings))

    @routes.add("POST", _TRAINER + "/beat", Access.WORKER, Speaker.TRAINER)
    async def trainer_beat(request: Request) -> Reply:
        """Sign of life of a trainer rank."""
        await routes.pair(request).beat(request.whole("rank"))
        return json_reply({})

    @routes.add("POST", _INSTANCE + "/ranks/{rank}/beat", Access.WORKER, Speaker.INSTANCE, body=BeatBody)
    async def beat(request: Request) -> Reply:
        """Sign of life of a rank of an instance. Replies with the epoch whose ranks were told to run."""
        instance = routes.instance(request)
        await instance.beat(request.whole("rank"), (await request.json(BeatBody)).identity)
        return json_reply({"running": instance.running})


def _add_update(routes: RouteBuilder) -> None:
    """Steps of every rank in every update of an instance."""

    @routes.add("POST", _EPOCH + "/ranks/{rank}/ready", Access.WORKER, Speaker.INSTANCE, [WAIT], ReadyBody)
    async def ready(request: Request) -> Reply:
        """Outcome of the check of a rank before the transfer. Replies with the order that follows."""
        instance, epoch = _at(routes, request)
        body = await request.json(ReadyBody)
        await instance.ready(epoch, request.whole("rank"), " ".join(body.stale.split()), body.layers)
        return _numbered(await instance.go(epoch, request.wait()))

    @routes.add("GET", _EPOCH + "/go", Access.WORKER, Speaker.INSTANCE, [WAIT])
    async def go(request: Request) -> Reply:
        """The order that follows the check of a rank."""
        instance, epoch = _at(routes, request)
        return _numbered(await instance.go(epoch, request.wait()))

    @routes.add("POST", _MEMBER + "/digests", Access.WORKER, Speaker.SIDE, [_VERSION, _FIRST, *_POLL], bytes)
    async def digests(request: Request) -> Reply:
        """Digests of a rank. With `after` the reply has the orders that follow."""
        pair, (instance, epoch), side = routes.pair(request), _at(routes, request), request.side()
        rank, version = request.whole("rank"), request.whole("version")
        body = await request.body()
        report = pair.sent.get(rank, body) if side == "trainer" else None
        if report is None:
            report = await decoded(body, wire.decode_digests)
        await instance.report_digests(epoch, side, rank, version, report, request.flag("first"))
        if side == "trainer":
            pair.sent.keep(rank, body, report)
        return await _orders_of(routes, request) if request.has("after") else json_reply({})

    @routes.add("POST", _EPOCH + "/ranks/{rank}/moved", Access.WORKER, Speaker.INSTANCE, body=MovedBody)
    async def moved(request: Request) -> Reply:
        """Layers whose placement changed during the transfer, in place of digests."""
        instance, epoch = _at(routes, request)
        body = await request.json(MovedBody)
        await instance.report_moved(epoch, request.whole("rank"), body.version, body.layers)
        return json_reply({})

    @routes.add("POST", _MEMBER + "/failures", Access.WORKER, Speaker.SIDE, [_UID], FailureBody)
    async def failures(request: Request) -> Reply:
        """Error that keeps a rank from its part."""
        instance, epoch = _at(routes, request)
        if (uid := request.text("uid")) and uid != instance.uid:
            raise PairStateError(
                f"instance {instance.name}: the pair was created again since; the failure is of the pair before"
            )
        body = await request.json(FailureBody)
        kind = getattr(errors, body.error, None) if body.error in errors.__all__ else None
        message = " ".join(body.message.split())
        await instance.fail_rank(epoch, _label(request), (kind or ControlError)(message))
        return json_reply({})


def _add_connect(routes: RouteBuilder) -> None:
    """Steps of the members of an instance's communicator, once an epoch."""

    @routes.add("POST", _INSTANCE + "/ranks/{rank}/restarted", Access.WORKER, Speaker.INSTANCE)
    async def restarted(request: Request) -> Reply:
        """Says that a rank started anew after it had joined."""
        await routes.instance(request).restarted(request.whole("rank"), request.text("identity", MAX_IDENTITY))
        return json_reply({})

    @routes.add("POST", _EPOCH + "/ranks/{rank}/report", Access.WORKER, Speaker.INSTANCE, _HOLDING, bytes)
    async def report(request: Request) -> Reply:
        """Registers a rank of an instance by its report. Replies with `committed`, true when its memory is trusted."""
        (instance, epoch), rank = _at(routes, request), request.whole("rank")
        verified = request.whole("verified") if request.has("verified") else None
        holding = Holding(verified, request.text("of"), request.flag("uncommitted"))
        body = await request.message(wire.decode_report)
        committed = await instance.register(epoch, rank, body, request.text("identity", MAX_IDENTITY), holding)
        routes.pair(request).follow(request.whole("followed", "0"), f"{instance.name} rank {rank}")
        return json_reply({"registered": rank, "committed": committed, "uid": instance.uid})

    @routes.add("GET", _EPOCH + "/parts/{side}/{rank}", Access.WORKER, Speaker.SIDE, [WAIT], kinds=[MSGPACK])
    async def part(request: Request) -> Reply:
        """The part of a rank of the plan of an epoch."""
        instance, epoch = _at(routes, request)
        encoded = await instance.part(epoch, request.side(), request.whole("rank"), request.wait())
        return NOTHING if encoded is None else Reply(200, encoded, MSGPACK.encode())

    @routes.add("PUT", _MEMBER + "/rendezvous", Access.WORKER, Speaker.SIDE, body=RendezvousBody)
    async def set_rendezvous(request: Request) -> Reply:
        """Address on which the first member of the communicator listens."""
        instance, epoch = _at(routes, request)
        body = await request.json(RendezvousBody)
        await instance.set_rendezvous(epoch, body.host, body.port)
        return json_reply({})

    @routes.add("GET", _MEMBER + "/rendezvous", Access.WORKER, Speaker.SIDE, [WAIT])
    async def rendezvous(request: Request) -> Reply:
        """Address on which the first member of the communicator listens, once it does."""
        instance, epoch = _at(routes, request)
        meeting = await instance.rendezvous(epoch, request.wait())
        return NOTHING if meeting is None else json_reply({"host": meeting[0], "port": meeting[1]})

    @routes.add("POST", _MEMBER + "/joined", Access.WORKER, Speaker.SIDE)
    async def joined(request: Request) -> Reply:
        """Says that a member has joined the communicator."""
        instance, epoch = _at(routes, request)
        await instance.join(epoch, _label(request))
        return json_reply({})


def _add_trainer(routes: RouteBuilder) -> None:
    """Requests of the ranks of a trainer for all instances."""
    gateway = routes.gateway

    @routes.add("POST", "/pairs/{name}/connect", Access.WORKER, Speaker.TRAINER)
    async def connect(request: Request) -> Reply:
        """Starts to connect all instances to the trainer."""
        gateway.start_connect(request.path["name"])
        return json_reply({"connecting": request.path["name"]})

    @routes.add("POST", _TRAINER + "/report", Access.WORKER, Speaker.ANYBODY, _REGISTRATION, bytes)
    async def report(request: Request) -> Reply:
        """Registers a trainer rank by its report. Replies with its incarnation and the number of its first order."""
        pair, rank, start = routes.pair(request), request.whole("rank"), request.text("start")
        pid, was = request.whole("pid", "0"), request.whole("was") if request.has("was") else None
        resumes, takeover = request.flag("resumes"), request.flag("takeover")
        rank_report = await request.message(wire.decode_report)
        generation, first_order = await pair.register_trainer(
            rank, rank_report, start, pid=pid, was=was, resumes=resumes, takeover=takeover
        )
        return json_reply({"generation": generation, "first_order": first_order, "boot": pair.boot})

    @routes.add("POST", _TRAINER + "/offers", Access.WORKER, Speaker.TRAINER, [WAIT], OfferBody)
    async def offer(request: Request) -> Reply:
        """Offer of a version by a trainer rank; the first rank's starts the update. An update before it ends first."""
        pair, body = routes.pair(request), await request.json(OfferBody)
        taken = await gateway.offer(request.path["name"], request.whole("rank"), body.version, request.wait())
        return json_reply({"boot": pair.boot}) if taken else NOTHING

    @routes.add("GET", "/pairs/{name}/updates/{version}/instances", Access.WORKER, Speaker.TRAINER, [WAIT, KNOWN])
    async def begun(request: Request) -> Reply:
        """Instances of an update, and the number of its first order, once it begins."""
        pair = routes.pair(request)
        pair.check_boot(request.text("known"))
        update = await pair.begun(request.whole("version"), request.wait())
        return NOTHING if update is None else json_reply({"instances": update[0], "first_order": update[1]})


def _at(routes: RouteBuilder, request: Request) -> tuple[Instance, int]:
    """The instance that a path names, and the epoch."""
    return routes.instance(request), request.whole("epoch")


async def _orders_of(routes: RouteBuilder, request: Request) -> Reply:
    """Orders of an instance from the number on that the request names."""
    pair, instance = routes.pair(request), routes.instance(request)
    orders = await instance.orders_from(*_polling(request, pair))
    return _listed(orders, pair, instance.orders.count)


def _polling(request: Request, pair: Pair) -> tuple[int, float]:
    """Number of the first order, and seconds; whoever counts the orders of another life is answered at once."""
    here = request.text("known") in ("", pair.boot)
    return request.whole("after", "0") if here else 1 << 62, request.wait() if here else 0.0


def _listed(orders: list[Order], pair: Pair, count: int) -> Reply:
    """Orders, which life of the pair gave them, and how many it has given."""
    return json_reply({"orders": [order.as_json() for order in orders], "boot": pair.boot, "given": count})


def _label(request: Request) -> str:
    """The name in messages of the member of a communicator that asks."""
    who = "trainer" if request.side() == "trainer" else request.path["instance"]
    return f"{who} rank {request.whole('rank')}"


def _numbered(order: tuple[int, Order] | None) -> Reply:
    return NOTHING if order is None else json_reply({"number": order[0], **order[1].as_json()})
