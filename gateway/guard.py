"""Token and size of every request, checked before any route or parser sees it."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from weightcast.transfer.errors import InputError

__all__ = ["MAX_BODY", "MAX_JSON", "MSGPACK", "Guard", "check_token"]

MSGPACK = "application/msgpack"
MAX_BODY = 64 << 20
"""Largest body in bytes of a request that says it is msgpack."""
MAX_JSON = 1 << 20
"""Largest body in bytes of any other request."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def check_token(token: str) -> None:
    """Raises InputError for a token that is too short to be safe."""
    if len(token) < 16:
        raise InputError(
            "the bearer token is shorter than 16 characters; choose a longer one or let the gateway make one"
        )


class Guard:
    """ASGI middleware. `token` is wanted as `Authorization: Bearer TOKEN`; bodies have to state their length."""

    def __init__(self, app: App, token: str) -> None:
        check_token(token)
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal({bytes(k).lower(): bytes(v) for k, v in scope["headers"]})
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, error, message = refusal
        body = json.dumps({"error": error, "message": message}).encode()
        # The body that was not read may still be coming: this connection is of no more use.
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, headers: dict[bytes, bytes]) -> tuple[int, str, str] | None:
        """(status, error class, message), or None for a request that may pass."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given, self._token):
            message = "missing or wrong bearer token; set WEIGHTCAST_TOKEN to the one the gateway was started with"
            return 401, "AuthorizationError", message
        if b"transfer-encoding" in headers:
            return 411, "WireError", "the request does not state its length; send it with Content-Length"
        msgpack = headers.get(b"content-type", b"").split(b";")[0].strip() == MSGPACK.encode()
        limit = MAX_BODY if msgpack else MAX_JSON
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > limit:
            said = length[:20].decode("latin-1")
            return 413, "WireError", f"the request body has {said} bytes, the limit for its content type is {limit}"
        return None
