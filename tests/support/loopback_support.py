"""Loopback of both families, for tests of addresses."""

from __future__ import annotations

from functools import cache

import pytest

from weightcast.transfer.errors import AddressError
from weightcast.transfer.transports.addresses import listen

__all__ = ["LOOPBACKS", "has_ipv6"]

LOOPBACKS = ("127.0.0.1", pytest.param("::1", marks=pytest.mark.ipv6))
"""Values of a parameter; that of IPv6 is skipped where there is none."""


@cache
def has_ipv6() -> bool:
    """True if this machine has ::1."""
    try:
        listen("::1").close()
    except AddressError:
        return False
    return True
