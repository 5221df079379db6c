"""Links of a cluster, hosts of ranks, and times of bytes: the cost model of relays and `weightcast plan --simulate`.

Bytes between two ranks of one host go over NVLink. Others leave by the NIC of one rank and arrive by that of another.
All links work at once and in both directions, and everything overlaps. So a rank takes as long as its busiest link. An
update takes as long as its busiest rank, plus a latency for every hop of the longest chain of relays.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import AfterValidator, Field, StrictBool
from pydantic_core import PydanticCustomError

from weightcast.transfer.boxes.arrays import FloatArray, IntArray
from weightcast.transfer.documents import Record, unique_keys
from weightcast.transfer.errors import LayoutError

__all__ = ["LINK_NAMES", "Hosts", "Link", "Topology", "link_bytes", "link_seconds", "read_topology"]

_LEAST_SPEED, _MOST_SPEED = 1e-6, 1e9
"""Gigabits a second that a link may have: a kilobit to an exabit."""


def _speed(value: float) -> float:
    if not (_LEAST_SPEED <= value <= _MOST_SPEED or value == math.inf):
        raise PydanticCustomError("speed", "out of range")
    return value


def _without_default(schema: dict[str, Any]) -> None:
    """Leaves the default out of a schema: JSON has no infinity."""
    schema.pop("default", None)


NicSpeed = Annotated[
    float, Field(strict=True, ge=_LEAST_SPEED, le=_MOST_SPEED, description="a number from 1e-06 to 1e+09")
]
Speed = Annotated[
    float,
    Field(strict=True, description="a number from 1e-06 to 1e+09, or inf", json_schema_extra=_without_default),
    AfterValidator(_speed),
]
Latency = Annotated[float, Field(strict=True, ge=0, le=1e9, description="a number from 0 to 1e+09")]
RanksPerHost = Annotated[int, Field(strict=True, ge=1, le=1 << 20, description="an integer from 1 to 1048576")]


class Link(IntEnum):
    """Links of a rank, in the order of the rows of `link_bytes`."""

    NIC_OUT = 0
    NIC_IN = 1
    NVLINK_OUT = 2
    NVLINK_IN = 3
    MEMORY = 4


LINK_NAMES = ("NIC out", "NIC in", "NVLink out", "NVLink in", "memory")


@dataclass(frozen=True, slots=True)
class Topology(Record):
    """Speeds of links, in gigabits (10^9 bits) a second, each way; memory reads and writes share theirs.

    A NIC belongs to a rank, or with `nic_per_host` to a host, whose ranks share it. `ranks_per_host` says how ranks are
    packed on hosts where the layouts name none. With `colocated` the trainer's ranks and the instances' fill the same
    hosts. `latency_us` is added for each hop. `between_instances` allows relays from one instance to another.
    """

    refusal: ClassVar[type[LayoutError]] = LayoutError

    nic_gbps: NicSpeed
    nvlink_gbps: Speed = math.inf
    memory_gbps: Speed = math.inf
    latency_us: Latency = 0.0
    nic_per_host: StrictBool = False
    ranks_per_host: RanksPerHost | None = None
    colocated: StrictBool = False
    between_instances: StrictBool = True

    @property
    def document(self) -> dict[str, float | None]:
        """The fields that differ from their defaults, for JSON."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}


def read_topology(data: bytes) -> Topology:
    """Decodes a topology, JSON if it begins with a brace, else TOML. Raises LayoutError.

    Its keys are the fields of Topology.
    """
    try:
        text = data.decode()
        json_text = text.lstrip()[:1] == "{"
        document: Any = json.loads(text, object_pairs_hook=unique_keys) if json_text else tomllib.loads(text)
    except LayoutError as error:
        raise LayoutError(f"topology: {error}") from None
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"the topology is neither JSON nor TOML: {' '.join(str(error).split()):.160}") from None
    return Topology.given(document)


@dataclass(frozen=True, slots=True)
class Hosts:
    """The host of every rank of a pair: `host` (ranks,), equal for ranks on one machine.

    The trainer's ranks come first, then those of each instance; `first` (instances + 2,) says where each side begins.
    """

    host: IntArray
    first: IntArray

    @classmethod
    def by_name(cls, trainer: Sequence[str], instances: Sequence[Sequence[str]]) -> Hosts:
        """Makes hosts from host names by rank; a rank whose name is empty is alone on a host."""
        numbers: dict[str, int] = {}
        sides = [trainer, *instances]
        names = [name for side in sides for name in side]
        host = [numbers.setdefault(name, len(numbers)) if name else len(names) + i for i, name in enumerate(names)]
        return cls(np.array(host, dtype=np.int64), _first([len(side) for side in sides]))

    @classmethod
    def packed(cls, worlds: Sequence[int], ranks_per_host: int, *, colocated: bool = False) -> Hosts:
        """Fills hosts with `ranks_per_host` ranks each. `worlds` are the ranks of the trainer and of each instance.

        The trainer fills hosts of its own, or with `colocated` those of the instances. The instances' ranks follow one
        another.
        """
        trainer, ranks = worlds[0], sum(worlds[1:])
        hosts = np.arange(trainer, dtype=np.int64) // ranks_per_host
        shift = 0 if colocated else -(-trainer // ranks_per_host)
        return cls(np.concatenate([hosts, np.arange(ranks, dtype=np.int64) // ranks_per_host + shift]), _first(worlds))

    @classmethod
    def of(
        cls, trainer: Sequence[str], instances: Sequence[Sequence[str]], topology: Topology | None = None
    ) -> Hosts | None:
        """Makes hosts by name where the layouts name any, else as the topology packs ranks; None without either."""
        sides = [trainer, *instances]
        if any(name for side in sides for name in side):
            return cls.by_name(trainer, instances)
        if topology is None:
            return None
        return cls.packed([len(side) for side in sides], topology.ranks_per_host or 1, colocated=topology.colocated)

    def __len__(self) -> int:
        return int(self.host.shape[0])

    def number(self, party: IntArray | int, rank: IntArray) -> IntArray:
        """The number of a rank among all of the pair; party 0 is the trainer."""
        return np.asarray(self.first[party] + rank)

    def require(self, worlds: Sequence[int]) -> None:
        """Raises LayoutError if these are not the hosts of a pair with so many ranks a side."""
        if not np.array_equal(self.first, _first(worlds)):
            raise LayoutError(
                f"hosts are given for {np.diff(self.first).tolist()} ranks (trainer, instances), but the sides have "
                f"{list(worlds)}"
            )


def _first(worlds: Sequence[int]) -> IntArray:
    return np.append(0, np.cumsum(np.array(worlds, dtype=np.int64)))


def link_bytes(hosts: Hosts, source: IntArray, target: IntArray, nbytes: IntArray) -> FloatArray:
    """(5, ranks) bytes over each link of each rank when flow i moves `nbytes[i]` from rank `source[i]` to `target[i]`.

    A flow from a rank to itself is a copy, which reads and writes its memory.
    """
    local = hosts.host[source] == hosts.host[target]
    copies = source == target
    loads = np.zeros((len(Link), len(hosts)))

    def count(rank: IntArray, some: np.ndarray) -> FloatArray:
        return np.bincount(rank[some], weights=nbytes[some], minlength=len(hosts)).astype(np.float64)

    loads[Link.NIC_OUT], loads[Link.NIC_IN] = count(source, ~local), count(target, ~local)
    loads[Link.NVLINK_OUT], loads[Link.NVLINK_IN] = count(source, local & ~copies), count(target, local & ~copies)
    loads[Link.MEMORY] = loads[:4].sum(axis=0) + 2 * count(source, copies)
    return loads


def link_seconds(topology: Topology, hosts: Hosts, loads: FloatArray) -> FloatArray:
    """(5, ranks) seconds for which each link of each rank is busy."""
    totals = loads
    if topology.nic_per_host:
        totals = loads.copy()
        _, host = np.unique(hosts.host, return_inverse=True)
        for link in (Link.NIC_OUT, Link.NIC_IN):
            totals[link] = np.bincount(host, weights=loads[link])[host]
    speed = np.array([topology.nic_gbps] * 2 + [topology.nvlink_gbps] * 2 + [topology.memory_gbps])
    seconds: FloatArray = totals * 8e-9 / speed[:, None]
    return seconds
