"""The I/O thread of a group: it moves messages through the connections, whatever the group's caller does meanwhile."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.transports.communicator import Message
from weightcast.transfer.transports.iovec import Cursor, Iovec
from weightcast.transfer.transports.peer_errors import Left, Naming

__all__ = ["IoThread", "Posted"]

_LEAST_BYTES = 2 << 20
"""Bytes that a connection must have before it is read, unless fewer are due: a read costs 20 us beside the copy."""

_CLOSED = "the peer closed it"


@dataclass(eq=False, slots=True)
class _Leg:
    """One message. `memory` keeps a tensor alive; `expected` is the number and length that the header should have."""

    peer: int
    direction: str
    header: npt.NDArray[np.uint64]
    expected: tuple[int, int]
    cursor: Cursor
    memory: torch.Tensor | Iovec

    @property
    def left(self) -> Left:
        return self.peer, self.direction, self.cursor.left

    def advance(self, connection: int) -> object:
        """Moves a part of the message. Returns the fault, None if there is none."""
        if self.direction == "send":
            self.cursor.send(connection)
            return None
        if not self.cursor.receive(connection):
            return _CLOSED
        values = int(self.header[0]), int(self.header[1])
        if self.cursor.done >= self.header.nbytes and values != self.expected:
            return (
                f"expected message {self.expected[0]} of {self.expected[1]} bytes, found message {values[0]} of "
                f"{values[1]}; the two ends do not run the same plan"
            )
        return None


@dataclass(eq=False, slots=True)
class Posted:
    """The Exchange of messages under way. It is over when all are through, one failed or the thread ended."""

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

    def count(self) -> None:
        """Counts one more message that is through."""
        self.through += 1
        if self.through == len(self.legs):
            self.over.set()


class _Link:
    """The connection to one peer, and the messages to go over it, in order."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.number = connection.fileno()
        # A leg does not know its exchange: a cycle would keep the memory of finished messages, as nobody collects it.
        self.sends: deque[tuple[_Leg, Posted]] = deque()
        self.receives: deque[tuple[_Leg, Posted]] = deque()
        self.posted = {"send": 0, "receive": 0}
        self.interest = 0
        self.failure: object = None
        self._least = 1

    def add(self, peer: int, direction: str, memory: torch.Tensor | Iovec) -> _Leg:
        """Makes the leg of a message behind those that were posted before. It does not move yet."""
        spans = Iovec.of_tensor(memory) if isinstance(memory, torch.Tensor) else memory
        values = self.posted[direction], spans.nbytes
        self.posted[direction] += 1
        header = np.array(values if direction == "send" else (0, 0), dtype=np.uint64)
        return _Leg(peer, direction, header, values, Cursor(header, spans), memory)

    def move(self, events: int) -> None:
        """Sends and receives as much as the connection takes and gives now."""
        if events & select.EPOLLRDHUP and self.sends:
            # The socket takes some more, but nobody will read it.
            self.failure = _CLOSED
        failure_events = select.EPOLLERR | select.EPOLLHUP
        for legs, event in ((self.receives, select.EPOLLIN), (self.sends, select.EPOLLOUT)):
            if not legs or not events & (event | failure_events) or self.failure is not None:
                continue
            try:
                self.failure = legs[0][0].advance(self.number)
            except BlockingIOError:
                continue
            except OSError as error:
                self.failure = error
            if self.failure is None and not legs[0][0].cursor.due:
                legs.popleft()[1].count()

    def fail(self) -> None:
        """Ends all that waits here. A message posted meanwhile is either among it or fails the next time."""
        failures = []
        for legs in (self.sends, self.receives):
            while legs:
                failures.append(legs.popleft())
        for leg, exchange in failures:
            exchange.cause = self.failure
            exchange.failed.append(leg)
        for _, exchange in failures:
            exchange.over.set()

    def wanted(self) -> int:
        """Returns the epoll events to wait for. Tells the kernel how many bytes of the message due are worth a wake-up.

        Only of that one: its peer may not send the next before it has heard from us.
        """
        threshold = min(_LEAST_BYTES, self.receives[0][0].cursor.due) if self.receives else 1
        if threshold != self._least:
            self._least = threshold
            with suppress(OSError):  # without it, we are only woken more often
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, threshold)
        send_events = select.EPOLLOUT | select.EPOLLRDHUP if self.sends else 0
        return send_events | (select.EPOLLIN if self.receives else 0)


class IoThread(threading.Thread):
    """The I/O thread: moves the messages that one thread at a time posts; any may stop it. It owns the connections,
    which do not block."""

    def __init__(self, connections: dict[int, socket.socket], naming: Naming) -> None:
        super().__init__(name=f"weightcast-tcp {naming.group}", daemon=True)
        self._naming = naming
        self._links = {peer: _Link(connection) for peer, connection in connections.items()}
        self._by_number = {link.number: link for link in self._links.values()}
        self._fresh: deque[_Link] = deque()
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._lock = threading.Lock()
        self.stopped = False

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Queues messages behind those that were posted before."""
        exchange = Posted(self._naming)
        for direction, messages in (("send", sends), ("receive", receives)):
            exchange.legs += [self._links[peer].add(peer, direction, memory) for peer, memory in messages]
        for leg in exchange.legs:
            link = self._links[leg.peer]
            (link.sends if leg.direction == "send" else link.receives).append((leg, exchange))
            self._fresh.append(link)
        if not self._ring():
            exchange.over.set()
        return exchange

    def stop(self) -> None:
        """Ends the thread soon, which closes all connections; `join` waits until nothing moves any more."""
        self.stopped = True
        self._ring()

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError where there is no thread left, and closes all connections."""
        try:
            super().start()
        except RuntimeError as error:
            self._end(error)
            raise

    def run(self) -> None:
        """Moves messages until the thread is stopped."""
        failure: object = None
        try:
            while not self.stopped:
                for number, events in self._epoll.poll():
                    if number == self._bell:
                        os.eventfd_read(self._bell)
                    else:
                        self._by_number[number].move(events)
                        self._watch(self._by_number[number])
                while self._fresh:
                    self._watch(self._fresh.popleft())
        except Exception as error:
            failure = error
            raise
        finally:
            self._end(failure)

    def _ring(self) -> bool:
        """Wakes the thread; False when it has ended."""
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)
            return self._bell >= 0

    def _watch(self, link: _Link) -> None:
        """Registers the events that a connection waits for next; fails one that is broken."""
        if link.failure is not None:
            link.fail()
        events = link.wanted()
        if events == link.interest:
            return
        if not link.interest:
            self._epoll.register(link.number, events)
        elif events:
            self._epoll.modify(link.number, events)
        else:  # a connection at rest would wake us with what its peer sends too early
            self._epoll.unregister(link.number)
        link.interest = events

    def _end(self, failure: object) -> None:
        for link in self._links.values():
            with suppress(OSError):  # the peer may have left before
                link.connection.shutdown(socket.SHUT_RDWR)
            link.connection.close()
        with self._lock:
            os.close(self._bell)
            self._bell, self.stopped = -1, True
        self._epoll.close()
        for link in self._links.values():
            link.failure = link.failure or failure
            if link.failure is not None:
                link.fail()
            for _, exchange in (*link.sends, *link.receives):
                exchange.over.set()
