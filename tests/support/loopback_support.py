"""Loopback of both families, for tests of addresses."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache

import pytest

__all__ = ["LOOPBACKS", "has_ipv6"]

LOOPBACKS = ("127.0.0.1", pytest.param("::1", marks=pytest.mark.ipv6))
"""Values of a parameter; that of IPv6 is skipped where there is none."""


@cache
def has_ipv6() -> bool:
    """True if this machine has ::1."""
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:  # without the code that the tests are about
        probe.bind(("::1", 0))
        return True
    return False
