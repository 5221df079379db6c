"""Neighbours: the members of a communicator that can read each other's memory. They find out over the communicator.

Each says where it is: the machine and its process namespace, the device of its memory, the devices that it can open. A
sender that shares its memory and a receiver that can open it move their boxes through memory. All other pairs send
messages. Both ends see the same two answers, so they agree.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgpack
import torch

from weightcast.transfer.colocated.offers import Offer, Share
from weightcast.transfer.colocated.segment import CPU, Segment
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import WireError
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import RankPart
from weightcast.transfer.transports.communicator import Communicator

__all__ = ["NOWHERE", "Neighbours", "PeerPlace", "device_of", "find_neighbours", "here", "meet_neighbours", "settle"]

_ANSWER_BYTES = 4096
"""Every answer has this length, so that nobody has to ask for it first."""


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """The place of a rank, as seen by ranks that may share memory with it.

    `host` is equal for processes that can open each other's memory, empty for one that shares none. `device` is where
    its weights lie, "cpu" or the UUID of a GPU; `opens` are the devices whose memory it can open.
    """

    host: str
    device: str = CPU
    opens: tuple[str, ...] = (CPU,)

    def can_read(self, other: PeerPlace) -> bool:
        """True if a rank here can open the memory of one there."""
        return bool(self.host) and self.host == other.host and other.device in self.opens


NOWHERE = PeerPlace("")
"""The place of a rank that exports nothing."""


def device_of(layout: RankLayout) -> torch.device:
    """The device of the weights of a rank; the CPU for a rank that has none."""
    return next((base.device for base in layout.memory.bases), torch.device(CPU))


def settle(device: torch.device) -> None:
    """Waits for the work that this process has given to a GPU: other processes do not see its streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def here(device: torch.device) -> PeerPlace:
    """The place of this process, whose weights lie on `device`."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    if device.type == CPU:
        return PeerPlace(host)
    from weightcast.transfer.colocated.cuda_ipc import reachable, uuid_of

    return PeerPlace(host, uuid_of(device), (CPU, *reachable(device)))


@dataclass(slots=True)
class Neighbours:
    """The peers of a rank, by group rank, with which it shares memory, and what they know of one another so far.

    `staged` says that this sender exports a staging buffer instead of its weights. `told` is the fingerprint of the
    offer that each importer has; `offers` the fingerprint and offer of each sender, `opened` the segments of all.
    """

    peers: frozenset[int] = frozenset()
    staged: bool = False
    told: dict[int, int] = field(default_factory=dict)
    offers: dict[int, tuple[int, Offer]] = field(default_factory=dict)
    opened: dict[Segment, torch.Tensor] = field(default_factory=dict)

    def close(self) -> None:
        """Lets go of all that was opened: memory that nobody uses any more goes back to the system."""
        self.told.clear()
        self.offers.clear()
        self.opened.clear()


def find_neighbours(
    group: Communicator, part: RankPart, layout: RankLayout, share: Share, deadline: Deadline
) -> Neighbours:
    """Finds neighbours by `meet_neighbours` for a rank where it is; `share` says what a trainer rank exports."""
    is_silent = part.is_trainer and share is None
    return meet_neighbours(group, part, NOWHERE if is_silent else here(device_of(layout)), deadline, share == "staged")


def meet_neighbours(
    group: Communicator, part: RankPart, place: PeerPlace, deadline: Deadline, staged: bool = False
) -> Neighbours:
    """Asks every member of the other side where it is. Every member has to call it, right after it joined."""
    senders = len(part.trainer_ranks)
    members = list(range(senders, group.size)) if part.is_trainer else list(range(senders))
    message = _answer(place, group.device)
    answers = [torch.empty(_ANSWER_BYTES, dtype=torch.uint8, device=group.device) for _ in members]
    group.post([(peer, message) for peer in members], list(zip(members, answers, strict=True))).wait(deadline)
    peers = set()
    for peer, answer in zip(members, answers, strict=True):
        peer_place = _read(answer, peer)
        exporter, importer = (place, peer_place) if part.is_trainer else (peer_place, place)
        if importer.can_read(exporter):
            peers.add(peer)
    return Neighbours(frozenset(peers), staged)


def _answer(place: PeerPlace, device: torch.device) -> torch.Tensor:
    payload = msgpack.packb(asdict(place))
    if len(payload) > _ANSWER_BYTES:
        raise WireError(
            f"this rank can open {len(place.opens)} devices, too many for an answer of {_ANSWER_BYTES} bytes"
        )
    return torch.frombuffer(bytearray(payload.ljust(_ANSWER_BYTES, b"\0")), dtype=torch.uint8).to(device)


def _read(answer: torch.Tensor, peer: int) -> PeerPlace:
    unpacker = msgpack.Unpacker(max_buffer_size=_ANSWER_BYTES)
    unpacker.feed(bytes(answer.cpu().numpy()))
    try:
        fields = unpacker.unpack()
        peer_place = PeerPlace(str(fields["host"]), str(fields["device"]), tuple(str(d) for d in fields["opens"]))
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise WireError(
            f"member {peer} did not say where it is: {error}; run the same weightcast on all sides"
        ) from None
    return peer_place
