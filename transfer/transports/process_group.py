"""Communicators over torch.distributed: Gloo between CPUs, NCCL between GPUs.

A group is built from the backend's own class on a store of ours. The default process group is neither used nor needed.
So a group lives beside all that the trainer or the engine has set up, and comes and goes without them.

    group = TorchGroup.join(store, rank=rank, labels=labels, name="rollout-0", deadline=deadline)
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed import PrefixStore, Store

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import TransferError
from weightcast.transfer.transports.addresses import ip_address
from weightcast.transfer.transports.communicator import Exchange, Message
from weightcast.transfer.transports.iovec import Iovec
from weightcast.transfer.transports.peer_errors import Left, Naming, one_line
from weightcast.transfer.transports.rendezvous import meet
from weightcast.transfer.transports.waiter import Waiter

__all__ = ["TorchGroup"]

# The names needed of it are exported at run time, but not declared.
_distributed: Any = torch.distributed

_NEVER = timedelta(days=30)
_PROBE = timedelta(milliseconds=1)
_POLL_SECONDS = 0.005


class TorchGroup:
    """A communicator of the members that `labels` lists, over Gloo or NCCL. Made by `join`."""

    scatters = buffers = False

    def __init__(self, backend: Any, naming: Naming, device: torch.device) -> None:
        self.rank, self.size, self.name = naming.rank, len(naming.labels), naming.group
        self.device = device
        self._naming = naming
        self._backend = backend
        self._usable = True
        self._waiter = Waiter()
        self._aborting = threading.Lock()

    @classmethod
    def join(
        cls,
        store: Store,
        *,
        rank: int,
        labels: Sequence[str],
        name: str,
        deadline: Deadline,
        backend: str = "gloo",
        device: torch.device | None = None,
        interface: str = "",
    ) -> TorchGroup:
        """Meets all members and connects to them, as `join_group` says.

        `backend` is "gloo" or "nccl"; `device` is where messages lie, for NCCL a CUDA device. `interface` is a network
        interface or an address of this host for Gloo; when empty, Gloo's own choice (GLOO_SOCKET_IFNAME or the host's
        name).
        """
        naming = Naming(name, tuple(labels), rank)
        prefix_store = PrefixStore(f"weightcast/{name}", store)
        meet(prefix_store, naming, backend, deadline)
        try:
            if backend == "gloo":
                device = device or torch.device("cpu")
                process_group = _gloo(PrefixStore("gloo", prefix_store), rank, len(labels), deadline, interface)
            elif backend == "nccl":
                device = device or torch.device("cuda", torch.cuda.current_device())
                process_group = _nccl(PrefixStore("nccl", prefix_store), rank, len(labels))
            else:
                raise TransferError(f"{name}: backend {backend!r} is not known; known are gloo and nccl")
        except RuntimeError as error:
            raise TransferError(f"{name}: {naming.me} cannot connect over {backend}: {one_line(error)}") from error
        group = cls(process_group, naming, device)
        if device.type == "cuda":
            group._connect_all(deadline)
        return group

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        if not self._usable:
            raise self._naming.closed()
        legs = [_Leg(peer, "send", self._whole(message)) for peer, message in sends]
        legs += [_Leg(peer, "receive", self._whole(message)) for peer, message in receives]
        if self.device.type == "cuda":
            return _QueuedExchange(self, legs, self._start_together(legs))
        return _WaitedExchange(self, legs, [self._start(leg) for leg in legs])

    def abort(self) -> None:
        with self._aborting:  # a second abort finds it done
            backend, self._backend, self._usable = self._backend, None, False
            try:
                if backend is not None and self.size > 1:
                    self._close_connections(backend)
            finally:
                self._waiter.give_up()

    def _close_connections(self, backend: Any) -> None:
        if self.device.type == "cuda":
            backend.abort()
            return
        # Gloo has no abort (torch 2.13). Instead, a wait that times out closes every connection of its group. A wait on
        # a lost connection fails without that. A connection that stays open would go on writing into memory.
        probe = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    backend.recv([probe], peer, 1).wait(_PROBE)

    def close(self) -> None:
        if self._backend is not None and self.device.type == "cuda":
            self._backend.shutdown()
        self._backend, self._usable = None, False
        self._waiter.give_up()

    def _whole(self, message: torch.Tensor | Iovec) -> torch.Tensor:
        if isinstance(message, torch.Tensor):
            return message
        raise TransferError(f"{self.name}: messages of this backend are tensors, found {len(message.rows)} places")

    def _start(self, leg: _Leg) -> Any:
        backend = self._backend
        if backend is None:  # aborted from another thread
            raise self._lost([leg], "")
        start = backend.send if leg.direction == "send" else backend.recv
        try:
            return start([leg.tensor], leg.peer, 0)
        except RuntimeError as error:
            raise self._lost([leg], error) from error

    def _start_together(self, legs: Sequence[_Leg]) -> Any:
        """Starts legs in one NCCL group call, so that the order of sends and receives inside does not matter."""
        with torch.cuda.device(self.device):
            self._backend._start_coalescing()
            for leg in legs:
                self._start(leg)
            return self._backend._end_coalescing()

    def _connect_all(self, deadline: Deadline) -> None:
        """Runs one collective of all members, at which NCCL makes its communicator."""
        with torch.cuda.device(self.device):
            token = torch.zeros(1, device=self.device)
            work = self._backend.allreduce([token])
        legs = [_Leg(peer, "receive", token) for peer in range(self.size) if peer != self.rank]
        _QueuedExchange(self, legs, work).wait(deadline)

    def _lost(self, legs: Sequence[_Leg], cause: object) -> TransferError:
        return self._naming.lost(_left(legs), cause) if self._usable else self._naming.aborted()

    def _late(self, legs: Sequence[_Leg], deadline: Deadline) -> TransferError:
        return self._naming.late(_left(legs), deadline) if self._usable else self._naming.aborted()


@dataclass(frozen=True, slots=True)
class _Leg:
    """One message of an exchange."""

    peer: int
    direction: str
    tensor: torch.Tensor


def _left(legs: Sequence[_Leg]) -> list[Left]:
    return [(leg.peer, leg.direction, leg.tensor.nbytes) for leg in legs]


@dataclass(frozen=True, slots=True)
class _WaitedExchange:
    """Gloo: a work for each message, which tells only its waiter that it is done."""

    group: TorchGroup
    legs: Sequence[_Leg]
    works: Sequence[Any]

    def wait(self, deadline: Deadline) -> None:
        if self.legs and not self.group._waiter.run(lambda: self._wait(deadline)):
            raise self.group._lost(self.legs, "")

    def _wait(self, deadline: Deadline) -> None:
        failures: list[tuple[_Leg, RuntimeError]] = []
        for leg, work in zip(self.legs, self.works, strict=True):
            try:
                # After a failure the others are only asked whether they are done, to name all that are missing.
                work.wait(_PROBE if failures else deadline.wait_time())
            except RuntimeError as error:
                failures.append((leg, error))
        if not failures:
            return
        losses = [(leg, error) for leg, error in failures if not _timed_out(error)]
        if losses:
            raise self.group._lost([leg for leg, _ in losses], losses[0][1]) from losses[0][1]
        raise self.group._late([leg for leg, _ in failures], deadline) from failures[0][1]


@dataclass(frozen=True, slots=True)
class _QueuedExchange:
    """NCCL: one work for all messages, put on a stream and watched from here, because waiting there has no deadline."""

    group: TorchGroup
    legs: Sequence[_Leg]
    work: Any

    def wait(self, deadline: Deadline) -> None:
        if not self.legs:
            return
        while not self.work.is_completed():
            if deadline.expired:
                raise self.group._late(self.legs, deadline)
            time.sleep(_POLL_SECONDS / 100)
        if not self.work.is_success():
            raise self.group._lost(self.legs, "NCCL reports an error")
        self.work.wait()


def _gloo(store: Store, rank: int, size: int, deadline: Deadline, interface: str) -> Any:
    gloo = _distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = deadline.wait_time()
    if not interface:
        options._devices = [gloo.create_default_device()]
    elif ip_address(interface) is not None:
        options._devices = [gloo.create_device(hostname=interface)]
    else:
        options._devices = [gloo.create_device(interface=interface)]
    return gloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    nccl = _distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NEVER
    # torch's watchdog ends the process when a peer fails or is late. Deadlines are ours, and engines have to live on.
    with _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return nccl(store, rank, size, options)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    saved_value = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if saved_value is None:
            del os.environ[name]
        else:
            os.environ[name] = saved_value


def _timed_out(error: RuntimeError) -> bool:
    """True if Gloo gave up on time, for this message or because another one did. Else the connection failed."""
    text = str(error)
    return "Timed out" in text or "Application timeout" in text
