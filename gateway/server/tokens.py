"""Who may ask what: bearer tokens with a scope each, and what happens to those who guess."""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import lru_cache
from ipaddress import ip_network

from weightcast.gateway.client import TOKEN_VARIABLE, check_token
from weightcast.transfer.errors import InputError
from weightcast.transfer.transports.addresses import ip_address

__all__ = ["VARIABLES", "Access", "Throttle", "Tokens", "make_token", "source_of"]

VARIABLES = {
    "operator": TOKEN_VARIABLE,
    "worker": "WEIGHTCAST_WORKER_TOKEN",
    "read": "WEIGHTCAST_READ_TOKEN",
    "ready": "WEIGHTCAST_READY_TOKEN",
}
"""The environment variable with the token of each scope. Whoever asks the gateway has its own in WEIGHTCAST_TOKEN."""

MIN_TOKEN = 16
MAX_ADDRESSES = 10_000
"""Of how many addresses and connections a throttle remembers anything."""


class Access(IntEnum):
    """What a token is good for; each includes those before it."""

    OPEN = 0
    """Ask what wants no token."""
    READY = 1
    """Ask if an instance serves: a probe's token stands in its manifest, where many read it."""
    READ = 2
    """See pairs, instances and metrics."""
    WORKER = 3
    """Act as a rank of a trainer or of an instance."""
    OPERATOR = 4
    """Create and delete pairs, let instances join and leave: the gateway calls the engines' addresses given there."""


def make_token() -> str:
    """A fresh random bearer token."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """One token for each scope; an empty one is nobody's.

    Raises InputError for tokens that are too short to be safe, or that are the same for two scopes.
    """

    operator: str
    worker: str = ""
    read: str = ""
    ready: str = ""

    def __post_init__(self) -> None:
        tokens = [(field.name, getattr(self, field.name)) for field in fields(self) if getattr(self, field.name)]
        for name, token in tokens:
            check_token(token, f"scope {name} ({VARIABLES[name]})")
            if len(token) < MIN_TOKEN:
                raise InputError(
                    f"the {name} token is shorter than {MIN_TOKEN} characters; set {VARIABLES[name]} to a longer "
                    "one, or let the gateway make one"
                )
        if not self.operator:
            raise InputError(
                f"there is no operator token; set {TOKEN_VARIABLE} to one of {MIN_TOKEN} characters or more"
            )
        if len({token for _, token in tokens}) < len(tokens):
            raise InputError("two scopes have the same token; choose another for one of them")

    def access(self, token: bytes) -> Access | None:
        """The scope of a token, None for a wrong one. Takes the same time whichever it is."""
        scopes = {
            Access.READY: self.ready,
            Access.READ: self.read,
            Access.WORKER: self.worker,
            Access.OPERATOR: self.operator,
        }
        matches = [access for access, text in scopes.items() if hmac.compare_digest(token, text.encode()) and text]
        return max(matches, default=None)


@lru_cache(MAX_ADDRESSES)
def source_of(address: str) -> str:
    """The addresses that count as one guesser: one of IPv4, a network of 64 bits of IPv6, which one host may have."""
    source = ip_address(address)
    if source is None or source.version == 4 or source.is_loopback:
        return address if source is None else str(source)
    return str(ip_network((source, 64), strict=False))


class Throttle:
    """Slows down who guesses tokens: after `limit` wrong ones within `window` seconds a source is not heard.

    Connections that have shown a right token before are heard all the same, so that one process with a wrong token does
    not shut out its neighbours on the same host.
    """

    def __init__(self, limit: int = 20, window: float = 10.0) -> None:
        self._limit, self._window = limit, window
        self._wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()

    def wait(self, address: str, port: int, now: float) -> float:
        """Seconds that an address has to wait, 0 for one that is heard."""
        source = source_of(address)
        since, count = self._wrong.get(source, (now, 0))
        left = since + self._window - now
        if left <= 0:
            self._wrong.pop(source, None)
            return 0.0
        return left if count >= self._limit and (address, port) not in self._known else 0.0

    def wrong(self, address: str, port: int, now: float) -> None:
        """A wrong token came from there."""
        source = source_of(address)
        since, count = self._wrong.get(source, (now, 0))
        self._wrong[source] = (since, count + 1)
        self._known.pop((address, port), None)
        while len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)

    def right(self, address: str, port: int) -> None:
        """A right token came from there."""
        self._known[address, port] = None
        self._known.move_to_end((address, port))
        while len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)
