"""The wire format: boxes that two ranks exchange are cut into messages, and messages assigned to rounds.

It follows from the boxes and the plan's numbers alone, never from memory. So both ends of a pair come to the same
answer by themselves, however each of them fills or empties a message.

A box above the limit is split along its outermost dimensions into smaller boxes. Pieces are ordered by dtype and shape:
pieces of one shape are often neighbours in one parameter, where one copy moves many. A large piece is a message of its
own, so that it can leave from and arrive in the parameter itself. Small pieces of one dtype share messages; over a
transport that takes messages from many places, all pieces do.

Message i of a pair of ranks moves in a round that grows with i and is the same at both ends. It waits for nothing in
later rounds. So every round completes, by induction, and none needs more staging memory than planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.slices import shape_order, split_boxes
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.dtypes import ITEMSIZE

__all__ = ["IN_FLIGHT", "LARGE_BYTES", "MAX_MESSAGE_BYTES", "Messages", "cut_messages", "message_limit"]

LARGE_BYTES = 1 << 18
"""A piece of at least so many bytes is a message of its own, unless the transport scatters."""

MAX_MESSAGE_BYTES = 1 << 23
"""Most bytes of a message or round, whatever the staging memory: longer ones gain nothing."""

IN_FLIGHT = 4
"""Rounds under way at a time: while one is packed or unpacked the others move."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of one rank to another, in columns: m messages of k pieces, in order.

    A piece has the row `box` (k,) of the box that it was cut from. Its `offset` (k, D) counts inside that box; `size`
    (k, D) is its own. It travels in `message` (k,), from element `start` (k,) on. A message moves in `round` (m,). It
    has `elements` (m,), all of the dtype of code `dtype` (m,), which are `nbytes` (m,).
    """

    box: IntArray
    offset: IntArray
    size: IntArray
    message: IntArray
    start: IntArray
    round: IntArray
    dtype: IntArray
    elements: IntArray

    def __len__(self) -> int:
        return int(self.round.shape[0])

    @property
    def nbytes(self) -> IntArray:
        """Number of bytes (m,) of each message."""
        return np.asarray(self.elements * ITEMSIZE[self.dtype])


def message_limit(bucket_bytes: int, peers: int) -> int:
    """The most bytes that one rank has under way to or from one peer in one round.

    `peers` is the most that any rank of the group may have. Messages with all of them, in IN_FLIGHT rounds, stay within
    `bucket_bytes`. Raises PlanError when that leaves less than one element.
    """
    limit = min(bucket_bytes // (IN_FLIGHT * max(peers, 1)), MAX_MESSAGE_BYTES)
    smallest = int(ITEMSIZE.max())
    if limit < smallest:
        raise PlanError(
            f"bucket_bytes {bucket_bytes} leaves {limit} bytes for a message between {peers} peers, "
            f"expected at least {smallest}; allow {smallest * IN_FLIGHT * peers} or more"
        )
    return limit


def cut_messages(size: IntArray, dtype: IntArray, limit: int, large_bytes: int = LARGE_BYTES) -> Messages:
    """The messages that carry boxes of `size` (n, D) in the dtypes of codes `dtype` (n,), in the plan's order.

    Pieces of at least `large_bytes` do not share a message. That may be `limit` if messages may lie in many places.
    """
    box, offset, piece = split_boxes(size, ITEMSIZE[dtype], limit)
    code = dtype[box]
    nbytes = piece.prod(axis=1) * ITEMSIZE[code]
    large = nbytes >= min(large_bytes, limit)
    order = shape_order(piece, code, large)
    box, offset, piece, code, nbytes, large = (c[order] for c in (box, offset, piece, code, nbytes, large))

    opens = large.copy()
    opens[:1] = True
    opens[1:] |= (code[1:] != code[:-1]) | large[:-1]
    opens |= _cut(nbytes, limit, opens)
    first = np.flatnonzero(opens)
    message = np.cumsum(opens) - 1
    elements = piece.prod(axis=1)
    starts = np.cumsum(elements) - elements
    totals = np.add.reduceat(elements, first) if len(first) else elements
    rounds = np.cumsum(_cut(totals * ITEMSIZE[code[first]], limit, np.zeros(len(first), dtype=bool))) - 1
    return Messages(box, offset, piece, message, starts - starts[first][message], rounds, code[first], totals)


def _cut(nbytes: IntArray, limit: int, opens: IntArray) -> IntArray:
    """Mask (n,) of rows that begin a group, when consecutive rows join as long as they stay within `limit` bytes.

    Rows in `opens` begin a group too. Each step of the loop makes a group, not a row.
    """
    n = len(nbytes)
    begins = np.zeros(n, dtype=bool)
    total = np.concatenate(([0], np.cumsum(nbytes)))
    openings = np.append(np.flatnonzero(opens), n)
    row = 0
    while row < n:
        begins[row] = True
        end = int(np.searchsorted(total, total[row] + limit, side="right")) - 1
        end = min(end, int(openings[np.searchsorted(openings, row, side="right")]))
        row = max(end, row + 1)
    return begins
