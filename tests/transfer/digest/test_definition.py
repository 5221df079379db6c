from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from digest_support import DTYPES, add, digest, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from spawn_support import run_ranks

from weightcast.transfer.copy.nan import settle_nan
from weightcast.transfer.digest import definition as module
from weightcast.transfer.digest.constants import constants as make_constants
from weightcast.transfer.errors import LayoutError

PRIME = 2**32 - 5


def flip(tensor: torch.Tensor, index: tuple[int, ...], bit: int) -> torch.Tensor:
    """A copy with one bit of one element flipped; counted from the lowest bit of a little-endian element."""
    other = tensor.clone(memory_format=torch.contiguous_format)
    flat = other.reshape(-1).view(torch.uint8)
    position = int(np.ravel_multi_index(index, tensor.shape)) * tensor.element_size() + bit // 8 if index else bit // 8
    flat[position] ^= 1 << bit % 8
    return other


def slow_digest(view: torch.Tensor, offset: tuple[int, ...]) -> int:
    """The definition, element by element in Python's integers."""
    size = view.element_size()
    data = view.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if view.numel() else b""
    residues = [0, 0]
    for n, index in enumerate(itertools.product(*map(range, view.shape))):
        element = data[n * size : (n + 1) * size]
        for family in range(2):
            weight = 1
            for dim, i in enumerate(index):
                weight *= splitmix(dim, offset[dim] + i)[family]
            words = [element] if size < 8 else [element[:4], element[4:]]
            for w, word in enumerate(words):
                value = int.from_bytes(word, "little", signed=True) + 0x9E3779
                residues[family] += value * weight * (splitmix(1 << 16, w)[family] if size == 8 else 1)
    return (residues[0] % PRIME) << 32 | residues[1] % PRIME


def splitmix(dim: int, index: int) -> tuple[int, int]:
    mask = 2**64 - 1
    z = ((dim << 44) + 1 + index) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    z ^= z >> 31
    return (z >> 40) + 1, (z >> 16 & 0xFFFFFF) + 1


# ---- the definition


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "offset"), [((), ()), ((7,), (0,)), ((3, 5), (2, 9)), ((2, 1, 4), (7, 5, 16382))])
def test_is_what_the_definition_says(dtype: torch.dtype, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
    view = random_bits(shape, dtype)
    assert digest(view, offset) == slow_digest(view, offset)


def test_literal_digests_do_not_drift() -> None:
    """Both sides of an update may run different releases: a change of these numbers is a change of the protocol."""
    view = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert f"{digest(view, (0, 0)):016x}" == LITERALS["float32"]
    assert f"{digest(view.to(torch.bfloat16), (5, 1)):016x}" == LITERALS["bfloat16"]
    assert f"{digest(view.to(torch.int64), (0, 0)):016x}" == LITERALS["int64"]
    assert f"{digest(view.to(torch.uint8), (0, 20000)):016x}" == LITERALS["uint8"]


LITERALS = {
    "float32": "1750f9281867d746",
    "bfloat16": "141c2225cc7ab19a",
    "int64": "b9a25f41c19e109a",
    "uint8": "1c422a8d8efcddbd",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(3, 9000), (9000, 3), (1, 70000), (70, 70, 3)])
def test_long_dimensions_are_exact(dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """All-ones and alternating bits are the largest words: sums that were not exact would show here."""
    for fill in (-1, 1 << (8 * dtype.itemsize - 1), (1 << (8 * dtype.itemsize - 1)) - 1):
        word = fill - (1 << 8 * dtype.itemsize) if fill >= 1 << (8 * dtype.itemsize - 1) else fill
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        view = torch.full(shape, word, dtype=integers).view(dtype)
        assert digest(view, (0,) * len(shape)) == closed_form(word, shape, dtype.itemsize)


def closed_form(word: int, shape: tuple[int, ...], itemsize: int) -> int:
    """The digest of a constant: the product of the sums of constants of each dimension."""
    residues = []
    for family in range(2):
        total = 1
        for dim, size in enumerate(shape):
            total = total * sum(splitmix(dim, i)[family] for i in range(size)) % PRIME
        if itemsize == 8:
            low = (word & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)
            value = sum((w + 0x9E3779) * splitmix(1 << 16, i)[family] for i, w in enumerate((low, word >> 32)))
        else:
            value = word + 0x9E3779
        residues.append(value * total % PRIME)
    return residues[0] << 32 | residues[1]


# ---- partitions


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]:
    """A shape, and ranges of a grid of boxes that covers it, empty boxes among them."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    grid = itertools.product(*[list(itertools.pairwise(c)) for c in cuts])
    return shape, list(grid)


def strided(tensor: torch.Tensor, how: int, order: list[int]) -> torch.Tensor:
    """The same values with other strides: as they are, with another order of dimensions, or with gaps."""
    if how == 0:
        return tensor.contiguous()
    if how == 1:
        return tensor.permute(order).contiguous().permute([order.index(d) for d in range(tensor.ndim)])
    roomy = torch.zeros([2 * n + 1 for n in tensor.shape], dtype=torch.uint8).repeat_interleave(
        tensor.element_size(), -1
    )
    gaps = roomy.view(tensor.dtype)[tuple(slice(1, 2 * n + 1, 2) for n in tensor.shape)]
    gaps.copy_(tensor)
    return gaps


@settings(deadline=None)
@given(partitions(), st.sampled_from(DTYPES), st.integers(0, 2), st.randoms(use_true_random=False), st.integers(0, 40))
def test_any_partition_adds_up_to_the_whole(
    partition: tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]],
    dtype: torch.dtype,
    how: int,
    random: object,
    place: int,
) -> None:
    shape, boxes = partition
    whole = random_bits(shape, dtype)
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    origin = [place * 411] * len(shape)
    parts = [
        digest(
            strided(whole[tuple(slice(a, b) for a, b in box)], how, order),
            [o + a for o, (a, _) in zip(origin, box, strict=True)],
        )
        for box in boxes
    ]
    assert add(*parts) == digest(whole, origin) == digest(strided(whole, how, order), origin)


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_blocks_and_tiles_add_up(block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    view = random_bits((3, 5, 70), dtype)
    expected = slow_digest(view, (1, 2, 3))
    monkeypatch.setattr(module, "_BLOCK", {"cpu": block})
    monkeypatch.setattr(module, "_TILE", {1: 3, 2: 3, 4: 3})
    monkeypatch.setattr(module, "_LONGEST", 50)
    assert digest(view, (1, 2, 3)) == expected
    assert digest(view.permute(2, 0, 1), (3, 1, 2)) == slow_digest(view.permute(2, 0, 1), (3, 1, 2))


def test_boxes_beyond_the_first_chunks_of_constants() -> None:
    view = random_bits((2, 40000), torch.int16)
    whole = digest(view, (0, 100))
    assert add(digest(view[:, :16284], (0, 100)), digest(view[:, 16284:], (0, 16384))) == whole
    assert digest(view, (0, 101)) != whole


def test_two_dtypes_agree_each_with_itself() -> None:
    """One trainer box, two instances in two dtypes and two partitions: equal per dtype, whatever the partition."""
    master = torch.randn(24, 40)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        sent = master.to(dtype)
        halves = add(digest(sent[:, :13], (0, 0)), digest(sent[:, 13:], (0, 13)))
        rows = add(*(digest(master[i : i + 5], (i, 0), dtype) for i in range(0, 24, 5)))
        assert halves == rows == digest(sent, (0, 0))
    assert digest(master, (0, 0)) != digest(master, (0, 0), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64], ids=str)
def test_cast_is_what_to_gives(dtype: torch.dtype) -> None:
    master = random_bits((65, 33), torch.float32)
    for view in (master, master.t(), master[::2, 1::3], master.to(torch.bfloat16)):
        sent = view if view.dtype == dtype else settle_nan(view.to(dtype))
        assert digest(view, (4, 5), dtype) == digest(sent, (4, 5))


def test_a_cast_nan_has_one_digest_in_every_layout() -> None:
    """torch's conversion gives a NaN other bits in other layouts; packing and digest may not differ for that."""
    master = torch.full((16, 64), float("nan"))
    turned = master.t().contiguous().t()
    assert digest(master, (0, 0), torch.bfloat16) == digest(turned, (0, 0), torch.bfloat16)
    packed = torch.empty(16, 64, dtype=torch.bfloat16)
    packed.copy_(turned)
    assert digest(settle_nan(packed), (0, 0)) == digest(master, (0, 0), torch.bfloat16)


def test_the_cast_of_a_parameter_needs_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    assert digest(parameter, (0, 0), torch.bfloat16) == digest(parameter.detach().bfloat16(), (0, 0))
    with torch.inference_mode():
        inside = digest(parameter, (0, 0))
    assert inside == digest(parameter, (0, 0))


# ---- what it sees


def test_all_patterns_of_true_are_told_apart_also_where_boxes_are_copied() -> None:
    one, two = (torch.full((3, 4, 2), n, dtype=torch.uint8).view(torch.bool).transpose(0, 1) for n in (1, 2))
    assert digest(one, (0, 0, 0)) != digest(two, (0, 0, 0))


@settings(deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_every_flipped_bit_changes_both_residues(data: st.DataObject, dtype: torch.dtype) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    index = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    view = random_bits(shape, dtype, seed=data.draw(st.integers(0, 99)))
    offset = tuple(data.draw(st.integers(0, 10**6)) for _ in shape)
    before, after = digest(view, offset), digest(flip(view, index, bit), offset)
    assert before >> 32 != after >> 32
    assert before & 0xFFFFFFFF != after & 0xFFFFFFFF


EXPERTS = random_bits((8, 16, 24), torch.bfloat16)
SIGNS = torch.where(torch.arange(8 * 16 * 24).reshape(8, 16, 24) % 7 < 3, 1.5, -1.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t[[1, 0, *range(2, 8)]], id="two experts swapped"),
        pytest.param(lambda t: t[[0, 0, *range(2, 8)]], id="one expert twice"),
        pytest.param(lambda t: t[:, [15, *range(1, 15), 0]], id="two rows swapped"),
        pytest.param(lambda t: t[..., [*range(10), 11, 10, *range(12, 24)]], id="two columns swapped"),
        pytest.param(lambda t: t.roll(1, 0), id="shifted by one expert"),
        pytest.param(lambda t: t.roll(1, 1), id="shifted by one row"),
        pytest.param(lambda t: t.roll(1, 2), id="shifted by one column"),
        pytest.param(lambda t: t.roll(1), id="shifted by one element"),
        pytest.param(lambda t: t.transpose(1, 2).reshape(8, 16, 24), id="transposed"),
        pytest.param(lambda t: t.flip(0), id="reversed"),
        pytest.param(lambda t: torch.cat([t[:, 8:], t[:, :8]], 1), id="gate and up exchanged"),
        pytest.param(lambda t: t * 0, id="zeros"),
    ],
)
def test_misplaced_experts_rows_and_columns_are_seen(
    change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    for tensor in (
        random_bits((8, 16, 24), dtype),
        SIGNS.to(torch.int8).view(torch.uint8) if dtype == torch.uint8 else SIGNS.to(dtype),
    ):
        before, after = digest(tensor, (0, 0, 0)), digest(change(tensor), (0, 0, 0))
        assert before >> 32 != after >> 32
        assert before & 0xFFFFFFFF != after & 0xFFFFFFFF


def test_swapped_signs_of_float32_are_seen() -> None:
    assert digest(torch.tensor([1.0, -1.0]), (0,)) != digest(torch.tensor([-1.0, 1.0]), (0,))


def test_bits_count_and_not_values() -> None:
    assert digest(torch.tensor([0.0]), (0,)) != digest(torch.tensor([-0.0]), (0,))
    quiet, payload = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(quiet, ()) != digest(payload, ())
    assert digest(quiet, ()) == digest(quiet.clone(), ())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_are_not_nothing(dtype: torch.dtype) -> None:
    zeros = torch.zeros((4, 4), dtype=torch.uint8).repeat_interleave(dtype.itemsize, 1).view(dtype)
    assert digest(zeros, (0, 0)) not in (0, digest(zeros[:3], (0, 0)), digest(zeros, (0, 1)))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_an_empty_box_has_digest_zero(shape: tuple[int, ...]) -> None:
    assert digest(torch.empty(shape), (3,) * len(shape)) == 0
    assert add() == 0


def test_a_box_at_another_place_is_another_box() -> None:
    view = random_bits((3, 4), torch.bfloat16)
    places = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 7), (7, 2), (0, 16384)]
    assert len({digest(view, place) for place in places}) == len(places)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_no_two_of_the_first_million_indices_share_their_constants(dim: int) -> None:
    constants = make_constants(dim, np.arange(1 << 20))
    assert constants.min() >= 1
    assert constants.max() <= 1 << 24
    assert len(np.unique(constants[0] << 24 | constants[1] - 1)) == 1 << 20


def test_add_reduces_each_residue_by_itself() -> None:
    top = (PRIME - 1) << 32 | (PRIME - 1)
    assert add(top, top) == (PRIME - 2) << 32 | (PRIME - 2)
    assert add(top, 1 << 32 | 1) == 0
    assert add(5 << 32 | 7) == 5 << 32 | 7


# ---- what it refuses


@pytest.mark.parametrize(
    ("view", "offset", "dtype", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), (0,), None, ["complex64"]),
        (torch.zeros(2), (0,), torch.complex64, ["complex64"]),
    ],
)
def test_bad_input_is_refused(
    view: torch.Tensor, offset: tuple[int, ...], dtype: torch.dtype | None, words: list[str]
) -> None:
    with pytest.raises(LayoutError) as caught:
        digest(view, offset, dtype)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- memory


@pytest.mark.parametrize(
    ("shape", "dtype", "cast"),
    [
        ((1 << 22,), torch.bfloat16, None),
        ((1 << 22,), torch.float32, None),
        ((1 << 18, 16), torch.float32, None),
        ((65536, 64), torch.float32, None),
        ((1024, 4096), torch.float32, torch.bfloat16),
        ((4, 8, 65536), torch.float64, None),
    ],
    ids=str,
)
def test_temporary_memory_is_bounded(shape: tuple[int, ...], dtype: torch.dtype, cast: torch.dtype | None) -> None:
    """By torch's own account of what it allocates; in float64 the boxes would have 16 or 32 MiB."""
    view = torch.zeros(shape, dtype=dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        digest(view, (0,) * view.ndim, cast)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak < 12 << 20


# ---- GPUs


def interpreted_kernel(rank: int, world: int, _: int) -> None:
    """Triton's interpreter runs a kernel without a device, when it is asked to before the kernel is made."""
    os.environ["TRITON_INTERPRET"] = "1"
    from weightcast.transfer.digest.gpu_kernel import row_sums

    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.int8, torch.int16, torch.int32):
        for rows, size in ((1, 1), (17, 300), (3, 256), (40, 9)):
            limit = torch.iinfo(dtype)
            words = torch.randint(limit.min, limit.max + 1, (rows, 2 * size), generator=generator).to(dtype)[:, ::2]
            words[0, 0] = limit.min
            constants = torch.randint(1, (1 << 24) + 1, (2, size), generator=generator)
            sums, peaks = row_sums(words, constants)
            assert peaks.tolist() == [max(word & limit.max for word in row) for row in words.tolist()]
            assert (sums % PRIME).tolist() == [
                [sum(map(operator.mul, row, c)) % PRIME for row in words.tolist()] for c in constants.tolist()
            ]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_for_gpus_gives_the_same_sums_in_triton_s_interpreter() -> None:
    run_ranks(interpreted_kernel, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_gives_the_same_digests(dtype: torch.dtype) -> None:
    view = random_bits((300, 9, 513), dtype)
    for one in (view, view.permute(2, 0, 1), view[::2, :, 5:]):
        assert digest(one.cuda(), (1, 2, 3)) == digest(one, (1, 2, 3))
