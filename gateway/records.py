"""What is fixed about a pair and what is said of its updates: values that travel between gateway and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Literal

from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import WireError
from weightcast.transfer.layout.summaries import number_ranges
from weightcast.transfer.plan.verification import Verify
from weightcast.transfer.planner.topology import Topology

__all__ = [
    "Action",
    "CommitPolicy",
    "DigestCounts",
    "EngineSpec",
    "NonFinite",
    "Order",
    "PairSpec",
    "PauseMode",
    "UpdateRecord",
]

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How the gateway reaches an engine.

    `kind` is "sglang" (its HTTP server at `url`, with the weightcast plugin) or "worker" (ranks that run
    `InstanceWorker.serve` themselves and need no driver). `pause` says what happens to requests in flight: "abort" ends
    them, "retract" goes on after the update with the tokens that they have and a KV cache computed anew, "in_place"
    with the old KV cache, which no later request reads. `backend` is the transport of the instance's communicator. With
    `hold` the engine stays paused after a commit: whoever gave its memory to a trainer lets it go on. `non_finite` says
    what is done with values of the trainer that are infinite or no number, or become so in the engine's dtype: "refuse"
    the version, but for tensors whose names match one of the patterns `allow_non_finite` (fnmatch's), or "report" them
    only.
    """

    kind: Literal["sglang", "worker"]
    world_size: int
    url: str = ""
    pause: PauseMode = "abort"
    backend: Literal["tcp", "gloo", "nccl"] = "tcp"
    hold: bool = False
    non_finite: Literal["refuse", "report"] = "refuse"
    allow_non_finite: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "allow_non_finite", tuple(self.allow_non_finite))  # JSON has lists

    def refused(self, values: Iterable[NonFinite]) -> list[NonFinite]:
        """Those that are not taken."""
        if self.non_finite == "report":
            return []
        return [one for one in values if not any(fnmatchcase(one.tensor, name) for name in self.allow_non_finite)]


@dataclass(frozen=True, slots=True)
class DigestCounts:
    """What was compared and found equal.

    `tensors` logical tensors, `rows` digests of the instance, `regions` distinct regions that they cover,
    `slot_regions` those that belong to an expert slot (0 when no slots were given), `replicas` rows beside the first of
    their cell.
    """

    tensors: int
    rows: int
    regions: int
    slot_regions: int
    replicas: int


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Values of a tensor that are not finite, on the trainer ranks `ranks`: `nan` are no number, `inf` infinite, and
    `overflow` finite there, but not in `dtype`, in which an instance has the tensor. Values that several ranks hold
    count once.
    """

    tensor: str
    dtype: str
    nan: int
    inf: int
    overflow: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        counts = {"NaN": self.nan, "infinite": self.inf, "too large": self.overflow}
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{self.tensor!r} as {self.dtype} on trainer ranks {number_ranges(set(self.ranks))}: {found}"


CommitPolicy = Literal["each", "all"]


@dataclass(frozen=True, slots=True)
class PairSpec:
    """One trainer of `trainer_world` ranks and the instances that it feeds at first.

    `commit` says who gets a version: "each" instance that has it verified, or "all" together or none: then nothing is
    written before all are ready, and no instance serves the new version unless all have it. `bucket_bytes` is the most
    memory that a rank takes beside its parameters to pack and unpack, all instances that it feeds together. `verify` is
    how much of each update is digested. With a `topology` ranks pass on what other ranks of their instance receive
    alike, where its cost model finds that faster; its `between_instances` is not looked at, because instances share no
    communicator.

    `uid` stands for one creation of the pair and outlives gateways: after `delete` and `create` under one name versions
    that ranks hold are those of another pair.
    """

    name: str
    trainer_world: int
    instances: dict[str, EngineSpec]
    settings: Settings = field(default_factory=Settings)
    bucket_bytes: int = 512 << 20
    commit: CommitPolicy = "each"
    verify: Verify = Verify.FULL
    topology: Topology | None = None
    uid: str = field(default="", compare=False)


class Action(StrEnum):
    """Step that an order asks of the ranks of an instance's communicator."""

    REGISTER = "register"
    """Describe yourself for the epoch; for ranks without an engine API."""
    JOIN = "join"
    """Fetch the part of the epoch, and join."""
    CONNECTED = "connected"
    """All have joined."""
    PREPARE = "prepare"
    """Check that the layout still holds, then report ready."""
    RUN = "run"
    """Transfer the version, or some layers of it alone."""
    END = "end"
    """The update to the version is over, committed or not. Without a version, only what was begun of it is over."""
    FAILED = "failed"
    """The connect is over, and failed."""
    LEFT = "left"
    """The instance is no longer one of the pair."""


@dataclass(frozen=True, slots=True)
class Order:
    """Next step of the ranks of an instance's communicator, as the gateway gives it and the ranks read it.

    `version` of REGISTER, JOIN and CONNECTED is that of the update that they belong to, None outside of one. `layers`
    are those that RUN sends, None for all. `trainer` is the generation of the trainer for which the connect or update
    began.
    """

    action: Action
    epoch: int
    version: int | None = None
    committed: bool = False
    reason: str = ""
    layers: tuple[int, ...] | None = None
    trainer: int = 0
    instance: str = ""

    def as_json(self) -> dict[str, Any]:
        """Fields by name, as they are sent."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Order:
        """Reads an order as it was sent; fields of later versions are passed over.

        Raises WireError for an action or a field that is not as this version knows it.
        """
        try:
            known = {field.name: record[field.name] for field in fields(cls) if field.name in record}
            layers = known.get("layers")
            known |= {"action": Action(known["action"]), "layers": None if layers is None else tuple(layers)}
            return cls(**known)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(
                f"the gateway gives an order that this version does not know ({error}); run the same version of "
                "weightcast on both sides"
            ) from error

    def ends_update(self, version: int | None = None) -> bool:
        """True for the last order of an update: of any, or of the one to `version`."""
        if self.action is Action.LEFT:
            return True
        return self.action is Action.END and self.version is not None and version in (None, self.version)


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """How an update ended on one instance.

    `verified` counts what the digests covered; None when it did not get that far. `attempts` counts passes through the
    steps, `resends` those of them that sent layers again. `non_finite` are the first tensors with values that are not
    finite, of what was digested, `non_finite_tensors` how many there are.
    """

    version: int
    committed: bool
    fenced: bool
    reason: str
    seconds: float
    verified: DigestCounts | None = None
    attempts: int = 1
    resends: int = 0
    non_finite: tuple[NonFinite, ...] = ()
    non_finite_tensors: int = 0
