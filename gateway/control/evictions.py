"""Instances that are dead: engines that are not reached are probed, and who stays dead leaves its pair by itself.

It comes back by itself too. The clocks are those of the beats and of the engine's own API. So they go on while the
trainer is dead, and stand still with the gateway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from weightcast.gateway.control.instance import Instance
from weightcast.gateway.control.pair import Pair
from weightcast.transfer.errors import ControlError

__all__ = ["Evictions"]

log = logging.getLogger("weightcast.gateway")

LOOK_SECONDS = 0.5
"""Seconds between two looks at all instances."""
_FIRST, _LAST = 2.0, 30.0
"""Seconds between two probes of an engine: at first, and at most."""


class Evictions:
    """The evictions of all pairs of a gateway.

    `changing` is held while the instances of a pair change, and `spawn` starts a task that ends with the gateway.
    """

    def __init__(
        self,
        pairs: Mapping[str, Pair],
        changing: asyncio.Lock,
        spawn: Callable[[Coroutine[Any, Any, object]], asyncio.Task[object]],
    ) -> None:
        self._pairs, self._changing, self._spawn = pairs, changing, spawn
        self._probed: set[Instance] = set()

    async def tend(self) -> None:
        """Evicts, probes and brings back, for as long as the gateway lives."""
        while True:
            start = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
            if time.monotonic() > start + 2 * LOOK_SECONDS:
                continue  # this process stood still: first all clocks are put right
            for pair in tuple(self._pairs.values()):
                for instance in tuple(pair.instances.values()):
                    await self._look(pair, instance)

    async def _look(self, pair: Pair, instance: Instance) -> None:
        if instance not in self._probed and self._wants_probe(pair, instance):
            self._probed.add(instance)
            self._spawn(self._probe(pair, instance))
        if instance.present and time.monotonic() - instance.dead_since >= instance.settings.evict_after:
            await self._evict(pair, instance)
        elif instance.spec.kind == "worker" and _has_left(instance) and instance.heard_whole:
            await self._bring_back(pair, instance)

    def _wants_probe(self, pair: Pair, instance: Instance) -> bool:
        """True for an engine with an API that is not reached, or whose ranks are silent."""
        is_missed = instance.driver.absence is not None or bool(instance.silent) or bool(instance.evicted)
        return is_missed and instance.spec.kind != "worker" and instance.belongs and self._is_there(pair, instance)

    def _is_there(self, pair: Pair, instance: Instance) -> bool:
        """True unless the pair was deleted, or the instance replaced by another one of its name."""
        return self._pairs.get(pair.spec.name) is pair and pair.instances.get(instance.name) is instance

    async def _probe(self, pair: Pair, instance: Instance) -> None:
        """Asks an engine ever less often whether it is there, for as long as it is missed."""
        seconds = _FIRST
        try:
            while self._wants_probe(pair, instance):
                answers = await instance.driver.probe()
                if answers and _has_left(instance):
                    await self._bring_back(pair, instance)
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, _LAST)
        finally:
            self._probed.discard(instance)

    @asynccontextmanager
    async def _change(self, pair: Pair, instance: Instance) -> AsyncIterator[dict[str, str]]:
        """Changes the place of an instance in its pair. If that cannot be written down, another look follows."""
        labels = {"pair": pair.spec.name, "instance": instance.name}
        try:
            async with self._changing:
                yield labels
        except ControlError as error:
            log.error("%s", error, extra=labels)

    async def _evict(self, pair: Pair, instance: Instance) -> None:
        async with self._change(pair, instance) as labels:
            if instance.present and instance.death is not None:
                evicted = f"evicted: {instance.obituary()}"
                await pair.leave(instance.name, evicted)
                text = "instance %s of pair %s was %s; it comes back when it is heard from"
                log.warning(text, instance.name, pair.spec.name, evicted, extra=labels)

    async def _bring_back(self, pair: Pair, instance: Instance) -> None:
        async with self._change(pair, instance) as labels:
            if instance.evicted and self._is_there(pair, instance):
                await pair.bring_back(instance)
                text = "instance %s is back in pair %s; the next update brings it up"
                log.warning(text, instance.name, pair.spec.name, extra=labels)


def _has_left(instance: Instance) -> bool:
    """True for an instance that was evicted, once nothing holds it any longer."""
    return bool(instance.evicted) and not instance.leaving
