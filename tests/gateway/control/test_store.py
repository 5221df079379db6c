"""The state file: what is written comes back, what cannot be written changes nothing, and who may use it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from engine_support import ALL, STEPS, A, B, Engine, Play, Trainer, first, reports_of
from gateway_support import running_gateway
from spawn_support import free_port

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.control.store import SavedInstance, Store
from weightcast.gateway.incarnations import Standing, TrainerProcess
from weightcast.gateway.records import EngineSpec, PairSpec
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import AbsentError, ControlError, DisplacedError
from weightcast.transfer.planner.topology import Topology

SPEC = PairSpec(
    "main",
    trainer_world=2,
    instances={A: EngineSpec(kind="worker", world_size=2)},
    settings=Settings(resends=1, offer=7.5),
    bucket_bytes=1 << 20,
    commit="all",
)
SAVED = SavedInstance("main", A, SPEC.instances[A], first(7), True, 3, True, False, {0: "x", 1: "y"})
FIRST = TrainerProcess(0, "a.1", "h0", 812, 1e9, 1)
SECOND = TrainerProcess(0, "b.1", "h1", 977, 1e9 + 153.5, 2)


pytestmark = pytest.mark.usefixtures("quiet")


def opened(path: Path) -> Store:
    store = Store(path)
    store.open()
    return store


def test_operators_at_the_same_moment_change_one_after_the_other(tmp_path: Path) -> None:
    """Of two creations of a name one is the pair, in memory and in the file; of two deletions one finds it."""

    async def run() -> None:
        gateway = Gateway("127.0.0.1", 1, opened(tmp_path / "state"))
        other = replace(SPEC, bucket_bytes=1 << 21)
        same, again, refused = await asyncio.gather(
            gateway.create(SPEC), gateway.create(SPEC), gateway.create(other), return_exceptions=True
        )
        assert same is again is gateway.pair("main")
        assert isinstance(refused, ControlError)
        ((saved, _),) = gateway.store.load()
        assert (saved, saved.uid) == (SPEC, gateway.pair("main").spec.uid)
        joins = [gateway.join("main", B, EngineSpec(kind="worker", world_size=size)) for size in (2, 3)]
        newcomer, refused = await asyncio.gather(*joins, return_exceptions=True)
        assert newcomer is gateway.pair("main").instance(B)
        assert isinstance(refused, ControlError)
        outcomes = await asyncio.gather(*(gateway.delete("main") for _ in range(2)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), AbsentError]
        assert gateway.store.load() == []
        await gateway.close()

    asyncio.run(run())


def test_a_pair_that_was_replaced_writes_no_more(tmp_path: Path) -> None:
    """A request that found it before may still change it, and its instances have the names of the new one's."""

    async def run() -> None:
        gateway = Gateway("127.0.0.1", 1, opened(tmp_path / "state"))
        earlier = await gateway.create(SPEC)
        assert await gateway.end("main", "is replaced", 0.0)
        with pytest.raises(ControlError, match="pair main is replaced, which ends what is under way"):
            await gateway.join("main", B, EngineSpec(kind="worker", world_size=2))
        later = await gateway.create(SPEC, replace=True)
        assert (earlier is later, earlier.spec.uid == later.spec.uid) == (False, False)
        instance = earlier.instance(A)
        instance.record = replace(instance.record, version=first(7), fenced=False)
        await instance.save()
        await earlier.begin_lineage(5)
        ((spec, (saved,)),) = gateway.store.load()
        assert (spec.uid, spec.lineage, saved.version, saved.fenced) == (later.spec.uid, 1, None, True)
        await gateway.close()

    asyncio.run(run())


def test_a_pair_that_is_not_replaced_or_deleted_after_all_goes_on(tmp_path: Path) -> None:
    """It was closed for that, and would refuse all work for good."""

    async def run() -> None:
        gateway = Gateway("127.0.0.1", 1, opened(tmp_path / "state"))
        pair = await gateway.create(SPEC)
        url = "http://127.0.0.1:9"
        await gateway.create(PairSpec("other", trainer_world=1, instances={A: EngineSpec(world_size=1, url=url)}))
        assert await gateway.end("main", "is replaced", 0.0)
        with pytest.raises(ControlError, match=f"{url} belongs to pair other already"):
            await gateway.create(replace(SPEC, instances={A: EngineSpec(world_size=1, url=url)}), replace=True)
        assert gateway.pair("main") is pair
        assert await pair.offer(0, 1) == (first(1), True)
        assert pair.conflict is None
        assert not await gateway.end("main", "is deleted", 0.0)
        pair.decide(first(1), {})

        async def full(name: str) -> None:
            raise ControlError(f"cannot forget {name}, the disk is full")

        gateway.store.forget = full  # type: ignore[method-assign]
        with pytest.raises(ControlError, match="the disk is full"):
            await gateway.delete("main")
        assert await pair.offer(0, 2) == (first(2), True)
        pair.check_wanted()
        await gateway.close()

    asyncio.run(run())


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "state")
        other = replace(SAVED, name=B, version=None, fenced=False, left=True, identities={})
        await store.save_pair(SPEC, [SAVED, other])
        second = replace(SPEC, name="second", topology=Topology(400, nic_per_host=True))
        await store.save_pair(second, [])
        await store.save(replace(SAVED, version=first(8)))
        store.close()
        again = opened(tmp_path / "state")
        assert again.load() == [(SPEC, [replace(SAVED, version=first(8)), other]), (second, [])]
        await again.forget("main")
        assert again.load() == [(second, [])]
        again.close()

    asyncio.run(run())


def test_trainer_processes_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "state")
        await store.save_pair(SPEC, [])
        await store.save_processes("main", [Standing(FIRST)])
        await store.save_processes("main", [Standing(FIRST, SECOND), Standing(SECOND)])
        await store.save_processes("other", [Standing(SECOND)])
        store.close()
        again = opened(tmp_path / "state")
        assert again.load_processes("main") == [Standing(FIRST, SECOND), Standing(SECOND)]
        await again.save_processes("main", [], ["a"])
        assert again.load_processes("main") == [Standing(SECOND)]
        await again.forget("main")
        assert (again.load_processes("main"), again.load_processes("other")) == ([], [Standing(SECOND)])
        again.close()

    asyncio.run(run())


def test_a_file_of_format_1_is_read_and_is_one_of_format_2_from_then_on(tmp_path: Path) -> None:
    """`states/format-1.db` was written by the last gateway of that format; one of two instances missed version 2."""

    async def run() -> None:
        file = tmp_path / "state"
        shutil.copy(Path(__file__).parents[2] / "states" / "format-1.db", file)
        store = opened(file)
        ((spec, instances),) = store.load()
        assert (spec.name, spec.trainer_world, spec.settings.offer, spec.topology) == ("main", 2, 30.0, Topology(400))
        worker = EngineSpec(kind="worker", world_size=2, pause="abort")  # the default then, which it keeps
        identities = {0: "8b2d69cd0f3c4d8680d32952f4e5b360", 1: "6d34dec14ccf4accac57b48706e6afd7"}
        assert instances[0] == SavedInstance("main", A, worker, first(1), False, 1, False, False, identities)
        assert (instances[1].name, instances[1].version, instances[1].fenced) == (B, first(2), False)
        assert store.load_processes("main") == []
        await store.save_processes("main", [Standing(FIRST)])
        store.close()
        with sqlite3.connect(file) as raw:
            assert raw.execute("pragma user_version").fetchone() == (2,)
        raw.close()
        again = opened(file)
        assert (again.load(), again.load_processes("main")) == ([(spec, instances)], [Standing(FIRST)])
        again.close()

    asyncio.run(run())


def test_what_is_said_of_values_comes_back_and_older_files_do_not_say_it(tmp_path: Path) -> None:
    async def run() -> None:
        spec = EngineSpec(kind="worker", world_size=2, allow_non_finite=("model.mask", "*.bias"))
        saved = replace(SAVED, spec=spec)
        store = opened(tmp_path / "state")
        await store.save_pair(replace(SPEC, instances={A: spec}), [saved])
        assert store.load() == [(replace(SPEC, instances={A: spec}), [saved])]
        store.close()
        with sqlite3.connect(tmp_path / "state") as database:
            for table, column in (("pairs", "spec"), ("instances", "state")):
                (text,) = database.execute(f"select {column} from {table}").fetchone()
                older = text.replace(', "non_finite": "refuse", "allow_non_finite": ["model.mask", "*.bias"]', "")
                assert older != text
                database.execute(f"update {table} set {column} = ?", (older,))
        database.close()
        again = opened(tmp_path / "state")
        assert again.load() == [(SPEC, [SAVED])]
        again.close()

    asyncio.run(run())


def test_many_at_a_time(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "state")
        await store.save_pair(SPEC, [])
        await asyncio.gather(*(store.save(replace(SAVED, name=f"i{n}", version=first(n))) for n in range(200)))
        assert sorted(str(i.version) for i in store.load()[0][1]) == sorted(map(str, range(200)))
        store.close()

    asyncio.run(run())


def test_nothing_is_kept_without_a_file() -> None:
    async def run() -> None:
        store = opened(None)  # type: ignore[arg-type]
        await store.save_pair(SPEC, [SAVED])
        assert store.load() == []

    asyncio.run(run())


def test_two_gateways_cannot_share_a_file(tmp_path: Path) -> None:
    store = opened(tmp_path / "state")
    with pytest.raises(ControlError, match=r"cannot use state file .*locked; is another gateway using it\?"):
        opened(tmp_path / "state")
    store.close()


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database at all, and longer than a header would be\n" * 10)
    with pytest.raises(ControlError, match="file is not a database"):
        opened(tmp_path / "text")
    with pytest.raises(ControlError, match=r"there is no folder .*; make it first"):
        opened(tmp_path / "no" / "folder")
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("pragma user_version = 99")
    newer.close()
    with pytest.raises(ControlError, match="has format 99, expected at most 2"):
        opened(tmp_path / "newer")


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"spec": {"kind": 1}}'])
def test_a_damaged_file_is_no_state(tmp_path: Path, damage: str) -> None:
    async def run() -> None:
        store = opened(tmp_path / "state")
        await store.save_pair(SPEC, [SAVED])
        store.close()
        raw = sqlite3.connect(tmp_path / "state")
        raw.execute("update instances set state = ?", (damage,))
        raw.commit()
        raw.close()
        with pytest.raises(ControlError, match="is damaged"):
            opened(tmp_path / "state").load()

    asyncio.run(run())


def _instance(**changes: object) -> Callable[[sqlite3.Connection], object]:
    """Changes fields of the state of an instance."""
    return _changed("instances", "state", changes)


def _pair(**changes: object) -> Callable[[sqlite3.Connection], object]:
    return _changed("pairs", "spec", changes)


def _changed(table: str, column: str, changes: dict[str, object]) -> Callable[[sqlite3.Connection], object]:
    def change(raw: sqlite3.Connection) -> object:
        (text,) = raw.execute(f"select {column} from {table}").fetchone()
        return raw.execute(f"update {table} set {column} = ?", (json.dumps({**json.loads(text), **changes}),))

    return change


def _sql(text: str) -> Callable[[sqlite3.Connection], object]:
    return lambda raw: raw.execute(text)


WRONG: dict[str, tuple[Callable[[sqlite3.Connection], object], str]] = {
    "fence no": (_instance(fenced="no"), "fenced is 'no'"),
    "fence 1": (_instance(fenced=1), "fenced is 1"),
    "fence null": (_instance(fenced=None), "fenced is None"),
    "version text": (_instance(version="7"), "version is '7'"),
    "version float": (_instance(version=7.0), "version is 7"),
    "version negative": (_instance(version=-1), "version is -1"),
    "epoch negative": (_instance(epoch=-3), "epoch is -3"),
    "epoch null": (_instance(epoch=None), "epoch is None"),
    "paused text": (_instance(paused="false"), "paused is 'false'"),
    "unknown phase": (_instance(phase="warp"), "phase is not known"),
    "unknown field of an engine": (_instance(spec={"kind": "worker", "world_size": 2, "x": 1}), "spec.x is not known"),
    "engine of no kind": (_instance(spec={"kind": "warp", "world_size": 2}), "spec.kind is 'warp'"),
    "engine without ranks": (_instance(spec={"kind": "worker", "world_size": 0}, identities={}), "world_size is 0"),
    "engine without url": (_instance(spec={"kind": "sglang", "world_size": 2}), "url is ''"),
    "rank of none": (_instance(identities={"5": "x"}), "identities name rank 5, the instance has 2 ranks"),
    "rank that is none": (_instance(identities={"x": "x"}), "identities.x"),
    "identity number": (_instance(identities={"0": 5}), "identities.0 is 5"),
    "displaced list": (_instance(displaced=["x"]), "displaced is ['x']"),
    "name with a slash": (_sql("update instances set name = 'a/b'"), "name 'a/b' is not 1 to 64"),
    "instance of no pair": (_sql("update instances set pair = 'other'"), "instances of pair other, which is not in it"),
    "state a number": (_sql("update instances set state = '7'"), "is int, expected an object"),
    "state binary": (_sql("update instances set state = x'ff00'"), ""),
    "pair of another name": (_sql("update pairs set name = 'other'"), "pair other: its name is 'main'"),
    "trainers text": (_pair(trainer_world="2"), "trainer_world is '2'"),
    "no trainers": (_pair(trainer_world=0), "trainer_world is 0"),
    "commit some": (_pair(commit="some"), "commit is 'some'"),
    "verify maybe": (_pair(verify="maybe"), "verify is 'maybe'"),
    "settings text": (_pair(settings={"offer": "7"}), "settings.offer is '7'"),
    "settings negative": (_pair(settings={"offer": -1.0}), "settings.offer is -1.0, expected a positive"),
    "settings unknown": (_pair(settings={"patience": 1.0}), "settings.patience is not known"),
    "pair unknown": (_pair(colour="red"), "colour is not known"),
    "pair without instances": (_pair(instances={}), "instances is {}, expected from 1 to 10000 instances by name"),
    "uid number": (_pair(uid=5), "uid is 5"),
    "no table": (_sql("drop table instances"), "no table instances"),
    "column missing": (_sql("alter table instances rename column state to status"), "no such column"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_of_other_types_is_refused_as_it_is(tmp_path: Path, wrong: str) -> None:
    """Nothing is coerced, defaulted or passed over; and the file is left as it was."""
    change, said = WRONG[wrong]

    async def run() -> None:
        store = opened(tmp_path / "state")
        await store.save_pair(SPEC, [SAVED])
        store.close()

    asyncio.run(run())
    raw = sqlite3.connect(tmp_path / "state")
    change(raw)
    raw.commit()
    before = raw.execute("select * from pairs").fetchall()
    raw.close()
    with pytest.raises(ControlError) as caught:
        Gateway("127.0.0.1", 1, opened(tmp_path / "state"))
    text = str(caught.value)
    assert text.startswith(f"state file {tmp_path / 'state'} is damaged: ")
    assert said in text
    assert "\n" not in text
    raw = sqlite3.connect(tmp_path / "state")
    assert raw.execute("select * from pairs").fetchall() == before
    raw.close()


@pytest.mark.parametrize(
    "wrong", ["garbage", "cut off", "cut in the middle", "empty", "folder", "format", "types", "foreign", "rows lost"]
)
def test_a_gateway_ends_at_once_on_a_file_that_is_no_state(tmp_path: Path, wrong: str) -> None:
    state = tmp_path / "state"

    async def run() -> None:
        store = opened(state)
        await store.save_pair(SPEC, [replace(SAVED, name=f"i{n}") for n in range(200)])
        store.close()

    if wrong == "garbage":
        state.write_bytes(bytes(range(256)) * 64)
    elif wrong == "folder":
        state.mkdir()
    elif wrong == "empty":
        state.touch()
    else:
        asyncio.run(run())
        with sqlite3.connect(state) as raw:
            if wrong == "types":
                _instance(fenced="no")(raw)
            if wrong == "format":
                raw.execute("pragma user_version = 99")
            if wrong == "foreign":
                raw.executescript(
                    "drop table pairs; drop table instances; create table songs (name text); pragma user_version = 0"
                )
        raw.close()
        if wrong == "rows lost":  # the last page says that it has one row of many
            with state.open("r+b") as file:
                file.seek(-4096, os.SEEK_END)
                assert file.read(1) in (b"\x0a", b"\x0d"), "a page of rows"
                file.seek(-4096 + 3, os.SEEK_END)
                file.write(b"\x00\x01")
        if wrong.startswith("cut"):
            os.truncate(state, 50 if wrong == "cut off" else state.stat().st_size // 2)
    command = [sys.executable, "-m", "weightcast", "gateway", "--state", str(state), "--port", str(free_port())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 4
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert ran.stderr.startswith("weightcast gateway: ")
    assert str(state) in ran.stderr
    assert ran.stdout == "", "no token is shown for a gateway that does not serve"


def test_a_file_of_the_format_before_is_read(tmp_path: Path) -> None:
    """Its pairs get a uid, which stays; what it does not know of is as it is for a new one."""

    async def run() -> None:
        store = opened(tmp_path / "state")
        await store.save_pair(SPEC, [SAVED])
        store.close()

    asyncio.run(run())
    with sqlite3.connect(tmp_path / "state") as raw:
        spec = json.loads(raw.execute("select spec from pairs").fetchone()[0])
        state = json.loads(raw.execute("select state from instances").fetchone()[0])
        del spec["uid"], spec["settings"]["update"], state["displaced"]
        raw.execute("update pairs set spec = ?", (json.dumps(spec),))
        raw.execute("update instances set state = ?", (json.dumps(state),))
        raw.execute("pragma user_version = 1")
    raw.close()
    uids = []
    for _ in range(2):
        store = opened(tmp_path / "state")
        assert store.load() == [(SPEC, [SAVED])]
        uids.append(store.load()[0][0].uid)
        store.close()
    assert uids[0] == uids[1]
    assert len(uids[0]) == 32


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        "{}",
        '{"process": [0], "by": null}',
        '{"process": null, "by": null}',
        '{"process": ["0", "x.1", "h", 1, 1.0, 1], "by": null}',
        '{"process": [0, "x.1", "h", 1, 1.0, true], "by": null}',
        '{"process": [0, "x.1", "h", 1, 1.0, 1], "by": null, "x": 1}',
    ],
)
def test_damaged_processes_are_no_state(tmp_path: Path, damage: str) -> None:
    async def run() -> None:
        store = opened(tmp_path / "state")
        await store.save_pair(SPEC, [SAVED])
        await store.save_processes("main", [Standing(FIRST)])
        store.close()
        raw = sqlite3.connect(tmp_path / "state")
        raw.execute("update processes set state = ?", (damage,))
        raw.commit()
        raw.close()
        with pytest.raises(ControlError, match="is damaged"):
            opened(tmp_path / "state").load_processes("main")

    asyncio.run(run())


class FullDisk:
    """No file of this process grows while it is entered."""

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def test_a_full_disk(tmp_path: Path) -> None:
    async def run() -> None:
        store = opened(tmp_path / "state")
        await store.save_pair(SPEC, [SAVED])
        with FullDisk(), pytest.raises(ControlError, match="cannot record the gateway's state"):
            await store.save(replace(SAVED, version=first(8)))
        assert "cannot record" in store.trouble
        assert store.load() == [(SPEC, [SAVED])]
        await store.save(replace(SAVED, version=first(9)))
        assert store.trouble == ""
        assert store.load() == [(SPEC, [replace(SAVED, version=first(9))])]
        store.close()

    asyncio.run(run())


# ---- the gateway with a file


class Kept(Play):
    """A play whose gateway remembers; `restart` is another life of it."""

    def __init__(self, path: Path, *instances: str) -> None:
        super().__init__(*instances)
        self.path = path

    async def begin(self) -> None:
        self.gateway = Gateway("127.0.0.1", 1, opened(self.path))
        await self.gateway.open()
        known = self.gateway.pairs.get(self.pair.spec.name)
        self.pair = known or await self.gateway.create(self.pair.spec)
        self.engines = {name: Engine(self.pair, name, self.engines[name].ranks) for name in self.engines}
        self.trainers = [Trainer(self.pair, rank) for rank in range(2)]

    async def restart(self) -> None:
        holds = {name: engine.holds for name, engine in self.engines.items()}
        await self.gateway.close()
        await self.begin()
        for name, engine in self.engines.items():
            engine.holds = holds[name]


def test_a_gateway_finds_its_pairs_again(tmp_path: Path) -> None:
    async def run() -> None:
        play = Kept(tmp_path / "state", A, B)
        await play.begin()
        await play.connect()
        assert (await play.update(4)).committed
        play.engines[B].corrupt = 0
        await play.update(5)
        assert (play.state(A), play.state(B)) == ((Phase.CONNECTED, 5, False), (Phase.FAILED, 4, True))
        await play.restart()
        assert (play.state(A), play.state(B)) == ((Phase.FAILED, 5, False), (Phase.FAILED, 4, True))
        assert not play.pair.instance(A).serves, "until it has connected, nobody can know"
        status = play.pair.status()["instances"][A]
        assert "the gateway was restarted" in status["reason"]
        assert status["heard"] is None, "what it said to the life before is not known"
        await play.connect()
        assert play.pair.instance(A).serves
        assert play.pair.instance(A).record.epoch > 1, "no epoch is counted twice"
        assert (await play.update(6)).committed
        assert play.state(B) == (Phase.CONNECTED, 6, False)
        await play.gateway.close()

    asyncio.run(run())


def test_a_gateway_finds_out_again_which_trainer_processes_are_believed(tmp_path: Path) -> None:
    async def run() -> None:
        play = Kept(tmp_path / "state", A)
        await play.begin()
        report = reports_of([[ALL], [ALL]])[0]
        was, _ = await play.pair.register_trainer(0, report, "a.1", pid=812)
        generation, _ = await play.pair.register_trainer(0, report, "b.1", pid=977)
        await play.restart()
        assert play.pair.generation == generation
        for resumes in (True, False):
            with pytest.raises(DisplacedError, match=r"process 812 on .* was replaced by .* process 977 on"):
                await play.pair.register_trainer(0, report, "a.1", pid=812, was=was, resumes=resumes)
        assert await play.pair.register_trainer(0, report, "b.1", was=generation, resumes=True) == (generation, 0)
        await play.gateway.close()

    asyncio.run(run())


def test_a_registration_that_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        play = Kept(tmp_path / "state", A)
        await play.begin()
        report = reports_of([[ALL], [ALL]])[0]
        with FullDisk(), pytest.raises(ControlError, match="cannot record"):
            await play.pair.register_trainer(0, report, "a.1")
        await play.pair.register_trainer(0, report, "a.2")
        assert len(play.gateway.store.load_processes("main")) == 1
        await play.gateway.close()

    asyncio.run(run())


def test_a_gateway_that_ends_in_a_transfer_finds_the_fence(tmp_path: Path) -> None:
    async def run() -> None:
        play = Kept(tmp_path / "state", A)
        await play.begin()
        await play.connect()
        await play.update(1)
        seen: list[SavedInstance] = []
        transfer = play.engine.transfer

        async def spied(group: str) -> None:
            await transfer(group)
            seen.extend(play.gateway.store.load()[0][1])

        play.engine.transfer = spied  # type: ignore[method-assign]
        await play.update(2)
        assert [(i.version, i.fenced, i.paused) for i in seen] == [(first(1), True, True)]
        await play.gateway.close()

    asyncio.run(run())


@pytest.mark.parametrize("step", ["pause", "transfer", "publish"])
def test_a_disk_that_is_full(tmp_path: Path, step: str) -> None:
    """From which step on it is: nothing is asked, nothing is written, or nothing is committed."""

    async def run() -> None:
        play = Kept(tmp_path / "state", A)
        await play.begin()
        await play.connect()
        await play.update(1)
        disk = FullDisk()
        before = getattr(play.engine, "begin" if step == "transfer" else step)
        if step == "pause":
            disk.__enter__()
        else:

            async def filling(*arguments: object) -> None:
                await before(*arguments)
                disk.__enter__()

            setattr(play.engine, "begin" if step == "transfer" else step, filling)
        try:
            record = await play.update(2)
        finally:
            disk.__exit__()
        assert "cannot record the gateway's state" in record.reason
        assert (record.committed, record.fenced) == (False, step == "publish")
        if step != "publish":
            assert play.state() == (Phase.FAILED, 1, False)
        if step != "pause":
            setattr(play.engine, "begin" if step == "transfer" else step, before)
        assert (await play.update(3)).committed
        assert play.engine.calls == ["connect", *STEPS]
        await play.gateway.close()

    asyncio.run(run())


def test_a_pair_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    async def run() -> None:
        gateway = Gateway("127.0.0.1", 1, opened(tmp_path / "state"))
        with FullDisk(), pytest.raises(ControlError, match="cannot record"):
            await gateway.create(SPEC)
        assert gateway.pairs == {}
        pair = await gateway.create(SPEC)
        with FullDisk(), pytest.raises(ControlError, match="cannot record"):
            await gateway.join("main", B, EngineSpec(kind="worker", world_size=1))
        with FullDisk(), pytest.raises(ControlError, match="cannot record"):
            await gateway.leave("main", A)
        assert [i.name for i in pair.present] == [A]
        await gateway.close()

    asyncio.run(run())


def test_who_asks_a_gateway_that_stops_is_answered_by_its_next_life(tmp_path: Path) -> None:
    """Stopped in good order, while a rank waits for orders."""
    state, port = ("--state", str(tmp_path / "state")), free_port()
    with ThreadPoolExecutor(1) as beside:
        with running_gateway(*state, port=port) as (url, token):
            client = GatewayClient(url, token, outage=30.0)
            client.create_pair("main", 1, {A: {"kind": "worker", "world_size": 1}})
            before = client.orders("main", A, 0, 0.0)
            asking = beside.submit(client.orders, "main", A, 0, 20.0, before.boot)
        with running_gateway(*state, port=port, token=token):
            after = asking.result(30.0)
            assert after.boot != before.boot
            client.close()


CLOSED_AT_WORK = """
import sqlite3, sys, threading, time
from pathlib import Path
from weightcast.gateway.control.store import Store

rows = [("insert or replace into pairs values (?, ?)", (str(i), "x" * 200)) for i in range(2000)]
for turn in range(20):
    store = Store(Path(f"{sys.argv[1]}.{turn}"))
    store.open()

    def write():
        try:
            store._commit(rows)
        except sqlite3.ProgrammingError as error:
            assert "the state file is closed" in str(error)

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.0005 * turn)
    store.close()
    writer.join()
"""


def test_a_store_is_closed_only_after_what_is_being_written(tmp_path: Path) -> None:
    """Else SQLite's memory is gone under the thread that writes, and the process with it."""
    command = [sys.executable, "-c", CLOSED_AT_WORK, str(tmp_path / "state.db")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_rank_that_speaks_while_its_pair_is_deleted_leaves_the_file_readable(tmp_path: Path) -> None:
    """Its request had found the instance before."""

    async def run() -> None:
        store = Store(tmp_path / "state")
        store.open()
        gateway = Gateway("127.0.0.1", 1, store)
        engines = {"a": EngineSpec(kind="worker", world_size=1)}
        instance = (await gateway.create(PairSpec("main", trainer_world=1, instances=engines))).instance("a")
        await gateway.delete("main")
        store.save_soon(instance.saved())
        await asyncio.sleep(0.1)
        await gateway.close()

    asyncio.run(run())
    store = Store(tmp_path / "state")
    assert store.open() is None
    store.close()
