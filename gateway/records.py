"""Values that travel between gateway and ranks: what is fixed about a pair, its orders, and records of its updates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, Field, StrictBool

from weightcast.gateway.settings import Settings
from weightcast.gateway.versions import MOST_LINEAGES, Version
from weightcast.transfer.documents import Record
from weightcast.transfer.errors import WireError
from weightcast.transfer.layout.summaries import number_ranges
from weightcast.transfer.plan.verification import Verify
from weightcast.transfer.planner.topology import Topology

__all__ = [
    "MAX_INSTANCES",
    "Action",
    "Backend",
    "CommitPolicy",
    "DigestCounts",
    "EngineKind",
    "EngineSpec",
    "NonFinite",
    "NonFiniteMode",
    "Order",
    "PairOptions",
    "PairSpec",
    "PauseMode",
    "UpdateRecord",
    "WaitRecord",
    "differences",
    "needed_of",
    "shortfall",
    "wait_lines",
]

EngineKind = Literal["sglang", "worker"]
PauseMode = Literal["abort", "retract", "in_place"]
Backend = Literal["tcp", "gloo", "nccl"]
NonFiniteMode = Literal["refuse", "report"]
Stamps = Literal["text", "integer"]
CommitPolicy = Literal["each", "all"]

MAX_INSTANCES = 10_000
"""Number of instances that a pair can have."""

Ranks = Annotated[int, Field(strict=True, ge=1, le=100_000, description="a whole number from 1 to 100000")]
Pattern = Annotated[str, Field(min_length=1, max_length=1000)]
KEY_PREFIX = "WEIGHTCAST_ENGINE_KEY"
"""Start of the variables with keys of engines: no other secret of the gateway's environment is sent to an engine."""
_KEY_VARIABLE = re.compile(KEY_PREFIX + "[A-Za-z0-9_]{0,200}")

Lineage = Annotated[int, Field(strict=True, ge=1, le=MOST_LINEAGES, description="a whole number from 1 to 2^31")]
_NAMES = f"from 1 to {MAX_INSTANCES} instances by name"
Needed = Annotated[
    int, Field(strict=True, ge=1, le=MAX_INSTANCES, description=f"a whole number from 1 to {MAX_INSTANCES}")
]
Bucket = Annotated[int, Field(strict=True, ge=1 << 10, le=1 << 40, description="a whole number from 2^10 to 2^40")]


def _key_variable(name: str) -> str:
    """Checks the name of a variable. Raises ValueError that does not show it: it may be a key, given by mistake."""
    if name and not _KEY_VARIABLE.fullmatch(name):
        raise ValueError(
            f"it names no variable {KEY_PREFIX}...; keys stay in the gateway's environment, in variables that begin so"
        )
    return name


KeyVariable = Annotated[str, AfterValidator(_key_variable)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec(Record):
    """Engine of an instance, and the gateway's way to reach it.

    `kind` is "sglang" (its HTTP server at `url`, with the weightcast plugin) or "worker". Ranks of a "worker" run
    `InstanceWorker.serve` themselves and need no driver. `backend` is the transport of the instance's communicator.

    `pause` says what happens to requests in flight. "retract" goes on after the update with their tokens and a KV cache
    computed anew. "abort" ends them, which pipeline stages need. "in_place" goes on with the old KV cache, which no
    later request reads. With `hold` the engine stays paused after a commit: whoever gave its memory to a trainer lets
    it go on.

    `non_finite` is for values of the trainer that are infinite or no number, or become so in the engine's dtype.
    "refuse" refuses the version, but for tensors whose names match a pattern of `allow_non_finite` (fnmatch's).
    "report" only reports them.

    `stamps` says which stamps of versions its consumers read. With "integer" the pair stays in its first lineage.

    `api_key_variable` and `admin_api_key_variable` name variables of the gateway's environment that hold the server's
    `--api-key` and `--admin-api-key`. The second is that of the first unless given.
    """

    kind: EngineKind = "sglang"
    world_size: Ranks
    url: Annotated[str, Field(max_length=2048)] = ""
    pause: PauseMode = "retract"
    backend: Backend = "tcp"
    hold: StrictBool = False
    non_finite: NonFiniteMode = "refuse"
    allow_non_finite: Annotated[tuple[Pattern, ...], Field(max_length=1000)] = ()
    stamps: Stamps = "text"
    api_key_variable: KeyVariable = ""
    admin_api_key_variable: KeyVariable = ""

    @property
    def shown_url(self) -> str:
        """The url for messages."""
        return _without_secrets(self.url)

    def refused(self, values: Iterable[NonFinite]) -> list[NonFinite]:
        """Those of `values` that the engine does not take."""
        if self.non_finite == "report":
            return []
        return [value for value in values if not any(fnmatchcase(value.tensor, name) for name in self.allow_non_finite)]


@dataclass(frozen=True, slots=True)
class DigestCounts:
    """Counts of what was compared and found equal.

    `tensors` are logical tensors, `rows` digests of the instance, `regions` the distinct regions that they cover.
    `slot_regions` are those that belong to an expert slot (0 when no slots were given). `replicas` are rows beside the
    first of their cell.
    """

    tensors: int
    rows: int
    regions: int
    slot_regions: int
    replicas: int


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Values of a tensor that are not finite, on the trainer ranks `ranks`: `nan` are no number, `inf` infinite.
    `overflow` are finite there, but not in `dtype`, in which an instance has the tensor. Values that several ranks hold
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
        text = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        return f"{self.tensor!r} as {self.dtype} on trainer ranks {number_ranges(set(self.ranks))}: {text}"


@dataclass(frozen=True, kw_only=True)
class PairOptions(Record):
    """One trainer of `trainer_world` ranks and the instances that it feeds at first.

    `commit` says who gets a version. With "each" every instance that has it verified gets it. With "all" they get it
    together or not at all: nothing is written before all are ready. Nor does an instance then serve the new version
    unless all have it. `bucket_bytes` is the most memory that a rank takes beside its parameters to pack and unpack,
    for all instances together. `verify` is how much of each update is digested.

    `min_instances` is how many instances an update needs; without it that is all of them. An update of which fewer
    commit is an error to the trainer. With `commit` "all" that many must be alive, and dead ones take no part.

    With a `topology` ranks forward the weights that they share with others of their instance, where its cost model
    finds that faster. Its `between_instances` is not used, because instances share no communicator.
    """

    trainer_world: Ranks
    instances: Annotated[dict[str, EngineSpec], Field(min_length=1, max_length=MAX_INSTANCES, description=_NAMES)]
    settings: Settings = field(default_factory=Settings)
    bucket_bytes: Bucket = 512 << 20
    commit: CommitPolicy = "each"
    verify: Verify = Verify.FULL
    topology: Topology | None = None
    min_instances: Needed | None = None

    def named(self, name: str) -> PairSpec:
        """The pair of that name."""
        return PairSpec(name, **vars(self))

    def needed(self, instances: int) -> int:
        """How many of so many instances an update needs."""
        return needed_of(instances, self.min_instances)


def needed_of(instances: int, min_instances: int | None) -> int:
    """How many of so many instances an update needs: all, unless `min_instances` are fewer."""
    return instances if min_instances is None else min(min_instances, instances)


@dataclass(frozen=True)
class PairSpec(PairOptions):
    """A pair with its name. `uid` stands for one creation of the pair and outlives gateways.

    After `delete` and `create` under one name, versions that ranks hold are those of another pair. `lineage` is the one
    in which its versions go on.
    """

    name: str
    uid: str = field(default="", compare=False)
    lineage: Lineage = field(default=1, compare=False)


def differences(old: PairSpec, new: PairSpec) -> list[str]:
    """Fields in which two specifications of a pair differ, each with both values, but for secrets of a URL."""
    identity = {"uid": "", "lineage": 1}
    return list(_differing(asdict(old) | identity, asdict(new) | identity))


def _differing(old: Any, new: Any, path: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differing(old.get(key, _ABSENT), new.get(key, _ABSENT), f"{path}.{key}" if path else key)
    elif old != new:
        yield f"{path} is {_shown(old)}, now {_shown(new)}"


_ABSENT = object()


def _shown(value: Any) -> str:
    """A value in words, without the secrets of a URL."""
    if value is _ABSENT or isinstance(value, dict):
        return "absent" if value is _ABSENT else "there"
    return repr(_without_secrets(value) if isinstance(value, str) and "://" in value else value)


def _without_secrets(url: str) -> str:
    """A URL without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


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

    `version` of REGISTER, JOIN and CONNECTED is that of the update to which they belong, None outside of one. `layers`
    are those that RUN sends, None for all. `trainer` is the generation of the trainer for which the connect or update
    began.
    """

    action: Action
    epoch: int
    version: Version | None = None
    committed: bool = False
    reason: str = ""
    layers: tuple[int, ...] | None = None
    trainer: int = 0
    instance: str = ""

    def as_json(self) -> dict[str, Any]:
        """Fields by name, as they are sent."""
        version = None if self.version is None else self.version.as_json()
        return {name: getattr(self, name) for name in self.__slots__} | {"version": version}

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Order:
        """Reads an order as it was sent; fields of later versions are passed over.

        Raises WireError for an action or a field that is not as this version knows it.
        """
        try:
            values = {field.name: record[field.name] for field in fields(cls) if field.name in record}
            layers, version = values.get("layers"), values.get("version")
            values |= {"action": Action(values["action"]), "layers": None if layers is None else tuple(layers)}
            values |= {"version": None if version is None else Version.parse(version)}
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(
                f"the gateway gives an order that this version does not know ({error}); run the same version of "
                "weightcast on both sides"
            ) from None

    def ends_update(self, version: Version | None = None) -> bool:
        """True for the last order of an update: of any, or of the one to `version`."""
        if self.action is Action.LEFT:
            return True
        return self.action is Action.END and self.version is not None and version in (None, self.version)


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """End of an update on one instance.

    `verified` counts what the digests covered, None when the update did not get that far. `attempts` counts passes
    through the steps, `resends` those of them that sent layers again. `non_finite` are the first of the digested
    tensors with values that are not finite, `non_finite_tensors` is the number of all.
    """

    version: Version
    committed: bool
    fenced: bool
    reason: str
    seconds: float
    verified: DigestCounts | None = None
    attempts: int = 1
    resends: int = 0
    non_finite: tuple[NonFinite, ...] = ()
    non_finite_tensors: int = 0

    def as_json(self) -> dict[str, Any]:
        """Fields by name, as they are sent."""
        return asdict(self) | {"version": self.version.as_json()}


def shortfall(name: str, record: Mapping[str, Any]) -> str:
    """Why an instance lacks what an update was for, in words, from its `UpdateRecord` as JSON; empty if it does not."""
    if not record["reason"]:
        return ""
    state = "fenced" if record["fenced"] else "not resumed" if record["committed"] else "not updated"
    return f"{name} is {state}: {record['reason']}"


_SHOWN_WAITS = 4


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """A wait under way: who is missing, since when (UTC), for how many seconds so far and at most; None without end."""

    missing: str
    since: str
    seconds: float
    limit: float | None

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" of {self.limit:g} s"
        return f"waiting, {self.seconds:.0f} s{limit}: {self.missing}"


def wait_lines(waits: Sequence[WaitRecord]) -> list[str]:
    """A line for each of the first waits, and one for the number of the others."""
    lines = [str(wait) for wait in waits[:_SHOWN_WAITS]]
    hidden = len(waits) - _SHOWN_WAITS
    return [*lines, f"and {hidden} waits more; weightcast status has all"] if hidden > 0 else lines
