"""TCP connections between all members of a group, one for each two.

Each member listens on its own address, says in the store where, and connects to the members before it. The member that
connects shows a secret from the store. Strangers are turned away, and nobody listens any longer than joining takes.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import TransferError
from weightcast.transfer.transports.addresses import host_port
from weightcast.transfer.transports.peer_errors import Naming, one_line
from weightcast.transfer.transports.rendezvous import listen, meet

__all__ = ["connect_all"]

_HELLO = struct.Struct("!16sI")
"""The secret of the group, and the group rank of the member that connects."""

_LOOK = 0.5
"""Seconds between two looks at the deadline, which may be cut short."""
_MOST_STRANGERS = 256
"""Beside members so many connections may say nothing yet; more would take this process's descriptors."""


def connect_all(store: Store, naming: Naming, address: str, deadline: Deadline) -> dict[int, socket.socket]:
    """A connection to every other member, by group rank, not blocking.

    `address` is the one at which this member can be reached; when empty, the one from which it reaches the store.
    Raises DeadlineError naming who did not come, TransferError naming who cannot be reached.
    """
    rank, size = naming.rank, len(naming.labels)
    connections: dict[int, socket.socket] = {}
    with ExitStack() as cleanup:
        cleanup.callback(_close, connections)
        listener = cleanup.enter_context(listen(address or _own_address(store)))
        try:
            host, port = listener.getsockname()[:2]
            store.set(f"address/{rank}", f"{port} {host}")
            if rank == 0:
                store.set("secret", secrets.token_hex(16))
            meet(store, naming, "tcp", deadline)
            addresses = [store.get(f"address/{peer}").decode().split(maxsplit=1) for peer in range(size)]
            secret = bytes.fromhex(store.get("secret").decode())
        except RuntimeError as error:
            raise TransferError(f"{naming.group}: {naming.me} lost the store: {one_line(error)}") from error
        for peer, (number, peer_host) in enumerate(addresses[:rank]):
            connections[peer] = _connect(peer_host, int(number), peer, naming, deadline)
            _greet(connections[peer], secret, peer, naming)
        _accept(listener, secret, set(range(rank + 1, size)), connections, naming, deadline)
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cleanup.pop_all()
        listener.close()
    return connections


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def _own_address(store: Any) -> str:
    """The address of this host from which it reaches the store."""
    while not hasattr(store, "host"):
        store = store.underlying_store
    info = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(info[0], socket.SOCK_DGRAM) as probe:
        probe.connect(info[4])  # sends nothing
        return str(probe.getsockname()[0])


def _connect(host: str, port: int, peer: int, naming: Naming, deadline: Deadline) -> socket.socket:
    place = host_port(host, port)
    try:
        return socket.create_connection((host, port), timeout=max(deadline.left, 0.001))
    except TimeoutError as error:
        purpose = f"to answer at {place}; is that address reachable from here?"
        raise naming.absent([peer], deadline, purpose) from error
    except OSError as error:
        raise TransferError(
            f"{naming.group}: {naming.me} cannot connect to {naming.labels[peer]} at {place}: {error}; is that "
            "address reachable from here?"
        ) from error


def _greet(connection: socket.socket, secret: bytes, peer: int, naming: Naming) -> None:
    try:
        connection.sendall(_HELLO.pack(secret, naming.rank))
    except OSError as error:
        raise naming.lost([(peer, "send", _HELLO.size)], error) from error


def _accept(
    listener: socket.socket,
    secret: bytes,
    expected: set[int],
    found: dict[int, socket.socket],
    naming: Naming,
    deadline: Deadline,
) -> None:
    """Adds the connections of the expected members to `found`, whatever strangers do."""
    listener.setblocking(False)
    with selectors.DefaultSelector() as strangers:
        strangers.register(listener, selectors.EVENT_READ)
        try:
            while absentees := sorted(expected - set(found)):
                ready = strangers.select(min(deadline.left, _LOOK))
                if deadline.expired:
                    purpose = f"to connect to {listener.getsockname()[0]}; is that address reachable from there?"
                    raise naming.absent(absentees, deadline, purpose)
                # The listener last: whom a newcomer displaces may be among those who have just spoken.
                for key, _ in sorted(ready, key=lambda event: event[0].data is None):
                    stranger: _Stranger | None = key.data
                    if stranger is None:
                        _welcome(listener, strangers, naming)
                    elif stranger.hear():
                        strangers.unregister(stranger.connection)
                        peer = stranger.member(secret)
                        if peer in expected and peer not in found:
                            found[peer] = stranger.connection
                        else:
                            stranger.connection.close()
        finally:
            for key in strangers.get_map().values():
                if key.data is not None:
                    key.data.connection.close()


def _welcome(listener: socket.socket, strangers: selectors.BaseSelector, naming: Naming) -> None:
    try:
        newcomer = listener.accept()[0]
    except (BlockingIOError, ConnectionError):  # gone already
        return
    except OSError as error:
        raise TransferError(f"{naming.group}: {naming.me} cannot accept connections: {error}") from error
    newcomer.setblocking(False)
    strangers.register(newcomer, selectors.EVENT_READ, _Stranger(newcomer))
    connections = [key.data.connection for key in strangers.get_map().values() if key.data is not None]
    if len(connections) > _MOST_STRANGERS + len(naming.labels):
        # Members speak at once: the one that has been silent for longest is none.
        strangers.unregister(connections[0])
        connections[0].close()


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A connection of which it is not known yet who opened it."""

    connection: socket.socket
    said: bytearray = field(default_factory=bytearray)

    def hear(self) -> bool:
        """Reads on. True once the stranger has said all it will."""
        try:
            piece = self.connection.recv(_HELLO.size - len(self.said))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self.said.extend(piece)
        return not piece or len(self.said) == _HELLO.size

    def member(self, secret: bytes) -> int:
        """Group rank that the stranger claims; -1 when it does not know the secret."""
        if len(self.said) < _HELLO.size:
            return -1
        proof, peer = _HELLO.unpack(self.said)
        return int(peer) if hmac.compare_digest(proof, secret) else -1
