"""The file that `weightcast up` reads: one pair, its gateway, trainer and instances, in TOML (docs/clusters.md)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from weightcast.gateway.ray_address import NAME
from weightcast.gateway.records import Backend, CommitPolicy, EngineSpec, Needed, Ranks
from weightcast.gateway.settings import Settings
from weightcast.transfer.documents import Record
from weightcast.transfer.errors import InputError
from weightcast.transfer.planner.topology import Topology

__all__ = ["ClusterSpec", "GatewaySpec", "InstanceSpec", "TrainerSpec", "read_spec"]

Name = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Field(strict=True, description="a whole number")]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""A strategy of Ray for a placement group."""


@dataclass(frozen=True, slots=True)
class RaySpec(Record):
    """The table `[ray]`."""

    address: str = "auto"


@dataclass(frozen=True, slots=True)
class GatewaySpec(Record):
    """The table `[gateway]`."""

    name: str = NAME
    state: str | None = None
    port: Whole = 0
    url: str | None = None


@dataclass(frozen=True, slots=True)
class TrainerSpec(Record):
    """The table `[trainer]`."""

    ranks: Ranks
    entry: str | None = None
    checkpoint: str | None = None
    backend: Backend = "tcp"
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    restarts: Whole = 3
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        if bool(self.entry) == bool(self.checkpoint):
            raise ValueError("it wants an entry or a checkpoint, one of them")


@dataclass(frozen=True, slots=True)
class InstanceSpec(EngineSpec):
    """One table `[[instance]]`: an engine's record, and how the engine is started."""

    name: Name
    command: list[str] = field(default_factory=list)
    health: str = "/health"
    log: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    restarts: Whole = 3
    count: Annotated[int, Field(strict=True, ge=0, description="a whole number of at least 0")] | None = None

    def __post_init__(self) -> None:
        if self.count is not None and (self.url or (self.log and "{instance}" not in self.log)):
            raise ValueError(f"count is {self.count}, which wants no url, and {{instance}} in the name of the log")
        if (self.command and self.url) or not (self.command or self.url or self.kind == "worker"):
            raise ValueError(f"{self.name!r} wants a command or a url, one of them")

    def each(self) -> tuple[InstanceSpec, ...]:
        """The instances that a table with a count stands for."""
        if self.count is None:
            return (self,)
        return tuple(replace(self, name=f"{self.name}-{number}", count=None) for number in range(self.count))

    @property
    def log_file(self) -> str | None:
        """The log of the instance, with its name filled in."""
        return self.log and self.log.replace("{instance}", self.name)

    def record(self, url: str) -> dict[str, Any]:
        """The record of the instance for the gateway."""
        engine = {entry.name: getattr(self, entry.name) for entry in fields(EngineSpec)}
        return {**engine, "url": url if self.kind == "sglang" else ""}


def _each(tables: tuple[InstanceSpec, ...]) -> tuple[InstanceSpec, ...]:
    """The instances of all tables. Raises ValueError for none, and for two of one name."""
    instances = tuple(instance for table in tables for instance in table.each())
    if not instances:
        raise ValueError("there are no instances; a pair has one at least")
    names = [instance.name for instance in instances]
    if len(set(names)) < len(names):
        raise ValueError(f"two instances are called {next(n for n in names if names.count(n) > 1)!r}")
    return instances


@dataclass(frozen=True, slots=True)
class ClusterSpec(Record):
    """The whole cluster file."""

    pair: Name
    trainer: TrainerSpec
    instances: Annotated[
        tuple[InstanceSpec, ...],
        Field(alias="instance", description="a list of tables: write [[instance]]"),
        AfterValidator(_each),
    ]
    ray: RaySpec = field(default_factory=RaySpec)
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
    commit: CommitPolicy = "each"
    min_instances: Needed | None = None
    settings: Settings = field(default_factory=Settings)
    topology: Topology | None = None

    @property
    def gateway_url(self) -> str:
        """The address at which ranks in the cluster find the gateway."""
        return self.gateway.url or f"ray://{self.gateway.name}"


def read_spec(path: Path) -> ClusterSpec:
    """Reads a cluster file. Raises InputError that names the file, the key, what was expected and what was found."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from None
    return ClusterSpec.given(document, str(path))
