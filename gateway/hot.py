"""What ranks ask. Their scope is "worker".

In every update each inference rank asks a few times, each trainer rank once for each instance and a few times for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from weightcast.gateway.asked import NOTHING, Answer, Asked, HotRoute, Reply, decoded, json_reply
from weightcast.gateway.bodies import (
    MAX_IDENTITY,
    BeatBody,
    FailureBody,
    MemberBody,
    MovedBody,
    OfferBody,
    ReadyBody,
    RendezvousBody,
)
from weightcast.gateway.guard import MSGPACK
from weightcast.gateway.instance import Holding, Instance
from weightcast.gateway.pool import Gateway
from weightcast.gateway.records import Order, as_json
from weightcast.gateway.service import Pair
from weightcast.transfer import errors, wire
from weightcast.transfer.errors import ControlError, InputError

__all__ = ["hot_routes"]

_TRAINER = "/pairs/{name}/trainer/{rank}"
_INSTANCE = "/pairs/{name}/instances/{instance}"
_EPOCH = _INSTANCE + "/{epoch}"
"""Of what is asked for one epoch of an instance."""
_SIDES = ("trainer", "instance")


class _Routes:
    """Answers of one gateway, in the order in which they were added."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.made: list[HotRoute] = []

    def add(self, method: str, path: str) -> Callable[[Answer], Answer]:
        """Makes an answer that of a route."""

        def add(answer: Answer) -> Answer:
            self.made.append(HotRoute(method, path, answer))
            return answer

        return add

    def pair(self, asked: Asked) -> Pair:
        """The pair that a path names."""
        return self.gateway.pair(asked.path["name"])

    def instance(self, asked: Asked) -> Instance:
        """The instance that a path names. Raises DisplacedError for who is no longer one of its ranks."""
        found = self.pair(asked).instance(asked.path["instance"])
        found.check_process(asked.text("identity", MAX_IDENTITY))
        return found

    def at(self, asked: Asked) -> tuple[Instance, int]:
        """The instance that a path names, and the epoch."""
        return self.instance(asked), asked.whole("epoch")

    async def orders(self, asked: Asked) -> Reply:
        """The orders of an instance that are asked for."""
        pair, found = self.pair(asked), self.instance(asked)
        new = await found.orders_from(*_polling(asked, pair))
        return _listed([as_json(order) for order in new], pair, found.orders.count)


def hot_routes(gateway: Gateway) -> list[HotRoute]:
    """All of them."""
    routes = _Routes(gateway)
    _orders(routes)
    _update(routes)
    _connect(routes)
    _trainer(routes)
    return routes.made


def _orders(routes: _Routes) -> None:
    """What all ranks follow, and their signs of life."""

    @routes.add("GET", "/pairs/{name}/orders")
    async def pair_orders(asked: Asked) -> Reply:
        pair = routes.pair(asked)
        new = await pair.orders_from(*_polling(asked, pair))
        return _listed([{"instance": instance, **as_json(order)} for instance, order in new], pair, pair.orders.count)

    @routes.add("GET", _INSTANCE + "/orders")
    async def orders(asked: Asked) -> Reply:
        return await routes.orders(asked)

    @routes.add("GET", "/pairs/{name}/settings")
    async def settings(asked: Asked) -> Reply:
        return json_reply(asdict(routes.pair(asked).spec.settings))

    @routes.add("POST", _TRAINER + "/beat")
    async def trainer_beat(asked: Asked) -> Reply:
        await routes.pair(asked).beat(asked.whole("rank"))
        return json_reply({})

    @routes.add("POST", _INSTANCE + "/ranks/{rank}/beat")
    async def beat(asked: Asked) -> Reply:
        found = routes.instance(asked)
        await found.beat(asked.whole("rank"), (await asked.json(BeatBody)).identity)
        return json_reply({"running": found.running})


def _update(routes: _Routes) -> None:
    """What every rank asks in every update of an instance."""

    async def told(found: Instance, epoch: int, wait: float) -> Reply:
        return _numbered(await found.go(epoch, wait))

    @routes.add("POST", _EPOCH + "/ranks/{rank}/ready")
    async def ready(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        body = await asked.json(ReadyBody)
        await found.ready(epoch, asked.whole("rank"), " ".join(body.stale.split()), body.layers)
        return await told(found, epoch, asked.wait())

    @routes.add("GET", _EPOCH + "/go")
    async def go(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        return await told(found, epoch, asked.wait())

    @routes.add("POST", _EPOCH + "/{side}/{rank}/digests")
    async def digests(asked: Asked) -> Reply:
        """Who says which orders it has followed is answered with the next one."""
        pair, (found, epoch), side = routes.pair(asked), routes.at(asked), _side(asked)
        rank, version = asked.whole("rank"), asked.whole("version")
        body = await asked.body()
        report = pair.sent.get(rank, body) if side == "trainer" else None
        if report is None:
            report = await decoded(body, wire.decode_digests)
        await found.report_digests(epoch, side, rank, version, report)
        if side == "trainer":
            pair.sent.keep(rank, body, report)
        return await routes.orders(asked) if asked.has("after") else json_reply({})

    @routes.add("POST", _EPOCH + "/ranks/{rank}/moved")
    async def moved(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        body = await asked.json(MovedBody)
        await found.report_moved(epoch, asked.whole("rank"), body.version, body.layers)
        return json_reply({})

    @routes.add("POST", _EPOCH + "/failures")
    async def failures(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        body = await asked.json(FailureBody)
        kind = getattr(errors, body.error, None) if body.error in errors.__all__ else None
        message = " ".join(body.message.split())
        await found.fail_rank(epoch, " ".join(body.who.split()), (kind or ControlError)(message))
        return json_reply({})


def _connect(routes: _Routes) -> None:
    """What the members of an instance's communicator ask once an epoch."""

    @routes.add("POST", _INSTANCE + "/ranks/{rank}/restarted")
    async def restarted(asked: Asked) -> Reply:
        await routes.instance(asked).restarted(asked.whole("rank"), asked.text("identity", MAX_IDENTITY))
        return json_reply({})

    @routes.add("POST", _EPOCH + "/ranks/{rank}/report")
    async def report(asked: Asked) -> Reply:
        (found, epoch), rank = routes.at(asked), asked.whole("rank")
        verified = asked.whole("verified") if asked.has("verified") else None
        holds = Holding(verified, asked.text("of"), asked.flag("uncommitted"))
        body = await asked.message(wire.decode_report)
        committed = await found.register(epoch, rank, body, asked.text("identity", MAX_IDENTITY), holds)
        return json_reply({"registered": rank, "committed": committed, "uid": found.uid})

    @routes.add("GET", _EPOCH + "/parts/{side}/{rank}")
    async def part(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        encoded = await found.part(epoch, _side(asked), asked.whole("rank"), asked.wait())
        return NOTHING if encoded is None else Reply(200, encoded, MSGPACK.encode())

    @routes.add("PUT", _EPOCH + "/rendezvous")
    async def set_rendezvous(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        body = await asked.json(RendezvousBody)
        await found.set_rendezvous(epoch, body.host, body.port)
        return json_reply({})

    @routes.add("GET", _EPOCH + "/rendezvous")
    async def rendezvous(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        meeting = await found.rendezvous(epoch, asked.wait())
        return NOTHING if meeting is None else json_reply({"host": meeting[0], "port": meeting[1]})

    @routes.add("POST", _EPOCH + "/joined")
    async def joined(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        await found.join(epoch, (await asked.json(MemberBody)).member)
        return json_reply({})


def _trainer(routes: _Routes) -> None:
    """What the ranks of a trainer ask for all instances."""
    gateway = routes.gateway

    @routes.add("POST", "/pairs/{name}/connect")
    async def connect(asked: Asked) -> Reply:
        gateway.start_connect(asked.path["name"])
        return json_reply({"connecting": asked.path["name"]})

    @routes.add("POST", _TRAINER + "/report")
    async def report(asked: Asked) -> Reply:
        pair, rank, start = routes.pair(asked), asked.whole("rank"), asked.text("start")
        found = await asked.message(wire.decode_report)
        generation, first = await pair.register_trainer(rank, found, start)
        return json_reply({"generation": generation, "first_order": first, "boot": pair.boot})

    @routes.add("POST", "/pairs/{name}/offers")
    async def offer(asked: Asked) -> Reply:
        pair, body = routes.pair(asked), await asked.json(OfferBody)
        offered = await gateway.offer(asked.path["name"], body.rank, body.version)
        return json_reply({"offered": offered, "boot": pair.boot})

    @routes.add("GET", "/pairs/{name}/updates/{version}/instances")
    async def begun(asked: Asked) -> Reply:
        pair = routes.pair(asked)
        pair.check_boot(asked.text("known"))
        found = await pair.begun(asked.whole("version"), asked.wait())
        return NOTHING if found is None else json_reply({"instances": found[0], "first_order": found[1]})


def _polling(asked: Asked, pair: Pair) -> tuple[int, float]:
    """Number of the first order, and seconds; whoever counts the orders of another life is answered at once."""
    here = asked.text("known") in ("", pair.boot)
    return asked.whole("after", "0") if here else 1 << 62, asked.wait() if here else 0.0


def _listed(orders: list[dict[str, object]], pair: Pair, count: int) -> Reply:
    """Orders, which life of the pair gave them, and how many it has given."""
    return json_reply({"orders": orders, "boot": pair.boot, "given": count})


def _side(asked: Asked) -> str:
    side = asked.path["side"]
    if side not in _SIDES:
        raise InputError(f"side is {side!r}, expected 'trainer' or 'instance'")
    return side


def _numbered(order: tuple[int, Order] | None) -> Reply:
    return NOTHING if order is None else json_reply({"number": order[0], **as_json(order[1])})
