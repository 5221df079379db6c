"""Addresses of sockets, IPv4 and IPv6: written, read, told apart, listened on.

A host is a name or an IP address and has no brackets. Only a text with a port, or a URL, puts an IPv6 address in them.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from weightcast.transfer.errors import AddressError, InputError

__all__ = [
    "bare",
    "family_of",
    "host_port",
    "ip_address",
    "is_loopback",
    "is_unspecified",
    "listen",
    "numeric",
    "split_host_port",
]

_BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks of a large pair connect at once."""
_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%[^\[\]\s]+)?)\]|([^\[\]:/@?#\s]+))(?::([0-9]{1,5}))?")


def host_port(host: str, port: int) -> str:
    """HOST:PORT for messages and URLs, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bare(host: str) -> str:
    """The host without brackets, in which people write IPv6 addresses."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def split_host_port(text: str) -> tuple[str, int | None]:
    """Host and port of HOST, HOST:PORT, IPV6, [IPV6] or [IPV6]:PORT; without a port None. Raises InputError."""
    if ip_address(text) is not None:
        return text, None
    match = _HOST_PORT.fullmatch(text)
    if match is not None and (match[2] or ip_address(match[1]) is not None):
        port = int(match[3]) if match[3] else None
        if port is None or 0 < port < 65536:
            return match[1] or match[2], port
    raise InputError(f"{text!r} is no host; expected HOST, HOST:PORT, or an IPv6 address with a port as [::1]:8900")


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a text is, without its scope; None for a name. One mapped into IPv6 is the IPv4 address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address


def is_loopback(host: str) -> bool:
    """True for an address that ends at its own host."""
    address = ip_address(host)
    return address is not None and address.is_loopback


def is_unspecified(host: str) -> bool:
    """True for 0.0.0.0, ::, an empty text, and a name of one: to listen there is to listen on every address."""
    address = ip_address(numeric(host))
    return not host or (address is not None and address.is_unspecified)


def family_of(host: str) -> socket.AddressFamily:
    """The family of an IP address; IPv4 for a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def numeric(host: str) -> str:
    """The IP address of a name, an IPv4 one if it has any. Returns a name that has none, and an address, as it is."""
    if (address := ip_address(host)) is not None:
        return str(address) if address.version == 4 else host
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        return host
    addresses = [str(entry[4][0]) for entry in entries]
    return min(addresses, key=family_of, default=host)


def listen(host: str, port: int = 0) -> socket.socket:
    """A listener on one address of this machine, or for 0.0.0.0 and :: on all of them; for port 0 on a free one.

    `::` takes IPv4 connections too. Raises AddressError naming address and port.
    """
    address = numeric(host)
    family = family_of(address)
    both = family == socket.AF_INET6 and is_unspecified(address) and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:
        place = host_port(host, port) if port else host
        raise AddressError(f"cannot listen on {place}: {_fault(error, address, port)}") from error


def _fault(error: OSError | UnicodeError, address: str, port: int) -> str:
    """Reason why nothing can listen there, with a remedy where there is one."""
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return f"port {port} of {address} is in use; choose another port"
    if number == errno.EADDRNOTAVAIL:
        return f"{address} is no address of this machine; give one that is"
    return getattr(error, "strerror", None) or str(error)
