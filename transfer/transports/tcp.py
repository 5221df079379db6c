"""Communicators over TCP between CPUs, whose messages leave from and arrive in the memory they belong to.

    group = TcpGroup.join(store, rank=rank, labels=labels, name="rollout-0", deadline=deadline, address="10.0.0.7")

A thread of the group moves what was posted while its caller packs and unpacks. Every message goes behind a header with
its number and length, so that two ends that do not run one plan notice.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.transports.base import Exchange, Message
from weightcast.transfer.transports.handshake import connect_all
from weightcast.transfer.transports.naming import Left, Naming
from weightcast.transfer.transports.spans import Cursor, Spans

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["TcpGroup"]

# What we need of it is exported at run time, but not declared.
_distributed: Any = torch.distributed

_LEAST_BYTES = 2 << 20
"""Where more is to come, a connection is not read before it has so much: each reading costs 20 us beside the copy."""


_CLOSED = "the peer closed it"


class TcpGroup:
    """A communicator of the members that `labels` lists. Made by `join`."""

    scatters = True
    device = torch.device("cpu")

    def __init__(self, connections: dict[int, socket.socket], naming: Naming) -> None:
        self.rank, self.size, self.name = naming.rank, len(naming.labels), naming.group
        self._naming = naming
        self._pump = _Pump(connections)
        self._pump.start()
        # Nobody else ends the thread of a group that is dropped.
        weakref.finalize(self, self._pump.stop)

    @classmethod
    def join(
        cls, store: Store, *, rank: int, labels: Sequence[str], name: str, deadline: Deadline, address: str = ""
    ) -> TcpGroup:
        """Meets all members and connects to them.

        `labels` names the members in messages, "trainer rank 0" or "rollout-0 rank 1", in the order of their group
        ranks; `name` is the same for all. `address` is the one of this host at which the others reach it; when empty,
        the one from which this host reaches the store. Raises DeadlineError naming who did not come, TransferError
        naming who cannot be reached.
        """
        naming = Naming(name, tuple(labels), rank)
        scoped = _distributed.PrefixStore(f"weightcast/{name}", store)
        return cls(connect_all(scoped, naming, address, deadline), naming)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """See Communicator.post."""
        if self._pump.stopped:
            raise self._naming.closed()
        exchange = _Exchange(self._pump, self._naming)
        for direction, messages in (("send", sends), ("receive", receives)):
            for peer, message in messages:
                exchange.legs.append(self._pump.leg(peer, direction, message, exchange))
        self._pump.take(exchange.legs)
        return exchange

    def abort(self) -> None:
        """See Communicator.abort. Nothing is written to memory after it returns."""
        self._pump.stop()
        self._pump.join()

    def close(self) -> None:
        """See Communicator.close."""
        self.abort()


@dataclass(eq=False, slots=True)
class _Leg:
    """One message of an exchange. `memory` keeps a tensor alive."""

    peer: int
    direction: str
    header: npt.NDArray[np.uint64]
    expected: tuple[int, int]
    cursor: Cursor
    memory: torch.Tensor | Spans
    exchange: _Exchange

    @property
    def left(self) -> Left:
        return self.peer, self.direction, self.cursor.left


@dataclass(eq=False, slots=True)
class _Exchange:
    """Messages under way. It is over when all are through or one failed."""

    pump: _Pump
    naming: Naming
    legs: list[_Leg] = field(default_factory=list)
    failed: list[_Leg] = field(default_factory=list)
    cause: object = ""
    through: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self, deadline: Deadline) -> None:
        if self.legs and not self.over.wait(deadline.left) and self.through < len(self.legs):
            raise self.naming.late([leg.left for leg in self.legs if leg.cursor.due], deadline)
        if self.failed:
            raise self.naming.lost([leg.left for leg in self.failed], self.cause)
        if self.through < len(self.legs):
            raise self.naming.aborted()


class _Link:
    """The connection to one peer, and what is to go over it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.number = connection.fileno()
        self.waiting: dict[str, deque[_Leg]] = {"send": deque(), "receive": deque()}
        self.posted = {"send": 0, "receive": 0}
        self.interest = 0
        self.failure: object = None
        self._least = 1

    def settle_for(self) -> None:
        """Asks not to be woken for few bytes where many are to come.

        Only of the message that is due: its peer may not send the next before it has heard from us.
        """
        legs = self.waiting["receive"]
        least = min(_LEAST_BYTES, legs[0].cursor.due) if legs else 1
        if least != self._least:
            self._least = least
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    @property
    def wanted(self) -> int:
        """What to be told of."""
        sending = select.EPOLLOUT | select.EPOLLRDHUP if self.waiting["send"] else 0
        return sending | (select.EPOLLIN if self.waiting["receive"] else 0)


class _Pump(threading.Thread):
    """Moves what was posted. All that is posted comes from one thread at a time; stopping may come from any."""

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        super().__init__(name="weightcast-tcp", daemon=True)
        self._links = {peer: _Link(connection) for peer, connection in connections.items()}
        self._by_number = {link.number: link for link in self._links.values()}
        self._fresh: deque[_Link] = deque()
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._lock = threading.Lock()
        self.stopped = False

    def leg(self, peer: int, direction: str, message: torch.Tensor | Spans, exchange: _Exchange) -> _Leg:
        link = self._links[peer]
        spans = Spans.of_tensor(message) if isinstance(message, torch.Tensor) else message
        said = link.posted[direction], spans.nbytes
        link.posted[direction] += 1
        header = np.array(said if direction == "send" else (0, 0), dtype=np.uint64)
        return _Leg(peer, direction, header, said, Cursor(header, spans), message, exchange)

    def take(self, legs: Sequence[_Leg]) -> None:
        """Has them moved, in this order."""
        for leg in legs:
            link = self._links[leg.peer]
            link.waiting[leg.direction].append(leg)
            self._fresh.append(link)
        self._ring()

    def stop(self) -> None:
        """Ends the thread soon, which closes all connections."""
        self.stopped = True
        self._ring()

    def _ring(self) -> None:
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def run(self) -> None:
        try:
            while not self.stopped:
                for number, events in self._epoll.poll():
                    if number == self._bell:
                        os.eventfd_read(self._bell)
                    else:
                        self._move(self._by_number[number], events)
                while self._fresh:
                    self._watch(self._fresh.popleft())
        finally:
            self.stopped = True
            self._end()

    def _move(self, link: _Link, events: int) -> None:
        """Sends and receives what a connection takes and gives now."""
        broken = events & (select.EPOLLERR | select.EPOLLHUP)
        if events & select.EPOLLRDHUP and link.waiting["send"]:
            # A socket takes some more, but nobody will read it.
            link.failure = _CLOSED
        for direction, event in (("receive", select.EPOLLIN), ("send", select.EPOLLOUT)):
            legs = link.waiting[direction]
            if legs and events & event | broken and link.failure is None:
                try:
                    link.failure = _advance(legs[0], link.number)
                except BlockingIOError:
                    continue
                except OSError as error:
                    link.failure = error
                if link.failure is None and not legs[0].cursor.due:
                    _finish(legs.popleft())
        self._watch(link)

    def _watch(self, link: _Link) -> None:
        """Asks for what is waited for on a connection; one that failed fails all of it."""
        if link.failure is not None:
            failed = [leg for legs in link.waiting.values() for leg in legs]
            for legs in link.waiting.values():
                legs.clear()
            for leg in failed:
                leg.exchange.cause = link.failure
                leg.exchange.failed.append(leg)
            for leg in failed:
                leg.exchange.over.set()
        link.settle_for()
        wanted = link.wanted
        if wanted == link.interest:
            return
        if not link.interest:
            self._epoll.register(link.number, wanted)
        elif wanted:
            self._epoll.modify(link.number, wanted)
        else:  # a connection at rest would wake us with what its peer sends too early
            self._epoll.unregister(link.number)
        link.interest = wanted

    def _end(self) -> None:
        for link in self._links.values():
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_RDWR)
            link.connection.close()
        with self._lock:
            os.close(self._bell)
            self._bell = -1
        self._epoll.close()
        for link in self._links.values():
            for legs in link.waiting.values():
                for leg in legs:
                    leg.exchange.over.set()


def _advance(leg: _Leg, number: int) -> object:
    """Moves some of a message. What is wrong, None if nothing is."""
    if leg.direction == "send":
        leg.cursor.send(number)
        return None
    if not leg.cursor.receive(number):
        return _CLOSED
    found = int(leg.header[0]), int(leg.header[1])
    if leg.cursor.done >= leg.header.nbytes and found != leg.expected:
        return (
            f"expected message {leg.expected[0]} of {leg.expected[1]} bytes, found message {found[0]} of {found[1]}; "
            "the two ends do not run the same plan"
        )
    return None


def _finish(leg: _Leg) -> None:
    leg.exchange.through += 1
    if leg.exchange.through == len(leg.exchange.legs):
        leg.exchange.over.set()
