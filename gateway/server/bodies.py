"""JSON bodies of the gateway's requests: what is not listed here, or of another type, is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from weightcast.gateway.records import Backend, CommitPolicy, EngineKind, EngineSpec, NonFiniteMode, PairSpec, PauseMode
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import InputError, LayoutError
from weightcast.transfer.plan.verification import Verify
from weightcast.transfer.planner.topology import Topology

__all__ = [
    "MAX_IDENTITY",
    "BeatBody",
    "EngineBody",
    "FailureBody",
    "MovedBody",
    "OfferBody",
    "PairBody",
    "ReadyBody",
    "RendezvousBody",
]


MAX_IDENTITY = 160
"""Characters of what stands for a process: host, number and a random part."""
MAX_LAYERS = 10_000
Layer = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class EngineBody(_Body):
    """JSON of an EngineSpec."""

    kind: EngineKind = "sglang"
    world_size: int = Field(ge=1, le=100_000)
    url: str = Field(default="", max_length=2048)
    pause: PauseMode = "abort"
    backend: Backend = "tcp"
    hold: bool = False
    non_finite: NonFiniteMode = "refuse"
    allow_non_finite: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(
        default_factory=list, max_length=1000
    )

    def spec(self) -> EngineSpec:
        """The record of it."""
        return EngineSpec(**self.model_dump())


class PairBody(_Body):
    """JSON of a PairSpec."""

    trainer_world: int = Field(ge=1, le=100_000)
    instances: dict[str, EngineBody] = Field(min_length=1, max_length=10_000)
    settings: dict[str, float] = Field(default_factory=dict, max_length=64)
    bucket_bytes: int = Field(default=512 << 20, ge=1 << 10, le=1 << 40)
    commit: CommitPolicy = "each"
    verify: Literal["full", "sampled", "off"] = "full"
    topology: dict[str, Any] | None = None

    def spec(self, name: str) -> PairSpec:
        """The record of it. Raises InputError for settings that there are none of, and for what is no topology."""
        instances = {key: engine.spec() for key, engine in self.instances.items()}
        settings = Settings.given(self.settings)
        verify = Verify(self.verify)
        try:
            topology = None if self.topology is None else Topology.given(self.topology)
        except LayoutError as error:
            raise InputError(str(error)) from None
        return PairSpec(name, self.trainer_world, instances, settings, self.bucket_bytes, self.commit, verify, topology)


class RendezvousBody(_Body):
    """Where the first member of a communicator listens."""

    host: str = Field(min_length=1, max_length=255)
    port: int = Field(ge=1, le=65535)


class FailureBody(_Body):
    """What stopped a rank."""

    error: str = Field(max_length=64)
    message: str = Field(max_length=10_000)


class ReadyBody(_Body):
    """Outcome of a rank's check before the transfer.

    `stale` is empty when nothing changed; `layers` are those whose placement did, null when more changed than that.
    """

    stale: str = Field(default="", max_length=10_000)
    layers: list[Layer] | None = Field(default=None, max_length=MAX_LAYERS)


class MovedBody(_Body):
    """Layers whose placement changed during the transfer of `version`."""

    version: int = Field(ge=0, lt=1 << 62)
    layers: list[Layer] = Field(min_length=1, max_length=MAX_LAYERS)


class BeatBody(_Body):
    """A rank lives; `identity` stands for its process, and so for its memory."""

    identity: str = Field(default="", max_length=MAX_IDENTITY)


class OfferBody(_Body):
    """A trainer rank's readiness to send a version."""

    version: int = Field(ge=0, lt=1 << 62)
