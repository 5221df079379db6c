"""SGLang plugin (entry-point group `sglang.srt.plugins`): serves weight updates inside each scheduler process.

It answers the requests of SGLang's own update API that carry a group name of ours, and leaves all others to SGLang:

- `init_weights_update_group`: describes this rank and begins to register and join. The group is
  `weightcast/PAIR/INSTANCE/EPOCH/PAUSE/CALL`; the same call again asks how that goes on.
- `update_weights_from_distributed` with load format "weightcast": drops caches, and begins to receive.
- `end_weight_update`: when SGLang has computed its derived weights, computes the others, drops caches again and begins
  to digest.
- `destroy_weights_update_group`: leaves.

Each of them answers at once. Whatever waits for others runs in a thread of this rank, while the scheduler's loop goes
on: the thread registers, joins, receives and digests, and tells the gateway itself how that ended.

No error leaves a hook: it comes back as `success=False` with our message, and the server lives. The token is taken from
the environment of the server (WEIGHTCAST_TOKEN); WEIGHTCAST_GATEWAY overrides the gateway's address.

Facts about SGLang are from 0.5.23: `srt/managers/scheduler.py`, `srt/managers/scheduler_components/weight_updater.py`,
`srt/plugins/hook_registry.py`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from weightcast.adapters.sglang.ray_actors import load_in_actors
from weightcast.gateway.addresses import CA_VARIABLE
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.gateway.records import PauseMode
from weightcast.transfer.errors import DescribeError, InputError, PairStateError, StalePlanError, TransferError

if TYPE_CHECKING:
    from weightcast.adapters.sglang.caches import Prefixes
    from weightcast.adapters.sglang.sink import SglangSink
    from weightcast.gateway.ranks.instance import InstanceWorker, MemoryRecord
    from weightcast.transfer.layout.memory import RankLayout
    from weightcast.transfer.layout.placement import RankPlacement

__all__ = ["ADDRESS_VARIABLE", "GATEWAY_VARIABLE", "register"]

log = logging.getLogger("weightcast.sglang")

GATEWAY_VARIABLE = "WEIGHTCAST_GATEWAY"
"""Environment variable with the gateway's URL, for servers that do not reach it by the address in the request."""
ADDRESS_VARIABLE = "WEIGHTCAST_ADDRESS"
"""Environment variable with the address on which this engine's ranks can be reached by the trainer's."""

PREFIX = "weightcast/"
LOAD_FORMAT = "weightcast"
CONNECTING = "connecting"
JOINED = "joined"
_PAUSES = get_args(PauseMode)
_LAST_WRITES = 60.0
"""Seconds that the last copies of a transfer may take on this rank when all others are through."""
_LEAVING = 10.0
"""Seconds that a rank gives what it has called off to end."""
_SLOW = 5.0
"""Seconds of the loop from which a description is worth a warning."""
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_CHECK_ARGUMENTS = "sglang.srt.server_args.ServerArgs.check_server_args"


class _Thread:
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


class _Described(NamedTuple):
    """A sink that was described in the loop, where nobody else changes the model; or why it could not be."""

    sink: SglangSink | None
    layout: RankLayout | None
    error: Exception | None

    def describe(self) -> RankLayout:
        """The layout of this rank. Raises the error that its description met."""
        if self.layout is None:
            raise self.error or DescribeError("this rank was not described")
        return self.layout

    def placement(self) -> RankPlacement | None:
        """The placement of this rank as SGLang's map has it now; None without a sink."""
        return None if self.sink is None else self.sink.placement()

    def settle(self) -> None:
        """Recomputes tensors as the sink does; nothing without a sink."""
        if self.sink is not None:
            self.sink.settle()


@dataclass(slots=True)
class _Member:
    """This rank in the group of one epoch.

    `connecting`, `receiving` and `writing` are jobs of its thread. The last two are the same transfer: `receiving` is
    kept until the end of the session is asked for, `writing` for good. `name` is that of the request: a pair that was
    made anew begins with the same epoch, and is another call.
    """

    name: str
    group: str
    pause: str
    worker: InstanceWorker
    thread: _Thread
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


class _Session:
    """The one member of this scheduler process, and the state that outlives groups and gateways."""

    def __init__(self) -> None:
        self.member: _Member | None = None
        self.earlier: list[_Member] = []
        self.calls: deque[str] = deque(maxlen=100)
        self.memory: MemoryRecord | None = None  # of this process
        self._prefixes: Prefixes | None = None

    @property
    def prefixes(self) -> Prefixes:
        """The keys under which requests find KV of the weights that they are computed with."""
        from weightcast.adapters.sglang.caches import Prefixes

        if self._prefixes is None:
            self._prefixes = Prefixes()
        return self._prefixes

    def of(self, group: str) -> _Member:
        """The member of `group`. Raises PairStateError for any other."""
        if self.member is None or group != self.member.group:
            current_group = "none" if self.member is None else self.member.group
            raise PairStateError(f"this rank is in group {current_group}, not in {group}; init the group first")
        return self.member

    def close(self) -> None:
        """Leaves the group, and waits for nobody."""
        if self.member is not None:
            self.member.leave()
            self.earlier = [member for member in (*self.earlier, self.member) if not member.thread.ended(0.0)]
            self.member = None


_session = _Session()


def register() -> None:
    """Entry point: hooks the update API of the scheduler. Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in (
        (_MANAGER + "init_weights_update_group", _init_group, HookType.AROUND),
        (_MANAGER + "destroy_weights_update_group", _destroy_group, HookType.AROUND),
        (_MANAGER + "update_weights_from_distributed", _update, HookType.AROUND),
        (_MANAGER + "end_weight_update", _end, HookType.AROUND),
        (_SCHEDULER + "handle_update_weight_version", _version, HookType.AFTER),
        (_SCHEDULER + "pause_generation", _pause, HookType.AROUND),
        (_SCHEDULER + "get_new_batch_prefill", _admit, HookType.AROUND),
        (_NAMESPACE, _arrived, HookType.AFTER),
        (_CHECK_ARGUMENTS, _before_launch, HookType.BEFORE),
    ):
        HookRegistry.register(target, hook, kind)


_NAMESPACE = _SCHEDULER + "_maybe_namespace_elastic_radix_cache"
"""Runs for each request when it arrives, before anything is looked up for it."""


def _before_launch(*_: Any) -> None:
    """Prepares scheduler actors: SGLang checks its arguments when it has imported what starts them, right before it."""
    load_in_actors((TOKEN_VARIABLE, CA_VARIABLE, GATEWAY_VARIABLE, ADDRESS_VARIABLE), ADDRESS_VARIABLE)


def _answer(output: str, work: Callable[[], str]) -> Any:
    """Runs `work` and makes SGLang's answer of it: its message on success, the error's on failure."""
    from sglang.srt.managers import io_struct

    make = getattr(io_struct, output)
    try:
        return make(success=True, message=work())
    except Exception as error:  # an exception that escaped would end the server
        log.warning("weightcast: %s: %s: %s", output, type(error).__name__, error)
        return make(success=False, message=f"{type(error).__name__}: {' '.join(str(error).split())}")


# Connecting


def _init_group(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    if not request.group_name.startswith(PREFIX):
        return original(manager, request)
    return _answer("InitWeightsUpdateGroupReqOutput", lambda: _connect(manager, request))


def _connect(manager: Any, request: Any) -> str:
    # Imported at use: SGLang loads plugins in all of its processes, and this is needed in the schedulers alone.
    from weightcast.gateway.ranks.instance import InstanceWorker

    group, pair, instance, epoch, pause = _parse(request.group_name)
    if _session.member is not None and _session.member.name == request.group_name:
        return _session.member.state()
    if request.group_name in _session.calls:
        raise PairStateError(f"the connect of {group} was given up; another has taken its place")
    _session.calls.append(request.group_name)
    runner = manager.tp_worker.model_runner
    url = os.environ.get(GATEWAY_VARIABLE) or f"http://{request.master_address}:{request.master_port}"
    rank, world = _rank_of()
    if world != request.world_size:
        raise InputError(
            f"instance {instance} has {world} ranks, the pair says {request.world_size}; correct world_size"
        )
    _session.close()
    predecessors = list(_session.earlier)
    description = _describe(manager, pause)
    worker = InstanceWorker(
        url,
        pair,
        instance,
        description,
        rank=rank,
        world_size=world,
        backend=request.backend,
        address=os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"),
        memory=_session.memory,
    )
    member = _Member(request.group_name, group, pause, worker, _Thread(str(runner.device), int(runner.gpu_id)))
    _session.member, _session.memory = member, worker.memory

    def connect() -> None:
        for predecessor in predecessors:
            predecessor.wait_until_left()
        worker.connect(epoch)

    member.connecting = member.thread.do(connect)  # a description that failed is told to the gateway there
    if description.error is not None:
        raise description.error
    return CONNECTING


def _parse(name: str) -> tuple[str, str, str, int, str]:
    """The group, the pair, the instance, the epoch, and what happens to requests in flight. Raises InputError."""
    parts = name.split("/")
    if len(parts) != 6 or not parts[3].isdecimal() or parts[4] not in _PAUSES:
        raise InputError(f"group name {name!r} is not weightcast/PAIR/INSTANCE/EPOCH/PAUSE/CALL")
    return "/".join(parts[:4]), parts[1], parts[2], int(parts[3]), parts[4]


def _describe(manager: Any, pause: str) -> _Described:
    """Reads the model, in the loop, and waits for nobody."""
    from weightcast.adapters.sglang.sink import SglangSink

    start = time.monotonic()
    sink, layout, failure = None, None, None
    try:
        _refuse(manager, pause)
        sink = SglangSink.from_model_runner(manager.tp_worker.model_runner)
        layout = sink.describe()
    except Exception as error:
        failure = error
    seconds = time.monotonic() - start
    (log.warning if seconds > _SLOW else log.info)("weightcast: described this rank in %.1f s of its loop", seconds)
    return _Described(sink, layout, failure)


def _refuse(manager: Any, pause: str) -> None:
    """Raises DescribeError for a server on which an update would not reach everything that answers."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from weightcast.adapters.sglang.caches import refuse_memos, refuse_settings

    if getattr(manager, "draft_worker", None) is not None:
        raise DescribeError(
            "this server has a draft model for speculative decoding, which would be left at its old version; "
            "start it without speculative decoding"
        )
    if pause == "in_place" and _NAMESPACE not in HookRegistry._patched:
        raise DescribeError(f'{_NAMESPACE} could not be hooked, which pause "in_place" needs; see the server\'s log')
    refuse_settings(manager.scheduler, pause, _pipeline_stages())
    refuse_memos(manager.tp_worker.model_runner)


def _pipeline_stages() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def _rank_of() -> tuple[int, int]:
    """This process's rank among all of the engine's, and their number: pipeline stage major, tensor rank minor."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.pp_rank * parallel.tp_size + parallel.tp_rank, parallel.pp_size * parallel.tp_size


def _destroy_group(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    if not request.group_name.startswith(PREFIX):
        return original(manager, request)

    def leave() -> str:
        # A group of an earlier epoch was left when the next one was joined.
        if _session.member is not None and request.group_name == _session.member.group:
            _session.close()
        return f"left {request.group_name}"

    return _answer("DestroyWeightsUpdateGroupReqOutput", leave)


# Updating


def _update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    is_ours = request.load_format == LOAD_FORMAT
    if not is_ours and not request.group_name.startswith(PREFIX):
        return original(manager, request)

    from weightcast.adapters.sglang.caches import poll_copies

    def transfer() -> str:
        if not is_ours:
            raise InputError(
                f"group {request.group_name} is weightcast's: "
                f"load_format must be {LOAD_FORMAT!r}, not {request.load_format!r}"
            )
        if manager._session is None:
            raise PairStateError("a transfer must run between begin_weight_update and end_weight_update")
        poll_copies(manager.scheduler)  # before anything in which ranks may differ: the ranks meet there
        member = _session.of(request.group_name)
        if member.receiving is None:
            with _telling(member, begins=True):
                _make_ready(manager, member)
            # `loaded_weights` of SGLang's session stays False on purpose: then end_weight_update computes derived
            # weights anew.
            member.receiving = member.writing = member.thread.do(member.worker.transfer)
        return f"receives for {request.group_name}"

    return _answer("UpdateWeightsFromDistributedReqOutput", transfer)


@contextmanager
def _telling(member: _Member, begins: bool = False) -> Iterator[None]:
    """Tells the gateway of an error inside, from the thread.

    A transfer that `begins` on a busy rank is asked for again. The gateway's driver does so, but SGLang answers it for
    the first rank alone; so that rank tells nothing. Any other rank says that its plan is stale. Then the gateway
    connects the instance anew within the update, and asks all ranks again.
    """
    from weightcast.adapters.sglang.caches import BUSY

    try:
        yield
    except Exception as error:
        failure, busy = error, begins and str(error).startswith(BUSY)
        if busy and _rank_of()[0] != 0:
            failure = StalePlanError(str(error))
        if failure is not error or not busy:
            member.thread.do(lambda: member.worker.failed(failure))
        raise


def _make_ready(manager: Any, member: _Member) -> None:
    """Repeats the checks of the connect whose outcome may have changed, and drops caches.

    Nothing is written yet, so a refusal costs nothing.
    """
    from weightcast.adapters.sglang.caches import drop_caches, require_pause
    from weightcast.adapters.sglang.sink import refuse_guarded

    _refuse(manager, member.pause)
    refuse_guarded(manager.tp_worker.model_runner.model)
    require_pause(manager.scheduler)
    if member.pause != "in_place":
        drop_caches(manager.scheduler)


def _end(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    member = _session.member
    if member is None or member.receiving is None:
        return original(manager, request)
    job, member.receiving = member.receiving, None

    def end() -> Any:
        failure = _outcome(member, job)
        with _telling(member):
            answer = original(manager, request)  # in any case: the engine's session has to be closed
        if failure is not None and not job.done():
            raise failure  # the thread is still busy with it, and has told nobody
        if failure is not None:
            return answer  # whoever has to know was told by the thread
        with _telling(member):
            if not answer.success:
                raise PairStateError(f"end_weight_update failed: {answer.message}")
            _renew(manager, member)
        member.thread.do(member.worker.verify)
        return answer

    from sglang.srt.managers import io_struct

    try:
        return end()
    except Exception as error:
        log.exception("weightcast: end_weight_update failed")
        message = f"rank {_rank_of()[0]}: {type(error).__name__}: {' '.join(str(error).split())}"
        return io_struct.EndWeightUpdateReqOutput(success=False, message=message)


def _outcome(member: _Member, receiving: Future[object]) -> BaseException | None:
    """The error of a transfer, or None.

    The gateway ends the session when the trainer is through, so only the last copies on this rank are waited for. After
    a failure somewhere the beat has called the transfer off.
    """
    try:
        return receiving.exception(_LAST_WRITES)
    except TimeoutError:
        member.worker.give_up()
    try:
        return receiving.exception(_LEAVING)
    except TimeoutError:
        return TransferError(f"this rank still receives for {member.group}, which was called off")


def _renew(manager: Any, member: _Member) -> None:
    """Keeps what the old weights computed from requests that the new ones answer."""
    from weightcast.adapters.sglang.caches import drop_caches, refresh_memos

    if member.pause == "in_place":
        _session.prefixes.move_on(manager.scheduler, str(member.worker.target))
    else:
        drop_caches(manager.scheduler)
    refresh_memos(manager.tp_worker.model_runner.model)


def _version(result: Any, scheduler: Any, request: Any) -> Any:
    """Commits what was verified here: the gateway stamps a version after all digests agreed."""
    if _session.member is not None:
        _session.member.worker.commit()
    return result


# Requests


def _arrived(result: Any, scheduler: Any, request: Any) -> Any:
    if _session._prefixes is not None:
        _session.prefixes.apply(request)
    return result


def _pause(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Pauses a pipeline without touching its batches, if this process has connected.

    SGLang's loop of a pipeline has several batches, of which a pause would empty one. All requests have ended: their
    mode is "abort".
    """
    if _session.memory is None or _pipeline_stages() == 1:
        return original(scheduler, request)
    scheduler._engine_paused = True
    return None


def _admit(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Lets nothing new begin in a paused pipeline, as a health check: SGLang's loop of a pipeline does not stop."""
    if _session.memory is None or not scheduler._engine_paused or _pipeline_stages() == 1:
        return original(scheduler, running_batch)
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
