"""Routes that are found, and requests that are refused before anyone is asked."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from weightcast.gateway.server.bodies import RendezvousBody
from weightcast.gateway.server.guard import MAX_JSON
from weightcast.gateway.server.requests import Reply, Request, json_reply
from weightcast.gateway.server.routing import Route, RouteTable, Speaker
from weightcast.gateway.server.tokens import Access
from weightcast.transfer.errors import InputError


async def nothing(_: Request) -> Reply:
    return json_reply({})


RANK = (Access.WORKER, Speaker.ANYBODY, nothing)
ROUTES = [
    Route("GET", "/pairs/{name}/orders", *RANK),
    Route("GET", "/pairs/{name}/instances/{instance}/orders", *RANK),
    Route(
        "POST",
        "/pairs/{name}/instances/{instance}/{epoch}/{side}/{rank}/joined",
        Access.WORKER,
        Speaker.ANYBODY,
        nothing,
    ),
    Route(
        "GET", "/pairs/{name}/instances/{instance}/{epoch}/parts/{side}/{rank}", Access.WORKER, Speaker.ANYBODY, nothing
    ),
]


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("GET", "/pairs/p/orders", (0, {"name": "p"})),
        ("GET", "/pairs/p/instances/i/orders", (1, {"name": "p", "instance": "i"})),
        (
            "POST",
            "/pairs/p/instances/orders/3/trainer/0/joined",
            (2, {"name": "p", "instance": "orders", "epoch": "3", "side": "trainer", "rank": "0"}),
        ),
        (
            "GET",
            "/pairs/p/instances/i/3/parts/x/orders",
            (3, {"name": "p", "instance": "i", "epoch": "3", "side": "x", "rank": "orders"}),
        ),
        ("POST", "/pairs/p/orders", None),
        ("GET", "/pairs//orders", None),
        ("GET", "/pairs/p/orders/", None),
        ("GET", "pairs/p/orders", None),
        ("GET", "/other/p/orders", None),
        ("GET", "/pairs/p/instances/i/3/parties/x/1", None),
        ("GET", "", None),
    ],
)
def test_routes_are_found(method: str, path: str, found: tuple[int, dict[str, str]] | None) -> None:
    scope: dict[str, Any] = {"method": method, "path": path}
    route = RouteTable(ROUTES).find(scope)
    if found is None:
        assert route is None
    else:
        assert (route, scope["path_params"]) == (ROUTES[found[0]], found[1])


def test_routes_that_cannot_be_told_apart() -> None:
    with pytest.raises(ValueError, match="two routes"):
        RouteTable([*ROUTES, Route("GET", "/groups/{name}/orders", *RANK)])


NAMES = {"after", "known", "flag", "wait", "empty", "none"}


def asked(query: str = "", *messages: MutableMapping[str, Any]) -> Request:
    left = list(messages)

    async def receive() -> MutableMapping[str, Any]:
        return left.pop(0)

    return Request({"rank": "3", "epoch": "x"}, query.encode(), receive, parameters=NAMES)


def test_what_a_query_says() -> None:
    one = asked("after=7&known=a%20b&known=c&flag=true&wait=2.5&empty=")
    assert (one.whole("after"), one.whole("rank"), one.whole("none", "4")) == (7, 3, 4)
    assert (one.text("known"), one.text("none"), one.flag("flag"), one.flag("none")) == ("c", "", True, False)
    assert (one.wait(), asked().wait(), one.has("empty"), one.has("none")) == (2.5, 0.0, True, False)


@pytest.mark.parametrize(
    ("query", "ask", "message"),
    [
        ("after=-1", lambda a: a.whole("after"), "after is '-1', expected a whole number of at least 0"),
        ("", lambda a: a.whole("after"), "after is ''"),
        ("", lambda a: a.whole("epoch"), "epoch is 'x'"),
        ("after=%D9%A3", lambda a: a.whole("after"), "after is '٣'"),
        (f"after={1 << 62}", lambda a: a.whole("after"), "expected a whole number"),
        ("wait=nan", lambda a: a.wait(), "wait is 'nan', expected seconds between 0 and 30"),
        ("wait=31", lambda a: a.wait(), "wait is '31'"),
        ("wait", lambda a: a.wait(), "wait is ''"),
        (f"known={'a' * 65}", lambda a: a.text("known"), "known has 65 characters, expected at most 64"),
        ("flag=yes", lambda a: a.flag("flag"), "flag is 'yes', expected 'true' or 'false'"),
    ],
)
def test_what_a_query_may_not_say(query: str, ask: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        ask(asked(query))
    assert str(refused.value).startswith(message) or message in str(refused.value)


def test_a_parameter_that_no_document_tells_of_cannot_be_read() -> None:
    with pytest.raises(AssertionError, match="the route does not declare 'secret'"):
        asked("secret=1").text("secret")


def test_bodies_come_in_pieces_or_not_at_all() -> None:
    async def run() -> None:
        first, last = {"type": "http.request", "body": b'{"port": 1,', "more_body": True}, {"body": b'"host": "h"}'}
        body = await asked("", first, {"type": "http.request", **last}).json(RendezvousBody)
        assert (body.port, body.host) == (1, "h")
        with pytest.raises(InputError, match="ends before its body does"):
            await asked("", first, {"type": "http.disconnect"}).body()
        with pytest.raises(InputError, match=r"^body: host is missing$"):
            await asked("", {"type": "http.request", "body": b"{}"}).json(RendezvousBody)
        large = b'{"port": 1, "host": "h"' + b" " * MAX_JSON + b"}"
        with pytest.raises(InputError, match=r"the body has \d+ bytes, expected at most 1048576 of JSON"):
            await asked("", {"type": "http.request", "body": large}).json(RendezvousBody)

    asyncio.run(run())
