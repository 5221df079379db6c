"""Settings of the demo, and the outcome that it reports."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from weightcast.transfer.colocated.offers import Share
from weightcast.transfer.documents import Record
from weightcast.transfer.layout.placement import ExpertPlacement

__all__ = ["LEARNING_RATE", "LOSS_LIMIT", "DemoConfig", "MegatronConfig", "ServerConfig", "VersionOutcome"]

LEARNING_RATE = 5e-3

Ranks = Annotated[int, Field(strict=True, ge=1, description="a whole number from 1")]


@dataclass(frozen=True, slots=True)
class ServerConfig(Record):
    """One SGLang server, in JSON such as `{"name": "rollout-0", "tp": 2, "ep": 2, "map": [0,1,2,3,3,0]}`.

    `placement` is the physical-to-logical row of every layer, empty for the engine's own.
    """

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,40}$", description="at most 40 letters, digits, '_' and '-'")]
    tp: Ranks = 1
    ep: Ranks = 1
    pp: Ranks = 1
    placement: Annotated[tuple[int, ...], Field(alias="map")] = ()

    def __post_init__(self) -> None:
        if self.tp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide tp {self.tp}")
        if self.placement:
            ExpertPlacement(np.array([self.placement]), max(self.placement) + 1, self.ep)  # raises for a bad map

    @property
    def world_size(self) -> int:
        """Number of its scheduler processes."""
        return self.tp * self.pp

    def __str__(self) -> str:
        text = f"tp{self.tp}/ep{self.ep}" + (f"/pp{self.pp}" if self.pp > 1 else "")
        return text + (f" map {list(self.placement)}" if self.placement else "")


DEFAULT_SERVERS = (
    # Rank 1 holds experts 3, 3 and 0: two replicas of one expert on one rank, which engines' own loaders may leave
    # unwritten.
    ServerConfig("rollout-0", tp=2, ep=2, placement=(0, 1, 2, 3, 3, 0)),
    ServerConfig("rollout-1", tp=1),
)


@dataclass(frozen=True, slots=True)
class MegatronConfig(Record):
    """Megatron-Core's split of the trainer: tensor, pipeline, expert and expert-tensor parallel ranks."""

    tp: Ranks = 1
    pp: Ranks = 1
    ep: Ranks = 1
    etp: Ranks = 1

    @property
    def ranks(self) -> int:
        """The fewest ranks that it takes: a stage is both tp x dp and etp x ep x expert data-parallel ranks."""
        return self.pp * math.lcm(self.tp, self.ep * self.etp)

    def __str__(self) -> str:
        return f"tp{self.tp}/pp{self.pp}/ep{self.ep}/etp{self.etp}"


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Settings of a run. `model` is a checkpoint folder; None makes a small Qwen3-MoE. `work` holds model and logs.

    `megatron` None means FSDP2. `ray` is the address of a Ray cluster to run on, "local" for one made for it, None for
    plain processes. `host` is the address of this machine at which all processes are. `prelude` is a Python file that
    each trainer process runs before anything of its framework is imported. `share` is the way in which the trainer
    exports weights to the engines, which are then all on its host.
    """

    work: Path
    model: Path | None = None
    trainers: int = 2
    megatron: MegatronConfig | None = None
    prelude: Path | None = None
    versions: int = 3
    steps: int = 20
    dtype: str = "float32"
    servers: tuple[ServerConfig, ...] = DEFAULT_SERVERS
    new_tokens: int = 24
    deadline: float = 300.0
    ray: str | None = None
    host: str = "127.0.0.1"
    share: Share = None

    def log(self, process: str) -> Path:
        """The file to which a process logs."""
        return self.work / f"{process}.log"


@dataclass(frozen=True, slots=True)
class VersionOutcome:
    """One version on one instance.

    `equal` and `changed` count prompts whose greedy tokens equal the trainer's and differ from the version before;
    `logprob_gap` is the mean absolute difference of the log-probabilities that trainer and engine give the engine's
    tokens. Of the bytes of its weights `sent` went through sockets, `shared` were read where the trainer has them.
    """

    version: int
    instance: str
    prompts: int
    equal: int
    changed: int
    logprob_gap: float
    weight_version: str
    seconds: float
    verified: dict[str, Any] = field(default_factory=dict)
    sent: int = 0
    shared: int = 0

    def faults(self, config: DemoConfig) -> list[str]:
        """The faults of the outcome; empty when all is proven.

        Tokens have to be equal in float32 only: in bfloat16 near ties flip, so there log-probabilities are compared.
        With the demo's own model every prompt has to change with the version; with a model of yours one is enough.
        """
        dtype, faults = config.dtype, []
        if dtype == "float32" and self.equal != self.prompts:
            faults.append(f"{self.prompts - self.equal} of {self.prompts} prompts differ from the trainer's tokens")
        if self.changed < (self.prompts if config.model is None else 1):
            faults.append(f"only {self.changed} of {self.prompts} prompts' tokens changed since the version before")
        if self.weight_version != str(self.version):
            faults.append(f"weight_version is {self.weight_version!r}, expected {self.version!r}")
        if not self.verified.get("regions"):
            faults.append("no region of its memory was verified")
        if not self.logprob_gap <= LOGPROB_LIMIT[dtype]:  # so that NaN is a fault
            faults.append(
                f"log-probabilities differ by {self.logprob_gap:.2g} on average, limit {LOGPROB_LIMIT[dtype]:g}"
            )
        if config.share is not None and (self.sent or not self.shared):
            faults.append(
                f"{self.sent} bytes went through sockets and {self.shared} through memory, expected all there"
            )
        return [f"version {self.version} on {self.instance}: {text}" for text in faults]


LOGPROB_LIMIT = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean absolute difference of log-probabilities that rounding explains, by engine dtype."""

LOSS_LIMIT = 1e-3
"""Largest difference of two float32 losses on the same weights and text that rounding explains."""
