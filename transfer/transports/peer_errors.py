"""Errors of a group: they name who misses what from whom."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import DeadlineError, TransferError

__all__ = ["Left", "Naming", "one_line"]

Left = tuple[int, str, int]
"""A peer, "send" or "receive", and bytes that are left."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The errors of member `rank` of a group, whose members `labels` names."""

    group: str
    labels: tuple[str, ...]
    rank: int

    @property
    def me(self) -> str:
        """Label of this member, for messages."""
        return self.labels[self.rank]

    def closed(self) -> TransferError:
        """The error of a post to a group that was left."""
        return TransferError(f"{self.group}: the group of {self.me} was closed; connect again")

    def aborted(self) -> TransferError:
        """The error of a wait in a group that this member gave up."""
        return TransferError(f"{self.group}: the group of {self.me} was aborted")

    def lost(self, left: Iterable[Left], cause: object) -> TransferError:
        """The error of failed connections, with peers, bytes left and cause."""
        return TransferError(f"{self.group}: {self.me} lost its connection to {self._each(left)}: {one_line(cause)}")

    def late(self, left: Iterable[Left], deadline: Deadline) -> DeadlineError:
        """The error of a wait whose time is over."""
        return DeadlineError(
            f"{self.group}: {self.me} waited {deadline.seconds:g} s and still misses {self._each(left)}"
        )

    def absent(self, members: Iterable[int], deadline: Deadline, purpose: str) -> DeadlineError:
        """The error of a wait for members to do something, such as "to join"."""
        names = ", ".join(self.labels[member] for member in members)
        return DeadlineError(f"{self.group}: {self.me} waited {deadline.seconds:g} s for {names} {purpose}")

    def _each(self, left: Iterable[Left]) -> str:
        """Peers and bytes: "trainer rank 0 (4096 bytes to receive), rollout-0 rank 1 (8 bytes to send)"."""
        totals: dict[tuple[int, str], int] = {}
        for peer, direction, nbytes in left:
            totals[peer, direction] = totals.get((peer, direction), 0) + nbytes
        return ", ".join(f"{self.labels[peer]} ({n} bytes to {direction})" for (peer, direction), n in totals.items())


def one_line(cause: object) -> str:
    """A message of torch in one line, without the place in its source at the start and without its advice."""
    text = re.sub(r"^\[[^]]*:\d+\] ", "", " ".join(str(cause).split()))
    return text.split(" This is typically caused")[0][:300]
