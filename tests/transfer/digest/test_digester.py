"""Digests of many boxes of a rank: scanned by compiled loops or stacked and digested by torch, as one by one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from digest_support import DTYPES, digest, random_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_support import Piece, describe_pieces

from weightcast.transfer.digest import cpu_scan as digest_scan
from weightcast.transfer.digest import definition as digest_module
from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.errors import StalePlanError
from weightcast.transfer.layout.dtypes import NAMES, dtype_code, to_torch
from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
from weightcast.transfer.plan.verification import SAMPLE_STEP, Sample

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")


@pytest.fixture(params=[pytest.param("scanned", marks=needs_numba), "stacked"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which boxes on a CPU can be digested."""
    if request.param == "stacked":
        monkeypatch.setattr(digest_scan, "_loops", lambda: None)
    return str(request.param)


def expert_layout() -> RankLayout:
    """One rank: stacked experts in slots, half of each slot, in checkpoint order reversed; a fused tensor; a scalar."""
    generator = torch.Generator().manual_seed(3)
    builder = LayoutBuilder()
    w13 = torch.randn(6, 8, 10, generator=generator).bfloat16()
    for slot, expert in enumerate([5, 0, 3, 3, 1, 2]):
        builder.add(f"experts.{expert}.gate.weight", (8, 10), (4, 0), w13[slot, :4], slot)
        builder.add(f"experts.{expert}.up.weight", (8, 10), (4, 0), w13[slot, 4:], slot)
    fused = torch.randn(6, 10, 4, generator=generator).transpose(1, 2)
    for slot, expert in enumerate([5, 0, 3, 3, 1, 2]):
        builder.add("experts.down", (6, 4, 10), (expert, 0, 0), fused[slot : slot + 1], slot)
    scales = torch.randn(6, generator=generator)
    for slot, expert in enumerate([5, 0, 3, 3, 1, 2]):
        builder.add(f"experts.{expert}.scale", (), (), scales[slot], slot)
    builder.add("norm", (33,), (16,), torch.randn(17, generator=generator))
    builder.add("nothing", (33, 2), (16, 0), torch.randn(0, 2, generator=generator))
    return builder.build()


def all_rows(layout: RankLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    table = layout.table
    return np.arange(len(table)), table.offset, table.size, table.tensors.dtype[table.tensor]


def box_view(layout: RankLayout, row: int, offset: list[int], size: list[int]) -> torch.Tensor:
    """The box (offset, size) of a logical tensor in region `row`."""
    view, origin = layout.view(row), layout.table.offset[row].tolist()
    for dim in range(view.ndim):
        view = view.narrow(dim, offset[dim] - origin[dim], size[dim])
    return view


def one_by_one(
    layout: RankLayout, rows: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, dtypes: np.ndarray
) -> list[int]:
    found = []
    for row, offset, size, dtype in zip(rows, offsets, sizes, dtypes, strict=True):
        view = box_view(layout, int(row), offset.tolist(), size.tolist())
        found.append(digest(view, offset.tolist()[: view.ndim], to_torch(NAMES[int(dtype)])))
    return found


@pytest.mark.parametrize("block", [1, 100, 1 << 19])
def test_rows_are_digested_as_one_by_one(block: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = expert_layout()
    rows = all_rows(layout)
    expected = one_by_one(layout, *rows)
    monkeypatch.setattr(digest_module, "_BLOCK", {"cpu": block})
    monkeypatch.setattr(digest_scan, "_PIECE_BYTES", block)
    found = Digester(layout, *rows).run()
    assert found.dtype == np.uint64
    assert found.tolist() == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_rows_in_any_order_cut_and_cast(way: str, data: st.DataObject) -> None:
    layout = expert_layout()
    rows, offsets, sizes, dtypes = (column.copy() for column in all_rows(layout))
    picked = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)), dtype=np.int64)
    rows, offsets, sizes, dtypes = rows[picked], offsets[picked], sizes[picked], dtypes[picked]
    for i in range(len(rows)):
        for dim in range(int(layout.table.tensors.ndim[layout.table.tensor[rows[i]]])):
            start = data.draw(st.integers(0, int(sizes[i, dim])))
            offsets[i, dim] += start
            sizes[i, dim] = data.draw(st.integers(0, int(sizes[i, dim]) - start))
        dtypes[i] = dtype_code(data.draw(st.sampled_from(["bfloat16", "float32"])))
    # A plan's boxes may be wider than those of the rank's table.
    wide = np.pad(offsets, ((0, 0), (0, 2))), np.pad(sizes, ((0, 0), (0, 2)), constant_values=1)
    expected = one_by_one(layout, rows, offsets, sizes, dtypes)
    assert Digester(layout, rows, *wide, dtypes).run().tolist() == expected


def test_replicas_in_two_slots_agree_until_one_is_stale(way: str) -> None:
    layout = expert_layout()
    rows = all_rows(layout)
    table = layout.table
    layout.view(6).copy_(layout.view(4))
    first, second = Digester(layout, *rows).run()[[4, 6]]
    assert table.region(4).tensor == table.region(6).tensor == "experts.3.gate.weight"
    assert first == second
    layout.view(6)[0, 0] += 1
    first, second = Digester(layout, *rows).run()[[4, 6]]
    assert first != second


def test_rows_of_one_size_at_different_places_are_not_mixed_up(way: str) -> None:
    builder = LayoutBuilder()
    slots = torch.randn(4, 5, 6)
    for slot in range(4):
        builder.add(f"t{slot}", (20, 6), (5 * (slot % 2), 0), slots[slot], slot)
    layout = builder.build()
    found = Digester(layout, *all_rows(layout)).run().tolist()
    assert found == [digest(slots[slot], (5 * (slot % 2), 0)) for slot in range(4)]


def test_rows_need_not_lie_at_even_distances(way: str) -> None:
    builder = LayoutBuilder()
    storage = torch.randn(400)
    for number, start in enumerate((0, 30, 90, 91, 300)):
        builder.add(f"t{number}", (4, 5), (0, 0), storage[start : start + 20].view(4, 5))
    layout = builder.build()
    assert Digester(layout, *all_rows(layout)).run().tolist() == one_by_one(layout, *all_rows(layout))


def test_no_rows(way: str) -> None:
    none = np.empty(0, dtype=np.int64)
    boxes = np.empty((0, 2), dtype=np.int64)
    assert Digester(expert_layout(), none, boxes, boxes, none).run().shape == (0,)


# ---- the compiled loops


def digester(layout: RankLayout, dtype: torch.dtype | None = None) -> Digester:
    rows, offsets, sizes, dtypes = all_rows(layout)
    if dtype is not None:
        dtypes = np.full_like(dtypes, dtype_code(str(dtype).removeprefix("torch.")))
    return Digester(layout, rows, offsets, sizes, dtypes)


def scanned(view: torch.Tensor, offset: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
    """The digest of one box by the loops alone."""
    shape = tuple(o + n for o, n in zip(offset, view.shape, strict=True))
    made = digester(describe_pieces([Piece("w", shape, offset, view)]), dtype)
    assert made._stacks is None
    return int(made.run()[0])


LOOPED = [dtype for dtype in DTYPES if dtype.itemsize < 8]


@needs_numba
@pytest.mark.parametrize("dtype", LOOPED, ids=str)
@pytest.mark.parametrize(
    ("shape", "offset"),
    [
        ((), ()),
        ((5000,), (77,)),
        ((3, 15), (0, 2)),
        ((3, 16), (9, 3)),
        ((4, 143), (1, 16300)),
        ((2, 4099), (500, 1)),
        ((3, 5, 2, 129), (1, 2, 3, 4)),
    ],
)
def test_loops_give_what_torch_gives(dtype: torch.dtype, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    view = random_bits(shape, dtype)
    for one in (view, view.mT.contiguous().mT if view.ndim > 1 else view, view[..., ::2] if view.ndim else view):
        assert scanned(one, offset) == digest(one, offset)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(3, 9000), (1, 1 << 19), (71, 2049), (500, 128)])
def test_sums_of_the_largest_words_and_constants_do_not_overflow(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2^24 is the largest constant; its upper half is 2^12, and with the lowest word the sums reach their bounds."""
    monkeypatch.setattr(digest_scan, "constants", lambda dim, index: np.full((2, len(index)), 1 << 24))
    for word in (torch.iinfo(dtype).min, torch.iinfo(dtype).max, -1):
        view = torch.full(shape, word, dtype=dtype)
        expected = (word + 0x9E3779) * view.numel() * (1 << 48) % (2**32 - 5)
        gaps = view.new_full((shape[0], 2 * shape[1]), word)[:, ::2]
        assert scanned(view, (0, 0)) == scanned(gaps, (0, 0)) == expected << 32 | expected


ROWS = [*range(1, 18), 70]
WIDTHS = [8, 15, 16, 17, 33, 127, 128, 129, 250, 257, 511, 1025, 2047, 4099]


def rows_side_by_side(dtype: torch.dtype) -> list[Piece]:
    """Boxes of every count of rows and of widths around those of vectors, blocks and tiles; rows of some lie apart."""
    pieces = []
    for rows, width in [*product(ROWS, WIDTHS), (3, 20000), (700, 20)]:
        stored = random_bits((rows, width + rows % 3), dtype, seed=rows * width)[:, :width]
        shape, offset = (rows + 5, width + 7), (rows % 5, width % 7)
        pieces.append(Piece(f"{rows}.{width}", shape, offset, stored))
    return pieces


@needs_numba
@pytest.mark.parametrize(
    ("dtype", "cast"),
    [
        (torch.uint8, None), (torch.bfloat16, None), (torch.float32, None), (torch.float32, torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_rows_side_by_side_are_digested_each(
    dtype: torch.dtype, cast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = rows_side_by_side(dtype)
    layout = describe_pieces(pieces)
    made = digester(layout, cast)
    assert made._stacks is None
    names = [layout.table.region(row).tensor for row in range(len(layout.table))]
    expected = {piece.name: digest(piece.view, piece.offset, cast) for piece in pieces}
    assert dict(zip(names, made.run().tolist(), strict=True)) == expected
    sample = made.run(Sample(5)).tolist()
    monkeypatch.setattr(digest_scan, "_loops", lambda: None)
    assert sample == digester(layout, cast).run(Sample(5)).tolist()


@needs_numba
def test_what_lies_beside_a_row_does_not_count() -> None:
    """The last words of a row are read together with words before them, and no more than the box is read."""
    for width in WIDTHS[2:]:
        stored = random_bits((9, width + 40), torch.bfloat16)
        before = scanned(stored[2:7, 20 : 20 + width], (0, 0))
        stored[:2], stored[7:], stored[:, :20], stored[:, 20 + width :] = 1, 2, 3, 4
        assert scanned(stored[2:7, 20 : 20 + width], (0, 0)) == before


@needs_numba
def test_float32_is_rounded_to_bfloat16_on_the_way() -> None:
    values = random_bits((300, 257), torch.float32)
    special = torch.tensor([0x7F800000, 0x7F800001, -1, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1], dtype=torch.int32)
    values[0, :7] = special.view(torch.float32)
    assert scanned(values, (3, 4), torch.bfloat16) == digest(values, (3, 4), torch.bfloat16)
    assert scanned(values.T, (3, 4), torch.bfloat16) == digest(values.T, (3, 4), torch.bfloat16)


def mixed_layout() -> RankLayout:
    """Boxes of many types, sizes and strides; some that the loops leave to torch."""
    pieces = [Piece("far", (1 << 21,), ((1 << 21) - 40,), torch.randn(40))]
    for number, dtype in enumerate(DTYPES):
        whole = random_bits((64, 130), dtype, seed=number)
        pieces.append(Piece(f"top.{number}", (128, 130), (64, 0), whole))
        pieces.append(Piece(f"turned.{number}", (130, 64), (0, 0), random_bits((64, 130), dtype).T))
        pieces.append(Piece(f"flat.{number}", (200,), (60,), random_bits((130,), dtype)))
        pieces.append(Piece(f"low.{number}", (9, 70), (2, 30), random_bits((4, 40), dtype)))
        pieces.append(Piece(f"stack.{number}", (3, 40, 50), (1, 0, 0), random_bits((2, 40, 50), dtype)))
    return describe_pieces(pieces)


@needs_numba
@pytest.mark.parametrize("piece", [100, 4 << 20])
@pytest.mark.parametrize("turn", [None, 0, 7, SAMPLE_STEP * 3 + 5])
def test_loops_and_stacks_agree_in_full_and_in_samples(
    turn: int | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_scan, "_PIECE_BYTES", piece)
    layout, sample = mixed_layout(), None if turn is None else Sample(turn)
    both = digester(layout)
    assert both._stacks is not None
    found = both.run(sample).tolist()
    monkeypatch.setattr(digest_scan, "_loops", lambda: None)
    assert found == digester(layout).run(sample).tolist()


@needs_numba
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_pieces(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = mixed_layout()
    alone = digester(layout).run().tolist()
    seen: set[int] = set()
    loops = digest_scan._loops()
    assert loops is not None

    def box_sums(*arguments: object) -> None:
        seen.add(threading.get_ident())
        loops.box_sums(*arguments)

    monkeypatch.setattr(digest_scan, "_loops", lambda: SimpleNamespace(box_sums=box_sums))
    monkeypatch.setattr(digest_scan, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(digest_scan, "_WORTH_A_THREAD", 5000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert digester(layout).run().tolist() == alone
    assert len(seen) > 1


@needs_numba
def test_what_cannot_be_compiled_is_left_to_torch() -> None:
    """The loops are looked for anew in a process in which numba compiles nothing."""
    program = "from weightcast.transfer.digest import cpu_scan; print(cpu_scan._loops())"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
    assert "several times slower without numba" in done.stderr


def test_a_digester_reads_what_is_there_at_the_time(way: str) -> None:
    layout = expert_layout()
    made = digester(layout)
    before = made.run()
    layout.view(0).zero_()
    after = made.run()
    assert np.flatnonzero(before != after).tolist() == [0]
    assert after.tolist() == one_by_one(layout, *all_rows(layout))


def test_memory_that_has_gone_is_not_read(way: str) -> None:
    layout = expert_layout()
    made = digester(layout)
    layout.memory.bases[0].untyped_storage().resize_(0)
    with pytest.raises(StalePlanError, match="1 of the"):
        made.run()
