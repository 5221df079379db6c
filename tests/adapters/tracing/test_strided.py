"""The arithmetic of strided copies, against copies element by element."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.adapters.tracing.strided import Aligned, Base, Box, Copy, Dim, NotABoxError, align, intersect, subtract


def base_of(t: torch.Tensor) -> Base:
    return Base(int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))


def pairs(copy: Copy) -> list[tuple[int, int]]:
    """(destination, source) element of every step."""
    found = []
    for index in product(*(range(d.size) for d in copy.dims)):
        dst = copy.dst_offset + sum(i * d.dst for i, d in zip(index, copy.dims, strict=True))
        src = copy.src_offset + sum(i * d.src for i, d in zip(index, copy.dims, strict=True))
        found.append((dst, src))
    return sorted(found)


def by_box(part: Aligned, base: Base) -> list[tuple[int, int]]:
    """The same out of a box of the source's base and the destination's strides."""
    found = []
    for index in product(*map(range, part.box.size)):
        src = base.offset + sum((o + i) * s for o, i, s in zip(part.box.start, index, base.stride, strict=True))
        found.append((part.copy.dst_offset + sum(i * s for i, s in zip(index, part.other, strict=True)), src))
    return sorted(found)


@pytest.mark.parametrize(
    ("copy", "base", "box", "other"),
    [
        # 4 x 6, rows 1 and 2
        (Copy(0, 6, (Dim(2, 6, 6), Dim(6, 1, 1))), Base(0, (4, 6), (6, 1)), Box((1, 0), (2, 6)), (6, 1)),
        # the same as one run of 12
        (Copy(0, 6, (Dim(12, 1, 1),)), Base(0, (4, 6), (6, 1)), Box((1, 0), (2, 6)), (6, 1)),
        # a transposed destination
        (Copy(0, 0, (Dim(6, 4, 1), Dim(4, 1, 6))), Base(0, (4, 6), (6, 1)), Box((0, 0), (4, 6)), (1, 4)),
        # one element, and a base with a dimension of size 1
        (Copy(5, 7, ()), Base(0, (4, 1, 6), (6, 6, 1)), Box((1, 0, 1), (1, 1, 1)), (0, 0, 0)),
        # a scalar
        (Copy(5, 0, ()), Base(0, (), ()), Box((), ()), ()),
    ],
)
def test_one_box(copy: Copy, base: Base, box: Box, other: tuple[int, ...]) -> None:
    (part,) = align(copy, base, "src")
    assert (part.box, part.other) == (box, other)


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (Copy(0, 3, (Dim(12, 1, 1),)), "12 elements from index 3 run over the end of a dimension of 6"),
        (Copy(0, 24, (Dim(2, 1, 1),)), "element 24 of the storage is not in the tensor"),
        (Copy(0, 0, (Dim(100, 1, 0),)), "a step of 0 elements, 100 times"),
    ],
)
def test_no_box(copy: Copy, message: str) -> None:
    with pytest.raises(NotABoxError, match=message):
        list(align(copy, Base(0, (4, 6), (6, 1)), "src"))


@st.composite
def views(draw: Any) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """A tensor as allocated, a view of it by operators that loaders use, and whether it was flattened on the way."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    order = draw(st.permutations(range(len(sizes))))
    stored = torch.arange(torch.Size(sizes).numel()).view([sizes[d] for d in order])
    base = stored.permute([order.index(d) for d in range(len(sizes))])
    view, flattened = base, False
    for _ in range(draw(st.integers(0, 4))):
        step = draw(
            st.sampled_from(["narrow", "transpose", "select", "unsqueeze", "step", "unflatten", "flatten", "expand"])
        )
        if view.dim() == 0:
            break
        d = draw(st.integers(0, view.dim() - 1))
        n = view.shape[d]
        if step == "narrow":
            start = draw(st.integers(0, n - 1))
            view = view.narrow(d, start, draw(st.integers(1, n - start)))
        elif step == "transpose":
            view = view.transpose(d, draw(st.integers(0, view.dim() - 1)))
        elif step == "select":
            view = view.select(d, draw(st.integers(0, n - 1)))
        elif step == "unsqueeze":
            view = view.unsqueeze(d)
        elif step == "step":
            view = view[(slice(None),) * d + (slice(0, n, 2),)]
        elif step == "unflatten" and n % 2 == 0:
            view = view.unflatten(d, (2, n // 2))
        elif step == "expand" and n == 1:
            view = view.expand([3 if k == d else m for k, m in enumerate(view.shape)])
        elif step == "flatten" and view.is_contiguous():
            view, flattened = view.flatten(), True
    return base, view, flattened


@settings(max_examples=400, deadline=None)
@given(views())
def test_align_walks_the_same_elements(drawn: tuple[torch.Tensor, torch.Tensor, bool]) -> None:
    base, view, flattened = drawn
    target = torch.empty(view.shape)
    dims = tuple(Dim(n, a, b) for n, a, b in zip(view.shape, target.stride(), view.stride(), strict=True) if n > 1)
    copy = Copy(0, int(view.storage_offset()), dims)
    try:
        parts = list(align(copy, base_of(base), "src"))
    except NotABoxError:
        if not flattened:  # A view along the dimensions of its base is always made of boxes.
            raise
        return
    assert sorted(p for part in parts for p in by_box(part, base_of(base))) == pairs(copy)
    assert sorted(p for part in parts for p in pairs(part.copy)) == pairs(copy)
    turned = Copy(copy.src_offset, 0, tuple(Dim(d.size, d.src, d.dst) for d in dims))
    other_side = [(s, d) for part in align(turned, base_of(base), "dst") for d, s in pairs(part.copy)]
    assert sorted(other_side) == pairs(copy)


@st.composite
def boxes(draw: Any) -> tuple[Box, Box]:
    ndim = draw(st.integers(0, 3))

    def box() -> Box:
        start = tuple(draw(st.integers(0, 3)) for _ in range(ndim))
        return Box(start, tuple(draw(st.integers(1, 4)) for _ in range(ndim)))

    return box(), box()


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(s, s + n) for s, n in zip(box.start, box.size, strict=True))))


@given(boxes())
def test_intersect_and_subtract(drawn: tuple[Box, Box]) -> None:
    a, b = drawn
    common = intersect(a, b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)
    if common is None:
        return
    rest = list(subtract(a, common))
    assert sum(r.numel for r in rest) + common.numel == a.numel
    assert set().union(*map(cells, rest), cells(common)) == cells(a)
