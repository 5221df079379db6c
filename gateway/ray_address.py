"""Addresses of a gateway that is an actor of Ray, for its clients."""

from __future__ import annotations

from typing import Any

import httpx

from weightcast.transfer.errors import ControlError, InputError
from weightcast.transfer.installed import check_installed

__all__ = [
    "NAME",
    "NAMESPACE",
    "SCHEME",
    "RayTransport",
    "actor_name",
    "find_actor",
    "gateway_url",
    "http_address",
    "import_ray",
    "node_address",
]

NAME = "weightcast"
"""Name of the gateway's actor unless told otherwise."""


NAMESPACE = "weightcast"
"""Ray namespace of all actors of this project."""


SCHEME = "ray"


_START = 60.0
"""Seconds for an actor to be placed and to serve."""


_CONNECT = 5.0
"""Seconds to reach an actor where it was last."""


def actor_name(url: str) -> str:
    """The name in `ray://NAME`. Raises InputError for another address."""
    parsed = httpx.URL(url)
    if parsed.scheme != SCHEME or not parsed.host or parsed.port or parsed.path not in ("", "/"):
        raise InputError(f"gateway url is {url!r}, expected ray://NAME of a gateway's actor")
    return parsed.host


def import_ray() -> Any:
    """The module of Ray. Raises InputError where it is not installed."""
    check_installed("Ray", "ray")
    import ray

    return ray


def find_actor(name: str) -> Any:
    """The handle of an actor of this project, None if there is none."""
    ray = import_ray()
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def gateway_url(name: str = NAME) -> str:
    """The HTTP address of a gateway's actor, for those outside of Ray. Raises ControlError if there is none."""
    ray = import_ray()
    handle = find_actor(name)
    if handle is None:
        raise ControlError(f"there is no Ray actor {name!r} in namespace {NAMESPACE!r}; start a gateway there")
    return str(ray.get(handle.url.remote(), timeout=_START))


def http_address(url: str) -> str:
    """The HTTP address of a gateway; for `ray://NAME` the present one of its actor."""
    return gateway_url(actor_name(url)) if url.startswith(f"{SCHEME}://") else url


def node_address() -> str:
    """The IP address of this process's Ray node."""
    import ray

    return str(ray.util.get_node_ip_address())


class RayTransport(httpx.BaseTransport):
    """Carries a client's requests to a gateway's actor: asks Ray for its address, and then speaks HTTP.

    Calls of the actor itself made a small update a fifth slower. A gateway that does not answer is looked for anew: it
    may be started again elsewhere. One that Ray does not find looks like one that refuses to connect, so that clients
    wait.
    """

    def __init__(self, name: str) -> None:
        import_ray()
        self._name = name
        self._http = httpx.HTTPTransport(trust_env=False)
        self._base: httpx.URL | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Sends one request to where the actor serves. Raises httpx.TransportError when it is not reached."""
        timeout = dict(request.extensions.get("timeout", {}))
        base = self._base = self._base or self._found(min(timeout.get("connect") or _START, _START))
        headers = request.headers.copy()
        headers["Host"] = base.netloc.decode("ascii")
        timeout["connect"] = min(timeout.get("connect") or _CONNECT, _CONNECT)
        http_request = httpx.Request(
            request.method,
            base.copy_with(raw_path=request.url.raw_path),
            headers=headers,
            stream=request.stream,
            extensions={**request.extensions, "timeout": timeout},
        )
        try:
            return self._http.handle_request(http_request)
        except httpx.TransportError:
            self._base = None
            raise

    def _found(self, seconds: float) -> httpx.URL:
        import ray

        _in_cluster(self._name)
        actor = find_actor(self._name)
        if actor is None:
            raise httpx.ConnectError(f"there is no Ray actor {self._name!r} in namespace {NAMESPACE!r}")
        try:
            return httpx.URL(ray.get(actor.url.remote(), timeout=seconds))
        except ray.exceptions.RayError as error:
            raise httpx.ConnectError(" ".join(str(error).split())[:300]) from None

    def close(self) -> None:
        self._http.close()


def _in_cluster(name: str) -> None:
    """Joins the cluster that RAY_ADDRESS names or that runs on this host. Raises ControlError if there is none."""
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        except ConnectionError as error:
            reason = " ".join(str(error).split())[:200]
            raise ControlError(f"ray://{name}: there is no Ray cluster here ({reason}); set RAY_ADDRESS") from None
