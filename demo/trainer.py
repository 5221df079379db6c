"""One trainer process of the demo: real optimizer steps, an `update` a version, and the reference generation."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightcast.cluster.ray_actors import Mail, RankPlace
from weightcast.demo.colocated import StoredWeights, make_cycle
from weightcast.demo.config import DemoConfig
from weightcast.demo.megatron_training import MegatronTraining
from weightcast.demo.model import PARTS, prompt_ids, text_batches
from weightcast.demo.reference import ReferenceModel
from weightcast.demo.training import FsdpTraining, Training
from weightcast.gateway.colocated.cycle import StepReport
from weightcast.gateway.control.engines import one_line
from weightcast.gateway.ranks.trainer import TrainerWorker, UpdateResult
from weightcast.transfer.errors import UpdateError, WeightcastError

__all__ = ["Reference", "train"]


@dataclass(frozen=True, slots=True)
class Reference:
    """The trainer's report of one version: its loss, and for each prompt the greedy tokens of its own weights.

    `trainer_loss` and `reference_loss` are those of the trainer's own forward pass and of the model that made the
    tokens, on the same text. `result` is the gateway's record of the update for each instance; empty for version 0,
    the checkpoint. `moved` has for each instance the bytes that all trainer ranks sent to it, and those that they
    exported to it. `steps` are those of the colocated cycle, where there is one. `away` is the number of bytes of
    weights that no trainer rank has in memory while the engines generate.
    """

    version: int
    loss: float
    trainer_loss: float
    reference_loss: float
    tokens: list[list[int]]
    result: dict[str, dict[str, Any]]
    moved: dict[str, tuple[int, int]]
    steps: list[StepReport]
    away: int = 0


def train(place: RankPlace, config: DemoConfig, model: Path, url: str, pipe: Connection | Mail) -> None:
    """Body of a trainer process. Rank 0 sends a Reference a version, and answers tokens with log-probabilities.

    All ranks wait at each version until rank 0 was told to go on, so that the servers are asked while their weights
    stand still. With `config.share` rank 0 is first told where the engines are, which take part in the colocated cycle.
    """
    log = config.log(f"trainer-{place.rank}")
    with log.open("wb") as out:  # frameworks print and warn a lot
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    try:
        if config.prelude is not None:
            runpy.run_path(str(config.prelude), run_name="weightcast_prelude")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{place.rendezvous}",
            rank=place.rank,
            world_size=config.trainers,
            timeout=timedelta(seconds=config.deadline),
        )
        _run(_Rank(place, config, model, url), url, pipe)
    except Exception as error:
        traceback.print_exc()
        if not isinstance(error, WeightcastError):
            error = UpdateError(
                f"trainer rank {place.rank} failed: {type(error).__name__} {one_line(error)[:300]}; see {log}"
            )
        with suppress(OSError):  # nobody may be there to read it any more
            pipe.send(error)
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Rank:
    """One trainer rank, and its part in the colocated cycle.

    With a share of "staged" its weights go away after each update, until the next version is trained.
    """

    def __init__(self, place: RankPlace, config: DemoConfig, folder: Path, url: str) -> None:
        torch.manual_seed(0)
        self.rank, self.config = place.rank, config
        self.reference = ReferenceModel(folder)
        self._training: Training
        if config.megatron is not None:
            self._training = MegatronTraining(config.megatron, self.reference)
        else:
            self._training = FsdpTraining(place.rank, config.trainers, folder)
        vocabulary = int(self.reference.model.config.vocab_size)
        self.prompts = prompt_ids(folder, vocabulary)
        self._batches = [torch.tensor(rows) for rows in text_batches(folder, vocabulary)]
        self._optimizer_file = config.work / f"optimizer-{place.rank}.pt"
        self._weights = StoredWeights(self._training.source, config.work / f"weights-{place.rank}.pt")
        self._result, self._loss, self._trainer_loss = UpdateResult(0, "0", {}), 0.0, 0.0
        self.worker = TrainerWorker(
            url,
            "demo",
            self._training.source,
            rank=place.rank,
            world_size=config.trainers,
            address=place.address,
            deadline=config.deadline,
            share=config.share,
        )
        self.worker.connect()

    def train(self, version: int) -> None:
        """Brings back what was offloaded, and trains a version."""
        self._weights.resume()
        self._training.load_optimizer(self._optimizer_file)
        self._loss = self._training.optimize(self._batches[(version - 1) % PARTS], self.config.steps)

    def free(self) -> None:
        """Moves the optimizer's states to a file, where the framework can."""
        self._training.offload_optimizer(self._optimizer_file)

    def transfer(self, version: int) -> None:
        """Updates the engines to `version`, on every rank."""
        self._result = self.worker.update(version)

    def look(self) -> None:
        """Gathers the weights for the reference, and computes the trainer's own loss."""
        self._training.gather(self.reference)
        self._trainer_loss = self._training.loss(self._batches[0])

    def offload(self) -> None:
        """Looks, then offloads the weights. Weights that engines read in place stay: their memory is shared."""
        self._weights.resume()  # where this step is made again
        self.look()
        if self.config.share == "staged":
            self._weights.offload()

    def report(self, version: int, steps: list[StepReport]) -> Reference | None:
        """The report of a version, on rank 0. All ranks make it: bytes are those of all."""
        names = [server.name for server in self.config.servers]
        transfers = [self._result.transfers.get(name) for name in names]
        rows = [(0, 0) if entry is None else (entry.bytes_sent, entry.bytes_shared) for entry in transfers]
        counts = torch.tensor([*rows, (self._weights.away_bytes, 0)])
        dist.all_reduce(counts)
        if self.rank:
            return None
        *moved, (away_bytes, _) = counts.tolist()
        return Reference(
            version=version,
            loss=self._loss,
            trainer_loss=self._trainer_loss,
            reference_loss=self.reference.loss(self._batches[0]),
            tokens=self.reference.generate(self.prompts, self.config.new_tokens),
            result=self._result.instances,
            moved={name: (sent, shared) for name, (sent, shared) in zip(names, moved, strict=True)},
            steps=steps,
            away=away_bytes,
        )


def _run(rank: _Rank, url: str, pipe: Connection | Mail) -> None:
    """Runs version after version; the checkpoint is version 0."""
    config, cycle = rank.config, None
    if config.share is not None:
        engines = pipe.recv() if rank.rank == 0 else dict.fromkeys((server.name for server in config.servers), url)
        cycle = make_cycle(rank, engines, rank.rank, config.deadline)
    for version in range(config.versions + 1):
        steps: list[StepReport] = []
        if version > 0 and cycle is not None:
            steps = cycle.run(version)
        else:
            if version > 0:
                rank.train(version)
                rank.transfer(version)
            rank.look()
        if (report := rank.report(version, steps)) is not None:
            pipe.send(report)
            while (answers := pipe.recv()) is not None:
                pipe.send(rank.reference.logprobs(rank.prompts, answers))
        dist.barrier()
    rank.worker.close()
