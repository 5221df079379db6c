"""What the gateway has to know after a restart, in one SQLite file: pairs, of each instance version and fence, and of
each trainer rank which process is believed.

What is written first is what may never be forgotten: that an instance is fenced, before its first byte is written; that
a version is committed, before anyone is told. All that waits at one moment is written in one transaction, so that many
instances cost one sync of the disk. What can be asked for again, reports and plans, is not kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from weightcast.gateway.engines import EngineSpec
from weightcast.gateway.incarnations import Standing, TrainerProcess
from weightcast.gateway.records import PairSpec
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import ControlError, LayoutError
from weightcast.transfer.topology import Topology
from weightcast.transfer.verification import Verify

__all__ = ["SavedInstance", "Store"]

log = logging.getLogger("weightcast.gateway")

FORMAT = 2
"""Format 1 had no processes: its trainers are taken as those of a gateway that has kept no state."""
_READABLE = (0, 1, FORMAT)
_TABLES = """
create table if not exists pairs (name text primary key, spec text not null) without rowid;
create table if not exists instances (
    pair text not null, name text not null, state text not null, primary key (pair, name)
) without rowid;
create table if not exists processes (
    pair text not null, process text not null, state text not null, primary key (pair, process)
) without rowid;
"""

_Statement = tuple[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class SavedInstance:
    """What is kept of an instance. `paused` says that its engine was paused for an update, `left` that it has left."""

    pair: str
    name: str
    spec: EngineSpec
    version: int | None
    fenced: bool
    epoch: int
    paused: bool
    left: bool
    identities: dict[int, str]


class Store:
    """The state file, or nothing at all when `path` is None: then a restart forgets.

    `trouble` says why the last write failed, empty when it did not.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._pending: list[tuple[Sequence[_Statement], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._later: set[asyncio.Task[None]] = set()
        self._in_use = threading.Lock()
        self.trouble = ""

    def open(self) -> None:
        """Opens the file, or makes it. Raises ControlError when it cannot be used."""
        if self._path is None:
            return
        try:
            database = sqlite3.connect(self._path, timeout=1.0, isolation_level=None, check_same_thread=False)
            database.execute("pragma locking_mode = exclusive")  # two gateways would contradict each other
            database.execute("pragma journal_mode = wal")
            database.execute("pragma synchronous = full")
            (found,) = database.execute("pragma user_version").fetchone()
            if found not in _READABLE:
                raise ControlError(
                    f"state file {self._path} has format {found}, expected at most {FORMAT}; name another file"
                )
            database.executescript(f"begin exclusive; {_TABLES} pragma user_version = {FORMAT}; commit;")
        except sqlite3.Error as error:
            hint = "; is another gateway using it?" if "locked" in str(error) else ""
            raise ControlError(f"cannot use state file {self._path}: {error}{hint}") from error
        self._database = database

    def close(self) -> None:
        """Closes the file, after what is being written: a task that was cancelled has left its thread at work."""
        with self._in_use:
            if self._database is not None:
                self._database.close()
                self._database = None

    def load(self) -> list[tuple[PairSpec, list[SavedInstance]]]:
        """All pairs and their instances. Raises ControlError for a file that is not as it was written."""
        if self._database is None:
            return []
        try:
            pairs = self._database.execute("select name, spec from pairs order by name").fetchall()
            rows = self._database.execute("select pair, name, state from instances order by pair, name").fetchall()
            instances = [_instance_of(*row) for row in rows]
            return [(_pair_of(name, spec), [i for i in instances if i.pair == name]) for name, spec in pairs]
        except (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError, LayoutError) as error:
            raise ControlError(f"state file {self._path} is damaged: {type(error).__name__} {error}") from error

    def load_processes(self, pair: str) -> list[Standing]:
        """The trainer processes of a pair. Raises ControlError for a file that is not as it was written."""
        if self._database is None:
            return []
        try:
            rows = self._database.execute("select state from processes where pair = ? order by process", (pair,))
            return [_standing_of(state) for (state,) in rows.fetchall()]
        except (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ControlError(f"state file {self._path} is damaged: {type(error).__name__} {error}") from error

    async def save_processes(self, pair: str, standings: Iterable[Standing], forgotten: Iterable[str] = ()) -> None:
        """Trainer processes of a pair, and those that are no longer known; otherwise like `save`."""
        deletions = [("delete from processes where pair = ? and process = ?", (pair, one)) for one in forgotten]
        await self._write([*(_saving_process(pair, standing) for standing in standings), *deletions])

    async def save_pair(self, spec: PairSpec, instances: Iterable[SavedInstance]) -> None:
        """A pair with its instances."""
        statement = ("insert or replace into pairs values (?, ?)", (spec.name, json.dumps(asdict(spec))))
        await self._write([statement, *map(_saving, instances)])

    async def save(self, *instances: SavedInstance) -> None:
        """Instances, all of them or none. Returns when they are on the disk; raises ControlError when they are not."""
        await self._write([_saving(instance) for instance in instances])

    def save_soon(self, instance: SavedInstance) -> None:
        """The same for what is only good to know; what goes wrong is logged."""
        if self._database is not None:
            task = asyncio.create_task(self._save_later(instance))
            self._later.add(task)
            task.add_done_callback(self._later.discard)

    async def forget(self, pair: str) -> None:
        """Removes a pair."""
        tables = (("pairs", "name"), ("instances", "pair"), ("processes", "pair"))
        await self._write([(f"delete from {table} where {column} = ?", (pair,)) for table, column in tables])

    async def _save_later(self, instance: SavedInstance) -> None:
        try:
            await self.save(instance)
        except ControlError as error:
            log.error("%s", error, extra={"pair": instance.pair, "instance": instance.name})

    async def _write(self, statements: Sequence[_Statement]) -> None:
        if self._database is None:
            return
        done = asyncio.get_running_loop().create_future()
        self._pending.append((statements, done))
        if self._writer is None:
            self._writer = asyncio.create_task(self._drain())
        await done

    async def _drain(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await asyncio.to_thread(self._commit, [s for statements, _ in batch for s in statements])
                self.trouble = ""
            except sqlite3.Error as error:
                self.trouble = f"cannot record the gateway's state in {self._path}: {error}; is the disk full?"
            for _, done in batch:
                if done.cancelled():
                    continue
                if self.trouble:
                    done.set_exception(ControlError(self.trouble))
                else:
                    done.set_result(None)
        self._writer = None

    def _commit(self, statements: Sequence[_Statement]) -> None:
        with self._in_use:
            database = self._database
            if database is None:
                raise sqlite3.ProgrammingError("the state file is closed")
            try:
                database.execute("begin immediate")
                for statement, values in statements:
                    database.execute(statement, values)
                database.execute("commit")
            except BaseException:
                if database.in_transaction:
                    database.execute("rollback")
                raise


_STATE = tuple(field.name for field in fields(SavedInstance) if field.name not in ("pair", "name"))


@lru_cache(1024)
def _plain(spec: EngineSpec) -> dict[str, object]:
    return asdict(spec)


def _saving(instance: SavedInstance) -> _Statement:
    state = {name: getattr(instance, name) for name in _STATE} | {"spec": _plain(instance.spec)}
    values = (instance.pair, instance.name, json.dumps(state))
    return "insert or replace into instances values (?, ?, ?)", values


def _saving_process(pair: str, standing: Standing) -> _Statement:
    state = {"process": _row(standing.process), "by": None if standing.by is None else _row(standing.by)}
    return "insert or replace into processes values (?, ?, ?)", (pair, standing.process.process, json.dumps(state))


def _row(process: TrainerProcess) -> list[int | float | str]:
    """Its columns without the claim: to the next life of the gateway it is known for certain."""
    return [process.rank, process.start, process.host, process.pid, process.registered, process.generation]


def _standing_of(state: str) -> Standing:
    found = json.loads(state)
    by = None if found["by"] is None else TrainerProcess(*found["by"])
    return Standing(TrainerProcess(*found["process"]), by)


def _instance_of(pair: str, name: str, state: str) -> SavedInstance:
    found = json.loads(state)
    found["spec"] = EngineSpec(**found["spec"])
    found["identities"] = {int(rank): identity for rank, identity in found["identities"].items()}
    return SavedInstance(pair, name, **found)


def _pair_of(name: str, spec: str) -> PairSpec:
    found = json.loads(spec)
    found["verify"] = Verify(found["verify"])
    found["settings"] = Settings(**found["settings"])
    found["instances"] = {key: EngineSpec(**engine) for key, engine in found["instances"].items()}
    if found.get("topology") is not None:
        found["topology"] = Topology(**found["topology"])
    return PairSpec(**found)
