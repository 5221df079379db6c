"""Instances of one update that wait for one another, so that all of them commit a version or none does."""

from __future__ import annotations

from collections.abc import Sequence

from weightcast.gateway.control.instance import Instance
from weightcast.transfer.errors import NonFiniteError, UpdateError, WeightcastError

__all__ = ["Agreement"]


class Agreement:
    """The instances that go together; with none, each goes its own way and nobody waits."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self._instances = tuple(instances)
        self._reached: dict[str, set[str]] = {}
        self._committer = ""
        self._broken = ""
        self._kind: type[UpdateError] = UpdateError

    async def reach(self, instance: Instance, stage: str, seconds: float) -> None:
        """Returns when all instances have reached `stage`.

        Raises UpdateError naming the one that gave up, NonFiniteError where values were why, or what stopped this one
        in the meantime.
        """
        here = await self._arrive(instance, stage)

        def decided() -> bool:
            return self._all(here) or bool(self._broken) or instance.failure is not None or bool(instance.silent)

        await instance.wait(decided, seconds, lambda: self._missing(stage, here))
        if self._all(here):
            return  # what happens to one of them from here on is too late to stop the others
        if self._broken:
            raise self._kind(f"instance {instance.name}: all instances commit together, and {self._broken}")
        await instance.until(lambda: False, seconds, lambda: self._missing(stage, here))

    def committing(self, instance: Instance) -> tuple[Instance, ...]:
        """The instances that `instance` commits: itself; or all for the first that asks, and none for the others."""
        if not self._instances:
            return (instance,)
        if self._committer:
            return ()
        self._committer = instance.name
        return self._instances

    async def committed(self, instance: Instance, seconds: float) -> None:
        """Returns when the one that commits has. Raises UpdateError when it could not."""
        if not self._instances:
            return
        here = await self._arrive(instance, "committed")
        await instance.wait(
            lambda: self._committer in here or bool(self._broken), seconds, lambda: self._missing("committed", here)
        )
        if self._committer not in here:
            raise UpdateError(f"instance {instance.name}: all instances commit together, and {self._broken}")

    def give_up(self, instance: Instance, error: WeightcastError) -> None:
        """This instance does not go on, so none does."""
        if not self._broken:
            self._broken = f"{instance.name} did not: {error}"
            self._kind = NonFiniteError if isinstance(error, NonFiniteError) else UpdateError
            for other in self._instances:
                other.notify()

    async def _arrive(self, instance: Instance, stage: str) -> set[str]:
        here = self._reached.setdefault(stage, set())
        here.add(instance.name)
        for other in self._instances:
            other.notify()
        return here

    def _all(self, here: set[str]) -> bool:
        return all(one.name in here for one in self._instances)

    def _missing(self, stage: str, here: set[str]) -> str:
        late = ", ".join(one.name for one in self._instances if one.name not in here)
        return f"instances {late} were not {stage}"
