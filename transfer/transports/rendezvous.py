"""The meeting of the members of a group before they are connected.

    store, port = open_store("10.0.0.7", deadline)        # member 0; the control plane carries host and port
    store = connect_store("10.0.0.7", port, deadline)     # everyone else

The store is torch's. It serves one attempt to connect, and lists the members that are here.
"""

from __future__ import annotations

import socket
import time

from torch.distributed import Store, TCPStore

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import AddressError, DeadlineError, TransferError
from weightcast.transfer.transports import addresses
from weightcast.transfer.transports.addresses import host_port, is_unspecified
from weightcast.transfer.transports.peer_errors import Naming, one_line

__all__ = ["connect_store", "listen", "meet", "open_store"]

_POLL_SECONDS = 0.005


def listen(host: str) -> socket.socket:
    """A listener on a free port of the address `host` only. Raises AddressError when it is no address of this host."""
    if is_unspecified(host):
        # The others are told to connect to it, and from another host would come to themselves.
        raise AddressError(f"cannot listen on {host!r}, which is every address; give one at which others reach it")
    return addresses.listen(host)


def open_store(host: str, deadline: Deadline) -> tuple[Store, int]:
    """Opens the store that members meet at, on a free port of the address `host` only. Returns it and the port.

    Called by member 0, which keeps the store for as long as anyone may join. One store serves one attempt to connect.
    """
    listener = listen(host)
    port = int(listener.getsockname()[1])
    # The store listens on every address unless it is handed a socket.
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=deadline.wait_time(),
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect_store(host: str, port: int, deadline: Deadline) -> Store:
    """The store that member 0 opened. Raises DeadlineError when nobody answers there."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=deadline.wait_time())
    except RuntimeError as error:
        raise DeadlineError(
            f"no store answers at {host_port(host, port)} within {deadline.seconds:g} s ({one_line(error)}); "
            "is member 0 of the group alive?"
        ) from error


def meet(store: Store, naming: Naming, backend: str, deadline: Deadline) -> None:
    """Waits until every member has said in the store that it is here. Checks that all connect by the same backend."""
    group, labels = naming.group, naming.labels
    try:
        store.set(f"here/{naming.rank}", backend)
        absentees = list(range(len(labels)))
        while absentees := [member for member in absentees if not store.check([f"here/{member}"])]:
            if deadline.expired:
                raise naming.absent(absentees, deadline, "to join")
            time.sleep(_POLL_SECONDS)
        backends = [(store.get(f"here/{member}").decode(), label) for member, label in enumerate(labels)]
    except RuntimeError as error:
        raise TransferError(f"{group}: {naming.me} lost the store of {labels[0]}: {one_line(error)}") from error
    for peer_backend, label in backends:
        if peer_backend != backend:
            raise TransferError(
                f"{group}: {label} connects by backend {peer_backend!r}, {naming.me} by {backend!r}; give both the same"
            )
