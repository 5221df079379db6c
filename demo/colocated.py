"""The demo's iteration when trainer and engines share their devices: the colocated cycle around each version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from weightcast.gateway.colocated.cycle import ColocatedCycle, StepReport, TrainerHooks
from weightcast.gateway.colocated.engine_memory import SGLangMemory
from weightcast.transfer.protocols import Source

__all__ = ["StoredWeights", "describe_step", "make_cycle"]


class StoredWeights:
    """One rank's weights, which go to a file and come back, as in a trainer that makes room for an engine's cache.

    Every storage that the source describes is emptied in place, so views and optimizer keep what they hold. Storages
    in shared memory cannot be emptied: such weights are exported through a staging buffer, or stay.
    """

    def __init__(self, source: Source, file: Path) -> None:
        self._source, self._file = source, file
        self._away: list[torch.UntypedStorage] = []

    @property
    def away_bytes(self) -> int:
        """Number of bytes that are in the file alone."""
        return self._file.stat().st_size if self._away else 0

    def offload(self) -> None:
        """Writes the weights to the file and frees their memory."""
        references = [base.untyped_storage() for base in self._source.describe().memory.bases]
        storages = list({storage._cdata: storage for storage in references}.values())
        torch.save([_flat(storage) for storage in storages], self._file)
        self._away = storages
        for storage in storages:
            storage.resize_(0)

    def resume(self) -> None:
        """Takes memory for the weights and reads them back, if they are away."""
        if not self._away:
            return
        for storage, content in zip(self._away, torch.load(self._file, weights_only=True), strict=True):
            storage.resize_(content.numel())
            _flat(storage).copy_(content)
        self._away = []
        self._file.unlink()


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage: (nbytes,) uint8, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def make_cycle(hooks: TrainerHooks, engines: Mapping[str, str], rank: int, deadline: float) -> ColocatedCycle:
    """One rank's cycle with the engines at these URLs; rank 0 speaks to them."""

    def agree(failure: str) -> str:
        failures: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        return "; ".join(dict.fromkeys(text for text in failures if text))

    memories = [SGLangMemory(name, url, timeout=deadline) for name, url in engines.items()]
    return ColocatedCycle(memories, hooks, leads=rank == 0, agree=agree)


def describe_step(step: StepReport) -> str:
    """One line: the step, what it changed, and how long it took."""
    sides = [
        f"{name} {start_bytes / 1e6:.0f} -> {end_bytes / 1e6:.0f} MB"
        for name, start_bytes, end_bytes in (
            ("trainer rank 0", step.before.process, step.after.process),
            ("host", step.before.host, step.after.host),
            ("device", step.before.device, step.after.device),
        )
        if start_bytes or end_bytes
    ]
    return f"  {step.step:<17} {step.seconds:6.2f} s   {', '.join(sides)}"
