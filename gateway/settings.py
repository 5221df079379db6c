"""Every number that the control plane waits for, beats by or counts up to: one record, each with a default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from weightcast.transfer.errors import InputError

__all__ = ["Settings"]

_COUNTS = ("replans", "resends", "retries")
_MOST = 1000
"""Of a count: more is a mistake, and a time without end."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a pair. Seconds, but for the counts at the end.

    How long the gateway waits for each step before it gives an update up: `offer` from the first trainer rank's offer
    to the last one's, `register` for reports, `join` for communicators, `prepare` for ranks to check their layouts,
    `transfer`, `verify` for digests, those before the transfer and those after it, `engine` for one call to an engine,
    `clean_up` for each call after a failure.
    `update` is for all of that together: from the first offer until the update is decided, whatever was tried again;
    only the calls after a failure come on top. Who was missing when it is over is named.

    Ranks beat every `heartbeat`; one that was not heard from for `silence` is missing: its instance no longer serves,
    and nobody waits for it any longer. Ranks try to reach a gateway that was there before for `outage`, whether it
    refuses connections or does not answer: then their calls raise.

    `replans` is how often an update starts anew because a layout changed before a byte was written, `resends` how often
    layers are sent again because their placement changed while they were sent, `retries` how often all is sent again
    because a connection was lost.
    """

    offer: float = 600.0
    register: float = 300.0
    join: float = 120.0
    prepare: float = 60.0
    transfer: float = 600.0
    verify: float = 300.0
    engine: float = 600.0
    clean_up: float = 30.0
    update: float = 900.0
    heartbeat: float = 5.0
    silence: float = 30.0
    outage: float = 30.0
    replans: int = 2
    resends: int = 3
    retries: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name in _COUNTS:
                if value < 0:
                    raise InputError(f"setting {name} is {value}, expected 0 or more")
            elif not (math.isfinite(value) and value > 0):
                raise InputError(f"setting {name} is {value}, expected a positive number of seconds")
        if self.silence <= self.heartbeat:
            raise InputError(
                f"setting silence is {self.silence}, expected more than the {self.heartbeat} of heartbeat; "
                "else every rank is missing between two beats"
            )

    @classmethod
    def given(cls, values: Mapping[str, float]) -> Settings:
        """The defaults but for `values`. Raises InputError for names there are none of and counts that are no whole
        numbers.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise InputError(f"settings {', '.join(unknown)} are not known; known are {', '.join(known)}")
        if endless := [name for name, value in values.items() if not math.isfinite(value)]:
            raise InputError(f"setting {endless[0]} is {values[endless[0]]}, expected a finite number")
        if many := [name for name in _COUNTS if values.get(name, 0) > _MOST]:
            raise InputError(f"setting {many[0]} is {values[many[0]]}, expected at most {_MOST}")
        counts = {name: int(values[name]) for name in _COUNTS if name in values}
        if wrong := [name for name, count in counts.items() if count != values[name]]:
            raise InputError(f"setting {wrong[0]} is {values[wrong[0]]}, expected a whole number")
        return cls(**{**values, **counts})  # type: ignore[arg-type]

    @property
    def longest(self) -> float:
        """Seconds within which the gateway has decided a connect or an update, whatever happens."""
        return max(self.update, self.register + self.join + self.engine) + 5 * self.clean_up
