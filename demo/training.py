"""The demo's interface to a training framework, and its implementation with FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weightcast.adapters.fsdp.source import FsdpSource
from weightcast.demo.config import LEARNING_RATE
from weightcast.demo.model import quiet
from weightcast.demo.reference import ReferenceModel
from weightcast.transfer.protocols import Source

__all__ = ["FsdpTraining", "Training"]


class Training(Protocol):
    """One rank's model and optimizer. All ranks make the same calls in the same order.

    `source` describes this rank.
    """

    source: Source

    def optimize(self, rows: torch.Tensor, steps: int) -> float:
        """Optimizer steps on rows of token ids (rows, length); returns the mean loss over ranks of the last one."""

    def loss(self, rows: torch.Tensor) -> float:
        """The mean loss on these rows as the trainer's own forward pass has it."""

    def gather(self, reference: ReferenceModel) -> None:
        """Copies the weights of all ranks into the reference of rank 0, by another way than weightcast's."""

    def offload_optimizer(self, file: Path) -> None:
        """Drops gradients and moves the optimizer's states to a file. Does nothing where a framework has them stay."""
        return

    def load_optimizer(self, file: Path) -> None:
        """Brings the optimizer's states back, if they were moved."""
        return


class FsdpTraining(Training):
    """FSDP2: each layer a group, the rest in the root group."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        quiet()
        self._rank, self._ranks = rank, ranks
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        self.source = FsdpSource(self._model)

    def optimize(self, rows: torch.Tensor, steps: int) -> float:
        batch = rows[self._rank % len(rows) :: self._ranks]
        loss = torch.zeros(())
        for _ in range(steps):
            loss = self._model(input_ids=batch, labels=batch).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return self._mean(loss)

    def loss(self, rows: torch.Tensor) -> float:
        with torch.no_grad():
            return self._mean(self._model(input_ids=rows, labels=rows).loss)

    def _mean(self, loss: torch.Tensor) -> float:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / self._ranks

    def offload_optimizer(self, file: Path) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        torch.save(self._optimizer.state_dict(), file)
        self._optimizer.state.clear()

    def load_optimizer(self, file: Path) -> None:
        if file.exists():
            self._optimizer.load_state_dict(torch.load(file, weights_only=False))
            file.unlink()

    def gather(self, reference: ReferenceModel) -> None:
        """Copies weights by DTensor's own gather."""
        targets = dict(reference.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                targets[name].copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
