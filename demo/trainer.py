"""One trainer process of the demo: FSDP2, real optimizer steps, an `update` a version, and the reference generation."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcast.demo.config import DemoConfig
from weightcast.demo.model import PARTS, prompt_ids, quiet, text_batches
from weightcast.gateway.engines import one_line
from weightcast.transfer.errors import UpdateError, WeightcastError

if TYPE_CHECKING:
    import torch

__all__ = ["Reference", "train"]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the trainer says of one version: its loss, and for each prompt the greedy tokens of its own weights.

    `result` is the gateway's record of the update for each instance; empty for version 0, the checkpoint.
    """

    version: int
    loss: float
    tokens: list[list[int]]
    result: dict[str, dict[str, Any]]


def train(rank: int, config: DemoConfig, model: Path, url: str, port: int, pipe: Connection) -> None:
    """Body of trainer process `rank`. Rank 0 sends a Reference a version, and answers lists of tokens with
    log-probabilities.

    All ranks wait at each version until rank 0 was told to go on, so that the servers are asked while their weights
    stand still.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=config.trainers,
        timeout=timedelta(seconds=config.deadline),
    )
    try:
        _Training(rank, config, model, url).run(pipe)
    except Exception as error:
        log = config.work / f"trainer-{rank}.log"
        log.write_text(traceback.format_exc())
        if not isinstance(error, WeightcastError):
            error = UpdateError(
                f"trainer rank {rank} failed: {type(error).__name__} {one_line(error)[:300]}; see {log}"
            )
        with suppress(OSError):  # nobody may be there to read it any more
            pipe.send(error)
        sys.exit(1)
    finally:
        dist.destroy_process_group()


class _Training:
    """The state of one trainer rank."""

    def __init__(self, rank: int, config: DemoConfig, folder: Path, url: str) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        from weightcast.adapters.fsdp import FsdpSource
        from weightcast.gateway.worker import TrainerWorker

        self.rank, self.config = rank, config
        quiet()
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # The reference is a model of its own, so that generation cannot disturb the sharded one.
        self.reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.prompts = prompt_ids(folder, self.model.config.vocab_size)
        batches = text_batches(folder, self.model.config.vocab_size)
        self.batches = [torch.tensor(rows[rank % len(rows) :: config.trainers]) for rows in batches]
        mesh = init_device_mesh("cpu", (config.trainers,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.worker = TrainerWorker(
            url, "demo", FsdpSource(self.model), rank=rank, world_size=config.trainers, deadline=config.deadline
        )

    def run(self, pipe: Connection) -> None:
        import torch.distributed as dist

        self.worker.connect()
        for version in range(self.config.versions + 1):
            loss, result = 0.0, {}
            if version > 0:
                loss = self.optimize(self.batches[(version - 1) % PARTS])
                result = self.worker.update(version).instances
            self.gather_reference()
            if self.rank == 0:
                pipe.send(Reference(version, loss, self.generate(), result))
                while (asked := pipe.recv()) is not None:
                    pipe.send(self.logprobs(asked))
            dist.barrier()
        self.worker.close()

    def optimize(self, rows: torch.Tensor) -> float:
        """A few optimizer steps on rows of token ids (rows, length); the mean loss over ranks of the last one."""
        import torch
        import torch.distributed as dist

        loss = torch.zeros(())
        for _ in range(self.config.steps):
            loss = self.model(input_ids=rows, labels=rows).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / self.config.trainers

    def gather_reference(self) -> None:
        """Copies the trainer's weights into the reference, through DTensor's own gather and not through weightcast."""
        import torch
        from torch.distributed.tensor import DTensor

        mine = dict(self.reference.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                mine[name].copy_(whole)

    def generate(self) -> list[list[int]]:
        """Greedy tokens of the reference for each prompt."""
        import torch

        count = self.config.new_tokens
        found = []
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            out = self.reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
            found.append(out[0, len(prompt) :].tolist())
        return found

    def logprobs(self, answers: list[list[int]]) -> list[list[float]]:
        """Log-probability that the reference gives each token of each answer, after its prompt."""
        import torch

        found = []
        with torch.no_grad():
            for prompt, answer in zip(self.prompts, answers, strict=True):
                logits = self.reference(input_ids=torch.tensor([prompt + answer])).logits[0]
                scores = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
                found.append(scores.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
        return found
