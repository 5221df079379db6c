"""What is fixed about a pair and what is said of its updates: values that travel between gateway and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from weightcast.gateway.engines import EngineSpec
from weightcast.gateway.settings import Settings
from weightcast.gateway.verify import DigestCounts, NonFinite
from weightcast.transfer.topology import Topology
from weightcast.transfer.verification import Verify

__all__ = ["CommitPolicy", "Order", "PairSpec", "UpdateRecord", "as_json"]

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


@dataclass(frozen=True, slots=True)
class Order:
    """What the ranks of an instance's communicator are to do next.

    `action` is "register" (describe yourself for `epoch`; for ranks without an engine API), "join" (fetch the part of
    `epoch` and join), "connected", "prepare" (check that the layout still holds, then report ready), "run" (transfer
    `version`; of `layers` alone if there are any), "end" (the update to `version` is over: committed or not, and why;
    without a version, what was begun of it is), "failed" (connecting is), "left" (the instance is no longer one of the
    pair). `version` of "register", "join" and "connected" is that of the update that they belong to, None outside of
    one. `trainer` is the generation of the trainer for which the connect or update began.
    """

    action: str
    epoch: int
    version: int | None = None
    committed: bool = False
    reason: str = ""
    layers: tuple[int, ...] | None = None
    trainer: int = 0


def as_json(order: Order) -> dict[str, Any]:
    """An order's fields by name."""
    return {name: getattr(order, name) for name in order.__slots__}


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
