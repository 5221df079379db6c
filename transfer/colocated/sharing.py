"""Boxes that do not travel: a rank of an instance reads them where a trainer rank of its host has them.

Only small numbers go over the communicator, in this order for every such pair:

    lender -> reader   generation of its offer, bytes of the offer (0 where the reader has it), then those bytes
    (staged only)      lender -> reader   number of a round, when it is packed
                       reader -> lender   the same, when it is unpacked; its part of the buffer may be filled again
    reader -> lender   the generation again, when everything was read
    lender -> reader   1 when its memory lay still in the meantime, 0 when it moved

So nobody reads before the lender has said that its weights stand, the lender changes them only after everyone has read,
and what was read from memory that was moved or freed meanwhile is an error on both sides. All of it is bounded by the
deadline of the run, and a peer that dies is noticed by the communicator. What a lender waits for in one round needs
nothing of a later one, as with messages, so no order of peers can deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.colocated.exporter import Staging, in_place_offer, make_staging, open_segment
from weightcast.transfer.colocated.importer import Reading
from weightcast.transfer.colocated.offers import MAX_OFFER_BYTES, decode_offer, encode_offer, generation_of
from weightcast.transfer.colocated.peers import Neighbours, device_of
from weightcast.transfer.copy.batch import CopyBatch
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import StalePlanError, TransferError
from weightcast.transfer.exchange.messages import IN_FLIGHT
from weightcast.transfer.exchange.messages_in_memory import check_operations
from weightcast.transfer.exchange.schedule import Round
from weightcast.transfer.layout.dtypes import ITEMSIZE
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import Kind, RankPart
from weightcast.transfer.transports.communicator import Communicator, Exchange

__all__ = ["Borrower", "Lender", "share"]

_STILL, _MOVED = 1, 0


def share(
    part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: tuple[str, ...]
) -> Lender | Borrower:
    """This rank's end of all that does not travel. `labels` names the members of the group."""
    return (Lender if part.is_trainer else Borrower)(part, layout, group, neighbours, labels)


class _End:
    """What both ends have.

    `left` is the part without what does not travel, `nbytes` the bytes that do not, in the dtypes in which they arrive.
    """

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: tuple[str, ...]
    ) -> None:
        self._layout, self._group, self._neighbours = layout, group, neighbours
        self._device = device_of(layout)
        self._labels = [f"{part.instance}: {label}" for label in labels]
        peer = _peers(part)
        found = {number: np.flatnonzero(peer == number) for number in sorted(neighbours.peers)}
        self._rows = {number: rows for number, rows in found.items() if len(rows)}
        shared = np.isin(peer, list(self._rows))
        nbytes = part.operations.size.prod(axis=1) * ITEMSIZE[part.wire_dtype]
        self.nbytes = int(nbytes[shared].sum())
        self.left = part.take(np.flatnonzero(~shared))
        if self._rows:
            check_operations(part, layout)

    def _tell(self, peers: Iterable[int], *numbers: int) -> list[Exchange]:
        """Sends whole numbers to peers."""
        return [self._send(peer, np.array(numbers, dtype=np.int64).tobytes()) for peer in peers]

    def _send(self, peer: int, data: bytes) -> Exchange:
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._group.device)
        return self._group.post([(peer, message)], [])

    def _hear(self, peers: Iterable[int], count: int, deadline: Deadline) -> Iterator[tuple[int, list[int]]]:
        """Each peer and its `count` numbers, in order."""
        heard = {peer: torch.empty(8 * count, dtype=torch.uint8, device=self._group.device) for peer in peers}
        posted = {peer: self._group.post([], [(peer, message)]) for peer, message in heard.items()}
        for peer, exchange in posted.items():
            exchange.wait(deadline)
            yield peer, heard[peer].cpu().view(torch.int64).tolist()

    def _expect(self, peers: Iterable[int], number: int, deadline: Deadline) -> None:
        """Waits until each peer has said `number`."""
        for peer, (found,) in self._hear(peers, 1, deadline):
            if found != number:
                raise TransferError(f"{self._labels[peer]} said {found}, expected {number}; connect again")

    def _settle(self) -> None:
        """Waits for what this process has given to a GPU: other processes do not see its streams."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _wait(exchanges: Iterable[Exchange], deadline: Deadline) -> None:
    for exchange in exchanges:
        exchange.wait(deadline)


def _peers(part: RankPart) -> IntArray:
    """(m,) group rank of the other end of each operation; -1 for copies."""
    ops = part.operations
    if part.is_trainer:
        return np.asarray(len(part.trainer_ranks) + ops.dst_rank)
    peer = np.searchsorted(np.array(part.trainer_ranks, dtype=np.int64), ops.src_rank)
    return np.where(ops.kind == Kind.SEND, peer, -1)


class Lender(_End):
    """A trainer rank that lets others read its memory, or a buffer into which it packs."""

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: tuple[str, ...]
    ) -> None:
        super().__init__(part, layout, group, neighbours, labels)
        self._staging: Staging | None = None
        if neighbours.staged and self._rows:
            self._staging = make_staging(part, layout, self._rows, self._device)
            offers = self._staging.offers
        else:
            offers = {peer: in_place_offer(part, layout, rows) for peer, rows in self._rows.items()}
        frames = {peer: encode_offer(offer) for peer, offer in offers.items()}
        self._frames = {peer: (generation_of(frame), frame) for peer, frame in frames.items()}

    @property
    def staging_bytes(self) -> int:
        """Memory that is held beside the parameters."""
        return 0 if self._staging is None else self._staging.buffer.nbytes

    def begin(self, deadline: Deadline) -> None:
        """Tells every reader from where it may read; with staging, packs for them until they have all."""
        told = self._neighbours.told
        self._settle()
        posted: list[Exchange] = []
        for peer, (generation, frame) in self._frames.items():
            news = b"" if told.get(peer) == generation else frame
            posted += self._tell([peer], generation, len(news))
            if news:
                posted.append(self._send(peer, news))
            told[peer] = generation
        if self._staging is not None:
            posted += self._pack(self._staging.rounds, deadline)
        _wait(posted, deadline)

    def _pack(self, rounds: list[Round], deadline: Deadline) -> list[Exchange]:
        posted: list[Exchange] = []
        readers = [sorted({peer for peer, _ in step.sends}) for step in rounds]
        for number in range(len(rounds) + IN_FLIGHT):
            if number >= IN_FLIGHT:
                self._expect(readers[number - IN_FLIGHT], number - IN_FLIGHT, deadline)
            if number < len(rounds):
                rounds[number].pack.run()
                self._settle()
                posted += self._tell(readers[number], number)
        return posted

    def finish(self, deadline: Deadline) -> None:
        """Returns when everybody has read. Raises StalePlanError when the memory moved while they did."""
        for peer, (found,) in self._hear(self._frames, 1, deadline):
            if found != self._frames[peer][0]:
                raise TransferError(f"{self._labels[peer]} read another offer than it was made; connect again")
        moved = self._layout.memory.moved() if self._frames else []
        _wait(self._tell(self._frames, _MOVED if moved else _STILL), deadline)
        if moved:
            raise StalePlanError(
                f"{len(moved)} storages of this rank were moved or freed while others read them; keep weights where "
                "they are until the update has ended"
            )


class Borrower(_End):
    """A rank of an instance that reads what trainer ranks of its host lend."""

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: tuple[str, ...]
    ) -> None:
        super().__init__(part, layout, group, neighbours, labels)
        self._reading = Reading(part, layout, self._device)
        self._known: dict[int, int] = {}
        self._batches: dict[int, list[CopyBatch]] = {}
        self._rounds: dict[int, list[CopyBatch]] = {}
        self._read: dict[int, int] = {}

    @property
    def staging_bytes(self) -> int:
        """Memory that is held beside the parameters, for what is cast."""
        return self._reading.staging_bytes

    def begin(self, deadline: Deadline) -> None:
        """Waits for the word of every lender and reads. Raises TransferError, PlanError, WireError."""
        generations: dict[int, int] = {}
        for peer, (generation, nbytes) in self._hear(self._rows, 2, deadline):
            generations[peer] = generation
            self._learn(peer, generation, nbytes, deadline)
            for batch in self._batches[peer]:
                batch.run()
        posted = self._unpack(deadline)
        self._settle()
        _wait(posted, deadline)
        self._read = generations

    def _unpack(self, deadline: Deadline) -> list[Exchange]:
        """Empties the buffers of those who lend one, round by round."""
        posted: list[Exchange] = []
        for number in range(max(map(len, self._rounds.values()), default=0)):
            lenders = [peer for peer, rounds in self._rounds.items() if number < len(rounds)]
            for peer in lenders:
                self._expect([peer], number, deadline)
                self._rounds[peer][number].run()
                self._settle()
                posted += self._tell([peer], number)
        return posted

    def finish(self, deadline: Deadline) -> None:
        """Returns when every lender has said that its memory lay still. Raises StalePlanError when one's did not."""
        # Not earlier: a lender takes this word when its messages are through, and NCCL keeps what is posted in order.
        posted = [each for peer, generation in self._read.items() for each in self._tell([peer], generation)]
        for peer, (word,) in self._hear(self._rows, 1, deadline):
            if word != _STILL:
                raise StalePlanError(f"{self._labels[peer]}: its memory was moved or freed while it was read")
        _wait(posted, deadline)

    def _learn(self, peer: int, generation: int, nbytes: int, deadline: Deadline) -> None:
        """Takes a new offer of a lender, opens what it speaks of, and prepares the copies."""
        if nbytes:
            self._take(peer, generation, nbytes, deadline)
        known = self._neighbours.offers.get(peer)
        if known is None or known[0] != generation:
            raise TransferError(f"{self._labels[peer]} speaks of memory that this rank has not opened; connect again")
        if self._known.get(peer) == generation:
            return
        offer, rows = known[1], self._rows[peer]
        batches = self._reading.prepare(rows, offer, self._neighbours.opened, self._labels[peer])
        self._batches[peer], self._rounds[peer] = ([], batches) if offer.staged else (batches, [])
        self._known[peer] = generation

    def _take(self, peer: int, generation: int, nbytes: int, deadline: Deadline) -> None:
        if not 0 < nbytes <= MAX_OFFER_BYTES:
            raise TransferError(
                f"{self._labels[peer]} announces an offer of {nbytes} bytes, expected at most {MAX_OFFER_BYTES}"
            )
        frame = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
        self._group.post([], [(peer, frame)]).wait(deadline)
        data = frame.cpu().numpy().tobytes()
        if generation_of(data) != generation:
            raise TransferError(f"{self._labels[peer]} sent another offer than it announced; connect again")
        offers, opened = self._neighbours.offers, self._neighbours.opened
        # Copies of the old offer keep its memory mapped, so they go first.
        self._batches.pop(peer, None)
        self._rounds.pop(peer, None)
        offers[peer] = (generation, decode_offer(data))
        used = {segment for _, offer in offers.values() for segment in offer.segments}
        for segment in opened.keys() - used:
            del opened[segment]
        opened.update((segment, open_segment(segment)) for segment in used - opened.keys())
