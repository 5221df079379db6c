"""What JSON, msgpack and TOML documents from outside have in common."""

from __future__ import annotations

import reprlib
from typing import Any

from weightcast.transfer.errors import LayoutError

__all__ = ["unique_keys"]


def unique_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The object of these keys and values, as `object_pairs_hook` of a decoder, which by itself would take the last of
    equal keys. Raises LayoutError."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[Any] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise LayoutError(f"key {reprlib.repr(twice)} occurs twice in one object")
    return made
