"""The communicator for a backend."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import Store

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import TransferError
from weightcast.transfer.transports.communicator import Communicator
from weightcast.transfer.transports.process_group import TorchGroup
from weightcast.transfer.transports.tcp_group import TcpGroup

__all__ = ["BACKENDS", "join_group"]

BACKENDS = ("tcp", "gloo", "nccl")
"""Sockets of our own between CPUs, torch's between CPUs, and NCCL between GPUs."""


def join_group(
    store: Store,
    *,
    rank: int,
    labels: Sequence[str],
    name: str,
    deadline: Deadline,
    backend: str = "tcp",
    address: str = "",
) -> Communicator:
    """Meets all members of a group and connects to them.

    `labels` names the members in messages, "trainer rank 0" or "rollout-0 rank 1", in the order of their group ranks;
    `name` and `backend` are the same for all. `address` is the one of this host at which the others reach it; NCCL
    finds its own. Raises DeadlineError naming who did not come.
    """
    if backend not in BACKENDS:
        raise TransferError(f"{name}: backend {backend!r} is not known; known are {', '.join(BACKENDS)}")
    if backend == "tcp":
        return TcpGroup.join(store, rank=rank, labels=labels, name=name, deadline=deadline, address=address)
    interface = address if backend == "gloo" else ""
    return TorchGroup.join(
        store, rank=rank, labels=labels, name=name, deadline=deadline, backend=backend, interface=interface
    )
