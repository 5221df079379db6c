"""Layer and expert numbers in checkpoint names.

Checkpoints name a tensor of a layer `<stem>.layers.<L>.<part>` and a tensor of a routed expert
`<stem>.layers.<L>.<block>.experts.<E>.<part>`. Nothing else of a name is interpreted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weightcast.transfer.layout import IntArray

__all__ = ["NONE", "ParsedNames", "parse_names"]

NONE = -1
"""Layer or expert number of a name that has none."""

# Nine digits at most: a hostile name must not become an integer that fits no column.
_LAYER = re.compile(r"(?:^|(?<=\.))layers\.([0-9]{1,9})(?:\.|$)")
_EXPERT = re.compile(r"(?:^|(?<=\.))experts\.([0-9]{1,9})(?:\.|$)")


class ParsedNames(NamedTuple):
    """Numbers in names, in (n,) columns: layer and routed expert, NONE where a name has no such number.

    `family` numbers the names with the expert number taken out: one part of all experts of a layer is a family.
    """

    layer: IntArray
    expert: IntArray
    family: IntArray


def parse_names(names: Sequence[str]) -> ParsedNames:
    """Layer, expert and family of each name."""
    count = len(names)
    columns = [np.fromiter(column, dtype=np.int64, count=count) for column in zip(*_numbers(names), strict=True)]
    return ParsedNames(*columns) if count else ParsedNames(*[np.empty(0, dtype=np.int64)] * 3)


def _numbers(names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Rows of layer, expert and family. Almost all names of a large model are an expert's, and take the short way."""
    families: dict[tuple[str, str], int] = {}
    layers: dict[str, int] = {}
    rows = []
    for name in names:
        head, _, tail = name.partition(".experts.")
        digits, dot, part = tail.partition(".")
        if dot and digits.isdecimal() and digits.isascii() and len(digits) < 10:
            expert = int(digits)
        else:
            head, expert, part = _around_expert(name)
        layer = layers.get(head)
        if layer is None:
            found = _LAYER.search(head + ".")
            layer = layers[head] = int(found[1]) if found else NONE
        if layer == NONE and part:
            found = _LAYER.search(part)
            layer = int(found[1]) if found else NONE
        rows.append((layer, expert, families.setdefault((head, part), len(families))))
    return rows


def _around_expert(name: str) -> tuple[str, int, str]:
    """What stands before the first expert number, the number, and what stands after it."""
    found = _EXPERT.search(name)
    if found is None:
        return name, NONE, ""
    return name[: found.start()], int(found[1]), name[found.end() :]
