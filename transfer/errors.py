"""Every error weightcast raises on purpose; `WeightcastError` is the root of their tree.

A message names tensor, rank, instance, what was expected, what was found, and what to do. It is one line, so that it
survives a trip through an engine's API unharmed.
"""

from __future__ import annotations

from typing import ClassVar


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


class AddressError(ControlError):
    """An address that cannot be listened on, or at which others do not reach a rank."""


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


def error_named(name: object) -> type[WeightcastError] | None:
    """The class of that name, as messages between processes carry it; None for a name that is none."""
    kind = globals().get(name) if isinstance(name, str) else None
    return kind if isinstance(kind, type) and issubclass(kind, WeightcastError) else None
