"""Every error weightcast raises on purpose.

    WeightcastError
    ├── InputError                    what was handed in is malformed (exit status 2)
    │   ├── LayoutError               a region, table, report or bundle contradicts itself
    │   ├── WireError                 bytes that are no message of ours, or too large
    │   ├── PlacementError            an expert placement contradicts itself
    │   │   └── PlacementIndexError   a layer, expert, slot or rank out of range (also an IndexError)
    │   └── AbsentError               a pair or an instance that the gateway does not know
    ├── CoverageError                 something is held by no rank (exit status 3)
    ├── DescribeError                 an adapter cannot describe what a rank holds
    │   └── AgreementError            engine and placement contradict each other
    ├── PlanError                     a plan breaks one of its invariants
    ├── UpdateError                   an update did not commit (exit status 4)
    │   ├── StalePlanError            the layout or placement moved since the plan was made
    │   ├── TransferError             bytes could not be moved
    │   │   └── DeadlineError         a wait ran past its deadline; names who is missing
    │   ├── DigestMismatchError       what lies in memory is not what was sent
    │   ├── WeightsChangedError       the trainer's weights changed while they were sent
    │   ├── NonFiniteError            the trainer holds values, or a cast makes some, that an instance refuses
    │   └── EngineError               an engine's own API refused a step
    └── ControlError                  a request the control plane refuses
        ├── PairStateError            an event that is illegal in the pair's state
        ├── VersionError              a version that does not grow
        ├── DisplacedError            a process that was replaced speaks all the same; names both
        ├── UnregisteredError         a trainer rank that this start of the gateway does not know: register first
        └── AuthorizationError        a missing or wrong token

A message names tensor, rank, instance, what was expected, what was found, and what to do. It is one line, so that it
survives a trip through an engine's API unharmed.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AbsentError",
    "AgreementError",
    "AuthorizationError",
    "ControlError",
    "CoverageError",
    "DeadlineError",
    "DescribeError",
    "DigestMismatchError",
    "DisplacedError",
    "EngineError",
    "InputError",
    "LayoutError",
    "NonFiniteError",
    "PairStateError",
    "PlacementError",
    "PlacementIndexError",
    "PlanError",
    "StalePlanError",
    "TransferError",
    "UnregisteredError",
    "UpdateError",
    "VersionError",
    "WeightcastError",
    "WeightsChangedError",
    "WireError",
]


class WeightcastError(Exception):
    """Root of the tree. `exit_status` is what the command line returns for it."""

    exit_status: ClassVar[int] = 4


class InputError(WeightcastError):
    """Malformed input; nothing was changed."""

    exit_status = 2


class LayoutError(InputError):
    """A region, table, report or bundle contradicts itself."""


class WireError(InputError):
    """Bytes that are not a message of ours, of another version, or above the size limit."""


class PlacementError(InputError):
    """An expert placement contradicts itself."""


class PlacementIndexError(PlacementError, IndexError):
    """A layer, expert, slot or rank outside its range; negative numbers never count from the end."""


class AbsentError(InputError):
    """A pair or an instance that the gateway does not know, or no longer."""


class CoverageError(WeightcastError):
    """Part of a logical tensor is held by no rank."""

    exit_status = 3


class DescribeError(WeightcastError):
    """An adapter cannot say what a rank holds, and does not guess."""

    exit_status = 3


class AgreementError(DescribeError):
    """The engine's loader and the placement give different answers; both are named."""


class PlanError(WeightcastError):
    """A plan breaks one of its invariants."""


class UpdateError(WeightcastError):
    """An update did not commit; the message says what is fenced."""


class StalePlanError(UpdateError):
    """Layout or placement changed since the plan was made; connect again to plan anew."""


class TransferError(UpdateError):
    """Bytes could not be moved."""


class DeadlineError(TransferError):
    """A wait ran past its deadline; the message names who is missing."""


class DigestMismatchError(UpdateError):
    """The digest of what lies in memory is not the digest of what was sent."""


class WeightsChangedError(UpdateError):
    """The trainer's weights changed during update(); the message names tensors and ranks."""


class NonFiniteError(UpdateError):
    """Values that are infinite or no number, or will be by a cast; nothing was written, the old version is served."""


class EngineError(UpdateError):
    """An engine's own API refused a step, or answered nonsense."""


class ControlError(WeightcastError):
    """A request that the control plane refuses."""


class PairStateError(ControlError):
    """An event that is illegal in the present state of the pair."""


class VersionError(ControlError):
    """A version that is not greater than the one committed."""


class DisplacedError(ControlError):
    """A process that another one has replaced is believed no more; the message names both."""


class UnregisteredError(ControlError):
    """A rank, or a process of it, that has not registered since the gateway was started, or since its pair was made."""


class AuthorizationError(ControlError):
    """A missing or wrong bearer token."""
