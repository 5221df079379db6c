"""SGLang plugin (entry-point group `sglang.srt.plugins`): serves weight updates inside each scheduler process.

It answers the requests of SGLang's own update API that carry a group name of ours, and leaves all others to SGLang:

- `init_weights_update_group`: describes this rank and begins to register and join. The group is
  `weightcast/PAIR/INSTANCE/EPOCH/PAUSE/CALL`; the same call again asks how that goes on.
- `update_weights_from_distributed` with load format "weightcast": drops caches, and begins to receive.
- `end_weight_update`: when SGLang has computed its derived weights, computes the others, drops caches again and begins
  to digest.
- `destroy_weights_update_group`: leaves.
- `get_internal_state`: says in the answer of `/server_info` that the plugin is here.

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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from weightcast import __version__
from weightcast.adapters.checkpoint import read_headers
from weightcast.adapters.sglang.caches import (
    BUSY,
    drop_caches,
    poll_copies,
    refresh_memos,
    refuse_memos,
    refuse_settings,
    require_pause,
)
from weightcast.adapters.sglang.experts import attribute
from weightcast.adapters.sglang.ray_actors import load_in_actors
from weightcast.adapters.sglang.session import CONNECTING, Described, Member, Naming, Session, Thread
from weightcast.adapters.sglang.sink import SglangSink, refuse_guarded
from weightcast.gateway.addresses import ADDRESS_VARIABLE, CA_VARIABLE, http_url
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.records import PauseMode
from weightcast.transfer.errors import DescribeError, InputError, PairStateError, StalePlanError

if TYPE_CHECKING:
    from weightcast.transfer.layout.tables import TensorSpec

__all__ = ["GATEWAY_VARIABLE", "register"]

log = logging.getLogger("weightcast.sglang")

GATEWAY_VARIABLE = "WEIGHTCAST_GATEWAY"
"""Environment variable with the gateway's URL, for servers that do not reach it by the address in the request."""

PREFIX = "weightcast/"
LOAD_FORMAT = "weightcast"
PLUGIN = "weightcast"
_PAUSES = get_args(PauseMode)
_SLOW = 5.0
"""Seconds of the loop from which a description is worth a warning."""
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_CHECK_ARGUMENTS = "sglang.srt.server_args.ServerArgs.check_server_args"
_PREPARE_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._prepare_weights"
_NAMESPACE = _SCHEDULER + "_maybe_namespace_elastic_radix_cache"
"""Runs for each request when it arrives, before anything is looked up for it."""

_session = Session()


def register() -> None:
    """Entry point: hooks the update API of the scheduler. Called by SGLang in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in (
        (_MANAGER + "init_weights_update_group", _connect, HookType.AROUND),
        (_MANAGER + "destroy_weights_update_group", _leave, HookType.AROUND),
        (_MANAGER + "update_weights_from_distributed", _update, HookType.AROUND),
        (_MANAGER + "end_weight_update", _end, HookType.AROUND),
        (_SCHEDULER + "handle_update_weight_version", _version, HookType.AFTER),
        (_SCHEDULER + "get_internal_state", _introduce, HookType.AFTER),
        (_SCHEDULER + "pause_generation", _pause, HookType.AROUND),
        (_SCHEDULER + "get_new_batch_prefill", _admit, HookType.AROUND),
        (_NAMESPACE, _arrived, HookType.AFTER),
        (_CHECK_ARGUMENTS, _before_launch, HookType.BEFORE),
        (_PREPARE_WEIGHTS, _prepared, HookType.AFTER),
    ):
        HookRegistry.register(target, hook, kind)


def _before_launch(*_: Any) -> None:
    """Prepares scheduler actors: SGLang checks its arguments when it has imported what starts them, right before it."""
    load_in_actors((TOKEN_VARIABLE, CA_VARIABLE, GATEWAY_VARIABLE, ADDRESS_VARIABLE), ADDRESS_VARIABLE)


def _prepared(files: Any, loader: Any, *positional: Any, **named: Any) -> Any:
    """Notes in which folder SGLang has found the checkpoint of a model, which may be a name of the hub."""
    model = (*positional, *named.values())[0]
    _session.folders[str(model)] = str(files[0])
    return files


def _answers(output: str) -> Callable[[Callable[[Any, Any], str]], Callable[..., Any]]:
    """Makes a hook of a function: its message or error is SGLang's answer, for requests that are weightcast's."""

    def decorate(work: Callable[[Any, Any], str]) -> Callable[..., Any]:
        @wraps(work)
        def hook(original: Callable[..., Any], manager: Any, request: Any) -> Any:
            from sglang.srt.managers import io_struct

            is_ours = getattr(request, "load_format", None) == LOAD_FORMAT or request.group_name.startswith(PREFIX)
            if not is_ours:
                return original(manager, request)
            make = getattr(io_struct, output)
            try:
                return make(success=True, message=work(manager, request))
            except Exception as error:  # an exception that escaped would end the server
                log.warning("weightcast: %s: %s: %s", output, type(error).__name__, error)
                return make(success=False, message=_in_one_line(error))

        return hook

    return decorate


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


# Connecting


def _introduce(result: Any, scheduler: Any, request: Any) -> Any:
    """Says in a scheduler's state, which `/server_info` shows, that the plugin is here: the gateway asks first."""
    result.internal_state[PLUGIN] = __version__
    return result


@_answers("InitWeightsUpdateGroupReqOutput")
def _connect(manager: Any, request: Any) -> str:
    name, member, naming = request.group_name, _session.member, _session.naming
    if member is not None and member.name == name:
        return member.state()
    if naming is not None and naming.name == name:
        return _begin(manager, request, naming.catalog.result) if naming.catalog.done() else CONNECTING
    group, _, instance, _, _ = _parse(name)
    if name in _session.calls:
        raise PairStateError(f"the connect of {group} was given up; another has taken its place")
    _session.calls.append(name)
    _, world = _rank_of()
    if world != request.world_size:
        raise InputError(
            f"instance {instance} has {world} ranks, the pair says {request.world_size}; correct world_size"
        )
    _session.close()
    if (folder := _checkpoint(manager)) is not None:
        return _begin(manager, request, lambda: read_headers(folder))
    _session.naming = Naming.begin(name, lambda: _catalog_of(request))
    return CONNECTING


def _checkpoint(manager: Any) -> Path | None:
    """The folder with the checkpoint of this server; None where there is none to read names from."""
    model = str(attribute(attribute(manager.tp_worker.model_runner, "model_config"), "model_path"))
    folder = Path(_session.folders.get(model, model))
    return folder if any(folder.glob("*.safetensors")) else None


def _catalog_of(request: Any) -> Mapping[str, TensorSpec]:
    """The trainer's tensors, by the names of the checkpoint, from the gateway."""
    pair = _parse(request.group_name)[1]
    with GatewayClient(_gateway_url(request)) as client:
        return client.catalog(pair, time.monotonic() + client.settings(pair)["register"])


def _gateway_url(request: Any) -> str:
    return os.environ.get(GATEWAY_VARIABLE) or http_url(request.master_address, request.master_port)


def _begin(manager: Any, request: Any, catalog: Callable[[], Mapping[str, TensorSpec]]) -> str:
    """Describes this rank, and begins to register and to join. An error of `catalog` is one of the description."""
    # Imported at use: SGLang loads plugins in all of its processes, and this is needed in the schedulers alone.
    from weightcast.gateway.ranks.instance import InstanceWorker

    group, pair, instance, epoch, pause = _parse(request.group_name)
    runner = manager.tp_worker.model_runner
    rank, world = _rank_of()
    _session.naming = None
    predecessors = list(_session.earlier)
    description = _describe(manager, pause, catalog)
    worker = InstanceWorker(
        _gateway_url(request),
        pair,
        instance,
        description,
        rank=rank,
        world_size=world,
        backend=request.backend,
        address=os.environ.get(ADDRESS_VARIABLE),
        memory=_session.memory,
    )
    thread = Thread(str(runner.device), int(runner.gpu_id))
    member = Member(request.group_name, group, pause, worker, description, thread)
    _session.member, _session.memory = member, worker.memory

    def connect() -> None:
        for predecessor in predecessors:
            predecessor.wait_until_left()
        worker.connect(epoch)

    member.connecting = member.thread.do(connect)  # a description that failed is told to the gateway there
    description.describe()
    return CONNECTING


def _parse(name: str) -> tuple[str, str, str, int, str]:
    """The group, the pair, the instance, the epoch, and what happens to requests in flight. Raises InputError."""
    parts = name.split("/")
    if len(parts) != 6 or not parts[3].isdecimal() or parts[4] not in _PAUSES:
        raise InputError(f"group name {name!r} is not weightcast/PAIR/INSTANCE/EPOCH/PAUSE/CALL")
    return "/".join(parts[:4]), parts[1], parts[2], int(parts[3]), parts[4]


def _describe(manager: Any, pause: str, catalog: Callable[[], Mapping[str, TensorSpec]]) -> Described:
    """Reads the model, in the loop, and waits for nobody."""
    start = time.monotonic()
    sink = None
    try:
        _refuse(manager, pause)
        sink = SglangSink.from_model_runner(manager.tp_worker.model_runner, catalog())
        description = Described(sink, sink.describe())
    except Exception as error:
        description = Described(sink, error)
    seconds = time.monotonic() - start
    (log.warning if seconds > _SLOW else log.info)("weightcast: described this rank in %.1f s of its loop", seconds)
    return description


def _refuse(manager: Any, pause: str) -> None:
    """Raises DescribeError for a server on which an update would not reach everything that answers."""
    from sglang.srt.plugins.hook_registry import HookRegistry

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


@_answers("DestroyWeightsUpdateGroupReqOutput")
def _leave(manager: Any, request: Any) -> str:
    # A group of an earlier epoch was left when the next one was joined.
    if _session.member is not None and request.group_name == _session.member.group:
        _session.close()
    return f"left {request.group_name}"


# Updating


@_answers("UpdateWeightsFromDistributedReqOutput")
def _update(manager: Any, request: Any) -> str:
    if request.load_format != LOAD_FORMAT:
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


@contextmanager
def _telling(member: Member, begins: bool = False) -> Iterator[None]:
    """Tells the gateway of an error inside, from the thread.

    A transfer that `begins` on a busy rank is asked for again. The gateway's driver does so, but SGLang answers it for
    the first rank alone; so that rank tells nothing. Any other rank says that its plan is stale. Then the gateway
    connects the instance anew within the update, and asks all ranks again.
    """
    try:
        yield
    except Exception as error:
        failure, busy = error, begins and str(error).startswith(BUSY)
        if busy and _rank_of()[0] != 0:
            failure = StalePlanError(str(error))
        if failure is not error or not busy:
            member.thread.do(lambda: member.worker.failed(failure))
        raise


def _make_ready(manager: Any, member: Member) -> None:
    """Repeats the checks of the connect whose outcome may have changed, and drops caches.

    Nothing is written yet, so a refusal costs nothing.
    """
    _refuse(manager, member.pause)
    refuse_guarded(manager.tp_worker.model_runner.model)
    require_pause(manager.scheduler)
    if member.pause != "in_place":
        drop_caches(manager.scheduler)
    if not _session.padded:
        member.description.pad()
        _session.padded = True


def _end(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    member = _session.member
    if member is None or member.receiving is None:
        return original(manager, request)
    job, member.receiving = member.receiving, None

    def end() -> Any:
        failure = member.outcome(job)
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
        message = f"rank {_rank_of()[0]}: {_in_one_line(error)}"
        return io_struct.EndWeightUpdateReqOutput(success=False, message=message)


def _renew(manager: Any, member: Member) -> None:
    """Keeps what the old weights computed from requests that the new ones answer."""
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
