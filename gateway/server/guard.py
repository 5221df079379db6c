"""Token, scope and size of every request, checked before any route or parser sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weightcast.gateway.server.tokens import Access, Throttle, Tokens, source_of
from weightcast.transfer.wire.messages import MSGPACK

__all__ = ["MAX_BODY", "MAX_JSON", "App", "Guard", "Receive", "Scope", "Send"]

MAX_BODY = 64 << 20
"""Largest body in bytes of a request that says it is msgpack."""
MAX_JSON = 1 << 20
"""Largest body in bytes of any other request."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_Refusal = tuple[int, str, str]
_WRONG = "missing or wrong bearer token; set WEIGHTCAST_TOKEN to one that the gateway was started with"


class Guard:
    """ASGI middleware. A token is wanted as `Authorization: Bearer TOKEN`; bodies have to state their length.

    `needs` gives the scope that a request wants of its token. `refused` is told the status of each refusal.
    """

    def __init__(
        self,
        app: App,
        tokens: Tokens,
        needs: Callable[[Scope], Access],
        refused: Callable[[int], None] = lambda status: None,
        throttle: Throttle | None = None,
    ) -> None:
        self._app, self._tokens, self._needs, self._refused = app, tokens, needs, refused
        self._throttle = throttle or Throttle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing here speaks anything else; the server closes the connection
        headers = {bytes(k).lower(): bytes(v) for k, v in scope["headers"]}
        refusal = self._who(scope, headers) or self._size(headers)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, error, message = refusal
        self._refused(status)
        body = json.dumps({"error": error, "message": message}).encode()
        # The body that was not read may still be coming: this connection is of no more use.
        answer = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": answer})
        await send({"type": "http.response.body", "body": body})

    def _who(self, scope: Scope, headers: dict[bytes, bytes]) -> _Refusal | None:
        """(status, error class, message), or None for a token that may ask this, or where none is wanted."""
        needed = self._needs(scope)
        if needed is Access.OPEN:
            return None
        address, port = scope.get("client") or ("", 0)
        now = time.monotonic()
        if (left := self._throttle.wait(address, port, now)) > 0:
            message = f"too many wrong tokens from {source_of(address)}; none is looked at for {left:.0f} s more"
            return 429, "AuthorizationError", message
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        access = self._tokens.access(given) if scheme.lower() == b"bearer" else None
        if access is None:
            self._throttle.wrong(address, port, now)
            return 401, "AuthorizationError", _WRONG
        self._throttle.right(address, port)
        if access < needed:
            wanted, found = needed.name.lower(), access.name.lower()
            message = f"this needs a token of scope {wanted}; the one given has scope {found}"
            return 403, "AuthorizationError", f"{message}; set WEIGHTCAST_TOKEN to the gateway's {wanted} token"
        return None

    def _size(self, headers: dict[bytes, bytes]) -> _Refusal | None:
        if b"transfer-encoding" in headers:
            return 411, "WireError", "the request does not state its length; send it with Content-Length"
        msgpack = headers.get(b"content-type", b"").split(b";")[0].strip() == MSGPACK.encode()
        limit = MAX_BODY if msgpack else MAX_JSON
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            said = length[:20].decode("latin-1")
            return 413, "WireError", f"the request body has {said} bytes, the limit for its content type is {limit}"
        return None
