"""Addresses that people hand in: checked before anyone connects, with the certificates to trust behind them."""

from __future__ import annotations

import os
import ssl

import httpx

from weightcast.transfer.errors import EngineError, InputError

__all__ = ["CA_VARIABLE", "check_url", "key_header", "transport_to", "trusted"]

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
    raise InputError(f"{whose}url is {url!r}, expected http://host:port of {of}{fault}")


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
