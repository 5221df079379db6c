"""The state machine of an instance within a pair. Pure: a record and an event in, the next record out.

    registering --plan--> planned --connect--> connected --prepare--> preparing --transfer--> transferring
                                                   ^                      |                        |
                                                   |<-----cancel----------+                     verify
                                                   |                                               v
                                                   |<---------------------commit--------------- verifying

From every phase `leave` leads to *left*, and from all but left `fail` leads to *failed*. `rejoin` starts a new epoch at
registering, from failed, left or connected. `resend` does so from transferring, when a placement changed under the
transfer.

`fenced` is a flag of its own. A new instance is fenced. `transfer` sets the flag, because from then on bytes of two
versions may lie side by side, and only `commit` clears it. So an instance that fails while preparing still has its old
version, and serves it when it connects again; one that fails later does not. `distrust` sets the flag too, when a rank
turns out to be another process than before, or to hold something else than the record says. Versions only grow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from weightcast.gateway.versions import Version
from weightcast.transfer.errors import PairStateError, VersionError

__all__ = ["Event", "InstanceRecord", "Phase", "advance", "check_version"]


class Phase(StrEnum):
    """Phases of an instance within a pair."""

    REGISTERING = "registering"
    PLANNED = "planned"
    CONNECTED = "connected"
    PREPARING = "preparing"
    TRANSFERRING = "transferring"
    VERIFYING = "verifying"
    FAILED = "failed"
    LEFT = "left"


class Event(StrEnum):
    """Events that move an instance to another phase, or change its fence."""

    PLAN = "plan"
    CONNECT = "connect"
    PREPARE = "prepare"
    CANCEL = "cancel"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMIT = "commit"
    FAIL = "fail"
    LEAVE = "leave"
    REJOIN = "rejoin"
    DISTRUST = "distrust"
    RESEND = "resend"


_NEXT: dict[tuple[Phase, Event], Phase] = {
    (Phase.REGISTERING, Event.PLAN): Phase.PLANNED,
    (Phase.PLANNED, Event.CONNECT): Phase.CONNECTED,
    (Phase.CONNECTED, Event.PREPARE): Phase.PREPARING,
    (Phase.PREPARING, Event.CANCEL): Phase.CONNECTED,
    (Phase.PREPARING, Event.TRANSFER): Phase.TRANSFERRING,
    (Phase.TRANSFERRING, Event.VERIFY): Phase.VERIFYING,
    (Phase.VERIFYING, Event.COMMIT): Phase.CONNECTED,
    (Phase.FAILED, Event.REJOIN): Phase.REGISTERING,
    (Phase.LEFT, Event.REJOIN): Phase.REGISTERING,
    (Phase.CONNECTED, Event.REJOIN): Phase.REGISTERING,
    (Phase.TRANSFERRING, Event.RESEND): Phase.REGISTERING,
    **{(phase, Event.FAIL): Phase.FAILED for phase in Phase if phase is not Phase.LEFT},
    **{(phase, Event.LEAVE): Phase.LEFT for phase in Phase},
    **{(phase, Event.DISTRUST): phase for phase in Phase},
}


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """State of one instance.

    `version` is the last committed one, None before the first commit; `target` is the one that the update under way is
    to reach. `epoch` counts how often the instance connected. `reason` says why it failed or is distrusted. `history`
    has the last 1000 events, oldest first, as (event, phase reached, detail).
    """

    name: str
    phase: Phase = Phase.REGISTERING
    epoch: int = 1
    version: Version | None = None
    target: Version | None = None
    fenced: bool = True
    reason: str = ""
    history: tuple[tuple[str, str, str], ...] = ()

    @property
    def serves(self) -> bool:
        """True if the instance may answer with a version of this pair."""
        return self.version is not None and not self.fenced and self.phase not in (Phase.FAILED, Phase.LEFT)


def check_version(record: InstanceRecord, version: Version) -> None:
    """Raises VersionError with both numbers unless `version` is newer than what is committed."""
    if record.version is not None and version <= record.version:
        raise VersionError(f"instance {record.name} has version {record.version}; {version.refusal}")


def advance(
    record: InstanceRecord, event: Event, *, version: Version | None = None, reason: str = ""
) -> InstanceRecord:
    """The record after `event`.

    `version` goes with PREPARE and COMMIT, `reason` with FAIL, CANCEL, DISTRUST, RESEND and LEAVE. A COMMIT of
    the version that is committed already changes nothing.

    Raises PairStateError for an event that is illegal in the record's phase. Raises VersionError for a version that
    does not grow, or is not the one being transferred.
    """
    if event is Event.COMMIT and record.phase is Phase.CONNECTED and version is not None and version == record.version:
        return record
    phase = _NEXT.get((record.phase, event))
    if phase is None:
        raise PairStateError(f"instance {record.name} is {record.phase}: {event} is not possible now")
    changes: dict[str, object] = {}
    if event is Event.PREPARE:
        if version is None:
            raise VersionError(f"instance {record.name}: an update needs a version")
        check_version(record, version)
        changes = {"target": version, "reason": ""}
    elif event is Event.TRANSFER:
        changes = {"fenced": True}
    elif event is Event.DISTRUST:
        changes = {"fenced": True, "reason": reason}
    elif event is Event.COMMIT:
        if version != record.target:
            raise VersionError(f"instance {record.name} is being updated to {record.target}, not to {version}")
        changes = {"version": version, "target": None, "fenced": False, "reason": ""}
    elif event in (Event.REJOIN, Event.RESEND):
        changes = {"epoch": record.epoch + 1, "target": None}
    elif event is Event.LEAVE:
        changes = {"target": None, **({"reason": reason} if reason else {})}
    elif event in (Event.FAIL, Event.CANCEL):
        changes = {"target": None, "reason": reason}
    detail = reason or (str(version) if version is not None else "")
    history = (*record.history[-999:], (str(event), str(phase), detail))
    return replace(record, phase=phase, history=history, **changes)  # type: ignore[arg-type]
