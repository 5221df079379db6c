"""Places of a trainer's ranks on Ray: a placement group with a bundle for each, so that all have room or none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weightcast.cluster.spec import ClusterSpec
from weightcast.transfer.errors import EngineError

__all__ = ["give_back", "reserve"]

_LEAST = 0.001
"""CPUs of a bundle for ranks that ask for nothing: Ray has no empty ones."""


def reserve(spec: ClusterSpec, seconds: float) -> list[dict[str, Any]]:
    """Ray's options for each rank's place: none where the file names no strategy.

    Raises EngineError where the cluster has no room for all within `seconds`.
    """
    strategy, ranks = spec.trainer.strategy, spec.trainer.ranks
    if strategy is None:
        return [{}] * ranks
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = _bundle(spec.trainer.options)
    group = ray.util.placement_group([bundle] * ranks, strategy, _name(spec.pair), lifetime="detached")
    if not group.wait(seconds):
        ray.util.remove_placement_group(group)
        raise EngineError(
            f"pair {spec.pair}: no room for {ranks} trainer ranks of {bundle} each by {strategy} within {seconds:g} s"
        )
    return [{"scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)} for rank in range(ranks)]


def give_back(pair: str) -> None:
    """Ends the reservation of a pair, if there is one."""
    import ray

    with suppress(ValueError):  # there is none
        ray.util.remove_placement_group(ray.util.get_placement_group(_name(pair)))


def _name(pair: str) -> str:
    return f"{pair}/trainer"


def _bundle(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor with these options takes, by name."""
    counts = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    return {name: count for name, count in counts.items() if count} or {"CPU": _LEAST}
