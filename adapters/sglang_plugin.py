"""SGLang plugin (entry-point group `sglang.srt.plugins`): serves weight updates inside each scheduler process.

It answers the requests of SGLang's own update API that carry a group name of ours, `weightcast/PAIR/INSTANCE/EPOCH`,
and leaves all others to SGLang:

- `init_weights_update_group`: describe this rank, register it with the gateway at master_address:master_port, fetch its
  part, join.
- `update_weights_from_distributed` with load format "weightcast": receive, inside the engine's update session.
- `end_weight_update`: after SGLang has computed its derived weights, digest the memory and report.
- `destroy_weights_update_group`: leave.

No error leaves a hook: it comes back as `success=False` with our message, and the server lives. The token is taken from
the environment of the server (WEIGHTCAST_TOKEN); WEIGHTCAST_GATEWAY overrides the gateway's address.

Facts about SGLang are from 0.5.23: `srt/managers/scheduler_components/weight_updater.py`,
`srt/plugins/hook_registry.py`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weightcast.adapters.sglang_ray import load_in_actors
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.gateway.urls import CA_VARIABLE
from weightcast.transfer.errors import DescribeError, InputError, PairStateError

if TYPE_CHECKING:
    from weightcast.gateway.instance_worker import InstanceWorker, Memory

__all__ = ["ADDRESS_VARIABLE", "GATEWAY_VARIABLE", "register"]

log = logging.getLogger("weightcast.sglang")

GATEWAY_VARIABLE = "WEIGHTCAST_GATEWAY"
"""Environment variable with the gateway's URL, for servers that do not reach it by the address in the request."""
ADDRESS_VARIABLE = "WEIGHTCAST_ADDRESS"
"""Environment variable with the address on which this engine's ranks can be reached by the trainer's."""

PREFIX = "weightcast/"
LOAD_FORMAT = "weightcast"
_VERSION_HANDLER = "sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version"
_CHECK_ARGUMENTS = "sglang.srt.server_args.ServerArgs.check_server_args"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."


class _Background:
    """Work that must not hold up a pipeline stage.

    SGLang hands a request on to the next stage after the first has answered it, and the ranks of all stages wait for
    one another in a connect and in a transfer. So with pipeline parallelism both run beside the scheduler's loop, which
    is paused then.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weightcast", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            log.exception("weightcast: failed beside the scheduler's loop")
            self._error = error

    def finished(self) -> BaseException | None:
        """Waits for its end, and the waits inside have deadlines; what it raised."""
        self._thread.join()
        return self._error


class _Session:
    """The one worker of this scheduler process and what is left to do at the end of the update session."""

    def __init__(self) -> None:
        self.worker: InstanceWorker | None = None
        self.group = ""
        self.written = False
        self.background: _Background | None = None
        self.memory: Memory | None = None  # of this process, which outlives groups and gateways

    def replace(self, group: str, worker: InstanceWorker) -> None:
        self.close()
        self.group, self.worker, self.memory = group, worker, worker.memory

    def of(self, group: str) -> InstanceWorker:
        if self.worker is None or group != self.group:
            raise PairStateError(f"this rank is in group {self.group or 'none'}, not in {group}; init the group first")
        return self.worker

    def run(self, work: Callable[[], object]) -> None:
        """Does `work` now, or beside the scheduler's loop where that has to go on for the other ranks."""
        if (failure := self.finished()) is not None:
            raise failure
        if _pipeline_stages() == 1:
            work()
        else:
            self.background = _Background(work)

    def finished(self) -> BaseException | None:
        """Waits for what runs beside the loop; what it raised."""
        background, self.background = self.background, None
        return None if background is None else background.finished()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
        # What still runs for the old group ends by itself: its communicator and its client are closed.
        self.worker, self.group, self.written, self.background = None, "", False, None


_session = _Session()


def register() -> None:
    """Entry point: hooks the update API of the scheduler. Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in (
        ("init_weights_update_group", _init_group),
        ("destroy_weights_update_group", _destroy_group),
        ("update_weights_from_distributed", _update),
        ("end_weight_update", _end),
    ):
        HookRegistry.register(_MANAGER + name, hook, HookType.AROUND)
    HookRegistry.register(_VERSION_HANDLER, _version, HookType.AFTER)
    HookRegistry.register(_CHECK_ARGUMENTS, _before_launch, HookType.BEFORE)


def _before_launch(*_: Any) -> None:
    """SGLang checks its arguments right before it starts its schedulers, and has imported what starts them."""
    load_in_actors((TOKEN_VARIABLE, CA_VARIABLE, GATEWAY_VARIABLE, ADDRESS_VARIABLE), ADDRESS_VARIABLE)


def _answer(output: str, work: Callable[[], str]) -> Any:
    """Runs `work` and makes SGLang's answer of it: its message on success, the error's on failure."""
    from sglang.srt.managers import io_struct

    make = getattr(io_struct, output)
    try:
        return make(success=True, message=work())
    except Exception as error:  # an exception that escaped would end the server
        log.exception("weightcast: %s failed", output)
        return make(success=False, message=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _init_group(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    if not request.group_name.startswith(PREFIX):
        return original(manager, request)
    return _answer("InitWeightsUpdateGroupReqOutput", lambda: _connect(manager, request))


def _connect(manager: Any, request: Any) -> str:
    # Imported at use: SGLang loads plugins in all of its processes, and this is needed in the schedulers alone.
    from weightcast.adapters.sglang import SglangSink
    from weightcast.gateway.instance_worker import InstanceWorker

    parts = request.group_name.split("/")
    if len(parts) != 4 or not parts[3].isdecimal():
        raise InputError(f"group name {request.group_name!r} is not weightcast/PAIR/INSTANCE/EPOCH")
    _, pair, instance, epoch = parts
    _refuse_draft(manager)
    _session.close()
    runner = manager.tp_worker.model_runner
    url = os.environ.get(GATEWAY_VARIABLE) or f"http://{request.master_address}:{request.master_port}"
    rank, world = _rank_of(runner)
    if world != request.world_size:
        raise InputError(
            f"instance {instance} has {world} ranks, the pair says {request.world_size}; correct world_size"
        )
    worker = InstanceWorker(
        url,
        pair,
        instance,
        SglangSink.from_model_runner(runner),
        rank=rank,
        world_size=world,
        backend=request.backend,
        address=os.environ.get(ADDRESS_VARIABLE, "127.0.0.1"),
        memory=_session.memory,
    )
    _session.replace(request.group_name, worker)
    _session.run(lambda: worker.connect(int(epoch)))
    return f"joins {request.group_name} as rank {rank}"


def _refuse_draft(manager: Any) -> None:
    """A draft model would go on with old weights beside the new ones of the target."""
    if getattr(manager, "draft_worker", None) is not None:
        raise DescribeError(
            "this server has a draft model for speculative decoding, which would be left at its old version; "
            "start it without speculative decoding"
        )


def _pipeline_stages() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def _rank_of(runner: Any) -> tuple[int, int]:
    """This process's rank among all of the engine's, and their number: pipeline stage major, tensor rank minor."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.pp_rank * parallel.tp_size + parallel.tp_rank, parallel.pp_size * parallel.tp_size


def _destroy_group(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    if not request.group_name.startswith(PREFIX):
        return original(manager, request)

    def leave() -> str:
        # A group of an earlier epoch was left when the next one was joined.
        if request.group_name == _session.group:
            _session.close()
        return f"left {request.group_name}"

    return _answer("DestroyWeightsUpdateGroupReqOutput", leave)


def _update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    ours = request.load_format == LOAD_FORMAT
    if not ours and not request.group_name.startswith(PREFIX):
        return original(manager, request)

    def transfer() -> str:
        if not ours:
            raise InputError(
                f"group {request.group_name} is weightcast's: "
                f"load_format must be {LOAD_FORMAT!r}, not {request.load_format!r}"
            )
        if manager._session is None:
            raise PairStateError("a transfer must run between begin_weight_update and end_weight_update")
        worker = _session.of(request.group_name)
        # `loaded_weights` of SGLang's session stays False on purpose: then end_weight_update computes derived weights
        # anew.
        _session.run(worker.transfer)
        _session.written = True
        return f"receives by {request.group_name}"

    return _answer("UpdateWeightsFromDistributedReqOutput", transfer)


def _version(result: Any, scheduler: Any, request: Any) -> Any:
    """The gateway stamps a version after all digests agreed: what was verified here is committed."""
    if _session.worker is not None:
        _session.worker.commit()
    return result


def _end(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    if not _session.written:
        return original(manager, request)
    _session.written = False

    def verify() -> str:
        worker = _session.worker
        if worker is None:
            raise PairStateError("the group was left before the update ended")
        failure = _session.finished()
        answer = original(manager, request)  # in any case: the engine's session has to be closed
        if failure is not None:
            raise failure
        if not answer.success:
            raise PairStateError(f"end_weight_update failed: {answer.message}")
        worker.verify()
        return "digests reported"

    return _answer("EndWeightUpdateReqOutput", verify)
