"""Instances of one update that wait for one another, so that all of them commit a version or none does."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.gateway.control.instance import Instance
from weightcast.transfer.errors import NonFiniteError, UpdateError, WeightcastError

__all__ = ["Agreement"]


class Agreement:
    """The instances that commit together; one that is alone waits for nobody."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = tuple(instances)
        self._reached: dict[str, set[str]] = {}
        self._committer = ""
        self._broken = ""
        self._kind: type[UpdateError] = UpdateError

    async def reach(self, instance: Instance, stage: str, seconds: float) -> None:
        """Returns when all instances have reached `stage`.

        Raises UpdateError naming the one that gave up, or NonFiniteError if values were why. Raises what stopped
        `instance` itself in the meantime, and DeadlineError naming instances after `seconds`.
        """
        arrivals = await self._arrive(instance, stage)

        def decided() -> bool:
            return self._all(arrivals) or bool(self._broken) or instance.failure is not None or bool(instance.silent)

        await instance.wait(decided, seconds, lambda: self._missing(stage, arrivals))
        if self._all(arrivals):
            return  # a failure from here on is too late to stop the others
        if self._broken:
            raise self._kind(f"instance {instance.name}: all instances commit together, and {self._broken}")
        await instance.until(lambda: False, seconds, lambda: self._missing(stage, arrivals))

    def committing(self, instance: Instance) -> tuple[Instance, ...]:
        """The instances that `instance` commits: all for the first that asks, and none for the others."""
        if self._committer:
            return ()
        self._committer = instance.name
        return self._instances

    async def committed(self, instance: Instance, seconds: float) -> None:
        """Returns when the instance that commits for all has committed. Raises UpdateError if it could not."""
        arrivals = await self._arrive(instance, "committed")
        await instance.wait(
            lambda: self._committer in arrivals or bool(self._broken),
            seconds,
            lambda: self._missing("committed", arrivals),
        )
        if self._committer not in arrivals:
            raise UpdateError(f"instance {instance.name}: all instances commit together, and {self._broken}")

    def give_up(self, instance: Instance, error: WeightcastError) -> None:
        """Ends the agreement: this instance does not go on, so none does."""
        if not self._broken:
            self._broken = f"{instance.name} did not: {error}"
            self._kind = NonFiniteError if isinstance(error, NonFiniteError) else UpdateError
            for member in self._instances:
                member.notify()

    async def _arrive(self, instance: Instance, stage: str) -> set[str]:
        arrivals = self._reached.setdefault(stage, set())
        arrivals.add(instance.name)
        for member in self._instances:
            member.notify()
        return arrivals

    def _all(self, here: set[str]) -> bool:
        return all(member.name in here for member in self._instances)

    def _missing(self, stage: str, here: set[str]) -> str:
        names = ", ".join(member.name for member in self._instances if member.name not in here)
        return f"instances {names} were not {stage}"
