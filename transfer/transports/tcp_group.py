"""Communicators over TCP between CPUs, whose messages leave from and arrive in the memory they belong to.

    group = TcpGroup.join(store, rank=rank, labels=labels, name="rollout-0", deadline=deadline, address="10.0.0.7")

The I/O thread of the group moves posted messages while the caller packs and unpacks. Every message goes behind a header
with its number and length, so that two ends that do not run one plan notice.
"""

from __future__ import annotations

import socket
import sys
import weakref
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch.distributed import PrefixStore, Store

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import TransferError
from weightcast.transfer.transports.communicator import Exchange, Message
from weightcast.transfer.transports.peer_errors import Naming, one_line
from weightcast.transfer.transports.tcp_handshake import connect_all
from weightcast.transfer.transports.tcp_io import IoThread

__all__ = ["TcpGroup"]


class TcpGroup:
    """A communicator of the members that `labels` lists. Made by `join`."""

    scatters = buffers = True
    device = torch.device("cpu")

    def __init__(self, connections: dict[int, socket.socket], naming: Naming) -> None:
        self.rank, self.size, self.name = naming.rank, len(naming.labels), naming.group
        self._naming = naming
        self._pump = IoThread(connections, naming)
        self._pump.start()
        # Nobody else ends the thread of a group that is dropped.
        weakref.finalize(self, self._pump.stop)

    @classmethod
    def join(
        cls, store: Store, *, rank: int, labels: Sequence[str], name: str, deadline: Deadline, address: str = ""
    ) -> TcpGroup:
        """Meets all members and connects to them, as `join_group` says.

        An empty `address` stands for the one from which this host reaches the store. Raises TransferError naming who
        cannot be reached.
        """
        if sys.platform != "linux":
            raise TransferError(f"{name}: backend 'tcp' needs Linux, found {sys.platform}; take 'gloo'")
        naming = Naming(name, tuple(labels), rank)
        prefix_store = PrefixStore(f"weightcast/{name}", store)
        try:
            with ExitStack() as cleanup:
                connections = connect_all(prefix_store, naming, address, deadline)
                for connection in connections.values():
                    cleanup.enter_context(connection)
                group = cls(connections, naming)
                cleanup.pop_all()
                return group
        except (OSError, RuntimeError) as error:  # no more descriptors, no more threads
            raise TransferError(f"{name}: {naming.me} cannot join: {one_line(error)}; see ulimit") from error

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Posts messages. One is through when the network has taken it, or has filled its memory."""
        if self._pump.stopped:
            raise self._naming.closed()
        return self._pump.post(sends, receives)

    def abort(self) -> None:
        """Gives up as Communicator.abort says. Nothing is written to memory after it returns."""
        self._pump.stop()
        self._pump.join()

    def close(self) -> None:
        self.abort()
