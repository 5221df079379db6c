from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.boxes.slices import split_boxes
from weightcast.transfer.errors import PlanError
from weightcast.transfer.exchange.messages import LARGE_BYTES, MAX_MESSAGE_BYTES, Messages, cut_messages, message_limit
from weightcast.transfer.layout.dtypes import ITEMSIZE, dtype_code

BF16, FP32, U8 = dtype_code("bfloat16"), dtype_code("float32"), dtype_code("uint8")


def pieces(size: list[int], itemsize: int, limit: int) -> list[tuple[list[int], list[int]]]:
    _, offset, piece = split_boxes(np.array([size]), np.array([itemsize]), limit)
    return list(zip(offset.tolist(), piece.tolist(), strict=True))


@pytest.mark.parametrize(
    ("size", "limit", "expected"),
    [
        ([4, 8], 100, [([0, 0], [4, 8])]),
        ([4, 8], 32, [([0, 0], [2, 8]), ([2, 0], [2, 8])]),
        ([4, 8], 16, [([0, 0], [1, 8]), ([1, 0], [1, 8]), ([2, 0], [1, 8]), ([3, 0], [1, 8])]),
        ([2, 5], 8, [([0, 0], [1, 3]), ([0, 3], [1, 2]), ([1, 0], [1, 3]), ([1, 3], [1, 2])]),
        ([5, 1], 8, [([0, 0], [3, 1]), ([3, 0], [2, 1])]),
        ([0, 8], 8, []),
        ([1], 2, [([0], [1])]),
    ],
)
def test_boxes_are_split_outermost_first_into_even_steps(size: list[int], limit: int, expected: list) -> None:
    assert pieces(size, 2, limit) == expected


boxes = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.tuples(st.lists(st.integers(0, 7), min_size=width, max_size=width), st.sampled_from([BF16, FP32, U8])),
        min_size=1,
        max_size=12,
    )
)


def cut(cases: list[tuple[list[int], int]], limit: int) -> tuple[np.ndarray, np.ndarray, Messages]:
    size, dtype = np.array([s for s, _ in cases]), np.array([d for _, d in cases])
    return size, dtype, cut_messages(size, dtype, limit)


@given(boxes, st.integers(8, 300))
@settings(deadline=None)
def test_pieces_tile_every_box(cases: list[tuple[list[int], int]], limit: int) -> None:
    size, _, made = cut(cases, limit)
    for box in range(len(size)):
        count = np.zeros(size[box], dtype=int)
        for i in np.flatnonzero(made.box == box):
            count[tuple(slice(o, o + s) for o, s in zip(made.offset[i], made.size[i], strict=True))] += 1
        assert (count == 1).all()


@given(boxes, st.integers(8, 300))
@settings(deadline=None)
def test_pieces_fill_their_message_without_gap_and_stay_within_the_limit(cases: list, limit: int) -> None:
    _, dtype, made = cut(cases, limit)
    elements = made.size.prod(axis=1)
    for message in range(len(made)):
        mine = np.flatnonzero(made.message == message)
        assert made.start[mine].tolist() == (np.cumsum(elements[mine]) - elements[mine]).tolist()
        assert made.elements[message] == elements[mine].sum() > 0
        assert (dtype[made.box[mine]] == made.dtype[message]).all()
    assert (made.nbytes <= limit).all()
    for number in range(int(made.round.max(initial=-1)) + 1):
        assert 0 < made.nbytes[made.round == number].sum() <= limit
    assert (np.diff(made.round) >= 0).all()


@given(boxes, st.integers(8, 300))
@settings(deadline=None)
def test_consecutive_small_messages_could_not_have_been_one(cases: list, limit: int) -> None:
    _, _, made = cut(cases, limit)
    first = np.searchsorted(made.message, np.arange(len(made)))
    nbytes = made.size.prod(axis=1) * ITEMSIZE[made.dtype[made.message]]
    for message in range(len(made) - 1):
        following = nbytes[first[message + 1]]
        if made.dtype[message] == made.dtype[message + 1] and following < limit:
            assert made.nbytes[message] + following > limit


def test_a_large_piece_travels_alone_and_small_ones_together() -> None:
    large = LARGE_BYTES // 2
    made = cut_messages(np.array([[8], [large], [16], [large], [8]]), np.full(5, BF16), MAX_MESSAGE_BYTES)
    assert made.box.tolist() == [0, 4, 2, 1, 3]
    assert made.message.tolist() == [0, 0, 0, 1, 2]
    assert made.start.tolist() == [0, 8, 16, 0, 0]


def test_dtypes_do_not_share_a_message() -> None:
    made = cut_messages(np.array([[3], [3], [3]]), np.array([BF16, FP32, BF16]), 1024)
    assert made.box.tolist() == [1, 0, 2]
    assert made.message.tolist() == [0, 1, 1]
    assert made.nbytes.tolist() == [12, 12]


def test_nothing_to_send_makes_no_message() -> None:
    assert len(cut_messages(np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.int64), 64)) == 0
    assert len(cut_messages(np.array([[0, 4]]), np.array([BF16]), 64)) == 0


def test_limit_shares_the_bucket_between_peers_and_rounds() -> None:
    assert message_limit(1 << 20, 4) == 1 << 16
    assert message_limit(1 << 40, 1) == MAX_MESSAGE_BYTES
    with pytest.raises(
        PlanError, match=r"bucket_bytes 64 leaves 2 bytes for a message between 8 peers.*allow 256 or more"
    ):
        message_limit(64, 8)
