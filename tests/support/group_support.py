"""Groups whose members are threads of one process: real connections, no start-up time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.transports.choose import join_group
from weightcast.transfer.transports.communicator import Communicator
from weightcast.transfer.transports.rendezvous import connect_store, open_store

__all__ = ["join_all", "together"]


def join_all(
    labels: Sequence[str], name: str = "rollout-0", backend: str = "tcp", address: str = "127.0.0.1"
) -> list[Communicator]:
    """All members of a new group, by group rank."""
    deadline = Deadline.after(20.0)
    _, port = first = open_store(address, deadline)

    def join(rank: int) -> Communicator:
        store = first[0] if rank == 0 else connect_store(address, port, deadline)
        return join_group(
            store, rank=rank, labels=labels, name=name, deadline=deadline, backend=backend, address=address
        )

    return together(*(lambda rank=rank: join(rank) for rank in range(len(labels))))


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls made at the same time; an exception is a result."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))
