"""Routes for ranks. Their scope is "worker".

In every update each inference rank asks a few times, each trainer rank once for each instance and a few times for all.
"""

from __future__ import annotations

from dataclasses import asdict

from weightcast.gateway.addresses import Place
from weightcast.gateway.control.instance import Holding
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.records import Order
from weightcast.gateway.server.bodies import BeatBody, FailureBody, MovedBody, OfferBody, ReadyBody, RendezvousBody
from weightcast.gateway.server.requests import NOTHING, Reply, decoded
from weightcast.gateway.server.routing import KNOWN, WAIT, Answer, Call, Query, Routes, Speaker
from weightcast.gateway.server.tokens import Access
from weightcast.gateway.versions import VERSION_SCHEMA
from weightcast.transfer.errors import ControlError, PairStateError, error_named
from weightcast.transfer.layout.tables import RankReport
from weightcast.transfer.wire import messages as wire
from weightcast.transfer.wire.messages import MSGPACK

__all__ = ["ROUTES"]

ROUTES = Routes()
_TRAINER = "/pairs/{name}/trainer/{rank}"
_INSTANCE = "/pairs/{name}/instances/{instance}"
_EPOCH = _INSTANCE + "/{epoch}"
"""Of what is asked for one epoch of an instance."""
_MEMBER = _EPOCH + "/{side}/{rank}"
"""Of what the members of its communicator ask, those of both sides."""
_WHOLE = {"type": "integer", "minimum": 0}
_FLAG = {"type": "boolean", "default": False}
_POLL = (Query("after", _WHOLE, "number of the first order to send"), WAIT, KNOWN)
_VERSION = Query("version", VERSION_SCHEMA, "the version that was transferred")
_FIRST = Query("first", _FLAG, "true for the first pass of a trainer rank, before the transfer")
_UID = Query("uid", {"type": "string", "maxLength": 64}, "one creation of the pair, as registered")
_PLACE = (
    Query("address", {"type": "string", "maxLength": 255}, "IP address at which peers reach the rank"),
    Query("network", {"type": "string", "maxLength": 64}, "equal for ranks that share a loopback device"),
)
_HOLDING = (
    Query("verified", VERSION_SCHEMA, "version whose digests this rank reported last"),
    Query("of", {"type": "string", "maxLength": 64}, "creation of the pair that it came from"),
    Query("uncommitted", _FLAG, "true when the memory was written since a commit"),
    Query("followed", _WHOLE, "generation of the trainer that wrote the memory last"),
    *_PLACE,
)
_REGISTRATION = (
    Query("start", {"type": "string", "maxLength": 64}, "PROCESS.N for connect number N of a process"),
    Query("pid", _WHOLE, "number of the process"),
    Query("was", _WHOLE, "generation that the process was given before"),
    Query("resumes", _FLAG, "true when it goes on where it was"),
    Query("takeover", _FLAG, "true when it displaces another process even after it was displaced itself"),
    *_PLACE,
)


# Orders for all ranks, and their signs of life


@ROUTES.add("GET", "/pairs/{name}/orders", Access.WORKER, Speaker.TRAINER, _POLL)
async def pair_orders(call: Call) -> Answer:
    """Orders for all instances of a pair, from number `after` on."""
    pair = call.pair
    orders = await pair.orders_from(*_polling(call, pair))
    return _listed(orders, pair, pair.orders.count)


@ROUTES.add("GET", _INSTANCE + "/orders", Access.WORKER, Speaker.INSTANCE, _POLL)
async def orders(call: Call) -> Answer:
    """Orders for the ranks of an instance, from number `after` on."""
    return await _orders_of(call)


@ROUTES.add("GET", "/pairs/{name}/settings", Access.WORKER)
async def settings(call: Call) -> Answer:
    """Deadlines and counts of a pair."""
    return asdict(call.pair.spec.settings)


@ROUTES.add("GET", "/pairs/{name}/catalog", Access.WORKER, Speaker.INSTANCE, [WAIT], kinds=[MSGPACK])
async def catalog(call: Call) -> Answer:
    """Names, shapes and dtypes of the trainer's tensors, once all of its ranks have registered."""
    pair = call.pair
    await pair.poll(lambda: pair.trainer_layout is not None, call.wait())
    if pair.trainer_layout is None:
        return NOTHING
    return Reply(200, wire.encode_catalog(pair.trainer_layout.tensors), MSGPACK.encode())


@ROUTES.add("POST", _TRAINER + "/beat", Access.WORKER, Speaker.TRAINER)
async def trainer_beat(call: Call) -> None:
    """Sign of life of a trainer rank."""
    await call.pair.beat(call.rank)


@ROUTES.add("POST", _INSTANCE + "/ranks/{rank}/beat", Access.WORKER, Speaker.INSTANCE, body=BeatBody)
async def beat(call: Call) -> Answer:
    """Sign of life of a rank of an instance. Replies with the epoch whose ranks were told to run."""
    instance = call.instance
    await instance.beat(call.rank, (await call.json(BeatBody)).identity)
    return {"running": instance.running}


# Steps of every rank in every update of an instance


@ROUTES.add("POST", _EPOCH + "/ranks/{rank}/ready", Access.WORKER, Speaker.INSTANCE, [WAIT], ReadyBody)
async def ready(call: Call) -> Answer:
    """Outcome of the check of a rank before the transfer. Replies with the order that follows."""
    instance, body = call.instance, await call.json(ReadyBody)
    await instance.ready(call.epoch, call.rank, " ".join(body.stale.split()), body.layers)
    return _numbered(await instance.go(call.epoch, call.wait()))


@ROUTES.add("GET", _EPOCH + "/go", Access.WORKER, Speaker.INSTANCE, [WAIT])
async def go(call: Call) -> Answer:
    """The order that follows the check of a rank."""
    return _numbered(await call.instance.go(call.epoch, call.wait()))


@ROUTES.add("POST", _MEMBER + "/digests", Access.WORKER, Speaker.SIDE, [_VERSION, _FIRST, *_POLL], bytes)
async def digests(call: Call) -> Answer:
    """Digests of a rank. With `after` the reply has the orders that follow."""
    pair, instance, side = call.pair, call.instance, call.side()
    body = await call.body()
    last = pair.sent.get(call.rank) if side == "trainer" else None
    report = last[1] if last is not None and last[0] == body else await decoded(body, wire.decode_digests)
    await instance.report_digests(call.epoch, side, call.rank, call.version(), report, call.flag("first"))
    if side == "trainer":
        pair.sent[call.rank] = body, report
    return await _orders_of(call) if call.has("after") else None


@ROUTES.add("POST", _EPOCH + "/ranks/{rank}/moved", Access.WORKER, Speaker.INSTANCE, body=MovedBody)
async def moved(call: Call) -> None:
    """Layers whose placement changed during the transfer, in place of digests."""
    instance, body = call.instance, await call.json(MovedBody)
    await instance.report_moved(call.epoch, call.rank, body.version, body.layers)


@ROUTES.add("POST", _MEMBER + "/failures", Access.WORKER, Speaker.SIDE, [_UID], FailureBody)
async def failures(call: Call) -> None:
    """Error that keeps a rank from its part."""
    instance = call.instance
    if (uid := call.text("uid")) and uid != instance.uid:
        raise PairStateError(
            f"instance {instance.name}: the pair was created again since; the failure is of the pair before"
        )
    body = await call.json(FailureBody)
    kind = error_named(body.error) or ControlError
    await instance.fail_rank(call.epoch, _label(call), kind(" ".join(body.message.split())))


# Steps of the members of an instance's communicator, once an epoch


@ROUTES.add("POST", _INSTANCE + "/ranks/{rank}/restarted", Access.WORKER, Speaker.INSTANCE)
async def restarted(call: Call) -> None:
    """Says that a rank started anew after it had joined."""
    await call.instance.restarted(call.rank, call.identity)


@ROUTES.add("POST", _EPOCH + "/ranks/{rank}/report", Access.WORKER, Speaker.INSTANCE, _HOLDING, bytes)
async def report(call: Call) -> Answer:
    """Registers a rank of an instance by its report. Replies with `committed`, true when its memory is trusted."""
    instance, rank = call.instance, call.rank
    verified = call.version("verified") if call.has("verified") else None
    holding = Holding(verified, call.text("of"), call.flag("uncommitted"))
    body = await call.message(wire.decode_report)
    committed = await instance.register(call.epoch, rank, body, call.identity, holding, _place(call, body))
    call.pair.follow(call.whole("followed", "0"), f"{instance.name} rank {rank}")
    return {"registered": rank, "committed": committed, "uid": instance.uid}


@ROUTES.add("GET", _EPOCH + "/parts/{side}/{rank}", Access.WORKER, Speaker.SIDE, [WAIT], kinds=[MSGPACK])
async def part(call: Call) -> Answer:
    """The part of a rank of the plan of an epoch."""
    encoded = await call.instance.part(call.epoch, call.side(), call.rank, call.wait())
    return NOTHING if encoded is None else Reply(200, encoded, MSGPACK.encode())


@ROUTES.add("PUT", _MEMBER + "/rendezvous", Access.WORKER, Speaker.SIDE, body=RendezvousBody)
async def set_rendezvous(call: Call) -> None:
    """Address on which the first member of the communicator listens."""
    instance, body = call.instance, await call.json(RendezvousBody)
    await instance.set_rendezvous(call.epoch, body.host, body.port)


@ROUTES.add("GET", _MEMBER + "/rendezvous", Access.WORKER, Speaker.SIDE, [WAIT])
async def rendezvous(call: Call) -> Answer:
    """Address on which the first member of the communicator listens, once it does."""
    meeting = await call.instance.rendezvous(call.epoch, call.wait())
    return NOTHING if meeting is None else {"host": meeting[0], "port": meeting[1]}


@ROUTES.add("POST", _MEMBER + "/joined", Access.WORKER, Speaker.SIDE)
async def joined(call: Call) -> None:
    """Says that a member has joined the communicator."""
    await call.instance.join(call.epoch, _label(call))


# Requests of the ranks of a trainer for all instances


@ROUTES.add("POST", "/pairs/{name}/connect", Access.WORKER, Speaker.TRAINER)
async def connect(call: Call) -> Answer:
    """Starts to connect all instances to the trainer."""
    call.gateway.start_connect(call.path["name"])
    return {"connecting": call.path["name"]}


@ROUTES.add("POST", _TRAINER + "/report", Access.WORKER, Speaker.ANYBODY, _REGISTRATION, bytes)
async def trainer_report(call: Call) -> Answer:
    """Registers a trainer rank by its report. Replies with its incarnation and the number of its first order."""
    pair, rank, start = call.pair, call.rank, call.text("start")
    pid, was = call.whole("pid", "0"), call.whole("was") if call.has("was") else None
    resumes, takeover = call.flag("resumes"), call.flag("takeover")
    rank_report = await call.message(wire.decode_report)
    generation, first_order = await pair.register_trainer(
        rank, rank_report, start, pid=pid, was=was, resumes=resumes, takeover=takeover, place=_place(call, rank_report)
    )
    return {"generation": generation, "first_order": first_order, "boot": pair.boot}


@ROUTES.add("POST", _TRAINER + "/offers", Access.WORKER, Speaker.TRAINER, [WAIT], OfferBody)
async def offer(call: Call) -> Answer:
    """Offer of a version by a trainer rank; the first rank's starts the update. An update before it ends first.
    Replies with the version as the pair has it.
    """
    pair, body = call.pair, await call.json(OfferBody)
    version = await call.gateway.offer(call.path["name"], call.rank, body.version, call.wait(), restart=body.restart)
    return NOTHING if version is None else {"boot": pair.boot, "version": version.as_json()}


@ROUTES.add("GET", "/pairs/{name}/updates/{version}/instances", Access.WORKER, Speaker.TRAINER, [WAIT, KNOWN])
async def begun(call: Call) -> Answer:
    """Instances of an update, how many of them it needs, and the number of its first order, once it begins."""
    pair = call.pair
    pair.check_boot(call.text("known"))
    update = await pair.begun(call.version(), call.wait())
    if update is None:
        return NOTHING
    return {"instances": update[0], "first_order": update[1], "min_instances": pair.spec.min_instances}


def _place(call: Call, report: RankReport) -> Place:
    """Place of the rank that registers; older ranks tell their host alone."""
    return Place(report.host, " ".join(call.text("address", 255).split()), call.text("network"))


async def _orders_of(call: Call) -> Answer:
    """Orders of an instance from the number on that the request names."""
    pair, instance = call.pair, call.instance
    return _listed(await instance.orders_from(*_polling(call, pair)), pair, instance.orders.count)


def _polling(call: Call, pair: Pair) -> tuple[int, float]:
    """Number of the first order, and seconds; whoever counts the orders of another life is answered at once."""
    is_here = call.text("known") in ("", pair.boot)
    return call.whole("after", "0") if is_here else 1 << 62, call.wait() if is_here else 0.0


def _listed(orders: list[Order], pair: Pair, count: int) -> Answer:
    """Orders, which life of the pair gave them, and how many it has given."""
    return {"orders": [order.as_json() for order in orders], "boot": pair.boot, "given": count}


def _label(call: Call) -> str:
    """The name in messages of the member of a communicator that asks."""
    return f"{'trainer' if call.side() == 'trainer' else call.path['instance']} rank {call.rank}"


def _numbered(order: tuple[int, Order] | None) -> Answer:
    return NOTHING if order is None else {"number": order[0], **order[1].as_json()}
