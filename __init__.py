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
    from weightcast.transfer.errors import WeightcastError
    from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
    from weightcast.transfer.layout.placement import RankPlacement
    from weightcast.transfer.planner.planner import plan_transfer
    from weightcast.transfer.protocols import Sink, Source

__all__ = [
    "CheckpointSource",
    "FsdpSource",
    "GatewayClient",
    "InstanceWorker",
    "LayoutBuilder",
    "MegatronSource",
    "PlainSource",
    "RankLayout",
    "RankPlacement",
    "Sink",
    "Source",
    "TrainerWorker",
    "WeightcastError",
    "plan_transfer",
    "start_gateway",
]

__version__ = "0.1.0"

_HOMES = {
    "CheckpointSource": "adapters.unsharded",
    "FsdpSource": "adapters.fsdp.source",
    "GatewayClient": "gateway.client",
    "InstanceWorker": "gateway.ranks.instance",
    "LayoutBuilder": "transfer.layout.memory",
    "MegatronSource": "adapters.megatron.source",
    "PlainSource": "adapters.unsharded",
    "RankLayout": "transfer.layout.memory",
    "RankPlacement": "transfer.layout.placement",
    "Sink": "transfer.protocols",
    "Source": "transfer.protocols",
    "TrainerWorker": "gateway.ranks.trainer",
    "WeightcastError": "transfer.errors",
    "plan_transfer": "transfer.planner.planner",
    "start_gateway": "gateway.server.ray_actor",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
