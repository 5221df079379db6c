"""State that the gateway needs after a restart, in one SQLite file.

It has the pairs, the version and fence of each instance, and the process that is believed for each trainer rank.

What may never be forgotten is written first. A fence is on the disk before the first byte goes to an instance, and a
commit before anyone is told of it. All that waits at one moment is written in one transaction, so that many instances
cost one sync of the disk. Reports and plans are not kept, because ranks can be asked for them again.

A file is read whole before anyone is served. Its rows are checked against the types of their records, and none is
mended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import threading
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from weightcast.gateway.incarnations import Standing, TrainerProcess
from weightcast.gateway.records import EngineSpec, PairSpec
from weightcast.gateway.versions import Version
from weightcast.transfer.documents import Record
from weightcast.transfer.errors import ControlError, InputError, WeightcastError

__all__ = ["SavedInstance", "Store"]

log = logging.getLogger("weightcast.gateway")

FORMAT = 2
"""Format 1 had no processes, neither of trainers nor displaced ones, and no uid of a pair. Its trainers are taken as
those of a gateway that has kept no state.
"""
_READABLE = (0, 1, FORMAT)
_TABLES = {
    "pairs": "create table if not exists pairs (name text primary key, spec text not null) without rowid",
    "instances": """create table if not exists instances (
        pair text not null, name text not null, state text not null, primary key (pair, name)
    ) without rowid""",
    "processes": """create table if not exists processes (
        pair text not null, process text not null, state text not null, primary key (pair, process)
    ) without rowid""",
}

_Statement = tuple[str, tuple[str, ...]]
_Number = Annotated[int, Field(strict=True, ge=0, lt=1 << 62)]


@dataclass(frozen=True, slots=True)
class SavedInstance(Record):
    """State of an instance that is kept.

    `paused` says that its engine was paused for an update, `left` that it has left. `identities`, `displaced` and
    `evicted` are those of `Instance`.
    """

    pair: str
    name: str
    spec: EngineSpec
    version: Version | None
    fenced: StrictBool
    epoch: _Number
    paused: StrictBool
    left: StrictBool
    identities: dict[Annotated[int, Field(ge=0)], str]
    displaced: dict[str, str] = field(default_factory=dict)
    evicted: str = ""

    def __post_init__(self) -> None:
        if bad_ranks := sorted(rank for rank in self.identities if rank >= self.spec.world_size):
            raise ValueError(f"identities name rank {bad_ranks[0]}, the instance has {self.spec.world_size} ranks")


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
        """Opens the file, or makes it. Raises ControlError if it cannot be used, or is not as it was written."""
        if self._path is None:
            return
        if not self._path.parent.is_dir():
            raise ControlError(f"state file {self._path}: there is no folder {self._path.parent}; make it first")
        if self._path.is_file() and not self._path.stat().st_size:
            raise ControlError(
                f"state file {self._path} is empty, so it was cut off; put a backup in its place or remove it"
            )
        database: sqlite3.Connection | None = None
        try:
            database = sqlite3.connect(self._path, timeout=1.0, isolation_level=None, check_same_thread=False)
            self._take(database)
        except sqlite3.Error as error:
            hint = "; is another gateway using it?" if "locked" in str(error) else ""
            raise ControlError(f"cannot use state file {self._path}: {error}{hint}") from error
        finally:
            if self._database is None and database is not None:
                database.close()

    def _take(self, database: sqlite3.Connection) -> None:
        """Checks all that is in the file, and only then writes to it."""
        database.execute("pragma locking_mode = exclusive")  # two gateways would contradict each other
        database.execute("pragma journal_mode = wal")
        database.execute("pragma synchronous = full")
        (file_format,) = database.execute("pragma user_version").fetchone()
        tables = {str(row[0]) for row in database.execute("select name from sqlite_master where type = 'table'")}
        if not file_format and tables:
            raise ControlError(
                f"state file {self._path} is another program's, with table {min(tables)}; name another file"
            )
        if file_format not in _READABLE:
            raise ControlError(
                f"state file {self._path} has format {file_format}, expected at most {FORMAT}; name another file"
            )
        if file_format and (absent_tables := _TABLES.keys() - tables - ({"processes"} if file_format == 1 else set())):
            raise self.damaged(f"no table {min(absent_tables)}")
        database.execute("begin exclusive")
        for table in _TABLES.values():
            database.execute(table)
        if file_format == 1:
            # SQLite's JSON functions do not fit: links without a limit are written as Infinity.
            updates = [
                (json.dumps({**asdict(spec), "uid": uuid.uuid4().hex}), spec.name) for spec, _ in self._loaded(database)
            ]
            database.executemany("update pairs set spec = ? where name = ?", updates)
        database.execute(f"pragma user_version = {FORMAT}")
        check = [str(row[0]) for row in database.execute("pragma quick_check(1)")]
        if check != ["ok"]:
            raise self.damaged(" ".join(" ".join(check).split()))
        for spec, _ in self._loaded(database):
            self._processes(database, spec.name)
        database.execute("commit")
        self._database = database

    def close(self) -> None:
        """Closes the file, after what is being written: the thread of a task that was cancelled is still at work."""
        with self._in_use:
            if self._database is not None:
                self._database.close()
                self._database = None

    def load(self) -> list[tuple[PairSpec, list[SavedInstance]]]:
        """All pairs and their instances. Raises ControlError for a file that is not as it was written."""
        return [] if self._database is None else self._loaded(self._database)

    def _loaded(self, database: sqlite3.Connection) -> list[tuple[PairSpec, list[SavedInstance]]]:
        try:
            pairs = database.execute("select name, spec from pairs order by name").fetchall()
            rows = database.execute("select pair, name, state from instances order by pair, name").fetchall()
            specs = [_pair_of(*row) for row in pairs]
            instances = [_instance_of(*row) for row in rows]
        except (sqlite3.Error, ValueError, TypeError, WeightcastError) as error:
            raise self.damaged(error) from error
        if orphans := {i.pair for i in instances} - {spec.name for spec in specs}:
            raise self.damaged(f"instances of pair {min(orphans)}, which is not in it")
        return [(spec, [i for i in instances if i.pair == spec.name]) for spec in specs]

    def damaged(self, why: object) -> ControlError:
        """The error for a file that is not as it was written."""
        return ControlError(
            f"state file {self._path} is damaged: {why}; put a backup in its place or name another file"
        )

    def load_processes(self, pair: str) -> list[Standing]:
        """The trainer processes of a pair. Raises ControlError for a file that is not as it was written."""
        return [] if self._database is None else self._processes(self._database, pair)

    def _processes(self, database: sqlite3.Connection, pair: str) -> list[Standing]:
        try:
            rows = database.execute("select state from processes where pair = ? order by process", (pair,))
            return [_standing_of(state) for (state,) in rows.fetchall()]
        except (sqlite3.Error, ValueError, TypeError, WeightcastError) as error:
            raise self.damaged(error) from error

    async def save_processes(self, pair: str, standings: Iterable[Standing], forgotten: Iterable[str] = ()) -> None:
        """Writes trainer processes of a pair, and removes the `forgotten` ones; otherwise like `save`."""
        deletions = [("delete from processes where pair = ? and process = ?", (pair, process)) for process in forgotten]
        await self._write([*(_saving_process(pair, standing) for standing in standings), *deletions])

    async def save_pair(
        self, spec: PairSpec, instances: Iterable[SavedInstance], processes: Iterable[Standing] = ()
    ) -> None:
        """Writes a pair with its instances and processes, in place of any of that name; otherwise like `save`."""
        statement = ("insert into pairs values (?, ?)", (spec.name, json.dumps(asdict(spec))))
        standings = (_saving_process(spec.name, standing) for standing in processes)
        await self._write([*_forgetting(spec.name), statement, *map(_saving, instances), *standings])

    async def save_spec(self, spec: PairSpec) -> None:
        """Writes what is fixed about a pair, unless that was deleted meanwhile; otherwise like `save`."""
        await self._write([("update pairs set spec = ? where name = ?", (json.dumps(asdict(spec)), spec.name))])

    async def save(self, *instances: SavedInstance) -> None:
        """Writes instances, all of them or none. Returns when they are on the disk.

        Raises ControlError when they cannot be written.
        """
        await self._write([_saving(instance) for instance in instances])

    def save_soon(self, instance: SavedInstance) -> None:
        """Writes an instance later, for state that is only good to know; an error is logged."""
        if self._database is not None:
            task = asyncio.create_task(self._save_later(instance))
            self._later.add(task)
            task.add_done_callback(self._later.discard)

    async def forget(self, pair: str) -> None:
        """Removes a pair with its instances and processes."""
        await self._write(_forgetting(pair))

    async def _save_later(self, instance: SavedInstance) -> None:
        try:
            await self.save(instance)
        except ControlError as error:
            log.error("%s", error, extra={"pair": instance.pair, "instance": instance.name})

    async def _write(self, statements: Sequence[_Statement]) -> None:
        if self._database is None:
            return
        future = asyncio.get_running_loop().create_future()
        self._pending.append((statements, future))
        if self._writer is None:
            self._writer = asyncio.create_task(self._drain())
        await future

    async def _drain(self) -> None:
        while self._pending:
            batch, self._pending = self._pending, []
            try:
                await asyncio.to_thread(self._commit, [s for statements, _ in batch for s in statements])
                self.trouble = ""
            except sqlite3.Error as error:
                self.trouble = f"cannot record the gateway's state in {self._path}: {error}; is the disk full?"
            for _, future in batch:
                if future.cancelled():
                    continue
                if self.trouble:
                    future.set_exception(ControlError(self.trouble))
                else:
                    future.set_result(None)
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
    version = None if instance.version is None else instance.version.as_json()
    state = {name: getattr(instance, name) for name in _STATE} | {"spec": _plain(instance.spec), "version": version}
    values = (instance.pair, instance.name, json.dumps(state), instance.pair)
    # A pair that was deleted meanwhile stays forgotten.
    return ("insert or replace into instances select ?, ?, ? where exists (select 1 from pairs where name = ?)", values)


def _forgetting(pair: str) -> list[_Statement]:
    tables = (("pairs", "name"), ("instances", "pair"), ("processes", "pair"))
    return [(f"delete from {table} where {column} = ?", (pair,)) for table, column in tables]


def _saving_process(pair: str, standing: Standing) -> _Statement:
    state = {"process": _row(standing.process), "by": None if standing.by is None else _row(standing.by)}
    return "insert or replace into processes values (?, ?, ?)", (pair, standing.process.process, json.dumps(state))


_Row = tuple[StrictInt, str, str, StrictInt, StrictFloat, StrictInt]
"""Fields of a trainer process, all but the claim: the next life of the gateway knows it for certain."""


def _row(process: TrainerProcess) -> _Row:
    return process.rank, process.start, process.host, process.pid, process.registered, process.generation


@dataclass(frozen=True, slots=True)
class _SavedStanding(Record):
    """A trainer process as it is kept, and the one that has displaced it."""

    process: _Row
    by: _Row | None


def _standing_of(state: str) -> Standing:
    saved = _SavedStanding.given(state, "a trainer process")
    return Standing(TrainerProcess(*saved.process), None if saved.by is None else TrainerProcess(*saved.by))


def _instance_of(pair: str, name: str, state: str) -> SavedInstance:
    label = f"instance {name} of pair {pair}"
    document = json.loads(state)
    if not isinstance(document, dict):
        raise InputError(f"{label} is {type(document).__name__}, expected an object")
    return SavedInstance.given({"pair": pair, "name": name, **document}, label)


def _pair_of(name: str, spec: str) -> PairSpec:
    pair = PairSpec.given(spec, f"pair {name}")
    if pair.name != name:
        raise InputError(f"pair {name}: its name is {pair.name!r}")
    return pair
