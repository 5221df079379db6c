"""Requests and replies without a web framework's machinery: ranks ask thousands of times a second.

Each method of a request that reads something raises InputError when that is missing, of another type or out of range.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qsl

from weightcast.gateway.incarnations import HEADER, Incarnation
from weightcast.gateway.server.guard import MAX_BODY, MAX_JSON, Receive, Send
from weightcast.gateway.versions import Version
from weightcast.transfer.documents import Record
from weightcast.transfer.errors import (
    AuthorizationError,
    ControlError,
    CoverageError,
    DescribeError,
    InputError,
    WeightcastError,
)

__all__ = [
    "MAX_POLL",
    "NOTHING",
    "Reply",
    "Request",
    "decoded",
    "failed",
    "json_reply",
    "refusal",
    "refusal_of",
    "stopping",
]

MAX_POLL = 30.0
"""Longest long poll in seconds; clients ask again."""
LARGE_BODY = 256 << 10
"""Bodies above so many bytes are decoded beside the event loop."""
MAX_TEXT = 64
"""Characters of a text in a query."""
_BIG = 1 << 62
_HEADER = HEADER.lower().encode()
_SIDES = ("trainer", "instance")
_STATUS: tuple[tuple[type[WeightcastError], int], ...] = (
    (AuthorizationError, 401),
    (InputError, 400),
    (CoverageError, 422),
    (DescribeError, 422),
    (ControlError, 409),
    (WeightcastError, 409),
)

Body = TypeVar("Body", bound=Record)
T = TypeVar("T")


class Reply(NamedTuple):
    """An answer; `kind` is the content type."""

    status: int
    body: bytes = b""
    kind: bytes = b"application/json"

    async def send(self, send: Send) -> None:
        """Sends it."""
        headers = [(b"content-type", self.kind), (b"content-length", b"%d" % len(self.body))] if self.body else []
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


NOTHING = Reply(204)
"""What was asked for is not there yet: ask again."""


def json_reply(value: object, status: int = 200) -> Reply:
    """`value` as JSON."""
    return Reply(status, json.dumps(value, separators=(",", ":"), allow_nan=False).encode())


def refusal_of(error: WeightcastError) -> Reply:
    """The answer that tells an error."""
    return refusal(type(error).__name__, str(error), next(code for kind, code in _STATUS if isinstance(error, kind)))


def refusal(error: str, message: str, status: int) -> Reply:
    """One line of text that can be encoded, whatever was quoted in it."""
    line = " ".join(message.encode("utf-8", "backslashreplace").decode().split())
    return json_reply({"error": error, "message": line}, status)


def failed(method: str, path: str) -> Reply:
    """The answer to a request on which this program stumbled; its log says over what."""
    return refusal("ControlError", f"{method} {path}: the gateway failed; its log says over what", 500)


def stopping() -> Reply:
    """What whoever waits for something is told when the gateway ends: clients ask its next life."""
    return refusal("ControlError", "the gateway is stopping", 503)


class Request:
    """One request. `path` has the variable parts of its path by name, `parameters` are those that its route
    declares.
    """

    __slots__ = ("_headers", "_parameters", "_query", "_receive", "path")

    def __init__(
        self,
        path: Mapping[str, str],
        query: bytes,
        receive: Receive,
        headers: Sequence[tuple[bytes, bytes]] = (),
        parameters: Set[str] = frozenset(),
    ) -> None:
        self.path, self._receive, self._headers, self._parameters = path, receive, headers, parameters
        self._query = _parsed(query) if query else {}

    def incarnation(self) -> Incarnation | None:
        """The incarnation of the trainer rank that asks, None for who says none. Raises InputError."""
        told = [value for name, value in self._headers if name == _HEADER]
        return Incarnation.parse(told[-1].decode("latin-1")) if told else None

    def side(self) -> str:
        """The side that a path names. Raises InputError for what is none."""
        side = self.path["side"]
        if side not in _SIDES:
            raise InputError(f"side is {side!r}, expected 'trainer' or 'instance'")
        return side

    def whole(self, name: str, default: str = "") -> int:
        """A whole number of path or query that is not negative."""
        given = self.path.get(name) or self._given(name, default)
        if given.isascii() and given.isdigit() and len(given) < 20 and (number := int(given)) < _BIG:
            return number
        raise InputError(f"{name} is {given[:80]!r}, expected a whole number of at least 0")

    def version(self, name: str = "version") -> Version:
        """A version of path or query."""
        given = self.path.get(name) or self._given(name)
        try:
            return Version.parse(given)
        except ValueError as error:
            raise InputError(f"{name}: {error}") from None

    def text(self, name: str, most: int = MAX_TEXT) -> str:
        """A short text of the query, empty where there is none."""
        given = self._given(name)
        if len(given) > most:
            raise InputError(f"{name} has {len(given)} characters, expected at most {most}")
        return given

    def flag(self, name: str) -> bool:
        """A truth value of the query, False where there is none."""
        given = self._given(name, "false")
        if given not in ("true", "false"):
            raise InputError(f"{name} is {given[:80]!r}, expected 'true' or 'false'")
        return given == "true"

    def has(self, name: str) -> bool:
        """Whether the query has it."""
        self._given(name)
        return name in self._query

    def wait(self) -> float:
        """Seconds of a long poll."""
        given = self._given("wait", "0")
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0.0 <= seconds <= MAX_POLL:
            raise InputError(f"wait is {given[:80]!r}, expected seconds between 0 and {MAX_POLL:g}")
        return seconds

    def _given(self, name: str, default: str = "") -> str:
        assert name in self._parameters, f"the route does not declare {name!r}, so its document would not tell of it"
        return self._query.get(name, default)

    async def body(self) -> bytes:
        """The body, whose length the guard has limited."""
        body, more = b"", True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise InputError("the request ends before its body does")
            body += message.get("body", b"")
            more = message.get("more_body", False)
        return body

    async def json(self, kind: type[Body]) -> Body:
        """The body as a record of `kind`."""
        body = await self.body()
        if len(body) > MAX_JSON:  # which the guard leaves to this where a request says that it is no JSON
            raise InputError(f"the body has {len(body)} bytes, expected at most {MAX_JSON} of JSON")
        return kind.given(body, "body")

    async def message(self, decode: Callable[..., T]) -> T:
        """The body as a message of `weightcast.transfer.wire.messages`."""
        return await decoded(await self.body(), decode)


async def decoded(body: bytes, decode: Callable[..., T]) -> T:
    """A message of `weightcast.transfer.wire.messages`."""
    if len(body) > LARGE_BODY:
        return await asyncio.to_thread(decode, body, max_bytes=MAX_BODY)
    return decode(body, max_bytes=MAX_BODY)


def _parsed(query: bytes) -> dict[str, str]:
    """Parameters by name; of one that is given twice the last."""
    text = query.decode("latin-1")
    if "%" in text or "+" in text or not text.isascii():
        return dict(parse_qsl(text, keep_blank_values=True))
    pairs = (part.partition("=") for part in text.split("&"))
    return {name: value for name, _, value in pairs}
