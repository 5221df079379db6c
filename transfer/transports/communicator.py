"""The interface between the executor and a transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from weightcast.transfer.deadline import Deadline

if TYPE_CHECKING:
    import torch

    from weightcast.transfer.transports.iovec import Iovec

__all__ = ["Communicator", "Exchange", "Message"]

Message = tuple[int, "torch.Tensor | Iovec"]
"""A peer by its group rank, and the memory that is sent to it or filled by it: a contiguous tensor, or many places."""


class Exchange(Protocol):
    """Messages under way."""

    def wait(self, deadline: Deadline) -> None:
        """Waits until what was sent may be overwritten and what was received may be read.

        On a GPU "may" is in the order of the current stream. Raises DeadlineError naming the peers that are missing and
        the bytes left, TransferError naming the peer whose connection failed. The communicator is of no use after
        either.
        """
        ...


class Communicator(Protocol):
    """The members of one instance's updates, numbered as in RankPart.group_rank."""

    @property
    def rank(self) -> int:
        """Number of this member, its group rank."""
        ...

    @property
    def size(self) -> int:
        """Number of members of the group."""
        ...

    @property
    def device(self) -> torch.device:
        """Device that messages must lie on."""
        ...

    @property
    def scatters(self) -> bool:
        """True if messages may be Iovec."""
        ...

    @property
    def buffers(self) -> bool:
        """True if a send may be through before the peer has asked for it."""
        ...

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """Starts sends and receives and returns at once.

        Tensors are contiguous, lie on `device` and stay untouched until the exchange is waited for. Between two
        members, messages match in the order in which each of them posts. Raises TransferError when a connection is
        gone.
        """
        ...

    def abort(self) -> None:
        """Gives up what is under way: waits of this member fail, in other threads too, and the peers see it leave."""
        ...

    def close(self) -> None:
        """Leaves after all exchanges were waited for."""
        ...
