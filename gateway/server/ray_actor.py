"""The gateway as a named Ray actor: the HTTP shell in a process that Ray places, finds and starts again.

    gateway = start_gateway(state="/shared/weightcast.db")      # on any node of a Ray cluster
    worker = TrainerWorker("ray://weightcast", "main", source, rank=rank, world_size=world)

The actor serves HTTP on its node. A client whose address is `ray://NAME` needs no address but the name, before and
after the actor was started anew: it asks Ray where the actor serves. Ray is imported when it is used.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from weightcast.gateway.addresses import http_url
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.gateway.ray_address import _START, NAME, NAMESPACE, find_actor, import_ray, node_address
from weightcast.transfer.errors import AddressError, ControlError, InputError
from weightcast.transfer.transports.addresses import is_unspecified, listen

__all__ = ["WORKER_VARIABLE", "start_gateway", "stop_gateway", "worker_token"]

WORKER_VARIABLE = "WEIGHTCAST_WORKER_TOKEN"
"""Environment variable with the token for ranks."""
_RESTARTS = -1
"""Ray starts the gateway again as often as it dies."""


class GatewayActor:
    """The actor's body. `address` is where its HTTP shell is reached; `port` 0 is any free one, the same again after a
    restart on the same node if there is a `state` file beside which it is kept."""

    def __init__(self, tokens: dict[str, str], state: str | None, port: int, address: str | None) -> None:
        self._tokens, self._state, self._port, self._address = tokens, state, port, address
        self._ready = asyncio.Event()
        self._failure: BaseException | None = None
        self._url = ""
        self._serving = asyncio.get_event_loop().create_task(self._serve())

    async def _serve(self) -> None:
        try:
            await self._run()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._ready.set()

    async def _run(self) -> None:
        from weightcast.gateway.control.gateway import Gateway
        from weightcast.gateway.control.store import Store
        from weightcast.gateway.server.app import make_app
        from weightcast.gateway.server.logs import set_up
        from weightcast.gateway.server.run import make_server
        from weightcast.gateway.server.tokens import Tokens

        set_up("json")
        state = Path(self._state) if self._state else None
        store = Store(state)
        store.open()
        address = self._address or node_address()
        with _listener(address, self._port, state) as listener:
            port = int(listener.getsockname()[1])
            app = make_app(Gateway(address, port, store), Tokens(**self._tokens))
            server = make_server(app)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            if server.started:
                self._url = http_url(address, port)
            self._ready.set()
            await serving

    async def url(self) -> str:
        """Where the HTTP shell is, once it serves. Raises what kept it from serving."""
        await self._ready.wait()
        if not self._url or self._failure is not None:
            raise ControlError(f"the gateway's actor does not serve: {self._failure or 'it did not start'}")
        return self._url


def _listener(address: str, port: int, state: Path | None) -> socket.socket:
    """Listens on `port`, or for 0 on the one of the life before, so that engines find the gateway where it was."""
    kept = state.with_name(state.name + ".port") if state else None
    if not port and kept is not None and kept.exists():
        with suppress(AddressError, OSError, ValueError):
            return listen(address, int(kept.read_text()))
    listener = listen(address, port)
    if kept is not None:
        kept.write_text(str(listener.getsockname()[1]))
    return listener


def worker_token(operator: str) -> str:
    """The token for ranks: WEIGHTCAST_WORKER_TOKEN, else one that follows from the operator's, so that whoever has
    that one can hand it out at any time; it does not tell the operator's.
    """
    return os.environ.get(WORKER_VARIABLE) or hmac.digest(operator.encode(), b"weightcast worker", "sha256").hex()


def start_gateway(
    name: str = NAME,
    *,
    tokens: dict[str, str] | None = None,
    state: str | Path | None = None,
    port: int = 0,
    address: str | None = None,
    detached: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """Starts the actor and waits until it serves; returns its handle, with which it ends unless it is `detached`.

    `tokens` are by scope ("operator", "worker", "read"), the operator's from WEIGHTCAST_TOKEN and the worker's from
    `worker_token` unless given. With a
    `state` file on storage that every node sees Ray starts it again wherever it died and nothing committed is lost.
    `detached` actors outlive the program that started them. `options` are Ray's, as resources or a placement group.
    Raises ControlError if there is such an actor, or if it does not serve, InputError for bad tokens, for an `address`
    that is every one, and without Ray.
    """
    from weightcast.gateway.server.tokens import VARIABLES, Tokens

    ray = import_ray()
    given = {"operator": os.environ.get(TOKEN_VARIABLE, ""), **(tokens or {})}
    if unknown_scopes := given.keys() - VARIABLES:
        raise InputError(f"tokens has {min(unknown_scopes)!r}, expected {', '.join(VARIABLES)}")
    Tokens(given["operator"])  # checked before another one is made from it
    if address is not None and is_unspecified(address):
        raise InputError(f"address {address!r} is every address; give the one at which engines reach the gateway")
    given = {"worker": worker_token(given["operator"]), **given}
    Tokens(**given)
    if find_actor(name) is not None:
        raise ControlError(f"there is a Ray actor {name!r} in namespace {NAMESPACE!r} already; stop it first")
    actor = ray.remote(GatewayActor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached" if detached else None,
        max_restarts=_RESTARTS,
        max_task_retries=_RESTARTS,  # who asks where it is while it starts again waits
        **{"num_cpus": 0, **(options or {})},
    )
    handle = actor.remote(given, str(state) if state else None, port, address)
    try:
        ray.get(handle.url.remote(), timeout=_START)
    except ray.exceptions.RayError as error:
        ray.kill(handle, no_restart=True)
        raise ControlError(
            f"the gateway's actor {name!r} does not serve: {' '.join(str(error).split())[-300:]}"
        ) from None
    return handle


def stop_gateway(name: str = NAME) -> bool:
    """Ends the actor for good; False if there is none. Returns when its name is free."""
    ray = import_ray()
    handle = find_actor(name)
    if handle is None:
        return False
    ray.kill(handle, no_restart=True)
    until = time.monotonic() + _START
    while find_actor(name) is not None and time.monotonic() < until:
        time.sleep(0.05)
    return True
