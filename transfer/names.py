"""Layer and expert numbers in checkpoint names, and many names said in few words.

Checkpoints name a tensor of a layer `<stem>.layers.<L>.<part>` and a tensor of a routed expert
`<stem>.layers.<L>.<block>.experts.<E>.<part>`. Nothing else of a name is interpreted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from weightcast.transfer.layout import IntArray

__all__ = ["NONE", "ParsedNames", "parse_names", "ranges", "summarize"]

NONE = -1
"""Layer or expert number of a name that has none."""

# Nine digits at most: a hostile name must not become an integer that fits no column.
_LAYER = re.compile(r"(?:^|(?<=\.))layers\.([0-9]{1,9})(?:\.|$)")
_EXPERT = re.compile(r"(?:^|(?<=\.))experts\.([0-9]{1,9})(?:\.|$)")

_MAX_GROUPS = 6
_MAX_PARTS = 12


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


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> "0-2,5"; sorted and without repetition, empty for no numbers."""
    ordered = np.unique(np.fromiter(numbers, dtype=np.int64))
    if not ordered.size:
        return ""
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def summarize(names: Iterable[str]) -> str:
    """Many tensor names in one line: "layers 0-47, experts 32-127, gate_proj/up_proj/down_proj; lm_head.weight".

    Names that differ only in layer and expert number become ranges; a group is always a full product of its layers,
    experts and parts, so that the line never names a tensor that was not handed in. Parts stand in the order of their
    first appearance. What does not fit into six groups is counted: "...; and 12 more tensors".
    """
    split = list(dict.fromkeys(_split(name) for name in names))
    groups = _groups(split)
    stems = {part.stem for part in split if part.layer != NONE}
    blocks = {part.block for part in split if part.expert != NONE}
    shown = groups[:_MAX_GROUPS]
    lines = [group.text(len(stems) > 1, len(blocks) > 1) for group in shown]
    left = sum(group.size for group in groups[_MAX_GROUPS:])
    if left:
        lines.append(f"and {left} more tensor{'s' if left > 1 else ''}")
    return "; ".join(lines)


class _Split(NamedTuple):
    """A name in pieces; `part` is what follows the last number."""

    stem: str
    layer: int
    block: str
    expert: int
    part: str


class _Group(NamedTuple):
    """Every combination of these layers, experts and parts. No layers and experts for plain names."""

    stem: str
    layers: tuple[int, ...]
    block: str
    experts: tuple[int, ...]
    parts: tuple[str, ...]

    @property
    def size(self) -> int:
        return max(len(self.layers), 1) * max(len(self.experts), 1) * len(self.parts)

    def text(self, with_stem: bool, with_block: bool) -> str:
        said = []
        if self.layers:
            said.append(f"{self.stem if with_stem else ''}layers {ranges(self.layers)}")
        if self.experts:
            said.append(f"{self.block if with_block else ''}experts {ranges(self.experts)}")
        said.append(_parts_text(self.parts, short=bool(said)))
        return ", ".join(piece for piece in said if piece)


def _split(name: str) -> _Split:
    stem, layer, block, expert, rest = "", NONE, "", NONE, name
    if found := _LAYER.search(rest):
        stem, layer, rest = rest[: found.start()], int(found[1]), rest[found.end() :]
    if found := _EXPERT.search(rest):
        block, expert, rest = rest[: found.start()], int(found[1]), rest[found.end() :]
    return _Split(stem, layer, block, expert, rest)


def _groups(split: Sequence[_Split]) -> list[_Group]:
    """Products of layers, experts and parts that hold exactly the names given, largest grouping first found."""
    experts_of: dict[tuple[str, str, str], dict[int, list[int]]] = {}
    for name in split:
        by_layer = experts_of.setdefault((name.stem, name.block, name.part), {})
        by_layer.setdefault(name.layer, []).append(name.expert)
    parts_of: dict[tuple[str, tuple[int, ...], str, tuple[int, ...]], list[str]] = {}
    for (stem, block, part), by_layer in experts_of.items():
        layers_of: dict[tuple[int, ...], list[int]] = {}
        for layer, experts in by_layer.items():
            layers_of.setdefault(tuple(sorted(experts)), []).append(layer)
        for experts_key, layers in layers_of.items():
            # A tensor with and without an expert number under one part would be two different names of one product.
            for chosen in _without_none(experts_key):
                for layers_key in _without_none(tuple(sorted(layers))):
                    parts_of.setdefault((stem, layers_key, block, chosen), []).append(part)
    return [_Group(stem, lay, block, exp, tuple(parts)) for (stem, lay, block, exp), parts in parts_of.items()]


def _without_none(numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Splits NONE off from the numbers, as an empty tuple of its own."""
    real = tuple(n for n in numbers if n != NONE)
    return ([()] if NONE in numbers else []) + ([real] if real else [])


def _parts_text(parts: tuple[str, ...], short: bool) -> str:
    shown = parts[:_MAX_PARTS]
    if short and all(part.endswith(".weight") for part in parts):
        shown = tuple(part.removesuffix(".weight") for part in shown)
    left = len(parts) - len(shown)
    return ("/" if short else ", ").join(shown) + (f" and {left} more" if left else "")
