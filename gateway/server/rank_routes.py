"""What ranks ask. Their scope is "worker".

In every update each inference rank asks a few times, each trainer rank once for each instance and a few times for all.
Each route says who may ask. What a trainer rank asks is answered only while its incarnation is believed: one check for
all routes, before the answer, and the end of an answer under way when a registration displaces who waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.control.instance import Holding, Instance
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.incarnations import HEADER, Incarnation
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
from weightcast.gateway.server.requests import NOTHING, Answer, Asked, HotRoute, Reply, Speaker, decoded, json_reply
from weightcast.transfer import errors
from weightcast.transfer.errors import ControlError, InputError, PairStateError
from weightcast.transfer.wire import messages as wire
from weightcast.transfer.wire.messages import MSGPACK

__all__ = ["hot_routes"]

_TRAINER = "/pairs/{name}/trainer/{rank}"
_INSTANCE = "/pairs/{name}/instances/{instance}"
_EPOCH = _INSTANCE + "/{epoch}"
"""Of what is asked for one epoch of an instance."""
_MEMBER = _EPOCH + "/{side}/{rank}"
"""Of what the members of its communicator ask, those of both sides."""


class _Routes:
    """Answers of one gateway, in the order in which they were added."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.made: list[HotRoute] = []

    def add(self, method: str, path: str, speaker: Speaker) -> Callable[[Answer], Answer]:
        """Makes an answer that of a route, for who may ask there."""

        def add(answer: Answer) -> Answer:
            async def checked(asked: Asked) -> Reply:
                return await self._checked(asked, speaker, answer)

            self.made.append(HotRoute(method, path, speaker, checked))
            return answer

        return add

    async def _checked(self, asked: Asked, speaker: Speaker, answer: Answer) -> Reply:
        """The answer for who may have it. Raises InputError for a trainer rank that does not say which incarnation it
        is, and for another one that says so, and what `Incarnations.check` raises.
        """
        if speaker is Speaker.ANYBODY:
            return await answer(asked)
        said = asked.incarnation()
        if speaker is Speaker.INSTANCE or (speaker is Speaker.SIDE and asked.side() == "instance"):
            if said is not None:
                raise InputError(f"ranks of an instance say this; header {HEADER} is of trainer rank {said.rank}")
            return await answer(asked)
        if said is None:
            raise InputError(f"trainer ranks say this, and in the header {HEADER} which incarnation they are: register")
        if "rank" in asked.path and asked.whole("rank") != said.rank:
            raise InputError(f"header {HEADER} is of trainer rank {said.rank}, the path of {asked.path['rank'][:20]!r}")
        return await self._believed(asked, self.pair(asked), said, answer)

    async def _believed(self, asked: Asked, pair: Pair, said: Incarnation, answer: Answer) -> Reply:
        pair.incarnations.check(said, pair.boot)
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        pair.asking[task] = said
        try:
            return await answer(asked)
        except asyncio.CancelledError:
            pair.incarnations.check(said, pair.boot)  # it is believed no more since it asked
            raise
        finally:
            del pair.asking[task]

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
        return _listed(new, pair, found.orders.count)


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

    @routes.add("GET", "/pairs/{name}/orders", Speaker.TRAINER)
    async def pair_orders(asked: Asked) -> Reply:
        pair = routes.pair(asked)
        new = await pair.orders_from(*_polling(asked, pair))
        return _listed(new, pair, pair.orders.count)

    @routes.add("GET", _INSTANCE + "/orders", Speaker.INSTANCE)
    async def orders(asked: Asked) -> Reply:
        return await routes.orders(asked)

    @routes.add("GET", "/pairs/{name}/settings", Speaker.ANYBODY)
    async def settings(asked: Asked) -> Reply:
        return json_reply(asdict(routes.pair(asked).spec.settings))

    @routes.add("POST", _TRAINER + "/beat", Speaker.TRAINER)
    async def trainer_beat(asked: Asked) -> Reply:
        await routes.pair(asked).beat(asked.whole("rank"))
        return json_reply({})

    @routes.add("POST", _INSTANCE + "/ranks/{rank}/beat", Speaker.INSTANCE)
    async def beat(asked: Asked) -> Reply:
        found = routes.instance(asked)
        await found.beat(asked.whole("rank"), (await asked.json(BeatBody)).identity)
        return json_reply({"running": found.running})


def _update(routes: _Routes) -> None:
    """What every rank asks in every update of an instance."""

    async def told(found: Instance, epoch: int, wait: float) -> Reply:
        return _numbered(await found.go(epoch, wait))

    @routes.add("POST", _EPOCH + "/ranks/{rank}/ready", Speaker.INSTANCE)
    async def ready(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        body = await asked.json(ReadyBody)
        await found.ready(epoch, asked.whole("rank"), " ".join(body.stale.split()), body.layers)
        return await told(found, epoch, asked.wait())

    @routes.add("GET", _EPOCH + "/go", Speaker.INSTANCE)
    async def go(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        return await told(found, epoch, asked.wait())

    @routes.add("POST", _MEMBER + "/digests", Speaker.SIDE)
    async def digests(asked: Asked) -> Reply:
        """Who says which orders it has followed is answered with the next one."""
        pair, (found, epoch), side = routes.pair(asked), routes.at(asked), asked.side()
        rank, version = asked.whole("rank"), asked.whole("version")
        body = await asked.body()
        report = pair.sent.get(rank, body) if side == "trainer" else None
        if report is None:
            report = await decoded(body, wire.decode_digests)
        await found.report_digests(epoch, side, rank, version, report, asked.flag("first"))
        if side == "trainer":
            pair.sent.keep(rank, body, report)
        return await routes.orders(asked) if asked.has("after") else json_reply({})

    @routes.add("POST", _EPOCH + "/ranks/{rank}/moved", Speaker.INSTANCE)
    async def moved(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        body = await asked.json(MovedBody)
        await found.report_moved(epoch, asked.whole("rank"), body.version, body.layers)
        return json_reply({})

    @routes.add("POST", _MEMBER + "/failures", Speaker.SIDE)
    async def failures(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        if (uid := asked.text("uid")) and uid != found.uid:
            raise PairStateError(
                f"instance {found.name}: the pair was created again since; the failure is of the pair before"
            )
        body = await asked.json(FailureBody)
        kind = getattr(errors, body.error, None) if body.error in errors.__all__ else None
        message = " ".join(body.message.split())
        await found.fail_rank(epoch, _label(asked), (kind or ControlError)(message))
        return json_reply({})


def _connect(routes: _Routes) -> None:
    """What the members of an instance's communicator ask once an epoch."""

    @routes.add("POST", _INSTANCE + "/ranks/{rank}/restarted", Speaker.INSTANCE)
    async def restarted(asked: Asked) -> Reply:
        await routes.instance(asked).restarted(asked.whole("rank"), asked.text("identity", MAX_IDENTITY))
        return json_reply({})

    @routes.add("POST", _EPOCH + "/ranks/{rank}/report", Speaker.INSTANCE)
    async def report(asked: Asked) -> Reply:
        (found, epoch), rank = routes.at(asked), asked.whole("rank")
        verified = asked.whole("verified") if asked.has("verified") else None
        holds = Holding(verified, asked.text("of"), asked.flag("uncommitted"))
        body = await asked.message(wire.decode_report)
        committed = await found.register(epoch, rank, body, asked.text("identity", MAX_IDENTITY), holds)
        routes.pair(asked).follow(asked.whole("followed", "0"), f"{found.name} rank {rank}")
        return json_reply({"registered": rank, "committed": committed, "uid": found.uid})

    @routes.add("GET", _EPOCH + "/parts/{side}/{rank}", Speaker.SIDE)
    async def part(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        encoded = await found.part(epoch, asked.side(), asked.whole("rank"), asked.wait())
        return NOTHING if encoded is None else Reply(200, encoded, MSGPACK.encode())

    @routes.add("PUT", _MEMBER + "/rendezvous", Speaker.SIDE)
    async def set_rendezvous(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        body = await asked.json(RendezvousBody)
        await found.set_rendezvous(epoch, body.host, body.port)
        return json_reply({})

    @routes.add("GET", _MEMBER + "/rendezvous", Speaker.SIDE)
    async def rendezvous(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        meeting = await found.rendezvous(epoch, asked.wait())
        return NOTHING if meeting is None else json_reply({"host": meeting[0], "port": meeting[1]})

    @routes.add("POST", _MEMBER + "/joined", Speaker.SIDE)
    async def joined(asked: Asked) -> Reply:
        found, epoch = routes.at(asked)
        await found.join(epoch, _label(asked))
        return json_reply({})


def _trainer(routes: _Routes) -> None:
    """What the ranks of a trainer ask for all instances."""
    gateway = routes.gateway

    @routes.add("POST", "/pairs/{name}/connect", Speaker.TRAINER)
    async def connect(asked: Asked) -> Reply:
        gateway.start_connect(asked.path["name"])
        return json_reply({"connecting": asked.path["name"]})

    @routes.add("POST", _TRAINER + "/report", Speaker.ANYBODY)
    async def report(asked: Asked) -> Reply:
        pair, rank, start = routes.pair(asked), asked.whole("rank"), asked.text("start")
        pid, was = asked.whole("pid", "0"), asked.whole("was") if asked.has("was") else None
        resumes, takeover = asked.flag("resumes"), asked.flag("takeover")
        found = await asked.message(wire.decode_report)
        generation, first = await pair.register_trainer(
            rank, found, start, pid=pid, was=was, resumes=resumes, takeover=takeover
        )
        return json_reply({"generation": generation, "first_order": first, "boot": pair.boot})

    @routes.add("POST", _TRAINER + "/offers", Speaker.TRAINER)
    async def offer(asked: Asked) -> Reply:
        pair, body = routes.pair(asked), await asked.json(OfferBody)
        taken = await gateway.offer(asked.path["name"], asked.whole("rank"), body.version, asked.wait())
        return json_reply({"boot": pair.boot}) if taken else NOTHING

    @routes.add("GET", "/pairs/{name}/updates/{version}/instances", Speaker.TRAINER)
    async def begun(asked: Asked) -> Reply:
        pair = routes.pair(asked)
        pair.check_boot(asked.text("known"))
        found = await pair.begun(asked.whole("version"), asked.wait())
        return NOTHING if found is None else json_reply({"instances": found[0], "first_order": found[1]})


def _polling(asked: Asked, pair: Pair) -> tuple[int, float]:
    """Number of the first order, and seconds; whoever counts the orders of another life is answered at once."""
    here = asked.text("known") in ("", pair.boot)
    return asked.whole("after", "0") if here else 1 << 62, asked.wait() if here else 0.0


def _listed(orders: list[Order], pair: Pair, count: int) -> Reply:
    """Orders, which life of the pair gave them, and how many it has given."""
    return json_reply({"orders": [order.as_json() for order in orders], "boot": pair.boot, "given": count})


def _label(asked: Asked) -> str:
    """The name in messages of the member of a communicator that asks."""
    who = "trainer" if asked.side() == "trainer" else asked.path["instance"]
    return f"{who} rank {asked.whole('rank')}"


def _numbered(order: tuple[int, Order] | None) -> Reply:
    return NOTHING if order is None else json_reply({"number": order[0], **order[1].as_json()})
