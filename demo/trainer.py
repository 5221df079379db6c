"""One trainer process of the demo: real optimizer steps, an `update` a version, and the reference generation."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from weightcast.demo.colocated import DemoHooks, StoredWeights, make_cycle
from weightcast.demo.config import DemoConfig
from weightcast.demo.model import PARTS, prompt_ids, text_batches
from weightcast.demo.reference import ReferenceModel
from weightcast.demo.training import make_training
from weightcast.gateway.colocated.cycle import ColocatedCycle, StepReport
from weightcast.gateway.control.engines import one_line
from weightcast.transfer.errors import UpdateError, WeightcastError

if TYPE_CHECKING:
    from weightcast.gateway.ranks.trainer import UpdateResult

__all__ = ["Pipe", "RankPlace", "Reference", "train"]


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


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a trainer rank: its number, its address, and HOST:PORT where rank 0 brings all together."""

    rank: int
    address: str
    rendezvous: str


class Pipe(Protocol):
    """One end of a conversation, as a Connection is."""

    def send(self, what: Any, /) -> None:
        """Sends a message to the other end."""

    def recv(self) -> Any:
        """Waits for a message of the other end."""


def train(place: RankPlace, config: DemoConfig, model: Path, url: str, pipe: Pipe) -> None:
    """Body of a trainer process. Rank 0 sends a Reference a version, and answers tokens with log-probabilities.

    All ranks wait at each version until rank 0 was told to go on, so that the servers are asked while their weights
    stand still. With `config.share` rank 0 is first told where the engines are, which take part in the colocated cycle.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    rank = place.rank
    log = config.work / f"trainer-{rank}.log"
    with log.open("wb") as out:  # frameworks print and warn a lot
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if config.prelude is not None:
            runpy.run_path(str(config.prelude), run_name="weightcast_prelude")
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{place.rendezvous}",
            rank=rank,
            world_size=config.trainers,
            timeout=timedelta(seconds=config.deadline),
        )
        _run(place, config, model, url, pipe)
    except Exception as error:
        traceback.print_exc()
        if not isinstance(error, WeightcastError):
            error = UpdateError(
                f"trainer rank {rank} failed: {type(error).__name__} {one_line(error)[:300]}; see {log}"
            )
        with suppress(OSError):  # nobody may be there to read it any more
            pipe.send(error)
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _run(place: RankPlace, config: DemoConfig, folder: Path, url: str, pipe: Pipe) -> None:
    """Runs version after version; the checkpoint is version 0."""
    rank = place.rank
    import torch
    import torch.distributed as dist

    from weightcast.gateway.ranks.trainer import TrainerWorker, UpdateResult

    torch.manual_seed(0)
    reference = ReferenceModel(folder)
    training = make_training(rank, config, folder, reference)
    vocabulary = int(reference.model.config.vocab_size)
    prompts = prompt_ids(folder, vocabulary)
    batches = [torch.tensor(rows) for rows in text_batches(folder, vocabulary)]
    worker = TrainerWorker(
        url,
        "demo",
        training.source,
        rank=rank,
        world_size=config.trainers,
        address=place.address,
        deadline=config.deadline,
        share=config.share,
    )
    worker.connect()
    outcome, trainer_loss = UpdateResult(0, {}), 0.0

    def update(version: int) -> None:
        nonlocal outcome
        outcome = worker.update(version)

    def batch(version: int) -> torch.Tensor:
        return batches[(version - 1) % PARTS]

    def look() -> None:
        nonlocal trainer_loss
        training.gather(reference)
        trainer_loss = training.loss(batches[0])

    weights = StoredWeights(training.source, config.work / f"weights-{rank}.pt") if config.share == "staged" else None
    optimizer_file = config.work / f"optimizer-{rank}.pt"
    hooks = DemoHooks(training, batch, config.steps, update, look, optimizer_file, weights)
    cycle: ColocatedCycle | None = None
    if config.share is not None:
        engines = pipe.recv() if rank == 0 else dict.fromkeys((s.name for s in config.servers), url)
        cycle = make_cycle(hooks, engines, rank, config.deadline)
    for version in range(config.versions + 1):
        steps: list[StepReport] = []
        if version > 0 and cycle is not None:
            steps = cycle.run(version)
        else:
            if version > 0:
                hooks.train(version)
                update(version)
            look()
        moved_bytes, away_bytes = _moved(outcome, config), _total(0 if weights is None else weights.away_bytes)
        if rank == 0:
            tokens = reference.generate(prompts, config.new_tokens)
            losses = (hooks.loss, trainer_loss, reference.loss(batches[0]))
            pipe.send(Reference(version, *losses, tokens, outcome.instances, moved_bytes, steps, away_bytes))
            while (answers := pipe.recv()) is not None:
                pipe.send(reference.logprobs(prompts, answers))
        dist.barrier()
    worker.close()


def _total(nbytes: int) -> int:
    """The sum over all trainer ranks."""
    import torch
    import torch.distributed as dist

    count = torch.tensor(nbytes)
    dist.all_reduce(count)
    return int(count)


def _moved(result: UpdateResult, config: DemoConfig) -> dict[str, tuple[int, int]]:
    """Bytes sent and bytes exported to each instance, over all trainer ranks."""
    import torch
    import torch.distributed as dist

    names = [server.name for server in config.servers]
    transfers = [result.transfers.get(name) for name in names]
    counts = torch.tensor(
        [(0, 0) if transfer is None else (transfer.bytes_sent, transfer.bytes_shared) for transfer in transfers]
    )
    dist.all_reduce(counts)
    return {
        name: (int(sent_bytes), int(shared_bytes))
        for name, (sent_bytes, shared_bytes) in zip(names, counts.tolist(), strict=True)
    }
