"""The file that `weightcast up` reads: one pair, its gateway, trainer and instances, in TOML.

pair = "main"
commit = "each"                      # or "all": no instance serves a version unless all have it

[ray]
address = "auto"                     # the cluster to run on

[gateway]
name = "weightcast"                  # of its actor: others find it as ray://weightcast
state = "/shared/weightcast.db"      # on storage that every node sees; nothing committed is lost when it dies
# url = "https://10.0.0.5:8900"      # instead of all that: a gateway that is there already, in another cluster

[trainer]
ranks = 8
entry = "my_project.training:make_source"   # called as make_source(rank, world_size) on every rank; gives a Source
# checkpoint = "/models/qwen3-moe"          # instead: a safetensors checkpoint is the trainer
backend = "nccl"                     # of the communicators ("tcp")
options = { num_gpus = 1 }           # Ray's options for the actor of each rank
environment = { }
restarts = 3                         # how often Ray starts a rank's actor again
strategy = "PACK"                    # optional: all ranks into a placement group of Ray, by this strategy

[[instance]]
name = "rollout-0"
world_size = 2
command = ["{python}", "-m", "sglang.launch_server", "--host", "{host}", "--port", "{port}", "--tp-size", "2"]
options = { num_gpus = 2 }
# {python}, {host}, {port}, {instance} (its name), {gateway} (for GatewayClient and InstanceWorker) and {gateway_http}
# are filled in; health = "" if it answers no HTTP
# count = 4                          # so many of them, rollout-0-0 to rollout-0-3
# url = "http://10.0.0.7:30000"      # instead of a command: an engine that is there already
# kind = "worker"                    # without either: an engine of your own that comes by itself
# non_finite = "report"              # pause, backend, non_finite and allow_non_finite are those of the engine's record

[settings]                           # deadlines and counts of the pair, all of them optional
transfer = 600

[topology]                           # optional: ranks of an instance pass on to each other what they receive alike
nic_gbps = 400                       # as in the file of `weightcast plan --simulate`
"""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from weightcast.gateway.ray_address import NAME
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import InputError, LayoutError
from weightcast.transfer.planner.topology import Topology

__all__ = ["ClusterSpec", "GatewaySpec", "InstanceSpec", "TrainerSpec", "read_spec"]

T = TypeVar("T")

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""Strategies of Ray for a placement group."""


@dataclass(frozen=True, slots=True)
class GatewaySpec:
    """The table `[gateway]`."""

    name: str = NAME
    state: str | None = None
    port: int = 0
    url: str | None = None


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """The table `[trainer]`."""

    ranks: int
    entry: str | None = None
    checkpoint: str | None = None
    backend: str = "tcp"
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    restarts: int = 3
    strategy: str | None = None


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One table `[[instance]]`."""

    name: str
    world_size: int
    kind: str = "sglang"
    command: list[str] = field(default_factory=list)
    health: str = "/health"
    log: str | None = None
    url: str | None = None
    pause: str | None = None
    backend: str | None = None
    non_finite: str | None = None
    allow_non_finite: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    restarts: int = 3
    count: int | None = None

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
        optional: dict[str, Any] = {name: getattr(self, name) for name in _ENGINE}
        optional["url"] = url if self.kind == "sglang" else None
        entries = {key: value for key, value in optional.items() if value is not None}
        return {"kind": self.kind, "world_size": self.world_size, **entries}


_ENGINE = ("pause", "backend", "non_finite", "allow_non_finite")
"""Keys of the engine's record in the pair that the file may have."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The whole cluster file."""

    pair: str
    trainer: TrainerSpec
    instances: tuple[InstanceSpec, ...]
    gateway: GatewaySpec = field(default_factory=GatewaySpec)
    address: str = "auto"
    commit: str = "each"
    settings: dict[str, float] = field(default_factory=dict)
    topology: dict[str, Any] | None = None

    @property
    def gateway_url(self) -> str:
        """The address at which ranks in the cluster find the gateway."""
        return self.gateway.url or f"ray://{self.gateway.name}"


def read_spec(path: Path) -> ClusterSpec:
    """Reads a cluster file. Raises InputError that names the file, the key, what was expected and what was found."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from None
    try:
        return _spec(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _spec(document: dict[str, Any]) -> ClusterSpec:
    keys = ("pair", "commit", "ray", "gateway", "trainer", "instance", "settings", "topology")
    _known("the file", document, keys)
    for name in ("pair", "trainer", "instance"):
        if name not in document:
            raise InputError(f"{name!r} is missing")
    if not isinstance(document["instance"], list) or not document["instance"]:
        raise InputError("'instance' is no list of tables: write [[instance]]")
    tables = [_table(InstanceSpec, "[[instance]]", table) for table in document["instance"]]
    for instance in tables:
        if instance.count is not None and (
            instance.count < 0 or instance.url or (instance.log and "{instance}" not in instance.log)
        ):
            raise InputError(
                f"instance {instance.name!r}: count is {instance.count}, expected 0 or more, without a url, and "
                "{instance} in the name of its log"
            )
        if (instance.command and instance.url) or not (instance.command or instance.url or instance.kind == "worker"):
            raise InputError(f"instance {instance.name!r} wants a command or a url, one of them")
    instances = tuple(instance for table in tables for instance in table.each())
    if not instances:
        raise InputError("there are no instances; a pair has one at least")
    names = [instance.name for instance in instances]
    if len(set(names)) < len(names):
        raise InputError(f"two instances are called {next(n for n in names if names.count(n) > 1)!r}")
    trainer = _table(TrainerSpec, "[trainer]", document["trainer"])
    if bool(trainer.entry) == bool(trainer.checkpoint):
        raise InputError("[trainer] wants an entry or a checkpoint, one of them")
    if trainer.strategy not in (None, *STRATEGIES):
        raise InputError(f"[trainer] strategy is {trainer.strategy!r}, expected one of {', '.join(STRATEGIES)}")
    if trainer.ranks < 1 or any(instance.world_size < 1 for instance in instances):
        raise InputError("ranks and world_size must be 1 or more")
    gateway = _table(GatewaySpec, "[gateway]", document.get("gateway", {}))
    ray_table = document.get("ray", {})
    _known("[ray]", ray_table, ("address",))
    address = ray_table.get("address", "auto")
    if not isinstance(address, str):
        raise InputError(f"[ray]: address is {address!r}, expected text")
    settings = document.get("settings", {})
    Settings.given(settings)
    topology = document.get("topology")
    if topology is not None:
        _topology(topology)
    pair, commit = document["pair"], document.get("commit", "each")
    if not isinstance(pair, str) or not pair or commit not in ("each", "all"):
        raise InputError(f"pair is {pair!r} and commit {commit!r}, expected a name, and 'each' or 'all'")
    return ClusterSpec(pair, trainer, instances, gateway, address, commit, settings, topology)


def _topology(table: object) -> None:
    """Checks the table `[topology]`. Raises InputError for what is no topology."""
    if not isinstance(table, dict):
        raise InputError("[topology] is no table")
    try:
        Topology.given(table)
    except LayoutError as error:
        raise InputError(str(error)) from None


def _known(where: str, table: object, known: tuple[str, ...]) -> None:
    if not isinstance(table, dict):
        raise InputError(f"{where} is no table")
    if unknown := sorted(set(table) - set(known)):
        raise InputError(f"{where}: {', '.join(unknown)} are not known; known are {', '.join(known)}")


def _table(kind: type[T], where: str, table: object) -> T:
    """A table of the file as the dataclass that describes it."""
    members = fields(kind)  # type: ignore[arg-type]
    _known(where, table, tuple(f.name for f in members))
    assert isinstance(table, dict)
    types = get_type_hints(kind)
    for f in members:
        if f.name not in table:
            if f.default is MISSING and f.default_factory is MISSING:
                raise InputError(f"{where}: {f.name!r} is missing")
        elif not _is(table[f.name], types[f.name]):
            raise InputError(f"{where}: {f.name} is {table[f.name]!r}, expected {_said(types[f.name])}")
    return kind(**table)


def _is(value: object, wanted: Any) -> bool:
    if isinstance(wanted, UnionType):
        return any(_is(value, kind) for kind in get_args(wanted))
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is list:
        return isinstance(value, list) and all(_is(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(inner[1] is Any or _is(item, inner[1]) for item in value.values())
    return isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))


def _said(wanted: Any) -> str:
    names = {str: "text", int: "a whole number", list: "a list of texts", dict: "a table"}
    kinds = [kind for kind in get_args(wanted) if kind is not type(None)] if isinstance(wanted, UnionType) else [wanted]
    return " or ".join(names.get(get_origin(kind) or kind, str(kind)) for kind in kinds)
