"""Logical tensor names for people: thousands of them in a line.

>>> summarize(
...     f"model.layers.{i}.mlp.experts.{e}.{p}.weight" for i in range(48) for e in range(9) for p in ("gate", "up")
... )
'layers 0-47, experts 0-8, gate/up'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from math import prod

__all__ = ["number_ranges", "summarize"]

_USUAL_PREFIXES = ("model.", "mlp.")
_USUAL_SUFFIX = ".weight"

_Pattern = tuple[str, ...]
"""A name with its numbers taken out: the text before, between and after them."""


def number_ranges(numbers: Iterable[int], limit: int = 8) -> str:
    """{0, 1, 2, 5} -> "0-2,5"; after `limit` ranges "..." ."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:limit]]
    return ",".join(texts + ["..."] * (len(runs) > limit))


def summarize(names: Iterable[str], limit: int = 400) -> str:
    """Groups names by pattern, with layer, expert and other numbers as ranges; about `limit` characters at most.

    Names that do not fit are counted at the end. ".weight" at the end is left out, as are "model." and "mlp." before a
    number.
    """
    groups = _grouped(names)
    texts: list[str] = []
    length = 0
    for index, (text, _) in enumerate(groups):
        if texts and length + len(text) > limit:
            return "; ".join(texts) + f"; and {sum(count for _, count in groups[index:])} more tensors"
        texts.append(text if len(text) <= limit else text[:limit] + "...")
        length += len(text) + 2
    return "; ".join(texts)


def _grouped(names: Iterable[str]) -> list[tuple[str, int]]:
    """One text and number of names for each group, in order of first appearance."""
    numbers: dict[_Pattern, set[tuple[int, ...]]] = {}
    for name in names:
        pattern, values_in_name = _split(name)
        numbers.setdefault(pattern, set()).add(values_in_name)
    # Patterns that differ only in their last text and run over the same numbers become one group.
    families: dict[tuple[_Pattern, frozenset[tuple[int, ...]]], list[str]] = {}
    for pattern, sets in numbers.items():
        number_rows = frozenset(sets)
        families.setdefault((pattern[:-1], number_rows), []).append(pattern[-1])
    groups: list[tuple[str, int]] = []
    for (texts, rows), endings in families.items():
        if not texts:
            groups.extend((ending, 1) for ending in endings)
            continue
        for product in _products(rows):
            groups.append((_text(texts, product, endings), len(endings) * prod(map(len, product))))
    return groups


def _split(name: str) -> tuple[_Pattern, tuple[int, ...]]:
    """ "a.3.b.c" -> (("a", "b.c"), (3,)). Parts of digits only count as numbers, and not the first part of a name."""
    texts: list[list[str]] = [[]]
    numbers: list[int] = []
    for part in name.split("."):
        if part.isascii() and part.isdigit() and len(part) < 10 and str(int(part)) == part and texts[-1]:
            numbers.append(int(part))
            texts.append([])
        else:
            texts[-1].append(part)
    return tuple(".".join(text) for text in texts), tuple(numbers)


def _products(rows: Collection[tuple[int, ...]]) -> list[list[set[int]]]:
    """Rows of numbers as few products of sets, one set a column: leading numbers with the same remainder are joined."""
    if not rows or not next(iter(rows)):
        return [[]]
    remainders: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for row in sorted(rows):
        remainders[row[0]].add(row[1:])
    heads: dict[frozenset[tuple[int, ...]], set[int]] = {}
    for number, remainder in remainders.items():
        heads.setdefault(frozenset(remainder), set()).add(number)
    return [[numbers, *tail] for remainder, numbers in heads.items() for tail in _products(remainder)]


def _text(texts: _Pattern, product: list[set[int]], endings: list[str]) -> str:
    parts = [f"{_label(text)} {number_ranges(values)}" for text, values in zip(texts, product, strict=True)]
    ending = "/".join(dict.fromkeys(text.removesuffix(_USUAL_SUFFIX) for text in endings))
    return ", ".join([*parts, ending] if ending else parts)


def _label(text: str) -> str:
    for prefix in _USUAL_PREFIXES:
        text = text.removeprefix(prefix)
    return text
