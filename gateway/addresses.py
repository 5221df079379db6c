"""Addresses that people hand in, of the gateway and of ranks: read and checked, with certificates and keys for them.

What a socket has to know of addresses is in `weightcast.transfer.transports.addresses`.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import NamedTuple

import httpx

from weightcast.transfer.errors import AddressError, EngineError, InputError
from weightcast.transfer.transports.addresses import host_port, is_loopback, is_unspecified, split_host_port

__all__ = [
    "ADDRESS_VARIABLE",
    "CA_VARIABLE",
    "UNKNOWN",
    "Place",
    "advertised",
    "check_reachable",
    "check_url",
    "http_url",
    "key_fault",
    "key_header",
    "transport_to",
    "trusted",
]

ADDRESS_VARIABLE = "WEIGHTCAST_ADDRESS"
"""Environment variable with the address at which the ranks of an SGLang server are reached."""

CA_VARIABLE = "WEIGHTCAST_CA"
"""Environment variable with a file of certificates to trust in gateway and engines, in place of the system's."""


def check_url(whose: str, url: str, of: str) -> None:
    """Raises InputError unless `url` is http or https with a host. `whose` opens the message, `of` names the server."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        fault = f" ({' '.join(str(error).split())})"
    else:
        if parsed.scheme in ("http", "https") and parsed.host:
            return
        fault = ""
    raise InputError(f"{whose}url is {url!r}, expected http://host:port of {of}, IPv6 as http://[::1]:port{fault}")


def http_url(host: str, port: int) -> str:
    """URL of a server. `host` may have the scheme in front, as in https://gateway or https://::1; else it is http."""
    scheme, _, name = host.rpartition("://")
    return f"{scheme or 'http'}://{host_port(name, port)}"


def advertised(text: str, listening: str, port: int, scheme: str) -> tuple[str, int]:
    """Host, as `http_url` takes it, and port at which engines and ranks reach a gateway.

    `text` is HOST, HOST:PORT or a URL; what it leaves out is as the gateway listens. Raises InputError where the host
    is every address, at which nobody is reached.
    """
    url_scheme, separator, rest = text.rpartition("://")
    if separator:
        check_url("--advertise: ", text, "the gateway")
        scheme, rest, port = url_scheme, rest.removesuffix("/"), 443 if url_scheme == "https" else 80
        if "/" in rest:
            raise InputError(f"--advertise is {text!r}, which has a path; give engines that URL as WEIGHTCAST_GATEWAY")
    host, given_port = split_host_port(rest or listening)
    if is_unspecified(host):
        raise InputError(
            f"{'--advertise' if text else '--host'} {host} is every address, and engines have to be told one: give "
            "--advertise HOST, a name or an address at which engines and ranks reach this gateway"
        )
    return host if scheme == "http" else f"{scheme}://{host}", given_port or port


class Place(NamedTuple):
    """Where a rank is: the name of its host, the IP address at which peers reach it, and its network.

    The network is the same for ranks that share a loopback device, and only for them. Address and network are empty
    where they are unknown.
    """

    host: str = ""
    address: str = ""
    network: str = ""

    def __str__(self) -> str:
        return f"host {self.host or 'unknown'} ({self.address or 'address unknown'})"


UNKNOWN = Place()


def check_reachable(instance: str, members: Mapping[str, Place]) -> None:
    """Raises AddressError for a member of a communicator whose address is loopback, with a member on another host."""
    for member, place in members.items():
        peers = members.items() if place.network and is_loopback(place.address) else ()
        far_peer = next((name for name, peer in peers if peer.network not in ("", place.network)), None)
        if far_peer is not None:
            raise AddressError(
                f"instance {instance}: {member} is on {place}, and loopback reaches nobody on another host, such as "
                f"{far_peer} on {members[far_peer]}; give {member} the gateway's URL by an address that is not "
                f"loopback, or its own address: address= of its worker, {ADDRESS_VARIABLE} for SGLang"
            )


def transport_to(url: str) -> httpx.BaseTransport | None:
    """Transport to a gateway at `url`, None for HTTP. Raises InputError for another address than http, https, ray."""
    if not url.startswith("ray://"):
        check_url("gateway ", url, "the gateway")
        return None
    from weightcast.gateway.ray_address import RayTransport, actor_name

    return RayTransport(actor_name(url))


def trusted(url: str) -> ssl.SSLContext | bool:
    """Value of httpx's `verify` for `url`: for https the certificates that WEIGHTCAST_CA names, else True.

    Raises InputError for a file that cannot be read.
    """
    file = os.environ.get(CA_VARIABLE, "")
    if not file or not url.startswith("https"):
        return True
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"{CA_VARIABLE} names {file!r}, which is no file of certificates: {error}") from None


def key_header(whose: str, variable: str, process: str = "the gateway") -> dict[str, str]:
    """The header with the key of an engine, which an environment variable holds; empty without a variable.

    Raises EngineError for one that holds none. `whose` opens its text, `process` names this process. No error shows a
    key.
    """
    if not variable:
        return {}
    key = os.environ.get(variable, "")
    if not key:
        raise EngineError(
            f"{whose}variable {variable} is not set in the environment of {process}; start it with the engine's key"
        )
    if not (key.isascii() and key.isprintable() and key == key.strip()):
        raise EngineError(f"{whose}variable {variable} holds line breaks, outer spaces or characters beyond ASCII")
    return {"Authorization": f"Bearer {key}"}


def key_fault(status: int, variable: str, option: str) -> str:
    """Why an engine's server refuses a request, if it does so for its key; empty for another `status`.

    `option` is the one that names the variable.
    """
    if status not in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return ""
    return f"the server {f'does not take the key of variable {variable}' if variable else f'wants a key: set {option}'}"
