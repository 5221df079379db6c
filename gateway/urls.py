"""Addresses that people hand in, checked before anyone connects to them."""

from __future__ import annotations

import httpx

from weightcast.transfer.errors import InputError

__all__ = ["check_url"]


def check_url(whose: str, url: str, of: str) -> None:
    """Raises InputError unless `url` is http or https with a host; `of` says of what, `whose` stands first."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        fault = f" ({' '.join(str(error).split())})"
    else:
        if parsed.scheme in ("http", "https") and parsed.host:
            return
        fault = ""
    raise InputError(f"{whose}url is {url!r}, expected http://host:port of {of}{fault}")
