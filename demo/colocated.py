"""The demo's iteration when trainer and engines share their devices: the memory dance around each version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from weightcast.demo.training import FsdpTraining, Training
from weightcast.gateway.engine_memory import SGLangMemory
from weightcast.gateway.memory_dance import MemoryDance, StepReport

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = ["DemoHooks", "describe_step", "make_dance"]


class DemoHooks:
    """One trainer rank's part. `loss` is that of the version trained last."""

    def __init__(
        self,
        training: Training,
        batch: Callable[[int], torch.Tensor],
        steps: int,
        update: Callable[[int], None],
        file: Path,
    ) -> None:
        self._training, self._batch, self._steps = training, batch, steps
        self._update, self._file = update, file
        self.loss = 0.0

    def train(self, version: int) -> None:
        """See TrainerHooks."""
        if isinstance(self._training, FsdpTraining):
            self._training.load_optimizer(self._file)
        self.loss = self._training.optimize(self._batch(version), self._steps)

    def free(self) -> None:
        """See TrainerHooks."""
        if isinstance(self._training, FsdpTraining):
            self._training.offload_optimizer(self._file)

    def transfer(self, version: int) -> None:
        """See TrainerHooks."""
        self._update(version)

    def offload(self) -> None:
        """The weights stay: what the engines read in place costs nothing more, and a staging buffer is small."""


def make_dance(hooks: DemoHooks, engines: Mapping[str, str], rank: int, deadline: float) -> MemoryDance:
    """One rank's dance with the engines at these URLs; rank 0 speaks to them."""
    import torch.distributed as dist

    def agree(failure: str) -> str:
        said: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(said, failure)
        return "; ".join(dict.fromkeys(text for text in said if text))

    memories = [SGLangMemory(name, url, timeout=deadline) for name, url in engines.items()]
    return MemoryDance(memories, hooks, leads=rank == 0, agree=agree)


def describe_step(step: StepReport) -> str:
    """One line: the step, what it changed, and how long it took."""
    sides = [
        f"{name} {before / 1e6:.0f} -> {after / 1e6:.0f} MB"
        for name, before, after in (
            ("trainer rank 0", step.before.process, step.after.process),
            ("host", step.before.host, step.after.host),
            ("device", step.before.device, step.after.device),
        )
        if before or after
    ]
    return f"  {step.step:<17} {step.seconds:6.2f} s   {', '.join(sides)}"
