"""Routes of the gateway: one table, from which requests are dispatched, guarded and documented.

A route says its method and path, the scope that a token needs, who speaks, and which parameters and body it reads. A
request is found by one look-up: ranks ask thousands of times a second. A parameter that a route does not declare cannot
be read, so the document of the routes tells all there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.control.instance import Instance
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.incarnations import HEADER, Incarnation
from weightcast.gateway.server.bodies import MAX_IDENTITY
from weightcast.gateway.server.guard import Receive, Scope, Send
from weightcast.gateway.server.requests import MAX_POLL, Reply, Request, failed, json_reply, refusal_of, stopping
from weightcast.gateway.server.tokens import Access
from weightcast.transfer.documents import Record
from weightcast.transfer.errors import InputError, WeightcastError

__all__ = ["IDENTITY", "KNOWN", "WAIT", "Answer", "Call", "Query", "Route", "RouteTable", "Routes", "Speaker"]

log = logging.getLogger("weightcast.gateway")

Answer = Reply | dict[str, Any] | None
"""Answer to a call: a dict is sent as JSON, and None as an empty one."""


class Speaker(Enum):
    """Party that may ask what a route is for."""

    TRAINER = "a trainer rank, in the incarnation that is believed"
    INSTANCE = "a rank of an instance"
    SIDE = "either, by the `side` of the path"
    ANYBODY = "a client, or a rank that need not have registered"


class Query(NamedTuple):
    """Parameter of a query: its name, its JSON schema, and its meaning."""

    name: str
    schema: dict[str, Any]
    meaning: str


WAIT = Query("wait", {"type": "number", "minimum": 0, "maximum": MAX_POLL}, "seconds of the long poll")
KNOWN = Query("known", {"type": "string", "maxLength": 64}, "life of the pair that the asker has met")
IDENTITY = Query("identity", {"type": "string", "maxLength": MAX_IDENTITY}, "the process that asks")


class Call(Request):
    """A request with the gateway that it asks, and with what its path names there."""

    __slots__ = ("gateway",)
    gateway: Gateway

    @property
    def pair(self) -> Pair:
        """The pair."""
        return self.gateway.pair(self.path["name"])

    @property
    def instance(self) -> Instance:
        """The instance. Raises DisplacedError for who is no longer one of its ranks."""
        instance = self.pair.instance(self.path["instance"])
        instance.check_process(self.identity)
        return instance

    @property
    def epoch(self) -> int:
        """The epoch of the instance."""
        return self.whole("epoch")

    @property
    def rank(self) -> int:
        """The rank."""
        return self.whole("rank")

    @property
    def identity(self) -> str:
        """The process that asks, empty where it does not say."""
        return self.text("identity", MAX_IDENTITY)


Handler = Callable[[Call], Awaitable[Answer]]


@dataclass(frozen=True, eq=False)
class Route:
    """Answer to one method and path. `body` is the record of a JSON body, bytes for msgpack, None where there is none.

    `kinds` are the content types of its answers. A request of a trainer rank is answered only while its incarnation is
    believed: one check for all routes, before the answer, and the end of an answer under way when a registration
    displaces who waits for it.
    """

    method: str
    path: str
    access: Access
    speaker: Speaker
    answer: Handler
    query: Sequence[Query] = ()
    body: type[Record] | type[bytes] | None = None
    kinds: Sequence[str] = ("application/json",)

    @cached_property
    def parameters(self) -> dict[str, Query]:
        """Parameters of its query by name. Ranks of instances say which process they are as well."""
        names = [IDENTITY] if "{instance}" in self.path and self.speaker is not Speaker.ANYBODY else []
        return {parameter.name: parameter for parameter in (*self.query, *names)}

    async def __call__(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            call = Call(scope["path_params"], scope["query_string"], receive, scope["headers"], self.parameters.keys())
            call.gateway = gateway
            answer = await self._checked(call)
            reply = answer if isinstance(answer, Reply) else json_reply(answer or {})
        except WeightcastError as error:
            reply = refusal_of(error)
        except asyncio.CancelledError:  # whoever asks again finds the gateway's next life
            reply = stopping()
        except Exception:
            log.exception("%s %s failed", self.method, self.path)
            reply = failed(self.method, scope["path"][:1000])
        await reply.send(send)

    async def _checked(self, call: Call) -> Answer:
        """The answer for who may have it. Raises InputError for a trainer rank that does not say which incarnation it
        is, and for another one that says so, and what `Incarnations.check` raises.
        """
        if self.speaker is Speaker.ANYBODY:
            return await self.answer(call)
        incarnation = call.incarnation()
        if self.speaker is Speaker.INSTANCE or (self.speaker is Speaker.SIDE and call.side() == "instance"):
            if incarnation is not None:
                rank = incarnation.rank
                raise InputError(f"ranks of an instance say this; header {HEADER} is of trainer rank {rank}")
            return await self.answer(call)
        if incarnation is None:
            raise InputError(f"trainer ranks say this, and in the header {HEADER} which incarnation they are: register")
        if "rank" in call.path and call.rank != incarnation.rank:
            path_rank = call.path["rank"][:20]
            raise InputError(f"header {HEADER} is of trainer rank {incarnation.rank}, the path of {path_rank!r}")
        return await self._believed(call, call.pair, incarnation)

    async def _believed(self, call: Call, pair: Pair, incarnation: Incarnation) -> Answer:
        pair.incarnations.check(incarnation, pair.boot)
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        pair.asking[task] = incarnation
        try:
            return await self.answer(call)
        except asyncio.CancelledError:
            pair.incarnations.check(incarnation, pair.boot)  # it is believed no more since it asked
            raise
        finally:
            del pair.asking[task]


class _Entry(NamedTuple):
    """A route, where its path is fixed, and where it is variable."""

    route: Route
    fixed: tuple[tuple[int, str], ...]
    named: tuple[tuple[int, str], ...]


class RouteTable:
    """Finds routes by method, number of parts of the path, and its last part, in which no two may agree."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._entries: dict[tuple[str, int, str], _Entry] = {}
        for route in routes:
            parts = list(enumerate(route.path.split("/")))
            named = tuple((at, part[1:-1]) for at, part in parts if part.startswith("{"))
            fixed = tuple((at, part) for at, part in parts if not part.startswith("{"))
            last = "" if named and named[-1][0] == len(parts) - 1 else parts[-1][1]
            key = (route.method, len(parts), last)
            if key in self._entries:
                raise ValueError(f"two routes for {key}")
            self._entries[key] = _Entry(route, fixed, named)
        self._methods = sorted({method for method, _, _ in self._entries})

    def find(self, scope: Scope) -> Route | None:
        """The route of a request, whose `path_params` are set then; None for a request without one."""
        parts = scope["path"].split("/")
        entry = self._entry(scope["method"], parts)
        if entry is None:
            return None
        scope["path_params"] = {name: parts[at] for at, name in entry.named}
        return entry.route

    def methods(self, path: str) -> list[str]:
        """The methods that a path has."""
        parts = path.split("/")
        return [method for method in self._methods if self._entry(method, parts) is not None]

    def _entry(self, method: str, parts: list[str]) -> _Entry | None:
        count = len(parts)
        entry = self._entries.get((method, count, parts[-1])) or self._entries.get((method, count, ""))
        if entry is None:
            return None
        for at, part in entry.fixed:
            if parts[at] != part:
                return None
        return entry if all(parts[at] for at, _ in entry.named) else None


class Routes:
    """Routes in the order in which they were added. Each says who may ask."""

    def __init__(self, *added: Route) -> None:
        self.added = list(added)

    def add(
        self,
        method: str,
        path: str,
        access: Access,
        speaker: Speaker = Speaker.ANYBODY,
        query: Sequence[Query] = (),
        body: type[Record] | type[bytes] | None = None,
        kinds: Sequence[str] = ("application/json",),
    ) -> Callable[[Handler], Handler]:
        """Makes an answer that of a route. Its docstring says in the document what the route is for."""

        def add(answer: Handler) -> Handler:
            self.added.append(Route(method, path, access, speaker, answer, query, body, kinds))
            return answer

        return add
