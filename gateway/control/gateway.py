"""The pairs of one gateway process, and the tasks that connect and update them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from weightcast.gateway.control import connect, update
from weightcast.gateway.control.evictions import Evictions
from weightcast.gateway.control.instance import Instance, Step
from weightcast.gateway.control.metrics import Metrics
from weightcast.gateway.control.pair import Pair
from weightcast.gateway.control.store import Store
from weightcast.gateway.control.waiting import Party
from weightcast.gateway.incarnations import Standing
from weightcast.gateway.records import EngineSpec, PairSpec, differences, wait_lines
from weightcast.gateway.versions import Version
from weightcast.transfer.errors import AbsentError, ControlError, InputError

__all__ = ["Gateway"]

log = logging.getLogger("weightcast.gateway")

MAX_PAIRS = 1000
"""Number of pairs that a gateway keeps in memory at most."""
_SHOWN = 8
"""Number of fields that a message names."""
LISTEN_SECONDS = 0.5
"""Seconds between two searches for ranks that are no longer heard from."""


class Gateway:
    """The pairs of one gateway process. `host`, as `http_url` takes it, and `port` are where engines reach it.

    Pairs of an earlier life are read from `store`. Raises ControlError for a damaged state file.
    """

    def __init__(self, host: str, port: int, store: Store | None = None) -> None:
        self.host = host
        self.port = port
        self.store = store or Store()
        self.pairs: dict[str, Pair] = {}
        self.metrics = Metrics(self.pairs)
        self._tasks: set[asyncio.Task[object]] = set()
        self._connecting: dict[str, tuple[int, asyncio.Task[object]]] = {}
        self._changing = asyncio.Lock()  # pairs and their instances, by operators: a change waits for the disk
        # Trainer processes of deleted pairs: one that was replaced is not believed again in a new pair of that name.
        self._processes: dict[str, list[Standing]] = {}
        for spec, instances in self.store.load():
            try:
                self.pairs[spec.name] = Pair.restored(spec, instances, self.store, self.metrics.updated)
            except InputError as error:
                self.store.close()
                raise self.store.damaged(error) from error

    async def open(self) -> None:
        """Starts to recover engines and to listen for heartbeats. Called once, in the event loop that serves."""
        for pair in self.pairs.values():
            self._spawn(_recover(pair))
        self._spawn(self._listen())
        self._spawn(Evictions(self.pairs, self._changing, self._spawn).tend())

    async def close(self) -> None:
        """Ends all tasks, then closes the drivers of engines and the store."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pair in self.pairs.values():
            await _close_drivers(pair)
        self.store.close()

    def pair(self, name: str) -> Pair:
        """The pair of that name. Raises AbsentError naming the pairs that there are."""
        pair = self.pairs.get(name)
        if pair is None:
            raise AbsentError(f"there is no pair {name!r}; there are {', '.join(self.pairs) or 'none'}")
        return pair

    async def create(self, spec: PairSpec, *, replace: bool = False) -> Pair:
        """Creates a pair; the same spec again changes nothing. With `replace` one of that name is forgotten in the same
        moment.

        Raises ControlError for another spec under its name, and with `replace` while that pair connects or updates.
        """
        async with self._changing:
            namesake = self.pairs.get(spec.name)
            if namesake is not None and not replace:
                namesake.check_open()
                return _same(namesake, spec)
            if namesake is None:
                pair = await self._create(spec, self._processes.get(spec.name, ()))
            else:
                with self._closed(namesake):
                    pair = await self._create(spec, namesake.incarnations.standings(), namesake)
                self._part_with(namesake)
            self.pairs[spec.name] = pair
        if namesake is not None:
            await _close_drivers(namesake)
        return pair

    async def _create(self, spec: PairSpec, standings: Iterable[Standing], namesake: Pair | None = None) -> Pair:
        """A new pair that is in the state file, in place of a namesake. `standings` are of the trainers before it."""
        if namesake is None and len(self.pairs) >= MAX_PAIRS:
            raise ControlError(f"there are {len(self.pairs)} pairs already; delete one first")
        for name, engine in spec.instances.items():
            self._check_free(name, engine, but=namesake)
        processes = [standing for standing in standings if standing.process.rank < spec.trainer_world]
        pair = Pair(spec, self.store, self.metrics.updated, processes)
        saved = [instance.saved() for instance in pair.instances.values()]
        await self.store.save_pair(pair.spec, saved, processes)
        return pair

    async def end(self, name: str, reason: str, wait: float) -> bool:
        """Ends the connect or update that a pair has under way, if there is such a pair; none begins there any more.

        Returns False while that has not ended within `wait` seconds.
        """
        pair = self.pairs.get(name)
        if pair is None:
            return True
        pair.close(ControlError(f"pair {name} {reason}, which ends what is under way"))
        return await pair.poll(lambda: pair.idle, wait)

    async def delete(self, name: str) -> None:
        """Forgets a pair; engines are left as they are. Raises ControlError while it connects or updates."""
        async with self._changing:
            pair = self.pair(name)
            with self._closed(pair):
                await self.store.forget(name)
            del self.pairs[name]
            self._processes[name] = pair.incarnations.standings()
            for oldest in tuple(self._processes)[:-MAX_PAIRS]:
                del self._processes[oldest]
            self._part_with(pair)
        await _close_drivers(pair)

    @contextmanager
    def _closed(self, pair: Pair) -> Iterator[None]:
        """A context in which a pair is forgotten, and nothing begins there. After an error the pair goes on.

        Raises ControlError while the pair connects or updates.
        """
        name = pair.spec.name
        if not pair.idle or (pair.closed is None and self._is_connecting(name)):
            raise ControlError(
                f"pair {name} is being {'updated' if pair.offers else 'connected'}; delete it afterwards, or end that "
                f"with 'weightcast delete {name} --force'"
            )
        pair.close(ControlError(f"pair {name} is being deleted or replaced; try again when that is over"))
        try:
            yield
        except BaseException:
            pair.reopen()
            raise

    def _part_with(self, pair: Pair) -> None:
        """Ends all waits on a pair that is forgotten, and all that it would still write."""
        pair.forget_store()
        self._connecting.pop(pair.spec.name, None)
        for state in (pair, *pair.instances.values()):
            state.end()

    async def join(self, name: str, instance: str, spec: EngineSpec) -> Instance:
        """Adds an instance to a pair; see `Pair.join`."""
        async with self._changing:
            pair = self.pair(name)
            namesake = pair.instances.get(instance)
            if namesake is None or not namesake.present:
                self._check_free(instance, spec, namesake)
            newcomer = await pair.join(instance, spec)
            if namesake is not None and namesake is not newcomer:
                await namesake.driver.close()
            return newcomer

    async def leave(self, name: str, instance: str) -> Instance:
        """Takes an instance out of a pair; see `Pair.leave`."""
        async with self._changing:
            return await self.pair(name).leave(instance)

    def start_connect(self, name: str) -> None:
        """Connects the pair's instances in the background; once for each start of the trainer."""
        pair = self.pair(name)
        pair.check_open()
        if not self._is_connecting(name) or self._connecting[name][0] != pair.generation:
            task = self._spawn(connect.connect(pair, pair.generation, self.host, self.port))
            self._connecting[name] = (pair.generation, task)

    async def offer(self, name: str, rank: int, number: int, wait: float, *, restart: bool = False) -> Version | None:
        """Takes a trainer rank's offer, and returns its version. The first one starts the update, which waits for the
        others.

        Returns None if the update that this rank has given up does not end within `wait` seconds.
        """
        pair = self.pair(name)
        taken = await pair.offer(rank, number, wait, restart=restart)
        if taken is None:
            return None
        if taken.first:
            self._spawn(update.update(pair, taken.version, self.host, self.port))
        return taken.version

    def _is_connecting(self, name: str) -> bool:
        return name in self._connecting and not self._connecting[name][1].done()

    def _check_free(
        self, name: str, engine: EngineSpec, namesake: Instance | None = None, but: Pair | None = None
    ) -> None:
        for pair in self.pairs.values():
            others = (i for i in pair.instances.values() if i.belongs and i is not namesake)
            if pair is not but and engine.url and engine.url in [i.spec.url for i in others]:
                raise ControlError(f"instance {name}: {engine.shown_url} belongs to pair {pair.spec.name} already")

    async def _listen(self) -> None:
        """Wakes the waits for ranks that are no longer heard from, and says in the log who is missing in waits."""
        last_time = time.monotonic()
        while True:
            await asyncio.sleep(LISTEN_SECONDS)
            now = time.monotonic()
            delay, last_time = now - last_time - LISTEN_SECONDS, now
            for pair in self.pairs.values():
                sides: tuple[Party, ...] = (pair, *(i for i in pair.instances.values() if i.belongs))
                for side in sides:
                    if delay > LISTEN_SECONDS:  # nobody can have been heard while this process stood still
                        side.excuse(delay)
                    if side.listen(now):
                        log.warning("%s", side.silence(), extra={"pair": pair.spec.name})
                        side.notify()
                due_waits = [wait.record() for _, wait in pair.under_way() if wait.is_due(now)]
                for line in wait_lines(due_waits):
                    log.warning("pair %s: %s", pair.spec.name, line, extra={"pair": pair.spec.name})

    def _spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def done(finished: asyncio.Task[object]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and (error := finished.exception()) is not None:
                log.error("gateway task failed: %s", error, exc_info=error)

        task.add_done_callback(done)
        return task


def _same(pair: Pair, spec: PairSpec) -> Pair:
    """A pair that was created before, for who creates it again. Raises ControlError naming fields that differ."""
    if fields := differences(pair.spec, spec):
        suffix = f"; and {len(fields) - _SHOWN} fields more" if len(fields) > _SHOWN else ""
        raise ControlError(
            f"pair {spec.name} exists with another specification: {'; '.join(fields[:_SHOWN])}{suffix}; delete it with "
            f"'weightcast delete {spec.name}', or create it with replace=True"
        )
    return pair


async def _recover(pair: Pair) -> None:
    """Brings engines to rest that an earlier life of the gateway has left in the middle of an update."""
    await asyncio.gather(*(_bring_to_rest(pair, i) for i in pair.present if i.paused))


async def _bring_to_rest(pair: Pair, instance: Instance) -> None:
    step = Step(pair.generation)
    members = await pair.hold(step, [instance])
    try:
        await _rest(instance)
    finally:
        pair.release(step, members)


async def _rest(instance: Instance) -> None:
    driver, group = instance.driver, instance.group
    steps = [driver.end, lambda: driver.disconnect(group), *([] if instance.record.fenced else [driver.resume])]
    for step in steps:
        try:
            await asyncio.wait_for(step(), instance.settings.clean_up)
        except Exception as error:  # an engine that is not there, or has no session open, is at rest too
            log.info("instance %s: %s", instance.name, error, extra={"pair": instance.pair, "instance": instance.name})
    if not instance.record.fenced:
        instance.resumed()


async def _close_drivers(pair: Pair) -> None:
    for instance in pair.instances.values():
        await instance.driver.close()
