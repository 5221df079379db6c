"""weightcast: weight sync from an RL trainer to its inference engines that can prove it wrote every slot.

The names of `__all__` are the public face. Each is imported when it is first used: `import weightcast` loads no torch,
no Ray and no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightcast.adapters.fsdp.source import FsdpSource
    from weightcast.adapters.megatron.source import MegatronSource
    from weightcast.adapters.unsharded import CheckpointSource, PlainSource
    from weightcast.gateway.client import GatewayClient
    from weightcast.gateway.ranks.instance import InstanceWorker
    from weightcast.gateway.ranks.trainer import TrainerWorker
    from weightcast.gateway.server.ray_actor import start_gateway
    from weightcast.transfer.errors import (
        AbsentError,
        AddressError,
        AgreementError,
        AuthorizationError,
        ControlError,
        CoverageError,
        DeadlineError,
        DescribeError,
        DigestMismatchError,
        DisplacedError,
        EngineError,
        InputError,
        LayoutError,
        NonFiniteError,
        PairStateError,
        PlacementError,
        PlacementIndexError,
        PlanError,
        StalePlanError,
        TransferError,
        UnregisteredError,
        UpdateError,
        VersionError,
        WeightcastError,
        WeightsChangedError,
        WireError,
    )
    from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
    from weightcast.transfer.layout.placement import RankPlacement
    from weightcast.transfer.layout.tables import LayoutNotes
    from weightcast.transfer.planner.planner import plan_transfer
    from weightcast.transfer.protocols import Sink, Source

__all__ = [
    "AbsentError",
    "AddressError",
    "AgreementError",
    "AuthorizationError",
    "CheckpointSource",
    "ControlError",
    "CoverageError",
    "DeadlineError",
    "DescribeError",
    "DigestMismatchError",
    "DisplacedError",
    "EngineError",
    "FsdpSource",
    "GatewayClient",
    "InputError",
    "InstanceWorker",
    "LayoutBuilder",
    "LayoutError",
    "LayoutNotes",
    "MegatronSource",
    "NonFiniteError",
    "PairStateError",
    "PlacementError",
    "PlacementIndexError",
    "PlainSource",
    "PlanError",
    "RankLayout",
    "RankPlacement",
    "Sink",
    "Source",
    "StalePlanError",
    "TrainerWorker",
    "TransferError",
    "UnregisteredError",
    "UpdateError",
    "VersionError",
    "WeightcastError",
    "WeightsChangedError",
    "WireError",
    "plan_transfer",
    "start_gateway",
]

__version__ = "0.1.0"

_HOMES = {
    "AbsentError": "transfer.errors",
    "AddressError": "transfer.errors",
    "AgreementError": "transfer.errors",
    "AuthorizationError": "transfer.errors",
    "CheckpointSource": "adapters.unsharded",
    "ControlError": "transfer.errors",
    "CoverageError": "transfer.errors",
    "DeadlineError": "transfer.errors",
    "DescribeError": "transfer.errors",
    "DigestMismatchError": "transfer.errors",
    "DisplacedError": "transfer.errors",
    "EngineError": "transfer.errors",
    "FsdpSource": "adapters.fsdp.source",
    "GatewayClient": "gateway.client",
    "InputError": "transfer.errors",
    "InstanceWorker": "gateway.ranks.instance",
    "LayoutBuilder": "transfer.layout.memory",
    "LayoutError": "transfer.errors",
    "LayoutNotes": "transfer.layout.tables",
    "MegatronSource": "adapters.megatron.source",
    "NonFiniteError": "transfer.errors",
    "PairStateError": "transfer.errors",
    "PlacementError": "transfer.errors",
    "PlacementIndexError": "transfer.errors",
    "PlainSource": "adapters.unsharded",
    "PlanError": "transfer.errors",
    "RankLayout": "transfer.layout.memory",
    "RankPlacement": "transfer.layout.placement",
    "Sink": "transfer.protocols",
    "Source": "transfer.protocols",
    "StalePlanError": "transfer.errors",
    "TrainerWorker": "gateway.ranks.trainer",
    "TransferError": "transfer.errors",
    "UnregisteredError": "transfer.errors",
    "UpdateError": "transfer.errors",
    "VersionError": "transfer.errors",
    "WeightcastError": "transfer.errors",
    "WeightsChangedError": "transfer.errors",
    "WireError": "transfer.errors",
    "plan_transfer": "transfer.planner.planner",
    "start_gateway": "gateway.server.ray_actor",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
