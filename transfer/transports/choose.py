"""The communicator for a backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import Store

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import InputError, TransferError
from weightcast.transfer.transports.communicator import Communicator
from weightcast.transfer.transports.process_group import TorchGroup
from weightcast.transfer.transports.tcp_group import TcpGroup

__all__ = ["BACKENDS", "check_backend", "join_group"]

BACKENDS = ("tcp", "gloo", "nccl")
"""Sockets of our own between CPUs, torch's between CPUs, and NCCL between GPUs."""


def check_backend(backend: object) -> None:
    """Raises InputError for a backend that is not known, or that this process has no devices for."""
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}, expected {', '.join(map(repr, BACKENDS))}")
    if backend == "nccl" and not torch.cuda.is_available():
        raise InputError("backend is 'nccl', which needs a CUDA device, and torch sees none here; take 'tcp' or 'gloo'")


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
