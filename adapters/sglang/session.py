"""The one member of a scheduler process in the group of an epoch: its worker, and the thread that waits for others.

The scheduler's loop must not wait. So the thread registers, joins, receives and digests, and the loop asks how that is.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weightcast.adapters.sglang.caches import Prefixes
from weightcast.transfer.errors import PairStateError, TransferError

if TYPE_CHECKING:
    from weightcast.adapters.sglang.sink import SglangSink
    from weightcast.gateway.ranks.instance import InstanceWorker, MemoryRecord
    from weightcast.transfer.layout.memory import RankLayout
    from weightcast.transfer.layout.placement import RankPlacement
    from weightcast.transfer.layout.tables import TensorSpec

__all__ = ["CONNECTING", "JOINED", "Described", "Member", "Naming", "Session", "Thread"]

log = logging.getLogger("weightcast.sglang")

CONNECTING = "connecting"
JOINED = "joined"
_LAST_WRITES = 60.0
"""Seconds that the last copies of a transfer may take on this rank when all others are through."""
_LEAVING = 10.0
"""Seconds that a rank gives what it has called off to end."""


class Thread:
    """A thread for jobs that wait for others, one at a time, beside the scheduler's loop and with its settings."""

    def __init__(self, device: str, index: int) -> None:
        self._device, self._index = device, index
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weightcast", daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], object]) -> Future[object]:
        """Queues `work` behind all earlier jobs; returns its future."""
        job: Future[object] = Future()
        self._jobs.put((work, job))
        return job

    def end(self) -> None:
        """Ends the thread after the jobs that it has."""
        self._jobs.put(None)

    def ended(self, seconds: float) -> bool:
        """True if the thread has ended within `seconds`."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        import torch

        if self._device != "cpu":
            torch.get_device_module(self._device).set_device(self._index)
        with torch.inference_mode():
            while (entry := self._jobs.get()) is not None:
                work, job = entry
                try:
                    job.set_result(work())
                except BaseException as error:
                    log.warning("weightcast: %s: %s", type(error).__name__, error)
                    job.set_exception(error)


class Described(NamedTuple):
    """A sink that was described in the loop, where nobody else changes the model; or why it could not be."""

    sink: SglangSink | None
    outcome: RankLayout | Exception

    def describe(self) -> RankLayout:
        """The layout of this rank. Raises the error that its description met."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def placement(self) -> RankPlacement | None:
        """The placement of this rank as SGLang's map has it now; None without a sink."""
        return None if self.sink is None else self.sink.placement()

    def pad(self) -> None:
        """Pads parameters as the sink does; nothing without a sink."""
        if self.sink is not None:
            self.sink.pad()

    def settle(self) -> None:
        """Recomputes tensors as the sink does; nothing without a sink."""
        if self.sink is not None:
            self.sink.settle()


@dataclass(frozen=True, slots=True)
class Naming:
    """A question to the gateway for the names of checkpoint tensors, asked for the connect call `name`.

    The answer is waited for in a thread of its own, because there is no member before the model is described.
    """

    name: str
    catalog: Future[Mapping[str, TensorSpec]]

    @classmethod
    def begin(cls, name: str, ask: Callable[[], Mapping[str, TensorSpec]]) -> Naming:
        """Begins to ask."""
        naming = cls(name, Future())

        def answer() -> None:
            try:
                naming.catalog.set_result(ask())
            except Exception as error:
                naming.catalog.set_exception(error)

        threading.Thread(target=answer, name="weightcast names", daemon=True).start()
        return naming


@dataclass(slots=True)
class Member:
    """This rank in the group of one epoch.

    `connecting`, `receiving` and `writing` are jobs of its thread. The last two are the same transfer: `receiving` is
    kept until the end of the session is asked for, `writing` for good. `name` is that of the request: a pair that was
    made anew begins with the same epoch, and is another call.
    """

    name: str
    group: str
    pause: str
    worker: InstanceWorker
    description: Described
    thread: Thread
    connecting: Future[object] | None = None
    receiving: Future[object] | None = None
    writing: Future[object] | None = None

    def state(self) -> str:
        """The state of the connect: CONNECTING or JOINED. Raises what made it fail."""
        job = self.connecting
        if job is None or not job.done():
            return CONNECTING
        job.result()
        return JOINED

    def outcome(self, receiving: Future[object]) -> BaseException | None:
        """The error of a transfer, or None.

        The gateway ends the session when the trainer is through, so only the last copies on this rank are waited for.
        After a failure somewhere the beat has called the transfer off.
        """
        try:
            return receiving.exception(_LAST_WRITES)
        except TimeoutError:
            self.worker.give_up()
        try:
            return receiving.exception(_LEAVING)
        except TimeoutError:
            return TransferError(f"this rank still receives for {self.group}, which was called off")

    def leave(self) -> None:
        """Gives up whatever is waited for; the thread leaves the group, and ends."""
        self.worker.give_up(quietly=True)
        self.thread.do(self.worker.close)
        self.thread.end()

    def wait_until_left(self) -> None:
        """Waits until this member has left. Raises TransferError when it may still write."""
        if not self.thread.ended(_LEAVING):
            if self.writing is not None and not self.writing.done():
                raise TransferError(f"this rank still receives for {self.group}, which was called off; connect again")
            log.warning("weightcast: the connect of %s was called off, but still waits", self.group)


class Session:
    """The one member of this scheduler process, and the state that outlives groups and gateways."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self.earlier: list[Member] = []
        self.calls: deque[str] = deque(maxlen=100)
        self.naming: Naming | None = None
        self.folders: dict[str, str] = {}  # of checkpoints, by the name or path that SGLang was given
        self.padded = False
        self.memory: MemoryRecord | None = None  # of this process
        self.prefixes = Prefixes()

    def of(self, group: str) -> Member:
        """The member of `group`. Raises PairStateError for any other."""
        if self.member is None or group != self.member.group:
            current_group = "none" if self.member is None else self.member.group
            raise PairStateError(f"this rank is in group {current_group}, not in {group}; init the group first")
        return self.member

    def close(self) -> None:
        """Leaves the group, and waits for nobody."""
        self.naming = None
        if self.member is not None:
            self.member.leave()
            self.earlier = [member for member in (*self.earlier, self.member) if not member.thread.ended(0.0)]
            self.member = None
