"""The two sides of a weight update as the rest of weightcast sees them.

A *source* is one trainer rank, a *sink* one inference rank. Adapters implement these protocols; the planner, the
gateway and the executor know nothing else about a framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from weightcast.transfer.errors import DescribeError, InputError
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.layout.placement import RankPlacement

__all__ = ["Settles", "Sink", "Source", "check_sink", "check_source", "layout_of"]


@runtime_checkable
class Source(Protocol):
    """One trainer rank."""

    def describe(self) -> RankLayout:
        """Describes everything this rank holds, as regions of logical tensors over its live memory.

        Called on every trainer rank when the pair connects and again before each update, outside of forward and
        backward. Must not communicate: ranks call it at different times. Raises DescribeError for what it cannot
        describe.
        """
        ...


@runtime_checkable
class Sink(Protocol):
    """One inference rank.

    A sink may also have `settle() -> None`, see `Settles`.
    """

    def describe(self) -> RankLayout:
        """Describes every byte of every parameter of this rank: regions over its live memory, all slots of all
        replicas.

        Called when the instance connects. Must not communicate and must not change any weight. Raises DescribeError for
        what it cannot describe and AgreementError where engine and placement contradict each other.
        """
        ...

    def placement(self) -> RankPlacement | None:
        """The expert placement as the engine has it now; None for a model without experts.

        Read before and after each update; it has to be cheap and to see a rebalance that happened in place.
        """
        ...


@runtime_checkable
class Settles(Protocol):
    """A sink whose engine keeps tensors computed from parameters, which nobody else brings up to date."""

    def settle(self) -> None:
        """Computes the derived tensors anew, in place.

        Called after every update, and again after a resend: all parameters are written, the engine has ended its
        session, and nothing is digested yet. Must not communicate. An error that it raises fails the update.
        """
        ...


def check_source(source: object) -> None:
    """Raises InputError for what is no `Source`, and names the one to take."""
    _check_side("source", source, ("describe",))


def check_sink(sink: object) -> None:
    """Raises InputError for what is no `Sink`, and names the one to take."""
    _check_side("sink", sink, ("describe", "placement"))


def layout_of(side: Source) -> RankLayout:
    """The layout that a source or sink describes. Raises DescribeError where it gives something else."""
    layout = side.describe()
    if not isinstance(layout, RankLayout):
        raise DescribeError(
            f"describe() of {type(side).__name__} gave {type(layout).__name__}, expected a RankLayout: "
            "let it return LayoutBuilder's build()"
        )
    return layout


def _check_side(side: str, value: object, methods: tuple[str, ...]) -> None:
    kind = type(value).__name__
    if isinstance(value, type):
        raise InputError(f"{side} is the class {value.__name__}, expected an object of it: {value.__name__}(...)")
    absent_methods = [f"{method}()" for method in methods if not callable(getattr(value, method, None))]
    if not absent_methods:
        return
    if callable(getattr(value, "named_parameters", None)):
        remedy = f"it is a model: give FsdpSource(model){', or MegatronSource(model, ...)' if side == 'source' else ''}"
    elif isinstance(value, Mapping):
        remedy = "of named tensors a source is PlainSource(tensors), a sink is in examples/own_engine.py"
    else:
        remedy = f"see weightcast.{side.capitalize()}"
    raise InputError(f"{side} is of type {kind}, which has no {' and no '.join(absent_methods)}; {remedy}")
