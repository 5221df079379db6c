"""Waits, beats and counts of the control plane: one record with a default for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from weightcast.transfer.errors import InputError

__all__ = ["Settings"]

_COUNTS = ("replans", "resends", "retries")
_MOST = 1000
"""Limit of a count: a greater one is a mistake, and a time without end."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a pair. Seconds, but for the counts at the end.

    Each step has a wait, after which the gateway gives the update up. `offer` is from the first trainer rank's offer to
    the last one's. `register` is for reports, `join` for communicators, `prepare` for ranks to check their layouts,
    `transfer` for the transfer. `verify` is for digests, those before the transfer and those after it. `engine` is for
    one call to an engine, `clean_up` for each call after a failure.

    `update` is for all of that together: from the first offer until the update is decided, whatever was tried again.
    Only the calls after a failure come on top. The error at its end names who was missing.

    Ranks beat every `heartbeat`. One that was not heard from for `silence` is missing: its instance no longer serves,
    and nobody waits for it any longer. Ranks try for `outage` to reach a gateway that was there before, whether it
    refuses connections or does not answer. Then their calls raise.

    `replans` is how often an update starts anew because a layout changed before a byte was written. `resends` is how
    often layers are sent again because their placement changed while they were sent. `retries` is how often all is sent
    again because a connection was lost.
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
        """The defaults but for `values`. Raises InputError for unknown names, infinite values, and counts that are too
        great or no whole numbers.
        """
        names = [field.name for field in fields(cls)]
        if unknown_names := sorted(set(values) - set(names)):
            raise InputError(f"settings {', '.join(unknown_names)} are not known; known are {', '.join(names)}")
        if infinite_names := [name for name, value in values.items() if not math.isfinite(value)]:
            raise InputError(f"setting {infinite_names[0]} is {values[infinite_names[0]]}, expected a finite number")
        if excess_names := [name for name in _COUNTS if values.get(name, 0) > _MOST]:
            raise InputError(f"setting {excess_names[0]} is {values[excess_names[0]]}, expected at most {_MOST}")
        counts = {name: int(values[name]) for name in _COUNTS if name in values}
        if fraction_names := [name for name, count in counts.items() if count != values[name]]:
            raise InputError(f"setting {fraction_names[0]} is {values[fraction_names[0]]}, expected a whole number")
        return cls(**{**values, **counts})  # type: ignore[arg-type]

    @property
    def longest(self) -> float:
        """Seconds within which the gateway has decided a connect or an update, whatever happens."""
        return max(self.update, self.register + self.join + self.engine) + 5 * self.clean_up
