"""JSON bodies of ranks' requests, with strict types. Those of operators are records: PairOptions and EngineSpec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, StrictBool

from weightcast.gateway.versions import Version
from weightcast.transfer.documents import Record

__all__ = ["MAX_IDENTITY", "BeatBody", "FailureBody", "MovedBody", "OfferBody", "ReadyBody", "RendezvousBody"]

MAX_IDENTITY = 160
"""Characters of what stands for a process: host, number and a random part."""
MAX_LAYERS = 10_000
Layer = Annotated[int, Field(strict=True, ge=0, lt=MAX_LAYERS)]
Number = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


@dataclass(frozen=True, slots=True)
class RendezvousBody(Record):
    """Where the first member of a communicator listens."""

    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(strict=True, ge=1, le=65535)]


@dataclass(frozen=True, slots=True)
class FailureBody(Record):
    """What stopped a rank."""

    error: Annotated[str, Field(max_length=64)]
    message: Annotated[str, Field(max_length=10_000)]


@dataclass(frozen=True, slots=True)
class ReadyBody(Record):
    """Outcome of a rank's check before the transfer.

    `stale` is empty when nothing changed; `layers` are those whose placement did, null when more changed than that.
    """

    stale: Annotated[str, Field(max_length=10_000)] = ""
    layers: Annotated[list[Layer], Field(max_length=MAX_LAYERS)] | None = None


@dataclass(frozen=True, slots=True)
class MovedBody(Record):
    """Layers whose placement changed during the transfer of `version`."""

    version: Version
    layers: Annotated[list[Layer], Field(min_length=1, max_length=MAX_LAYERS)]


@dataclass(frozen=True, slots=True)
class BeatBody(Record):
    """A rank lives; `identity` stands for its process, and so for its memory."""

    identity: Annotated[str, Field(max_length=MAX_IDENTITY)] = ""


@dataclass(frozen=True, slots=True)
class OfferBody(Record):
    """A trainer rank's readiness to send a version, in a new lineage with `restart`."""

    version: Number
    restart: StrictBool = False
