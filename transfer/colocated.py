"""Boxes that do not travel: a rank of an instance reads them where a trainer rank of its host has them.

Only small numbers go over the communicator, in this order for every such pair:

    sender -> reader   generation of its offer, bytes of the offer (0 where the reader has it), then those bytes
    reader -> sender   the generation again, when everything was read
    sender -> reader   1 when its memory lay still in the meantime, 0 when it moved

So nobody reads before the sender has said that its weights stand, the sender changes them only after everyone has read,
and what was read from memory that was moved or freed meanwhile is an error on both sides. All of it is bounded by the
deadline of the run, and a peer that dies is noticed by the communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from weightcast.transfer.copying import CopyBatch
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.dtypes import ITEMSIZE, dtype_code, from_torch
from weightcast.transfer.errors import PlanError, StalePlanError, TransferError
from weightcast.transfer.handles import (
    CPU,
    MAX_OFFER_BYTES,
    Offer,
    Segment,
    decode_offer,
    encode_offer,
    generation_of,
)
from weightcast.transfer.layout import IntArray, RankLayout
from weightcast.transfer.neighbours import Neighbours
from weightcast.transfer.plan import Kind, RankPart
from weightcast.transfer.reading import bases_of, cast_bytes, read_in_place
from weightcast.transfer.rounds import check_operations, in_memory
from weightcast.transfer.runs import SCRATCH_BYTES
from weightcast.transfer.transports import shared_memory
from weightcast.transfer.transports.base import Communicator, Exchange

__all__ = ["Borrower", "Lender", "share"]

_STILL, _MOVED = 1, 0


def share(
    part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: Sequence[str]
) -> Lender | Borrower:
    """This rank's end of all that is read in place. `labels` names the members of the group."""
    return (Lender if part.is_trainer else Borrower)(part, layout, group, neighbours, labels)


class _End:
    """What both ends have: the operations that they share with each peer, and what is left for messages."""

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: Sequence[str]
    ) -> None:
        self._part, self._layout, self._group, self._neighbours = part, layout, group, neighbours
        self._labels = labels
        peer = _peers(part)
        found = {number: np.flatnonzero(peer == number) for number in sorted(neighbours.peers)}
        self._rows = {number: rows for number, rows in found.items() if len(rows)}
        shared = np.isin(peer, list(self._rows))
        nbytes = part.operations.size.prod(axis=1) * ITEMSIZE[part.wire_dtype]
        self.nbytes = int(nbytes[shared].sum())
        self.left = replace(part, operations=part.operations.take(~shared), wire_dtype=part.wire_dtype[~shared])
        if self._rows:
            check_operations(part, layout)


def _peers(part: RankPart) -> IntArray:
    """(m,) group rank of the other end of each operation; -1 for copies."""
    ops = part.operations
    if part.is_trainer:
        return np.asarray(len(part.trainer_ranks) + ops.dst_rank)
    peer = np.searchsorted(np.array(part.trainer_ranks, dtype=np.int64), ops.src_rank)
    return np.where(ops.kind == Kind.SEND, peer, -1)


class Lender(_End):
    """A trainer rank that lets others read its memory."""

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: Sequence[str]
    ) -> None:
        super().__init__(part, layout, group, neighbours, labels)
        frames = {peer: encode_offer(_offer(part, layout, rows)) for peer, rows in self._rows.items()}
        self._frames = {peer: (generation_of(frame), frame) for peer, frame in frames.items()}
        self.staging_bytes = 0

    def begin(self, deadline: Deadline) -> None:
        """Tells every reader that it may read, and from where."""
        settle(self._group.device)
        posted = []
        for peer, (generation, frame) in self._frames.items():
            news = b"" if self._neighbours.told.get(peer) == generation else frame
            posted.append(_send(self._group, peer, np.array([generation, len(news)], dtype=np.int64).tobytes()))
            if news:
                posted.append(_send(self._group, peer, news))
        for exchange in posted:
            exchange.wait(deadline)
        self._neighbours.told.update((peer, generation) for peer, (generation, _) in self._frames.items())

    def finish(self, deadline: Deadline) -> None:
        """Returns when everybody has read. Raises StalePlanError when the memory moved while they did."""
        answers = {peer: _numbers(1, self._group.device) for peer in self._frames}
        posted = {peer: self._group.post([], [(peer, _bytes(answer))]) for peer, answer in answers.items()}
        for peer, exchange in posted.items():
            exchange.wait(deadline)
            if int(answers[peer]) != self._frames[peer][0]:
                raise TransferError(f"{self._part.instance}: {self._labels[peer]} read another offer than it was made")
        moved = self._layout.memory.moved()
        word = np.array([_MOVED if moved else _STILL], dtype=np.int64).tobytes()
        for exchange in [_send(self._group, peer, word) for peer in self._frames]:
            exchange.wait(deadline)
        if moved:
            raise StalePlanError(
                f"{self._part.instance}: {len(moved)} storages of this rank were moved or freed while others read them; keep "
                "weights where they are until the update has ended, or lend a staging buffer"
            )


class Borrower(_End):
    """A rank of an instance that reads what trainer ranks of its host lend."""

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: Sequence[str]
    ) -> None:
        super().__init__(part, layout, group, neighbours, labels)
        self._batches: dict[int, tuple[int, list[CopyBatch]]] = {}
        self._scratch = torch.empty(SCRATCH_BYTES if self._rows else 0, dtype=torch.uint8)
        self._staging = torch.empty(0, dtype=torch.uint8, device=group.device)

    @property
    def staging_bytes(self) -> int:
        """Memory that is held beside the parameters, for what is cast."""
        return self._staging.nbytes

    def begin(self, deadline: Deadline) -> None:
        """Waits for the word of every sender and reads. Raises TransferError, PlanError, WireError."""
        headers = {peer: _numbers(2, self._group.device) for peer in self._rows}
        posted = {peer: self._group.post([], [(peer, _bytes(header))]) for peer, header in headers.items()}
        answers = []
        for peer, exchange in posted.items():
            exchange.wait(deadline)
            generation, nbytes = headers[peer].tolist()
            self._learn(peer, generation, nbytes, deadline)
            for batch in self._prepared(peer, generation):
                batch.run()
            settle(self._group.device)
            answers.append(_send(self._group, peer, np.array([generation], dtype=np.int64).tobytes()))
        for exchange in answers:
            exchange.wait(deadline)

    def finish(self, deadline: Deadline) -> None:
        """Returns when every sender has said that its memory lay still. Raises StalePlanError when one's did not."""
        words = {peer: _numbers(1, self._group.device) for peer in self._rows}
        posted = {peer: self._group.post([], [(peer, _bytes(word))]) for peer, word in words.items()}
        for peer, exchange in posted.items():
            exchange.wait(deadline)
            if int(words[peer]) != _STILL:
                raise StalePlanError(
                    f"{self._part.instance}: the memory of {self._labels[peer]} was moved or freed while it was read"
                )

    def _learn(self, peer: int, generation: int, nbytes: int, deadline: Deadline) -> None:
        """Takes a new offer, and lets go of memory that no offer speaks of any more."""
        offers, opened = self._neighbours.offers, self._neighbours.opened
        who = f"{self._part.instance}: {self._labels[peer]}"
        if nbytes:
            if not 0 < nbytes <= MAX_OFFER_BYTES:
                raise TransferError(f"{who} announces an offer of {nbytes} bytes, expected at most {MAX_OFFER_BYTES}")
            frame = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
            self._group.post([], [(peer, frame)]).wait(deadline)
            data = frame.cpu().numpy().tobytes()
            if generation_of(data) != generation:
                raise TransferError(f"{who} sent another offer than it announced; connect again")
            offer = decode_offer(data)
            offer.check(self._part.operations.size[self._rows[peer]], who)
            self._batches.pop(peer, None)
            offers[peer] = (generation, offer)
            used = {segment for _, each in offers.values() for segment in each.segments}
            for segment in opened.keys() - used:
                del opened[segment]
            opened.update((segment, _open(segment)) for segment in used - opened.keys())
        if offers.get(peer, (None,))[0] != generation:
            raise TransferError(f"{who} speaks of memory that this rank has not opened; connect again")

    def _prepared(self, peer: int, generation: int) -> list[CopyBatch]:
        known = self._batches.get(peer)
        if known is None or known[0] != generation:
            offer = self._neighbours.offers[peer][1]
            sources = bases_of(offer, self._neighbours.opened)
            if not self._staging.nbytes and any(s.dtype != t.dtype for s in sources for t in self._layout.memory.bases):
                self._staging = torch.empty(cast_bytes(self._part), dtype=torch.uint8, device=self._group.device)
            with torch.no_grad():
                batches = read_in_place(
                    self._part, self._layout, self._rows[peer], offer, sources, self._scratch, self._staging
                )
            known = self._batches[peer] = (generation, batches)
        return known[1]


def _offer(part: RankPart, layout: RankLayout, rows: IntArray) -> Offer:
    """Where the boxes of `rows` lie, in segments that a reader can open."""
    ops = part.operations
    base, start, stride, _ = in_memory(layout, ops.src_region[rows], ops.offset[rows], ops.size[rows])
    used, base = np.unique(base, return_inverse=True)
    places: list[tuple[int, int, int, int]] = []
    segments: dict[Segment, int] = {}
    exported: dict[int, tuple[Segment, int]] = {}
    for number in used.tolist():
        flat = layout.memory.bases[number]
        storage = flat.untyped_storage()
        if storage.data_ptr() not in exported:
            exported[storage.data_ptr()] = _segment_of(storage)
        segment, first = exported[storage.data_ptr()]
        places.append(
            (segments.setdefault(segment, len(segments)), first, flat.numel(), dtype_code(from_torch(flat.dtype)))
        )
    columns = np.array(places, dtype=np.int64).reshape(-1, 4).T
    return Offer(False, tuple(segments), *columns, base.astype(np.int64), start, stride)


def _segment_of(storage: torch.UntypedStorage) -> tuple[Segment, int]:
    if not storage.nbytes():
        return Segment(CPU, 0, b""), 0
    if storage.device.type == CPU:
        return shared_memory.segment_of(storage)
    from weightcast.transfer.transports import cuda_ipc

    return cuda_ipc.segment_of(storage)


def _open(segment: Segment) -> torch.Tensor:
    if not segment.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if segment.device == CPU:
        return shared_memory.open_segment(segment)
    from weightcast.transfer.transports import cuda_ipc

    return cuda_ipc.open_segment(segment)


def settle(device: torch.device) -> None:
    """Waits for what this process has given to a GPU: other processes do not see its streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int64, device=device)


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8)


def _send(group: Communicator, peer: int, data: bytes) -> Exchange:
    return group.post([(peer, torch.frombuffer(bytearray(data), dtype=torch.uint8).to(group.device))], [])
