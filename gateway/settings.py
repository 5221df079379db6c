"""Waits, beats and counts of the control plane: one record with a default for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from weightcast.transfer.documents import Record

__all__ = ["Settings"]

_MOST = 1000
"""Limit of a count: a greater one is a mistake, and a time without end."""


def _whole(value: object) -> object:
    """A count as JSON may write it: 2.0 for 2."""
    return int(value) if isinstance(value, float) and value in range(_MOST + 1) else value


Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False, description="a positive number of seconds")]
Count = Annotated[
    int, Field(strict=True, ge=0, le=_MOST, description=f"a whole number from 0 to {_MOST}"), BeforeValidator(_whole)
]


@dataclass(frozen=True, slots=True)
class Settings(Record):
    """Settings of a pair. Seconds, but for the counts at the end.

    Each step has a wait, after which the gateway gives the update up. `offer` is from the first trainer rank's offer to
    the last one's. `register` is for reports, `join` for communicators, `prepare` for ranks to check their layouts,
    `transfer` for the transfer. `verify` is for digests, those before the transfer and those after it. `engine` is for
    one call to an engine, `clean_up` for each call after a failure.

    `update` is for all of that together: from the first offer until the update is decided, whatever was tried again.
    Only the calls after a failure come on top. The error at its end names who was missing.

    Ranks beat every `heartbeat`. One that was not heard from for `silence` is missing: its instance no longer serves,
    and nobody waits for it any longer. Ranks try for `outage` to reach a gateway that was there before, whether it
    refuses connections or does not answer. Then their calls raise, but for an engine's `serve`. An instance that is
    dead for `evict_after` leaves its pair until it lives again.

    `replans` is how often an update starts anew because a layout changed before a byte was written. `resends` is how
    often layers are sent again because their placement changed while they were sent. `retries` is how often all is sent
    again because a connection was lost.
    """

    offer: Seconds = 600.0
    register: Seconds = 300.0
    join: Seconds = 120.0
    prepare: Seconds = 60.0
    transfer: Seconds = 600.0
    verify: Seconds = 300.0
    engine: Seconds = 600.0
    clean_up: Seconds = 30.0
    update: Seconds = 900.0
    heartbeat: Seconds = 5.0
    silence: Seconds = 30.0
    outage: Seconds = 30.0
    evict_after: Seconds = 600.0
    replans: Count = 2
    resends: Count = 3
    retries: Count = 1

    def __post_init__(self) -> None:
        if self.silence <= self.heartbeat:
            raise ValueError(
                f"silence is {self.silence}, expected more than the {self.heartbeat} of heartbeat; "
                "else every rank is missing between two beats"
            )

    @property
    def longest(self) -> float:
        """Seconds within which the gateway has decided a connect or an update, whatever happens."""
        return max(self.update, self.register + self.join + self.engine) + 5 * self.clean_up
