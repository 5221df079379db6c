"""Boxes that do not travel: a rank of an instance reads them where a trainer rank of its host has them.

    exporter -> importer   fingerprint of its offer, bytes of the offer (0 where the importer has it), then those bytes
    (staged only)          exporter -> importer   number of a round, when it is packed
                           importer -> exporter   the same, when unpacked; its part of the buffer may be filled again
    importer -> exporter   the fingerprint again, when everything was read
    exporter -> importer   1 when its memory lay still in the meantime, 0 when it moved

Only these go over the communicator, in this order for every such pair. So nobody reads before the exporter has said
that its weights stand, and the exporter changes them only after everyone has read. A read of memory that was moved or
freed meanwhile is an error on both sides.

The deadline of the run bounds all of it, and the communicator notices a peer that dies. An exporter waits in one round
for nothing that needs a later one, as with messages, so no order of peers can deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.colocated.exporter import Staging, in_place_offer, make_staging, open_segment
from weightcast.transfer.colocated.importer import ImportedBoxes
from weightcast.transfer.colocated.offers import MAX_OFFER_BYTES, decode_offer, encode_offer, fingerprint_of
from weightcast.transfer.colocated.peers import Neighbours, device_of, settle
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

__all__ = ["Exporter", "Importer", "share"]

_STILL, _MOVED = 1, 0


def share(
    part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: tuple[str, ...]
) -> Exporter | Importer:
    """This rank's end of all that does not travel. `labels` names the members of the group."""
    return (Exporter if part.is_trainer else Importer)(part, layout, group, neighbours, labels)


class _End:
    """The parts that both ends have in common.

    `left` is the part with the operations that travel, `nbytes` the bytes of the others, in the dtypes in which they
    arrive.
    """

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: tuple[str, ...]
    ) -> None:
        self._layout, self._group, self._neighbours = layout, group, neighbours
        self._device = device_of(layout)
        self._labels = [f"{part.instance}: {label}" for label in labels]
        peer = _peers(part)
        peer_rows = {number: np.flatnonzero(peer == number) for number in sorted(neighbours.peers)}
        self._rows = {number: rows for number, rows in peer_rows.items() if len(rows)}
        mask = np.isin(peer, list(self._rows))
        nbytes = part.operations.size.prod(axis=1) * ITEMSIZE[part.wire_dtype]
        self.nbytes = int(nbytes[mask].sum())
        self.left = part.take(np.flatnonzero(~mask))
        if self._rows:
            check_operations(part, layout)

    def _tell(self, peers: Iterable[int], *numbers: int) -> list[Exchange]:
        """Sends whole numbers to peers."""
        return [self._send(peer, np.array(numbers, dtype=np.int64).tobytes()) for peer in peers]

    def _send(self, peer: int, data: bytes) -> Exchange:
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._group.device)
        return self._group.post([(peer, message)], [])

    def _hear(self, peers: Iterable[int], count: int, deadline: Deadline) -> Iterator[tuple[int, list[int]]]:
        """Receives `count` numbers from each peer; yields each peer and its numbers, in order."""
        messages = {peer: torch.empty(8 * count, dtype=torch.uint8, device=self._group.device) for peer in peers}
        exchanges = {peer: self._group.post([], [(peer, message)]) for peer, message in messages.items()}
        for peer, exchange in exchanges.items():
            exchange.wait(deadline)
            yield peer, messages[peer].cpu().view(torch.int64).tolist()

    def _expect(self, peers: Iterable[int], number: int, deadline: Deadline) -> None:
        """Waits until each peer has said `number`."""
        for peer, (word,) in self._hear(peers, 1, deadline):
            if word != number:
                raise TransferError(f"{self._labels[peer]} said {word}, expected {number}; connect again")


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


class Exporter(_End):
    """The exporter: a trainer rank that lets others read its memory, or a buffer into which it packs."""

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
        self._frames = {peer: (fingerprint_of(frame), frame) for peer, frame in frames.items()}

    @property
    def staging_bytes(self) -> int:
        """Memory that is held beside the parameters."""
        return 0 if self._staging is None else self._staging.buffer.nbytes

    def begin(self, deadline: Deadline) -> None:
        """Tells every importer from where it may read; with staging, packs for them until they have all."""
        fingerprints = self._neighbours.told
        settle(self._device)
        exchanges: list[Exchange] = []
        for peer, (fingerprint, frame) in self._frames.items():
            news = b"" if fingerprints.get(peer) == fingerprint else frame
            exchanges += self._tell([peer], fingerprint, len(news))
            if news:
                exchanges.append(self._send(peer, news))
            fingerprints[peer] = fingerprint
        if self._staging is not None:
            exchanges += self._pack(self._staging.rounds, deadline)
        _wait(exchanges, deadline)

    def _pack(self, rounds: list[Round], deadline: Deadline) -> list[Exchange]:
        exchanges: list[Exchange] = []
        importers = [sorted({peer for peer, _ in step.sends}) for step in rounds]
        for number in range(len(rounds) + IN_FLIGHT):
            if number >= IN_FLIGHT:
                self._expect(importers[number - IN_FLIGHT], number - IN_FLIGHT, deadline)
            if number < len(rounds):
                rounds[number].pack.run()
                settle(self._device)
                exchanges += self._tell(importers[number], number)
        return exchanges

    def finish(self, deadline: Deadline) -> None:
        """Waits until everybody has read. Raises StalePlanError when the memory moved meanwhile."""
        for peer, (fingerprint,) in self._hear(self._frames, 1, deadline):
            if fingerprint != self._frames[peer][0]:
                raise TransferError(f"{self._labels[peer]} read another offer than it was made; connect again")
        moved_bases = self._layout.memory.moved() if self._frames else []
        _wait(self._tell(self._frames, _MOVED if moved_bases else _STILL), deadline)
        if moved_bases:
            raise StalePlanError(
                f"{len(moved_bases)} storages of this rank were moved or freed while others read them; "
                "keep weights where they are until the update has ended"
            )


class Importer(_End):
    """The importer: a rank of an instance that reads what trainer ranks of its host export."""

    def __init__(
        self, part: RankPart, layout: RankLayout, group: Communicator, neighbours: Neighbours, labels: tuple[str, ...]
    ) -> None:
        super().__init__(part, layout, group, neighbours, labels)
        self._reading = ImportedBoxes(part, layout, self._device)
        self._known: dict[int, int] = {}
        self._batches: dict[int, list[CopyBatch]] = {}
        self._rounds: dict[int, list[CopyBatch]] = {}
        self._read: dict[int, int] = {}

    @property
    def staging_bytes(self) -> int:
        """Memory that is held beside the parameters, for what is cast."""
        return self._reading.staging_bytes

    def begin(self, deadline: Deadline) -> None:
        """Waits for the word of every exporter and reads. Raises TransferError, PlanError, WireError."""
        fingerprints: dict[int, int] = {}
        for peer, (fingerprint, nbytes) in self._hear(self._rows, 2, deadline):
            fingerprints[peer] = fingerprint
            self._learn(peer, fingerprint, nbytes, deadline)
            for batch in self._batches[peer]:
                batch.run()
        exchanges = self._unpack(deadline)
        settle(self._device)
        _wait(exchanges, deadline)
        self._read = fingerprints

    def _unpack(self, deadline: Deadline) -> list[Exchange]:
        """Empties the buffers of the exporters that have one, round by round."""
        exchanges: list[Exchange] = []
        for number in range(max(map(len, self._rounds.values()), default=0)):
            exporters = [peer for peer, rounds in self._rounds.items() if number < len(rounds)]
            for peer in exporters:
                self._expect([peer], number, deadline)
                self._rounds[peer][number].run()
                settle(self._device)
                exchanges += self._tell([peer], number)
        return exchanges

    def finish(self, deadline: Deadline) -> None:
        """Waits until every exporter has said that its memory lay still. Raises StalePlanError when one moved."""
        # Not earlier: an exporter takes this word when its messages are through, and NCCL keeps the order of posts.
        exchanges = [exchange for peer, offer in self._read.items() for exchange in self._tell([peer], offer)]
        for peer, (word,) in self._hear(self._rows, 1, deadline):
            if word != _STILL:
                raise StalePlanError(f"{self._labels[peer]}: its memory was moved or freed while it was read")
        _wait(exchanges, deadline)

    def _learn(self, peer: int, fingerprint: int, nbytes: int, deadline: Deadline) -> None:
        """Takes a new offer of an exporter, opens its segments, and prepares the copies."""
        if nbytes:
            self._take(peer, fingerprint, nbytes, deadline)
        entry = self._neighbours.offers.get(peer)
        if entry is None or entry[0] != fingerprint:
            raise TransferError(f"{self._labels[peer]} speaks of memory that this rank has not opened; connect again")
        if self._known.get(peer) == fingerprint:
            return
        offer, rows = entry[1], self._rows[peer]
        batches = self._reading.prepare(rows, offer, self._neighbours.opened, self._labels[peer])
        self._batches[peer], self._rounds[peer] = ([], batches) if offer.staged else (batches, [])
        self._known[peer] = fingerprint

    def _take(self, peer: int, fingerprint: int, nbytes: int, deadline: Deadline) -> None:
        if not 0 < nbytes <= MAX_OFFER_BYTES:
            raise TransferError(
                f"{self._labels[peer]} announces an offer of {nbytes} bytes, expected at most {MAX_OFFER_BYTES}"
            )
        frame = torch.empty(nbytes, dtype=torch.uint8, device=self._group.device)
        self._group.post([], [(peer, frame)]).wait(deadline)
        payload = frame.cpu().numpy().tobytes()
        if fingerprint_of(payload) != fingerprint:
            raise TransferError(f"{self._labels[peer]} sent another offer than it announced; connect again")
        offers, views = self._neighbours.offers, self._neighbours.opened
        # Copies of the old offer keep its memory mapped, so they go first.
        self._batches.pop(peer, None)
        self._rounds.pop(peer, None)
        offers[peer] = (fingerprint, decode_offer(payload))
        segments = {segment for _, offer in offers.values() for segment in offer.segments}
        for segment in views.keys() - segments:
            del views[segment]
        views.update((segment, open_segment(segment)) for segment in segments - views.keys())
