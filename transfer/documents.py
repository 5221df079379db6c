"""A check that the readers of JSON, msgpack and TOML documents share."""

from __future__ import annotations

import reprlib
from collections import Counter
from typing import Any

from weightcast.transfer.errors import LayoutError

__all__ = ["unique_keys"]


def unique_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The object of these keys and values, for the `object_pairs_hook` of a decoder. A decoder alone would take the
    last of equal keys. Raises LayoutError."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        duplicate = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise LayoutError(f"key {reprlib.repr(duplicate)} occurs twice in one object")
    return mapping
