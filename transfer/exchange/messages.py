"""The wire format: how the boxes that two ranks exchange are cut into messages, and messages into rounds.

It is worked out from the boxes and the plan's numbers alone, never from memory, so that both ends of a pair come to
the same answer by themselves, whatever each of them does to fill or empty a message.

A box above the limit is split along its outermost dimensions into smaller boxes. Pieces are put in order of dtype and
shape: pieces of one shape are often neighbours in one parameter, where one copy moves many. A large piece is a message
of its own, so that it can leave from and arrive in the parameter itself; small ones of one dtype share messages. Over
a transport that takes messages from many places all do.

Message i of every pair of ranks moves in a round that grows with i, in the same round at both ends, and waits for
nothing in later rounds: so every round completes, by induction, and none needs more staging memory than planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.boxes.slices import shape_order, split_boxes
from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.dtypes import ITEMSIZE

__all__ = [
    "IN_FLIGHT",
    "LARGE_BYTES",
    "MAX_MESSAGE_BYTES",
    "Messages",
    "cut_messages",
    "message_limit",
]

LARGE_BYTES = 1 << 18
"""A piece of at least so many bytes is a message of its own, unless the transport scatters."""

MAX_MESSAGE_BYTES = 1 << 23
"""Messages and rounds are not longer, whatever the staging memory: longer ones gain nothing."""

IN_FLIGHT = 4
"""Rounds under way at a time: while one is packed or unpacked the others move."""


@dataclass(frozen=True, slots=True)
class Messages:
    """What one rank sends to another, in columns. m messages of k pieces, in order.

    Of pieces: `box` (k,) is the row among the boxes that were cut, `offset` (k, D) counts inside that box, `size` (k,
    D); `message` (k,) says where the piece travels and `start` (k,) at which element of it. Of messages: `round` (m,),
    `dtype` (m,) code of all its elements, `elements` (m,) and `nbytes` (m,).
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
        """(m,) bytes of each message."""
        return np.asarray(self.elements * ITEMSIZE[self.dtype])


def message_limit(bucket_bytes: int, peers: int) -> int:
    """The most bytes that one rank has under way to or from one peer in one round.

    `peers` is the most that any rank of the group may have: all at once, with IN_FLIGHT rounds, stay within
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

    Pieces of at least `large_bytes` do not share one; where messages may lie in many places they need not be alone.
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
    before = np.cumsum(elements) - elements
    totals = np.add.reduceat(elements, first) if len(first) else elements
    rounds = np.cumsum(_cut(totals * ITEMSIZE[code[first]], limit, np.zeros(len(first), dtype=bool))) - 1
    return Messages(box, offset, piece, message, before - before[first][message], rounds, code[first], totals)


def _cut(nbytes: IntArray, limit: int, opens: IntArray) -> IntArray:
    """(n,) bool: where a new group begins when consecutive ones are joined as long as they stay within `limit`.

    Groups also begin where `opens` says so. Each step of the loop makes a group, not a row.
    """
    n = len(nbytes)
    begins = np.zeros(n, dtype=bool)
    total = np.concatenate(([0], np.cumsum(nbytes)))
    forced = np.append(np.flatnonzero(opens), n)
    at = 0
    while at < n:
        begins[at] = True
        end = int(np.searchsorted(total, total[at] + limit, side="right")) - 1
        end = min(end, int(forced[np.searchsorted(forced, at, side="right")]))
        at = max(end, at + 1)
    return begins
